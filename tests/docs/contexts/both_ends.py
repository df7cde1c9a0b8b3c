"""``chan`` is both ends of a channel at once; ``pixels`` is a tensor."""

import asyncio
import types

import torch

import aioarena


async def main():
    pixels = torch.rand(1024, 1176)
    async with aioarena.Sender(1) as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        chan = types.SimpleNamespace(send=sender.send, recv=receiver.recv)
        # block
        assert torch.equal(step["pixel_values"], pixels)


asyncio.run(main())
