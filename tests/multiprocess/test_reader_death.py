"""A reader dies, hangs, or comes back: the sender knows at once who it was, the others miss nothing, no slot is lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

import aioarena
from tests.multiprocess.harness import (
    PATIENCE,
    SOON,
    Farm,
    Worker,
    eventually_async,
    is_parked,
    process_state,
    resident,
    timed,
)
from tests.multiprocess.messages import ARENA, CHANNEL, message, numbered
from tests.multiprocess.scripts import Gate
from tests.multiprocess.senders import attach

SIGKILL = int(signal.SIGKILL)


def assert_names(error: aioarena.ReaderLostError, rank: int, worker: Worker) -> None:
    assert (error.rank, error.pid, error.signal) == (rank, worker.pid, SIGKILL)
    assert f"reader {rank} (pid {worker.pid}) was killed by signal {SIGKILL}" in str(error)
    assert 'on_reader_lost="continue"' in str(error)


async def lost_error(chan: aioarena.Sender) -> aioarena.ReaderLostError:
    """What sending raises, as soon as the sender has noticed a death."""
    with timed():
        while True:
            try:
                await chan.send(message("small", -1))
            except aioarena.ReaderLostError as error:
                return error
            await asyncio.sleep(0.001)


# What the sender raises --------------------------------------------------------------------------------------------------


async def test_the_next_send_names_the_dead_reader(farm: Farm) -> None:
    """Rank, pid and signal; from send, send_nowait and wait_ready, until somebody takes the rank."""
    async with aioarena.Sender(3, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        await chan.send(message("arena", 0))
        readers[1].kill()
        assert_names(await lost_error(chan), 1, readers[1])
        for call in (chan.send, chan.send_nowait):
            with pytest.raises(aioarena.ReaderLostError):
                await call("more")  # type: ignore[func-returns-value]
        with pytest.raises(aioarena.ReaderLostError):
            await chan.wait_ready()
        states = [reader.state for reader in chan.statistics().readers]
        assert states == ["joined", "lost", "joined"]


async def test_a_dead_reader_whose_child_lives(farm: Farm, sleepers: list[int]) -> None:
    """A forked child of the reader that keeps the connection open does not hide the death."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        reader, victim = await attach(farm, chan.handle)
        await chan.send(message("arena", 0))
        assert await victim.aask("hold", 1) == [0]
        assert await reader.aask("recv", 1) == [0]
        sleepers.append(await victim.aask("fork a sleeper"))
        victim.kill()
        assert_names(await lost_error(chan), 1, victim)
        assert chan.statistics().slots_used == 0
        assert process_state(sleepers[0]) in "SR"


async def test_wait_ready_raises_when_a_reader_dies(farm: Farm) -> None:
    """One of the readers that were in dies while others are awaited."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        worker = farm.worker()
        worker.start("reader", chan.handle, 0)
        assert await worker.aget() == "joined"
        waits = [asyncio.create_task(chan.wait_ready()), asyncio.create_task(chan.send("never"))]
        await asyncio.sleep(0)
        worker.kill()
        with timed():
            for outcome in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(outcome, aioarena.ReaderLostError)
                assert_names(outcome, 0, worker)


async def test_a_send_that_waits_for_the_reader_that_dies(farm: Farm) -> None:
    """A send held up by a full ring raises as soon as the reader it waits for is dead; its message was not sent."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        reader, stuck = await attach(farm, chan.handle)
        stuck.stop()
        reader.put("drain")
        sending, sent = await _fill(chan, "inline")
        stuck.kill()
        with timed(), pytest.raises(aioarena.ReaderLostError) as caught:
            await sending
        assert_names(caught.value, 1, stuck)
        assert chan.statistics().slots_used == 0
    numbers, error, _ = await reader.aget()
    assert (numbers, error["type"]) == (list(range(sent)), "EndOfChannel")


async def _fill(chan: aioarena.Sender, kind: str) -> tuple[asyncio.Task[None], int]:
    """Send until a send waits for room: that one, and how many were sent before."""
    number = 0
    while True:
        sending = asyncio.create_task(chan.send(message(kind, number)))
        while not (sending.done() or chan.statistics().waits):
            await asyncio.sleep(0.001)
        if not sending.done():
            return sending, number
        await sending
        number += 1


async def test_a_send_that_waits_for_the_frame_budget_of_the_reader_that_dies(farm: Farm) -> None:
    """The same while it waits for frames to be received."""
    async with aioarena.Sender(2, frame_budget=ARENA.capacity, on_reader_lost="continue", **CHANNEL) as chan:
        reader, stuck = await attach(farm, chan.handle)
        stuck.stop()
        reader.put("recv", 3)
        await chan.send(message("frame", 0))
        sending = asyncio.create_task(chan.send(message("frame", 1)))
        await eventually_async(lambda: chan.statistics().waits, "the sender did not wait")
        stuck.kill()
        with timed():
            await sending
        await chan.send(message("frame", 2))
        assert await reader.aget() == [0, 1, 2]
        await eventually_async(lambda: chan.statistics().frames_pending == 0, "frames of the dead reader stay pending")


async def test_going_on_without_the_dead(farm: Farm) -> None:
    """With on_reader_lost="continue" nothing is raised; the others get all of it, even with nobody left it goes on."""
    async with aioarena.Sender(3, on_reader_lost="continue", **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        for kind, number in numbered(10):
            await chan.send(message(kind, number))
        readers[1].kill()
        for kind, number in numbered(100, first=10, kinds=("small", "arena", "mixed", "frame")):
            await chan.send(message(kind, number))
            if number == 11:
                assert await readers[0].aask("recv", 12) == list(range(12))
                assert await readers[2].aask("recv", 12) == list(range(12))
                for worker in (readers[0], readers[2]):
                    worker.put("recv", 98)
        for worker in (readers[0], readers[2]):
            assert await worker.aget() == list(range(12, 110))
        readers[0].kill()
        readers[2].kill()
        await eventually_async(lambda: {r.state for r in chan.statistics().readers} == {"lost"}, "deaths go unnoticed")
        await chan.send(message("mixed", 110))
        assert chan.statistics().slots_used == 0


# At every stage ----------------------------------------------------------------------------------------------------------


async def _parked(chan: aioarena.Sender, victim: Worker) -> None:
    victim.put("recv", 1)
    await eventually_async(lambda: is_parked(chan, 1), "the reader does not park")


async def _with_messages_unread(chan: aioarena.Sender, victim: Worker) -> None:
    for kind, number in numbered(7, first=100):
        await chan.send(message(kind, number))


async def _holding_slots(chan: aioarena.Sender, victim: Worker) -> None:
    for number in (100, 101, 102):
        await chan.send(message("arena", number))
    assert await victim.aask("hold", 3) == [100, 101, 102]
    assert chan.statistics().readers[1].spans_held == 3


async def _unpickling(chan: aioarena.Sender, victim: Worker) -> None:
    # After a tensor in the arena, which the reader has claimed by then, and before it moves on.
    await chan.send([message("arena", 100), Gate()])
    victim.put("recv", 1)
    assert await victim.aget() == "unpickling"


async def _in_the_middle_of_a_frame(chan: aioarena.Sender, victim: Worker) -> None:
    victim.put("recv", 1)
    await eventually_async(lambda: is_parked(chan, 1), "the reader does not park")
    victim.stop()
    # Larger than what a Unix socket holds, so it is under way until the reader goes on.
    await chan.send(message("frame", 100))


async def _leaving(chan: aioarena.Sender, victim: Worker) -> None:
    # It has asked to leave, and dies before the sender looks.
    victim.put("close, and say so")
    assert victim.get(PATIENCE) == "leaving"


STAGES: dict[str, Callable[[aioarena.Sender, Worker], Any]] = {
    "parked": _parked,
    "with messages unread": _with_messages_unread,
    "holding slots": _holding_slots,
    "unpickling": _unpickling,
    "in the middle of a frame": _in_the_middle_of_a_frame,
    "leaving": _leaving,
}


@pytest.mark.parametrize("stage", STAGES)
async def test_killed(farm: Farm, stage: str) -> None:
    """A reader killed at any stage: the others miss nothing, nothing of it stays, and a new one takes its rank."""
    async with aioarena.Sender(2, on_reader_lost="continue", **CHANNEL) as chan:
        survivor, victim = await attach(farm, chan.handle)
        await chan.send(message("mixed", 0))
        assert await victim.aask("recv", 1) == [0]
        survivor.put("count")
        await STAGES[stage](chan, victim)
        victim.kill()
        with timed():
            while chan.statistics().readers[1].state == "joined":
                await asyncio.sleep(0.001)
        # All slots of the dead are free, in time for the whole arena to be needed.
        await eventually_async(lambda: chan.statistics().slots_used == 0, "slots of the dead reader stay used")
        assert chan.statistics().frames_pending == 0 or stage == "in the middle of a frame"
        successor = farm.worker()
        successor.start("reader", chan.handle, 1)
        assert await successor.aget() == "joined"
        for kind, number in numbered(21, first=200):
            await chan.send(message(kind, number))
        assert await successor.aask("recv", 21) == list(range(200, 221))
        statistics = chan.statistics()
    # Everything that was sent, and nothing in between that was not.
    assert await survivor.aget() == statistics.messages


async def test_a_successor_ends_the_error(farm: Farm) -> None:
    """A new process at the rank of a dead reader: sending works again, and it gets all that is sent from then on."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        other, first = await attach(farm, chan.handle)
        for kind, number in numbered(7):
            await chan.send(message(kind, number))
        first.kill()
        await lost_error(chan)
        second = farm.worker()
        second.start("reader", chan.handle, 1)
        assert await second.aget() == "joined"
        for kind, number in numbered(14, first=7):
            await chan.send(message(kind, number))
        assert await second.aask("recv", 14) == list(range(7, 21))
        read = await other.aask("recv", 7)
        while read[-1] != 20:
            read += await other.aask("recv", 1)
        assert [number for number in read if number >= 0] == list(range(21))


async def test_the_whole_arena_after_many_deaths(farm: Farm) -> None:
    """Readers killed one after the other at random moments, holding all they can: no slot is lost, none freed twice."""
    order = random.Random(3)
    kinds = ("arena", "mixed", "small", "pickled")
    async with aioarena.Sender(2, on_reader_lost="continue", **CHANNEL) as chan:
        keeper, victim = await attach(farm, chan.handle)
        await chan.send(message("arena", 0))
        assert await keeper.aask("hold", 1) == [0]  # held through all of it
        number = 1
        for _ in range(12):
            count = order.randrange(1, 9)
            for kind, _ in numbered(count, order.randrange(4), kinds):
                await chan.send(message(kind, number))
                number += 1
            taken = order.randrange(count + 1)
            victim.put("hold", taken)
            if order.random() < 0.5:
                await victim.aget()  # else killed at some point of it
            victim.kill()
            assert await keeper.aask("recv", count) == list(range(number - count, number))
            victim = farm.worker()
            victim.start("reader", chan.handle, 1)
            assert await victim.aget() == "joined"
            assert await keeper.aask("verify") == [0]
        await eventually_async(lambda: chan.statistics().slots_used == 2, "slots are lost")
        # The whole arena, but for what the keeper holds, can be used at once.
        before = chan.statistics().fallbacks["arena_full"]
        for _ in range(7):
            await chan.send(message("arena", number))
            number += 1
        assert (chan.statistics().slots_used, chan.statistics().fallbacks["arena_full"]) == (16, before)
        assert await victim.aask("recv", 7) == await keeper.aask("recv", 7) == list(range(number - 7, number))
        assert await keeper.aask("drop") == "dropped"
        await eventually_async(lambda: chan.statistics().slots_used == 0, "slots are lost")


# Never by the clock: B15 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [False, True])
async def test_slots_of_a_slow_reader_are_never_taken_back(farm: Farm, stopped: bool) -> None:
    """However often traffic goes round the arena, and though its holder sleeps or is stopped, a tensor stays as it is."""
    async with aioarena.Sender(2, stall_after=0.01, **CHANNEL) as chan:
        holder, other = await attach(farm, chan.handle)
        await chan.send(message("arena", 0))
        await chan.send(message("arena", 1))
        assert await holder.aask("hold", 2) == await other.aask("hold", 2) == [0, 1]
        assert await other.aask("drop") == "dropped"
        for round in range(4):
            # The holder goes on reading, or is stopped while as much is sent as the ring holds.
            if stopped:
                holder.stop()
            for kind, number in numbered(40, first=2 + 40 * round, kinds=("arena",)):
                await chan.send(message(kind, number))
                assert await other.aask("recv", 1) == [number]
            if stopped:
                await asyncio.sleep(0.1)
                holder.resume()
            assert await holder.aask("recv", 40) == list(range(2 + 40 * round, 42 + 40 * round))
            assert await holder.aask("verify") == [0, 1]
        assert chan.statistics().readers[0].spans_held == 2
        assert await holder.aask("drop") == "dropped"
        await eventually_async(lambda: chan.statistics().slots_used == 0, "slots stay used")


async def test_death_frees_only_what_the_dead_held(farm: Farm) -> None:
    """Slots that a live reader holds too are not freed by the death of another."""
    async with aioarena.Sender(2, on_reader_lost="continue", **CHANNEL) as chan:
        holder, victim = await attach(farm, chan.handle)
        for number in range(6):
            await chan.send(message("arena", number))
        assert await holder.aask("hold", 2) == [0, 1]
        assert await holder.aask("recv", 4) == [2, 3, 4, 5]
        assert await victim.aask("hold", 6) == list(range(6))
        assert chan.statistics().slots_used == 12
        victim.kill()
        await eventually_async(lambda: chan.statistics().slots_used == 4, "not what the other holds is left", SOON)
        assert await holder.aask("verify") == [0, 1]
        for number in range(6, 30):
            await chan.send(message("arena", number))
            assert await holder.aask("recv", 1) == [number]
        assert await holder.aask("verify") == [0, 1]
        assert chan.statistics().fallbacks["arena_full"] == 0


# Stuck, but alive --------------------------------------------------------------------------------------------------------


async def test_a_time_out_names_the_reader_that_is_behind(farm: Farm) -> None:
    """A send that times out on a full ring carries a note: rank, pid, process state, messages and bytes behind, spans."""
    async with aioarena.Sender(3, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        stuck = readers[2]
        await chan.send(message("arena", 0))
        assert await stuck.aask("hold", 1) == [0]
        stuck.stop()
        for worker in readers[:2]:
            worker.put("drain")
        number, error = 1, None
        while error is None:
            try:
                async with asyncio.timeout(0.2):
                    await chan.send(message("inline", number))
                number += 1
            except TimeoutError as caught:
                error = caught.__cause__
        (note,) = error.__notes__
        behind = chan.statistics().readers[2]
        assert behind.messages_behind == number - 1
        lag = f"{number - 1} messages ({behind.bytes_behind} bytes) behind"
        assert note.startswith(f"reader 2 (pid {stuck.pid}), stopped by a signal, is {lag}")
        assert "holds 1 spans" in note
        # Alive and behind: it then receives everything whose send succeeded, once; what timed out was not sent.
        stuck.resume()
        assert await stuck.aask("recv", number - 1) == list(range(1, number))
        await chan.send(message("small", number))
        assert await stuck.aask("recv", 1) == [number]
    for worker in readers[:2]:
        numbers, error, _ = await worker.aget()
        assert (numbers, error["type"]) == (list(range(number + 1)), "EndOfChannel")


async def test_a_warning_names_the_reader_that_is_behind(farm: Farm, caplog: pytest.LogCaptureFixture) -> None:
    """After stall_after seconds of waiting the log says for whom: rank, pid, state and lag."""
    async with aioarena.Sender(2, stall_after=0.1, name="steps", **CHANNEL) as chan:
        reader, stuck = await attach(farm, chan.handle)
        stuck.put("block")
        assert await stuck.aget() == "blocked"
        reader.put("drain")
        sending, count = await _fill(chan, "inline")

        def warnings() -> list[str]:
            return [text for text in (r.getMessage() for r in caplog.records) if "a send has waited" in text]

        await eventually_async(warnings, "no warning came")
        behind = chan.statistics().readers[1]
        assert warnings()[0].startswith("channel 'steps': a send has waited ")
        assert (
            f"reader 1 (pid {stuck.pid}), sleeping, is {count} messages ({behind.bytes_behind} bytes) behind"
            in warnings()[0]
        )
        stuck.put("go on")
        assert await stuck.aget() == "going on"
        assert await stuck.aask("recv", count + 1) == list(range(count + 1))
        await sending


async def test_a_warning_names_the_readers_that_are_missing(farm: Farm, caplog: pytest.LogCaptureFixture) -> None:
    """The same for a send that waits for readers to attach."""
    async with aioarena.Sender(2, stall_after=0.1, **CHANNEL) as chan:
        worker = farm.worker()
        worker.start("reader", chan.handle, 1)
        assert await worker.aget() == "joined"
        sending = asyncio.create_task(chan.send("hello"))
        await eventually_async(lambda: "waiting for readers [0] to attach" in caplog.text, "no warning came")
        sending.cancel()
        await asyncio.wait([sending])


async def test_close_ends_a_send_that_waits_for_a_stopped_reader(farm: Farm) -> None:
    """Closing from another task ends it at once, with ClosedError, and its message is seen by nobody."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        reader, stuck = await attach(farm, chan.handle)
        stuck.stop()
        reader.put("drain")
        sending, sent = await _fill(chan, "inline")
        with timed():
            await chan.aclose()
            with pytest.raises(aioarena.ClosedError):
                await sending
    stuck.resume()
    stuck.put("drain")
    for worker in (reader, stuck):
        numbers, error, _ = await worker.aget()
        assert (numbers, error["type"]) == (list(range(sent)), "EndOfChannel")


async def test_an_evicted_reader(farm: Farm) -> None:
    """With evict_after a stuck reader is given up: the others go on, it learns of it, its slots stay until it is dead."""
    async with aioarena.Sender(2, evict_after=0.1, **CHANNEL) as chan:
        reader, stuck = await attach(farm, chan.handle)
        await chan.send(message("arena", 0))
        assert await stuck.aask("hold", 1) == [0]
        reader.put("drain")
        stuck.put("block")
        assert await stuck.aget() == "blocked"
        sending, sent = await _fill(chan, "inline")
        await sending  # goes on without it
        assert chan.statistics().readers[1].state == "evicted"
        for kind, number in numbered(40, first=sent + 1, kinds=("arena",)):
            await chan.send(message(kind, number))
        stuck.put("go on")
        assert await stuck.aget() == "going on"
        _, error, _ = await stuck.aask("drain")
        assert error["type"] == "EvictedError"
        assert await stuck.aask("verify") == [0]
        assert (await farm.worker().acall("reader", chan.handle, 1))["type"] == "HandleError"
        stuck.kill()
        await eventually_async(lambda: chan.statistics().slots_used == 0, "slots of the dead reader stay used")
        successor = farm.worker()
        successor.start("reader", chan.handle, 1)
        assert await successor.aget() == "joined"


async def test_frames_of_an_evicted_reader_do_not_pile_up(farm: Farm) -> None:
    """Frames are bounded by the budget, whoever does not read them: nothing is queued for a reader that was given up."""
    sender, reader, stuck = farm.several(3)
    options = {**CHANNEL, "arena": None, "evict_after": 0.1, "frame_budget": 16 << 20}
    sender.start("sender", 2, **options)
    handle = sender.get()
    for rank, worker in enumerate((reader, stuck)):
        worker.start("reader", handle, rank)
        assert worker.get() == "joined"
    reader.put("drain")
    stuck.stop()
    sender.ask("send", numbered(17, kinds=("frame",)))  # the last of which waits until the eviction
    assert sender.ask("statistics").readers[1].state == "evicted"
    before = resident(sender.pid)
    sender.ask("send", numbered(100, first=17, kinds=("frame",)))
    assert resident(sender.pid) - before < 50 << 20
