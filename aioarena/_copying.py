"""Copying large memory off the event loop, in threads that share one copy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

# Bytes of one message that are copied on the loop. Handing a copy to a thread and back costs 64-112 us; 512 KiB take
# 11 us into warm memory and 235 us into untouched pages (`python -m aioarena bench copy`, 2-core x86-64 VM, 2026-11-30).
ON_LOOP_BYTES = 512 << 10

# Bytes of one step. Small enough that a cancelled copy ends soon (1-2 ms), large enough that waiting for the GIL after
# each step, up to its 5 ms switch interval when the loop is busy, stays a small part of a large copy.
STEP_BYTES = 8 << 20

# A few threads saturate the memory bus of any machine.
_MOST_THREADS = 4


def default_threads() -> tuple[int, int]:
    """Threads that share a copy: (at normal priority, at idle priority).

    One CPU of those this process may use is left to the loop, or its timers come late: with two busy copy threads on two
    cores a 1 ms timer was 3-5 ms late. Where that leaves fewer than three threads, one more helps at idle priority
    (SCHED_IDLE): it uses the last core only while nobody else wants it, and gives way to the loop at once. On two cores
    that halves the time of a 200 MiB copy (34 to 18 ms) at the same timer delay.
    """
    normal = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))
    return normal, int(normal < _MOST_THREADS - 1)


class CopyJob:
    """Steps that several threads work through together.

    Attributes:
        done: Set when every step is done, or dropped by :meth:`abort`. It does not wait for the threads: one that never
            got to run has nothing to wait for.
    """

    def __init__(self, pools: Sequence[ThreadPoolExecutor], steps: Sequence[Callable[[], object]]) -> None:
        self._steps = deque(steps)
        self._unfinished = len(steps)
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self.done: Future[None] = Future()
        for pool in pools[: len(steps)]:
            pool.submit(self._work)

    def _work(self) -> None:
        while self._steps:
            try:
                step: Callable[[], object] | None = self._steps.popleft()
            except IndexError:  # another thread took the last one
                return
            assert step is not None
            try:
                step()
            except BaseException as error:
                self._failure = error
            # The caller's memory is in there, and it is his again as soon as we say done.
            step = None
            self._finish(1)

    def _finish(self, count: int) -> None:
        with self._lock:
            self._unfinished -= count
            if self._unfinished:
                return
        if self._failure is not None:
            self.done.set_exception(self._failure)
        else:
            self.done.set_result(None)

    def abort(self) -> None:
        """Drop the steps that nobody has begun; those under way end by themselves."""
        dropped = 0
        while self._steps:
            with contextlib.suppress(IndexError):
                self._steps.popleft()
                dropped += 1
        if dropped:
            self._finish(dropped)


class CopyPool:
    """Threads for large copies and other blocking work of one channel end, started when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._normal, self._idle = default_threads()
        self._executor: ThreadPoolExecutor | None = None
        self._helpers: ThreadPoolExecutor | None = None

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads at normal priority."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._normal, thread_name_prefix=f"aioarena-{self._name}")
        return self._executor

    def start(self, steps: Sequence[Callable[[], object]]) -> CopyJob:
        """Begin a copy."""
        if self._idle and self._helpers is None:
            self._helpers = ThreadPoolExecutor(
                self._idle, thread_name_prefix=f"aioarena-{self._name}-helper", initializer=_yield_to_everyone
            )
        pools = [self.executor] * self._normal + [self._helpers] * self._idle
        return CopyJob([pool for pool in pools if pool is not None], steps)

    def close(self) -> None:
        """Let the threads end; nothing of ours is running in them any more, so this does not wait for long."""
        for executor in (self._executor, self._helpers):
            if executor is not None:
                executor.shutdown(wait=True)
        self._executor = self._helpers = None


def _yield_to_everyone() -> None:
    """Give the calling thread idle priority. Where that is forbidden (seccomp), it only helps at normal priority."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


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
    outcome = next(filter(None, [cancelled, *[future.exception() for future in futures]]), None)
    if outcome is not None:
        try:
            raise outcome
        finally:
            # Or the error's traceback and this frame keep each other, and with them the caller's memory, until collected.
            del outcome, cancelled, futures
