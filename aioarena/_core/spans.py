"""The span table: which spans the arena has, left in shared memory for onlookers.

Nobody who takes part in the channel reads it: the sender keeps its own ledger (arena.py) and writes an entry here when a
span is claimed, published and free again, which small messages never do. Each slot has an entry, used while a span or a
loan begins at it, of these words::

    0        generation of the span, 0 while none begins here
    1        its bytes
    2        when it was claimed, by the sender's clock (nanoseconds, CLOCK_MONOTONIC)
    3        number of the message it was published with, plus 1; 0 before
    4        bytes of the loan that begins here, 0 while none does
    5        when that was lent, by the same clock
    6 ..     ranks it was published to, 64 in a word; one is taken out when its process has died, or will not read it

A use of a loan is a span whose slot lies in the loan: it has no slots of its own, and its bytes may be anywhere in the
loan. A span whose entry stands may be released all the same: the sender looks at the done words only when it needs slots.

What an onlooker may rely on: generations are never used twice, and the words of an entry are stored while its generation is
0. So an entry whose generation is the same before and after is of one span; :func:`read_span` returns no other. The
entries are not of one moment together, nor with the done words: in between a span may have gone, and another, that overlaps
it, have come. Of a loan only its bytes are looked at twice; if its slots were lent again for as many, its time may be that
of the loan before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from aioarena._core.layout import SPANS_END, Layout
from aioarena._core.words import Words

_NBYTES, _CLAIMED, _NUMBER, _LENT, _LENT_SINCE, _RANKS = range(1, 7)
_RANKS_PER_WORD = 64
_WORD = (1 << _RANKS_PER_WORD) - 1

# How often an onlooker reads an entry that changes meanwhile, before it passes it by. A guess: a change takes the sender
# microseconds, and the next one of the same slot a whole message.
_LOOKS = 4


class SpanTable:
    """The sender's side.

    Args:
        words: The control segment.
        layout: Its layout.
        order: What keeps stores in order.
        clock: Tells the time in seconds, as onlookers count them.
    """

    def __init__(self, words: Words, layout: Layout, order: Callable[[], None], clock: Callable[[], float]) -> None:
        self._words = words
        self._order = order
        self._clock = clock
        self._first = layout.span(0)
        self._stride = layout.span(1) - layout.span(0)
        self._rank_words = range(layout.rank_words)
        self._end = 0

    def claimed(self, slot: int, generation: int, nbytes: int) -> None:
        """A span begins at a slot."""
        words, entry = self._words, self._first + slot * self._stride
        # The generation's 0, before what an onlooker must not take for the old span's.
        self._order()
        words[entry + _NBYTES] = nbytes
        words[entry + _CLAIMED] = int(self._clock() * 1e9)
        words[entry + _NUMBER] = 0
        # All of it, before the generation that vouches for it.
        self._order()
        words[entry] = generation
        if slot >= self._end:
            self._reach(slot)

    def published(self, slot: int, number: int, ranks: Sequence[int]) -> None:
        """That span went to readers, with message ``number``."""
        self.keep(slot, ranks)
        # The ranks, before the number that says that they are there.
        self._order()
        self._words[self._first + slot * self._stride + _NUMBER] = number + 1

    def keep(self, slot: int, ranks: Sequence[int]) -> None:
        """Of the readers that have not released that span only these can still hold it."""
        first = self._first + slot * self._stride + _RANKS
        mask = 0
        for rank in ranks:
            mask |= 1 << rank
        for index in self._rank_words:
            self._words[first + index] = mask & _WORD
            mask >>= _RANKS_PER_WORD

    def freed(self, slot: int) -> None:
        """That span is no more."""
        self._words[self._first + slot * self._stride] = 0

    def lent(self, slot: int, nbytes: int) -> None:
        """A loan begins at a slot."""
        words, entry = self._words, self._first + slot * self._stride
        words[entry + _LENT_SINCE] = int(self._clock() * 1e9)
        self._order()
        words[entry + _LENT] = nbytes
        if slot >= self._end:
            self._reach(slot)

    def returned(self, slot: int) -> None:
        """That loan is no more."""
        self._words[self._first + slot * self._stride + _LENT] = 0

    def _reach(self, slot: int) -> None:
        # Onlookers read no further: a look at an entry nobody wrote would have the kernel find memory for it.
        self._end = slot + 1
        self._order()
        self._words[SPANS_END] = self._end


class SpanEntry(NamedTuple):
    """A span, as an onlooker finds it.

    Attributes:
        slot: First slot, or the slot whose done words a use of a loan borrows.
        generation: Its generation.
        nbytes: Its bytes.
        claimed: When it was claimed.
        number: Number of the message it was published with, None while it is filled.
        ranks: Readers it was published to that have not released it.
    """

    slot: int
    generation: int
    nbytes: int
    claimed: int
    number: int | None
    ranks: tuple[int, ...]


class LoanEntry(NamedTuple):
    """A loan, as an onlooker finds it.

    Attributes:
        slot: First slot.
        nbytes: Bytes that were asked for.
        lent: When it was lent.
    """

    slot: int
    nbytes: int
    lent: int


def read_span(words: Words, layout: Layout, slot: int, order: Callable[[], None]) -> SpanEntry | None:
    """The span that begins at a slot; None if there is none, or it changes faster than one can look.

    Only reads. A span that all readers have released is returned too, with no ranks.
    """
    entry = layout.span(slot)
    for _ in range(_LOOKS):
        generation = words[entry]
        if not generation:
            return None
        order()
        nbytes, claimed, number = words[entry + _NBYTES], words[entry + _CLAIMED], words[entry + _NUMBER]
        order()  # the number before the ranks it vouches for
        ranks = _ranks(words, layout, slot, generation) if number else ()
        order()
        if words[entry] == generation:
            return SpanEntry(slot, generation, nbytes, claimed, number - 1 if number else None, ranks)
    return None


def _ranks(words: Words, layout: Layout, slot: int, generation: int) -> tuple[int, ...]:
    first, done = layout.span(slot) + _RANKS, layout.done + slot * layout.readers
    ranks = []
    for index in range(layout.rank_words):
        mask = words[first + index]
        while mask:
            rank = index * _RANKS_PER_WORD + (mask & -mask).bit_length() - 1
            mask &= mask - 1
            if rank < layout.readers and words[done + rank] != generation:
                ranks.append(rank)
    return tuple(ranks)


def read_loan(words: Words, layout: Layout, slot: int, order: Callable[[], None]) -> LoanEntry | None:
    """The loan that begins at a slot, or None. Only reads."""
    entry = layout.span(slot)
    nbytes = words[entry + _LENT]
    if not nbytes:
        return None
    order()
    lent = words[entry + _LENT_SINCE]
    order()
    return LoanEntry(slot, nbytes, lent) if words[entry + _LENT] == nbytes else None


def read_spans(words: Words, layout: Layout, order: Callable[[], None]) -> Iterator[SpanEntry | LoanEntry]:
    """Every loan and span, by slot. Only reads."""
    end = min(words[SPANS_END], layout.slots)
    order()
    for slot in range(end):
        loan = read_loan(words, layout, slot, order)
        if loan is not None:
            yield loan
        span = read_span(words, layout, slot, order)
        if span is not None:
            yield span
