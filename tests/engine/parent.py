"""A program with a group, for tests that end it: ``python -m tests.engine.parent METHOD LOOP``.

Prints the workers' process ids, calls the method, and waits for it for ever.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from aioarena.engine import WorkerGroup
from tests.engine.objects import Recorder


async def main(method: str, loop: str) -> None:
    async with WorkerGroup(Recorder, 2, arena=None, reply_arena=None, loop=loop, grace=0.5) as group:  # type: ignore[arg-type]
        call = asyncio.create_task(group.call(method))
        await asyncio.sleep(0)  # it is sent
        print(*group.pids, flush=True)
        await call


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if sys.argv[2] == "uvloop" else None) as runner:
        runner.run(main(*sys.argv[1:]))
