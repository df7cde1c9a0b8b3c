"""The table of spans, as an onlooker reads it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aioarena._core.layout import ARENA_SENT, FRAMES_SENT, SPANS_END
from aioarena._core.sender import Membership, SenderCore
from aioarena._core.spans import LoanEntry, SpanEntry, SpanTable, read_loan, read_span, read_spans

from .support import Channel, Recording


def no_op() -> None:
    pass


def seen(channel: Channel) -> list[SpanEntry | LoanEntry]:
    """What an onlooker finds, from the words alone."""
    return list(read_spans(channel.words.toreadonly(), channel.layout, no_op))


def clocked(channel: Channel, *nanoseconds: int) -> None:
    """Put a sender's core in its place that uses this arena at these times, and seat its readers."""
    left = [time / 1e9 for time in nanoseconds]
    channel.sender = SenderCore(
        channel.control, channel.layout, min_bytes=32, frame_budget=1 << 20, clock=lambda: left.pop(0)
    )
    channel.sender.arena._clock = float  # which has uses of its own for it
    channel.readers = [channel.join(rank, rank + 1) for rank in range(channel.layout.readers)]


def test_a_span_is_seen_from_its_claim_to_its_release() -> None:
    """First nobody has it, then everybody it was published to that has not released it."""
    channel = Channel(readers=2, joined=False)
    clocked(channel, 1000)
    channel.sender.send_small(b"x")
    message = channel.sender.place([8, 100])
    assert seen(channel) == [SpanEntry(0, 1, 100, 1000, None, ())]
    channel.publish_placed(message)
    assert seen(channel) == [SpanEntry(0, 1, 100, 1000, 1, (0, 1))]
    channel.readers[0].spans.release(0, 1)
    assert seen(channel) == [SpanEntry(0, 1, 100, 1000, 1, (1,))]
    channel.readers[1].spans.release(0, 1)
    assert seen(channel) == [SpanEntry(0, 1, 100, 1000, 1, ())]  # released, and not yet noticed by the sender
    channel.sender.arena.reap()
    assert seen(channel) == []


def test_a_span_that_is_given_up_is_gone() -> None:
    """It never was anybody's."""
    channel = Channel()
    channel.sender.unplace(channel.sender.place([8, 100]))
    assert seen(channel) == []


def test_the_next_span_of_a_slot_is_another() -> None:
    """Nothing of the one before is left in its entry."""
    channel = Channel(readers=2, joined=False)
    clocked(channel, 1000, 2000)
    channel.publish([8, 100])
    for reader in channel.readers:
        reader.spans.release(0, 1)
    channel.sender.place([8, 50])
    assert seen(channel) == [SpanEntry(0, 2, 50, 2000, None, ())]


def test_readers_that_were_not_there_do_not_hold_it() -> None:
    """Nor those that came later."""
    channel = Channel(readers=3, joined=False)
    channel.join(1, 1)
    channel.publish([8, 100])
    channel.join(0, 2)
    assert [entry.ranks for entry in seen(channel)] == [(1,)]  # type: ignore[union-attr]


def test_readers_that_died_or_left_hold_what_they_may_read() -> None:
    """One that left holds what it received, one that died holds nothing."""
    channel = Channel(readers=3, joined=False)
    holders = [channel.sender.join(rank, rank + 1) for rank in range(3)]
    channel.readers = [channel.make_reader(rank, rank + 1) for rank in range(3)]
    for reader in channel.readers:
        reader.start()
    channel.publish([8, 50])
    channel.publish([8, 50])
    assert channel.readers[1].take() is not None
    channel.readers[1].advance()
    channel.sender.skip_unread(1, holders[1])
    channel.sender.unseat(1, Membership.LEFT)
    assert [entry.ranks for entry in seen(channel)] == [(0, 1, 2), (0, 2)]  # type: ignore[union-attr]
    channel.sender.unseat(2, Membership.LOST)
    channel.sender.arena.forget(holders[2], 0)
    assert [entry.ranks for entry in seen(channel)] == [(0, 1), (0,)]  # type: ignore[union-attr]


def test_loans_and_their_uses_are_seen() -> None:
    """A loan begins where its first use does, and both are there."""
    channel = Channel(joined=False)
    clocked(channel, 1000, 2000)
    loan = channel.sender.arena.lend(150)
    assert loan is not None
    assert seen(channel) == [LoanEntry(0, 150, 1000)]
    channel.publish_placed(channel.sender.place([8, 120], {1: (loan, 30)}))
    assert seen(channel) == [LoanEntry(0, 150, 1000), SpanEntry(0, 1, 120, 2000, 0, (0,))]
    channel.sender.arena.drop(loan)
    channel.sender.arena.reap()
    assert seen(channel) == [LoanEntry(0, 150, 1000), SpanEntry(0, 1, 120, 2000, 0, (0,))]
    channel.reader.spans.release(0, 1)
    channel.sender.arena.reap()
    assert seen(channel) == []


def test_a_loan_that_was_never_sent_is_gone_when_it_is_dropped() -> None:
    """With the sender's next look."""
    channel = Channel()
    loan = channel.sender.arena.lend(150)
    assert loan is not None
    channel.sender.arena.drop(loan)
    channel.sender.arena.reap()
    assert seen(channel) == []


def test_ranks_fill_more_than_one_word() -> None:
    """As many readers as there may be."""
    channel = Channel(readers=130, ring_bytes=1 << 16)
    channel.publish([8, 50])
    assert channel.layout.rank_words == 3
    assert [entry.ranks for entry in seen(channel)] == [tuple(range(130))]  # type: ignore[union-attr]
    channel.readers[64].spans.release(0, 1)
    channel.readers[129].spans.release(0, 1)
    assert [entry.ranks for entry in seen(channel)] == [(*range(64), *range(65, 129))]  # type: ignore[union-attr]


def test_small_messages_do_not_touch_the_table() -> None:
    """Nor any other word that is for onlookers, but for the number of messages."""
    channel = Channel()
    words = Recording(channel.words)
    channel.sender = SenderCore(channel.control, channel.layout, min_bytes=32, frame_budget=1 << 20)
    channel.sender.ring._words = channel.sender.arena._words = channel.sender._words = words
    assert channel.sender.arena._table is not None
    channel.sender.arena._table._words = words
    channel.sender.send_small(b"x")
    channel.sender.publish(channel.sender.place([4]), [(0, b"abcd")])
    table = range(channel.layout.spans, channel.layout.ring_offset // 8)
    assert not {index for index, _ in words.stores} & {*table, SPANS_END, ARENA_SENT, FRAMES_SENT}


def test_no_entry_is_read_that_was_never_written() -> None:
    """Reading it would have the kernel find memory for a page that nobody uses."""
    channel = Channel(slots=100)
    channel.publish([8, 100])  # slots 0 and 1
    channel.publish([8, 10_000 // 2])  # 79 slots from 2 on
    words = Recording(channel.words)
    assert len(list(read_spans(words, channel.layout, no_op))) == 2
    assert channel.words[SPANS_END] == 3
    assert max(words.loads) < channel.layout.span(3)


def test_bytes_of_both_other_ways_are_counted() -> None:
    """For rates."""
    channel = Channel(slots=4, slot_bytes=64)
    assert (channel.words[ARENA_SENT], channel.words[FRAMES_SENT]) == (0, 0)
    channel.publish([8, 100])
    channel.publish([8, 50])
    assert (channel.words[ARENA_SENT], channel.words[FRAMES_SENT]) == (150, 0)
    channel.publish([8, 10_000])
    assert (channel.words[ARENA_SENT], channel.words[FRAMES_SENT]) == (150, 10_000)


def test_an_entry_that_changes_while_it_is_read_is_read_again() -> None:
    """And the later one is returned."""
    channel = Channel(joined=False)
    clocked(channel, 1000, 2000)
    channel.publish([8, 100])
    words = Recording(channel.words)

    def change(index: int) -> None:
        if index == channel.layout.span(0) + 2:
            words.before_load = lambda _: None
            channel.reader.spans.release(0, 1)
            channel.publish([8, 50])

    words.before_load = change
    assert read_span(words, channel.layout, 0, no_op) == SpanEntry(0, 2, 50, 2000, 1, (0,))


@pytest.mark.parametrize("read", [read_span, read_loan])
def test_an_entry_that_does_not_stop_changing_is_passed_by(read: Any) -> None:
    """An onlooker does not hang."""
    channel = Channel()
    words = Recording(channel.words)
    entry = channel.layout.span(0) + (0 if read is read_span else 4)

    def change(index: int) -> None:
        channel.words[entry] += 1

    channel.words[entry] = 1
    words.before_load = change
    assert read(words, channel.layout, 0, no_op) is None


def test_strange_ranks_are_not_believed() -> None:
    """An onlooker reads words that it cannot trust; none may lead it outside of the table."""
    channel = Channel()
    channel.publish([8, 50])
    channel.words[channel.layout.span(0) + 6] = (1 << 64) - 1
    channel.words[SPANS_END] = 1 << 63
    assert seen(channel) == [SpanEntry(0, 1, 50, 0, 0, (0,))]


@pytest.mark.parametrize("seed", range(20))
def test_the_table_says_what_the_ledger_knows(seed: int) -> None:
    """Whatever happens, what is seen is what the sender would say after looking at all done words."""
    chance = random.Random(seed)
    channel = Channel(readers=3, slots=12, ring_bytes=1 << 14)
    arena = channel.sender.arena
    loans = []
    claimed = []
    for step in range(200):
        what = chance.randrange(6)
        if what == 0:
            claimed.append(channel.sender.place([8, chance.randint(32, 200)]))
        elif what == 1 and claimed:
            message = claimed.pop(chance.randrange(len(claimed)))
            if chance.random() < 0.3 or channel.sender.shortage(message) is not None:
                channel.sender.unplace(message)
            else:
                channel.publish_placed(message)
        elif what == 2 and (loan := arena.lend(chance.randint(1, 200))) is not None:
            loans.append(loan)
        elif what == 3 and loans:
            loan = chance.choice(loans)
            claimed.append(channel.sender.place([8, 32], {1: (loan, loan.slot * 64)}))
        elif what == 4 and loans:
            arena.drop(loans.pop(chance.randrange(len(loans))))
        for rank, reader in enumerate(channel.readers):
            while reader.take() is not None:
                reader.advance()
            holder = channel.sender._holders[rank]
            assert holder is not None
            for span in arena.held_by(holder):
                if chance.random() < 0.4:
                    reader.spans.release(span.slot, span.generation)
        arena.reap()
        spans = {
            entry.generation: (entry.slot, entry.nbytes, entry.number, entry.ranks)
            for entry in seen(channel)
            if isinstance(entry, SpanEntry)
        }
        held: dict[int, tuple[int, ...]] = {}
        for rank in range(3):
            for span in arena.held_by(channel.sender._holders[rank]):  # type: ignore[arg-type]
                held[span.generation] = (*held.get(span.generation, ()), rank)
        known = {
            span.generation: (span.slot, span.nbytes, span.number, held.get(span.generation, ()))
            for span in arena.published_spans
        }
        known |= {
            span.generation: (span.slot, span.nbytes, None, ()) for message in claimed for span in message.spans.values()
        }
        assert spans == known, f"step {step} of seed {seed}"
        lent = {entry.slot for entry in seen(channel) if isinstance(entry, LoanEntry)}
        assert {loan.slot for loan in loans} <= lent


def test_the_table_is_written_with_its_orders() -> None:
    """What an entry says is there before the generation that vouches for it."""
    channel = Channel()
    words = Recording(channel.words)
    at: list[int] = []
    table = SpanTable(words, channel.layout, lambda: at.append(len(words.stores)), lambda: 5)
    table.claimed(1, 7, 100)
    entry = channel.layout.span(1)
    assert [index - entry for index, _ in words.stores] == [1, 2, 3, 0, SPANS_END - entry]
    assert at == [0, 3, 4]
