"""One channel from end to end, with real processes: every path, several readers, each way of starting one."""

from __future__ import annotations

import asyncio

import pytest

import aioarena
from tests.multiprocess.harness import PATIENCE, Farm, eventually_async, is_parked, timed
from tests.multiprocess.messages import ARENA, CHANNEL, KINDS, message, numbered
from tests.multiprocess.senders import attach

COUNT = 10 * len(KINDS)


@pytest.mark.parametrize("readers", [1, 2, 4])
async def test_every_reader_gets_every_message_in_order(farm: Farm, readers: int) -> None:
    """Small, inline, arena, frame, packed and large pickled messages arrive whole and in order, at all readers."""
    async with aioarena.Sender(readers, **CHANNEL) as chan:
        workers = await attach(farm, chan.handle)
        for worker in workers:
            worker.put("drain")
        for kind, number in numbered(COUNT):
            await chan.send(message(kind, number))
        statistics = chan.statistics()
    for worker in workers:
        numbers, error, _ = await worker.aget()
        assert numbers == list(range(COUNT))
        assert error["type"] == "EndOfChannel"
    # The kinds took the paths that they are named for.
    assert statistics.fallbacks["larger_than_arena"] == COUNT // len(KINDS)
    assert statistics.frame_bytes >= COUNT // len(KINDS) * ARENA.capacity
    assert statistics.arena_bytes > 0
    assert statistics.fallbacks["below_min_bytes"] > 0
    assert [reader.pid for reader in statistics.readers] == [worker.pid for worker in workers]


@pytest.mark.parametrize(("kind", "backing"), [("subprocess", "memfd"), ("spawn", "memfd"), ("subprocess", "shm")])
def test_readers_of_fresh_interpreters(farm: Farm, kind: str, backing: str) -> None:
    """Readers started by subprocess and by multiprocessing's spawn get everything, exit with 0 and say nothing."""
    readers = farm.several(2, kind)

    async def send() -> None:
        async with aioarena.Sender(2, backing=backing, **CHANNEL) as chan:
            for rank, worker in enumerate(readers):
                worker.start("reader", chan.handle, rank)
                worker.put("drain")
            for kind, number in numbered(COUNT):
                await chan.send(message(kind, number))

    asyncio.run(send())
    for worker in readers:
        assert worker.get() == "joined"
        numbers, error, _ = worker.get()
        assert (numbers, error["type"]) == (list(range(COUNT)), "EndOfChannel")
        worker.put("close")
        assert worker.result() == "closed"
        assert worker.finish() == 0
        assert worker.output == ""


async def test_readers_that_start_before_the_sender(farm: Farm) -> None:
    """A reader may attach to a handle whose sender is not started yet: it waits, and gets the first message."""
    chan = aioarena.Sender(2, **CHANNEL)
    readers = farm.several(2)
    for rank, worker in enumerate(readers):
        worker.start("reader", chan.handle, rank, announce=True)
        assert await worker.aget() == "asked"
    async with chan:
        await chan.send(message("arena", 0))
        for worker in readers:
            assert await worker.aget() == "joined"
            assert await worker.aask("recv", 1) == [0]


async def test_several_channels_between_the_same_processes(farm: Farm) -> None:
    """A process may read one channel and send another; neither disturbs the other."""
    worker = farm.worker()
    async with aioarena.Sender(1, **CHANNEL) as chan:
        worker.start("echo", chan.handle, **CHANNEL)
        async with aioarena.Receiver(await worker.aget(), 0) as back:
            for kind, number in numbered(21):
                await chan.send(message(kind, number))
                assert (await back.recv())["number"] == number
    assert await worker.aresult() == 21


async def test_a_burst_larger_than_ring_and_arena(farm: Farm) -> None:
    """With a reader that does not read, the sender waits for it, and then goes on where it was."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        slow, fast = await attach(farm, chan.handle)
        slow.stop()
        fast.put("recv", 400)
        kinds = ("small", "inline", "arena")
        burst = asyncio.create_task(_send_all(chan, numbered(400, kinds=kinds)))
        await eventually_async(lambda: chan.statistics().waits, "the sender never had to wait")
        assert not burst.done()
        slow.resume()
        slow.put("recv", 400)
        await burst
        assert await slow.aget() == await fast.aget() == list(range(400))


async def _send_all(chan: aioarena.Sender, messages: list[tuple[str, int]]) -> None:
    for kind, number in messages:
        await chan.send(message(kind, number))


async def test_tasks_that_send_at_once_look_the_same_to_all_readers(farm: Farm) -> None:
    """Three tasks send at the same time, over all paths: every reader sees the same sequence, each task's in order."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        for worker in readers:
            worker.put("recv", 90)
        await asyncio.gather(*(_send_all(chan, numbered(30, first)) for first in (0, 100, 200)))
        seen, also_seen = [await worker.aget() for worker in readers]
    assert seen == also_seen
    for first in (0, 100, 200):
        assert [number for number in seen if first <= number < first + 100] == list(range(first, first + 30))


async def test_a_reader_that_leaves_and_comes_back(farm: Farm) -> None:
    """After a reader has left in good order the channel goes on; a new one at its rank gets what is sent from then on."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        leaver, stayer = await attach(farm, chan.handle)
        await chan.send(message("arena", 0))
        assert await leaver.aask("recv", 1) == [0]
        leaver.put("close")
        assert await leaver.aresult() == "closed"
        assert [reader.state for reader in chan.statistics().readers] == ["left", "joined"]
        await chan.send(message("frame", 1))
        await chan.send(message("arena", 2))
        leaver.start("reader", chan.handle, 0)
        assert await leaver.aget() == "joined"
        for kind, number in numbered(7, first=3):
            await chan.send(message(kind, number))
        assert await leaver.aask("recv", 7) == list(range(3, 10))
        assert await stayer.aask("recv", 10) == list(range(10))


async def test_a_reader_that_comes_back_is_woken(farm: Farm) -> None:
    """The sender does not take the first sleep of a new reader for one of its predecessor's, from which it woke him."""
    async with aioarena.Sender(1, **CHANNEL) as chan:
        worker = farm.worker()
        for number in range(3):
            worker.start("reader", chan.handle, 0)
            assert await worker.aget() == "joined"
            worker.put("recv", 1)
            await eventually_async(lambda: is_parked(chan, 0), "the reader does not park")
            before = chan.statistics().wakeups
            await chan.send(message("small", number))
            assert chan.statistics().wakeups == before + 1
            assert await worker.aget() == [number]
            worker.put("close")
            assert await worker.aresult() == "closed"


# Closing: B23 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["memfd", "shm"])
def test_a_sender_that_exits_right_after_closing_loses_nothing(farm: Farm, backing: str) -> None:
    """Readers that have not begun to read get everything that was sent before the sender exited, then the end."""
    sender, *readers = farm.several(4)
    sender.start("sender", 3, backing=backing, **CHANNEL)
    handle = sender.get()
    for rank, worker in enumerate(readers):
        worker.start("reader", handle, rank)
        assert worker.get() == "joined"
    for worker in readers[1:]:
        worker.put("block")
        assert worker.get() == "blocked"
    messages = numbered(6, kinds=("small", "inline", "arena", "pickled", "packed"))
    sender.ask("send", messages)
    sender.put("close")
    assert sender.result() == "closed"
    assert (sender.finish(), sender.output) == (0, "")
    for worker in readers[1:]:
        worker.put("go on")
        assert worker.get() == "going on"
    for worker in readers:
        worker.put("hold", 6)
        assert worker.get() == list(range(6))
        worker.put("drain")
        numbers, error, seconds = worker.get()
        assert (numbers, error["type"]) == ([], "EndOfChannel")
        assert seconds < PATIENCE / 4
        assert worker.ask("verify") == list(range(6))
        worker.put("close")
        assert worker.result() == "closed"


async def test_close_waits_for_frames_and_says_for_whom(farm: Farm, caplog: pytest.LogCaptureFixture) -> None:
    """Closing waits, for at most ``linger``, until frames have been received, and logs the reader that was behind."""
    async with aioarena.Sender(2, linger=0.3, **CHANNEL) as chan:
        reader, stuck = await attach(farm, chan.handle)
        stuck.stop()
        await chan.send(message("frame", 0))
        reader.put("drain")
    (line,) = [record.getMessage() for record in caplog.records if "frames not received" in record.getMessage()]
    assert f"reader 1 (pid {stuck.pid})" in line
    assert "stopped by a signal" in line
    numbers, error, _ = await reader.aget()
    assert (numbers, error["type"]) == ([0], "EndOfChannel")
    assert "It will see the channel as lost" in line
    stuck.resume()
    stuck.put("drain")
    numbers, error, _ = await stuck.aget()
    assert (numbers, error["type"]) == ([], "SenderLostError")


async def test_close_returns_as_soon_as_frames_were_received(farm: Farm) -> None:
    """A reader that takes its time, but less than ``linger``, gets its frame; the sender's close waits just for that."""
    async with aioarena.Sender(1, linger=PATIENCE, **CHANNEL) as chan:
        (reader,) = await attach(farm, chan.handle)
        reader.stop()
        await chan.send(message("frame", 0))
        closing = asyncio.create_task(chan.aclose())
        await asyncio.sleep(0)  # let it begin to wait
        assert not closing.done()
        with timed():
            reader.resume()
            reader.put("drain")
            await closing
        numbers, error, _ = await reader.aget()
        assert (numbers, error["type"]) == ([0], "EndOfChannel")


async def test_closing_ends_readers_that_are_parked(farm: Farm) -> None:
    """Readers asleep in recv see the end at once."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        for worker in readers:
            worker.put("drain")
        await eventually_async(lambda: is_parked(chan, 0) and is_parked(chan, 1), "the readers do not park")
        await chan.aclose()
        with timed():
            for worker in readers:
                numbers, error, _ = await worker.aget()
                assert (numbers, error["type"]) == ([], "EndOfChannel")
