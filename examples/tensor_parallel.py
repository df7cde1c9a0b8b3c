"""Tensor-parallel workers: each multiplies with its columns of a weight, and answers on a channel of its own.

Run it:     python examples/tensor_parallel.py
Expect:     one line for each step; the last says that the workers' parts make up the whole product. No GPU needed: on a
            GPU, `await channel.to_device(step["x"], f"cuda:{rank}")` takes the place of using x as it is.
"""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection

import torch

import aioarena

WORKERS, STEPS, FEATURES = 2, 3, 512


def weight() -> torch.Tensor:
    return torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(0))


def worker(handle: aioarena.Handle, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(work(handle, rank, pipe))


async def work(handle: aioarena.Handle, rank: int, pipe: Connection) -> None:
    shard = weight().tensor_split(WORKERS, dim=1)[rank]
    # Steps come in on a channel that all workers read; answers go out on one that this worker sends and the engine reads.
    async with aioarena.Receiver(handle, rank) as steps, aioarena.Sender(readers=1) as answers:
        pipe.send(answers.handle)
        async for step in steps:
            await answers.send({"step": step["step"], "y": step["x"] @ shard})


async def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(WORKERS)]
    async with aioarena.Sender(WORKERS) as steps:
        workers = [spawn.Process(target=worker, args=(steps.handle, rank, pipes[rank][1])) for rank in range(WORKERS)]
        for process in workers:
            process.start()
        await steps.wait_ready()
        handles = [await asyncio.to_thread(ours.recv) for ours, _ in pipes]
        answers = [aioarena.Receiver(handle, rank=0) for handle in handles]
        await asyncio.gather(*[channel.start() for channel in answers])
        for number in range(STEPS):
            x = torch.randn(8192, FEATURES)  # 16 MB
            await steps.send({"step": number, "x": x})
            parts = [(await channel.recv())["y"] for channel in answers]
            same = torch.allclose(torch.cat(parts, dim=1), x @ weight(), atol=1e-2)
            print(f"step {number}: {WORKERS} parts make up x @ weight: {same}")
        await asyncio.gather(*[channel.aclose() for channel in answers])
    for process in workers:
        await asyncio.to_thread(process.join)


if __name__ == "__main__":
    asyncio.run(main())
