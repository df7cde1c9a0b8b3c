"""One sender and two readers: a tensor of 64 MB and some small steps.

Run it:     python examples/quickstart.py
Expect:     a line from each reader for each step, and their exit codes at the end. No GPU needed, takes a few seconds.
"""

import asyncio
import multiprocessing

import torch

import aioarena

READERS = 2


def worker(handle: aioarena.Handle, rank: int) -> None:
    """What runs in a reader's process."""
    asyncio.run(read(handle, rank))


async def read(handle: aioarena.Handle, rank: int) -> None:
    async with aioarena.Receiver(handle, rank) as channel:
        async for step in channel:  # ends when the sender closes
            if "pixels" in step:
                # No copy was made for this reader: the tensor looks at memory that all of them share.
                print(
                    f"reader {rank}: step {step['step']}, pixels {tuple(step['pixels'].shape)}, {step['pixels'].sum():.0f}"
                )
            else:
                print(f"reader {rank}: step {step['step']}")


async def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    async with aioarena.Sender(READERS) as channel:
        workers = [spawn.Process(target=worker, args=(channel.handle, rank)) for rank in range(READERS)]
        for process in workers:
            process.start()
        await channel.send({"step": 0})  # waits until both have attached
        await channel.send({"step": 1, "pixels": torch.ones(16, 1_000_000)})
        await channel.send({"step": 2})
    for process in workers:
        await asyncio.to_thread(process.join)
    print(f"done, the readers' exit codes are {[process.exitcode for process in workers]}")


if __name__ == "__main__":
    asyncio.run(main())
