"""A reader that keeps received tensors for later steps, and what that means for the arena.

Run it:     python examples/retain_tensors.py
Expect:     slots in use rising by four with each step while the reader keeps the tensors, and 0 after it let go of them.
            Nothing has to be received or called for that: dropping the last reference is enough.
"""

import asyncio
import multiprocessing

import torch

import aioarena

STEPS = 5
ARENA = aioarena.ArenaConfig(slots=64, slot_bytes=1 << 20)  # 64 MiB


def worker(handle: aioarena.Handle) -> None:
    asyncio.run(read(handle))


async def read(handle: aioarena.Handle) -> None:
    kept = []
    async with aioarena.Receiver(handle, rank=0) as channel:
        async for step in channel:
            if step["command"] == "keep":
                # A slice is enough to hold the whole buffer: it is the same storage. clone() what you need for long.
                kept.append(step["embeddings"][:10])
            else:
                # What is kept is as it was sent, whatever was sent since.
                assert [int(tensor[0, 0]) for tensor in kept] == list(range(STEPS))
                kept.clear()
            del step  # or the name holds it until the next one arrives


async def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    async with aioarena.Sender(readers=1, arena=ARENA) as channel:
        process = spawn.Process(target=worker, args=(channel.handle,))
        process.start()
        for number in range(STEPS):
            embeddings = torch.full((1024, 1024), float(number))  # 4 MiB, so four slots
            await channel.send({"command": "keep", "embeddings": embeddings})
            print(f"step {number}: {channel.statistics().slots_used} of {ARENA.slots} slots in use")
        await channel.send({"command": "drop"})
        while channel.statistics().slots_used:  # noqa: ASYNC110 - to see it, nobody has to wait for it
            await asyncio.sleep(0.01)
    await asyncio.to_thread(process.join)
    print(f"dropped: {channel.statistics().slots_used} slots in use, the reader's exit code is {process.exitcode}")


if __name__ == "__main__":
    asyncio.run(main())
