"""A group of workers: their methods are called from one event loop, and their large results come back as views.

Run it:     python examples/worker_group.py
Expect:     what each worker makes of a picture, what it says when it cannot, and at the end that all have ended. No GPU
            needed.
"""

import asyncio

import torch

from aioarena.engine import WorkerGroup


class Worker:
    """Made in each worker; this module is imported there, so it starts nothing when it is."""

    def __init__(self, rank: int, size: int, scale: float) -> None:
        self.rank = rank
        self.size = size
        self.scale = scale

    def step(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale this worker's share of the rows."""
        if pixels.dim() != 2:
            raise ValueError(f"pixels have 2 dimensions, not {pixels.dim()}")
        return pixels.chunk(self.size)[self.rank] * self.scale


async def main() -> None:
    pixels = torch.ones(1000, 1000)
    async with WorkerGroup(Worker, 2, 3.0, name="engine") as group:
        for rank, part in enumerate(await group.call("step", pixels)):
            print(f"worker {rank}: {tuple(part.shape)}, mean {part.mean():.1f}")
        try:
            await group.call_one(1, "step", pixels.flatten())
        except ValueError as error:
            print(f"worker 1: {error}")
    print(f"done: {group}")


if __name__ == "__main__":
    asyncio.run(main())
