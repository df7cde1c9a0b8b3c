"""Copying large memory off the event loop, in threads that share one copy."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple

from aioarena.exceptions import ClosedError

# Bytes of one message that are copied on the loop. Handing a copy to a thread and back costs 64-112 us; 512 KiB take
# 11 us into warm memory and 235 us into untouched pages (`python -m aioarena bench copy`, 2-core x86-64 VM, 2026-11-30).
ON_LOOP_BYTES = 512 << 10

# Bytes of one step. After each, a copy thread lets others have the CPU. On two cores with two copy threads a 1 ms timer of
# the loop was at most 1-2 ms late with steps of 2 MiB and 4-9 ms with one step per thread, at the same time for 200 MiB.
STEP_BYTES = 2 << 20

# After a step that had to wait longer than this for the GIL or the CPU, the next one is twice as large, up to _MOST_BYTES.
# A loop that computes gives the GIL away every 5 ms (sys.getswitchinterval): with steps of 2 MiB alone a copy of 200 MiB
# took 913 ms beside it, with growing ones 306 ms.
_LONG_WAIT = 1e-3
_MOST_BYTES = 64 << 20

# A few threads saturate the memory bus of any machine.
_MOST_THREADS = 4


def default_threads() -> int:
    """Threads that share a copy: one per CPU this process may use, and at most four.

    All at normal priority. One that yields to everybody (SCHED_IDLE) copies as quickly on an idle machine, but where other
    processes compute it may be put aside for seconds while it holds the GIL, and the event loop waits with it.
    """
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


class Portion(NamedTuple):
    """A part of a copy that threads may divide among them.

    Attributes:
        items: Number of items: bytes, rows, whatever the source is divided by.
        unit: Bytes of an item, at least 1.
        copy: Copies items ``start`` to ``stop``, releasing the GIL meanwhile. Ranges may be copied in any order, in any
            threads.
    """

    items: int
    unit: int
    copy: Callable[[int, int], object]

    def copy_all(self) -> None:
        """Copy it in the calling thread."""
        self.copy(0, self.items)


class CopyJob:
    """Portions that several threads work through together.

    Attributes:
        done: Set when everything is copied, or what was under way when :meth:`abort` was called. It does not wait for
            threads that never got to run.
    """

    def __init__(self, pool: Executor, threads: int, portions: Iterable[Portion]) -> None:
        self._portions = deque(portion for portion in portions if portion.items)
        self._next = 0  # item of the first portion
        self._under_way = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self.done: Future[None] = Future()
        if not self._portions:
            self.done.set_result(None)
            return
        steps = -(-sum(portion.items * portion.unit for portion in self._portions) // STEP_BYTES)
        for number in range(min(threads, steps)):
            try:
                pool.submit(self._work)
            except RuntimeError:  # no thread to be had
                if number:
                    break  # those that there are will do
                # The work stays in the pool's queue, for a thread that comes later.
                self._portions.clear()
                raise

    def _work(self) -> None:
        nbytes = STEP_BYTES
        while step := self._take(nbytes):
            began, used = time.perf_counter(), time.thread_time()
            try:
                for copy, start, stop in step:
                    copy(start, stop)
            except BaseException as error:
                self._failure = error
                self.abort()
            waited = time.perf_counter() - began - (time.thread_time() - used)
            nbytes = min(_MOST_BYTES, nbytes * 2) if waited > _LONG_WAIT else max(STEP_BYTES, nbytes // 2)
            # The caller's memory is in there, and it is his again as soon as we say done.
            copy = step = None  # type: ignore[assignment]
            self._finish()
            os.sched_yield()

    def _take(self, nbytes: int) -> list[tuple[Callable[[int, int], object], int, int]]:
        """Ranges of about this many bytes that nobody has begun; none if there are no more."""
        step: list[tuple[Callable[[int, int], object], int, int]] = []
        with self._lock:
            while self._portions and nbytes > 0:
                items, unit, copy = self._portions[0]
                start, stop = self._next, min(items, self._next + max(1, nbytes // unit))
                step.append((copy, start, stop))
                nbytes -= (stop - start) * unit
                self._next = stop
                if stop == items:
                    self._portions.popleft()
                    self._next = 0
            self._under_way += bool(step)
        return step

    def _finish(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way or self._portions:
                return
        self._say_done()

    def _say_done(self) -> None:
        if self._failure is not None:
            self.done.set_exception(self._failure)
        else:
            self.done.set_result(None)

    def abort(self) -> None:
        """Drop what nobody has begun; what is under way ends by itself."""
        with self._lock:
            dropped = bool(self._portions)
            self._portions.clear()
            if self._under_way or not dropped:
                return
        self._say_done()


class CopyPool:
    """Threads for large copies and other blocking work of one channel end, started when first needed.

    Args:
        name: For the names of the threads.
        threads: How many; by default what :func:`default_threads` says.
    """

    def __init__(self, name: str, threads: int | None = None) -> None:
        self._name = name
        self._threads = default_threads() if threads is None else threads
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[CopyJob] = []
        self._closed = False

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads.

        Raises:
            ClosedError: They have ended.
        """
        if self._closed:
            raise ClosedError(f"the channel end with these threads ({self._name}) was closed meanwhile")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix=f"aioarena-{self._name}")
        return self._executor

    def start(self, portions: Iterable[Portion]) -> CopyJob:
        """Begin a copy."""
        job = CopyJob(self.executor, self._threads, portions)
        self._jobs = [*(job for job in self._jobs if not job.done.done()), job]
        return job

    def close(self) -> None:
        """Let the threads end. Copies are aborted, so this waits for the step under way at most."""
        self._closed = True
        for job in self._jobs:
            job.abort()
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
    outcome = next(filter(None, [cancelled, *[future.exception() for future in futures]]), None)
    if outcome is not None:
        try:
            raise outcome
        finally:
            # Or the error's traceback and this frame keep each other, and with them the caller's memory, until collected.
            del outcome, cancelled, futures
