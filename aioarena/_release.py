"""From the last reference to a tensor back to a free span.

A received buffer is an array over its span whose base is a :class:`_Lease`. Everything that keeps the bytes in use keeps
the array (slices, detached tensors, Parameters, numpy views, autograd graphs: they all hold the storage, the storage
holds the array), and the lease keeps the mapping. So the lease dies exactly when the last user is gone, in whatever
thread, possibly inside the garbage collector, possibly after channel and loop are closed. Its finalizer takes no lock,
touches no socket and no loop, and does one of two things:

* no GPU can be reading the span: it stores the done word, and the span is free for the sender at once;
* the arena is pinned, so a copy engine may still read: it appends the span to a deque and pokes an eventfd. The release
  task (or, after close, a thread that ends with the last span) records or collects the events of the streams that may
  read it, polls them while any is pending, and stores the done word when all are complete.

Which streams: those that were named for the span. If none was, the streams that were current in the thread that dropped
it, when it dropped it, and those that are current in the thread of the receiver's loop.

The arena may be pinned by another receiver of this process, at any time: see :meth:`SpanLedger.expect_gpu`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from aioarena._core.arena import SpanReleaser, snapshot
from aioarena._platform.accelerator import Accelerator, Event
from aioarena._platform.memory import Mapping, Pin
from aioarena.exceptions import InternalError

logger = logging.getLogger("aioarena")

# Polling events: first pause and longest, in seconds. A copy of 200 MB to a GPU takes 4-10 ms; polling costs about a
# microsecond. Guesses, safe because they only delay the reuse of a slot.
FIRST_POLL = 0.0002
LONGEST_POLL = 0.005

# Seconds that the interpreter's exit waits for the threads that release after close.
_EXIT_TIMEOUT = 1.0

# Counts forks of this process. A list, so that finalizers find it without looking up a module that may be torn down.
_forks = [0]


class HeldSpan:
    """A span that this reader was given and has not released.

    Attributes:
        slot: Slot whose done word gives it back.
        generation: Which use of it.
        start: Offset of its first byte in the arena.
        nbytes: Bytes in use.
        since: ``time.monotonic()`` of its arrival.
        streams: Streams named by the user that may read it until it is dropped.
        current: Once it is dropped without any: the streams that were current where it was dropped.
        events: Events of copies from it.
    """

    __slots__ = ("current", "events", "generation", "nbytes", "since", "slot", "start", "streams")

    def __init__(self, slot: int, generation: int, start: int, nbytes: int) -> None:
        self.slot = slot
        self.generation = generation
        self.start = start
        self.nbytes = nbytes
        self.since = time.monotonic()
        self.streams: list[Any] = []
        self.current: list[Any] = []
        self.events: list[Event] = []


class _Lease:
    """Base of the array over a span; its end is the end of the span's use."""

    __slots__ = ("__array_interface__", "_held", "_ledger", "_mapping")

    def __init__(self, ledger: SpanLedger, mapping: Mapping, held: HeldSpan, address: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (held.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self._ledger = ledger
        self._mapping = mapping
        self._held = held

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's exit modules are half gone, and the sender learns of the exit by itself.
        if not exiting():
            self._ledger.drop(self._held)


class _Look:
    """One look at the GPU for many spans: each stream is recorded once and each event queried once.

    Args:
        accelerator: The GPU runtime.
        current: The streams that are current for the receiver; by default those of the calling thread.
    """

    def __init__(self, accelerator: Accelerator, current: list[Any] | None) -> None:
        self._accelerator = accelerator
        self._current = current
        self._recorded: list[tuple[Any, Event | None]] = []
        # With the event, which keeps its id from becoming another one's.
        self._complete: dict[int, tuple[Event, bool]] = {}

    def current(self) -> list[Any]:
        if self._current is None:
            self._current = self._accelerator.current_streams()
        return self._current

    def record(self, streams: list[Any]) -> list[Event] | None:
        """Events for all work so far on some streams, or None while one of them captures a graph.

        An event recorded then would become part of the graph, or break it.
        """
        events: list[Event] = []
        for stream in streams:
            # A list, because a stream only has to know its equal, not to be hashable.
            known = [event for recorded, event in self._recorded if recorded == stream]
            if not known:
                if self._accelerator.capturing(stream):
                    return None
                known = [self._accelerator.record(stream)]
                self._recorded.append((stream, known[0]))
            if known[0] is not None and known[0] not in events:
                events.append(known[0])
        return events

    def complete(self, event: Event) -> bool:
        known = self._complete.get(id(event))
        if known is None:
            known = self._complete[id(event)] = event, event.query()
        return known[1]


class SpanLedger:
    """The spans one reader holds, and their way back.

    Args:
        mapping: The arena.
        spans: Stores the done words.
        accelerator: The GPU runtime.
    """

    def __init__(self, mapping: Mapping, spans: SpanReleaser, accelerator: Accelerator) -> None:
        self.mapping = mapping
        self._spans = spans
        self._accelerator = accelerator
        self.held: dict[int, HeldSpan] = {}
        self._dropped: deque[HeldSpan] = deque()
        self._pending: list[HeldSpan] = []
        self._forks = _forks
        self._born = _forks[0]
        self._poke_fd = -1
        self._start_task: weakref.WeakMethod[Callable[[], None]] | None = None
        self._draining = False
        self._current: list[Any] | None = None  # the streams current for the receiver, once its loop is left
        self.released = 0
        self.quarantined = 0
        self.changed = 0  # counted by CheckedLedger
        with _ledgers_lock:
            _ledgers.add(self)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # No lease is left when this runs, so nobody can poke a descriptor that means something else by now.
        if self._poke_fd >= 0:
            try:  # noqa: SIM105 - contextlib may be gone at exit
                close(self._poke_fd)
            except OSError:
                pass

    # Receiving ----------------------------------------------------------------------------------------------------

    def view(self, slot: int, generation: int, start: int, nbytes: int) -> memoryview:
        """The bytes of a span, writable; the span is held until the last user of the memory is gone."""
        if start + nbytes > self.mapping.nbytes:
            raise InternalError(f"{nbytes} bytes from {start} on reach past the arena of {self.mapping.nbytes} bytes")
        held = HeldSpan(slot, generation, start, nbytes)
        self.held[slot] = held
        lease = _Lease(self, self.mapping, held, self.mapping.address + start)
        return np.asarray(lease).data

    def find(self, address: int) -> list[HeldSpan]:
        """The held spans that an address lies in: more than one if the sender sent lent memory again."""
        offset = address - self.mapping.address
        if not 0 <= offset < self.mapping.nbytes:
            return []
        return [held for held in list(self.held.values()) if held.start <= offset < held.start + max(1, held.nbytes)]

    # Releasing ----------------------------------------------------------------------------------------------------

    @property
    def _pinned(self) -> bool:
        return self.mapping.pin is Pin.YES or self.mapping.pin is Pin.PENDING

    def drop(self, held: HeldSpan) -> None:
        """The last user of a span is gone. Runs in finalizers: see the top of this module."""
        if self._forks[0] != self._born:
            return  # a forked child's copy; the parent still holds the span
        named = held.streams or held.events
        if named or self._draining or self._pinned:
            if not named and self._pinned:
                with contextlib.suppress(Exception):  # not out of a finalizer; the task will run into it again
                    held.current = self._accelerator.current_streams()
            self._dropped.append(held)
            self._poke()
        else:
            self._release(held)
            if self._draining:  # began just now, and may be waiting for this
                self._poke()

    def _poke(self) -> None:
        if self._poke_fd >= 0:
            with contextlib.suppress(OSError):  # the counter is full: it was poked already
                os.eventfd_write(self._poke_fd, 1)

    def _release(self, held: HeldSpan) -> None:
        # Forget it first: once the done word is stored, the slot may come back to us in another message.
        self.held.pop(held.slot, None)
        self.released += 1
        self._spans.release(held.slot, held.generation)

    @property
    def poke_fd(self) -> int:
        """An eventfd that becomes readable when :meth:`pump` has something to do."""
        if self._poke_fd < 0:
            self._poke_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            if self._dropped:
                self._poke()
        return self._poke_fd

    def clear_poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._poke_fd)

    @property
    def pending(self) -> int:
        """Spans dropped whose GPU work is not known to be complete."""
        return len(self._pending) + len(self._dropped)

    @property
    def pending_events(self) -> int:
        """Events that those spans wait for. Any thread may ask."""
        return sum(len(held.events) for held in snapshot(self._pending) + snapshot(self._dropped))

    def pump(self) -> bool:
        """Take in what was dropped, release what is complete; whether anything is still pending."""
        while self._dropped:
            self._pending.append(self._dropped.popleft())
        # While memory is being registered, any call to the runtime may have to wait for that.
        if self._pending and self.mapping.pin is not Pin.PENDING:
            look = _Look(self._accelerator, self._current)
            self._pending = [held for held in self._pending if not self._settled(held, look)]
        return bool(self._pending)

    def _settled(self, held: HeldSpan, look: _Look) -> bool:
        try:
            if held.streams or (not held.events and self._pinned):
                events = look.record(held.streams or held.current + look.current())
                if events is None:
                    return False
                held.events += events
                held.streams.clear()
            # An event that is complete is not asked again.
            held.events[:] = [event for event in held.events if not look.complete(event)]
            if held.events:
                return False
        except Exception as error:
            # A device that is in error says nothing about what it still reads. The span is never reused.
            self.quarantined += 1
            log = logger.warning if self.quarantined == 1 else logger.debug
            log(
                "aioarena: cannot tell whether the GPU still reads slot %d (%s: %s); it is not reused as long as this "
                "process lives. Further ones are logged at debug level.",
                held.slot,
                type(error).__name__,
                str(error),  # not the error: whoever keeps the record would keep the arena
            )
            self.held.pop(held.slot, None)
            return True
        self._release(held)
        return True

    # Who releases -------------------------------------------------------------------------------------------------

    def attend(self, start_task: Callable[[], None]) -> None:
        """Name what starts the release task, callable in any thread. It is not kept alive by this."""
        self._start_task = weakref.WeakMethod(start_task)

    def expect_gpu(self) -> None:
        """Have somebody there to pump, because the arena is being pinned. Any thread may call this."""
        start_task = self._start_task() if self._start_task is not None else None
        if start_task is not None:
            try:
                start_task()
                return
            except RuntimeError:
                pass  # the loop is closed
        self.drain_in_background()

    def needs_drain(self) -> bool:
        """Whether spans remain whose release will have to wait for a GPU."""
        held = list(self.held.values())
        return bool(held and (self._pinned or self.pending or any(span.streams or span.events for span in held)))

    def drain_in_background(self) -> None:
        """Release what is left in a daemon thread, which ends with the last span.

        Called where the receiver's loop runs, if that still can be.
        """
        self._start_task = None
        if self._draining or not self.needs_drain():
            return
        with contextlib.suppress(Exception):  # the thread will run into it again
            self._current = self._accelerator.current_streams()
        _ = self.poke_fd
        self._draining = True
        thread = threading.Thread(target=self._drain, name="aioarena-release", daemon=True)
        _drains[thread] = self
        thread.start()

    def _drain(self) -> None:
        poll = select.poll()
        poll.register(self.poke_fd, select.POLLIN)
        pause = FIRST_POLL
        while self.held and not _exiting[0]:
            if self.pump():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL)
            elif self.held:
                pause = FIRST_POLL
                poll.poll()
                self.clear_poke()
        _drains.pop(threading.current_thread(), None)


# All ledgers of this process: pinning concerns those of one mapping. The lock guards no finalizer.
_ledgers: weakref.WeakSet[SpanLedger] = weakref.WeakSet()
_ledgers_lock = threading.Lock()


def expect_gpu(mapping: Mapping) -> None:
    """Have somebody there to pump for every ledger of an arena that is being pinned."""
    with _ledgers_lock:
        ledgers = [ledger for ledger in _ledgers if ledger.mapping is mapping]
    for ledger in ledgers:
        ledger.expect_gpu()


# Exit and fork ----------------------------------------------------------------------------------------------------

_drains: dict[threading.Thread, SpanLedger] = {}
_exiting = [False]


def _end_drains() -> None:
    # A daemon thread that comes back from the runtime into an interpreter that is gone would abort the process.
    _exiting[0] = True
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread, ledger in list(_drains.items()):
        ledger._poke()
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_drains)


def _after_fork_in_child() -> None:
    global _ledgers_lock
    _forks[0] += 1
    _ledgers_lock = threading.Lock()
    _drains.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
