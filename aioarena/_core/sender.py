"""SenderCore: ring, arena and members put together, one message at a time, every call returning at once.

The path of a message::

    place(sizes)            claim spans, decide what travels where; nothing is visible
      (the front copies)
    shortage(message)       what has to happen before it can be published: None, or a tail to wait for
    publish(message, ...)   visible to every seated reader; cannot fail once ``shortage`` said None
    unplace(message)        instead of publish: give everything back

``send_small`` does all of it in one call for a message that is only a few pickled bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from aioarena._core import words as shared
from aioarena._core.arena import Arena, Holder, Loan, Span, snapshot
from aioarena._core.layout import ARENA_SENT, FRAMES_SENT, TRIMMING, Layout
from aioarena._core.record import (
    ARENA,
    FRAME,
    INLINE,
    Placement,
    body_bytes,
    encode_table,
    inline_offsets,
    table_bytes,
)
from aioarena._core.ring import PACKED, SMALL, TABLE, RingWriter
from aioarena._core.spans import SpanTable

# Largest body that goes into the ring as it is, as a share of the ring: a record has to be contiguous, so half the ring
# may be lost to a pad, and several messages should fit.
_BODY_SHARE = 8

# Why a buffer did not travel through the arena, or not where it lay; the keys of Sender.statistics().fallbacks.
ARENA_FULL = "arena_full"
LARGER_THAN_ARENA = "larger_than_arena"
BELOW_MIN_BYTES = "below_min_bytes"
ARENA_OFF = "arena_off"
NOT_DIVERTIBLE = "not_divertible"
LENT_BUSY = "lent_busy"
REASONS = (ARENA_FULL, LARGER_THAN_ARENA, BELOW_MIN_BYTES, ARENA_OFF, NOT_DIVERTIBLE, LENT_BUSY)


class Membership(Enum):
    """What the sender knows of a rank."""

    AWAITED = "awaited"  # nobody attached yet
    JOINED = "joined"
    LEFT = "left"  # closed in good order
    LOST = "lost"  # died
    EVICTED = "evicted"


@dataclass(slots=True)
class PlacedMessage:
    """A message whose buffers have their places.

    Attributes:
        kind: Kind of the ring record.
        placements: One per buffer.
        offsets: Where each INLINE buffer stands in the body.
        pack: Placement of the body itself when it is too large for the ring (kind PACKED), else None.
        spans: Claimed spans by buffer index; -1 is the pack.
        frames: Buffer indices that travel as frames, in order; -1 is the pack.
        frame_number: Number of the ZMQ message with those frames, 0 for none.
        frame_nbytes: Bytes of all frames.
        record_nbytes: Body bytes that go into the ring.
        fallbacks: Why buffers did not take the arena.
    """

    kind: int
    placements: list[Placement]
    offsets: list[int]
    pack: Placement | None = None
    spans: dict[int, Span] = field(default_factory=dict)
    frames: list[int] = field(default_factory=list)
    frame_number: int = 0
    frame_nbytes: int = 0
    record_nbytes: int = 0
    fallbacks: list[str] = field(default_factory=list)

    @property
    def table(self) -> bytes:
        """The table of the body, wherever the body travels."""
        return encode_table(self.placements, self.frame_number)

    @property
    def body_nbytes(self) -> int:
        return body_bytes(self.placements)


class SenderCore:
    """The sender's half of a channel, without I/O.

    Args:
        control: The control segment, formatted.
        layout: Its layout.
        min_bytes: Buffers of at least this many bytes leave the ring.
        frame_budget: Bytes of frames that may be under way before the sender waits. One larger message may go alone.
        clock: Tells the time in seconds, for the age of spans.
    """

    def __init__(
        self,
        control: memoryview,
        layout: Layout,
        *,
        min_bytes: int,
        frame_budget: int,
        order: Callable[[], None] = shared.order,
        fence: Callable[[], None] = shared.fence,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.layout = layout
        self._words = words = control[: layout.ring_offset + layout.ring_bytes].cast("Q")
        self._order = order
        self._fence = fence
        self.ring = RingWriter(words, control[layout.ring_offset :], layout, order, fence)
        self.arena = Arena(words, layout, order, clock, SpanTable(words, layout, order, clock))
        self.min_bytes = min_bytes
        self._max_body = layout.ring_bytes // _BODY_SHARE
        # The largest pickled message that takes the one-call path.
        self.small_limit = min(min_bytes, self._max_body)
        self._frame_budget = frame_budget
        self._frame_number = 0
        self._frames: deque[tuple[int, int]] = deque()  # (head behind the message, frame bytes), oldest first
        self.frame_nbytes = 0
        self.members = [Membership.AWAITED] * layout.readers
        self._holders: list[Holder | None] = [None] * layout.readers
        self.awaited = layout.readers  # ranks in state AWAITED
        self.inline_nbytes = 0
        self.arena_nbytes = 0
        self.lent_nbytes = 0  # of those
        self.framed_nbytes = 0
        self.fallbacks = dict.fromkeys(REASONS, 0)

    # Members ------------------------------------------------------------------------------------------------------

    def join(self, rank: int, incarnation: int, pid: int = 0) -> Holder:
        """Seat a reader at a rank nobody sits at. It receives what is published from now on. The pid is for onlookers."""
        assert self.members[rank] is not Membership.JOINED
        if self.members[rank] is Membership.AWAITED:
            self.awaited -= 1
        layout, words = self.layout, self._words
        self.ring.add_reader(rank)
        words[layout.seat_head(rank)] = self.ring.head
        words[layout.seat_number(rank)] = self.ring.published
        words[layout.seat_pid(rank)] = pid
        # Everything the reader starts from, before the seat that lets it start.
        self._order()
        words[layout.seat(rank)] = incarnation
        self.members[rank] = Membership.JOINED
        holder = self._holders[rank] = Holder(rank)
        return holder

    def unseat(self, rank: int, reason: Membership) -> None:
        """Stop sending to a reader. What it holds stays held until it releases it or its holder is marked dead."""
        assert self.members[rank] is Membership.JOINED
        self._words[self.layout.seat(rank)] = 0
        # The empty seat, before anything is overwritten that the reader has not read: it checks its seat after reading.
        self._fence()
        self.members[rank] = reason
        self._holders[rank] = None
        self.ring.drop_reader(rank)
        self._settle_frames()

    def skip_unread(self, rank: int, holder: Holder) -> None:
        """Free what a reader did not receive. Only for one that has said that it takes no more messages, and before
        another sits at its rank."""
        layout, words = self.layout, self._words
        self.arena.forget(holder, words[layout.seat_number(rank)] + words[layout.received(rank)])

    def begin_trim(self) -> bool:
        """Whether pages of the arena may be taken out from now on: not once a reader has pinned them.

        What is pinned stays in memory and stays what its GPU reads, while the file gets other pages.
        """
        words, layout = self._words, self.layout
        words[TRIMMING] = 1
        # Our word, fence, theirs; a reader that is about to pin does its own, fence, ours. One of the two sees the other.
        self._fence()
        if any(words[layout.pins(rank)] for rank in range(layout.readers)):
            self.end_trim()
            return False
        return True

    def end_trim(self) -> None:
        self._order()
        self._words[TRIMMING] = 0

    def lag(self, rank: int) -> tuple[int, int]:
        """(messages, bytes) published that a seated reader has not received."""
        layout, words = self.layout, self._words
        messages = self.ring.published - words[layout.seat_number(rank)] - words[layout.received(rank)]
        return messages, self.ring.head - words[layout.tail(rank)]

    @property
    def seated(self) -> list[int]:
        return [rank for rank, member in enumerate(self.members) if member is Membership.JOINED]

    # Messages -----------------------------------------------------------------------------------------------------

    def send_small(self, pickled: bytes) -> bool:
        """Publish a message of at most ``small_limit`` pickled bytes and no buffers; False if there is no room."""
        if not self.ring.append(SMALL, pickled):
            return False
        self.inline_nbytes += len(pickled)
        return True

    def place(self, sizes: Sequence[int], lent: Mapping[int, tuple[Loan, int]] | None = None) -> PlacedMessage:
        """Decide where each buffer travels, claiming spans for those that take the arena.

        Args:
            sizes: Bytes of the pickled part, then of each out-of-band buffer.
            lent: Of the buffers that lie in lent slots already, by index: the loan, and where they start in the arena.
        """
        if len(sizes) == 1 and sizes[0] <= self.small_limit:
            return PlacedMessage(SMALL, [Placement(INLINE, sizes[0])], [0], record_nbytes=sizes[0])
        message = PlacedMessage(TABLE, [], [])
        for index, nbytes in enumerate(sizes):
            if nbytes < self.min_bytes:
                if index:
                    message.fallbacks.append(BELOW_MIN_BYTES)
                message.placements.append(Placement(INLINE, nbytes))
            else:
                placement = self._place_lent(message, index, nbytes, *lent[index]) if lent and index in lent else None
                message.placements.append(placement or self._place_large(message, index, nbytes))
        message.offsets = inline_offsets(message.placements)
        body = message.body_nbytes
        if body > self._max_body:
            message.kind = PACKED
            message.pack = self._place_large(message, -1, body)
            body = table_bytes(1)
        message.record_nbytes = body
        return message

    def _place_lent(self, message: PlacedMessage, index: int, nbytes: int, loan: Loan, start: int) -> Placement | None:
        span = self.arena.use(loan, nbytes)
        if span is None:
            message.fallbacks.append(LENT_BUSY)
            return None
        message.spans[index] = span
        return Placement(ARENA, nbytes, span.slot, span.generation, start)

    def _place_large(self, message: PlacedMessage, index: int, nbytes: int) -> Placement:
        if not self.arena.slots:
            message.fallbacks.append(ARENA_OFF)
        elif not self.arena.fits(nbytes):
            message.fallbacks.append(LARGER_THAN_ARENA)
        else:
            span = self.arena.claim(nbytes)
            if span is not None:
                message.spans[index] = span
                return Placement(ARENA, nbytes, span.slot, span.generation, span.slot * self.arena.slot_bytes)
            message.fallbacks.append(ARENA_FULL)
        # The pack is read first, so it goes first.
        message.frames.insert(0 if index < 0 else len(message.frames), index)
        message.frame_nbytes += nbytes
        return Placement(FRAME, nbytes)

    def unplace(self, message: PlacedMessage) -> None:
        """Give back everything a message claimed; harmless after publish."""
        while message.spans:
            self.arena.unclaim(message.spans.popitem()[1])

    def shortage(self, message: PlacedMessage) -> int | None:
        """What the message still waits for.

        Returns:
            None if it can be published now; else the tail that the slowest reader has to reach first.
        """
        if message.frame_nbytes:
            self._settle_frames()
            excess = self.frame_nbytes + message.frame_nbytes - self._frame_budget
            if excess > 0 and self._frames:
                for end, nbytes in self._frames:
                    excess -= nbytes
                    if excess <= 0:
                        return end
                # Larger than the whole budget: it goes alone.
                return self._frames[-1][0]
        if self.ring.reserve(message.record_nbytes) < 0:
            return self.ring.threshold(message.record_nbytes)
        return None

    def number_frames(self, message: PlacedMessage) -> int:
        """Number the frames of a message, right before they are sent and the message is published.

        Not earlier: readers forget frames up to the number of the message they received last, and messages may be
        published in another order than they were placed in.
        """
        self._frame_number += 1
        message.frame_number = self._frame_number
        return message.frame_number

    def publish(self, message: PlacedMessage, inline: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Make a message visible. Its spans are filled, and its frames are on their way.

        Args:
            message: What ``shortage`` had nothing against, with no publication in between.
            inline: (offset, bytes) of the inline buffers; empty for a packed message.
        """
        holders = [holder for holder in self._holders if holder is not None]
        if message.kind == SMALL:
            parts = inline
        elif message.pack is None:
            parts = [(0, message.table), *inline]
        else:
            parts = [(0, encode_table([message.pack], message.frame_number))]
        # Holders are known before the record is visible: a reader may release a span the moment it sees it.
        for span in message.spans.values():
            self.arena.publish(span, holders, self.ring.published)
            self.arena_nbytes += span.nbytes
            if span.loan is not None:
                self.lent_nbytes += span.nbytes
        if message.spans:
            self._words[ARENA_SENT] = self.arena_nbytes
            message.spans.clear()
        if not self.ring.append_parts(message.kind, message.record_nbytes, parts):
            raise AssertionError("publish without room: shortage() was not asked")
        self.inline_nbytes += message.record_nbytes
        if message.frame_nbytes:
            self.framed_nbytes += message.frame_nbytes
            self._words[FRAMES_SENT] = self.framed_nbytes
            self.frame_nbytes += message.frame_nbytes
            self._frames.append((self.ring.head, message.frame_nbytes))
        for reason in message.fallbacks:
            self.fallbacks[reason] += 1

    def sleepers(self) -> Sequence[int]:
        """Ranks that have to be woken after a publication."""
        return self.ring.sleepers()

    def _settle_frames(self) -> None:
        tail = self.ring.slowest_tail()
        while self._frames and self._frames[0][0] <= tail:
            self.frame_nbytes -= self._frames.popleft()[1]

    @property
    def frames_pending(self) -> int:
        """Bytes of frames that some reader has not received. Any thread may ask."""
        tail = self.ring.slowest_tail()
        return sum(nbytes for end, nbytes in snapshot(self._frames) if end > tail)

    @property
    def frames_end(self) -> int:
        """The tail at which no frame is pending any more."""
        self._settle_frames()
        return self._frames[-1][0] if self._frames else 0
