"""Reading the ring on behalf of another: what was read stays in the ring until the other has it.

The sender's own process reads so for each remote reader, and sends what it reads. The tail, which lets the sender
overwrite and which says how far the reader is behind, only moves when the reader acknowledges; after a cut the reading goes
back to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aioarena._core import words as shared
from aioarena._core.arena import SpanReleaser
from aioarena._core.layout import SENDER_PARKED, Layout
from aioarena._core.receiver import IncomingMessage, unpack
from aioarena._core.record import ARENA, Placement
from aioarena._core.ring import PACKED, SMALL, RingReader

Memory = bytes | bytearray | memoryview


@dataclass(slots=True)
class Passage:
    """A message that was read and is not acknowledged.

    Attributes:
        tail: Cursor behind its record.
        buffers: The pickled bytes and the out-of-band buffers, where they lie.
        spans: (slot, generation) of what it holds of the arena.
    """

    tail: int
    buffers: list[Memory]
    spans: list[tuple[int, int]] = field(default_factory=list)


class AheadReader:
    """Reads a channel at one of its seats, from inside the sender's process.

    Args:
        control: The control segment.
        layout: Its layout.
        rank: Of the seat, which was just given.
        arena: The memory of the arena, None without one.
        frames: The parts of a frame message, by its number.

    Attributes:
        first: Number on the channel of the first message for this seat.
        read: Messages read.
        acknowledged: Messages the reader is done with.
    """

    def __init__(
        self,
        control: memoryview,
        layout: Layout,
        rank: int,
        arena: memoryview | None,
        frames: Callable[[int], Sequence[Memory]],
        *,
        order: Callable[[], None] = shared.order,
        fence: Callable[[], None] = shared.fence,
    ) -> None:
        self._words = words = control[: layout.ring_offset + layout.ring_bytes].cast("Q")
        self._bytes = control[layout.ring_offset :]
        self._layout = layout
        self._rank = rank
        self._arena = arena
        self._frames = frames
        self._order = order
        self._fence = fence
        self._spans = SpanReleaser(words, layout, rank, order)
        self.first = words[layout.seat_number(rank)]
        self._tail = words[layout.seat_head(rank)]
        self._unacknowledged: deque[Passage] = deque()
        self.read = 0
        self.acknowledged = 0
        self._ring = RingReader(words, self._bytes, layout, rank, order, fence)
        self._ring.start(self._tail, self.first)

    @property
    def tail(self) -> int:
        """Cursor up to which the reader is done."""
        return self._tail

    def take(self) -> Passage | None:
        """Read the next message, None if there is none."""
        found = self._ring.look()
        if found is None:
            return None
        kind, start, nbytes = found
        body = self._bytes[start : start + nbytes]
        passage = Passage(self._ring.skip(), [])
        if kind == SMALL:
            passage.buffers.append(body.tobytes())
        else:
            self._collect(passage, unpack(body, kind == PACKED))
        self.read += 1
        self._unacknowledged.append(passage)
        return passage

    def _collect(self, passage: Passage, message: IncomingMessage) -> None:
        frames = iter(self._frames(message.frame_number) if message.frame_number else ())

        def locate(placement: Placement) -> Memory:
            if placement.where != ARENA:
                return next(frames)
            assert self._arena is not None
            passage.spans.append((placement.slot, placement.generation))
            return self._arena[placement.start : placement.start + placement.nbytes]

        if message.packed:
            message = unpack(memoryview(locate(message.placements[0])))
        for placement, inline in zip(message.placements, message.inline, strict=True):
            passage.buffers.append(locate(placement) if inline is None else inline)

    def acknowledge(self, messages: int) -> bool:
        """The reader is done with so many messages.

        Returns:
            True if the sender waits for exactly this step and has to be woken.
        """
        before = self._tail
        while self.acknowledged < messages:
            passage = self._unacknowledged.popleft()
            passage.buffers.clear()
            for slot, generation in passage.spans:
                self._spans.release(slot, generation)
            self._tail = passage.tail
            self.acknowledged += 1
        words, layout = self._words, self._layout
        self._order()
        words[layout.tail(self._rank)] = self._tail
        words[layout.received(self._rank)] = self.acknowledged
        self._fence()  # as RingReader.advance
        return before < words[SENDER_PARKED] <= self._tail

    def rewind(self) -> None:
        """Go back to the first message that is not acknowledged."""
        self._unacknowledged.clear()
        self.read = self.acknowledged
        self._ring.start(self._tail, self.first + self.acknowledged)

    def park(self) -> bool:
        """Ask to be told of the next message; False if it is there already."""
        return self._ring.park()

    def unpark(self) -> None:
        self._ring.unpark()
