"""Pages of the arena, brought in early and given back: seen in what the kernel says has memory behind it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from typing import Any

import pytest

from aioarena import ArenaConfig, ClosedError, Receiver, Sender
from aioarena._platform import memory
from aioarena._platform.memory import Mapping, Segment
from aioarena._warming import Prefault
from tests.conftest import PATIENCE, RING_BYTES, Channel, OpenChannel
from tests.fronts.support import filled, shows, turns, until

MIB = 1 << 20
SLOTS: dict[str, Any] = {"slots": 512, "slot_bytes": 64 << 10, "min_bytes": 16 << 10}  # 32 MiB


def in_memory(channel: Channel) -> int:
    arena = channel.sender._arena
    assert arena is not None
    return arena.in_memory


# Prefault ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["memfd", "shm"])
@pytest.mark.parametrize("nbytes", [5 * MIB + 4096, 32 * MIB])
async def test_the_start_of_the_arena_is_populated(open_channel: OpenChannel, backing: str, nbytes: int) -> None:
    """As much as was asked for, at both ends, before any message."""
    async with open_channel(arena=ArenaConfig(**SLOTS, prefault=nbytes), backing=backing) as channel:
        await until(lambda: channel.sender.statistics().prefaulted_bytes == nbytes)
        assert nbytes <= in_memory(channel) < nbytes + 2 * MIB
        prefault = channel.receiver._prefault
        assert prefault is not None
        await until(lambda: prefault.done == nbytes)
        await channel.sender.send(filled(3))
        assert shows(await channel.receiver.recv(), 3)


async def test_without_a_thread_it_is_only_slower(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "aioarena-prefault":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with caplog.at_level(logging.WARNING, "aioarena"):
        async with open_channel(arena=ArenaConfig(**SLOTS, prefault=MIB)) as channel:
            await channel.sender.send(filled(3))
            assert shows(await channel.receiver.recv(), 3)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(line.endswith("stopped populating the arena after 0 bytes: can't start new thread") for line in lines)


async def test_nothing_is_populated_by_default(open_channel: OpenChannel) -> None:
    async with open_channel(arena=ArenaConfig(**SLOTS)) as channel:
        assert in_memory(channel) == 0
        assert channel.sender.statistics().prefaulted_bytes == 0
        assert channel.receiver._prefault is None


async def test_closing_ends_it(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the step under way."""
    began, go_on = threading.Event(), threading.Event()
    steps: list[bool] = []

    def hold(self: Mapping, start: int, stop: int, *, write: bool) -> None:
        steps.append(write)
        began.set()
        assert go_on.wait(PATIENCE)

    close = Prefault.close

    def go_on_and_close(self: Prefault) -> None:
        self._stopped = True
        go_on.set()
        close(self)

    monkeypatch.setattr(Mapping, "populate", hold)
    monkeypatch.setattr(Prefault, "close", go_on_and_close)
    async with Sender(1, arena=ArenaConfig(**SLOTS, prefault=32 * MIB), ring_bytes=RING_BYTES):
        assert began.wait(PATIENCE)
    assert steps == [True]


async def test_a_kernel_that_cannot(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning at each end, and all goes on."""

    def refuse(self: Mapping, start: int, stop: int, *, write: bool) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(Mapping, "populate", refuse)
    with caplog.at_level(logging.WARNING, "aioarena"):
        async with open_channel(arena=ArenaConfig(**SLOTS, prefault=32 * MIB)) as channel:
            await channel.sender.send(filled(3))
            assert shows(await channel.receiver.recv(), 3)
            await until(lambda: len(caplog.records) >= 2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("stopped populating the arena after 0 bytes: [Errno 22]" in line for line in lines)


def test_how_much_can_be_populated() -> None:
    with pytest.raises(ValueError, match="prefault must be at most the arena's 33554432 bytes"):
        ArenaConfig(**SLOTS, prefault=32 * MIB + 1)
    with pytest.raises(ValueError, match="prefault must be at least 0"):
        ArenaConfig(**SLOTS, prefault=-1)
    with pytest.raises(TypeError, match="prefault must be an int"):
        ArenaConfig(**SLOTS, prefault=True)


# Trim -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["memfd", "shm"])
async def test_trim_gives_back_what_nobody_uses(open_channel: OpenChannel, backing: str) -> None:
    """And only that: tensors of readers, lent ones and messages under way keep their bytes."""
    async with open_channel(arena=ArenaConfig(**SLOTS), backing=backing) as channel:
        chan = channel.sender
        for number in range(4):
            await chan.send(filled(number))
        lent = (await chan.empty(MIB)).fill_(9)  # 4 MiB
        for _ in range(8):
            await chan.send(filled(77))
        kept = [await channel.receiver.recv() for _ in range(4)]
        del kept[0], kept[1]
        before = in_memory(channel)
        assert before == 16 * MIB
        # In /dev/shm only what is behind everything in use.
        gaps = 0 if backing == "shm" else 2 * MIB
        assert await chan.trim() == gaps
        assert in_memory(channel) == before - gaps
        assert [shows(one, number) for one, number in zip(kept, (1, 3), strict=True)] == [True, True]
        assert (lent == 9).all()
        for _ in range(8):
            assert shows(await channel.receiver.recv(), 77)
        del lent
        assert await chan.trim() == 12 * MIB
        assert chan._arena is not None and chan._arena.reserved == (4 * MIB if backing == "shm" else 0)
        for number in range(20):  # goes on as before
            await chan.send(filled(number))
            assert shows(await channel.receiver.recv(), number)
        assert chan.statistics().fallbacks["arena_full"] == 0


async def test_sends_go_on_during_a_trim(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the arena, while a piece of it is given back."""
    began, go_on = threading.Event(), threading.Event()
    give_back = Segment.give_back

    def hold(self: Segment, start: int, stop: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        give_back(self, start, stop)

    monkeypatch.setattr(Segment, "give_back", hold)
    monkeypatch.setattr("aioarena._warming._TRIM_BYTES", 8 * MIB)
    async with open_channel(arena=ArenaConfig(**SLOTS)) as channel:
        trimming = asyncio.create_task(channel.sender.trim())
        await until(began.is_set)
        kept = []
        for number in range(10):
            await channel.sender.send(filled(number))
            kept.append(await channel.receiver.recv())
        assert channel.sender.statistics().fallbacks["arena_full"] == 0
        go_on.set()
        async with asyncio.timeout(PATIENCE):
            await trimming
        assert [shows(one, number) for number, one in enumerate(kept)] == [True] * 10


async def test_trims_take_turns(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends, or is cancelled, must not let readers pin while another is at work."""
    began, go_on = threading.Event(), threading.Event()

    def hold(self: Segment, start: int, stop: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Segment, "give_back", hold)
    async with open_channel(arena=ArenaConfig(**SLOTS)) as channel:
        trims = [asyncio.create_task(channel.sender.trim()) for _ in range(3)]
        await until(began.is_set)
        trims[1].cancel()
        await turns(3)
        core = channel.receiver._core
        assert core is not None
        assert not core.may_pin()
        go_on.set()
        await asyncio.wait(trims)
        assert (trims[0].result(), trims[1].cancelled(), trims[2].result()) == (0, True, 0)
        assert core.may_pin()


@pytest.mark.parametrize("call", ["trim", "empty"])
async def test_closing_waits_for_what_is_under_way(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It ends soon, with the error that says so."""
    began, go_on = threading.Event(), threading.Event()
    method = "give_back" if call == "trim" else "reserve"
    original = getattr(Segment, method)

    def hold(self: Segment, *arguments: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        original(self, *arguments)

    async with open_channel(arena=ArenaConfig(**SLOTS), backing="shm") as channel:
        monkeypatch.setattr(Segment, method, hold)
        chan = channel.sender
        task: asyncio.Task[Any] = asyncio.create_task(chan.trim() if call == "trim" else chan.empty(MIB))
        await until(began.is_set)
        closing = asyncio.create_task(chan.aclose())
        await turns(5)
        assert not closing.done()
        go_on.set()
        with pytest.raises(ClosedError):
            await task
        await closing
        assert channel.sender._core.arena.used_slots == 0 or call == "empty"


async def test_a_trim_that_is_cancelled_puts_its_piece_back(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold(self: Segment, start: int, stop: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Segment, "give_back", hold)
    async with open_channel(arena=ArenaConfig(**SLOTS)) as channel:
        trimming = asyncio.create_task(channel.sender.trim())
        await until(began.is_set)
        trimming.cancel()
        await turns(3)
        assert not trimming.done()  # a thread is at it
        go_on.set()
        await asyncio.wait([trimming])
        assert trimming.cancelled()
        assert channel.slots_used == 0
        assert channel.sender._core.arena.free_runs() == [(0, 512)]
        assert channel.receiver._core is not None and channel.receiver._core.may_pin()


async def test_an_arena_that_a_reader_pinned_is_not_trimmed(open_channel: OpenChannel) -> None:
    """Also not one whose reader has left since: its tensors may live on."""
    async with open_channel(2, arena=ArenaConfig(**SLOTS)) as channel:
        for number in range(4):
            await channel.sender.send(filled(number))
            for receiver in channel.receivers:
                await receiver.recv()
        assert channel.receivers[1]._core is not None
        assert channel.receivers[1]._core.may_pin()
        assert await channel.sender.trim() == 0
        await channel.receivers[1].aclose()
        assert await channel.sender.trim() == 0
        assert in_memory(channel) > 0


async def test_a_reader_does_not_pin_during_a_trim(open_channel: OpenChannel) -> None:
    async with open_channel(arena=ArenaConfig(**SLOTS)) as channel:
        sender, receiver = channel.sender._core, channel.receiver._core
        assert receiver is not None
        assert sender.begin_trim()
        assert not receiver.may_pin()
        sender.end_trim()
        assert receiver.may_pin()
        assert not sender.begin_trim()
        assert receiver.may_pin()


async def test_trim_without_an_arena_and_after_close(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None) as channel:
        assert await channel.sender.trim() == 0
    with pytest.raises(ClosedError):
        await channel.sender.trim()


def test_what_is_given_back_is_reserved_anew() -> None:
    """In /dev/shm, where a page without memory behind it would kill who touches it."""
    segment = Segment.shm("trim", 8 * MIB)
    try:
        segment.reserve(6 * MIB)
        segment.give_back(2 * MIB, 3 * MIB)
        assert segment.in_memory == 5 * MIB
        assert segment.needs_reserve(3 * MIB)
        segment.reserve(6 * MIB)
        assert segment.in_memory == 6 * MIB
        assert not segment.needs_reserve(6 * MIB)
    finally:
        segment.close()
    assert memory.SHM_DIRECTORY.exists()


async def test_a_receiver_learns_of_it_from_the_handle(open_channel: OpenChannel) -> None:
    async with Sender(1, arena=ArenaConfig(**SLOTS, prefault=MIB), ring_bytes=RING_BYTES) as sender:
        assert sender.handle.prefault == MIB
        async with Receiver(sender.handle, 0) as receiver:
            assert receiver._prefault is not None
