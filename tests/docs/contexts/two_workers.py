"""A sender's ``main()`` that calls ``start_workers(handle)``, and a reader's ``work(handle, rank, device)``."""

import multiprocessing

# block 1

# block 2


def run(handle, rank):
    asyncio.run(work(handle, rank, "cpu"))


processes = []


def start_workers(handle):
    spawn = multiprocessing.get_context("spawn")
    for rank in range(2):
        processes.append(spawn.Process(target=run, args=(handle, rank)))
        processes[-1].start()


if __name__ == "__main__":
    asyncio.run(main())
    for process in processes:
        process.join()
        assert process.exitcode == 0
