"""What runs in the worker processes of :mod:`aioarena.engine`.

A worker is a reader of the channel of calls and the sender of a channel of replies. A call is a tuple ``(rank, method,
args, kwargs)``, with None as rank for all workers, and None as method for the first one, which makes the object. A reply is
a tuple ``(number, outcome)``: the number of the call among all that were sent, and what came out, or a :class:`Failure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import uvloop

from aioarena._platform.process import ProcessIdentity
from aioarena._types import ArenaConfig, Handle
from aioarena.exceptions import DecodeError, EncodeError, EndOfChannel, ReaderLostError, SenderLostError, text_of
from aioarena.receiver import Receiver
from aioarena.sender import Sender

# The receiver of calls in this process, where it is a worker.
calls: Receiver | None = None


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker, as text: the ``__cause__`` of that exception where it is raised again."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to the caller.

    Attributes:
        what: Its type and text.
        traceback: How Python prints it.
        pickled: Itself; None if it is no ``Exception``, or does not pickle.
        remote: Whether it was raised in the worker, not in taking its reply.
    """

    what: str
    traceback: str
    pickled: bytes | None
    remote: bool = True

    @classmethod
    def of(cls, error: BaseException, remote: bool = True) -> Failure:
        failure = cls(
            what=f"{type(error).__qualname__}: {text_of(error)}",
            traceback="".join(traceback.format_exception(error)),
            pickled=_pickled(error),
            remote=remote,
        )
        # They hold the arguments of the call, whose memory is not ours. An exception may outlive this for being in a cycle.
        traceback.clear_frames(error.__traceback__)
        return failure

    def load(self) -> Exception | None:
        """The exception itself, if it got here."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # of a class that cannot be imported here, or whose __init__ takes other arguments than args
            return None
        return error if isinstance(error, Exception) else None


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, Exception):
        return None
    try:
        return pickle.dumps(error)
    except Exception:  # whatever it is: the caller gets its text
        return None


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told when it starts.

    Attributes:
        rank: Its rank.
        size: How many workers there are.
        name: Of its channel of replies.
        arena: Of its channel of replies.
        wake: Of its channel of replies.
        loop: Its event loop.
        grace: Seconds that it may live on in a call when its parent is dead.
    """

    rank: int
    size: int
    name: str
    arena: ArenaConfig | None
    wake: Literal["zmq", "pipe"]
    loop: Literal["asyncio", "uvloop"]
    grace: float


def main(handle: Handle, options: WorkerOptions, pipe: Connection[Any, Any]) -> None:
    """Where a worker process starts.

    Args:
        handle: Of the channel of calls.
        options: What it has to know.
        pipe: Where it puts the handle of its replies once it has attached, or a :class:`Failure` if it cannot.
    """
    # Ctrl-C in a terminal goes to all processes; ending the workers is the parent's. Blocked by the parent until here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(
        target=_outlive_briefly, args=(handle.sender, options.grace), name="aioarena-parent", daemon=True
    ).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if options.loop == "uvloop" else None) as runner:
        runner.run(_work(handle, options, pipe))


def _outlive_briefly(parent: ProcessIdentity, grace: float) -> None:
    """End this process some time after its parent.

    The channel tells it too, but not to a call that does not return, as a collective operation whose peers are gone.
    """
    try:
        pidfd = parent.open_pidfd()
    except ProcessLookupError:
        return  # the receiver finds the same, and nothing has begun
    if pidfd is None:
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)


async def _work(handle: Handle, options: WorkerOptions, pipe: Connection[Any, Any]) -> None:
    global calls
    async with contextlib.AsyncExitStack() as stack:
        try:
            receiver = await stack.enter_async_context(Receiver(handle, options.rank))
            sender = Sender(
                1, name=options.name, arena=options.arena, wake=options.wake, linger=options.grace, stall_after=10.0
            )
            await stack.enter_async_context(sender)
        except Exception as error:
            with contextlib.suppress(OSError):  # the parent is gone
                pipe.send(Failure.of(error))
            return
        with pipe, contextlib.suppress(OSError):
            pipe.send(sender.handle)
        calls = receiver
        with contextlib.suppress(SenderLostError, ReaderLostError):  # the parent died
            await Servant(options.rank, options.size, receiver, sender).serve()


async def _not_cancelled() -> None:
    """Undo what a method did that cancelled its own task: it is our task, too, and the next await would raise."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.uncancel():
        pass


class Servant:
    """Executes calls one after the other, in the order in which they were sent."""

    def __init__(self, rank: int, size: int, receiver: Receiver, sender: Sender) -> None:
        self._rank = rank
        self._size = size
        self._receiver = receiver
        self._sender = sender
        self._target: Any = None  # what the factory made, from the first call on
        self._number = 0  # calls received, whoever they were for

    async def serve(self) -> None:
        """Execute calls until the channel ends.

        Raises:
            SenderLostError, ReaderLostError: The parent died.
        """
        # A coroutine for each, so that nothing of a call is referenced while we wait for the next: arguments and results
        # may be views of arenas.
        while await self._serve_next():
            pass

    async def _serve_next(self) -> bool:
        try:
            rank, method, args, kwargs = await self._receiver.recv()
        except EndOfChannel:
            return False
        except DecodeError as error:
            # It may not have been for us, which the number tells the parent.
            self._number += 1
            await self._sender.send((self._number, Failure.of(error)))
            return True
        self._number += 1
        if rank is not None and rank != self._rank:
            return True
        outcome: Any
        try:
            outcome = await self._execute(method, args, kwargs)
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise  # they mean this process
        except BaseException as error:  # CancelledError, too: nobody cancels us, so it comes from the method
            outcome = Failure.of(error)
        await _not_cancelled()
        del args, kwargs  # before the reply: who has it may count on their memory being free
        try:
            await self._sender.send((self._number, outcome))
        except EncodeError as error:
            error.add_note(f"in what {method}() returned")
            outcome = Failure.of(error)
            await self._sender.send((self._number, outcome))
        return True

    async def _execute(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method is None:
            factory: Callable[..., Any] = args[0]
            made = factory(self._rank, self._size, *args[1:])
            self._target = await made if inspect.isawaitable(made) else made
            return None
        result = getattr(self._target, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
