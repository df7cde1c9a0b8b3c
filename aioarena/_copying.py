"""Copying large memory off the event loop, in threads that share one copy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

# Bytes of one message that are copied on the loop. Handing a copy to a thread and back costs about 60 us here; 512 KiB
# take 12 us into warm memory and about 200 us into untouched pages (2-core x86-64 VM, `aioarena bench copy`).
ON_LOOP_BYTES = 512 << 10

# Bytes of one step. Small enough that a cancelled copy ends soon (1-2 ms), large enough that waiting for the GIL after
# each step, up to its 5 ms switch interval when the loop is busy, stays a small part of a large copy.
STEP_BYTES = 16 << 20

# A few threads saturate the memory bus of any machine; one core is left to the loop, or its timers come late.
_MOST_THREADS = 4


def default_threads() -> int:
    """Threads that share a copy: one less than the CPUs this process may use, between 1 and 4."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))


class CopyJob:
    """Steps that several threads work through together.

    Attributes:
        futures: One per thread; all done when the copy is, or when it stopped after :meth:`abort`.
    """

    def __init__(self, pool: ThreadPoolExecutor, threads: int, steps: Sequence[Callable[[], object]]) -> None:
        # One iterator for all threads: next() on it is atomic, so whoever is free takes the next step.
        self._steps: Iterator[Callable[[], object]] = iter(steps)
        self._aborted = False
        self.futures: list[Future[None]] = [pool.submit(self._work) for _ in range(min(threads, len(steps)))]

    def _work(self) -> None:
        for step in self._steps:
            if self._aborted:
                return
            step()

    def abort(self) -> None:
        """Stop after the steps that are under way."""
        self._aborted = True


class CopyPool:
    """Threads for large copies and other blocking work of one channel end, started when first needed."""

    def __init__(self, name: str, threads: int | None = None) -> None:
        self.threads = default_threads() if threads is None else threads
        self._name = name
        self._executor: ThreadPoolExecutor | None = None

    @property
    def executor(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix=f"aioarena-{self._name}")
        return self._executor

    def start(self, steps: Sequence[Callable[[], object]]) -> CopyJob:
        return CopyJob(self.executor, self.threads, steps)

    def close(self) -> None:
        """Let the threads end; nothing of ours is running in them any more, so this does not wait for long."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None


async def join(futures: list[asyncio.Future[None]], abort: Callable[[], None] | None = None) -> None:
    """Wait for threads that use the caller's memory and our spans.

    When cancelled, tell them to stop, wait until they have let go of that memory, and only then say so.
    """
    cancelled: asyncio.CancelledError | None = None
    pending = set(futures)
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            if abort is not None:
                abort()
            pending = {future for future in futures if not future.done()}
    failures = [future.exception() for future in futures]
    if cancelled is not None:
        raise cancelled
    for failure in failures:
        if failure is not None:
            raise failure
