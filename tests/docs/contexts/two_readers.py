"""A sender ``chan`` and its two ``readers``, and ``pixels``; ``received`` in the end."""

import asyncio

import torch

import aioarena


async def main():
    pixels = torch.rand(1024, 1024)
    chan = aioarena.Sender(2)
    readers = [aioarena.Receiver(chan.handle, rank) for rank in range(2)]
    async with chan, readers[0], readers[1]:
        # block
        assert all(torch.equal(message["pixel_values"], pixels) for message in received)


asyncio.run(main())
