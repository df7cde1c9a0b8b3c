"""Ray actors as readers: an async actor and a plain one, of which one dies and is restarted by Ray.

Run it:     pip install ray==2.60.0 && python examples/ray_workers.py
Expect:     a line for each step, in between that rank 1 was lost, and at the end what each rank received: rank 1 what was
            sent before it died is gone with it, what came after it was restarted is there. Takes 20 seconds, most of them
            Ray's.
"""

import asyncio
import os
import signal

import ray
import torch

import aioarena
from aioarena import blocking

STEPS, FATAL_STEP = 6, 2


# What Ray does with an actor that dies: it makes a new one and calls `work` again, which attaches at the same rank.
@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class AsyncWorker:
    async def work(self, handle: aioarena.Handle, rank: int) -> list[int]:
        received = []
        async with aioarena.Receiver(handle, rank) as steps:
            async for step in steps:
                assert step["x"].sum() == step["x"].numel()  # read in place, in shared memory
                received.append(step["step"])
        return received


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class PlainWorker:
    def work(self, handle: aioarena.Handle, rank: int) -> list[int]:
        with blocking.Receiver(handle, rank) as steps:
            return [step["step"] for step in steps]


async def send(steps: aioarena.Sender, message: object) -> None:
    """Send, waiting for ranks that are vacant to be taken again."""
    told = False
    while True:
        try:
            return await steps.send(message)
        except aioarena.ReaderLostError as error:
            if not told:
                print(f"rank {error.rank} is lost (pid {error.pid}), waiting for Ray to restart it")
                told = True
            await asyncio.sleep(0.05)


async def main() -> None:
    async with aioarena.Sender(readers=2) as steps:
        workers = [AsyncWorker.remote(), PlainWorker.remote()]
        # The handle is an argument like any other.
        results = [worker.work.remote(steps.handle, rank) for rank, worker in enumerate(workers)]
        for number in range(STEPS):
            await send(steps, {"step": number, "x": torch.ones(1_000_000)})
            print(f"step {number} sent")
            if number == FATAL_STEP:
                os.kill(steps.statistics().readers[1].pid, signal.SIGKILL)
                while steps.statistics().readers[1].state == "joined":  # noqa: ASYNC110 - until it is noticed
                    await asyncio.sleep(0.01)
    for rank, result in enumerate(results):
        print(f"rank {rank} received steps {await result}")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
