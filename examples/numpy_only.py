"""Numpy arrays, without a line of torch: they travel through the arena as tensors do.

Run it:     python examples/numpy_only.py
Expect:     what the reader sees of each array, then "all arrays arrived as they were sent".
"""

import asyncio
import multiprocessing

import numpy as np

import aioarena


def arrays() -> dict[str, np.ndarray]:
    """A frame of video, a matrix in Fortran order, a table with named columns, and every third row of something."""
    rng = np.random.default_rng(seed=7)
    table = np.zeros(100_000, dtype=[("token", "u4"), ("logprob", "f4")])
    table["token"] = rng.integers(0, 50_000, len(table))
    return {
        "frame": rng.integers(0, 256, (1080, 1920, 3), dtype=np.uint8),
        "matrix": np.asfortranarray(rng.random((1000, 500))),
        "table": table,
        "every third": rng.random((900, 1000))[::3],
    }


def worker(handle: aioarena.Handle) -> None:
    asyncio.run(read(handle))


async def read(handle: aioarena.Handle) -> None:
    async with aioarena.Receiver(handle, rank=0) as channel:
        received = await channel.recv()
        for name, expected in arrays().items():
            array = received[name]
            order = "C" if array.flags.c_contiguous else "Fortran"
            print(f"{name}: {array.shape}, {array.dtype}, in {order} order, {array.nbytes / 1e6:.1f} MB")
            # The same memory for all readers: copy before writing, or open the Receiver with private=True.
            assert np.array_equal(array, expected)
        print("all arrays arrived as they were sent")


async def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    async with aioarena.Sender(readers=1) as channel:
        process = spawn.Process(target=worker, args=(channel.handle,))
        process.start()
        await channel.send(arrays())
    await asyncio.to_thread(process.join)


if __name__ == "__main__":
    asyncio.run(main())
