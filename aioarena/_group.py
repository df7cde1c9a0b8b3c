"""What a :class:`aioarena.engine.WorkerGroup` is made of: calls under way, and workers as their parent sees them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterable
from multiprocessing import process as _processes
from multiprocessing import util as _util  # noqa: F401 - see end_all
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

from aioarena import _worker
from aioarena._asyncio import wake
from aioarena._types import Handle
from aioarena._worker import Failure, WorkerOptions
from aioarena.receiver import Receiver

# Seconds that reaping a dead process may take: with forkserver, until the server passes its exit code on. A guess.
_REAPING = 1.0


class Call:
    """A call that was sent, and what has come of it.

    Attributes:
        done: Set when there is nothing more to wait for.
        outcomes: The replies, by rank: results and failures.
        missing: Ranks that have not replied.
        failed: Ranks that raised.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ranks: Iterable[int], grace: float) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.outcomes: dict[int, Any] = {}
        self.missing = set(ranks)
        self.failed: set[int] = set()
        self._loop = loop
        self._grace = grace
        self._timer: asyncio.TimerHandle | None = None

    def answer(self, rank: int, outcome: Any) -> None:
        if self.done.done():
            return  # cancelled, or given up
        self.outcomes[rank] = outcome
        self.missing.discard(rank)
        if isinstance(outcome, Failure):
            self.failed.add(rank)
            if self._timer is None:
                # The others may be waiting for this one, in a collective operation, for ever.
                self._timer = self._loop.call_later(self._grace, self.finish)
        if not self.missing:
            self.finish()

    def finish(self) -> None:
        wake(self.done)

    def drop(self) -> None:
        """Let go of the replies: those that come are dropped, too."""
        self.done.cancel()
        self.outcomes = {}
        if self._timer is not None:
            self._timer.cancel()


class Worker:
    """A worker process, seen from its parent.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        grace: Seconds that it has to end when it is told to.
        ended: Set when it is dead, and reaped.
        exit_code: As ``multiprocessing`` counts, negative for a signal; None while it lives, or if somebody else reaped it.
        replies: Where its replies come in, once it has attached.
        pending: Calls whose replies are to come, with their numbers, in that order.
        pump: The task that takes the replies.
    """

    def __init__(self, rank: int, process: BaseProcess, pidfd: int, pipe: Connection[Any, Any], grace: float = 0.0) -> None:
        assert process.pid is not None
        self.rank = rank
        self.grace = grace
        self.pid = process.pid
        self.ended = asyncio.Event()
        self.exit_code: int | None = None
        self.replies: Receiver | None = None
        self.pending: deque[tuple[int, Call]] = deque()
        self.pump: asyncio.Task[None] | None = None
        self._process = process
        self._pidfd = pidfd
        self._pipe = pipe
        self._greeted: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        _living.add(self)

    @classmethod
    def start(cls, context: Any, handle: Handle, options: WorkerOptions) -> Self:
        """Start a process. Any thread may call."""
        ours, theirs = context.Pipe(duplex=False)
        try:
            # A daemon, so that it does not keep this process from ending where nobody closes the group.
            process = context.Process(
                target=_worker.main, args=(handle, options, theirs), name=f"aioarena-{options.name}", daemon=True
            )
            process.start()
            try:
                # Only we reap our child, so the pid is its own. If a fork server has reaped it by now, this raises.
                return cls(options.rank, process, os.pidfd_open(process.pid), ours, options.grace)
            except BaseException:
                process.kill()
                process.join()
                raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def describe(self) -> str:
        return f"worker {self.rank} (pid {self.pid})"

    def describe_end(self) -> str:
        if self.exit_code is None:
            return "ended"
        if self.exit_code >= 0:
            return f"ended with code {self.exit_code}"
        try:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:  # a real-time signal
            return f"was killed by signal {-self.exit_code}"

    def watch(self) -> None:
        """Notice its end, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._pidfd)
        self._process.join(_REAPING)
        self.exit_code = self._process.exitcode
        self.ended.set()
        self._on_pipe()

    def _on_pipe(self) -> None:
        if self._greeted is not None:
            wake(self._greeted)

    async def greeting(self) -> Handle | Failure | None:
        """The handle of its replies, once it has attached; what kept it from that; or None if it ended."""
        assert self._loop is not None
        fd = self._pipe.fileno()
        if not self.ended.is_set():
            self._greeted = self._loop.create_future()
            self._loop.add_reader(fd, self._on_pipe)
            try:
                await self._greeted
            finally:
                self._loop.remove_reader(fd)
        os.set_blocking(fd, True)  # uvloop leaves it otherwise
        with self._pipe, contextlib.suppress(EOFError, OSError):
            if self._pipe.poll():
                greeting: Handle | Failure = self._pipe.recv()
                return greeting
        return None

    def answer(self, number: int | None, outcome: Any) -> None:
        """Hand on a reply. None as number stands for that of the reply that is due."""
        # Failures to unpickle a call come also from workers that it was not for.
        if self.pending and number in (self.pending[0][0], None):
            self.pending.popleft()[1].answer(self.rank, outcome)

    def signal(self, number: int) -> None:
        if self in _living and not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def dispose(self) -> None:
        """Free everything of a process that has ended."""
        if self.pump is not None:
            await asyncio.wait([self.pump])  # the channel of a dead process ends
        if self.replies is not None:
            await self.replies.aclose()
        _living.discard(self)
        os.close(self._pidfd)
        self._pipe.close()
        self._process.join(_REAPING)
        try:
            self._process.close()
        except ValueError:  # somebody else has reaped it, so multiprocessing takes it for alive
            self.forget()

    def forget(self) -> None:
        """Keep multiprocessing from ending the process, by its id, when this process exits."""
        getattr(_processes, "_children", set()).discard(self._process)

    def has_ended(self, timeout: float) -> bool:
        """Wait, without a loop, whether it ends within so many seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(min(timeout, 1e6) * 1e3))


# Workers of this process, not of one that forked it, whose groups are not closed, or not yet.
_living: set[Worker] = set()


def end_all() -> None:
    """End the workers of groups that nobody closed, at the exit of this process.

    What multiprocessing does with daemons is not enough: it waits for ever for one that does not listen, e.g. because it
    is stopped. It runs after this, since it was imported before.
    """
    for worker in _living:
        worker.signal(signal.SIGTERM)
    began = time.monotonic()
    for worker in _living:
        if not worker.has_ended(max(0.0, began + worker.grace - time.monotonic())):
            worker.signal(signal.SIGKILL)


def _after_fork_in_child() -> None:
    # Else the exit of the child would end its parent's workers.
    for worker in _living:
        worker.forget()
    _living.clear()


atexit.register(end_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
