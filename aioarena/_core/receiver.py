"""ReceiverCore: one reader's half of a channel, every call returning at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from aioarena._core import words as shared
from aioarena._core.arena import SpanReleaser
from aioarena._core.layout import CLOSED, HEAD, TRIMMING, Layout
from aioarena._core.record import INLINE, Placement, decode_table, inline_offsets
from aioarena._core.ring import PACKED, SMALL, TABLE, RingReader
from aioarena.exceptions import EvictedError, InternalError


class Fate(Enum):
    """What comes next for a reader that has received everything visible."""

    OPEN = "open"
    ENDED = "ended"
    EVICTED = "evicted"


@dataclass(slots=True)
class IncomingMessage:
    """A message whose table was read and whose inline bytes were copied out of the ring.

    Attributes:
        placements: One per buffer; for a packed message, that of the pack alone.
        frame_number: Number of the ZMQ message with the frames, 0 for none.
        inline: Private copies of the INLINE buffers by index, None for the others.
        packed: Whether the one placement is a pack, to be read with :func:`unpack`.
    """

    placements: list[Placement]
    frame_number: int
    inline: list[bytearray | None]
    packed: bool = False


def unpack(body: memoryview, packed: bool = False) -> IncomingMessage:
    """Read a TABLE body, copying its inline buffers."""
    placements, frame_number = decode_table(body)
    inline = [
        bytearray(body[offset : offset + placement.nbytes]) if placement.where == INLINE else None
        for placement, offset in zip(placements, inline_offsets(placements), strict=True)
    ]
    return IncomingMessage(placements, frame_number, inline, packed)


class ReceiverCore:
    """A reader's half of a channel, without I/O.

    Args:
        control: The control segment.
        layout: Its layout.
        rank: Rank of this reader.
        incarnation: Number, unique in the channel, of this reader among all that ever ask for the rank.
    """

    def __init__(
        self,
        control: memoryview,
        layout: Layout,
        rank: int,
        incarnation: int,
        *,
        order: Callable[[], None] = shared.order,
        fence: Callable[[], None] = shared.fence,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.incarnation = incarnation
        self._words = words = control[: layout.ring_offset + layout.ring_bytes].cast("Q")
        self._bytes = control[layout.ring_offset :]
        self._order = order
        self._fence = fence
        self._seat = layout.seat(rank)
        self.ring = RingReader(words, self._bytes, layout, rank, order, fence)
        # Be done with the message last taken; True if the sender has to be woken. Bound, since it is called each time.
        self.advance = self.ring.advance
        self.spans = SpanReleaser(words, layout, rank, order)

    @property
    def seated(self) -> bool:
        """Whether the sender has given this reader the seat."""
        return self._words[self._seat] == self.incarnation

    @property
    def closed(self) -> bool:
        """Whether the sender has closed in good order."""
        return self._words[CLOSED] == 1

    @property
    def number(self) -> int:
        """Number on the channel, from 1 on, of the message that comes next; a late reader has received fewer."""
        return self._words[self.layout.seat_number(self.rank)] + self.ring.received + 1

    def start(self) -> None:
        """Begin where the sender seated this reader."""
        self._order()
        layout, words = self.layout, self._words
        self.ring.start(words[layout.seat_head(self.rank)], words[layout.seat_number(self.rank)])

    def take(self) -> bytes | IncomingMessage | None:
        """Copy the next message out of the ring, without moving on.

        Returns:
            The pickled bytes of a small message, the parts of a larger one, or None if there is none. Taking again
            gives the same; :meth:`advance` moves on.

        Raises:
            EvictedError: This reader has no seat any more.
            InternalError: The ring is damaged.
        """
        try:
            found = self.ring.look()
            if found is None:
                return None
            kind, start, nbytes = found
            taken: bytes | IncomingMessage
            if kind == SMALL:
                taken = self._bytes[start : start + nbytes].tobytes()
            elif kind in (TABLE, PACKED):
                taken = unpack(self._bytes[start : start + nbytes], kind == PACKED)
            else:
                raise InternalError(f"record of unknown kind {kind} at cursor {self.ring.cursor}")
        except InternalError:
            # After an eviction the ring is overwritten under us, and what we read is no record. The seat is looked at
            # after what was read, as below.
            self._order()
            self._check_seat()
            raise
        # What was read, before the seat: while it is still ours, nothing of it was overwritten.
        self._order()
        if self._words[self._seat] != self.incarnation:
            self._check_seat()
        return taken

    @property
    def aborted(self) -> bool:
        """Whether the sender has ended it otherwise."""
        return self._words[CLOSED] == 2

    def may_pin(self) -> bool:
        """Announce that this reader pins the arena; False if it has to ask again later, because it is being trimmed."""
        self._words[self.layout.pins(self.rank)] = 1
        self._fence()  # see SenderCore.begin_trim
        return self._words[TRIMMING] == 0

    def fate(self) -> Fate:
        """What to expect when :meth:`take` found nothing."""
        if self._words[self._seat] != self.incarnation:
            return Fate.EVICTED
        # Closed before head: the sender stores its last head first, so a head read after closed is the last one.
        if self.closed:
            self._order()
            if self._words[HEAD] == self.ring.cursor:
                return Fate.ENDED
        return Fate.OPEN

    def park(self) -> bool:
        """Announce that this reader is about to sleep; True if it may, False if it has to look again."""
        return self.ring.park() and self.fate() is Fate.OPEN

    def unpark(self) -> None:
        self.ring.unpark()

    def _check_seat(self) -> None:
        if self._words[self._seat] != self.incarnation:
            raise EvictedError(
                f"the sender gave reader {self.rank} up after {self.ring.received} messages, because it fell behind or "
                "lost its connection; close it and attach a new Receiver to go on from the current message"
            )
