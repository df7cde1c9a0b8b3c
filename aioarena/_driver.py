"""Runs the coroutines of one asyncio end in threads that have no event loop.

Each end has a loop of its own here, which no thread runs all the time. A call takes the steps of its coroutine in the
calling thread; most need one. A call that has to wait *leads*: it runs the loop until what it waits for is there, which
therefore reaches it without a detour over another thread. If another thread leads already it *follows*: it sleeps until
that is there, or until the lead is free. When nobody has led for a while, the *caretaker*, a daemon thread, does, so that
joins, deaths and released spans are seen while nobody calls; a call that has to wait asks it off the loop.

One lock guards the loop and the end on it. Whoever leads gives it up only while the selector sleeps, so calls that need not
wait go through beside a leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import threading
import time
import weakref

# The functions behind signal.getsignal and signal.signal, which make enums of what they return: that takes microseconds.
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
from _signal import signal as _signal
from asyncio import _get_running_loop as running_loop
from asyncio import _set_running_loop as set_running_loop
from collections.abc import Callable, Coroutine
from contextvars import Context
from inspect import CORO_CLOSED, getcoroutinestate
from types import FrameType
from typing import Any, TypeVar

from aioarena.exceptions import BusyError, TimedOutError, WrongContextError

T = TypeVar("T")

# Seconds without a leader until the caretaker leads: how late joins, deaths and released spans are seen while nobody waits.
# A guess: below what anybody notices, and far above the pause between two calls of a busy thread, whom it would disturb.
IDLE = 0.05

# Signals whose handlers may raise, as far as programs usually have them: see _Wait.
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class _Selector(selectors.EpollSelector):
    """Gives a lock up while it sleeps.

    Attributes:
        parked: Whether it sleeps, or has not got the lock back yet.
    """

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__()
        self._lock = lock
        self.parked = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self.parked = True
        try:
            self._lock.release()
            events = super().select(timeout)
        finally:
            self._lock.acquire()
            self.parked = False
        # Meanwhile a descriptor may have been closed, and its number may mean something else. Nothing is lost by leaving
        # such an event out: epoll is level-triggered.
        known = self.get_map()
        return [(key, mask) for key, mask in events if known.get(key.fd) is key]


class _Loop(asyncio.SelectorEventLoop):
    """Takes callbacks from whoever has the lock, also while the leader sleeps in the selector."""

    inherited = False  # by a forked child: closing it there would take descriptors off the parent's selector

    def __init__(self, selector: _Selector) -> None:
        super().__init__(selector)
        self._parking = selector
        self.set_debug(False)  # it would insist on one thread

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._parking.parked:
            return self.call_soon_threadsafe(callback, *args, context=context)
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        if self._parking.parked:
            self.call_soon_threadsafe(_nothing)  # it sleeps until the timer that was first
        return handle

    @property
    def wake_fd(self) -> int:
        """What to write to so that the selector wakes up, as signal.set_wakeup_fd does."""
        fd: int = self._csock.fileno()  # type: ignore[attr-defined]
        return fd

    def __del__(self) -> None:
        if not self.inherited:
            super().__del__()


def _nothing() -> None:
    pass


class _Expired(Exception):
    """The time of a call is over."""


class _Wait:
    """One wait of one call: what may end it early.

    A signal handler that raises, as Ctrl-C does, would do so in the main thread anywhere in the loop's machinery and tear
    it apart: callbacks would be lost, the lock not be retaken. So while the main thread waits, handlers run as ever, but
    what they raise is kept, ends the wait, and is raised by the waiting call.

    Attributes:
        main: Whether this is the main thread.
        raised: What a signal handler raised, or None.
        expired: Whether the time is over.
    """

    def __init__(self, loop: _Loop, wake: Callable[[], None]) -> None:
        self.main = threading.get_ident() == threading.main_thread().ident
        self._loop = loop
        self._wake = wake
        self._wakes_on_signals = False
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: dict[int, Any] = {}
        self._holding_back = False
        self.raised: BaseException | None = None
        self.expired = False

    @property
    def over(self) -> bool:
        return self.expired or self.raised is not None

    def begin(self, deadline: float | None) -> None:
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._expire)
        if self.main:
            self._holding_back = True
            _holding_back.append(self)
            for number in _SIGNALS:
                handler = _getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal(number, self._on_signal)
            # A signal that comes just before the selector sleeps would not wake it.
            other = signal.set_wakeup_fd(self._loop.wake_fd, warn_on_full_buffer=False)
            self._wakes_on_signals = other == -1
            if not self._wakes_on_signals:
                signal.set_wakeup_fd(other)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._wakes_on_signals:
            signal.set_wakeup_fd(-1)
        # From here on what is still installed of ours raises.
        self._holding_back = False
        if self in _holding_back:
            _holding_back.remove(self)
        for number, handler in reversed(self._handlers.items()):
            if _getsignal(number) == self._on_signal:  # else a handler has changed it
                _signal(number, handler)

    def _expire(self) -> None:
        self.expired = True
        self._wake()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if not self._holding_back:
                raise
            self.raised = error
            self._loop.call_soon_threadsafe(self._wake)


class LoopDriver:
    """A loop that is run by the threads that call.

    Args:
        label: Whose, for errors.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._lock = threading.RLock()
        self._loop = _Loop(_Selector(self._lock))
        self._turned = threading.Condition(self._lock)  # for calls: something ended, or the lead is free
        self._unled = threading.Condition(self._lock)  # for the caretaker: somebody stopped leading
        self._led = False
        self._cared = False  # the caretaker leads
        self._main_waits = False  # the main thread has a call that waits: it leads, because signals come to it
        self._asleep = False  # the caretaker waits for _unled, however long
        self._times_led = 0
        self._calls = 0  # under way
        self._closing = False
        self._ended = False
        self._abandoned: asyncio.Task[None] | None = None
        self._caretaker = threading.Thread(target=self._care, name="aioarena-caretaker", daemon=True)
        _drivers.add(self)
        try:
            self._caretaker.start()
        except RuntimeError:
            self._loop.close()
            raise

    # Calls --------------------------------------------------------------------------------------------------------

    def run(
        self, function: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...] = (), timeout: float | None = None
    ) -> T:
        """Call a coroutine function of the end and wait for what it returns.

        Args:
            function: The function.
            args: Its arguments.
            timeout: Seconds to wait at most.

        Raises:
            TimedOutError: The time is over. The coroutine was cancelled.
            BusyError: Called from inside such a call.
            WrongContextError: An event loop runs in this thread.
        """
        outer = running_loop()
        if outer is not None:
            self._check_nesting(outer)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._calls += 1
            try:
                set_running_loop(self._loop)
                return self._take_steps(function(*args), timeout, deadline)
            finally:
                self._calls -= 1
                set_running_loop(outer)
                if self._closing:
                    self._turned.notify_all()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of the end that does not wait. Allowed in a thread with an event loop, too."""
        outer = running_loop()
        # From inside one of our calls we may have the lock; a signal handler that runs while its thread waits has not.
        with self._lock:
            try:
                set_running_loop(self._loop)
                return function(*args)
            finally:
                set_running_loop(outer)

    def _check_nesting(self, outer: asyncio.AbstractEventLoop) -> None:
        if outer is self._loop:
            raise BusyError(f"{self._label} was called from inside one of its own calls, e.g. by an object's __reduce__")
        if not isinstance(outer, _Loop):
            raise WrongContextError(
                f"{self._label} would hold up the event loop that runs in this thread: use the asyncio Sender and Receiver "
                "there (they take the same handle), or call this one in a thread, e.g. with asyncio.to_thread"
            )

    def _take_steps(self, coroutine: Coroutine[Any, Any, T], timeout: float | None, deadline: float | None) -> T:
        """What a task does: take the steps of a coroutine, and wait for the futures between them.

        Whatever interrupts it between two steps cancels the coroutine, and is raised when that has ended.
        """
        waited: asyncio.Future[Any] | None = None
        throw = late = False
        interruption: BaseException | None = None
        try:
            while True:
                try:
                    if waited is None or waited.done():
                        if throw:
                            throw = False
                            waited = coroutine.throw(asyncio.CancelledError())
                        else:
                            waited = coroutine.send(None)
                    self._wait(waited, deadline)
                    if waited is None and deadline is not None and time.monotonic() >= deadline:
                        # A reader that spins gives turns for as long as it likes. The first one may bring the message.
                        if late:
                            raise _Expired
                        late = True
                except StopIteration as done:
                    if interruption is None or isinstance(interruption, _Expired):
                        value: T = done.value
                        return value
                    raise interruption from None
                except BaseException as error:
                    if getcoroutinestate(coroutine) == CORO_CLOSED:
                        if interruption is None:
                            raise
                        if not isinstance(interruption, _Expired):
                            raise interruption from None
                        if not isinstance(error, asyncio.CancelledError):
                            raise
                        notes = getattr(error, "__notes__", None) or ["waiting for other calls, or for copies"]
                        raise TimedOutError(f"{self._label} timed out after {timeout:g} s: {'; '.join(notes)}") from None
                    interruption, deadline = error, None
                    # As Task.cancel: what it waits for is cancelled, else the next step gets the error.
                    throw = waited is None or not waited.cancel()
        finally:
            # Or an error's traceback and this frame keep each other, and with them the message, until collected.
            del interruption, coroutine

    # Waiting and leading --------------------------------------------------------------------------------------------

    def _wait(self, waited: asyncio.Future[Any] | None, deadline: float | None) -> None:
        """Wait for a future; for None (a bare yield) give others a turn."""
        wait = _Wait(self._loop, self._wake)
        try:
            self._main_waits |= wait.main
            wait.begin(deadline if waited is not None else None)
            if waited is None:
                self._give_a_turn(wait.main)
            else:
                waited.add_done_callback(self._wake)
                # At least one turn of the loop, even if the time is over: it may be what brings the message.
                while not waited.done() and not wait.over:
                    self._lead_or_follow(wait.main)
        finally:
            if wait.main:
                self._main_waits = False
                self._turned.notify_all()  # others may have left the lead to us
            if waited is not None:
                waited.remove_done_callback(self._wake)
            wait.end()  # after which signal handlers may raise at any point
        if wait.raised is not None:
            try:
                raise wait.raised
            finally:
                del wait  # or the error's traceback and what it refers to keep each other
        if waited is not None and not waited.done():
            raise _Expired

    def _wake(self, _: object = None) -> None:
        """Have everybody look whether his wait has ended. To be called on the loop."""
        self._loop.stop()
        self._turned.notify_all()

    def _lead_or_follow(self, main: bool) -> None:
        if self._led:
            if self._cared or main:
                self._ask_leader_off()
            self._turned.wait()
        elif main or not self._main_waits:
            self._lead()
        else:
            self._turned.wait()

    def _give_a_turn(self, main: bool) -> None:
        while self._cared:
            self._lead_or_follow(main)
        if not self._led:
            self._loop.stop()  # after one turn
            self._lead()
            return
        self._lock.release()
        time.sleep(0)  # lets the leader have the lock if it wants it
        self._lock.acquire()

    def _ask_leader_off(self) -> None:
        self._loop.call_soon(self._wake)

    def _lead(self, *, cared: bool = False) -> None:
        self._led, self._cared = True, cared
        self._times_led += 1
        outer = running_loop()
        try:
            set_running_loop(None)
            self._loop.run_forever()
        finally:
            set_running_loop(outer)
            self._led = self._cared = False
            self._turned.notify_all()
            if self._asleep:
                self._unled.notify()

    def _care(self) -> None:
        """The caretaker."""
        with self._lock:
            while not self._ended:
                times = self._times_led
                if self._led:
                    # Woken up at the end of a long wait only, not of each: calls then need not wake up another thread.
                    self._asleep = True
                    self._unled.wait()
                    self._asleep = False
                    continue
                self._unled.wait(IDLE)
                if not self._led and self._times_led == times and not self._ended:
                    self._lead(cared=True)
            self._loop.close()

    # The end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the caretaker and close the loop, when all calls have returned. The end must be closed. Idempotent."""
        with self._lock:
            self._closing = True
            while self._calls:
                self._turned.wait()
            self._end()
        self._caretaker.join()

    def abandon(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Close the end, and then this, in the background. For finalizers: takes no lock and does not wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._close_in_background, close)

    def _close_in_background(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._abandoned = self._loop.create_task(close())
        self._abandoned.add_done_callback(self._end)

    def _end(self, _: object = None) -> None:
        self._ended = True
        if self._cared:
            self._ask_leader_off()
        self._unled.notify()

    def forget_parent(self) -> None:
        """In a forked child: nobody is left who could give the lock back."""
        self._loop.inherited = True
        self._lock = threading.RLock()
        self._turned = threading.Condition(self._lock)
        self._unled = threading.Condition(self._lock)


_drivers: weakref.WeakSet[LoopDriver] = weakref.WeakSet()
_holding_back: list[_Wait] = []  # the waits of the main thread, from the outermost on


def _after_fork_in_child() -> None:
    # Another thread may have forked while the main thread waited: nobody waits here, and signals are the child's own.
    for wait in reversed(_holding_back.copy()):
        wait.end()
    for driver in list(_drivers):
        driver.forget_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
