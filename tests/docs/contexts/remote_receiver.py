"""``handle`` of a sender that closes once the reader at rank 4, a remote one, has attached."""

import asyncio

import aioarena


async def close_soon(sender):
    while sender.statistics().readers[4].state != "joined":
        await asyncio.sleep(0.001)
    await sender.aclose()


async def main():
    sender = aioarena.Sender(4, remote_readers=1, bind="tcp://127.0.0.1:0", arena=None)
    await sender.start()
    closing = asyncio.create_task(close_soon(sender))
    handle = sender.handle
    # block
    await closing


asyncio.run(main())
