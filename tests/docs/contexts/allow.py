"""``handle`` and ``rank`` of a reader, a module ``mypackage.messages``, and a class ``Request``."""

import asyncio
import sys
import types

import aioarena

sys.modules["mypackage"] = types.ModuleType("mypackage")
sys.modules["mypackage.messages"] = types.ModuleType("mypackage.messages")


class Request:
    pass


async def main():
    async with aioarena.Sender(1) as sender:
        handle, rank = sender.handle, 0
        # block


asyncio.run(main())
