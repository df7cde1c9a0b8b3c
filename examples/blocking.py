"""A program of threads: its workers and its main thread have no event loop.

Run it:     python examples/blocking.py
Expect:     a line from each worker for each batch, and at the end what they made of it. No GPU needed.
"""

import multiprocessing
from multiprocessing.connection import Connection

import torch

import aioarena
from aioarena import blocking

WORKERS, BATCHES = 2, 3


def worker(handle: aioarena.Handle, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    total = 0.0
    with blocking.Receiver(handle, rank) as channel:
        for batch in channel:  # ends when the sender closes
            total += float(batch["x"].sum())
            print(f"worker {rank}: batch {batch['number']}")
    pipe.send(total)


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(WORKERS)]
    with blocking.Sender(WORKERS) as channel:
        workers = [spawn.Process(target=worker, args=(channel.handle, rank, pipes[rank][1])) for rank in range(WORKERS)]
        for process in workers:
            process.start()
        try:
            channel.wait_ready(timeout=0.001)
        except TimeoutError as error:  # aioarena.TimedOutError, which is one
            print(error)
        for number in range(BATCHES):
            channel.send({"number": number, "x": torch.ones(1_000_000)}, timeout=60)
    print(f"sums: {[ours.recv() for ours, _ in pipes]}")
    for process in workers:
        process.join()


if __name__ == "__main__":
    main()
