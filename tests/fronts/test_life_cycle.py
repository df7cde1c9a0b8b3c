"""Starting and closing: what is harmless, what is refused, who wakes, and what still arrives."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import (
    ArenaError,
    ClosedError,
    EndOfChannel,
    EvictedError,
    HandleError,
    PeerLostError,
    Receiver,
    Sender,
)
from tests.conftest import ARENA, PATIENCE, RING_BYTES, Channel, LoopFactory, OpenChannel
from tests.fronts.support import cancelled, fill_ring, filled, no_collector, parked, shows, turns, until

SMALL_CHANNEL: dict[str, Any] = {"arena": ARENA, "ring_bytes": RING_BYTES}


# Starting -------------------------------------------------------------------------------------------------------------


def test_construction_needs_no_loop() -> None:
    sender = Sender(1, **SMALL_CHANNEL)
    Receiver(sender.handle, 0)


async def test_start_and_close_by_hand() -> None:
    """The same as ``async with``; and both return the object to use."""
    sender = Sender(1, **SMALL_CHANNEL)
    await sender.start()
    receiver = Receiver(sender.handle, 0)
    await receiver.start()
    await sender.send(1)
    assert await receiver.recv() == 1
    await receiver.aclose()
    await sender.aclose()
    async with Sender(1, **SMALL_CHANNEL) as started:
        assert isinstance(started, Sender)


@pytest.mark.parametrize("end", ["sender", "receiver"])
async def test_what_is_not_started_says_how_to(end: str) -> None:
    sender = Sender(1, **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 0)
    message = r"not started: use `async with`, or `await start\(\)` first"
    if end == "sender":
        for call in (sender.send(1), sender.wait_ready(), sender.enqueue(1)):
            with pytest.raises(ClosedError, match=message):
                await call
        with pytest.raises(ClosedError, match=message):
            sender.send_nowait(1)
        assert sender.statistics().messages == 0
    else:
        for receive in (receiver.recv(), receiver.dequeue(), anext(receiver), receiver.to_device(1, "cpu")):
            with pytest.raises(ClosedError, match=message):
                await receive
        with pytest.raises(ClosedError, match=message):
            receiver.recv_nowait()
        with pytest.raises(ClosedError, match=message):
            receiver.record_stream(torch.ones(1), None)
        assert receiver.statistics().messages == 0


async def test_nothing_starts_twice(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for end in (channel.sender, channel.receiver):
            with pytest.raises(ClosedError, match="started before; make a new one"):
                await end.start()
        await channel.sender.send("still works")
        assert await channel.receiver.recv() == "still works"
    for end in (channel.sender, channel.receiver):
        with pytest.raises(ClosedError, match="make a new one"):
            await end.start()


async def test_what_was_closed_before_it_started_stays_closed() -> None:
    sender = Sender(1, **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 0)
    for end in (receiver, sender):
        await end.aclose()
        with pytest.raises(ClosedError):
            await end.start()


async def test_a_receiver_may_start_before_its_sender() -> None:
    sender = Sender(1, **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 0)
    starting = asyncio.create_task(receiver.start())
    await turns(5)  # it asks for its seat, and nobody is there
    assert not starting.done()
    async with sender:
        await starting
        await sender.send(filled(3))
        assert shows(await receiver.recv(), 3)
        await receiver.aclose()


async def test_a_receiver_that_gives_up_leaves_nothing_and_says_whom_it_waited_for() -> None:
    sender = Sender(1, name="quiet", **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 0)
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.01):
            await receiver.start()
    notes = caught.value.__cause__.__notes__  # type: ignore[union-attr]
    assert any("reader 0 of channel 'quiet' is waiting for the sender (pid" in note for note in notes)
    await receiver.aclose()
    await sender.aclose()


async def test_closing_a_receiver_while_it_starts() -> None:
    sender = Sender(1, **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 0)
    starting = asyncio.create_task(receiver.start())
    await turns(3)  # until it waits for its seat
    await receiver.aclose()
    with pytest.raises(ClosedError):
        await starting
    await sender.aclose()


async def test_starting_at_a_sender_that_closed() -> None:
    sender = Sender(1, **SMALL_CHANNEL)
    await sender.start()
    await sender.aclose()
    receiver = Receiver(sender.handle, 0)
    with pytest.raises((HandleError, EndOfChannel), match=r"closed|sender is gone"):
        await receiver.start()
    await receiver.aclose()


async def test_a_sender_that_closes_while_a_receiver_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of it, whenever that happens; before there is a connection, by looking now and then."""
    monkeypatch.setattr("aioarena._asyncio.TICK", 0.02)
    for steps in range(8):
        sender = Sender(1, **SMALL_CHANNEL)
        await sender.start()
        receiver = Receiver(sender.handle, 0)
        starting = asyncio.create_task(receiver.start())
        await turns(steps)
        await sender.aclose()
        try:
            async with asyncio.timeout(PATIENCE):
                await starting
        except (EndOfChannel, HandleError):
            pass
        else:
            with pytest.raises(EndOfChannel):
                await receiver.recv()
        await receiver.aclose()


async def test_a_rank_belongs_to_one(open_channel: OpenChannel, caplog: pytest.LogCaptureFixture) -> None:
    async with open_channel(2) as channel:
        second = Receiver(channel.sender.handle, 1)
        with caplog.at_level(logging.WARNING, "aioarena"), pytest.raises(HandleError, match="rank 1 is taken by process"):
            await second.start()
        assert "refused reader 1" in caplog.text
        await channel.sender.send(1)
        assert [await receiver.recv() for receiver in channel.receivers] == [1, 1]


async def test_a_rank_that_was_left_can_be_taken_again(open_channel: OpenChannel) -> None:
    """The newcomer begins with the next message."""
    async with open_channel(2) as channel:
        first, second = channel.receivers
        await channel.sender.send("before")
        await second.aclose()
        await channel.sender.send("meanwhile")
        async with Receiver(channel.sender.handle, 1) as newcomer:
            await channel.sender.send("after")
            assert await newcomer.recv() == "after"
        assert [await first.recv() for _ in range(3)] == ["before", "meanwhile", "after"]


async def test_frames_sent_before_a_newcomer_came_are_not_for_it(open_channel: OpenChannel) -> None:
    """Nor are frames lost that were placed before it came, and sent after."""
    async with open_channel(2, arena=None) as channel:
        first, second = channel.receivers
        await second.aclose()
        await channel.sender.send(filled(1, 300_000))
        waiting = fill_ring(channel.sender)
        held_up = asyncio.create_task(channel.sender.send(filled(2, 300_000)))
        await turns(3)  # it is placed, and waits for room
        newcomer = Receiver(channel.sender.handle, 1)
        starting = asyncio.create_task(newcomer.start())
        await until(lambda: channel.sender.statistics().readers[1].state == "joined")
        # Its frame arrives before its task goes on.
        assert shows(await first.recv(), 1)
        for _ in range(waiting):
            first.recv_nowait()
        await held_up
        await until(lambda: (newcomer._on_wire(), newcomer._wire and newcomer._wire._frames)[1] or starting.done())
        await starting
        async with asyncio.timeout(PATIENCE):
            assert shows(await newcomer.recv(), 2)
            assert shows(await first.recv(), 2)
        await newcomer.aclose()


# Closing --------------------------------------------------------------------------------------------------------------


async def test_closing_twice_is_harmless(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for end in (channel.receiver, channel.sender):
            await end.aclose()
            await end.aclose()


async def test_two_tasks_may_close_at_once(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        ends = [*channel.receivers, channel.sender]
        await asyncio.gather(*[end.aclose() for end in ends for _ in range(2)])
        for end in ends:
            assert "closed" in repr(end)


async def test_calls_after_close_fail_at_once(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        sender, receiver = channel.sender, channel.receiver
        await receiver.aclose()
        await sender.aclose()
        for call in (sender.send(1), sender.wait_ready(), receiver.recv(), anext(receiver), receiver.to_device(1, "cpu")):
            with pytest.raises(ClosedError, match="is closed"):
                await call
        with pytest.raises(ClosedError, match="is closed"):
            sender.send_nowait(1)
        with pytest.raises(ClosedError, match="is closed"):
            receiver.recv_nowait()
        sender.statistics()
        receiver.statistics()


async def test_an_error_in_the_block_closes_and_comes_out(open_channel: OpenChannel) -> None:
    channels: list[Channel] = []

    async def fail() -> None:
        async with open_channel() as channel:
            channels.append(channel)
            await channel.sender.send(filled(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    (channel,) = channels
    assert "closed" in repr(channel.sender)
    assert "closed" in repr(channel.receiver)


@pytest.mark.parametrize("waiters", [1, 3])
async def test_closing_wakes_every_recv(open_channel: OpenChannel, waiters: int) -> None:
    async with open_channel() as channel:
        tasks = [asyncio.create_task(channel.receiver.recv()) for _ in range(waiters)]
        await parked(channel.receiver)
        async with asyncio.timeout(PATIENCE):
            await channel.receiver.aclose()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [ClosedError] * waiters


async def test_closing_wakes_every_recv_even_when_the_first_is_cancelled(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        tasks = [asyncio.create_task(channel.receiver.recv()) for _ in range(3)]
        await parked(channel.receiver)
        tasks[0].cancel()
        async with asyncio.timeout(PATIENCE):
            await channel.receiver.aclose()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [asyncio.CancelledError, ClosedError, ClosedError]


async def test_the_senders_close_wakes_every_recv_at_every_reader(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        tasks = [asyncio.create_task(receiver.recv()) for receiver in channel.receivers for _ in range(3)]
        for receiver in channel.receivers:
            await parked(receiver)
        async with asyncio.timeout(PATIENCE):
            await channel.sender.aclose()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [EndOfChannel] * 6


async def test_queued_messages_come_before_the_end(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        messages = ["small", filled(1, 100_000), filled(2, 2 << 20), {"a": filled(3, 500)}]
        for message in messages:
            await channel.sender.send(message)
        await channel.sender.aclose()
        for receiver in channel.receivers:
            assert await receiver.recv() == "small"
            assert shows(await receiver.recv(), 1)
            assert shows(receiver.recv_nowait(), 2)
            assert shows((await receiver.recv())["a"], 3)
            for _ in range(2):
                with pytest.raises(EndOfChannel):
                    await receiver.recv()
                with pytest.raises(EndOfChannel):
                    receiver.recv_nowait()


async def test_a_loop_over_messages_ends_cleanly(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for number in range(5):
            await channel.sender.send(number)
        await channel.sender.aclose()
        assert [message async for message in channel.receiver] == [0, 1, 2, 3, 4]
        assert [message async for message in channel.receiver] == []


async def test_close_waits_for_frames_under_way(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None) as channel:
        await channel.sender.send(filled(1, 3 << 20))
        closing = asyncio.create_task(channel.sender.aclose())
        await turns(20)  # it would be done by now if it did not wait
        assert not closing.done()
        assert shows(await channel.receiver.recv(), 1)
        async with asyncio.timeout(PATIENCE):
            await closing
        with pytest.raises(EndOfChannel):
            await channel.receiver.recv()


async def test_close_gives_frames_up_after_a_while_and_names_the_reader(
    open_channel: OpenChannel, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_channel(arena=None, linger=0.01) as channel:
        channel.receiver._unwatch(channel.receiver._wire.fd)  # type: ignore[union-attr]
        await channel.sender.send(filled(1, 3 << 20))
        with caplog.at_level(logging.WARNING, "aioarena"):
            await channel.sender.aclose()
        assert "frames not received after" in caplog.text
        assert "reader 0 (pid" in caplog.text
        assert "linger=" in caplog.text


async def test_a_close_that_is_cancelled_closes(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None) as channel:
        await channel.sender.send(filled(1, 3 << 20))
        closing = asyncio.create_task(channel.sender.aclose())
        await turns(5)  # it waits for the frame
        await cancelled(closing)
        assert "closed" in repr(channel.sender)
        await channel.sender.aclose()


async def test_a_reader_that_leaves_skips_what_it_did_not_receive(open_channel: OpenChannel) -> None:
    """And does not hold the sender up."""
    async with open_channel(2) as channel:
        stays, leaves = channel.receivers
        await channel.sender.send(filled(1))
        count = fill_ring(channel.sender)
        await stays.recv()
        for _ in range(count):
            stays.recv_nowait()
        held_up = asyncio.create_task(channel.sender.send("goes on"))
        await turns(3)  # no room, because of the one
        assert not held_up.done()
        await leaves.aclose()
        async with asyncio.timeout(PATIENCE):
            await held_up
        assert await stays.recv() == "goes on"
        assert channel.sender.statistics().readers[1].state == "left"


async def test_what_a_reader_did_not_receive_is_free_once_it_left(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        stays, leaves = channel.receivers
        await channel.sender.send(filled(1))
        await leaves.aclose()
        await stays.recv()
        await until(lambda: channel.slots_used == 0)


async def test_sending_to_nobody_holds_nothing(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.receiver.aclose()
        for number in range(20):
            await channel.sender.send(filled(number, 2 << 20))
        assert channel.slots_used == 0
        assert channel.sender.statistics().arena_bytes == 40 << 20


async def test_tensors_outlive_the_channel(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.sender.send([filled(7, 1 << 20), np.full(100_000, 8, np.uint8), filled(9, 100)])
        tensor, array, small = await channel.receiver.recv()
        part = tensor[1000:]
        del tensor
    del channel
    gc.collect()
    assert shows(part, 7)
    assert (array == 8).all()
    assert shows(small, 9)


# Closing while sends wait ---------------------------------------------------------------------------------------------


async def test_closing_ends_a_send_that_waits_for_readers() -> None:
    sender = Sender(2, **SMALL_CHANNEL)
    await sender.start()
    waiting = [asyncio.create_task(call) for call in (sender.send(1), sender.send(filled(1)), sender.wait_ready())]
    await turns(2)  # until they wait
    async with asyncio.timeout(PATIENCE):
        await sender.aclose()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [ClosedError] * 3


@pytest.mark.parametrize("size", [100, 100_000, 2 << 20])
async def test_closing_ends_sends_that_wait_for_room(open_channel: OpenChannel, size: int) -> None:
    async with open_channel() as channel:
        count = fill_ring(channel.sender)
        waiting = [asyncio.create_task(channel.sender.send(filled(1, size))) for _ in range(3)]
        await turns(3)  # one waits for room, two for their turn
        async with asyncio.timeout(PATIENCE):
            await channel.sender.aclose()
            errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [ClosedError] * 3
        assert channel.claimed_spans == 0
        assert len([message async for message in channel.receiver]) == count


async def test_closing_ends_sends_that_wait_for_frame_budget(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None, frame_budget=450_000, linger=0.01) as channel:
        await channel.sender.send(filled(1, 300_000))
        waiting = asyncio.create_task(channel.sender.send(filled(2, 300_000)))
        await turns(3)  # it waits
        assert not waiting.done()
        reading = asyncio.create_task(channel.receiver.recv())
        async with asyncio.timeout(PATIENCE):
            await channel.sender.aclose()
            with pytest.raises(ClosedError):
                await waiting
        assert shows(await reading, 1)


async def test_a_closed_sender_is_no_lost_sender(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.sender.aclose()
        with pytest.raises(ArenaError) as caught:
            await channel.receiver.recv()
        assert not isinstance(caught.value, PeerLostError)


# Forgetting to close --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_forgetting_to_close_warns_and_releases(new_loop: LoopFactory, end: str) -> None:
    async def forget() -> tuple[Sender, Receiver]:
        sender = Sender(1, name="forgotten", **SMALL_CHANNEL)
        await sender.start()
        receiver = Receiver(sender.handle, 0)
        await receiver.start()
        await sender.send(filled(1))
        await receiver.recv()
        if end == "sender":
            await receiver.aclose()
        else:
            await sender.aclose()
        return sender, receiver

    with asyncio.Runner(loop_factory=new_loop) as runner:
        kept = [runner.run(forget())]
    what = {"sender": "this Sender", "receiver": "reader 0"}[end]
    kept.clear()
    with pytest.warns(ResourceWarning, match=f"^{what} of channel 'forgotten' was never closed"):
        gc.collect()


def test_what_was_never_started_need_not_be_closed() -> None:
    """Neither warning nor leak; the fixtures look for both."""
    with no_collector():
        sender = Sender(1, backing="shm", arena=None, ring_bytes=RING_BYTES)
        Receiver(sender.handle, 0)
    del sender
    gc.collect()


async def test_an_evicted_reader_closes_and_comes_back(open_channel: OpenChannel) -> None:
    """In the same process too. What it had not received is free once it closed."""
    async with open_channel(1) as channel:
        sender, evicted = channel.sender, channel.receiver
        assert sender._members is not None
        await sender.send(torch.ones(1 << 18))
        sender._members.evict(0)
        with pytest.raises(EvictedError, match="close it and attach a new Receiver"):
            await evicted.recv()
        with pytest.raises(HandleError, match="close that Receiver or end the process"):
            await Receiver(sender.handle, 0).start()
        assert channel.slots_used == 1
        await evicted.aclose()
        async with Receiver(sender.handle, 0) as newcomer:
            assert channel.slots_used == 0
            await sender.send("after")
            assert await newcomer.recv() == "after"


async def test_a_reader_of_a_sender_that_was_dropped_unstarted() -> None:
    """The reader is told, as if it had been closed."""
    sender = Sender(1, **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 0)
    starting = asyncio.create_task(receiver.start())
    await turns(3)  # until it waits for its seat
    del sender
    receiver._tick()
    with pytest.raises(EndOfChannel, match="closed before reader 0 joined"):
        await starting


async def test_a_reader_that_waits_for_its_sender_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """After ten seconds, then after twenty, forty ..."""
    sender = Sender(1, **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 0)
    starting = asyncio.create_task(receiver.start())
    await turns(3)
    receiver._tick()
    assert not caplog.records
    receiver._asked -= 11
    for _ in range(2):
        receiver._tick()
    receiver._asked -= 10
    receiver._tick()
    assert [record.getMessage() for record in caplog.records] == [
        f"reader 0 of channel {sender.handle.name!r} is waiting for the sender (pid {os.getpid()}), running, to start, "
        f"since {seconds} s"
        for seconds in (11, 21)
    ]
    await receiver.aclose()
    with pytest.raises(ClosedError):
        await starting
    await sender.aclose()


@pytest.mark.parametrize(
    "damage",
    [
        {"address": "/tmp/a\0b"},
        {"address": ""},
        {"address": "/tmp/" + "y" * 200},
        {"sender": {"pid": -5}},
        {"sender": {"pid": 1 << 40}},
        {"nonce": None},
        {"control": {"path": "a\0b"}},
    ],
    ids=str,
)
async def test_a_damaged_handle_is_an_error_of_ours(damage: dict[str, Any]) -> None:
    async with Sender(1, **SMALL_CHANNEL) as sender:
        handle = sender.handle
        changes = {
            name: dataclasses.replace(getattr(handle, name), **value) if isinstance(value, dict) else value
            for name, value in damage.items()
        }
        with pytest.raises(HandleError, match="is damaged, pass it anew"):
            await Receiver(dataclasses.replace(handle, **changes), 0).start()
        async with Receiver(handle, 0) as receiver:
            await sender.send(1)
            assert await receiver.recv() == 1


async def test_a_close_that_is_cancelled_while_sends_wait(open_channel: OpenChannel) -> None:
    """The stream still ends in good order, with what was published."""
    async with open_channel(1) as channel:
        count = fill_ring(channel.sender)
        sending = asyncio.create_task(channel.sender.send("late"))
        await turns(3)
        closing = asyncio.create_task(channel.sender.aclose())
        await turns(1)
        closing.cancel()
        await asyncio.wait([closing, sending])
        assert closing.cancelled()
        assert isinstance(sending.exception(), ClosedError)
        for _ in range(count):
            await channel.receiver.recv()
        with pytest.raises(EndOfChannel):
            await channel.receiver.recv()
