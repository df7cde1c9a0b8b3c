"""Pages of the arena: brought in before they are needed, in the background, and given back when nobody needs them."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable

from aioarena._copying import CopyPool, join
from aioarena._core.sender import SenderCore
from aioarena._platform.memory import Mapping, Segment

logger = logging.getLogger("aioarena")

# Bytes populated at a time: a fraction of a millisecond, which is what closing may have to wait for.
_STEP_BYTES = 256 << 10

# Bytes given back at a time. Meanwhile a send cannot use them; larger ones would make sends go as frames.
_TRIM_BYTES = 32 << 20


class Prefault:
    """Populates the start of an arena in a thread of its own, in steps, so that copies do not wait for it.

    Args:
        label: Whose, for logs.
        mapping: The arena.
        nbytes: How much, from its start on.
        segment: The sender's segment, populated for writing; None at a reader, which only reads.

    Attributes:
        done: Bytes populated so far.
    """

    def __init__(self, label: str, mapping: Mapping, nbytes: int, segment: Segment | None = None) -> None:
        self._label = label
        self._mapping = mapping
        self._nbytes = nbytes
        self._segment = segment
        self._stopped = False
        self.done = 0
        # A daemon, because the interpreter waits for others at exit before anything of ours is asked to stop.
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="aioarena-prefault", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._warn(error)
        else:
            _running.add(self)

    def _run(self) -> None:
        while not self._stopped and self.done < self._nbytes:
            stop = min(self._nbytes, self.done + _STEP_BYTES)
            try:
                if self._segment is not None and self._segment.needs_reserve(stop):
                    self._segment.reserve(stop)
                self._mapping.populate(self.done, stop, write=self._segment is not None)
            except OSError as error:  # no space, too, which is for the send to say that needs it
                if not self._stopped:
                    self._warn(error)
                return
            self.done = stop

    def _warn(self, error: Exception) -> None:
        # The text, not the error: whoever keeps the record would keep the arena.
        logger.warning("%s: stopped populating the arena after %d bytes: %s", self._label, self.done, str(error))

    def close(self) -> None:
        """Stop; waits for the step under way."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None


_running: weakref.WeakSet[Prefault] = weakref.WeakSet()


def _stop_at_exit() -> None:
    # A daemon thread must not come back into an interpreter that is gone.
    for prefault in list(_running):
        prefault.close()


def _after_fork_in_child() -> None:
    _running.clear()  # the threads are the parent's


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)


async def trim(core: SenderCore, segment: Segment, pool: CopyPool, check: Callable[[], None]) -> int:
    """Give the memory of slots that nobody uses back to the system, piece by piece. One at a time.

    Args:
        core: Whose arena it is.
        segment: The arena.
        pool: Threads.
        check: Called after each piece, to raise if the sender was closed meanwhile.

    Returns:
        The bytes given back; 0 if a reader has pinned the arena.
    """
    arena, before = core.arena, segment.in_memory
    if not core.begin_trim():
        return 0
    most = max(1, _TRIM_BYTES // arena.slot_bytes)
    try:
        # Highest first: the lowest are those that the next messages take.
        runs = arena.free_runs()
        if segment.has_quota:
            # What is reserved there is known by its end only, so only what is behind everything in use can be given back.
            runs = [(first, slots) for first, slots in runs if first + slots == arena.slots]
        for first, slots in reversed(runs):
            for slot in reversed(range(first, first + slots, most)):
                count = min(most, first + slots - slot)
                if not arena.set_aside(slot, count):
                    continue  # taken since
                try:
                    start, stop = slot * arena.slot_bytes, (slot + count) * arena.slot_bytes
                    await join([asyncio.wrap_future(pool.executor.submit(segment.give_back, start, stop))])
                except OSError:
                    check()
                    raise
                finally:
                    arena.put_back(slot, count)
                check()
    finally:
        core.end_trim()
    return max(0, before - segment.in_memory)
