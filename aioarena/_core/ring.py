"""The byte ring: one writer, N readers, records of any size, and the parking protocol of both sides.

Cursors count bytes and only grow; ``offset = cursor % capacity``. A record is one header word and its body, padded to
8 bytes. A record never wraps: where it would, a pad record fills the rest of the lap. Nothing is ever reset.

Header word::

    bits  0..31   body bytes
    bits 32..39   kind
    bits 40..63   number of the message, modulo 2**24: a reader that finds another number reports damage

Order (see words.py for what gives it):

* writer: body and header, ``order``, head.      reader: head, ``order``, header and body.
* reader: body read, ``order``, tail.            writer: tail, ``order``, overwrite.
* reader parks: parked word, ``fence``, head.    writer: head, ``fence``, parked words.
* writer parks: parked word, ``fence``, tails.   reader: tail, ``fence``, writer's parked word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioarena._core.layout import CLOSED, HEAD, PUBLISHED, SENDER_PARKED, Layout
from aioarena._core.words import Words
from aioarena.exceptions import InternalError

PAD = 0
SMALL = 1  # body: the pickled bytes
TABLE = 2  # body: a table of placements and the inline buffers, see record.py
PACKED = 3  # body: one placement, of a buffer that holds what a TABLE body would

_KIND_SHIFT = 32
_NUMBER_SHIFT = 40
_NUMBER_MASK = (1 << 24) - 1
_NBYTES_MASK = (1 << 32) - 1


class RingWriter:
    """The sender's side of the ring.

    Attributes:
        head: Byte cursor after the last published record.
        published: Messages published so far.
        peak: Most bytes that some reader had not received, at the times that the tails were read: when as much as the
            ring holds had been written since the last time, or a reader was dropped, or there was no room.
    """

    def __init__(
        self,
        words: Words,
        ring: memoryview,
        layout: Layout,
        order: Callable[[], None],
        fence: Callable[[], None],
    ) -> None:
        self._words = words
        self._ring = ring
        self._layout = layout
        self._order = order
        self._fence = fence
        self._capacity = layout.ring_bytes
        self._first_word = layout.ring_offset // 8
        self.head = 0
        self.published = 0
        self.peak = 0
        self._pad = 0  # bytes of the pad record before the place last reserved
        # Cursor up to which the ring may be written: slowest known tail + capacity. Tails are only read again when
        # this would be overrun, so a sender that is not held up never touches the readers' cache lines.
        self._limit = self._capacity
        self._tails: list[int] = []  # word indices of the tails that hold the writer back
        self._parked: list[int] = []  # word indices of the parked words of the same readers
        self._first_parked = layout.parked
        self._woken: dict[int, int] = {}  # parked word index -> number of the park already woken

    # Members ------------------------------------------------------------------------------------------------------

    def add_reader(self, rank: int) -> None:
        """Start a reader at the current head. Its words have no other writer until it sees its seat."""
        layout, words = self._layout, self._words
        words[layout.tail(rank)] = self.head
        words[layout.received(rank)] = 0
        words[layout.parked + rank] = 0
        self._woken[layout.parked + rank] = 0
        self._tails.append(layout.tail(rank))
        self._parked.append(layout.parked + rank)

    def drop_reader(self, rank: int) -> None:
        """Stop waiting for a reader."""
        self._tails.remove(self._layout.tail(rank))
        self._parked.remove(self._layout.parked + rank)
        self._refresh()

    # Writing ------------------------------------------------------------------------------------------------------

    def append(self, kind: int, body: bytes) -> bool:
        """Publish one record; False if there is no room. Readers are not woken yet: see :meth:`sleepers`."""
        nbytes = len(body)
        start = self.reserve(nbytes)
        if start < 0:
            return False
        self._ring[start : start + nbytes] = body
        self.publish(kind, start, nbytes)
        return True

    def append_parts(self, kind: int, nbytes: int, parts: Sequence[tuple[int, bytes | memoryview]]) -> bool:
        """Publish one record whose body is given as (offset in the body, bytes) pieces; False if there is no room."""
        start = self.reserve(nbytes)
        if start < 0:
            return False
        for offset, part in parts:
            self._ring[start + offset : start + offset + len(part)] = part
        self.publish(kind, start, nbytes)
        return True

    def reserve(self, nbytes: int) -> int:
        """Find room for a body: its offset in the ring, or -1. Nothing is visible before :meth:`publish`."""
        size = (nbytes + 15) & ~7
        capacity = self._capacity
        offset = self.head % capacity
        if offset + size <= capacity:
            if self.head + size > self._limit and self.head + size > self._refresh():
                return -1
            self._pad = 0
            return offset + 8
        pad = capacity - offset
        if self.head + pad + size > self._limit and self.head + pad + size > self._refresh():
            return -1
        # Readers see the pad only once the head passes it, together with the record behind it.
        self._words[self._first_word + (offset >> 3)] = (pad - 8) | PAD << _KIND_SHIFT
        self._pad = pad
        return 8

    def publish(self, kind: int, start: int, nbytes: int) -> None:
        """Make the record at ``start``, just reserved and filled, visible to all readers."""
        words = self._words
        words[self._first_word + (start >> 3) - 1] = (
            nbytes | kind << _KIND_SHIFT | (self.published & _NUMBER_MASK) << _NUMBER_SHIFT
        )
        self.head += self._pad + ((nbytes + 15) & ~7)
        self.published += 1
        # Body and header before the head: a reader that sees the head first would decode the previous lap.
        self._order()
        words[HEAD] = self.head
        words[PUBLISHED] = self.published

    def sleepers(self) -> Sequence[int]:
        """Ranks of the readers that have parked and were not woken since; to be asked after each publication."""
        # Head (stored by publish), fence, parked words. Without the fence the parked words may be read before the
        # head is visible: the reader parks in between, misses the record, and nobody wakes it.
        self._fence()
        words, woken = self._words, self._woken
        found: list[int] | None = None
        for index in self._parked:
            park = words[index]
            if park and park != woken[index]:
                woken[index] = park
                found = found or []
                found.append(index - self._first_parked)
        return found or ()

    def close(self) -> None:
        """Announce the clean end: no record follows the current head."""
        self._order()
        self._words[CLOSED] = 1
        self._fence()

    def abort(self) -> None:
        """Announce that it ends otherwise, for readers that wait for a seat: those that have one are told why."""
        self._order()
        self._words[CLOSED] = 2

    @property
    def closed(self) -> bool:
        """Whether the clean end was announced."""
        return self._words[CLOSED] == 1

    # Waiting for room ---------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that can be written now, before any reader moves."""
        return self._refresh() - self.head

    def slowest_tail(self) -> int:
        """The tail of the slowest reader; the head when there is none."""
        words = self._words
        return min((words[index] for index in self._tails), default=self.head)

    def tail(self, rank: int) -> int:
        """How far a reader has come."""
        return self._words[self._layout.tail(rank)]

    def threshold(self, nbytes: int) -> int:
        """The slowest tail at which a record of ``nbytes`` would fit, with some more room so that one wake-up serves
        many messages."""
        size = (nbytes + 15) & ~7
        offset = self.head % self._capacity
        pad = 0 if offset + size <= self._capacity else self._capacity - offset
        return min(self.head, self.head + pad + size - self._capacity + self._capacity // 4)

    def park(self, threshold: int) -> bool:
        """Ask the readers to wake the sender once they pass ``threshold``.

        Returns:
            True if the sender may sleep now; False if the room is there already.
        """
        self._words[SENDER_PARKED] = threshold
        # Parked word, fence, tails: a reader does tail, fence, parked word. One of the two sees the other.
        self._fence()
        return self.slowest_tail() < threshold

    def unpark(self) -> None:
        self._words[SENDER_PARKED] = 0

    def _refresh(self) -> int:
        tail = self.slowest_tail()
        self._limit = tail + self._capacity
        self.peak = max(self.peak, self.head - tail)
        # The tails just read, before the bytes that they allow to be overwritten.
        self._order()
        return self._limit


class RingReader:
    """One reader's side of the ring.

    Attributes:
        cursor: Byte cursor of the next record to look at.
        first: Byte cursor where it began.
        received: Messages this reader is done with.
    """

    def __init__(
        self,
        words: Words,
        ring: memoryview,
        layout: Layout,
        rank: int,
        order: Callable[[], None],
        fence: Callable[[], None],
    ) -> None:
        self._words = words
        self._ring = ring
        self._order = order
        self._fence = fence
        self._capacity = layout.ring_bytes
        self._first_word = layout.ring_offset // 8
        self._tail = layout.tail(rank)
        self._received = layout.received(rank)
        self._parked = layout.parked + rank
        self._parks = 0
        self.cursor = 0
        self.first = 0
        self.received = 0
        self._number = 0  # number of the next message on the channel; differs from received for a late reader
        self._known_head = 0
        self._stored_tail = 0
        self._next = 0  # cursor behind the record last looked at

    def start(self, cursor: int, number: int) -> None:
        """Begin at ``cursor``, where the sender put this reader, with message ``number`` of the channel."""
        self.cursor = self.first = self._known_head = self._stored_tail = cursor
        self._number = number & _NUMBER_MASK

    def look(self) -> tuple[int, int, int] | None:
        """Look at the next record: (kind, start of the body in the ring, bytes of the body), or None.

        Looking twice gives the same record; only :meth:`advance` moves on.
        """
        words = self._words
        cursor = self.cursor
        if cursor == self._known_head:
            head = words[HEAD]
            if head == cursor:
                return None
            # Head before header and body, or we might read what lay there a lap ago.
            self._order()
            self._known_head = head
        offset = cursor % self._capacity
        word = words[self._first_word + (offset >> 3)]
        kind = word >> _KIND_SHIFT & 0xFF
        if kind == PAD:
            cursor += self._capacity - offset
            self.cursor = cursor
            offset = 0
            word = words[self._first_word]
            kind = word >> _KIND_SHIFT & 0xFF
        nbytes = word & _NBYTES_MASK
        if word >> _NUMBER_SHIFT != self._number:
            raise InternalError(
                f"record at cursor {cursor} carries number {word >> _NUMBER_SHIFT}, expected {self._number}: "
                "the ring is damaged or was overwritten"
            )
        self._next = cursor + ((nbytes + 15) & ~7)
        return kind, offset + 8, nbytes

    def advance(self) -> bool:
        """Be done with the record last looked at.

        Returns:
            True if the sender waits for exactly this step and has to be woken.
        """
        words = self._words
        # The tail as the sender saw it last, which is not the cursor where a pad record was skipped.
        before = self._stored_tail
        self.cursor = self._stored_tail = after = self._next
        self._number = (self._number + 1) & _NUMBER_MASK
        self.received += 1
        # What was read from the ring, before the tail that lets the sender overwrite it.
        self._order()
        words[self._tail] = after
        words[self._received] = self.received
        # Tail, fence, sender's parked word; the sender does parked word, fence, tails.
        self._fence()
        # Only the reader that crosses the threshold wakes the sender, and only once.
        return before < words[SENDER_PARKED] <= after

    def skip(self) -> int:
        """Move past the record last looked at without being done with it; the cursor behind it."""
        self.cursor = self._next
        self._number = (self._number + 1) & _NUMBER_MASK
        return self.cursor

    def park(self) -> bool:
        """Announce that this reader is about to sleep.

        Returns:
            True if it may sleep; False if something is there by now, and it has to look again.
        """
        self._parks += 1
        self._words[self._parked] = self._parks
        # Park, fence, look once more. Without the fence the CPU may look first: we miss the record, the sender misses
        # that we parked, and nobody wakes us.
        self._fence()
        return self._words[HEAD] == self.cursor

    def unpark(self) -> None:
        self._words[self._parked] = 0

    @property
    def lag(self) -> int:
        """Bytes published and not yet received."""
        return self._words[HEAD] - self.cursor
