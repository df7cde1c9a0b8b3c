"""What a receiver watches under ``AIOARENA_DEBUG=1``: whether received memory changes, how long it is kept, and by whom.

Memory that is handed out has a fingerprint, a checksum for each block of it, taken before anybody can have written to it:
``recv`` waits for that. A daemon thread compares when the memory is dropped, before its slots are given back, and now and
then while it is held. What differs by then was written by somebody to whom it did not belong: in this process, in another
reader, or by the sender into memory that it had lent and not reclaimed. Nobody can tell these apart afterwards, since all
look at the same pages; ``AIOARENA_DEBUG_READONLY=1`` can.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import threading
import time
import weakref
import zlib
from array import array
from typing import Any

import numpy as np
import torch

from aioarena._assembly import Assembler
from aioarena._codec import _children
from aioarena._copying import ON_LOOP_BYTES, CopyPool, Portion, join
from aioarena._core.receiver import IncomingMessage, ReceiverCore
from aioarena._core.record import FRAME, Placement
from aioarena._debug import Debugging, Site, call_site, describe_site
from aioarena._platform.accelerator import Accelerator
from aioarena._platform.memory import Mapping
from aioarena._platform.wire import ReceiverWire
from aioarena._release import HeldSpan, SpanLedger

logger = logging.getLogger("aioarena")

# Bytes with one checksum: how exactly a change is located. Above 5 KiB zlib gives up the GIL while it computes. On a 2-core
# x86-64 VM (zlib 1.2.13, Python 3.11, 2026-11-30) blocks of 16 KiB take 2.8 GB/s and whole buffers 2.3 GB/s.
BLOCK = 16 << 10

# Seconds between two looks at memory that is held, at least; and at least so many times as long as the last look took, so
# that looking takes a twentieth of a core whatever is held.
_LOOK_EVERY = 5.0
_LOOK_SHARE = 20

# Seconds between two looks at how long it has been held. Costs microseconds.
_AGE_EVERY = 1.0

# Seconds between two warnings that the arena is full, as with the sender's.
_FULL_INTERVAL = 60.0

# Objects of a message that are looked at for the names of its tensors. Bounds the time on the loop to about a millisecond.
_MOST_NAMED = 1000

_PLACES_SHOWN = 4  # in a warning
_SITES_SHOWN = 3

# Seconds that the interpreter's exit waits for the threads.
_EXIT_TIMEOUT = 1.0


class Fingerprint:
    """Checksums of some memory, block by block, made in any order and by any threads.

    Attributes:
        sums: One for each block.
    """

    __slots__ = ("_memory", "sums")

    def __init__(self, memory: memoryview) -> None:
        self._memory: memoryview | None = memory
        self.sums = array("I", bytes(4 * -(-len(memory) // BLOCK)))

    def add(self, start: int, stop: int) -> None:
        """Take the sums of some blocks."""
        memory, sums = self._memory, self.sums
        assert memory is not None
        for block in range(start, stop):
            sums[block] = zlib.crc32(memory[block * BLOCK : (block + 1) * BLOCK])

    def complete(self) -> array[int]:
        """The sums, all of which have been taken; the memory is let go."""
        self._memory = None
        return self.sums

    @classmethod
    def of(cls, memory: memoryview) -> array[int]:
        whole = cls(memory)
        whole.add(0, len(whole.sums))
        return whole.complete()


class Watch:
    """One span that was handed out.

    Attributes:
        held: The span.
        sums: Its fingerprint.
        site: Who received it.
        message: Number of its message on the channel, from 1 on.
        what: The tensor over it and where it stood in the message, as far as is known.
        shape: Its shape if the elements lie one behind the other, else None.
        itemsize: Bytes of an element.
        seen: ``time.monotonic()`` of the last look at its bytes.
        dropped: Whether its last user is gone.
    """

    __slots__ = ("dropped", "held", "itemsize", "message", "seen", "shape", "site", "sums", "what")

    def __init__(self, held: HeldSpan, sums: array[int], site: Site, message: int) -> None:
        self.held = held
        self.sums = sums
        self.site = site
        self.message = message
        self.what = "a buffer"
        self.shape: tuple[int, ...] | None = None
        self.itemsize = 1
        self.seen = held.since
        self.dropped = False

    def name(self, path: str, value: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Say what the span is of."""
        shape = tuple(value.shape)
        whole = value.is_contiguous() if isinstance(value, torch.Tensor) else value.flags.c_contiguous
        self.what = f"message{path}, {str(value.dtype).removeprefix('torch.')} of shape {shape}"
        self.shape = shape if whole else None
        self.itemsize = value.itemsize if isinstance(value, np.ndarray) else value.element_size()

    def describe(self) -> str:
        held = self.held
        return f"{self.what} (message {self.message} of the channel, slot {held.slot}, {held.nbytes} bytes)"

    def places(self, sums: array[int]) -> list[str]:
        """Where another fingerprint differs."""
        changed = [block for block, (old, new) in enumerate(zip(self.sums, sums, strict=True)) if old != new]
        runs: list[list[int]] = []
        for block in changed:
            if runs and runs[-1][1] == block:
                runs[-1][1] = block + 1
            else:
                runs.append([block, block + 1])
        return [self._place(first * BLOCK, min(last * BLOCK, self.held.nbytes)) for first, last in runs]

    def _place(self, start: int, stop: int) -> str:
        text = f"bytes {start} to {stop - 1}"
        if self.shape:
            first, last = start // self.itemsize, (stop - 1) // self.itemsize
            with contextlib.suppress(ValueError):  # a buffer that holds more than the tensor
                ends = [[int(i) for i in np.unravel_index(element, self.shape)] for element in (first, last)]
                text += f" (elements {ends[0]} to {ends[1]})"
        return text


class CheckedLedger(SpanLedger):
    """A ledger that watches what it hands out.

    Args:
        mapping: The arena.
        core: The receiver's.
        accelerator: The GPU runtime.
        label: Whose, for logs.
        debugging: What to look out for.
    """

    def __init__(
        self, mapping: Mapping, core: ReceiverCore, accelerator: Accelerator, label: str, debugging: Debugging
    ) -> None:
        super().__init__(mapping, core.spans, accelerator)
        self._core = core
        self._label = f"{label} (pid {os.getpid()})"
        self._retained = debugging.retained
        self._watched: dict[HeldSpan, Watch] = {}
        self._taken: dict[tuple[int, int], array[int]] = {}  # (slot, generation) -> fingerprint of what is to be viewed
        # What was dropped, for the thread; None has it look around. Its put may be called in a finalizer.
        self._mail: queue.SimpleQueue[Watch | None] = queue.SimpleQueue()
        self._closed = False
        self._look_due = 0.0
        self._next_warning: dict[Site, float] = {}  # of memory retained, by who received it
        self._full_said = -_FULL_INTERVAL
        self._thread = threading.Thread(target=self._run, name="aioarena-debug", daemon=True)
        self._thread.start()
        _checkers[self._thread] = self

    # Handing out ----------------------------------------------------------------------------------------------------

    def bytes_of(self, place: Placement) -> memoryview:
        """The bytes of a span, for its fingerprint."""
        return self.mapping.view[place.start : place.start + place.nbytes]

    def expects(self, places: list[Placement]) -> bool:
        """Whether the fingerprints of all these spans have been taken."""
        return all((place.slot, place.generation) in self._taken for place in places)

    def expect(self, taken: dict[tuple[int, int], array[int]]) -> None:
        """Fingerprints of spans that are viewed next, by slot and generation."""
        self._taken = taken

    def view(self, slot: int, generation: int, start: int, nbytes: int) -> memoryview:
        memory = super().view(slot, generation, start, nbytes)
        sums = self._taken.pop((slot, generation), None)
        if sums is None:
            sums = Fingerprint.of(self.mapping.view[start : start + nbytes])
        held = self.held[slot]
        self._watched[held] = Watch(held, sums, call_site(), self._core.number)
        if len(self._watched) == 1:
            # Nothing was held, so the thread waits without end, and the look that is due can wait.
            self._look_due = max(self._look_due, held.since + _LOOK_EVERY)
            self._mail.put(None)
        return memory

    def name(self, obj: object) -> None:
        """Find the tensors of a message that was just received, so that reports can name them."""
        message = self._core.number - 1
        fresh = {watch.held.start: watch for watch in list(self._watched.values()) if watch.message == message}
        todo: list[tuple[str, object]] = [("", obj)]
        seen = 0
        while todo and fresh and seen < _MOST_NAMED:
            path, value = todo.pop(0)
            seen += 1
            if isinstance(value, torch.Tensor | np.ndarray):
                watch = fresh.pop(_address(value) - self.mapping.address, None)
                if watch is not None:
                    watch.name(path, value)
            elif len(todo) < _MOST_NAMED:
                with contextlib.suppress(Exception):  # of a property: looking must not lose what was received
                    todo += [(path + step, child) for step, child in _children(value)]

    # Taking back ----------------------------------------------------------------------------------------------------

    def _release(self, held: HeldSpan) -> None:
        # Runs in finalizers, too. The slots are not given back before the thread has looked.
        watch = self._watched.get(held)
        if watch is None:
            super()._release(held)
        else:
            watch.dropped = True
            self._mail.put(watch)

    def drain_in_background(self) -> None:
        super().drain_in_background()
        self._closed = True
        self._look_due = 0.0  # the last look while the receiver is there
        self._mail.put(None)

    def wake(self) -> None:
        """Have the thread look whether it is to end."""
        self._mail.put(None)

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not _exiting[0] and (self.held or not self._closed):
                try:
                    watch = self._mail.get(timeout=_AGE_EVERY if self._watched else None)
                except queue.Empty:
                    watch = None
                try:
                    if watch is not None:
                        self._take_back(watch)
                    else:
                        self.look()
                except Exception:  # debugging must not end what is debugged
                    logger.exception("%s: a check failed", self._label)
        finally:
            _checkers.pop(threading.current_thread(), None)

    def _take_back(self, watch: Watch) -> None:
        try:
            self._compare(watch)
        finally:
            del self._watched[watch.held]
            super()._release(watch.held)
            if self._draining:
                self._poke()  # that thread may be waiting for this

    def look(self) -> None:
        """Look at all that is held: how old it is, and, if it is time, whether it has changed."""
        began = time.monotonic()
        held = [watch for watch in list(self._watched.values()) if not watch.dropped]
        self._look_at_ages(held, began)
        if began >= self._look_due:
            for watch in held:
                # What was dropped meanwhile is in the mail, and not given back before that is read, by this thread.
                self._compare(watch)
            now = time.monotonic()
            self._look_due = now + max(_LOOK_EVERY, _LOOK_SHARE * (now - began))

    def _compare(self, watch: Watch) -> None:
        held = watch.held
        sums = Fingerprint.of(self.mapping.view[held.start : held.start + held.nbytes])
        now = time.monotonic()
        if sums != watch.sums:
            places = watch.places(sums)
            more = len(places) - _PLACES_SHOWN
            self.changed += 1
            logger.warning(
                "%s: received memory was written to: %s. Changed %s: %s%s. It was received at\n%s\nAll readers see "
                "this memory: clone a tensor before writing, or use Receiver(private=True). The write was made by this "
                "process, by another reader, or by the sender into lent memory before reclaim(). With "
                "AIOARENA_DEBUG_READONLY=1 a reader that writes ends there, and says where",
                self._label,
                watch.describe(),
                f"from {watch.seen - held.since:.1f} to {now - held.since:.1f} s after it was received",
                ", ".join(places[:_PLACES_SHOWN]),
                f" and {more} more places" if more > 0 else "",
                describe_site(watch.site),
            )
            watch.sums = sums  # each change is told once
        watch.seen = now

    def _look_at_ages(self, held: list[Watch], now: float) -> None:
        self._next_warning = {site: due for site, due in self._next_warning.items() if due > now}
        for site, watches in _by_site(held).items():
            oldest = min(watches, key=lambda watch: watch.held.since)
            age = now - oldest.held.since
            if age >= self._retained and site not in self._next_warning:
                self._next_warning[site] = now + max(age, _AGE_EVERY)
                old = [watch for watch in watches if now - watch.held.since >= self._retained]
                logger.warning(
                    "%s: %s, received at\n%s\nThe oldest is %s. Drop received tensors, or clone what is to be kept",
                    self._label,
                    f"{_count(len(old))} held for more than {self._retained:g} s, the oldest for {age:.0f} s",
                    describe_site(site),
                    oldest.describe(),
                )

    def say_full(self, nbytes: int) -> None:
        """A buffer that would fit into the arena did not come through it: say so if that is because of what we hold."""
        now = time.monotonic()
        if now - self._full_said < _FULL_INTERVAL:
            return
        layout = self._core.layout
        groups = [
            (sum(-(-watch.held.nbytes // layout.slot_bytes) for watch in watches), site, watches)
            for site, watches in _by_site(list(self._watched.values())).items()
        ]
        slots = sum(group[0] for group in groups)
        if 2 * slots < layout.slots:
            return
        self._full_said = now
        groups.sort(key=lambda group: -group[0])
        logger.warning(
            "%s: the arena was full when message %d of the channel was sent, so that %d bytes of it came as a frame; this "
            "reader holds %d of the %d slots:\n%s",
            self._label,
            self._core.number,
            nbytes,
            slots,
            layout.slots,
            "\n".join(
                f"{slots} slots, the oldest for {now - min(watch.held.since for watch in watches):.1f} s, received at\n"
                f"{describe_site(site)}"
                for slots, site, watches in groups[:_SITES_SHOWN]
            ),
        )


def _address(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    try:
        return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else int(value.ctypes.data)
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have no storage of their own
        return 0


def _by_site(watches: list[Watch]) -> dict[Site, list[Watch]]:
    groups: dict[Site, list[Watch]] = {}
    for watch in watches:
        groups.setdefault(watch.site, []).append(watch)
    return groups


def _count(number: int) -> str:
    return "a received tensor is" if number == 1 else f"{number} received tensors are"


class CheckedAssembler(Assembler):
    """An assembler that takes fingerprints, in threads, before it hands memory out."""

    def __init__(self, wire: ReceiverWire, ledger: CheckedLedger, pool: CopyPool, viewed: Any) -> None:
        super().__init__(wire, ledger, False, pool, viewed)
        self._checked = ledger

    def wants_copies(self, taken: IncomingMessage) -> bool:
        places = [place for _, place in self._large_spans(taken, above=0)]
        return sum(place.nbytes for place in places) > ON_LOOP_BYTES and not self._checked.expects(places)

    async def private_copies(self, taken: IncomingMessage) -> dict[int, memoryview]:
        prints = [(place, Fingerprint(self._checked.bytes_of(place))) for _, place in self._large_spans(taken, above=0)]
        job = self._pool.start([Portion(len(made.sums), BLOCK, made.add) for _, made in prints])
        try:
            # Goes on when cancelled, for the next call: or calls with short time-outs would never receive it.
            await join([asyncio.wrap_future(job.done)])
        finally:
            if job.done.done() and job.done.exception() is None:
                self._checked.expect({(place.slot, place.generation): made.complete() for place, made in prints})
        return {}

    def _buffer(self, placement: Placement, copy: memoryview | None, frames: Any) -> memoryview:
        if placement.where == FRAME and placement.nbytes <= self._checked.mapping.nbytes:
            self._checked.say_full(placement.nbytes)
        return super()._buffer(placement, copy, frames)


# Exit and fork ------------------------------------------------------------------------------------------------------

_checkers: weakref.WeakValueDictionary[threading.Thread, CheckedLedger] = weakref.WeakValueDictionary()
_exiting = [False]


def _end_checkers() -> None:
    # A daemon thread must not come back into an interpreter that is gone.
    _exiting[0] = True
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread, ledger in list(_checkers.items()):
        ledger.wake()
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_checkers)
os.register_at_fork(after_in_child=_checkers.clear)
