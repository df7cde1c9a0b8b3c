"""Pages of the arena: brought in before they are needed, in the background, and given back when nobody needs them."""

from __future__ import annotations

import asyncio
import logging

from aioarena._copying import CopyPool, Portion, join
from aioarena._core.sender import SenderCore
from aioarena._platform.memory import Mapping, Segment
from aioarena.exceptions import NoSpaceError

logger = logging.getLogger("aioarena")

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
        self._segment = segment
        self._failed = False
        self.done = 0
        self._pool = CopyPool("prefault", threads=1)
        self._pool.start([Portion(nbytes, 1, self._populate)])

    def _populate(self, start: int, stop: int) -> None:
        if self._failed:
            return
        try:
            if self._segment is not None and self._segment.needs_reserve(stop):
                self._segment.reserve(stop)
            self._mapping.populate(start, stop, write=self._segment is not None)
        except (OSError, NoSpaceError) as error:
            # It is only slower without. No space is for the send to say that needs it.
            self._failed = True
            # The text, not the error: whoever keeps the record would keep the arena.
            logger.warning("%s: stopped populating the arena after %d bytes: %s", self._label, self.done, str(error))
        else:
            self.done += stop - start

    def close(self) -> None:
        """Stop; waits for the step under way."""
        self._pool.close()


async def trim(core: SenderCore, segment: Segment, pool: CopyPool) -> int:
    """Give the memory of slots that nobody uses back to the system, piece by piece.

    Returns:
        The bytes given back; 0 if a reader has pinned the arena.
    """
    arena, before = core.arena, segment.in_memory
    if not core.begin_trim():
        return 0
    most = max(1, _TRIM_BYTES // arena.slot_bytes)
    try:
        # Highest first: the lowest are those that the next messages take.
        for first, slots in reversed(arena.free_runs()):
            for slot in reversed(range(first, first + slots, most)):
                count = min(most, first + slots - slot)
                if not arena.set_aside(slot, count):
                    continue  # taken since
                try:
                    start, stop = slot * arena.slot_bytes, (slot + count) * arena.slot_bytes
                    await join([asyncio.wrap_future(pool.executor.submit(segment.give_back, start, stop))])
                finally:
                    arena.put_back(slot, count)
    finally:
        core.end_trim()
    return max(0, before - segment.in_memory)
