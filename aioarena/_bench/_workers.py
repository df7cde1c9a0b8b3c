"""Worker processes of the demo and the benchmarks: spawned, spoken to over a pipe, and gone with their parent.

A worker ends when its pipe does, so it ends however the parent ends. Ctrl-C in a terminal goes to all processes of the
group: the workers ignore it, and the parent ends them in good order.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch
import uvloop

from aioarena._asyncio import wake

# Seconds that workers get to leave by themselves before they are killed, at the end and after an error or Ctrl-C, when
# they may be importing torch still. Guesses: leaving takes them about 0.1 s, and there is nothing they must do.
_PATIENCE = 2.0
_PATIENCE_AFTER_ERROR = 0.2


class WorkerError(Exception):
    """A worker process failed or vanished; the message has its traceback or exit code."""


@dataclass(frozen=True, slots=True)
class _Failure:
    traceback: str


def _main(target: Callable[..., None], rank: int, pipe: Connection[Any, Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    try:
        target(rank, pipe, *arguments)
    except (EOFError, ConnectionError):
        pass  # the parent is gone, or wants us to be
    except Exception:
        # It may also be that the channel broke because the parent is gone.
        with contextlib.suppress(OSError):
            pipe.send(_Failure(traceback.format_exc()))


class Worker:
    """One worker process, seen from its parent."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection[Any, Any]) -> None:
        self.rank = rank
        self.process = process
        self._pipe = pipe

    def tell(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._vanished() from None

    async def answer(self) -> Any:
        """The next thing the worker sends. Cancelling is safe."""
        loop = asyncio.get_running_loop()
        if not self._pipe.poll():
            arrived = loop.create_future()
            loop.add_reader(self._pipe.fileno(), wake, arrived)
            try:
                await arrived
            finally:
                loop.remove_reader(self._pipe.fileno())
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._vanished() from None
        if isinstance(answer, _Failure):
            raise WorkerError(f"worker {self.rank} failed:\n{answer.traceback}")
        return answer

    def _vanished(self) -> WorkerError:
        self.process.join(_PATIENCE)
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        return WorkerError(f"worker {self.rank} (pid {self.process.pid}) {how} in the middle of its work")

    def hang_up(self) -> None:
        self._pipe.close()


class Team:
    """A number of workers that run the same function; a context manager that leaves no process behind.

    Args:
        size: How many.
        target: A function of a module, called as ``target(rank, pipe, *arguments)`` in each process.
        arguments: What pickles.
        method: How processes are started: ``spawn``, or ``forkserver`` where there are many.
    """

    def __init__(self, size: int, target: Callable[..., None], *arguments: object, method: str = "spawn") -> None:
        self._size = size
        self._target = target
        self._arguments = arguments
        self._method = method
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        context: Any = multiprocessing.get_context(self._method)
        # Started here, because it unblocks the signal that is blocked below when it is started there.
        resource_tracker.ensure_running()
        # Blocked in the children until they ignore it: a Ctrl-C while they import torch would give a traceback each.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_main, args=(self._target, rank, theirs, self._arguments), name=f"aioarena-{rank}", daemon=True
                )
                self.workers.append(Worker(rank, process, ours))
                process.start()
                theirs.close()  # so that the pipe ends with the worker
        except BaseException:
            self._stop(_PATIENCE_AFTER_ERROR)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop(_PATIENCE if error is None else _PATIENCE_AFTER_ERROR)

    def _stop(self, patience: float) -> None:
        started = [worker.process for worker in self.workers if worker.process.pid is not None]
        try:
            for worker in self.workers:
                worker.hang_up()
            deadline = time.monotonic() + patience
            for process in started:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            # Also when a second Ctrl-C ends the waiting.
            for process in started:
                process.kill()
            for process in started:
                process.join()
                process.close()
            self.workers.clear()

    def tell(self, message: object) -> None:
        for worker in self.workers:
            worker.tell(message)

    async def answers(self) -> list[Any]:
        """One answer of each worker, in the order of their ranks."""
        return [await worker.answer() for worker in self.workers]


def run(main: Coroutine[Any, Any, Any], loop: str = "asyncio") -> Any:
    """Run a coroutine on asyncio's or uvloop's event loop. SIGTERM cancels it, as Ctrl-C does.

    Raises:
        SystemExit: It was ended by SIGTERM.
        KeyboardInterrupt: It was ended by Ctrl-C.
    """
    terminated = False

    async def guarded() -> Any:
        nonlocal terminated
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await main

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError:
        if not terminated:
            raise
        raise SystemExit(128 + signal.SIGTERM) from None
