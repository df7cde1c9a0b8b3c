"""A class ``Worker(rank, size, path)``, and a part of a coroutine that has a group of them called."""

import asyncio

import torch


def load_shard(path, rank, size):
    return lambda batch, pixel_values: batch.sum() + (0 if pixel_values is None else pixel_values.sum())


# block 1


async def main():
    batch, pixels = torch.ones(2), torch.ones(300_000)
    # block 2
    assert [float(each) for each in results] == [300_002.0] * 2
    assert float(result) == 2.0


if __name__ == "__main__":
    asyncio.run(main())
