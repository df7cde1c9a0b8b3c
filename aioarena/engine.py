"""Worker processes of an engine, whose methods its event loop calls.

:class:`WorkerGroup` starts processes, has an object made in each, and calls the objects' methods: in all workers, or in
one. Calls go out on one channel that all workers read, results come back on a channel of each worker, so large tensors
travel through arenas both ways. When one worker dies, everything that was asked of the group fails at once, and says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Callable, Coroutine
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from aioarena import _worker
from aioarena._asyncio import State
from aioarena._group import Call, Worker
from aioarena._platform.memory import sweep
from aioarena._types import ArenaConfig
from aioarena._worker import Failure, WorkerOptions, WorkerTraceback
from aioarena.exceptions import (
    ArenaError,
    ClosedError,
    DecodeError,
    EndOfChannel,
    InternalError,
    ReaderLostError,
    SenderLostError,
    WorkerError,
    WorkerLostError,
    WrongContextError,
)
from aioarena.receiver import Receiver
from aioarena.sender import Sender

__all__ = ["WorkerError", "WorkerGroup", "WorkerLostError", "receiver"]

logger = logging.getLogger("aioarena")

# Of each worker's channel of replies. 256 MiB, a guess: results are smaller than arguments, and there are many workers.
_REPLY_ARENA = ArenaConfig(slots=4096)


def receiver() -> Receiver:
    """In a worker, the receiver on which its calls come: for ``to_device`` and ``record_stream`` of arguments.

    Raises:
        WrongContextError: This process is not a worker.
    """
    if _worker.calls is None:
        raise WrongContextError("this process is not a worker of a WorkerGroup")
    return _worker.calls


class WorkerGroup:
    """Worker processes, each with an object whose methods are called from here.

    The constructor reserves memory; ``async with`` (or :meth:`start` and :meth:`aclose`) starts the processes and binds the
    group to the running event loop. All calls belong on that loop. As with any process that is spawned, the main module
    must be importable without starting anything: put that behind ``if __name__ == "__main__"``. Workers are daemons in the
    sense of ``multiprocessing``: they end with this process, and cannot start processes with it themselves. When this
    process exits without having closed the group, they are terminated, and killed after ``grace``.

    Calls are executed by each worker in the order in which they were made, one at a time: plain functions on the worker's
    event loop, coroutines as its task. Many may be under way; a worker takes the next one as soon as it has replied.

    Large tensors and arrays in arguments and results are views of shared memory: treat them as read-only, and clone what
    you keep for long. See :class:`aioarena.Receiver`.

    Args:
        factory: Called in each worker as ``factory(rank, size, *args)`` for the object; may be a coroutine function. It
            must pickle, as a class or function of a module does.
        size: How many workers, with ranks 0 to ``size - 1``.
        args: More arguments for the factory. They go through the arena like those of calls.
        name: For logs; made up by default.
        arena: Of the channel of calls, or None to do without: see :class:`aioarena.Sender`.
        reply_arena: Of each worker's channel of replies, 256 MiB by default. Larger results take more copies.
        wake: How whoever waits is woken: see :class:`aioarena.Sender`.
        method: How processes are started: ``"spawn"``, or ``"forkserver"``, which is quicker with many workers once
            ``multiprocessing.set_forkserver_preload`` names what they import.
        loop: The workers' event loop.
        grace: Seconds: for workers to finish what was sent when the group closes, then to end when they are told to, before
            they are killed; for the other workers to reply once one has raised; and for workers to outlive this process.

    Attributes:
        name: For logs.
        size: How many workers there are.
        channel: The sender of the calls, for ``empty`` and its kin and for ``statistics``. Send nothing on it.

    Raises:
        ValueError, TypeError: An argument makes no sense.
        NoSpaceError: There is not enough memory for the channel of calls.
    """

    name: str
    size: int
    channel: Sender

    def __init__(
        self,
        factory: Callable[..., Any],
        size: int,
        *args: Any,
        name: str | None = None,
        arena: ArenaConfig | None = ArenaConfig(),  # noqa: B008 - frozen
        reply_arena: ArenaConfig | None = _REPLY_ARENA,
        wake: Literal["zmq", "pipe"] = "pipe",
        method: Literal["spawn", "forkserver"] = "spawn",
        loop: Literal["asyncio", "uvloop"] = "asyncio",
        grace: float = 10.0,
    ) -> None:
        if not callable(factory):
            raise TypeError(f"factory must be callable, not {type(factory).__name__}")
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"size must be an int, not {type(size).__name__}")
        if size < 1:
            raise ValueError(f"size must be at least 1, not {size}")
        if reply_arena is not None and not isinstance(reply_arena, ArenaConfig):
            raise TypeError(f"reply_arena must be an ArenaConfig or None, not {type(reply_arena).__name__}")
        if method not in ("spawn", "forkserver"):
            raise ValueError(f'method must be "spawn" or "forkserver", not {method!r}')
        if loop not in ("asyncio", "uvloop"):
            raise ValueError(f'loop must be "asyncio" or "uvloop", not {loop!r}')
        if not isinstance(grace, int | float) or isinstance(grace, bool):
            raise TypeError(f"grace must be a number, not {type(grace).__name__}")
        if not grace >= 0:  # NaN neither
            raise ValueError(f"grace must not be negative, not {grace}")
        self.channel = Sender(size, name=name, arena=arena, wake=wake, linger=grace)
        self.name = self.channel.handle.name
        self.size = size
        self._making: tuple[Any, ...] = (factory, *args)
        self._reply_arena = reply_arena
        self._wake = wake
        self._method = method
        self._loop_kind = loop
        self._grace = float(grace)
        self._state = State.NEW
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: list[Worker] = []
        self._sent = 0  # calls that are in the channel
        self._lost: Worker | None = None  # the first that was lost
        self._failed = False  # it did not start: nothing of it is worth waiting for
        self._hurry = asyncio.Event()  # aclose was cancelled
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank. Empty before the start."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def loss(self) -> WorkerLostError | None:
        """What calls raise since a worker was lost; None while all are there."""
        return self._lost_error() if self._lost is not None else None

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.name!r} of {self.size} {self._state.value}>"

    # Life cycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the processes and wait until each has made its object.

        Takes as long as they import what they need. When it raises or is cancelled, no process is left.

        Raises:
            ClosedError: The group was started before, or closed meanwhile.
            WrongContextError: This process cannot start others: it is a worker itself, or about to become one, and is
                importing a main module that starts a group.
            WorkerLostError: A worker ended, e.g. because the main module cannot be imported there.
            EncodeError: The factory or its arguments do not pickle.
            NoSpaceError: There is not enough memory, or there are too few file descriptors, here or in a worker.
            Others: What the factory raised, as :meth:`call`.
        """
        if self._state is not State.NEW:
            raise ClosedError(f"{self!r} was started before; make a new one")
        try:
            self._check_process()
        except WrongContextError:
            await self.aclose()
            raise
        self._loop = asyncio.get_running_loop()
        self._state = State.STARTING
        # In a task of its own, so that aclose can end it.
        self._opening = self._loop.create_task(self._open())
        try:
            await asyncio.shield(self._opening)
        except BaseException:
            task = asyncio.current_task()
            assert task is not None
            closed = self._opening.cancelled() and not task.cancelling()
            self._failed = True
            await self._shut()
            if closed:
                raise self._closed_early() from None
            raise
        if self._state is not State.STARTING:
            await self._shut()
            raise self._closed_early()
        self._state = State.OPEN

    def _closed_early(self) -> ClosedError:
        return ClosedError(f"{self!r} was closed while it started")

    async def aclose(self) -> None:
        """Close in good order: workers finish what was sent, whose callers get the results, and end.

        Calls that were not sent yet raise :class:`ClosedError`. Workers that have not ended after ``grace`` seconds are
        terminated, and killed after as many more. After a loss they are terminated at once. Closing twice is harmless.
        Cancelled, it kills them.
        """
        if self._state is State.NEW:
            self._state = State.CLOSED
            await self.channel.aclose()
        if self._state is State.CLOSED:
            return
        self._check_loop()
        await self._shut()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _open(self) -> None:
        assert self._loop is not None
        await self.channel.start()
        # In a thread, since forking a large process takes milliseconds. It cannot be interrupted.
        spawning = self._loop.run_in_executor(None, self._spawn)
        try:
            await asyncio.shield(spawning)
        finally:
            if not spawning.done():
                await asyncio.wait([spawning])
                spawning.exception()  # we were cancelled, which is what start raises
            for worker in self._workers:
                worker.watch()
        await _all([self._attach(worker) for worker in self._workers])
        for worker in self._workers:
            worker.pump = self._loop.create_task(self._pump(worker))
        making, self._making = self._making, ()
        creating = self._invoke(None, None, making, {})
        del making
        await creating

    def _spawn(self) -> None:
        context: Any = multiprocessing.get_context(self._method)
        # Started here, because it unblocks the signal that is blocked below when it is started there.
        resource_tracker.ensure_running()
        # Blocked in the children until they ignore it: a Ctrl-C while they import torch would give a traceback each.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self.size):
                options = WorkerOptions(
                    rank=rank,
                    size=self.size,
                    name=f"{self.name}-{rank}",
                    arena=self._reply_arena,
                    wake=self._wake,
                    loop=self._loop_kind,
                    grace=self._grace,
                )
                self._workers.append(Worker.start(context, self.channel.handle, options))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    async def _attach(self, worker: Worker) -> None:
        """Wait until a worker reads its calls, and read its replies."""
        greeting = await worker.greeting()
        if isinstance(greeting, Failure):
            raise self._error(worker, greeting, "starting")
        if greeting is None:
            await worker.ended.wait()
            error = self._lost_error(worker)
            if worker.exit_code == 1:
                error.add_note(
                    "it had not got as far as making its object, and has printed why; if it could not import the main "
                    'module, that has to start things behind `if __name__ == "__main__":` alone'
                )
            raise error
        worker.replies = Receiver(greeting, 0)
        try:
            await worker.replies.start()
        except (SenderLostError, EndOfChannel):
            await worker.ended.wait()
            raise self._lost_error(worker) from None

    async def _shut(self) -> None:
        assert self._loop is not None
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            if not self._closing.done():
                self._hurry.set()
                await asyncio.shield(self._closing)
            raise

    async def _close(self) -> None:
        assert self._loop is not None and self._opening is not None
        self._state = State.CLOSING
        channel: asyncio.Task[None] | None = None
        try:
            if not self._opening.done():
                self._opening.cancel()
                await asyncio.wait([self._opening])
            if not self._opening.cancelled():
                self._opening.exception()  # whoever started knows
            self._making = ()
            channel = self._loop.create_task(self.channel.aclose())
            await asyncio.sleep(0)  # cancelled before it has begun, it would close nothing
            await self._end_workers()
        finally:
            # Nothing is left to do in good order, nor after a cancellation: asyncio.run, which cancels all tasks after the
            # second Ctrl-C, waits for what they do then.
            self._signal(signal.SIGKILL)
            await self._all_ended(None)
            # Nobody is left who could receive what is under way. Once more, since that task may never have begun.
            channels = [task for task in (channel, self._loop.create_task(self.channel.aclose())) if task is not None]
            await asyncio.sleep(0)
            for task in channels:
                task.cancel()
            await asyncio.wait(channels)
            for worker in self._workers:
                await worker.dispose()
            if any(worker.exit_code for worker in self._workers):
                # They could not remove the sockets of their replies.
                sweep(Path(self.channel.handle.address).parent)
            self._state = State.CLOSED

    async def _end_workers(self) -> None:
        # What is sent by now is what they finish; a channel that stays open for its frames does not keep them.
        hopeless = self._failed or self._lost is not None
        if not await self._all_ended(0 if hopeless else self._grace):
            if not hopeless:
                self._log_stragglers("have not finished what was sent")
            self._signal(signal.SIGTERM)
            if not await self._all_ended(self._grace):
                self._log_stragglers("do not end on SIGTERM")

    async def _all_ended(self, patience: float | None) -> bool:
        """Wait until all workers have ended: whether they did within some seconds, or until somebody is in a hurry."""
        if all(worker.ended.is_set() for worker in self._workers):
            return True
        if patience is None:
            for worker in self._workers:
                await worker.ended.wait()
            return True
        if patience == 0 or self._hurry.is_set():
            return False
        assert self._loop is not None
        hurry = self._loop.create_task(self._hurry.wait())
        ends = self._loop.create_task(self._all_ended(None))
        try:
            await asyncio.wait([hurry, ends], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
            ends.cancel()
            await asyncio.wait([hurry, ends])
        return all(worker.ended.is_set() for worker in self._workers)

    def _log_stragglers(self, what: str) -> None:
        if self._hurry.is_set():
            return  # they were not given the time
        left = ", ".join(worker.describe() for worker in self._workers if not worker.ended.is_set())
        logger.warning("group %r: after %.1f s these %s: %s", self.name, self._grace, what, left)

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            worker.signal(number)

    # Calling ------------------------------------------------------------------------------------------------------

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method in all workers.

        Cancelling is safe: the call was sent, then all workers execute it and its results are dropped, or it was not.

        Args:
            method: Name of a method of the objects.
            args: Its arguments. When the call has been sent, their memory is the caller's again.
            kwargs: More of them.

        Returns:
            The results, by rank.

        Raises:
            WorkerLostError: A worker has ended.
            EncodeError: The arguments do not pickle, and nothing was sent; or a result does not.
            DecodeError: The arguments do not unpickle in a worker, or a result here.
            WorkerError: A worker raised something that does not pickle, or is no ``Exception``. ``SystemExit`` and
                ``KeyboardInterrupt`` end it.
            ClosedError: The group is closed, or was before the call was sent.
            WrongContextError: Called on another loop, or in a forked process.
            Others: What the method raised, with the traceback in the worker as its ``__cause__`` and a note that names the
                worker. If several raised, that of the lowest rank; notes say what the others raised. All workers are
                waited for, but not longer than ``grace`` after the first has raised.
        """
        self._check(method)
        calling = self._invoke(None, method, args, kwargs)
        del args, kwargs  # so that they are not held until the replies are here
        return await calling

    async def call_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method in one worker; the others skip the call.

        Args:
            rank: Which.
            method: As for :meth:`call`, like all else.
            args: Its arguments.
            kwargs: More of them.

        Returns:
            The result.

        Raises:
            ValueError, TypeError: There is no such rank.
            Others: As :meth:`call`.
        """
        self._check(method)
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"rank must be an int, not {type(rank).__name__}")
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be from 0 to {self.size - 1}, not {rank}: the group has {self.size} workers")
        calling = self._invoke(rank, method, args, kwargs)
        del args, kwargs
        return (await calling)[0]

    async def _invoke(
        self, rank: int | None, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        assert self._loop is not None
        workers = self._workers if rank is None else [self._workers[rank]]
        try:
            await self.channel.send((rank, method, args, kwargs))
        except ReaderLostError as error:
            # Its end is on its way to us, too. Should it live, with its connection broken, then it ends now.
            self._workers[error.rank].signal(signal.SIGKILL)
            await self._workers[error.rank].ended.wait()
            raise self._lost_error(self._workers[error.rank]) from None
        # No await since it was sent: calls are numbered, and replies expected, in the order they have in the channel.
        del args, kwargs
        if self._lost is not None:  # while this waited to be sent
            raise self._lost_error()
        self._sent += 1
        call = Call(self._loop, [worker.rank for worker in workers], self._grace)
        for worker in workers:
            worker.pending.append((self._sent, call))
        try:
            await call.done
            return self._results(call, method)
        finally:
            call.drop()

    def _results(self, call: Call, method: str | None) -> list[Any]:
        doing = "making the object" if method is None else f"calling {method}()"
        failures = [(self._workers[rank], call.outcomes[rank]) for rank in sorted(call.failed)]
        error: Exception
        if self._lost is not None and call.missing:
            # Also if others raised: most likely they did because they had lost a peer.
            error = self._lost_error()
        elif failures:
            error = self._error(*failures.pop(0), doing)
            if call.missing:
                error.add_note(f"no reply yet from rank {', '.join(map(str, sorted(call.missing)))}")
        else:
            return [call.outcomes[rank] for rank in sorted(call.outcomes)]
        for worker, failure in failures:
            error.add_note(f"{worker.describe()} raised, too: {failure.what}")
        try:
            raise error
        finally:
            del error  # which refers to this frame

    def _error(self, worker: Worker, failure: Failure, doing: str) -> Exception:
        where = f"{worker.describe()}, {doing}"
        cause = WorkerTraceback(f"{where}:\n{failure.traceback}")
        note = f"raised {'in' if failure.remote else 'by the reply of'} {where}"
        if (error := failure.load()) is not None:
            with contextlib.suppress(Exception):  # of a class that does not let itself be changed
                error.__cause__ = cause
                error.add_note(note)
                return error
        error = WorkerError(f"{where}: {failure.what}")
        error.__cause__ = cause
        error.add_note(note)
        return error

    # Replies and ends -----------------------------------------------------------------------------------------------

    async def _pump(self, worker: Worker) -> None:
        """Hand on the replies of a worker, until there are no more; then it has ended, or is about to."""
        assert worker.replies is not None
        while True:
            try:
                # Not into a variable, which would hold the last reply while we wait for the next.
                worker.answer(*await worker.replies.recv())
            except (DecodeError, InternalError) as error:  # of this reply alone
                worker.answer(None, Failure.of(error, remote=False))
            except (EndOfChannel, SenderLostError):
                break
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # An object raised it when it was unpickled.
                worker.answer(None, Failure.of(error, remote=False))
        if self._state is not State.CLOSING:
            # It closed its end by itself, e.g. for a SystemExit: what it does since is nothing that we wait for.
            assert self._loop is not None
            late = self._loop.call_later(self._grace, worker.signal, signal.SIGKILL)
            await worker.ended.wait()
            late.cancel()
        await worker.ended.wait()
        if self._state is not State.CLOSING or worker.pending:
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        if self._lost is None:
            self._lost = worker
        for each in self._workers:
            while each.pending:
                each.pending.popleft()[1].finish()

    def _lost_error(self, worker: Worker | None = None) -> WorkerLostError:
        worker = self._lost if self._lost is not None else worker
        assert worker is not None
        code = worker.exit_code
        killed = -code if code is not None and code < 0 else None
        return WorkerLostError(
            f"{worker.describe()} of group {self.name!r} {worker.describe_end()}; close the group and make a new one",
            pid=worker.pid,
            rank=worker.rank,
            signal=killed,
            exit_code=code if killed is None else None,
        )

    # Checks -------------------------------------------------------------------------------------------------------

    def _check(self, method: str) -> None:
        if self._state is not State.OPEN:
            raise self._fault()
        self._check_loop()
        if self._lost is not None:
            raise self._lost_error()
        if not isinstance(method, str):
            raise TypeError(f"method must be the name of one, not {type(method).__name__}")

    def _fault(self) -> ArenaError:
        if self._state in (State.NEW, State.STARTING):
            return ClosedError(f"{self!r} is not started: use `async with`, or await start() first")
        return ClosedError(f"{self!r} is closed")

    def _check_loop(self) -> None:
        if asyncio._get_running_loop() is not self._loop:
            raise WrongContextError(
                f"{self!r} lives on the event loop that started it; call it from a task there, e.g. with "
                "asyncio.run_coroutine_threadsafe; a forked process cannot use it"
            )

    def _check_process(self) -> None:
        process = multiprocessing.current_process()
        if getattr(process, "_inheriting", False):  # what makes multiprocessing refuse, with more lines
            raise WrongContextError(
                f"{self!r} is started by the main module, which this process is only importing because it is to become a "
                'worker itself: in the main module, start groups behind `if __name__ == "__main__":`'
            )
        if process.daemon:
            raise WrongContextError(
                f"{self!r} cannot be started here: {process.name!r} is a daemonic process, such as a worker of another "
                "group, and these cannot start processes; start the group in their parent"
            )


async def _all(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines side by side; the first error ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
