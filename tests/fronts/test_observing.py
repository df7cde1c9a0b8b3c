"""Observers: told of what every end does, once they ask; messages arrive as they were sent, with or without an envelope."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from aioarena import DecodeError, EncodeError, Receiver, Sender, _observing
from aioarena._envelope import Postmark, take_postmark
from aioarena._filling import Filler
from aioarena._observing import Delivery, Observer
from aioarena._platform.process import clock_identity
from tests.conftest import RING_BYTES, OpenChannel
from tests.fronts.support import filled, no_collector
from tests.fronts.threads import blocking_channel
from tests.multiprocess.messages import CHANNEL, KINDS, message, verify


class Notes(Observer):
    """Notes what it is told.

    Attributes:
        said: In order: ``begin ...``, ``end ...`` or ``failed ...``.
        postmarks: What came with each message received.
    """

    def __init__(self, *, carries: bool = True, name: str = "") -> None:
        self.carries = carries
        self.said: list[str] = []
        self.postmarks: list[Postmark | None] = []
        self._name = name
        self._sent = 0

    @contextlib.contextmanager
    def _note(self, what: str) -> Iterator[None]:
        self.said.append(f"begin {what}")
        try:
            yield
        except BaseException:
            self.said.append(f"failed {what}")
            raise
        self.said.append(f"end {what}")

    @contextlib.contextmanager
    def sending(self, sender: Sender, carrier: dict[str, str]) -> Iterator[None]:
        self._sent += 1
        with self._note("send"):
            carrier["number"] = str(self._sent)
            yield

    def copying(self, channel: str, nbytes: int) -> contextlib.AbstractContextManager[None]:
        return self._note(f"copy {nbytes}")

    @contextlib.contextmanager
    def receiving(self, receiver: Receiver, delivery: Delivery) -> Iterator[None]:
        with self._note(f"receive {receiver.rank}"):
            yield
        self.postmarks.append(delivery.postmark)

    def moving(self, receiver: Receiver) -> contextlib.AbstractContextManager[None]:
        return self._note("move")

    @property
    def numbers(self) -> list[str | None]:
        return [postmark.carrier["number"] if postmark is not None else None for postmark in self.postmarks]


@contextlib.contextmanager
def observing(notes: Notes) -> Iterator[Notes]:
    _observing.observe(notes)
    try:
        yield notes
    finally:
        _observing.forget(notes)


# Who is told ----------------------------------------------------------------------------------------------------------


async def test_ends_that_are_there_and_ends_to_come(open_channel: OpenChannel) -> None:
    async with open_channel() as old:
        with observing(Notes()) as notes:
            async with open_channel() as new:
                for channel in (old, new):
                    await channel.sender.send(1)
                    assert await channel.receiver.recv() == 1
            assert notes.said == ["begin send", "end send", "begin receive 0", "end receive 0"] * 2
            assert notes.numbers == ["1", "2"]


async def test_who_is_not_observed_is_what_it_was(open_channel: OpenChannel) -> None:
    """Before and after: no code of ours in between, and not one byte more on the ring."""
    async with open_channel() as channel:
        ends = (channel.sender, channel.receiver, channel.sender._filler)
        kinds = [type(end) for end in ends]
        assert kinds == [Sender, Receiver, Filler]
        with observing(Notes()):
            assert [type(end) for end in ends] != kinds
            assert repr(channel.sender).startswith("<Sender ") and isinstance(channel.receiver, Receiver)
        assert [type(end) for end in ends] == kinds
        await channel.sender.send("message")
        assert channel.sender.statistics().ring_bytes == len(pickle.dumps("message", 5))
        await channel.receiver.recv()


async def test_an_end_stays_observed_while_anybody_observes(open_channel: OpenChannel) -> None:
    """Observers are entered in the order in which they came, and left in the reverse one."""
    first, second = Notes(), Notes()
    second.said = first.said
    async with open_channel() as channel:
        with observing(first):
            with observing(second):
                await channel.sender.send(1)
            assert first.said == ["begin send", "begin send", "end send", "end send"]
            await channel.sender.send(2)
            assert len(first.said) == 6
        await channel.sender.send(3)
        assert len(first.said) == 6


async def test_ends_that_are_closed_or_not_started_are_left_alone() -> None:
    closed = Sender(1, arena=None, ring_bytes=RING_BYTES)
    await closed.aclose()
    fresh = Sender(1, arena=None, ring_bytes=RING_BYTES)
    with observing(Notes()):
        assert type(closed) is type(fresh) is Sender
        await fresh.start()
        assert type(fresh) is not Sender
        await fresh.aclose()


async def test_every_way_to_send_and_to_receive(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        sender, receiver = channel.sender, channel.receiver
        with observing(Notes()) as notes:
            await sender.send(1)
            await sender.enqueue(2)
            sender.send_nowait(3)
            await sender.send(4)
            received = [await receiver.recv(), await receiver.dequeue(), receiver.recv_nowait()]
            async for last in receiver:
                received.append(last)
                break
            assert received == [1, 2, 3, 4]
            assert notes.numbers == ["1", "2", "3", "4"]


def test_blocking_ends() -> None:
    with blocking_channel() as (sender, receiver), observing(Notes()) as notes:
        sender.send(filled(1))
        sender.send_nowait(2)
        receiver.to_device(receiver.recv(), "cpu")
        assert receiver.recv_nowait() == 2
        assert notes.said == [
            "begin send", f"begin copy {1 << 20}", f"end copy {1 << 20}", "end send", "begin send", "end send",
            "begin receive 0", "end receive 0", "begin move", "end move", "begin receive 0", "end receive 0",
        ]  # fmt: skip


async def test_users_subclasses_see_their_own_objects() -> None:
    """Not the envelope, which is put around what they hand on."""

    class Counting(Sender):
        sent: list[object]

        async def send(self, obj: object) -> None:
            self.sent.append(obj)
            await super().send((len(self.sent), obj))

    async with Counting(1, arena=None, ring_bytes=RING_BYTES) as sender, Receiver(sender.handle, 0) as receiver:
        sender.sent = []
        with observing(Notes()) as notes:
            assert type(sender) is not Counting and type(sender).__name__ == "Counting"
            await sender.send("x")
            assert (sender.sent, await receiver.recv(), notes.numbers) == (["x"], (1, "x"), ["1"])
        assert type(sender) is Counting


# What they are told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nowait", [False, True])
async def test_copies_are_told_with_their_bytes(open_channel: OpenChannel, nowait: bool) -> None:
    """Into the arena and into frames; not what is small, and not what was lent."""
    async with open_channel() as channel:
        lent = await channel.sender.empty(2 << 20, torch.uint8)
        with observing(Notes()) as notes:
            for obj in (1, lent, [lent, filled(1)], filled(2, 5 << 20)):
                if nowait:
                    channel.sender.send_nowait(obj)
                else:
                    await channel.sender.send(obj)
            copies = [said for said in notes.said if said.startswith("end copy")]
            assert copies == [f"end copy {1 << 20}", f"end copy {5 << 20}"]
        del lent, obj


async def test_failures_are_told_and_change_nothing(open_channel: OpenChannel) -> None:
    """Errors name what the user passed, not what we put around it."""
    async with open_channel() as channel:
        with observing(Notes()) as notes:
            with pytest.raises(EncodeError, match=r"an object of type function at message\['a'\]\[1\]"):
                await channel.sender.send({"a": [1, lambda: 0]})
            with pytest.raises(EncodeError, match="cannot pickle an object of type generator"):
                channel.sender.send_nowait(_ for _ in ())
            assert notes.said == ["begin send", "failed send"] * 2
            notes.said.clear()
            await channel.sender.send(Bomb(b""))
            await channel.sender.send("next")
            with pytest.raises(DecodeError, match="message 1 of reader 0"):
                await channel.receiver.recv()
            assert await channel.receiver.recv() == "next"
            assert notes.said[4:] == ["begin receive 0", "failed receive 0", "begin receive 0", "end receive 0"]


class Bomb:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def __setstate__(self, state: object) -> None:
        raise ValueError("boom")


async def test_an_error_that_somebody_keeps_keeps_no_span(open_channel: OpenChannel) -> None:
    """Also when the pickled bytes themselves came through the arena."""
    async with open_channel() as channel:
        with observing(Notes()), no_collector():
            await channel.sender.send(Bomb(bytes(100_000)))
            assert channel.sender.statistics().slots_used == 1
            with pytest.raises(DecodeError) as kept:
                await channel.receiver.recv()
            assert channel.sender.statistics().slots_used == 0
            assert kept.value.__traceback__ is not None


# The envelope ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observed", [True, False])
async def test_every_kind_of_message_arrives_as_it_was_sent(open_channel: OpenChannel, observed: bool) -> None:
    """Small, inline, arena, frame, packed and pickled; at a reader that is observed and at one that is not."""
    async with open_channel(**CHANNEL) as channel:
        with observing(Notes()) as notes:
            if not observed:
                _observing._strip(channel.receiver)  # as in a process where nobody observes
            for number, kind in enumerate(KINDS):
                await channel.sender.send(message(kind, number))
                assert verify(await channel.receiver.recv()) == number
            assert notes.numbers == ([str(number + 1) for number in range(len(KINDS))] if observed else [])


async def test_readers_that_trust_nobody_receive_it_too(open_channel: OpenChannel) -> None:
    """What is around a message needs no permission."""
    async with open_channel(receiver={"allow": []}) as channel:
        with observing(Notes()) as notes:
            await channel.sender.send({"step": 1})
            assert await channel.receiver.recv() == {"step": 1}
            assert notes.numbers == ["1"]
            _observing._strip(channel.receiver)
            await channel.sender.send([filled(1)])
            assert (await channel.receiver.recv())[0].sum() == 1 << 20


async def test_who_carries_nothing_sends_no_envelope(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        with observing(Notes(carries=False)) as notes:
            await channel.sender.send("message")
            assert channel.sender.statistics().ring_bytes == len(pickle.dumps("message", 5))
            await channel.receiver.recv()
            assert notes.postmarks == [None]


async def test_a_message_has_its_own_postmark_or_none(open_channel: OpenChannel) -> None:
    """Not that of another channel's message, which nobody asked for."""
    async with open_channel() as marked, open_channel() as plain:
        with observing(Notes()) as notes:
            _observing._strip(marked.receiver)
            _observing._strip(plain.sender)
            await marked.sender.send(1)
            await plain.sender.send(2)
            assert (await marked.receiver.recv(), await plain.receiver.recv()) == (1, 2)
            assert notes.postmarks == [None]
    assert take_postmark() is None


async def test_the_memory_of_a_message_is_not_kept(open_channel: OpenChannel) -> None:
    """The slots are free when the object is gone, though what came with it is still there."""
    async with open_channel() as channel:
        with observing(Notes()), no_collector():
            await channel.sender.send(filled(1))
            received = await channel.receiver.recv()
            assert channel.sender.statistics().slots_used == 1
            del received
            assert channel.sender.statistics().slots_used == 0


async def test_how_long_a_message_was_under_way(open_channel: OpenChannel) -> None:
    """From the pickling on; unknown where the clocks are those of two hosts."""
    async with open_channel() as channel:
        with observing(Notes()) as notes:
            await channel.sender.send(1)
            await channel.receiver.recv()
        (postmark,) = notes.postmarks
        assert postmark is not None and postmark.age is not None
        later = postmark._replace(sent_ns=postmark.sent_ns - 5 * 10**9)
        assert later.age is not None and later.age > 5
        early = postmark._replace(sent_ns=postmark.sent_ns + 10**15)
        assert early.age == 0  # never negative
        assert postmark._replace(clock="another").age is None
        assert postmark._replace(clock="").age is None


@pytest.mark.multiprocess
def test_processes_of_one_host_have_one_clock() -> None:
    code = "from aioarena._platform.process import clock_identity; print(clock_identity())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == clock_identity() != ""


@pytest.mark.multiprocess
def test_nothing_of_it_is_imported_unasked() -> None:
    """Neither what observes nor what others would have to install."""
    code = "import sys, aioarena, aioarena.blocking, aioarena.engine; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert "aioarena.sender" in loaded
    unasked = ("prometheus_client", "opentelemetry", "aioarena._observing", "aioarena.integrations")
    assert [name for name in loaded if name.startswith(unasked)] == []
