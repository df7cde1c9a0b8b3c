"""Programs that end in peculiar ways, for tests: ``python -m tests.engine.exits fork`` or ``forget``."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys

from aioarena import ArenaError
from aioarena.engine import WorkerGroup
from tests.engine.objects import Recorder


async def fork() -> None:
    async with WorkerGroup(Recorder, 2, arena=None, reply_arena=None) as group:
        child = os.fork()
        if not child:
            try:
                await group.call("see", 1)
            except ArenaError as error:
                print(f"in the child: {type(error).__name__}")
            atexit._run_exitfuncs()  # as any exit does, but for the end of the loop, whose epoll is the parent's, too
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print(f"in the parent: {await group.call('see', 1)}")


async def forget() -> None:
    group = WorkerGroup(Recorder, 2, arena=None, reply_arena=None, grace=0.1)
    await group.start()
    os.kill(group.pids[1], signal.SIGSTOP)
    print(*group.pids)


if __name__ == "__main__":
    asyncio.run({"fork": fork, "forget": forget}[sys.argv[1]]())
