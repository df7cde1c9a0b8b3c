"""``wake="pipe"``: readers are woken by a bell each, and by ZMQ only where there is none."""

from __future__ import annotations

import asyncio
import os
import select
from typing import Any

import pytest

import aioarena
from aioarena import ArenaConfig, Receiver, Sender
from aioarena._platform.bell import Bell, BellRef
from aioarena._platform.wire import SenderWire
from tests.conftest import PATIENCE, OpenChannel
from tests.fronts.support import filled, parked, shows, until


class Unknown(Bell):
    """Says of itself what is not true."""

    def __init__(self) -> None:
        super().__init__()
        self.ref = BellRef(1 << 20, 7)


async def test_a_parked_reader_is_woken_without_zmq(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_channel(2, wake="pipe") as channel, asyncio.timeout(PATIENCE):
        lost: list[Any] = []
        monkeypatch.setattr(SenderWire, "wake", lost.append)
        for number, nbytes in enumerate([10, 100_000, 5 << 20]):  # ring, arena, frame
            receiving = [asyncio.create_task(receiver.recv()) for receiver in channel.receivers]
            for receiver in channel.receivers:
                await parked(receiver)
            await channel.sender.send((number, filled(number, nbytes)))
            for got, tensor in await asyncio.gather(*receiving):
                assert got == number
                assert shows(tensor, number)
            assert channel.sender.statistics().wakeups == 2 * (number + 1)
        assert not lost
        monkeypatch.undo()


async def test_what_arrives_while_frames_are_sent_is_seen(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending them eats the edge of the socket's descriptor, and ringing does not ask for what it told of."""
    async with open_channel(2, wake="pipe") as channel, asyncio.timeout(PATIENCE):
        await channel.receivers[1].aclose()
        await until(lambda: channel.sender.statistics().readers[1].state == "left")
        send_frames = SenderWire.send_frames

        def after_a_leave(wire: SenderWire, *args: Any) -> None:
            assert channel.receiver._wire is not None
            channel.receiver._wire.leave()
            select.select([wire.fd], [], [], PATIENCE)
            send_frames(wire, *args)
            assert not select.select([wire.fd], [], [], 0)[0], "the edge is still there"

        receiving = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        with monkeypatch.context() as patch:
            patch.setattr(SenderWire, "send_frames", after_a_leave)
            await channel.sender.send(filled(1, 5 << 20))
        await until(lambda: channel.sender.statistics().readers[0].state == "left")
        with pytest.raises(aioarena.ArenaError):
            await receiving


async def test_only_who_is_parked_is_woken(open_channel: OpenChannel) -> None:
    async with open_channel(2, wake="pipe") as channel, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(channel.receivers[1].recv())
        await parked(channel.receivers[1])
        await channel.sender.send("first")
        assert await receiving == await channel.receivers[0].recv() == "first"
        assert channel.sender.statistics().wakeups == 1


async def test_each_park_is_rung_for_once(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not get to run is not rung for with every message."""
    async with open_channel(wake="pipe") as channel, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        for number in range(10):
            channel.sender.send_nowait(number)
        assert channel.sender.statistics().wakeups == 1
        assert [await receiving, *[await channel.receiver.recv() for _ in range(9)]] == list(range(10))


async def test_the_end_of_the_channel_wakes_too(open_channel: OpenChannel) -> None:
    async with open_channel(wake="pipe") as channel, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        await channel.sender.aclose()
        with pytest.raises(aioarena.EndOfChannel):
            await receiving


async def test_a_reader_whose_bell_cannot_be_opened_is_woken_over_zmq(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And so are the others then, by the same message."""
    monkeypatch.setattr("aioarena.receiver.Bell", Unknown)
    async with Sender(2, wake="pipe") as sender, Receiver(sender.handle, 0) as odd, asyncio.timeout(PATIENCE):
        monkeypatch.undo()
        assert "reader 0" in caplog.text
        assert "is woken over ZMQ" in caplog.text
        assert "No such file" in caplog.text
        async with Receiver(sender.handle, 1) as even:
            receiving = [asyncio.create_task(reader.recv()) for reader in (odd, even)]
            await parked(odd)
            await parked(even)
            await sender.send("here")
            assert await asyncio.gather(*receiving) == ["here", "here"]
            assert sender.statistics().wakeups == 1


async def test_a_successor_has_a_bell_of_its_own() -> None:
    """What the one before does not hear any more, the next one does."""
    async with Sender(1, wake="pipe") as sender, asyncio.timeout(PATIENCE):
        for number in range(3):
            async with Receiver(sender.handle, 0) as reader:
                receiving = asyncio.create_task(reader.recv())
                await parked(reader)
                await sender.send(number)
                assert await receiving == number


async def test_an_evicted_reader_takes_no_ring_of_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Sender(1, wake="pipe") as sender, asyncio.timeout(PATIENCE):
        first = Receiver(sender.handle, 0)
        await first.start()
        sender._members.evict(0)  # type: ignore[union-attr]
        with pytest.raises(aioarena.EvictedError):
            await first.recv()
        await first.aclose()
        async with Receiver(sender.handle, 0) as second:
            receiving = asyncio.create_task(second.recv())
            await parked(second)
            await sender.send("here")
            assert await receiving == "here"


async def test_a_reader_in_another_pid_namespace_makes_no_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors mean nothing to the sender."""
    monkeypatch.setattr("aioarena._platform.process.ProcessIdentity.visible", False)
    async with Sender(1, wake="pipe") as sender, Receiver(sender.handle, 0) as reader, asyncio.timeout(PATIENCE):
        receiving = asyncio.create_task(reader.recv())
        await parked(reader)
        await sender.send("here")
        assert await receiving == "here"


@pytest.mark.parametrize("nbytes", [10, 1 << 20])
async def test_descriptors_of_many_readings_come_back(nbytes: int) -> None:
    """One end in the sender for each seat, however often it was taken; and no more for who left with a tensor in hand."""
    async with Sender(1, wake="pipe", arena=ArenaConfig(slots=64)) as sender, asyncio.timeout(PATIENCE):
        before: int | None = None
        for number in range(12):
            async with Receiver(sender.handle, 0) as reader:
                await sender.send(filled(number, nbytes))
                tensor = await reader.recv()
            del reader
            await until(lambda: sender.statistics().readers[0].state == "left")
            assert shows(tensor, number)
            del tensor
            if before is None:
                before = len(os.listdir("/proc/self/fd"))
            # Not at once: a thread of ZMQ closes what was the reader's socket.
            await until(lambda most=before: len(os.listdir("/proc/self/fd")) <= most)
