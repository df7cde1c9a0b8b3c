"""A wake-up is only a hint: lost, doubled or out of nothing, every message arrives once. And whoever waits, sleeps."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Literal

import pytest

import aioarena
from aioarena._asyncio import TICK
from aioarena._platform.wire import SenderWire
from tests.multiprocess.harness import SOON, Farm, Worker, cpu_seconds, eventually_async, is_parked
from tests.multiprocess.messages import CHANNEL, message, numbered
from tests.multiprocess.senders import attach

# Seconds over which CPU time is taken, and the share of a core that an idle process may take. Generous: the real share is
# near 0.1 %, that of a loop that spins 100 %.
WINDOW = 2.0
IDLE_SHARE = 0.05


@pytest.mark.parametrize("wake", ["zmq", "pipe"])
async def test_numbered_messages_at_uneven_gaps(farm: Farm, wake: Literal["zmq", "pipe"]) -> None:
    """Messages after gaps of all lengths, so that readers are met awake, parking and parked: all arrive, in order."""
    gaps = random.Random(7).choices([0, 0.0002, 0.001, 0.003], k=300)
    async with aioarena.Sender(3, wake=wake, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        for worker in readers:
            worker.put("recv", len(gaps))
        for number, gap in enumerate(gaps):
            await chan.send(message("small", number))
            await asyncio.sleep(gap)
        for worker in readers:
            assert await worker.aget() == list(range(len(gaps)))


async def test_lost_wake_ups_of_readers(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every wake-up dropped, joining and each message still take no longer than the interval of the slow timer."""
    monkeypatch.setattr(SenderWire, "wake", lambda wire: None)
    async with aioarena.Sender(2, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        for number, kind in enumerate(["small", "arena"]):
            for worker in readers:
                worker.put("recv", 1)
            await eventually_async(lambda: is_parked(chan, 0) and is_parked(chan, 1), "the readers do not park")
            sent = time.monotonic()
            await chan.send(message(kind, number))
            for worker in readers:
                assert await worker.aget() == [number]
            assert time.monotonic() - sent < TICK + SOON
        for worker in readers:
            worker.put("drain")
        await eventually_async(lambda: is_parked(chan, 0) and is_parked(chan, 1), "the readers do not park")
    for worker in readers:
        numbers, error, _ = await worker.aget()
        assert (numbers, error["type"]) == ([], "EndOfChannel")


async def test_lost_wake_ups_of_the_sender(farm: Farm) -> None:
    """A send that waits for room goes on within the slow timer's interval though no reader wakes it."""
    async with aioarena.Sender(1, **CHANNEL) as chan:
        worker = farm.worker()
        worker.start("reader", chan.handle, 0, silent=True)
        assert await worker.aget() == "joined"
        worker.put("block")
        assert await worker.aget() == "blocked"
        count = 0
        while chan.statistics().waits == 0:
            sending = asyncio.create_task(chan.send(message("inline", count)))
            await asyncio.sleep(0)
            count += 1
        assert not sending.done()
        worker.put("go on")
        assert await worker.aget() == "going on"
        worker.put("recv", count)
        started = time.monotonic()
        await sending
        assert time.monotonic() - started < TICK + SOON
        assert await worker.aget() == list(range(count))


async def test_wake_ups_doubled_and_out_of_nothing(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Superfluous wake-ups make no message up, repeat none, and keep nobody busy."""
    wake = SenderWire.wake

    def wake_twice(wire: SenderWire) -> None:
        wake(wire)
        wake(wire)

    monkeypatch.setattr(SenderWire, "wake", wake_twice)
    async with aioarena.Sender(2, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        for worker in readers:
            worker.put("recv", 71)
        for kind, number in numbered(70):
            await chan.send(message(kind, number))
            for _ in range(3):
                chan._send_wake()
            await asyncio.sleep(0)
        await eventually_async(lambda: is_parked(chan, 0) and is_parked(chan, 1), "the readers do not park again")
        for worker in readers:
            assert not worker.link.connection.poll()
        await chan.send(message("small", 70))
        for worker in readers:
            assert await worker.aget() == list(range(71))
        for worker in readers:
            assert await worker.aask("nowait") == "nothing"


async def test_foreign_wake_ups_of_the_sender(farm: Farm) -> None:
    """Readers that wake the sender for no reason do not disturb a send that waits for room."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        stopped, noisy = await attach(farm, chan.handle)
        stopped.stop()
        sending = asyncio.create_task(_send_until_waiting(chan))
        await eventually_async(lambda: chan.statistics().waits, "the sender never had to wait")
        noisy.put("wake", 50)
        assert await noisy.aget() == "woke"
        assert not sending.done()
        stopped.resume()
        stopped.put("recv", 150)
        noisy.put("recv", 150)
        await sending
        assert await stopped.aget() == await noisy.aget() == list(range(150))


async def _send_until_waiting(chan: aioarena.Sender) -> None:
    for kind, number in numbered(150, kinds=("inline",)):
        await chan.send(message(kind, number))


async def test_a_reader_that_was_stopped_for_a_while(farm: Farm) -> None:
    """Messages sent while a reader is stopped by SIGSTOP, longer than any timer here, all arrive once it goes on."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        stopped, other = await attach(farm, chan.handle)
        stopped.put("recv", 50)
        await eventually_async(lambda: is_parked(chan, 0), "the reader does not park")
        stopped.stop()
        for kind, number in numbered(50, kinds=("small", "arena", "frame")):
            await chan.send(message(kind, number))
        assert await other.aask("recv", 50) == list(range(50))
        await asyncio.sleep(1.5 * TICK)  # several timers of the sender find it stopped
        assert [reader.state for reader in chan.statistics().readers] == ["joined", "joined"]
        assert chan.statistics().readers[0].messages_behind == 50
        stopped.resume()
        assert await stopped.aget() == list(range(50))


# Whoever waits, sleeps: invariant 8 --------------------------------------------------------------------------------------


def shares(workers: list[Worker], seconds: float) -> list[float]:
    """CPU time of each process over the next seconds, as a share of one core."""
    before = [cpu_seconds(worker.pid) for worker in workers]
    time.sleep(seconds)
    return [(cpu_seconds(worker.pid) - start) / seconds for worker, start in zip(workers, before, strict=True)]


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_an_idle_channel_uses_no_cpu(farm: Farm, loop_kind: str) -> None:
    """Neither a sender with nothing to send nor readers that wait for it take CPU time to speak of."""
    sender, *readers = workers = farm.several(3)
    sender.start("sender", 2, loop_kind=loop_kind, **CHANNEL)
    handle = sender.get()
    for rank, worker in enumerate(readers):
        worker.start("reader", handle, rank, loop_kind=loop_kind)
        assert worker.get() == "joined"
    sender.ask("send", numbered(7))
    for worker in readers:
        assert worker.ask("recv", 7) == list(range(7))
        worker.put("drain")
    assert max(shares(workers, WINDOW)) < IDLE_SHARE
    sender.ask("send", [("small", 7)])
    sender.put("close")
    for worker in readers:
        numbers, error, _ = worker.get()
        assert (numbers, error["type"]) == ([7], "EndOfChannel")


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_sender_that_waits_for_room_uses_no_cpu(farm: Farm, loop_kind: str) -> None:
    """A sender whose ring is full because a reader is stopped sleeps, and so does the other reader."""
    sender, stopped, other = farm.several(3)
    sender.start("sender", 2, loop_kind=loop_kind, **CHANNEL)
    handle = sender.get()
    for rank, worker in enumerate((stopped, other)):
        worker.start("reader", handle, rank, loop_kind=loop_kind)
        assert worker.get() == "joined"
    stopped.stop()
    other.put("drain")
    sender.put("send until waiting", "inline")
    assert sender.get() == "waiting"
    assert max(shares([sender, other], WINDOW)) < IDLE_SHARE
    stopped.resume()
    assert stopped.ask("recv", 1) == [0]


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_steady_rhythm_costs_little(farm: Farm, loop_kind: str) -> None:
    """At a message every 5 ms readers use a fraction of a core: they park in between instead of spinning."""
    sender, *readers = farm.several(3)
    sender.start("sender", 2, loop_kind=loop_kind, **CHANNEL)
    handle = sender.get()
    for rank, worker in enumerate(readers):
        worker.start("reader", handle, rank, loop_kind=loop_kind)
        assert worker.get() == "joined"
        worker.put("drain")
    sender.put("send in rhythm", 0.005)
    assert sender.get() == "sending"
    # A spinning reader takes as much as the machine gives it: half a core, were the others all busy.
    assert max(shares(readers, WINDOW)) < 0.3
    count = sender.ask("enough")
    sender.put("close")
    for worker in readers:
        numbers, error, _ = worker.get()
        assert (numbers, error["type"]) == (list(range(count)), "EndOfChannel")
