"""Starting up: nothing is lost, nobody waits for ever, whoever gives up leaves nothing, and errors say who is missing."""

from __future__ import annotations

import asyncio
import random
import re
import select

import pytest

import aioarena
from tests.multiprocess.harness import PATIENCE, Farm, timed
from tests.multiprocess.messages import CHANNEL, message
from tests.multiprocess.senders import attach


async def test_the_first_message_is_never_lost(farm: Farm) -> None:
    """Send at once, while readers start in whatever order: all of them get message 0, every time."""
    readers = farm.several(3)
    order = random.Random(5)
    for number in range(15):
        ranks = order.sample(range(3), 3)
        early = order.randrange(4)  # how many start before the sender
        chan = aioarena.Sender(3, **CHANNEL)
        for rank in ranks[:early]:
            readers[rank].start("first_message", chan.handle, rank)
        async with chan:
            sending = asyncio.create_task(chan.send(message(order.choice(["small", "arena", "frame"]), number)))
            await asyncio.sleep(0)
            for rank in ranks[early:]:
                readers[rank].start("first_message", chan.handle, rank)
            await sending
            for worker in readers:
                assert await worker.aresult() == number


async def test_waiting_for_readers_names_the_missing(farm: Farm) -> None:
    """A time-out of wait_ready, and of a send, carries a note that names the ranks that have not attached."""
    async with aioarena.Sender(4, **CHANNEL) as chan:
        for rank in (0, 3):
            farm.worker().start("reader", chan.handle, rank)
        for worker in farm.workers:
            assert await worker.aget() == "joined"
        for waiting in (chan.wait_ready, lambda: chan.send("hello")):
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.05):
                    await waiting()
            assert caught.value.__cause__ is not None
            (note,) = caught.value.__cause__.__notes__
            assert note == f"channel {chan.handle.name!r} is waiting for readers [1, 2] to attach"
        assert chan.statistics().messages == 0


async def test_cancelling_wait_ready(farm: Farm) -> None:
    """A cancelled wait_ready ends at once and changes nothing: readers attach later, and the channel works."""
    async with aioarena.Sender(1, **CHANNEL) as chan:
        waiting = asyncio.create_task(chan.wait_ready())
        await asyncio.sleep(0)
        waiting.cancel()
        with timed(), pytest.raises(asyncio.CancelledError):
            await waiting
        (reader,) = await attach(farm, chan.handle)
        await chan.wait_ready()
        await chan.send(message("arena", 7))
        assert await reader.aask("recv", 1) == [7]


async def test_cancelling_the_start_of_a_reader(farm: Farm) -> None:
    """A reader that gives up waiting for its sender leaves no descriptor, mapping or thread, and may try again."""
    chan = aioarena.Sender(1, **CHANNEL)
    worker = farm.worker()
    worker.start("give_up_starting", chan.handle)
    before, after, notes = await worker.aresult()
    assert after == before
    (note,) = notes
    who = re.escape(f"reader 0 of channel {chan.handle.name!r} is waiting for the sender (pid {chan.handle.sender.pid})")
    assert re.fullmatch(rf"{who}, (running|sleeping), to start", note)
    async with chan:
        worker.start("reader", chan.handle, 0)
        assert await worker.aget() == "joined"
        await chan.send(message("small", 1))
        assert await worker.aask("recv", 1) == [1]


async def test_a_reader_that_dies_as_soon_as_it_attached(farm: Farm) -> None:
    """While the sender still waits for others: an error that names the dead one, no wait for ever."""
    async with aioarena.Sender(3, **CHANNEL) as chan:
        waiting = asyncio.create_task(chan.wait_ready())
        for rank in (0, 2):
            worker = farm.worker()
            worker.start("reader", chan.handle, rank)
            assert await worker.aget() == "joined"
        worker.kill()
        with timed(), pytest.raises(aioarena.ReaderLostError) as caught:
            await waiting
        assert (caught.value.rank, caught.value.pid, caught.value.signal) == (2, worker.pid, 9)


async def test_closing_while_readers_connect(farm: Farm) -> None:
    """Readers that are waiting to be admitted when the sender closes are told so, and do not wait on."""
    chan = aioarena.Sender(2, **CHANNEL)
    workers = farm.several(2)
    for rank, worker in enumerate(workers):
        worker.start("reader", chan.handle, rank, announce=True)
        assert await worker.aget() == "asked"
    await chan.aclose()  # it was never started, so nobody could be admitted
    with timed():
        for worker in workers:
            assert (await worker.aresult())["type"] == "EndOfChannel"


async def test_a_send_that_waits_for_readers_ends_when_the_sender_closes(farm: Farm) -> None:
    """Close from another task while a send and a wait_ready wait for readers: both end with ClosedError."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        worker = farm.worker()
        worker.start("reader", chan.handle, 0)
        assert await worker.aget() == "joined"
        waits = [asyncio.create_task(chan.send("never")), asyncio.create_task(chan.wait_ready())]
        await asyncio.sleep(0)
        with timed():
            await chan.aclose()
            for outcome in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(outcome, aioarena.ClosedError)
        # The reader that was in sees the end, without the message.
        numbers, error, _ = await worker.aask("drain")
        assert (numbers, error["type"]) == ([], "EndOfChannel")


async def test_one_live_process_per_rank(farm: Farm) -> None:
    """A second reader at a rank that is taken is refused with the reason; the first does not notice."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        first, other = await attach(farm, chan.handle)
        second = farm.worker()
        with timed():
            error = await second.acall("reader", chan.handle, 0)
        assert error["type"] == "HandleError"
        assert f"rank 0 is taken by process {first.pid}, which lives" in error["text"]
        await chan.send(message("arena", 0))
        assert await first.aask("recv", 1) == await other.aask("recv", 1) == [0]


async def test_a_reader_in_the_same_process_at_a_taken_rank(farm: Farm) -> None:
    """The same holds for two receivers of one process."""
    async with aioarena.Sender(1, **CHANNEL) as chan, aioarena.Receiver(chan.handle, 0):
        with pytest.raises(aioarena.HandleError, match="rank 0 is taken by process"):
            await aioarena.Receiver(chan.handle, 0).start()


async def test_a_stopped_reader_keeps_its_rank(farm: Farm) -> None:
    """SIGSTOP is not death: the rank stays taken, and is the first one's when it goes on."""
    async with aioarena.Sender(1, **CHANNEL) as chan:
        (first,) = await attach(farm, chan.handle)
        first.stop()
        error = await farm.worker().acall("reader", chan.handle, 0)
        assert error["type"] == "HandleError"
        await chan.send(message("small", 0))
        first.resume()
        assert await first.aask("recv", 1) == [0]


def test_a_rank_out_of_range(farm: Farm) -> None:
    """Ranks are checked where they are given, and the message says which there are."""
    handle = aioarena.Sender(3, **CHANNEL).handle
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=re.escape(f"rank must be from 0 to 2, not {rank}: the channel has 3 readers")):
            aioarena.Receiver(handle, rank)


async def test_the_sender_refuses_a_rank_it_does_not_have(farm: Farm) -> None:
    """A reader that got past its own check is refused by the sender, not admitted and not ignored."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        error = await farm.worker().acall("ask_for_rank", chan.handle, 5)
        assert error == "rank 5 is out of range: the channel has ranks 0 to 1"
        await attach(farm, chan.handle)


async def test_the_sender_refuses_another_version(farm: Farm) -> None:
    """A reader that speaks another version of the protocol is told so."""
    async with aioarena.Sender(1, **CHANNEL) as chan:
        error = await farm.worker().acall("ask_for_rank", chan.handle, 0, version=77)
        assert "this reader 77: install the same" in error
        await attach(farm, chan.handle)


async def test_a_reader_killed_before_it_joins(farm: Farm) -> None:
    """Nothing was known of it, so nothing is reported: another process takes its rank and gets everything."""
    chan = aioarena.Sender(1, **CHANNEL)
    unlucky, reader = farm.several(2)
    unlucky.start("reader", chan.handle, 0, announce=True)
    assert await unlucky.aget() == "asked"
    unlucky.kill()
    async with chan:
        sending = asyncio.create_task(chan.send(message("arena", 0)))
        reader.start("reader", chan.handle, 0)
        assert await reader.aget() == "joined"
        await sending
        assert await reader.aask("recv", 1) == [0]


async def test_a_reader_killed_while_it_is_being_admitted(farm: Farm) -> None:
    """Its request arrives, and it is dead by the time the sender looks: an error or nothing, and the rank is free."""
    async with aioarena.Sender(1, on_reader_lost="continue", **CHANNEL) as chan:
        unlucky, reader = farm.several(2)
        unlucky.start("reader", chan.handle, 0, announce=True)
        assert unlucky.get(PATIENCE) == "asked"  # holding up the loop, so that nobody admits it
        unlucky.kill()
        reader.start("reader", chan.handle, 0)
        assert await reader.aget() == "joined"
        await chan.send(message("arena", 0))
        assert await reader.aask("recv", 1) == [0]


async def test_the_sender_starts_while_a_reader_is_stopped(farm: Farm) -> None:
    """A reader that was stopped while it waited is admitted when it goes on."""
    chan = aioarena.Sender(1, **CHANNEL)
    worker = farm.worker()
    worker.start("reader", chan.handle, 0, announce=True)
    assert await worker.aget() == "asked"
    worker.stop()
    async with chan:
        sending = asyncio.create_task(chan.send(message("small", 0)))
        await asyncio.sleep(0)
        assert not sending.done()
        worker.resume()
        await sending
        assert await worker.aget() == "joined"
        assert await worker.aask("recv", 1) == [0]


async def test_a_successor_that_is_quicker_than_the_news(farm: Farm) -> None:
    """A request for the rank of a reader that is dead, of which the sender has not heard yet, is granted at once."""
    async with aioarena.Sender(1, **CHANNEL) as chan:
        (first,) = await attach(farm, chan.handle)
        successor = farm.worker()
        # The loop stands still, so that it finds the request first and the death second.
        successor.start("reader", chan.handle, 0, announce=True)
        assert successor.get(PATIENCE) == "asked"
        assert select.select([chan._wire.fd], [], [], PATIENCE)[0]  # type: ignore[union-attr]
        first.kill()
        with timed():
            assert await successor.aget() == "joined"
        assert chan.statistics().readers[0].pid == successor.pid
        await chan.send(message("small", 0))
        assert await successor.aask("recv", 1) == [0]
