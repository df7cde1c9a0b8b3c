"""The arena: equal slots, spans of neighbouring slots, and who still holds which span.

A buffer takes a span of ``ceil(nbytes / slot_bytes)`` neighbouring slots. Only the sender allocates: first fit from the
lowest address, free neighbours coalesced. Lowest first is what keeps the arena fast: a copy into pages that were
touched before takes a fraction of one into fresh pages, and readers have them mapped already.

Every allocation gets its own *generation*, a counter of the channel. Reader r releases a span by storing its generation
in ``done[first slot][r]``; a span is free once every reader it was published to stored that generation or is dead. A late
release of an older generation changes nothing, and nothing has to be reset.

Slots may also be *lent* to the sender's own code, which fills them and sends them as often as it likes. Each such
publication is a span of its own, with a generation of its own, that borrows the done words of one of the loan's slots. The
slots are free again once the sender's code has dropped the loan and all its publications are released.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from aioarena._core.layout import Layout
from aioarena._core.spans import SpanTable
from aioarena._core.words import Words

# Uses of one loan at the same time, if it has as many slots. A bound for the list of them; a guess far above need.
_MOST_USES = 64

# Published spans looked at on each allocation. Bounds the time of one send when readers retain thousands of spans;
# when nothing fits, all are looked at before the arena counts as full.
_REAP_STEP = 64


T = TypeVar("T")


def snapshot(items: Iterable[T]) -> list[T]:
    """A copy of a collection that another thread may be changing."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # it changed meanwhile, which takes far longer from one time to the next than copying does
            continue


class Holder:
    """A reader as the arena sees it: one process that was given a seat.

    Attributes:
        rank: Its rank.
        dead: True once the process is known to be dead, so that nothing can touch what it held.
    """

    __slots__ = ("dead", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dead = False


class Span:
    """One allocation.

    Attributes:
        slot: First slot.
        slots: Number of slots.
        nbytes: Bytes in use.
        generation: Number of this use of the slots.
        holders: Readers that have not released it; None until it is published.
        number: Number of the message it was published with.
        since: When that was, by the clock of the arena.
        loan: The loan it is a use of, or None for one with slots of its own.
    """

    __slots__ = ("generation", "holders", "loan", "nbytes", "number", "since", "slot", "slots")

    def __init__(self, slot: int, slots: int, nbytes: int, generation: int, loan: Loan | None = None) -> None:
        self.slot = slot
        self.slots = slots
        self.loan = loan
        self.nbytes = nbytes
        self.generation = generation
        self.holders: list[Holder] | None = None
        self.number = 0
        self.since = 0.0

    def __repr__(self) -> str:
        return f"<Span slots {self.slot}..{self.slot + self.slots - 1}, generation {self.generation}>"


class Loan:
    """Slots lent to the sender's own code.

    Attributes:
        slot: First slot.
        slots: Number of slots.
        nbytes: Bytes that were asked for.
        pending: Sends under way of objects with its memory in them.
        uses: Spans over it that are claimed or published, as last noticed.
    """

    __slots__ = ("_most", "dropped", "nbytes", "pending", "slot", "slots", "uses", "words")

    def __init__(self, slot: int, slots: int, nbytes: int) -> None:
        self.slot = slot
        self.slots = slots
        self.nbytes = nbytes
        self._most = min(slots, _MOST_USES)
        self.words = list(range(slot + self._most - 1, slot - 1, -1))  # slots whose done words no use has borrowed
        self.dropped = False
        self.pending = 0
        self.uses: list[Span] = []

    @property
    def idle(self) -> bool:
        """Whether no use of it is under way or held by a reader, as last noticed."""
        return len(self.words) == self._most


class SlotAllocator:
    """First fit from the lowest slot over a sorted list of free runs."""

    def __init__(self, slots: int) -> None:
        self.taken_slots = 0
        self._limit = slots  # slots from this number on are not handed out
        self._starts: list[int] = [0] if slots else []
        self._lengths: dict[int, int] = {0: slots} if slots else {}

    def take(self, count: int) -> int:
        """Take ``count`` neighbouring slots: the first of them, or -1."""
        lengths = self._lengths
        for position, start in enumerate(self._starts):
            length = lengths[start]
            if length < count:
                continue
            del lengths[start]
            if length == count:
                del self._starts[position]
            else:
                self._starts[position] = start + count
                lengths[start + count] = length - count
            self.taken_slots += count
            return start
        return -1

    def take_at(self, start: int, count: int) -> bool:
        """Take exactly these slots; False if they are not all free."""
        position = bisect_right(self._starts, start) - 1
        if position < 0:
            return False
        first = self._starts[position]
        length = self._lengths[first]
        behind = first + length - (start + count)
        if behind < 0:
            return False
        del self._starts[position]
        del self._lengths[first]
        for free, slots in ((start + count, behind), (first, start - first)):
            if slots:
                self._starts.insert(position, free)
                self._lengths[free] = slots
        self.taken_slots += count
        return True

    def give(self, start: int, count: int) -> None:
        """Give slots back, joining them with free neighbours."""
        starts, lengths = self._starts, self._lengths
        self.taken_slots -= count
        count = min(count, self._limit - start)
        if count <= 0:
            return
        position = bisect_left(starts, start)
        if position < len(starts) and starts[position] == start + count:
            count += lengths.pop(starts[position])
            del starts[position]
        if position and starts[position - 1] + lengths[starts[position - 1]] == start:
            lengths[starts[position - 1]] += count
            return
        starts.insert(position, start)
        lengths[start] = count

    def limit_to(self, slots: int) -> None:
        """Never again hand out slots from number ``slots`` on, nor those that are given back later."""
        self._limit = min(self._limit, slots)
        for start in [start for start in self._starts if start + self._lengths[start] > slots]:
            if start < slots:
                self._lengths[start] = slots - start
            else:
                del self._lengths[start]
                self._starts.remove(start)

    def runs(self) -> list[tuple[int, int]]:
        """The free runs as (first slot, slots), in order."""
        return [(start, self._lengths[start]) for start in self._starts]


class Arena:
    """The sender's ledger of spans.

    Args:
        words: The control segment.
        layout: Its layout.
        order: See words.py.
        clock: Tells the time in seconds, for the age of spans.
        table: Where onlookers find the spans, or None.
    """

    def __init__(
        self,
        words: Words,
        layout: Layout,
        order: Callable[[], None],
        clock: Callable[[], float] = lambda: 0.0,
        table: SpanTable | None = None,
    ) -> None:
        self._words = words
        self._table = table
        self._order = order
        self._clock = clock
        self._done = layout.done
        self._readers = layout.readers
        self.slots = layout.slots
        self.slot_bytes = layout.slot_bytes
        self._allocator = SlotAllocator(layout.slots)
        self._generation = 0
        self._published: deque[Span] = deque()
        self._claimed = 0
        self._loans: deque[Loan] = deque()  # those whose owner dropped them, appended by finalizers
        self.drop = self._loans.append
        self.peak_slots = 0

    @property
    def used_slots(self) -> int:
        """Slots claimed by a send under way or held by a reader, as last noticed."""
        return self._allocator.taken_slots

    @property
    def claimed_spans(self) -> int:
        """Spans of sends under way."""
        return self._claimed

    @property
    def published_spans(self) -> tuple[Span, ...]:
        """Spans that some reader has not released, as last noticed."""
        return tuple(self._published)

    def census(self) -> tuple[int, list[Span]]:
        """Slots in use, and the spans that some reader holds, as of now. Changes nothing: any thread may ask.

        While the thread of the sender is at work in here, a span that it is just looking at may be missing.
        """
        used = self._allocator.taken_slots
        held, loans = [], {id(loan): loan for loan in snapshot(self._loans)}
        for span in snapshot(self._published):
            if self._is_held(span):
                held.append(span)
            else:
                used -= span.slots
            if span.loan is not None and span.loan.dropped:
                loans[id(span.loan)] = span.loan
        for loan in loans.values():
            if not any(use.holders is None or self._is_held(use) for use in snapshot(loan.uses)):
                used -= loan.slots
        return max(0, used), held

    def fits(self, nbytes: int) -> bool:
        """Whether the whole arena would be enough for a buffer."""
        return 0 < nbytes <= self.slots * self.slot_bytes

    def claim(self, nbytes: int) -> Span | None:
        """Take a span for ``nbytes`` (at least 1), or None if there is none free now."""
        count = -(-nbytes // self.slot_bytes)
        slot = self._take(count)
        if slot < 0:
            return None
        self._generation += 1
        self._claimed += 1
        if self._table is not None:
            self._table.claimed(slot, self._generation, nbytes)
        return Span(slot, count, nbytes, self._generation)

    def _take(self, count: int) -> int:
        self._reap(_REAP_STEP)
        slot = self._allocator.take(count)
        if slot < 0:
            self.reap()
            slot = self._allocator.take(count)
        self.peak_slots = max(self.peak_slots, self.used_slots)
        return slot

    def unclaim(self, span: Span) -> None:
        """Give back a span that was never published."""
        assert span.holders is None, "a published span is released by its readers"
        self._claimed -= 1
        self._give(span)

    def _give(self, span: Span) -> None:
        if self._table is not None:
            self._table.freed(span.slot)
        loan = span.loan
        if loan is None:
            self._allocator.give(span.slot, span.slots)
        else:
            loan.words.append(span.slot)
            loan.uses.remove(span)
            if loan.dropped and loan.idle:
                self._take_back(loan)

    def _take_back(self, loan: Loan) -> None:
        if self._table is not None:
            self._table.returned(loan.slot)
        self._allocator.give(loan.slot, loan.slots)

    def lend(self, nbytes: int) -> Loan | None:
        """Take slots for the sender's own code, or None if there are none free now. :attr:`drop` gives them back."""
        count = -(-nbytes // self.slot_bytes)
        slot = self._take(count)
        if slot < 0:
            return None
        if self._table is not None:
            self._table.lent(slot, nbytes)
        return Loan(slot, count, nbytes)

    def use(self, loan: Loan, nbytes: int) -> Span | None:
        """A span over lent slots, to be published like one that was claimed; None if too many are out already."""
        if not loan.words:
            self.reap()
            if not loan.words:
                return None
        self._generation += 1
        self._claimed += 1
        span = Span(loan.words.pop(), 0, nbytes, self._generation, loan)
        if self._table is not None:
            self._table.claimed(span.slot, span.generation, nbytes)
        loan.uses.append(span)
        return span

    def is_out(self, loan: Loan) -> bool:
        """Whether a send under way or a reader still needs the memory of a loan, as of now."""
        if loan.pending or any(span.holders is None or self._is_held(span) for span in loan.uses):
            return True
        # The done words just read, before the bytes whose overwriting they allow.
        self._order()
        return False

    def _is_held(self, span: Span) -> bool:
        word = self._done + span.slot * self._readers
        return any(not holder.dead and self._words[word + holder.rank] != span.generation for holder in span.holders or ())

    def free_runs(self) -> list[tuple[int, int]]:
        """Runs of slots that nobody uses, as (first slot, slots), in order."""
        self.reap()
        return self._allocator.runs()

    def set_aside(self, slot: int, slots: int) -> bool:
        """Keep slots from being used, until :meth:`put_back`; False if somebody uses them."""
        return self._allocator.take_at(slot, slots)

    def put_back(self, slot: int, slots: int) -> None:
        """End :meth:`set_aside`."""
        self._allocator.give(slot, slots)

    def limit_to(self, slots: int) -> None:
        """Go on with the first ``slots`` slots only, because there is no memory behind the others."""
        self._allocator.limit_to(slots)

    def publish(self, span: Span, holders: Iterable[Holder], number: int = 0) -> None:
        """Hand a span to readers, with message ``number``. It is free again once all of them released it or died."""
        span.holders = list(holders)
        span.number = number
        span.since = self._clock()
        self._claimed -= 1
        self._published.append(span)
        if self._table is not None:
            self._table.published(span.slot, number, [holder.rank for holder in span.holders])

    def held_by(self, holder: Holder) -> list[Span]:
        """Spans that one reader has not released, in order of their slots. For diagnosis: looks at all of them.

        Any thread may ask.
        """
        words, done = self._words, self._done + holder.rank
        return sorted(
            (
                span
                for span in snapshot(self._published)
                if span.holders is not None
                and holder in span.holders
                and not holder.dead
                and words[done + span.slot * self._readers] != span.generation
            ),
            key=lambda span: span.slot,
        )

    def forget(self, holder: Holder, number: int) -> None:
        """A reader will never look at message ``number`` nor any later one: it does not hold their spans."""
        for span in self._published:
            if span.number >= number and span.holders and holder in span.holders:
                span.holders.remove(holder)
                if self._table is not None:
                    self._table.keep(span.slot, [left.rank for left in span.holders])
        self.reap()

    def reap(self) -> None:
        """Look at every published span and free those that nobody holds."""
        self._reap(len(self._published))

    def _reap(self, most: int) -> None:
        words, published = self._words, self._published
        freed = False
        for _ in range(min(most, len(published))):
            span = published.popleft()
            holders = span.holders
            assert holders is not None
            word = self._done + span.slot * self._readers
            # One holder is enough to keep a span, so look at the others only once the last one let go.
            while holders and (holders[-1].dead or words[word + holders[-1].rank] == span.generation):
                holders.pop()
            if holders:
                published.append(span)
            else:
                self._give(span)
                freed = True
        while self._loans:
            loan = self._loans.popleft()
            loan.dropped = True
            if loan.idle:
                self._take_back(loan)
        if freed:
            # The done words, before the bytes whose overwriting they allow.
            self._order()


class SpanReleaser:
    """One reader's side: tells the sender that a span may be used again."""

    def __init__(self, words: Words, layout: Layout, rank: int, order: Callable[[], None]) -> None:
        self._words = words
        self._order = order
        self._done = layout.done + rank
        self._readers = layout.readers

    def release(self, slot: int, generation: int) -> None:
        """Give a span back. Safe in a finalizer, in any thread: two calls and a store, no lock."""
        # All reads of the span, before the word that lets the sender overwrite it.
        self._order()
        self._words[self._done + slot * self._readers] = generation
