"""``own_address()`` is one of this host."""

import asyncio

import aioarena


def own_address():
    return "127.0.0.1"


async def main():
    # block
    assert chan.handle.local_readers == 4


asyncio.run(main())
