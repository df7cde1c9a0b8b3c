"""What the two asyncio fronts share: life cycle, the right loop, waiting that can be woken and explained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import TracebackType
from typing import Any, Self

from aioarena import _registry
from aioarena._debug import Birth, Debugging
from aioarena.exceptions import ArenaError, ClosedError, WrongContextError

# Operations that may succeed in a row without suspending before others on the loop get a turn: about 0.3 ms of small
# messages. Each 4 KiB of a message counts as one more.
BREATH = 100
BREATH_SHIFT = 12

# Seconds between looks that need no wake-up: the age of a diagnosis, and what a lost wake-up costs at first. While nothing
# presses the pause doubles up to so many times that, since waking up an idle process costs more than looking (measured:
# 0.5 ms of CPU); a wake-up that is lost after a long wait then costs no more than was waited already.
TICK = 1.0
_LONGEST_PAUSE = 32


class State(Enum):
    NEW = "new"
    STARTING = "starting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Endpoint(ABC):
    """One end of a channel on one event loop.

    ``_fault`` is the one thing the hot paths check: None, or the method that makes the error every call has to raise now.
    It is kept unbound, because a bound one would be a reference cycle, and a closed end would live on, with its memory and
    descriptors, until the collector comes by.
    """

    _what = "endpoint"

    def __init__(self, name: str) -> None:
        self._debug = Debugging.of_environment()
        self._birth: Birth | None = None  # from the start on, when debugging
        self._name = name
        self._state = State.NEW
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._finished: asyncio.Future[None] | None = None  # while it closes
        self._credit = BREATH
        self._tick_timer: asyncio.TimerHandle | None = None
        self._tick_pause = 1  # before the next tick, in units of TICK
        self._watched: set[int] = set()
        self._draining: asyncio.Handle | None = None  # a look at the wire in the next turn of the loop
        self._fault: Callable[[Any], ArenaError] | None = Endpoint._not_started
        _registry.add(self)

    # Faults -------------------------------------------------------------------------------------------------------

    def _not_started(self) -> ArenaError:
        return ClosedError(f"{self._label} is not started: use `async with`, or `await start()` first")

    def _closed(self) -> ArenaError:
        return ClosedError(f"{self._label} is closed")

    def _forked(self) -> ArenaError:
        return WrongContextError(
            f"{self._label} was started by the parent of this forked process and cannot be used here; its handle can: "
            "attach a new Receiver with it" + self._where_born()
        )

    @property
    def _label(self) -> str:
        return f"this {self._what} of channel {self._name!r}"

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Take the running loop as the one this end lives on."""
        if self._born_elsewhere():
            raise self._forked()
        if self._state is not State.NEW:
            raise ClosedError(f"{self._label} was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._state = State.STARTING
        _registry.started(self)
        if self._debug is not None:
            self._birth = Birth(self._loop)
        return self._loop

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def start(self) -> None:
        """Begin to work, on the running loop."""

    @abstractmethod
    async def aclose(self) -> None:
        """End that. Closing twice is harmless."""

    # Closing ------------------------------------------------------------------------------------------------------

    async def _begin_closing(self) -> bool:
        """Begin to close; False if there is nothing more to do, after waiting for another call that closes."""
        if self._state is State.CLOSED:
            return False
        if self._born_elsewhere():
            raise self._forked()
        if self._state is State.NEW:
            self._abandon()
            self._finish()
            return False
        self._check_loop()
        if self._state is State.CLOSING:
            assert self._finished is not None
            await asyncio.shield(self._finished)
            return False
        assert self._loop is not None
        self._state = State.CLOSING
        self._finished = self._loop.create_future()
        self._fault = Endpoint._closed
        self._notify_all()
        return True

    def _abandon(self) -> None:  # noqa: B027 - for a sender only
        """Tell whoever may wait for it that this end, which was never started, never will be."""

    def _finish(self) -> None:
        self._state = State.CLOSED
        self._fault = Endpoint._closed
        self._detach_from_loop()
        self._release_resources()
        self._notify_all()
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _raise_fault(self) -> None:
        """Raise what keeps this call from going on; to be called when the quick check saw something."""
        if self._fault is not None:
            raise self._fault(self)
        self._check_loop()

    def _check_loop(self) -> None:
        if asyncio._get_running_loop() is not self._loop:
            raise WrongContextError(
                f"{self._label} lives on the event loop that started it; call it from a task there, e.g. with "
                "asyncio.run_coroutine_threadsafe" + self._where_born()
            )

    def _where_born(self) -> str:
        return self._birth.explain() if self._birth is not None else ""

    # Waiting ------------------------------------------------------------------------------------------------------

    async def _changed(self) -> None:
        """Wait until :meth:`_notify`. Nothing is lost by cancelling: the caller looks at the state again anyway."""
        assert self._loop is not None
        if self._tick_pause > 1:
            self._tick_soon()
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _notify(self) -> None:
        for waiter in self._waiters:
            wake(waiter)

    def _notify_all(self) -> None:
        """Wake all that wait, however they do."""
        self._notify()

    async def _breathe(self) -> None:
        """Give other tasks a turn. Called before an operation, never between its effect and its return."""
        self._credit = BREATH
        await asyncio.sleep(0)
        if self._fault is not None:
            raise self._fault(self)

    @contextlib.contextmanager
    def _explained(self, why: Callable[[], str]) -> Iterator[None]:
        """Note on a cancellation what the call was waiting for: a time-out then says so in its traceback."""
        try:
            yield
        except asyncio.CancelledError as error:
            error.add_note(why())
            raise

    # Descriptors and time -----------------------------------------------------------------------------------------

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.add_reader(fd, callback)
        self._watched.add(fd)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            self._watched.discard(fd)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(fd)

    def _drain_later(self) -> None:
        """Look at the wire in the next turn, if something is there: sending may have eaten the edge of its descriptor."""
        if self._draining is None and self._has_mail():
            assert self._loop is not None
            self._draining = self._loop.call_soon(self._drain_now)

    def _drain_now(self) -> None:
        self._draining = None
        self._on_wire()

    @abstractmethod
    def _has_mail(self) -> bool:
        """Whether there is something on the wire."""

    @abstractmethod
    def _on_wire(self) -> None:
        """Take in what is on the wire."""

    def _tick_after(self, pause: int) -> None:
        assert self._loop is not None
        self._tick_pause = pause
        self._tick_timer = self._loop.call_later(pause * TICK, self._tick_and_rearm)

    def _tick_soon(self) -> None:
        """Start anew with the shortest pause. To be called when something begins that only ticks will see."""
        if self._tick_pause > 1 and self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_after(1)

    def _tick_and_rearm(self) -> None:
        if self._state is State.CLOSED:
            return
        self._tick_timer = None
        try:
            self._tick()
        finally:
            self._tick_after(1 if self._pressing() else min(2 * self._tick_pause, _LONGEST_PAUSE))

    @abstractmethod
    def _pressing(self) -> bool:
        """Whether there is something to look at every second."""

    @abstractmethod
    def _tick(self) -> None:
        """Look at what needs no wake-up."""

    def _detach_from_loop(self) -> None:
        """Take everything of ours off the loop, so that it refers to us no more."""
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        if self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        for fd in list(self._watched):
            self._unwatch(fd)

    @abstractmethod
    def _release_resources(self) -> None:
        """Give back sockets, descriptors and threads, without waiting; to be idempotent."""

    def __del__(self) -> None:
        # At the interpreter's exit, which has emptied this module by now, there is nothing to do.
        if not State:  # type: ignore[truthy-function]
            return
        if getattr(self, "_state", State.CLOSED) not in (State.STARTING, State.OPEN) or self._born_elsewhere():
            return
        # The loop held references to us, so it is closed, or we never got that far.
        warnings.warn(f"{self._label} was never closed", ResourceWarning, stacklevel=2, source=self)
        with contextlib.suppress(Exception):
            self._release_resources()

    def _survives_fork(self) -> bool:
        """Whether a forked child may use its copy, because there is nothing in it yet that belongs to one process."""
        return False

    def _born_elsewhere(self) -> bool:
        return self._fault is Endpoint._forked

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} {self._state.value}>"


def wake(waiter: asyncio.Future[None]) -> None:
    """Have whoever waits for a future go on."""
    if not waiter.done():
        # The handler of Ctrl-C that asyncio.run installs cancels its task wherever the loop is, and so between these lines.
        with contextlib.suppress(asyncio.InvalidStateError):
            waiter.set_result(None)


class Turn:
    """A place in a queue of tasks that go on in the order in which they came."""

    __slots__ = ("_future", "_queue")

    def __init__(self, queue: deque[Turn]) -> None:
        self._queue = queue
        self._future: asyncio.Future[None] | None = None
        queue.append(self)

    @property
    def first(self) -> bool:
        return self._queue[0] is self

    async def wait(self) -> None:
        """Wait until it may be first, or :meth:`notify`."""
        self._future = asyncio.get_running_loop().create_future()
        await self._future

    def notify(self) -> None:
        if self._future is not None:
            wake(self._future)

    def leave(self) -> None:
        self._queue.remove(self)
        if self._queue:
            self._queue[0].notify()


# What a forked child inherited: kept, so that nothing of it is finalised there.
_inherited: list[Any] = []


def _after_fork_in_child() -> None:
    for endpoint in _registry.ends():
        if endpoint._state is not State.CLOSED and not endpoint._survives_fork():
            endpoint._fault = Endpoint._forked
            _inherited.append(endpoint)


os.register_at_fork(after_in_child=_after_fork_in_child)
