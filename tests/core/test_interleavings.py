"""Every interleaving of the protocols between sender and reader, with the code that runs in production.

Each protocol is explored under x86-64's memory and under a weaker one (see explorer.py), and then again with one of its
fences, orders or second looks taken out: the exploration has to find what that one is there for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from aioarena._core.arena import Arena, Holder, SpanReleaser
from aioarena._core.layout import Layout
from aioarena._core.receiver import Fate, ReceiverCore
from aioarena._core.ring import RingReader, RingWriter
from aioarena._core.sender import Membership, SenderCore
from aioarena._core.spans import SpanTable, read_span
from aioarena.exceptions import EvictedError

from .explorer import Cpu, Exploration, Memory, Outcome, Program, Token, Violation, explore, names_of

BOTH = pytest.mark.parametrize("memory", [Memory.TSO, Memory.WEAK])


def no_op() -> None:
    pass


def without(barrier: str, cls: type[Any], *methods: str) -> type[Any]:
    """The class with ``_order`` or ``_fence`` (``barrier``) doing nothing inside of some methods."""

    def bare(method: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            kept = getattr(self, barrier)
            setattr(self, barrier, no_op)
            try:
                return getattr(cls, method)(self, *args)
            finally:
                setattr(self, barrier, kept)

        return call

    return type(f"Bare{cls.__name__}", (cls,), {method: bare(method) for method in methods})


def without_second_look(cls: type[Any]) -> type[Any]:
    """The class with a ``park`` that announces itself, but then sleeps whatever has happened meanwhile."""

    def park(self: Any, *args: Any) -> bool:
        cls.park(self, *args)
        return True

    return type(f"Blind{cls.__name__}", (cls,), {"park": park})


def explored(programs: dict[str, Program], memory: Memory, layout: Layout, **options: Any) -> Exploration:
    """Explore, and make sure that it was exhaustive and about something."""
    exploration = explore(programs, memory, name=names_of(layout), **options)
    assert exploration.complete
    assert exploration.schedules > 1
    return exploration


# Parking and waking ---------------------------------------------------------------------------------------------------


def body(number: int) -> bytes:
    return bytes([number + 1]) * 8


class Ring:
    """A sender and the readers of a ring, as the fronts drive them.

    Args:
        ring_bytes: Capacity; a record of :func:`body` takes 16.
        before: Messages published before the exploration begins.
        messages: Messages published in it.
        readers: How many.
        received: Messages that each of them receives before it ends; all by default.
        writer: Class of the sender's side.
        reader: Class of the reader's side.
    """

    def __init__(
        self,
        *,
        ring_bytes: int,
        before: int = 0,
        messages: int,
        readers: int = 1,
        received: int | None = None,
        writer: type[RingWriter] = RingWriter,
        reader: type[RingReader] = RingReader,
    ) -> None:
        self.layout = Layout(readers=readers, ring_bytes=ring_bytes, slots=0, slot_bytes=0)
        self.readers = {f"reader {rank}": rank for rank in range(readers)} if readers > 1 else {"reader": 0}
        self.before = before
        self.messages = messages
        self.received = before + messages if received is None else received
        self.writer = writer
        self.reader = reader

    def send(self, cpu: Cpu) -> None:
        writer = self.writer(cpu.words, cpu.control[self.layout.ring_offset :], self.layout, cpu.order, cpu.fence)
        with cpu.setup():
            for rank in self.readers.values():
                writer.add_reader(rank)
            for number in range(self.before):
                assert writer.append(number + 1, body(number))
        for number in range(self.before, self.before + self.messages):
            waited = False
            while not writer.append(number + 1, body(number)):
                waited = True
                cpu.forget_wakes()
                if writer.park(writer.threshold(8)):
                    cpu.sleep()
            if waited:
                writer.unpark()
            if writer.sleepers():
                for name in self.readers:
                    cpu.wake(name)

    def receive(self, cpu: Cpu, rank: int) -> list[Token]:
        data = cpu.control[self.layout.ring_offset :]
        reader = self.reader(cpu.words, data, self.layout, rank, cpu.order, cpu.fence)
        tokens = []
        for number in range(self.received):
            while (found := reader.look()) is None:
                cpu.forget_wakes()
                if reader.park():
                    cpu.sleep()
                reader.unpark()
            kind, start, nbytes = found
            assert (kind, nbytes) == (number + 1, 8), "a head without its record"
            tokens.append(data[start : start + nbytes].tobytes())
            if reader.advance():
                cpu.wake("sender")
        return tokens

    def check(self, outcome: Outcome) -> None:
        for name in self.readers:
            got = [outcome.bytes_of(name, token) for token in outcome.returned[name]]
            assert got == [body(number) for number in range(self.received)], f"{name} received {got}"

    def explore(self, memory: Memory) -> Exploration:
        receivers = {name: partial(self.receive, rank=rank) for name, rank in self.readers.items()}
        return explored({"sender": self.send, **receivers}, memory, self.layout, check=self.check)


@BOTH
def test_reader_that_sleeps_is_woken(memory: Memory) -> None:
    """A reader that finds nothing and parks gets every message, in whatever moment it is published."""
    Ring(ring_bytes=64, messages=2).explore(memory)


@BOTH
def test_sender_that_waits_for_room_is_woken(memory: Memory) -> None:
    """A sender that finds the ring full and parks goes on once the reader has passed the threshold."""
    Ring(ring_bytes=32, before=2, messages=1).explore(memory)


@BOTH
def test_both_ends_may_wait_for_each_other_in_turn(memory: Memory) -> None:
    """In a ring of one record sender and reader both park, and neither sleeps for ever or sees a wrong byte."""
    Ring(ring_bytes=16, messages=2).explore(memory)


def test_each_of_two_readers_that_sleep_is_woken() -> None:
    """One look at all parked words after each publication serves whoever parked meanwhile."""
    Ring(ring_bytes=64, messages=1, readers=2).explore(Memory.TSO)


def test_sender_is_woken_by_the_slower_of_two_readers() -> None:
    """Whichever reader passes the threshold last: its step wakes the sender."""
    Ring(ring_bytes=16, before=1, messages=1, readers=2, received=1).explore(Memory.TSO)


@BOTH
def test_records_that_wrap_are_seen_whole(memory: Memory) -> None:
    """A pad record becomes visible together with the record behind it."""
    Ring(ring_bytes=40, before=2, messages=1).explore(memory)


@BOTH
@pytest.mark.parametrize(
    ("parts", "who"),
    [
        ({"writer": without("_fence", RingWriter, "sleepers")}, "reader"),
        ({"reader": without("_fence", RingReader, "park")}, "reader"),
        ({"reader": without_second_look(RingReader)}, "reader"),
    ],
    ids=["sender's fence", "reader's fence", "reader's second look"],
)
def test_reader_would_sleep_for_ever_without(parts: dict[str, Any], who: str, memory: Memory) -> None:
    """Each part of parking a reader is needed: without it some schedule loses the wake-up."""
    with pytest.raises(Violation, match=f"{who} waits for ever in sleep"):
        Ring(ring_bytes=64, messages=1, **parts).explore(memory)


@BOTH
@pytest.mark.parametrize(
    "parts",
    [
        {"writer": without("_fence", RingWriter, "park")},
        {"reader": without("_fence", RingReader, "advance")},
        {"writer": without_second_look(RingWriter)},
    ],
    ids=["sender's fence", "reader's fence", "sender's second look"],
)
def test_sender_would_sleep_for_ever_without(parts: dict[str, Any], memory: Memory) -> None:
    """Each part of parking the sender is needed: without it some schedule loses the wake-up."""
    with pytest.raises(Violation, match="sender waits for ever in sleep"):
        Ring(ring_bytes=16, before=1, messages=1, **parts).explore(memory)


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"writer": without("_order", RingWriter, "publish")}, "InternalError|a head without its record|received"),
        ({"reader": without("_order", RingReader, "look")}, "InternalError|a head without its record|received"),
        ({"reader": without("_order", RingReader, "advance")}, "received"),
    ],
    ids=["body before head", "head before body", "body before tail"],
)
def test_reader_would_see_another_lap_without(parts: dict[str, Any], what: str) -> None:
    """Each order of the ring is needed where memory is weak: without it a reader sees bytes of another lap."""
    with pytest.raises(Violation, match=what):
        Ring(ring_bytes=16, before=1, messages=1, **parts).explore(Memory.WEAK)


def test_a_violation_shows_its_schedule() -> None:
    """The text has every step up to the failure, in words."""
    with pytest.raises(Violation) as caught:
        Ring(ring_bytes=64, messages=1, reader=without_second_look(RingReader)).explore(Memory.TSO)
    text = str(caught.value)
    assert "under TSO memory, after:\n    1. " in text
    for step in (
        "reader: load head -> 0",
        "sender: head = 16 becomes visible",
        "sender: load parked[0] -> 0",
        "reader: fence",
    ):
        assert step in text


# Spans ------------------------------------------------------------------------------------------------------------------


def contents(generation: int) -> bytes:
    return bytes([0xA0 + generation]) * 8


class Spans:
    """A sender that reuses the one slot of an arena, and a reader that reads it.

    The kind of each record carries the generation of its span, or ``NO_SPAN``.
    """

    NO_SPAN = 99
    layout = Layout(readers=1, ring_bytes=64, slots=1, slot_bytes=8)

    def __init__(self, *, writer: type[RingWriter] = RingWriter, releaser: type[SpanReleaser] = SpanReleaser) -> None:
        self.writer = writer
        self.releaser = releaser
        self.claims: set[tuple[bool, ...]] = set()

    def send(self, cpu: Cpu) -> tuple[bool, ...]:
        layout = self.layout
        arena, holder = Arena(cpu.words, layout, cpu.order), Holder(0)
        writer = self.writer(cpu.words, cpu.control[layout.ring_offset :], layout, cpu.order, cpu.fence)
        with cpu.setup():
            writer.add_reader(0)
        claimed = []
        for _ in range(2):
            span = arena.claim(8)
            claimed.append(span is not None)
            kind = self.NO_SPAN
            if span is not None:
                cpu.span(span.slot)[0:8] = contents(span.generation)
                arena.publish(span, [holder])
                kind = span.generation
            assert writer.append(kind, b"")
        return tuple(claimed)

    def receive(self, cpu: Cpu) -> list[tuple[int, Token]]:
        layout = self.layout
        reader = RingReader(cpu.words, cpu.control[layout.ring_offset :], layout, 0, cpu.order, cpu.fence)
        releaser = self.releaser(cpu.words, layout, 0, cpu.order)
        seen = []
        for _ in range(2):
            found = reader.look()
            if found is None:
                break
            generation = found[0]
            if generation != self.NO_SPAN:
                assert generation in (1, 2), "a head without its record"
                seen.append((generation, cpu.span(0).tobytes()))
                releaser.release(0, generation)
            reader.advance()
        return seen

    def check(self, outcome: Outcome) -> None:
        self.claims.add(outcome.returned["sender"])
        for generation, token in outcome.returned["reader"]:
            read = outcome.bytes_of("reader", token)
            assert read == contents(generation), f"span of generation {generation} read as {read.hex()}"

    def explore(self, memory: Memory) -> Exploration:
        return explored({"sender": self.send, "reader": self.receive}, memory, self.layout, check=self.check)


@BOTH
def test_span_is_not_rewritten_while_a_reader_reads_it(memory: Memory) -> None:
    """Whenever the sender looks for a span: either it was released and all reads of it are over, or it is not free."""
    spans = Spans()
    spans.explore(memory)
    assert spans.claims == {(True, False), (True, True)}


@pytest.mark.parametrize(
    "parts",
    [{"releaser": without("_order", SpanReleaser, "release")}, {"writer": without("_order", RingWriter, "publish")}],
    ids=["reads before release", "bytes before head"],
)
def test_reader_would_see_wrong_bytes_of_a_span_without(parts: dict[str, Any]) -> None:
    """Both orders around a span are needed where memory is weak."""
    with pytest.raises(Violation, match=r"span of generation|InternalError|a head without its record"):
        Spans(**parts).explore(Memory.WEAK)


def test_span_would_be_rewritten_if_freed_before_its_release() -> None:
    """The exploration sees a reuse that comes too early, also where memory is strong."""

    class HastySpans(Spans):
        def receive(self, cpu: Cpu) -> list[tuple[int, Token]]:
            reader = RingReader(cpu.words, cpu.control[self.layout.ring_offset :], self.layout, 0, cpu.order, cpu.fence)
            found = reader.look()
            if found is None:
                return []
            self.releaser(cpu.words, self.layout, 0, cpu.order).release(0, found[0])
            return [(found[0], cpu.span(0).tobytes())]

    with pytest.raises(Violation, match="span of generation 1 read as a2"):
        HastySpans().explore(Memory.TSO)


# Seats ----------------------------------------------------------------------------------------------------------------


INCARNATION = 7
FIRST, SECOND = b"FirstOne", b"SecondOn"


def make_sender(cpu: Cpu, layout: Layout, cls: type[SenderCore] = SenderCore) -> SenderCore:
    return cls(cpu.control, layout, min_bytes=1 << 10, frame_budget=1 << 20, order=cpu.order, fence=cpu.fence)  # type: ignore[arg-type]


def make_reader(cpu: Cpu, layout: Layout, cls: type[ReceiverCore] = ReceiverCore) -> ReceiverCore:
    return cls(cpu.control, layout, 0, INCARNATION, order=cpu.order, fence=cpu.fence)  # type: ignore[arg-type]


def explore_join(
    memory: Memory, *, sender: type[SenderCore] = SenderCore, reader: type[ReceiverCore] = ReceiverCore
) -> set[bytes | None]:
    """A reader that joins between two messages: what it may receive."""
    layout = Layout(readers=1, ring_bytes=64, slots=0, slot_bytes=0)
    received: set[bytes | None] = set()

    def send(cpu: Cpu) -> None:
        core = make_sender(cpu, layout, sender)
        with cpu.setup():
            assert core.send_small(FIRST)
        core.join(0, INCARNATION)
        assert core.send_small(SECOND)

    def receive(cpu: Cpu) -> Token | None:
        core = make_reader(cpu, layout, reader)
        if not core.seated:
            return None
        core.start()
        return core.take()  # type: ignore[return-value]

    def check(outcome: Outcome) -> None:
        token = outcome.returned["reader"]
        received.add(None if token is None else outcome.bytes_of("reader", token))
        assert received <= {None, SECOND}

    explored({"sender": send, "reader": receive}, memory, layout, check=check)
    return received


@BOTH
def test_reader_starts_where_it_was_seated(memory: Memory) -> None:
    """Whoever sees its seat sees where it begins, and receives the message after that, not the one before."""
    assert explore_join(memory) == {None, SECOND}


@pytest.mark.parametrize(
    "parts",
    [{"sender": without("_order", SenderCore, "join")}, {"reader": without("_order", ReceiverCore, "start")}],
    ids=["start before seat", "seat before start"],
)
def test_reader_would_start_elsewhere_without(parts: dict[str, Any]) -> None:
    """Both orders around the seat are needed where memory is weak."""
    with pytest.raises(Violation):
        explore_join(Memory.WEAK, **parts)


def explore_eviction(
    memory: Memory,
    *,
    sender: type[SenderCore] = SenderCore,
    writer: type[RingWriter] = RingWriter,
    reader: type[ReceiverCore] = ReceiverCore,
) -> set[bytes | str]:
    """A reader that is evicted, its message overwritten at once: what it may get."""
    layout = Layout(readers=1, ring_bytes=16, slots=0, slot_bytes=0)
    received: set[bytes | str] = set()

    def send(cpu: Cpu) -> None:
        core = make_sender(cpu, layout, sender)
        core.ring.__class__ = writer  # SenderCore makes its ring itself
        with cpu.setup():
            core.join(0, INCARNATION)
            assert core.send_small(FIRST)
        core.unseat(0, Membership.EVICTED)
        assert core.send_small(SECOND)

    def receive(cpu: Cpu) -> Token | str:
        core = make_reader(cpu, layout, reader)
        with cpu.setup():
            core.start()
        try:
            taken = core.take()
        except EvictedError:
            return "evicted"
        assert taken is not None
        return taken  # type: ignore[return-value]

    def check(outcome: Outcome) -> None:
        taken = outcome.returned["reader"]
        received.add(outcome.bytes_of("reader", taken) if isinstance(taken, Token) else taken)
        assert received <= {FIRST, "evicted"}, f"received {received}"

    explored({"sender": send, "reader": receive}, memory, layout, check=check)
    return received


@BOTH
def test_evicted_reader_never_takes_what_was_overwritten(memory: Memory) -> None:
    """It gets its message or is told, whatever it had read when the ring was overwritten under it."""
    assert explore_eviction(memory) == {FIRST, "evicted"}


@pytest.mark.parametrize(
    "parts",
    [
        # Reading the tails anew is ordered as well, so that each of the two alone would do.
        {
            "sender": without("_fence", SenderCore, "unseat"),
            "writer": without("_order", RingWriter, "_refresh"),
        },
        {"reader": without("_order", ReceiverCore, "take")},
    ],
    ids=["seat before overwriting", "reads before seat"],
)
def test_evicted_reader_would_take_anything_without(parts: dict[str, Any]) -> None:
    """Both orders around the end of a seat are needed where memory is weak."""
    with pytest.raises(Violation, match=r"received|InternalError"):
        explore_eviction(Memory.WEAK, **parts)


# The end --------------------------------------------------------------------------------------------------------------


class Closing:
    """A sender that sends one message and closes; a reader that receives until it is told of the end."""

    layout = Layout(readers=1, ring_bytes=64, slots=0, slot_bytes=0)

    def __init__(self, *, writer: type[RingWriter] = RingWriter, reader: type[ReceiverCore] = ReceiverCore) -> None:
        self.writer = writer
        self.reader = reader

    def send(self, cpu: Cpu) -> None:
        core = make_sender(cpu, self.layout)
        core.ring.__class__ = self.writer  # SenderCore makes its ring itself
        with cpu.setup():
            core.join(0, INCARNATION)
        assert core.send_small(FIRST)
        core.ring.close()
        # Whoever sleeps, for the message or for the end.
        cpu.wake("reader")

    def receive(self, cpu: Cpu) -> list[Token]:
        core = make_reader(cpu, self.layout, self.reader)
        with cpu.setup():
            core.start()
        tokens = []
        while True:
            taken = core.take()
            if taken is not None:
                tokens.append(taken)
                core.advance()
            elif core.fate() is Fate.ENDED:
                return tokens  # type: ignore[return-value]
            else:
                cpu.forget_wakes()
                if core.park():
                    cpu.sleep()
                core.unpark()

    def check(self, outcome: Outcome) -> None:
        got = [outcome.bytes_of("reader", token) for token in outcome.returned["reader"]]
        assert got == [FIRST], f"ended after {got}"

    def explore(self, memory: Memory) -> Exploration:
        return explored({"sender": self.send, "reader": self.receive}, memory, self.layout, check=self.check)


@BOTH
def test_end_comes_after_the_last_message_and_wakes(memory: Memory) -> None:
    """A reader is told of the end only after it has everything, and does not sleep through it."""
    Closing().explore(memory)


@pytest.mark.parametrize(
    "parts",
    [{"writer": without("_order", RingWriter, "close")}, {"reader": without("_order", ReceiverCore, "fate")}],
    ids=["head before closed", "closed before head"],
)
def test_end_would_come_too_early_without(parts: dict[str, Any]) -> None:
    """Both orders around the end are needed where memory is weak."""
    with pytest.raises(Violation, match="ended after"):
        Closing(**parts).explore(Memory.WEAK)


@BOTH
def test_reader_would_sleep_through_the_end_without_a_fence(memory: Memory) -> None:
    """Closing needs its fence: else the wake-up may come before the end can be seen, and no other follows."""
    with pytest.raises(Violation, match="reader waits for ever in sleep"):
        Closing(writer=without("_fence", RingWriter, "close")).explore(memory)


# The table of spans, for onlookers --------------------------------------------------------------------------------------


class Table:
    """A sender that claims, publishes and frees one slot again and again, and an onlooker that reads its entry."""

    layout = Layout(readers=2, ring_bytes=64, slots=1, slot_bytes=8)

    def __init__(self, *, table: type[SpanTable] = SpanTable, onlooker_orders: bool = True) -> None:
        self.table = table
        self.onlooker_orders = onlooker_orders
        self.seen: set[tuple[int, int | None]] = set()

    def send(self, cpu: Cpu) -> None:
        times = iter((1, 2))
        table = self.table(cpu.words, self.layout, cpu.order, lambda: next(times))
        with cpu.setup():
            table.claimed(0, 1, 10)
        table.published(0, 1, [0])
        table.freed(0)
        table.claimed(0, 2, 20)
        table.published(0, 2, [1])

    def look(self, cpu: Cpu) -> Any:
        return read_span(cpu.words, self.layout, 0, cpu.order if self.onlooker_orders else no_op)

    def check(self, outcome: Outcome) -> None:
        entry = outcome.returned["onlooker"]
        if entry is None:
            return
        number = entry.generation
        self.seen.add((number, entry.number))
        assert (entry.nbytes, entry.claimed) == (10 * number, number * 10**9), f"a torn entry: {entry}"
        assert (entry.number, entry.ranks) in ((None, ()), (number, (number - 1,))), f"a torn entry: {entry}"

    def explore(self, memory: Memory) -> Exploration:
        return explored({"sender": self.send, "onlooker": self.look}, memory, self.layout, check=self.check)


@BOTH
def test_onlooker_sees_whole_entries(memory: Memory) -> None:
    """Whenever an onlooker looks at the entry of a slot that is used again: what it takes is of one span."""
    table = Table()
    table.explore(memory)
    assert table.seen == {(1, None), (1, 1), (2, None), (2, 2)}


@pytest.mark.parametrize(
    "parts",
    [
        {"table": without("_order", SpanTable, "claimed")},
        {"table": without("_order", SpanTable, "published")},
        {"onlooker_orders": False},
    ],
    ids=["entry before generation", "ranks before number", "generation before entry"],
)
def test_onlooker_would_see_torn_entries_without(parts: dict[str, Any]) -> None:
    """Each order is needed where memory is weak."""
    with pytest.raises(Violation, match="a torn entry"):
        Table(**parts).explore(Memory.WEAK)
