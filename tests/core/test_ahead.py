"""Reading ahead for another: what was read stays until the other has it, and can be read again."""

from __future__ import annotations

import struct
from collections import deque

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioarena._core.ahead import AheadReader, Passage
from aioarena._core.layout import HEAD, PUBLISHED
from aioarena._core.receiver import ReceiverCore
from aioarena._core.record import FRAME
from aioarena._core.sender import Membership, PlacedMessage

from .support import Channel


class Ahead:
    """A channel whose reader 0 is read ahead for. Other readers are ordinary ones.

    Attributes:
        frames: Frames by number of their message, as the front keeps them.
        held: Rank 0, as the arena sees it.
    """

    def __init__(self, **options: int) -> None:
        self.channel = Channel(**{"readers": 1, **options}, joined=False)
        self.sender = self.channel.sender
        self.frames: dict[int, list[bytes]] = {}
        self.seat()

    def seat(self) -> None:
        self.holder = self.sender.join(0, 7)
        self.ahead = AheadReader(
            self.channel.control, self.channel.layout, 0, self.channel.arena, lambda number: self.frames[number]
        )

    def send(self, *buffers: bytes) -> bool:
        """Send a message, the first buffer of which is the pickled bytes; False if there is no room."""
        message = self.sender.place([len(buffer) for buffer in buffers])
        if self.sender.shortage(message) is not None:
            self.sender.unplace(message)
            return False
        body = self.body_of(message, buffers) if message.pack is not None else b""
        for index, span in message.spans.items():
            contents = body if index < 0 else buffers[index]
            start = span.slot * self.channel.layout.slot_bytes
            self.channel.arena[start : start + len(contents)] = contents
        if message.frames:
            number = self.sender.number_frames(message)
            self.frames[number] = [body if index < 0 else buffers[index] for index in message.frames]
        inline = []
        if message.pack is None:
            inline = [(at, buffer) for at, buffer in zip(message.offsets, buffers, strict=True) if at >= 0]
        self.sender.publish(message, inline)
        return True

    @staticmethod
    def body_of(message: PlacedMessage, buffers: tuple[bytes, ...]) -> bytes:
        body = bytearray(message.body_nbytes)
        body[: len(message.table)] = message.table
        for offset, buffer in zip(message.offsets, buffers, strict=True):
            if offset >= 0:
                body[offset : offset + len(buffer)] = buffer
        return bytes(body)

    def take(self) -> list[bytes] | None:
        passage = self.ahead.take()
        return None if passage is None else contents_of(passage)

    def fill(self) -> int:
        """Send small messages until there is no room; how many."""
        count = 0
        while self.sender.send_small(struct.pack("<Q", count)):
            count += 1
        return count


def contents_of(passage: Passage) -> list[bytes]:
    return [bytes(buffer) for buffer in passage.buffers]


PICKLED = b"pickled!"

# What a message is made of, and how it travels then: slots have 64 bytes, and buffers from 32 bytes on leave the ring.
MESSAGES = {
    "small": [PICKLED],
    "empty": [b""],
    "table": [PICKLED, b"", b"inline buffer"],
    "arena": [PICKLED, bytes(range(100)), b"inline", b"x" * 64],
    "large pickle": [b"p" * 150, b"inline"],
    "packed": [PICKLED, *[bytes([value]) * 8 for value in range(5)]],
    "frame": [PICKLED, b"f" * 300, b"inline", b"g" * 400],
    "packed and frames": [PICKLED, b"f" * 300, *[bytes([value]) * 8 for value in range(5)], b"a" * 64],
}


@pytest.mark.parametrize("slots", [4, 0, 1], ids=["arena", "no arena", "one slot"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_of_each_kind(kind: str, slots: int) -> None:
    """All buffers in their order, wherever they travel."""
    ahead = Ahead(slots=slots, slot_bytes=64 if slots else 0)
    assert ahead.take() is None
    assert ahead.send(*MESSAGES[kind])
    assert ahead.take() == MESSAGES[kind]
    assert ahead.take() is None
    assert (ahead.ahead.read, ahead.ahead.acknowledged) == (1, 0)


def test_large_buffers_are_not_copied() -> None:
    """They are the memory of the arena, and the frames, themselves."""
    ahead = Ahead()
    ahead.send(PICKLED, b"a" * 64, b"f" * 300)
    passage = ahead.ahead.take()
    assert passage is not None
    ahead.channel.arena[0:1] = b"b"
    assert bytes(passage.buffers[1]) == b"b" + b"a" * 63
    assert passage.buffers[2] is ahead.frames[1][0]


def test_reading_moves_no_tail() -> None:
    """To the sender the reader has received nothing."""
    ahead = Ahead()
    for _ in range(3):
        ahead.send(PICKLED)
        ahead.take()
    assert ahead.sender.lag(0) == (3, 48)
    assert ahead.sender.ring.tail(0) == ahead.ahead.tail == 0


def test_acknowledging_moves_the_tail() -> None:
    """By as many messages, and bytes, as the reader is done with; twice the same is nothing."""
    ahead = Ahead()
    for count in range(1, 4):
        ahead.send(b"x" * 8 * count)
    for _ in range(3):
        ahead.take()
    for messages, lag in ((1, (2, 56)), (1, (2, 56)), (0, (2, 56)), (3, (0, 0))):
        assert not ahead.ahead.acknowledge(messages)
        assert ahead.sender.lag(0) == lag
    assert ahead.ahead.tail == ahead.sender.ring.head


def test_a_pad_belongs_to_the_record_behind_it() -> None:
    """Acknowledging over the end of the ring ends where the sender's head is."""
    ahead = Ahead(ring_bytes=64)
    for _ in range(3):
        assert ahead.send(b"8 bytes.")
        ahead.take()
    ahead.ahead.acknowledge(3)
    assert ahead.send(b"x" * 8) and ahead.send(b"y" * 8)
    assert (ahead.take(), ahead.take()) == ([b"x" * 8], [b"y" * 8])
    ahead.ahead.acknowledge(5)
    assert ahead.sender.lag(0) == (0, 0)


def test_spans_are_released_by_acknowledging() -> None:
    """Neither by reading nor by reading again; those of a pack too."""
    ahead = Ahead(slots=8)
    ahead.send(*MESSAGES["arena"])
    ahead.send(*MESSAGES["packed"])
    held = len(ahead.sender.arena.held_by(ahead.holder))
    assert held == 3
    for _ in range(2):
        ahead.take()
        ahead.take()
        assert len(ahead.sender.arena.held_by(ahead.holder)) == held
        ahead.ahead.rewind()
    ahead.take()
    ahead.take()
    ahead.ahead.acknowledge(1)
    assert len(ahead.sender.arena.held_by(ahead.holder)) == 1
    ahead.ahead.acknowledge(2)
    ahead.sender.arena.reap()
    assert ahead.sender.arena.used_slots == 0


def test_what_was_acknowledged_is_let_go() -> None:
    """Frames stay no longer in memory than they are needed."""
    ahead = Ahead()
    ahead.send(PICKLED, b"f" * 300)
    passage = ahead.ahead.take()
    ahead.ahead.acknowledge(1)
    assert passage is not None and passage.buffers == []


@pytest.mark.parametrize("acknowledged", range(len(MESSAGES) + 1))
def test_after_a_cut_the_same_comes_again(acknowledged: int) -> None:
    """From the first message on that was not acknowledged, any number of times."""
    ahead = Ahead(slots=8)
    for buffers in MESSAGES.values():
        assert ahead.send(*buffers)
    expected = list(MESSAGES.values())
    assert [ahead.take() for _ in expected] == expected
    ahead.ahead.acknowledge(acknowledged)
    for count in (0, 3, len(expected)):
        ahead.ahead.rewind()
        assert ahead.ahead.read == ahead.ahead.acknowledged == acknowledged
        rest = expected[acknowledged:][:count]
        assert [ahead.take() for _ in rest] == rest
    assert ahead.take() is None
    ahead.ahead.acknowledge(len(expected))
    ahead.sender.arena.reap()
    assert (ahead.sender.lag(0), ahead.sender.arena.used_slots) == ((0, 0), 0)


def test_the_sender_does_not_overwrite_what_is_not_acknowledged() -> None:
    """Neither in the ring, however much was read, nor in the arena."""
    ahead = Ahead(slots=2)
    ahead.send(PICKLED, b"a" * 64, b"b" * 64)
    count = ahead.fill()
    assert ahead.sender.place([8, 64]).frames == [1]
    for _ in range(count + 1):
        ahead.take()
    assert not ahead.sender.send_small(PICKLED)
    ahead.ahead.rewind()
    assert ahead.take() == [PICKLED, b"a" * 64, b"b" * 64]
    assert [ahead.take() for _ in range(count)] == [[struct.pack("<Q", number)] for number in range(count)]
    ahead.ahead.acknowledge(1)
    assert ahead.sender.send_small(PICKLED)
    assert ahead.sender.place([8, 64]).frames == []


def test_a_sender_that_waits_is_woken_once() -> None:
    """By the acknowledgement that passes the tail it waits for, not by those before and after."""
    ahead = Ahead(ring_bytes=256)
    count = ahead.fill()
    for _ in range(count):
        ahead.take()
    tail = ahead.sender.ring.threshold(8)
    assert ahead.sender.ring.park(tail)
    woken = [ahead.ahead.acknowledge(messages) for messages in range(1, count + 1)]
    assert woken.count(True) == 1
    assert woken.index(True) == -(-tail // 16) - 1
    ahead.sender.ring.unpark()
    assert ahead.sender.send_small(PICKLED)


def test_a_sender_that_does_not_wait_is_not_woken() -> None:
    ahead = Ahead()
    ahead.send(PICKLED)
    ahead.take()
    assert ahead.ahead.acknowledge(1) is False


def test_it_parks_like_a_reader() -> None:
    """Awake it costs the sender nothing; parked it is named once after the next publication."""
    ahead = Ahead()
    ahead.send(PICKLED)
    assert list(ahead.sender.sleepers()) == []
    assert not ahead.ahead.park()  # there is something to read
    ahead.ahead.unpark()
    ahead.take()
    assert ahead.ahead.park()
    ahead.send(PICKLED)
    assert [list(ahead.sender.sleepers()) for _ in range(2)] == [[0], []]
    ahead.take()
    assert ahead.ahead.park()
    ahead.ahead.unpark()
    ahead.send(PICKLED)
    assert list(ahead.sender.sleepers()) == []


def test_parking_after_a_cut_finds_what_is_to_be_read_again() -> None:
    ahead = Ahead()
    ahead.send(PICKLED)
    ahead.take()
    assert ahead.ahead.park()
    ahead.ahead.rewind()
    assert not ahead.ahead.park()


def test_a_late_seat_begins_at_the_current_message() -> None:
    """Its messages count from 0, and those of the channel from where it was seated; so do a successor's."""
    ahead = Ahead()
    for number in range(3):
        ahead.send(bytes([number]))
    ahead.take()
    ahead.ahead.acknowledge(1)
    ahead.sender.unseat(0, Membership.LOST)
    ahead.send(b"to nobody")
    ahead.seat()
    assert (ahead.ahead.first, ahead.ahead.read, ahead.ahead.acknowledged) == (4, 0, 0)
    assert ahead.take() is None
    ahead.send(b"for it")
    assert ahead.take() == [b"for it"]
    ahead.ahead.rewind()
    assert ahead.take() == [b"for it"]
    ahead.ahead.acknowledge(1)
    assert ahead.sender.lag(0) == (0, 0)


def test_numbers_of_the_channel_may_wrap() -> None:
    """The ring counts modulo 2**24; reading again goes back over that."""
    ahead = Ahead()
    ahead.sender.unseat(0, Membership.LEFT)
    ahead.sender.ring.published = ahead.channel.words[PUBLISHED] = (1 << 24) - 1
    ahead.seat()
    for number in range(3):
        ahead.send(bytes([number]))
    for _ in range(2):
        assert [ahead.take() for _ in range(3)] == [[bytes([number])] for number in range(3)]
        ahead.ahead.rewind()


class AheadMachine(RuleBasedStateMachine):
    """A sender, a reader that is read ahead for, and a local one, in any order of calls."""

    @initialize(laps=st.sampled_from([0, 1 << 30]), min_bytes=st.sampled_from([16, 32, 200]))
    def open(self, laps: int, min_bytes: int) -> None:
        self.end = Ahead(readers=2, ring_bytes=768, min_bytes=min_bytes, frame_budget=1000)
        self.sender = self.end.sender
        self.sender.unseat(0, Membership.LEFT)
        self.sender.ring.head = self.end.channel.words[HEAD] = laps * 768
        self.end.seat()
        self.local: ReceiverCore = self.end.channel.join(1, 2)
        self.serial = 0
        self.unread: deque[list[bytes]] = deque()  # published and not read
        self.read: deque[tuple[Passage, list[bytes]]] = deque()  # read and not acknowledged
        self.behind = 0  # messages the local reader has not received
        self.waits_for: int | None = None  # the tail that the sender sleeps for

    @rule(sizes=st.lists(st.sampled_from([0, 1, 8, 24, 40, 64, 65, 130, 256, 300]), max_size=6))
    def send(self, sizes: list[int]) -> None:
        self.serial += 1
        buffers = [struct.pack("<Q", self.serial)]
        buffers += [bytes([self.serial % 256, index] * (size // 2 + 1))[:size] for index, size in enumerate(sizes)]
        if self.end.send(*buffers):
            self.unread.append(buffers)
            self.behind += 1
        else:
            assert self.unread or self.read or self.behind, "held up by nobody"

    @precondition(lambda self: self.waits_for is None)
    @rule()
    def wait(self) -> None:
        nbytes = 96  # the largest record
        if self.sender.ring.reserve(nbytes) >= 0:
            return
        tail = self.sender.ring.threshold(nbytes)
        if self.sender.ring.park(tail):
            self.waits_for = tail
        else:
            self.sender.ring.unpark()

    @rule()
    def take(self) -> None:
        passage = self.end.ahead.take()
        if passage is None:
            assert not self.unread
            assert self.end.ahead.park()
            self.end.ahead.unpark()
            return
        buffers = self.unread.popleft()
        assert contents_of(passage) == buffers
        self.read.append((passage, buffers))

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.read)))
        before = self.sender.ring.tail(0)
        woken = self.end.ahead.acknowledge(self.end.ahead.acknowledged + count)
        assert woken == (self.waits_for is not None and before < self.waits_for <= self.sender.ring.tail(0))
        for _ in range(count):
            self.read.popleft()
        self.awake()

    @rule()
    def cut(self) -> None:
        self.end.ahead.rewind()
        self.unread.extendleft(buffers for _, buffers in reversed(self.read))
        self.read.clear()

    @rule()
    def receive(self) -> None:
        """The local reader takes no spans: it lets go of them at once."""
        taken = self.local.take()
        if taken is None:
            assert not self.behind
            return
        if not isinstance(taken, bytes):
            for placement in taken.placements:
                if placement.where not in (FRAME, 0):
                    self.local.spans.release(placement.slot, placement.generation)
        # A pack names further spans, which it does not look for.
        if not isinstance(taken, bytes) and taken.packed:
            self.sender.arena.forget(self.sender._holders[1], self.sender.ring.published - self.behind)
        self.local.advance()
        self.behind -= 1
        self.awake()

    def awake(self) -> None:
        if self.waits_for is not None and self.sender.ring.slowest_tail() >= self.waits_for:
            self.sender.ring.unpark()
            self.waits_for = None

    @invariant()
    def what_was_read_does_not_change(self) -> None:
        if hasattr(self, "end"):
            for passage, buffers in self.read:
                assert contents_of(passage) == buffers

    @invariant()
    def lag_is_what_is_not_acknowledged(self) -> None:
        if hasattr(self, "end"):
            assert self.sender.lag(0)[0] == len(self.read) + len(self.unread)

    def teardown(self) -> None:
        """In the end everything arrives, and the arena is empty."""
        if not hasattr(self, "end"):
            return
        self.cut()
        while self.unread:
            self.take()
        if self.read:
            self.end.ahead.acknowledge(self.end.ahead.read)
        while self.behind:
            self.receive()
        assert self.sender.lag(0) == (0, 0)
        self.sender.unseat(1, Membership.LEFT)
        self.sender.arena.reap()
        assert len(self.sender.arena.held_by(self.end.holder)) == 0


TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(
    deadline=None,
    max_examples=150,
    stateful_step_count=50,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
