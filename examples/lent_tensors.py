"""A preprocessor that writes straight into the arena, so that sending its work copies nothing.

Run it:     python examples/lent_tensors.py
Expect:     one line for each image, and at the end that all bytes were sent from where they were made. Two buffers take
            turns: while the readers look at one, the next image is made in the other.
"""

import asyncio
import multiprocessing

import torch

import aioarena

READERS = 2
IMAGES = 6
SHAPE = (3, 1024, 1024)


def worker(handle: aioarena.Handle, rank: int) -> None:
    asyncio.run(read(handle, rank))


async def read(handle: aioarena.Handle, rank: int) -> None:
    async with aioarena.Receiver(handle, rank=rank) as channel:
        number = 0
        async for step in channel:
            # What was sent, although the sender makes the next images meanwhile: it asks before it writes.
            assert (step["pixels"] == number).all()
            number += 1
            del step  # lets go of the buffer


def preprocess(number: int, out: torch.Tensor) -> None:
    """Stands for decoding, resizing and normalising."""
    out.fill_(number)


async def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    async with aioarena.Sender(readers=READERS) as channel:
        processes = [spawn.Process(target=worker, args=(channel.handle, rank)) for rank in range(READERS)]
        for process in processes:
            process.start()
        buffers = [await channel.empty(SHAPE, torch.bfloat16) for _ in range(2)]
        for number in range(IMAGES):
            pixels = buffers[number % 2]
            await channel.reclaim(pixels)  # until no reader needs what was in it before
            await asyncio.to_thread(preprocess, number, pixels)
            await channel.send({"step": number, "pixels": pixels})
            print(f"image {number}: sent from buffer {number % 2}")
        statistics = channel.statistics()
    for process in processes:
        await asyncio.to_thread(process.join)
    made = statistics.lent_bytes == statistics.arena_bytes == IMAGES * pixels.nbytes
    codes = [process.exitcode for process in processes]
    print(f"sent {statistics.lent_bytes} bytes from where they were made: {made}, the readers' exit codes are {codes}")


if __name__ == "__main__":
    asyncio.run(main())
