"""``chan`` is a sender, ``preprocess(image, out)`` fills a tensor, and a reader takes what comes."""

import asyncio

import torch

import aioarena


def preprocess(image, out):
    out[...] = image


async def read(chan):
    async for step in chan:
        assert float(step["pixel_values"].flatten()[-1]) == 1.0
        del step


async def main():
    image = torch.ones(())
    async with aioarena.Sender(1) as chan, aioarena.Receiver(chan.handle, 0) as receiver:
        reading = asyncio.create_task(read(receiver))
        # block
        assert chan.statistics().lent_bytes > 0
        await chan.aclose()
        await reading


asyncio.run(main())
