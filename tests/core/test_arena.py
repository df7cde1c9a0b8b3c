"""Slots, spans, generations, and who holds what."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioarena._core.arena import Arena, Holder, Loan, SlotAllocator, Span, SpanReleaser, snapshot
from aioarena._core.layout import Layout

from .support import Recording, make_control

# The allocator ----------------------------------------------------------------------------------------------------------


class Model:
    """The allocator in the simplest way there is: a flag for each slot."""

    def __init__(self, slots: int) -> None:
        self.free = [True] * slots
        self.limit = slots

    def take(self, count: int) -> int:
        for start in range(len(self.free) - count + 1):
            if all(self.free[start : start + count]):
                self.free[start : start + count] = [False] * count
                return start
        return -1

    def give(self, start: int, count: int) -> None:
        for slot in range(start, start + count):
            self.free[slot] = slot < self.limit

    def limit_to(self, slots: int) -> None:
        self.limit = min(self.limit, slots)
        for slot in range(slots, len(self.free)):
            self.free[slot] = False

    def runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for slot, free in enumerate(self.free):
            if free and runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            elif free:
                runs.append((slot, 1))
        return runs


operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("take"), st.integers(1, 2)),
        st.tuples(st.just("give"), st.integers(0, 20)),
        st.tuples(st.just("give"), st.integers(0, 20)),
        st.tuples(st.just("limit"), st.integers(0, 20)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 16), operations)
def test_allocator_does_what_flags_would_do(slots: int, operations: list[tuple[str, int]]) -> None:
    """First fit from the lowest slot, no overlap, neighbours joined, nothing beyond a limit: as the model has it."""
    allocator, model = SlotAllocator(slots), Model(slots)
    taken: list[tuple[int, int]] = []
    for operation, number in operations:
        if operation == "take":
            start = allocator.take(number)
            assert start == model.take(number)
            if start >= 0:
                taken.append((start, number))
        elif operation == "give" and taken:
            span = taken.pop(number % len(taken))
            allocator.give(*span)
            model.give(*span)
        elif operation == "limit":
            allocator.limit_to(number)
            model.limit_to(number)
        assert allocator.runs() == model.runs()
        assert allocator.taken_slots == sum(count for _, count in taken)


def test_lowest_slots_are_taken_first() -> None:
    """Warm memory is reused: what was given back is taken again before anything fresh."""
    allocator = SlotAllocator(8)
    assert [allocator.take(1) for _ in range(3)] == [0, 1, 2]
    allocator.give(1, 1)
    assert [allocator.take(1) for _ in range(2)] == [1, 3]


def test_first_run_that_is_long_enough_is_taken() -> None:
    """A hole that is too small is skipped, and kept for what fits."""
    allocator = SlotAllocator(8)
    for _ in range(3):
        allocator.take(1)
    allocator.give(1, 1)
    assert allocator.take(2) == 3
    assert allocator.take(1) == 1


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1]])
def test_neighbours_are_joined_in_whatever_order_they_come_back(order: list[int]) -> None:
    """Three single slots make room for a span of three again."""
    allocator = SlotAllocator(3)
    for _ in range(3):
        allocator.take(1)
    for slot in order:
        allocator.give(slot, 1)
    assert allocator.runs() == [(0, 3)]
    assert allocator.take(3) == 0


def test_slots_beyond_a_limit_do_not_come_back() -> None:
    """Also those that were taken when the limit was set: there is no memory behind them."""
    allocator = SlotAllocator(8)
    allocator.take(2)
    allocator.take(4)  # 2 .. 5
    allocator.limit_to(4)
    assert allocator.runs() == []
    allocator.give(2, 4)
    assert allocator.runs() == [(2, 2)]
    assert (allocator.take(3), allocator.take(2)) == (-1, 2)


# Spans ------------------------------------------------------------------------------------------------------------------


class Spans:
    """An arena, and its readers.

    Args:
        slots: Slots of 100 bytes.
        readers: How many.
    """

    def __init__(self, slots: int = 4, readers: int = 1) -> None:
        self.layout = layout = Layout(readers=readers, ring_bytes=64, slots=slots, slot_bytes=100)
        self.words = Recording(make_control(layout).cast("Q"))
        self.orders = 0
        self.arena = Arena(self.words, layout, self._order)
        self.holders = [Holder(rank) for rank in range(readers)]
        self.releasers = [SpanReleaser(self.words, layout, rank, lambda: None) for rank in range(readers)]

    def _order(self) -> None:
        self.orders += 1

    def publish(self, nbytes: int = 100, holders: list[Holder] | None = None) -> Span:
        span = self.arena.claim(nbytes)
        assert span is not None
        self.arena.publish(span, self.holders if holders is None else holders)
        return span

    def release(self, span: Span, rank: int = 0, generation: int | None = None) -> None:
        self.releasers[rank].release(span.slot, span.generation if generation is None else generation)

    def used(self) -> int:
        """Slots in use, once all releases were noticed."""
        self.arena.reap()
        return self.arena.used_slots


@pytest.mark.parametrize(("nbytes", "slots"), [(1, 1), (99, 1), (100, 1), (101, 2), (400, 4)])
def test_span_has_as_many_slots_as_its_bytes_need(nbytes: int, slots: int) -> None:
    """Rounded up, and no more."""
    span = Spans().arena.claim(nbytes)
    assert span is not None
    assert (span.slot, span.slots, span.nbytes) == (0, slots, nbytes)


def test_no_span_if_none_is_free() -> None:
    """The arena never waits: it says that there is no room, and claims nothing."""
    spans = Spans(slots=4)
    spans.publish(300)
    assert spans.arena.claim(101) is None
    assert (spans.arena.claimed_spans, spans.arena.used_slots) == (0, 3)
    assert spans.arena.claim(100) is not None


@pytest.mark.parametrize(("nbytes", "fits"), [(0, False), (1, True), (400, True), (401, False)])
def test_what_fits_is_what_the_whole_arena_would_hold(nbytes: int, fits: bool) -> None:
    """Whatever is free now."""
    spans = Spans(slots=4)
    spans.publish(400)
    assert spans.arena.fits(nbytes) is fits


def test_arena_without_slots_fits_nothing() -> None:
    """A channel without an arena has one of no slots."""
    arena = Spans(slots=0).arena
    assert not arena.fits(1)
    assert arena.claim(1) is None


def test_every_use_of_a_slot_has_a_generation_of_its_own() -> None:
    """Generations begin at 1, since done words begin at 0, and never repeat."""
    spans = Spans(slots=1)
    generations = []
    for _ in range(3):
        span = spans.publish()
        generations.append(span.generation)
        spans.release(span)
    assert generations == [1, 2, 3]


def test_span_is_free_once_all_readers_released_it() -> None:
    """In whatever order; one reader is enough to keep it."""
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        spans = Spans(slots=1, readers=3)
        span = spans.publish()
        for rank in order:
            assert spans.arena.claim(1) is None
            spans.release(span, rank)
        assert spans.arena.claim(1) is not None


def test_readers_that_did_not_get_a_span_do_not_keep_it() -> None:
    """Only those it was published to count."""
    spans = Spans(slots=1, readers=2)
    span = spans.publish(holders=spans.holders[1:])
    spans.release(span, 1)
    assert spans.used() == 0


def test_span_published_to_nobody_is_free() -> None:
    """It needs no release."""
    spans = Spans(slots=1)
    spans.publish(holders=[])
    assert spans.arena.claim(1) is not None


def test_late_release_of_an_older_generation_changes_nothing() -> None:
    """The span's present use stays held until that generation is released, after the late one too."""
    spans = Spans(slots=1)
    old = spans.publish()
    spans.release(old)
    new = spans.publish()
    assert new.slot == old.slot
    spans.release(old)
    assert spans.used() == 1
    spans.release(new)
    assert spans.used() == 0


def test_release_of_one_span_leaves_the_others() -> None:
    """Each first slot has its own done word for each reader."""
    spans = Spans(slots=6, readers=2)
    first, second, third = (spans.publish(200) for _ in range(3))
    for rank in range(2):
        spans.release(second, rank)
    assert spans.used() == 4
    assert spans.arena.published_spans == (first, third)
    again = spans.arena.claim(200)
    assert again is not None and again.slot == second.slot


def test_dead_readers_keep_nothing() -> None:
    """What a dead process held is free, together with what the others released."""
    spans = Spans(slots=2, readers=2)
    released, held = spans.publish(), spans.publish()
    spans.release(released, 0)
    assert spans.used() == 2
    spans.holders[1].dead = True
    assert spans.used() == 1
    assert spans.arena.published_spans == (held,)


def test_successor_of_a_dead_reader_keeps_only_its_own() -> None:
    """It has the same rank, and so the same done words, but is another holder."""
    spans = Spans(slots=2)
    inherited = spans.publish()
    spans.holders[0].dead = True
    spans.holders[0] = Holder(0)
    own = spans.publish()
    assert spans.arena.published_spans == (own,)
    assert own.slot == inherited.slot
    spans.release(inherited)
    assert spans.used() == 1
    spans.release(own)
    assert spans.used() == 0


def test_what_each_reader_holds_is_known() -> None:
    """Spans it has not released, by slot; asked for diagnosis, so also those whose release the sender has not noticed."""
    spans = Spans(slots=4, readers=2)
    one, two, three = spans.publish(), spans.publish(holders=spans.holders[:1]), spans.publish()
    spans.release(one)
    again = spans.arena.claim(100)
    assert again is not None
    held = spans.arena.held_by
    assert [held(holder) for holder in spans.holders] == [[two, three], [one, three]]
    spans.release(two)
    assert [held(holder) for holder in spans.holders] == [[three], [one, three]]
    spans.holders[1].dead = True
    assert [held(holder) for holder in spans.holders] == [[three], []]


def test_spans_are_listed_by_slot() -> None:
    """Whatever the order in which the sender last looked at them."""
    spans = Spans(slots=4)
    first = spans.publish()
    others = [spans.publish(), spans.publish()]
    spans.release(first)
    again = spans.publish()
    assert again.slot == 0
    assert spans.arena.held_by(spans.holders[0]) == [again, *others]


def test_reader_that_left_keeps_only_what_it_received() -> None:
    """Spans of messages that it will never look at are not its own; those before, and those of others, are."""
    spans = Spans(slots=6, readers=2)
    published = []
    for number in range(5, 8):
        span = spans.arena.claim(100)
        assert span is not None
        spans.arena.publish(span, spans.holders if number < 7 else spans.holders[:1], number)
        published.append(span)
    spans.arena.forget(spans.holders[0], 6)
    held = spans.arena.held_by
    assert [held(holder) for holder in spans.holders] == [published[:1], published[:2]]
    assert spans.arena.published_spans == tuple(published[:2])
    assert spans.arena.used_slots == 2


# Claims -----------------------------------------------------------------------------------------------------------------


def test_claims_are_counted_until_published_or_given_back() -> None:
    """No claim is left once every send has ended, and its slots are free again."""
    spans = Spans(slots=4)
    one, two = spans.arena.claim(100), spans.arena.claim(200)
    assert one is not None and two is not None
    assert (spans.arena.claimed_spans, spans.arena.used_slots) == (2, 3)
    spans.arena.unclaim(one)
    assert (spans.arena.claimed_spans, spans.arena.used_slots) == (1, 2)
    spans.arena.publish(two, spans.holders)
    assert (spans.arena.claimed_spans, spans.arena.used_slots) == (0, 2)


def test_claimed_span_is_not_freed_by_an_old_release() -> None:
    """A span that is being filled is nobody's to release."""
    spans = Spans(slots=1)
    old = spans.publish()
    spans.release(old)
    assert spans.arena.claim(100) is not None
    spans.release(old)
    assert spans.arena.claim(100) is None


def test_published_span_cannot_be_given_back() -> None:
    """Its readers may be reading it."""
    spans = Spans()
    span = spans.publish()
    with pytest.raises(AssertionError, match="released by its readers"):
        spans.arena.unclaim(span)


def test_peak_is_the_most_slots_ever_in_use() -> None:
    """It stays when they are free again."""
    spans = Spans(slots=4)
    span = spans.publish(300)
    spans.release(span)
    spans.publish(100)
    assert (spans.arena.used_slots, spans.arena.peak_slots) == (1, 3)


def test_slots_lost_to_a_limit_are_neither_used_nor_handed_out() -> None:
    """``used_slots`` counts claims and what readers hold; a span beyond the limit is lost once it is released."""
    spans = Spans(slots=8)
    low, high = spans.publish(200), spans.publish(400)
    spans.arena.limit_to(4)
    assert spans.arena.used_slots == 6
    spans.release(high)
    assert spans.used() == 2
    assert spans.arena.claim(300) is None
    assert spans.publish(200).slot == 2
    spans.release(low)
    assert spans.used() == 2


# Reaping ----------------------------------------------------------------------------------------------------------------


def test_claim_looks_at_a_bounded_number_of_spans() -> None:
    """Thousands of retained spans do not make a send slow: it looks at 64 of them, at others the next time."""
    spans = Spans(slots=200)
    for _ in range(150):
        spans.publish()
    looked_at = []
    for _ in range(3):
        spans.words.loads.clear()
        assert spans.arena.claim(100) is not None
        looked_at.append(set(spans.words.loads))
    assert [len(done) for done in looked_at] == [64, 64, 64]
    assert len(set().union(*looked_at)) == 150


def test_claim_looks_at_all_spans_before_it_gives_up() -> None:
    """A full arena is full only if no span at all was released."""
    spans = Spans(slots=150)
    for _ in range(150):
        spans.publish()
    released = spans.arena.published_spans[-1]  # the one it would look at last
    spans.release(released)
    span = spans.arena.claim(100)
    assert span is not None and span.slot == released.slot


def test_one_holder_is_enough_to_keep_a_span() -> None:
    """The others are not looked at as long as one holds it."""
    spans = Spans(slots=4, readers=4)
    span = spans.publish()
    spans.release(span, 0)
    spans.words.loads.clear()
    spans.arena.reap()
    assert len(spans.words.loads) == 1


def test_release_is_ordered_before_the_bytes_it_allows_to_overwrite() -> None:
    """Whenever spans were freed, and only then, the loads of their done words are ordered."""
    spans = Spans(slots=4)
    one, two = spans.publish(), spans.publish()
    spans.arena.reap()
    assert spans.orders == 0
    spans.release(one)
    spans.release(two)
    spans.arena.reap()
    assert spans.orders == 1


def test_reader_orders_its_reads_before_the_release() -> None:
    """``order`` first, then the one store that frees the span."""
    spans = Spans(slots=2, readers=2)
    trace: list[object] = []
    releaser = SpanReleaser(spans.words, spans.layout, 1, lambda: trace.append(list(spans.words.stores)))
    releaser.release(1, 7)
    assert trace == [[]]
    assert spans.words.stores == [(spans.layout.done + 1 * 2 + 1, 7)]


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=20), st.data())
def test_taking_at_a_place_takes_exactly_that(slots: int, places: list[tuple[int, int]], data: st.DataObject) -> None:
    """Against a set of free slots; what is given back joins its neighbours."""
    allocator, free, taken = SlotAllocator(slots), set(range(slots)), []
    for start, count in places:
        wanted = set(range(start, start + count))
        assert allocator.take_at(start, count) == (wanted <= free)
        if wanted <= free:
            free -= wanted
            taken.append((start, count))
        if taken and data.draw(st.booleans()):
            back = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            allocator.give(*back)
            free |= set(range(back[0], sum(back)))
        assert {slot for first, length in allocator.runs() for slot in range(first, first + length)} == free
        assert allocator.taken_slots == slots - len(free)
    for back in taken:
        allocator.give(*back)
    assert allocator.runs() == [(0, slots)]


def test_lent_slots_go_back_with_the_last_use() -> None:
    """Whoever is last: the owner, a send that was given up, or a reader."""
    layout = Layout(readers=1, ring_bytes=64, slots=4, slot_bytes=8)
    words = memoryview(bytearray(layout.control_bytes)).cast("Q")
    arena, holder = Arena(words, layout, lambda: None), Holder(0)
    releaser = SpanReleaser(words, layout, 0, lambda: None)
    loan = arena.lend(16)
    assert loan is not None
    assert (loan.slot, loan.slots, arena.used_slots, arena.claimed_spans) == (0, 2, 2, 0)
    first, second = arena.use(loan, 16), arena.use(loan, 8)
    assert first is not None and second is not None
    assert arena.use(loan, 8) is None  # as many as it has slots
    assert {first.slot, second.slot} == {0, 1} and first.generation != second.generation
    arena.publish(first, [holder])
    arena.unclaim(second)
    third = arena.use(loan, 8)
    assert third is not None
    arena.publish(third, [holder])
    assert not loan.idle
    arena.drop(loan)
    arena.reap()
    assert arena.used_slots == 2
    releaser.release(third.slot, third.generation)
    arena.reap()
    assert arena.used_slots == 2 and arena.held_by(holder) == [first]
    releaser.release(first.slot, first.generation)
    arena.reap()
    assert arena.used_slots == 0
    again = arena.lend(32)
    assert again is not None
    arena.drop(again)
    assert arena.lend(32) is not None  # dropped and unsent: free at the next look


# The census -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_census_tells_what_a_look_would_find_and_changes_nothing(seed: int) -> None:
    """Of random claims, loans, publications and releases: slots in use, and who is held, without taking note of either."""
    random = Random(seed)
    spans = Spans(slots=12, readers=2)
    arena = spans.arena
    claimed: list[Span] = []
    published: list[Span] = []
    loans: list[Loan] = []
    for _ in range(200):
        step = random.randrange(7)
        if step == 0 and (span := arena.claim(random.choice((100, 250)))) is not None:
            claimed.append(span)
        elif step == 1 and (loan := arena.lend(random.choice((100, 300)))) is not None:
            loans.append(loan)
        elif step == 2 and loans and (use := arena.use(random.choice(loans), 100)) is not None:
            claimed.append(use)
        elif step == 3 and claimed:
            span = claimed.pop(random.randrange(len(claimed)))
            if random.random() < 0.2:
                arena.unclaim(span)
            else:
                arena.publish(span, random.choice((spans.holders, spans.holders[:1], [])))
                published.append(span)
        elif step == 4 and loans:
            arena.drop(loans.pop(random.randrange(len(loans))))
        elif published:
            spans.release(random.choice(published), rank=random.randrange(2))
        before = arena.used_slots, arena.published_spans, len(arena._loans), arena._allocator.runs()
        used, held = arena.census()
        assert before == (arena.used_slots, arena.published_spans, len(arena._loans), arena._allocator.runs())
        if random.random() < 0.3:
            arena.reap()
            assert (arena.used_slots, set(arena.published_spans)) == (used, set(held))


def test_a_span_is_as_old_as_its_publication() -> None:
    """By the clock that the arena was given."""
    now = [5.0]
    layout = Layout(readers=1, ring_bytes=64, slots=4, slot_bytes=8)
    arena = Arena(memoryview(bytearray(layout.control_bytes)).cast("Q"), layout, lambda: None, lambda: now[0])
    span = arena.claim(8)
    assert span is not None
    now[0] = 7.0
    arena.publish(span, [Holder(0)])
    now[0] = 9.0
    assert span.since == 7.0


def test_a_snapshot_is_taken_again_if_the_collection_changes_meanwhile() -> None:
    """As iterating over a deque or a dict says, when another thread adds to it."""

    class Changing:
        def __init__(self) -> None:
            self.looks = 0

        def __iter__(self) -> Iterator[int]:
            self.looks += 1
            yield 1
            if self.looks < 3:
                raise RuntimeError("deque mutated during iteration")
            yield 2

    assert snapshot(Changing()) == [1, 2]
