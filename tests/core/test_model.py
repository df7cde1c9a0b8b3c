"""A tiny channel against a model that is a deque per reader: any order of anything that may happen."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioarena._core.arena import Holder
from aioarena._core.layout import HEAD
from aioarena._core.receiver import Fate, IncomingMessage, ReceiverCore, unpack
from aioarena._core.record import ARENA, FRAME, Placement
from aioarena._core.sender import Membership, PlacedMessage
from aioarena.exceptions import EvictedError

from .support import Channel

READERS = 2
RANKS = st.integers(0, READERS - 1)


@dataclass
class Span:
    """A span that a reader holds, and what it found there."""

    slot: int
    generation: int
    contents: bytes


@dataclass
class Sent:
    """A message of the model."""

    buffers: list[bytes]
    frame_nbytes: int = 0


@dataclass
class Process:
    """A reader's process: what it has received, holds, and should receive next.

    Attributes:
        core: Its end of the channel.
        holder: Its holder at the sender.
        expected: The model: messages it has not received, oldest first.
        held: Spans of messages it is done with, which it has not released.
        taken: Spans of the first expected message, if it was taken; None if not.
        left: Whether it gave its seat up itself.
    """

    core: ReceiverCore
    holder: Holder
    expected: deque[Sent] = field(default_factory=deque)
    held: list[Span] = field(default_factory=list)
    taken: list[Span] | None = None
    left: bool = False

    @property
    def spans(self) -> list[Span]:
        """All it may read."""
        return self.held + (self.taken or [])


@dataclass
class Sending:
    """A send under way: placed and, if it has spans, copied."""

    message: PlacedMessage
    buffers: list[bytes]


class ChannelMachine(RuleBasedStateMachine):
    """Sender and readers of a channel with a ring of 768 bytes and four slots of 64 bytes.

    Every rule is one call of a front, at a moment that the front could choose; together they come in any order.
    """

    @initialize(
        laps=st.sampled_from([0, 1 << 30]),
        min_bytes=st.sampled_from([16, 32, 200]),
        frame_budget=st.sampled_from([50, 400, 1 << 20]),
    )
    def open(self, laps: int, min_bytes: int, frame_budget: int) -> None:
        self.channel = Channel(
            readers=READERS, ring_bytes=768, min_bytes=min_bytes, frame_budget=frame_budget, joined=False
        )
        self.sender = self.channel.sender
        self.sender.ring.head = self.channel.words[HEAD] = laps * 768
        self.frame_budget = frame_budget
        self.serial = 0
        self.incarnations = 0
        self.sendings: deque[Sending] = deque()
        self.frames: dict[int, list[bytes]] = {}  # what ZMQ carries: frames by number of their message
        self.seated: dict[int, Process] = {}
        self.departed: list[Process] = []  # without a seat, but alive and holding spans

    # The sender -----------------------------------------------------------------------------------------------------

    @rule(sizes=st.lists(st.sampled_from([0, 1, 8, 24, 40, 64, 65, 130, 256, 300]), min_size=1, max_size=6))
    def place(self, sizes: list[int]) -> None:
        """A send begins: buffers get their places, and spans are filled."""
        self.serial += 1
        pickled = struct.pack("<Q", self.serial)
        buffers = [pickled] + [
            bytes([self.serial % 256, index] * (size // 2 + 1))[:size] for index, size in enumerate(sizes)
        ]
        message = self.sender.place([len(buffer) for buffer in buffers])
        assert len(message.placements) == len(buffers)
        for index, span in message.spans.items():
            contents = self.body_of(message, buffers) if index < 0 else buffers[index]
            # What a live process holds is not claimed again.
            for process in [*self.seated.values(), *self.departed]:
                for held in process.spans:
                    held_slots = -(-len(held.contents) // self.sender.arena.slot_bytes)
                    assert span.slot + span.slots <= held.slot or held.slot + held_slots <= span.slot
            self.write(span.slot, contents)
        self.sendings.append(Sending(message, buffers))

    @precondition(lambda self: self.sendings)
    @rule()
    def publish(self) -> None:
        """The oldest send is published if there is room; else some reader holds it up."""
        sending = self.sendings[0]
        tail = self.sender.shortage(sending.message)
        if tail is not None:
            assert any(process.expected for process in self.seated.values()), "held up by nobody"
            assert self.sender.ring.slowest_tail() < tail <= self.sender.ring.head
            return
        self.sendings.popleft()
        message, buffers = sending.message, sending.buffers
        if message.frames:
            number = self.sender.number_frames(message)
            self.frames[number] = [
                self.body_of(message, buffers) if index < 0 else buffers[index] for index in message.frames
            ]
        inline = []
        if message.pack is None:
            inline = [(at, buffer) for at, buffer in zip(message.offsets, buffers, strict=True) if at >= 0]
        self.sender.publish(message, inline)
        self.sender.unplace(message)
        for process in self.seated.values():
            process.expected.append(Sent(buffers, message.frame_nbytes))

    @rule(nbytes=st.integers(8, 16))
    def send_small(self, nbytes: int) -> None:
        """A small message goes at once, or not at all."""
        self.serial += 1
        pickled = struct.pack("<Q", self.serial).ljust(nbytes, b"s")
        if self.sender.send_small(pickled):
            for process in self.seated.values():
                process.expected.append(Sent([pickled]))
        else:
            assert any(process.expected for process in self.seated.values()), "held up by nobody"

    @precondition(lambda self: self.sendings)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A send fails or is cancelled before it is published."""
        position = data.draw(st.integers(0, len(self.sendings) - 1))
        self.sender.unplace(self.sendings[position].message)
        del self.sendings[position]

    # Readers --------------------------------------------------------------------------------------------------------

    @rule(rank=RANKS)
    def join(self, rank: int) -> None:
        """A new process takes an empty seat."""
        if rank in self.seated:
            return
        self.incarnations += 1
        holder = self.sender.join(rank, self.incarnations)
        core = self.channel.make_reader(rank, self.incarnations)
        assert core.seated
        core.start()
        self.seated[rank] = Process(core, holder)

    @rule(rank=RANKS)
    def take(self, rank: int) -> None:
        """A reader takes the next message, or takes it again: it is the next one of the model."""
        process = self.seated.get(rank)
        if process is None:
            return
        taken = process.core.take()
        if taken is None:
            assert not process.expected
            assert process.core.fate() is Fate.OPEN
            assert process.core.park()
            process.core.unpark()
            return
        assert process.expected, "a message too many"
        buffers, spans = self.decode(taken)
        assert buffers == process.expected[0].buffers
        process.taken = spans

    @rule(rank=RANKS)
    def advance(self, rank: int) -> None:
        """A reader is done with the message it has taken."""
        process = self.seated.get(rank)
        if process is not None and process.taken is not None:
            process.core.advance()
            process.expected.popleft()
            process.held += process.taken
            process.taken = None

    @rule(rank=RANKS, data=st.data())
    def release(self, rank: int, data: st.DataObject) -> None:
        """A reader lets go of a span, whichever."""
        process = self.seated.get(rank)
        if process is not None and process.held:
            self.let_go(process, data.draw(st.integers(0, len(process.held) - 1)))

    @precondition(lambda self: self.departed)
    @rule(data=st.data())
    def release_later(self, data: st.DataObject) -> None:
        """So does a process that has no seat any more."""
        process = data.draw(st.sampled_from(self.departed))
        if process.held:
            self.let_go(process, data.draw(st.integers(0, len(process.held) - 1)))

    @rule(rank=RANKS, reason=st.sampled_from([Membership.LEFT, Membership.EVICTED]))
    def lose_the_seat(self, rank: int, reason: Membership) -> None:
        """A reader leaves or is evicted; its process lives, and keeps what it has received."""
        process = self.seated.pop(rank, None)
        if process is None:
            return
        if reason is Membership.LEFT:
            # It looks at nothing more, so that only what it is done with may still be in use.
            self.sender.skip_unread(rank, process.holder)
            process.taken = None
        self.sender.unseat(rank, reason)
        assert process.core.fate() is Fate.EVICTED
        try:
            assert process.core.take() is None
            assert not process.expected
        except EvictedError:
            assert process.expected
        process.held = process.spans
        process.taken = None
        process.left = reason is Membership.LEFT
        self.departed.append(process)

    @rule(rank=RANKS)
    def die(self, rank: int) -> None:
        """A reader's process dies with all it holds, and the sender is told."""
        process = self.seated.pop(rank, None)
        if process is not None:
            self.sender.unseat(rank, Membership.LOST)
            process.holder.dead = True

    @precondition(lambda self: self.departed)
    @rule(data=st.data())
    def die_later(self, data: st.DataObject) -> None:
        """So does one without a seat."""
        process = data.draw(st.sampled_from(self.departed))
        self.departed.remove(process)
        process.holder.dead = True

    # What must hold all the time --------------------------------------------------------------------------------------

    @invariant()
    def held_spans_do_not_change(self) -> None:
        for process in [*self.seated.values(), *self.departed]:
            for span in process.spans:
                assert self.read(span.slot, len(span.contents)) == span.contents

    @invariant()
    def lag_is_what_is_expected(self) -> None:
        for rank, process in self.seated.items():
            assert self.sender.lag(rank)[0] == len(process.expected)

    @invariant()
    def claims_are_those_of_sends_under_way(self) -> None:
        assert self.sender.arena.claimed_spans == sum(len(sending.message.spans) for sending in self.sendings)

    @invariant()
    def frames_are_counted_while_somebody_waits_for_them(self) -> None:
        slowest = max((process.expected for process in self.seated.values()), key=len, default=deque())
        pending = [sent.frame_nbytes for sent in slowest if sent.frame_nbytes]
        assert self.sender.frames_pending == sum(pending)
        assert sum(pending) <= self.frame_budget or len(pending) == 1

    def teardown(self) -> None:
        """In the end everything arrives, and with the last holder gone the arena is empty."""
        if not hasattr(self, "channel"):
            return
        for sending in self.sendings:
            self.sender.unplace(sending.message)
        self.sender.ring.close()
        for rank, process in self.seated.items():
            while process.expected:
                self.take(rank)
                self.advance(rank)
            assert process.core.take() is None
            assert process.core.fate() is Fate.ENDED
            self.held_spans_do_not_change()
            while process.held:
                self.let_go(process, 0)
        for process in self.departed:
            # One that was evicted may still look at what it has not received.
            process.holder.dead = not process.left
            while process.left and process.held:
                self.let_go(process, 0)
        self.sender.arena.reap()
        assert (self.sender.arena.used_slots, self.sender.arena.published_spans) == (0, ())
        assert self.sender.frames_pending == 0

    # Help -------------------------------------------------------------------------------------------------------------

    def let_go(self, process: Process, position: int) -> None:
        span = process.held.pop(position)
        process.core.spans.release(span.slot, span.generation)

    def write(self, slot: int, contents: bytes) -> None:
        start = slot * self.channel.layout.slot_bytes
        self.channel.arena[start : start + len(contents)] = contents

    def read(self, slot: int, nbytes: int) -> bytes:
        start = slot * self.channel.layout.slot_bytes
        return bytes(self.channel.arena[start : start + nbytes])

    @staticmethod
    def body_of(message: PlacedMessage, buffers: list[bytes]) -> bytes:
        """A body as it is packed: the table, and the inline buffers at their offsets."""
        body = bytearray(message.body_nbytes)
        body[: len(message.table)] = message.table
        for offset, buffer in zip(message.offsets, buffers, strict=True):
            if offset >= 0:
                body[offset : offset + len(buffer)] = buffer
        return bytes(body)

    def decode(self, taken: bytes | IncomingMessage) -> tuple[list[bytes], list[Span]]:
        """All buffers of a message, and the spans among the places they were in."""
        if isinstance(taken, bytes):
            return [taken], []
        frames = iter(self.frames[taken.frame_number] if taken.frame_number else [])
        spans: list[Span] = []

        def fetch(placement: Placement) -> bytes:
            if placement.where == FRAME:
                return next(frames)
            assert placement.where == ARENA
            contents = self.read(placement.slot, placement.nbytes)
            spans.append(Span(placement.slot, placement.generation, contents))
            return contents

        if taken.packed:
            taken = unpack(memoryview(fetch(taken.placements[0])))
        buffers = [
            fetch(placement) if inline is None else bytes(inline)
            for placement, inline in zip(taken.placements, taken.inline, strict=True)
        ]
        assert next(frames, None) is None
        return buffers, spans


TestChannel = ChannelMachine.TestCase
# Without the phase that explains failures: it traces, and takes longer than the time a test may take.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
TestChannel.settings = settings(
    deadline=None, max_examples=200, stateful_step_count=60, phases=PHASES, report_multiple_bugs=False
)
