"""A program with a group, for tests that end it: ``python -m tests.engine.parent METHOD LOOP GRACE``.

Calls the method, prints the workers' process ids, and waits for ever.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import uvloop

from aioarena.engine import WorkerGroup
from tests.engine.objects import Recorder


async def main(method: str, loop: Any, grace: float) -> None:
    async with WorkerGroup(Recorder, 2, arena=None, reply_arena=None, loop=loop, grace=grace) as group:
        call = asyncio.create_task(group.call(method))
        await asyncio.sleep(0)  # it is sent
        print(*group.pids, flush=True)
        await call
        await asyncio.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if sys.argv[2] == "uvloop" else None) as runner:
        runner.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
