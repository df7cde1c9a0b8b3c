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
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from aioarena._core.arena import SpanReleaser
from aioarena._core.layout import Layout
from aioarena._platform.accelerator import Accelerator, Event
from aioarena._platform.memory import Mapping, Pin
from aioarena.exceptions import InternalError

logger = logging.getLogger("aioarena")

# Polling events: first pause and longest, in seconds. A copy of 200 MB to a GPU takes 4-10 ms; polling costs about a
# microsecond. Guesses, safe because they only delay the reuse of a slot.
FIRST_POLL = 0.0002
LONGEST_POLL = 0.005

# Counts forks of this process. A list, so that finalizers find it without looking up a module that may be torn down.
_forks = [0]


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)


class HeldSpan:
    """A span that this reader was given and has not released.

    Attributes:
        slot: First slot.
        generation: Which use of it.
        nbytes: Bytes in use.
        since: ``time.monotonic()`` of its arrival.
        streams: Streams that may read it until it is dropped.
        events: Events of copies from it.
    """

    __slots__ = ("events", "generation", "nbytes", "since", "slot", "streams")

    def __init__(self, slot: int, generation: int, nbytes: int) -> None:
        self.slot = slot
        self.generation = generation
        self.nbytes = nbytes
        self.since = time.monotonic()
        self.streams: list[Any] = []
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

    def __del__(self) -> None:
        self._ledger.drop(self._held)


class SpanLedger:
    """The spans one reader holds, and their way back.

    Args:
        mapping: The arena.
        layout: Sizes of slots.
        spans: Stores the done words.
        accelerator: The GPU runtime.
    """

    def __init__(self, mapping: Mapping, layout: Layout, spans: SpanReleaser, accelerator: Accelerator) -> None:
        self.mapping = mapping
        self._slot_bytes = layout.slot_bytes
        self._spans = spans
        self._accelerator = accelerator
        self.held: dict[int, HeldSpan] = {}
        self._dropped: deque[HeldSpan] = deque()
        self._pending: list[HeldSpan] = []
        self._forks = _forks
        self._born = _forks[0]
        self._poke_fd = -1
        self.released = 0
        self.quarantined = 0

    def __del__(self) -> None:
        # No lease is left when this runs, so nobody can poke a descriptor that means something else by now.
        if self._poke_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._poke_fd)

    # Receiving ----------------------------------------------------------------------------------------------------

    def view(self, slot: int, generation: int, nbytes: int) -> memoryview:
        """The bytes of a span, writable; the span is held until the last user of the memory is gone."""
        offset = slot * self._slot_bytes
        if offset + nbytes > self.mapping.nbytes:
            raise InternalError(f"slot {slot} with {nbytes} bytes reaches past the arena of {self.mapping.nbytes} bytes")
        held = HeldSpan(slot, generation, nbytes)
        self.held[slot] = held
        lease = _Lease(self, self.mapping, held, self.mapping.address + offset)
        return np.asarray(lease).data

    def find(self, address: int) -> HeldSpan | None:
        """The held span that an address lies in."""
        offset = address - self.mapping.address
        if 0 <= offset < self.mapping.nbytes:
            for held in list(self.held.values()):
                start = held.slot * self._slot_bytes
                if start <= offset < start + max(1, held.nbytes):
                    return held
        return None

    # Releasing ----------------------------------------------------------------------------------------------------

    def drop(self, held: HeldSpan) -> None:
        """The last user of a span is gone. Runs in finalizers: see the top of this module."""
        if self._forks[0] != self._born:
            return  # a forked child's copy; the parent still holds the span
        if held.streams or held.events or self.mapping.pin is Pin.YES or self.mapping.pin is Pin.PENDING:
            self._dropped.append(held)
            if self._poke_fd >= 0:
                with contextlib.suppress(OSError):  # the counter is full: the task was poked already
                    os.eventfd_write(self._poke_fd, 1)
        else:
            self._release(held)

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
                os.eventfd_write(self._poke_fd, 1)
        return self._poke_fd

    def clear_poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._poke_fd)

    @property
    def pending(self) -> int:
        """Spans dropped whose GPU work is not known to be complete."""
        return len(self._pending) + len(self._dropped)

    def pump(self) -> bool:
        """Take in what was dropped, release what is complete; whether anything is still pending."""
        while self._dropped:
            held = self._dropped.popleft()
            if not held.events and not held.streams and not self._accelerator.initialized():
                self._release(held)
            else:
                self._pending.append(held)
        if self._pending:
            self._pending = [held for held in self._pending if not self._settled(held)]
        return bool(self._pending)

    def _settled(self, held: HeldSpan) -> bool:
        try:
            if held.streams or not held.events:
                # Recording while a graph is captured would become part of the graph, or break it: wait.
                if self._accelerator.capturing():
                    return False
                if held.streams:
                    held.events += [self._accelerator.record(stream) for stream in held.streams]
                    held.streams.clear()
                else:
                    held.events += self._accelerator.record_current()
            # An event that is complete is not asked again.
            held.events[:] = [event for event in held.events if not event.query()]
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
                error,
            )
            self.held.pop(held.slot, None)
            return True
        self._release(held)
        return True

    # After close --------------------------------------------------------------------------------------------------

    def needs_drain(self) -> bool:
        """Whether spans remain whose release will have to wait for a GPU."""
        return bool(self.pending or (self.held and self.mapping.pin in (Pin.YES, Pin.PENDING)))

    def drain_in_background(self) -> None:
        """Release what is left in a daemon thread, which ends with the last span."""
        if self.needs_drain():
            _ = self.poke_fd
            threading.Thread(target=self._drain, name="aioarena-release", daemon=True).start()

    def _drain(self) -> None:
        poll = select.poll()
        poll.register(self.poke_fd, select.POLLIN)
        pause = FIRST_POLL
        while self.needs_drain():
            if self.pump():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL)
            elif self.held:
                pause = FIRST_POLL
                poll.poll()
                self.clear_poke()
