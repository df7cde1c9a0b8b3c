"""A wake-up is a hint: lost, late, doubled or made up, it neither loses, repeats nor reorders a message."""

from __future__ import annotations

import asyncio
import random
import select
from collections.abc import Callable
from typing import Any

import pytest

from aioarena._platform.wire import ReceiverWire, SenderWire, Wire
from aioarena.exceptions import EvictedError, ReaderLostError, WouldBlock
from tests.conftest import PATIENCE, OpenChannel
from tests.fronts.support import fill_ring, filled, parked, shows, turns, until

Wake = Callable[[Any], None]


def dropped(wake: Wake) -> Wake:
    return lambda wire: None


def doubled(wake: Wake) -> Wake:
    def twice(wire: Any) -> None:
        wake(wire)
        wake(wire)

    return twice


def late(wake: Wake) -> Wake:
    """Each goes out when the next one should have."""
    owed: list[Any] = []

    def later(wire: Any) -> None:
        if owed:
            wake(owed.pop())
        owed.append(wire)

    return later


SABOTAGE: dict[str, Callable[[Wake], Wake]] = {"dropped": dropped, "doubled": doubled, "late": late}


@pytest.fixture
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost wake-up costs, a second, is too long for a test."""
    monkeypatch.setattr("aioarena._asyncio.TICK", 0.005)


@pytest.mark.usefixtures("_looks_often")
@pytest.mark.parametrize("how", SABOTAGE)
async def test_messages_arrive_whatever_becomes_of_wake_ups(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """With pauses of many lengths, so that readers are parked, about to park, or busy."""
    pick = random.Random(4)
    async with open_channel(2) as channel, asyncio.timeout(PATIENCE):
        monkeypatch.setattr(SenderWire, "wake", SABOTAGE[how](SenderWire.wake))

        async def read(receiver: Any) -> list[int]:
            return [(await receiver.recv())[0] for _ in range(60)]

        reading = [asyncio.create_task(read(receiver)) for receiver in channel.receivers]
        for number in range(60):
            await turns(pick.choice([0, 1, 2, 5, 50]))
            if number % 10 == 0:
                await until(lambda: all(r._core._words[r._core.layout.parked + r.rank] for r in channel.receivers))
            await channel.sender.send((number, filled(1, pick.choice([10, 100_000, 5 << 20]))))
        assert await asyncio.gather(*reading) == [list(range(60))] * 2


@pytest.mark.usefixtures("_looks_often")
@pytest.mark.parametrize("how", SABOTAGE)
async def test_a_sender_that_waits_goes_on_whatever_becomes_of_wake_ups(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        monkeypatch.setattr(ReceiverWire, "wake", SABOTAGE[how](ReceiverWire.wake))
        for _ in range(5):
            count = fill_ring(channel.sender)
            held_up = asyncio.create_task(channel.sender.send(b"y" * 4000))
            await turns(3)  # it waits
            assert not held_up.done()
            for _ in range(count):
                await channel.receiver.recv()
            await held_up
            assert await channel.receiver.recv() == b"y" * 4000


@pytest.mark.usefixtures("_looks_often")
async def test_the_senders_close_is_seen_without_a_wake_up(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        monkeypatch.setattr(SenderWire, "wake", lambda wire: None)
        await channel.sender.aclose()
        with pytest.raises(Exception, match="received all of it"):
            await receiving


@pytest.mark.usefixtures("_looks_often")
async def test_an_eviction_is_seen_without_a_wake_up(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a look that finds a message, which is not the reader's any more."""
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        monkeypatch.setattr(SenderWire, "wake", lambda wire: None)
        channel.sender.send_nowait("too late")
        channel.sender._members.evict(0)  # type: ignore[union-attr]
        with pytest.raises(EvictedError):
            await receiving


async def test_a_sender_that_waits_for_room_is_woken_by_the_slowest_reader(open_channel: OpenChannel) -> None:
    """And by it alone, as soon as there is room."""
    async with open_channel(2) as channel, asyncio.timeout(PATIENCE):
        count = fill_ring(channel.sender)
        held_up = asyncio.create_task(channel.sender.send("next"))
        await turns(3)  # it waits
        fast, slow = channel.receivers
        for _ in range(count):
            await fast.recv()
        await turns(20)  # a wake-up would arrive by now
        assert not held_up.done()
        for _ in range(count // 2):
            await slow.recv()
        await held_up


def arrived(wire: Wire) -> None:
    """Let a message arrive at a socket without turning the loop."""
    assert select.select([wire.fd], [], [], PATIENCE)[0], "nothing arrived"


async def test_a_message_that_arrives_while_the_sender_sends_is_seen(open_channel: OpenChannel) -> None:
    """Sending eats the edge of the descriptor, which was all there was to tell the loop of it."""
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        count = fill_ring(channel.sender)
        held_up = asyncio.create_task(channel.sender.send("next"))
        await turns(3)  # it waits
        for _ in range(count):
            channel.receiver.recv_nowait()
        wire = channel.sender._wire
        assert wire is not None
        arrived(wire)
        assert wire.readable()  # eats the edge, as any operation on a socket may
        channel.sender._send_wake()
        await held_up


async def test_a_message_that_arrives_while_the_receiver_sends_is_seen(open_channel: OpenChannel) -> None:
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        wire = channel.receiver._wire
        assert wire is not None
        channel.sender.send_nowait("here")
        arrived(wire)
        assert wire.readable()  # eats the edge, as any operation on a socket may
        channel.receiver._wake_sender()
        assert await receiving == "here"


async def test_wake_ups_without_a_message_are_no_message(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        receiving = asyncio.create_task(channel.receiver.recv())
        for _ in range(50):
            await parked(channel.receiver)
            channel.sender._send_wake()
            channel.receiver._wake_sender()
            await turns(2)  # they arrive, or not yet
        assert not receiving.done()
        await channel.sender.send("here")
        assert await receiving == "here"
        assert channel.receiver.statistics().messages == 1


@pytest.mark.parametrize("wake", ["zmq", "pipe"])
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "while others look"])
async def test_bursts_and_silence(open_channel: OpenChannel, busy: bool, wake: str) -> None:
    """The descriptor of a ZMQ socket is edge-triggered: nothing may wait on it that was there already.

    With the slow timer off: a message that arrives only because somebody looked again is a failure here.
    """
    pick = random.Random(6)
    async with (
        open_channel(arena=None, wake=wake) as there,
        open_channel(wake=wake) as back,
        asyncio.timeout(PATIENCE),
    ):

        async def look() -> None:
            while True:
                for end in (there.sender, there.receiver, back.sender, back.receiver):
                    end.statistics()
                await asyncio.sleep(0)  # as often as the loop turns

        async def answer() -> None:
            while True:
                count = await there.receiver.recv()
                for number in range(count):
                    got, tensor = await there.receiver.recv()
                    assert got == number
                    assert shows(tensor, number)
                    await turns(pick.randrange(3))  # other work
                await back.sender.send(count)

        tasks = [asyncio.create_task(answer())]
        if busy:
            tasks.append(asyncio.create_task(look()))
        for _ in range(60):
            count = pick.randrange(1, 30)
            await there.sender.send(count)
            for number in range(count):
                await there.sender.send((number, filled(number, pick.choice([10, 10, 10, 20_000, 300_000]))))
            assert await back.receiver.recv() == count
        for task in tasks:
            task.cancel()
            await asyncio.wait([task])


# Looks become rare where nothing happens, and frequent where something begins that only they see -------------------------


@pytest.fixture
def _looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioarena._asyncio.TICK", 0.002)


@pytest.mark.usefixtures("_looks_soon")
async def test_an_idle_channel_looks_ever_less_often(open_channel: OpenChannel) -> None:
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        sender, receiver = channel.sender, channel.receiver
        receiving = asyncio.create_task(receiver.recv())
        await until(lambda: sender._tick_pause == receiver._tick_pause == 32)
        parks = receiver.statistics().parks
        receiver._tick()
        await turns(3)
        assert receiver.statistics().parks == parks  # it was not even woken
        await sender.send("here")
        assert await receiving == "here"


async def test_whoever_begins_to_wait_is_looked_after_soon(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long silence, too: what a lost wake-up costs does not depend on what was before."""
    monkeypatch.setattr("aioarena._asyncio.TICK", 0.002)
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        sender, receiver = channel.sender, channel.receiver
        await until(lambda: sender._tick_pause == receiver._tick_pause == 32)
        monkeypatch.setattr("aioarena._asyncio.TICK", 1000.0)
        receiving = asyncio.create_task(receiver.recv())
        await parked(receiver)
        assert receiver._tick_pause == 1
        count = 1 + fill_ring(sender)
        sending = asyncio.create_task(sender.send(b"y" * 4000))
        await until(lambda: sender.statistics().waits)
        assert sender._tick_pause == 1
        for _ in range(count - 1):
            await receiver.recv()
        await asyncio.gather(sending, receiving)


@pytest.mark.usefixtures("_looks_soon")
async def test_a_send_that_would_block_starts_a_clock_that_is_looked_after(open_channel: OpenChannel) -> None:
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        sender = channel.sender
        await until(lambda: sender._tick_pause == 32)
        count = fill_ring(sender)
        with pytest.raises(WouldBlock):
            sender.send_nowait(b"y" * 4000)
        assert sender._tick_pause == 1
        await until(lambda: sender.statistics().readers[0].waited_for > 0.02)
        assert sender._tick_pause == 1  # for as long as the reader does not move
        for _ in range(count):
            await channel.receiver.recv()
        await until(lambda: sender._tick_pause == 32)


@pytest.mark.usefixtures("_looks_soon")
async def test_a_reader_that_lost_its_connection_is_looked_after(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioarena._membership._DYING_SECONDS", 0.05)
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        sender, receiver = channel.sender, channel.receiver
        await until(lambda: sender._tick_pause == 32)
        receiver._wire.socket.disconnect(f"ipc://{receiver._wire._path}")  # type: ignore[union-attr]
        await until(lambda: sender._tick_pause == 1)
        await until(lambda: sender.statistics().readers[0].state == "lost")
        with pytest.raises(ReaderLostError):
            await sender.send("lost")


async def test_strangers_are_reported_a_second_later(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioarena._asyncio.TICK", 0.002)
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        sender = channel.sender
        await until(lambda: sender._tick_pause == 32)
        channel.receiver._wire.socket.send(b"Wrong")  # type: ignore[union-attr]
        await until(lambda: sender._tick_pause == 1)
        await until(lambda: "ignored 1 messages" in caplog.text)
        await until(lambda: sender._tick_pause == 32)


async def test_without_a_fence_a_parked_reader_keeps_looking(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the memory model lets a wake-up be lost, a lost one costs a second at any time."""
    monkeypatch.setattr("aioarena._asyncio.TICK", 0.002)
    monkeypatch.setattr("aioarena.receiver.FENCES", False)
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(channel.receiver.recv())
        await until(lambda: channel.sender._tick_pause == 32)
        assert channel.receiver._tick_pause == 1
        await channel.sender.send("here")
        assert await receiving == "here"
        await until(lambda: channel.receiver._tick_pause == 32)
