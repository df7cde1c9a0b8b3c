"""Cancelling: a receive loses nothing, a send happens for all readers or for none, and both end as cancelled."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from aioarena import EncodeError, Receiver, Sender, WouldBlock
from aioarena._codec import MemorySource
from aioarena._copying import Portion, default_threads
from tests.conftest import ARENA, PATIENCE, RING_BYTES, Channel, OpenChannel
from tests.fronts.support import cancelled, fill_ring, filled, in_arena, parked, shows, turns, until

SIZES = {"ring": 100, "arena": 100_000, "frame": 5 << 20}


def numbered(number: int, size: int) -> tuple[int, torch.Tensor]:
    return number, filled(number % 251, size)


async def receives(receiver: Receiver, number: int) -> None:
    """The next message is this one, whole."""
    async with asyncio.timeout(PATIENCE):
        got, tensor = await receiver.recv()
    assert got == number
    assert shows(tensor, number % 251)


async def nothing_more(channel: Channel) -> None:
    """No message is left, nor a slot in use."""
    for receiver in channel.receivers:
        with pytest.raises(WouldBlock, match="no message"):
            receiver.recv_nowait()
    assert channel.slots_used == 0
    assert channel.claimed_spans == 0
    assert channel.sender.statistics().frames_pending == 0


# Receiving ------------------------------------------------------------------------------------------------------------


async def result_or_cancelled(task: asyncio.Task[Any]) -> Any:
    """What a task ended with after a cancellation: its value, or None."""
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


async def woken(receiver: Receiver, task: asyncio.Task[Any]) -> None:
    """Until the wake-up for a task that receives has arrived."""
    await until(lambda: any(waiter.done() for waiter in receiver._waiters) or task.done())


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("steps", range(5))
async def test_a_cancelled_recv_loses_nothing(open_channel: OpenChannel, size: int, steps: int, private: bool) -> None:
    """Cancelled 0 to 4 turns of the loop after the message was sent, or after its wake-up arrived."""
    async with open_channel(receiver={"private": private}) as channel:
        receiver = channel.receiver
        for number, from_wake_up in enumerate((False, True)):
            task = asyncio.create_task(receiver.recv())
            await parked(receiver)
            await channel.sender.send(numbered(number, size))
            if from_wake_up:
                await woken(receiver, task)
            await turns(steps)
            task.cancel()
            value = await result_or_cancelled(task)
            if value is None:
                await receives(receiver, number)
            else:
                assert value[0] == number
                assert shows(value[1], number)
            del task, value
            await turns(1)  # the loop still has what woke this task
        await nothing_more(channel)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("steps", range(4))
async def test_of_two_receives_one_is_cancelled(open_channel: OpenChannel, size: int, steps: int) -> None:
    """The message goes to the other; the next one to whoever comes then."""
    async with open_channel() as channel:
        first = asyncio.create_task(channel.receiver.recv())
        second = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        await channel.sender.send(numbered(1, size))
        await turns(steps)
        first.cancel()
        value = await result_or_cancelled(first)
        if value is None:
            async with asyncio.timeout(PATIENCE):
                value = await second
        else:
            await cancelled(second)
        assert value[0] == 1
        del first, second, value
        await channel.sender.send(numbered(2, size))
        await receives(channel.receiver, 2)
        await turns(1)  # the loop still has what woke this task
        await nothing_more(channel)


async def test_a_recv_that_waits_for_its_turn_can_be_cancelled(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        waiting = [asyncio.create_task(channel.receiver.recv()) for _ in range(4)]
        await parked(channel.receiver)
        await cancelled(waiting[1])
        await cancelled(waiting[0])
        await channel.sender.send("a")
        await channel.sender.send("b")
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*waiting[2:]) == ["a", "b"]


async def test_receives_with_short_timeouts_get_the_exact_sequence(open_channel: OpenChannel) -> None:
    seed = 3
    pick = random.Random(seed)
    count = 300

    async def send_all(sender: Sender) -> None:
        for number in range(count):
            await sender.send(numbered(number, pick.choice([100, 1000, 100_000, 1 << 20, 5 << 20][: 3 + number % 3])))
            await turns(pick.randrange(30))  # gaps of all kinds

    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        sending = asyncio.create_task(send_all(channel.sender))
        number = timeouts = 0
        while number < count:
            try:
                async with asyncio.timeout(pick.choice([0, 0.0001, 0.001, 0.002])):
                    got, tensor = await channel.receiver.recv()
            except TimeoutError:
                timeouts += 1
                continue
            assert got == number, f"seed {seed}"
            assert shows(tensor, number % 251)
            del tensor
            number += 1
        await sending
        assert timeouts > 10
        await nothing_more(channel)


async def test_a_timeout_of_nothing_loses_nothing(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for number in range(150):  # more than a task may receive without giving others a turn
            await channel.sender.send(number)
            got: list[int] = []
            try:
                async with asyncio.timeout(0):
                    got.append(await channel.receiver.recv())
            except TimeoutError:
                pass
            if not got:
                got.append(await channel.receiver.recv())
            assert got == [number]


class SlowToUnpickle:
    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        time.sleep(0.005)  # work that takes longer than the receive may
        self.__dict__.update(state)


async def test_a_message_that_takes_longer_to_unpickle_than_the_timeout(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for number in range(10):
            task = asyncio.create_task(channel.receiver.recv())
            await parked(channel.receiver)
            await channel.sender.send(SlowToUnpickle(number))
            try:
                async with asyncio.timeout(0.002):
                    message = await asyncio.shield(task)
            except TimeoutError:
                task.cancel()
                message = await result_or_cancelled(task) or await channel.receiver.recv()
            assert message.number == number


async def test_a_recv_cancelled_in_its_breath_loses_nothing(open_channel: OpenChannel) -> None:
    """In the turn that it gives to others after many receives that did not wait."""
    async with open_channel(ring_bytes=1 << 20) as channel:
        for number in range(500):
            await channel.sender.send(number)
        got = []
        while len(got) < 500:
            task = asyncio.create_task(channel.receiver.recv())
            await turns(1)  # enough for a receive that need not wait
            if not task.done():
                task.cancel()
            value = await result_or_cancelled(task)
            if value is not None:
                got.append(value)
        assert got == list(range(500))


# Copies that wait until they are told to go on ------------------------------------------------------------------------


class Gate:
    """Holds up copies of large memory in their threads."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.open = threading.Event()
        self.inside = 0
        self.entered = 0

    def hold(self, portion: Portion) -> Portion:
        def held_copy(start: int, stop: int) -> object:
            self.inside += 1
            self.entered += 1
            self.began.set()
            try:
                assert self.open.wait(PATIENCE)
                return portion.copy(start, stop)
            finally:
                self.inside -= 1

        return portion._replace(copy=held_copy)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Copies of more than 512 KiB wait until it is opened."""
    gate = Gate()
    portions = MemorySource.portions

    def gated(self: MemorySource, destination: int) -> list[Portion]:
        large = self.nbytes > 512 << 10
        return [gate.hold(portion) if large else portion for portion in portions(self, destination)]

    monkeypatch.setattr(MemorySource, "portions", gated)
    return gate


LARGE_SIZES = {"arena": 2 << 20, "frame": 5 << 20, "many steps": 40 << 20}


@pytest.mark.parametrize("size", LARGE_SIZES.values(), ids=LARGE_SIZES)
async def test_a_send_cancelled_in_its_copy_ends_when_the_threads_let_go(
    open_channel: OpenChannel, gate: Gate, size: int
) -> None:
    """Not before: until then they read the caller's memory. And then without the steps that had not begun."""
    async with open_channel() as channel:
        tensor = filled(1, size)
        task = asyncio.create_task(channel.sender.send(tensor))
        await until(gate.began.is_set)
        task.cancel()
        await turns(20)  # it would be done by now if it did not wait
        task.cancel()
        await turns(20)
        assert not task.done()
        assert gate.inside > 0
        gate.open.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert gate.inside == 0
        assert gate.entered <= default_threads()
        tensor.fill_(2)
        await channel.sender.send(numbered(7, 100_000))
        await receives(channel.receiver, 7)
        await nothing_more(channel)
        assert channel.sender.statistics().messages == 1


async def test_others_go_on_when_a_send_is_cancelled_in_its_copy(open_channel: OpenChannel, gate: Gate) -> None:
    async with open_channel() as channel:
        large = asyncio.create_task(channel.sender.send(filled(1, 2 << 20)))
        await until(gate.began.is_set)
        others = [asyncio.create_task(channel.sender.send(numbered(number, 100_000))) for number in range(3)]
        await turns(5)  # they wait for their turn
        assert not any(task.done() for task in others)
        large.cancel()
        await turns(5)
        gate.open.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*others)
        assert large.cancelled()
        for number in range(3):
            await receives(channel.receiver, number)
        await nothing_more(channel)


async def test_closing_waits_for_the_threads_of_a_send(open_channel: OpenChannel, gate: Gate) -> None:
    async with open_channel() as channel:
        large = asyncio.create_task(channel.sender.send(filled(1, 2 << 20)))
        await until(gate.began.is_set)
        closing = asyncio.create_task(channel.sender.aclose())
        await turns(20)  # it would be done by now if it did not wait
        assert not closing.done()
        gate.open.set()
        async with asyncio.timeout(PATIENCE):
            await closing
        with pytest.raises(Exception, match="is closed"):
            await large
        assert channel.claimed_spans == 0


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_private_copy_can_be_cancelled(open_channel: OpenChannel, gate: Gate, steps: int) -> None:
    """The message stays, and comes with the next receive."""
    async with open_channel(receiver={"private": True}) as channel:
        gate.open.set()
        await channel.sender.send(numbered(1, 2 << 20))
        gate.open.clear()
        gate.began.clear()
        task = asyncio.create_task(channel.receiver.recv())
        await until(gate.began.is_set)
        task.cancel()
        await turns(20)  # it would be done by now if it did not wait
        assert not task.done()
        gate.open.set()
        await asyncio.wait([task])
        assert task.cancelled()
        await turns(steps)
        await receives(channel.receiver, 1)
        await nothing_more(channel)


async def test_closing_during_a_private_copy(open_channel: OpenChannel, gate: Gate) -> None:
    async with open_channel(receiver={"private": True}) as channel:
        gate.open.set()
        await channel.sender.send(numbered(1, 2 << 20))
        gate.open.clear()
        gate.began.clear()
        task = asyncio.create_task(channel.receiver.recv())
        await until(gate.began.is_set)
        closing = asyncio.create_task(channel.receiver.aclose())
        await turns(20)  # the loop goes on turning; the close would be done by now if it did not wait
        assert not closing.done()
        gate.open.set()
        async with asyncio.timeout(PATIENCE):
            await closing
            with pytest.raises(Exception, match="is closed"):
                await task
        await until(lambda: channel.slots_used == 0)


# Sending --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 2 << 20, 5 << 20], ids=["ring", "arena", "frame"])
async def test_a_send_that_waits_for_readers_can_be_cancelled(size: int) -> None:
    async with Sender(1, arena=ARENA, ring_bytes=RING_BYTES) as sender:
        tasks = [asyncio.create_task(sender.send(numbered(number, size))) for number in range(4)]
        await turns(2)  # until they wait
        await cancelled(tasks[0])
        await cancelled(tasks[2])
        async with Receiver(sender.handle, 0) as receiver:
            await receives(receiver, 1)
            await receives(receiver, 3)
            await asyncio.gather(tasks[1], tasks[3])
            await nothing_more(Channel(sender, [receiver]))


@pytest.mark.parametrize("size", [100, 100_000, 2 << 20, 5 << 20], ids=["ring", "arena", "threads", "frame"])
async def test_a_send_that_waits_for_room_can_be_cancelled(open_channel: OpenChannel, size: int) -> None:
    """First in line, or behind others."""
    async with open_channel(2) as channel:
        count = fill_ring(channel.sender)
        tasks = [asyncio.create_task(channel.sender.send(numbered(number, size))) for number in range(5)]
        await until(lambda: channel.sender.statistics().waits)
        await cancelled(tasks[3])
        await cancelled(tasks[0])
        await turns(3)  # the next in line waits now
        await cancelled(tasks[1])
        for receiver in channel.receivers:
            for _ in range(count):
                await receiver.recv()
        for number in (2, 4):
            for receiver in channel.receivers:
                await receives(receiver, number)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(tasks[2], tasks[4])
        await nothing_more(channel)
        assert channel.sender.statistics().messages == count + 2


async def test_a_send_that_waits_for_frame_budget_can_be_cancelled(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None, frame_budget=450_000) as channel:
        await channel.sender.send(numbered(0, 300_000))
        tasks = [asyncio.create_task(channel.sender.send(numbered(number, 300_000))) for number in (1, 2)]
        await until(lambda: channel.sender.statistics().waits)
        assert channel.sender.statistics().frames_pending == 300_000
        await cancelled(tasks[0])
        await receives(channel.receiver, 0)
        async with asyncio.timeout(PATIENCE):
            await tasks[1]
        await receives(channel.receiver, 2)
        await nothing_more(channel)


async def test_a_frame_larger_than_the_budget_goes_alone(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None, frame_budget=50_000) as channel:
        await channel.sender.send(numbered(0, 300_000))
        second = asyncio.create_task(channel.sender.send(numbered(1, 300_000)))
        await turns(5)  # it waits
        assert not second.done()
        await receives(channel.receiver, 0)
        await receives(channel.receiver, 1)
        await second


async def test_a_send_cancelled_in_its_breath_was_not_sent(open_channel: OpenChannel) -> None:
    async with open_channel(ring_bytes=1 << 20) as channel:
        sent = []
        breaths = 0
        for number in range(500):
            task = asyncio.create_task(channel.sender.send(number))
            await turns(1)  # enough for a send that need not wait
            if not task.done():
                breaths += 1
                await cancelled(task)
            else:
                sent.append(number)
        assert breaths > 2
        assert [channel.receiver.recv_nowait() for _ in sent] == sent
        await nothing_more(channel)


@pytest.mark.parametrize("arena", [True, False])
async def test_many_cancelled_sends_reach_all_readers_or_none(open_channel: OpenChannel, arena: bool) -> None:
    """Two hundred, each cancelled after a few turns, with the ring mostly full; the others keep their order."""
    seed = 5
    pick = random.Random(seed)
    got: list[list[int]] = [[], []]

    async def read(receiver: Receiver, numbers: list[int]) -> None:
        while True:
            number, tensor = await receiver.recv()
            if number < 0:
                return
            assert shows(tensor, number % 251)
            numbers.append(number)
            await turns(pick.randrange(20))  # slower than the sender

    async with open_channel(2, arena=ARENA if arena else None, frame_budget=1 << 20) as channel, asyncio.timeout(PATIENCE):
        reading = [asyncio.create_task(read(r, n)) for r, n in zip(channel.receivers, got, strict=True)]
        sent, unsent = [], []
        sending: list[tuple[int, asyncio.Task[None]]] = []
        for number in range(200):
            size = pick.choice([100, 7_000, 7_000, 100_000, 700_000])
            sending.append((number, asyncio.create_task(channel.sender.send(numbered(number, size)))))
            await turns(pick.randrange(6))  # before some are cancelled
            for _, task in sending:
                if not task.done() and pick.random() < 0.3:
                    task.cancel()
            for other, task in [entry for entry in sending if entry[1].done()]:
                (unsent if task.cancelled() else sent).append(other)
                sending.remove((other, task))
        await asyncio.wait([task for _, task in sending] or [asyncio.create_task(turns(1))])
        for number, task in sending:
            (unsent if task.cancelled() else sent).append(number)
        await channel.sender.send((-1, None))
        await asyncio.gather(*reading)
        assert got[0] == got[1] == sorted(sent), f"seed {seed}"
        assert len(sent) > 20, "too few were sent for the test to mean something"
        assert len(unsent) > 20, "too few were cancelled for the test to mean something"
        sending.clear()
        del task
        await turns(1)  # the loop still has what woke this task
        await nothing_more(channel)


async def test_a_send_that_timed_out_says_whom_it_waited_for(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        count = fill_ring(channel.sender)
        fast, _ = channel.receivers
        for _ in range(count):
            await fast.recv()
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.01):
                await channel.sender.send("late")
        notes = " ".join(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
        assert "reader 1 (pid" in notes
        assert f"{count} messages" in notes


@pytest.mark.parametrize("call", ["send", "wait_ready"])
async def test_a_wait_for_readers_that_timed_out_names_them(call: str) -> None:
    async with Sender(3, arena=None, ring_bytes=RING_BYTES) as sender, Receiver(sender.handle, 1):
        waiting = sender.send(1) if call == "send" else sender.wait_ready()
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.01):
                await waiting
        assert "waiting for readers [0, 2]" in " ".join(caught.value.__cause__.__notes__)  # type: ignore[union-attr]


# Sends that fail ------------------------------------------------------------------------------------------------------


class Unreducible:
    def __reduce__(self) -> Any:
        raise ValueError("not today")


class SendsWhilePickled:
    """Sends while it is pickled."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    def __reduce__(self) -> Any:
        self.sender.send_nowait("from the inside")
        return int, ()


def three_tensors_and_a_lock(sender: Sender) -> object:
    return {"a": filled(1), "b": [filled(2), filled(3, 5 << 20)], "c": threading.Lock()}


FAILING: dict[str, Callable[[Sender], object]] = {
    "lambda": lambda sender: lambda: 0,
    "tensors and a lock": three_tensors_and_a_lock,
    "reduce raises": lambda sender: [filled(1), Unreducible()],
    "reduce sends": lambda sender: [filled(1), SendsWhilePickled(sender)],
}


async def send(sender: Sender, obj: object, nowait: bool) -> None:
    if nowait:
        sender.send_nowait(obj)
    else:
        await sender.send(obj)


@pytest.mark.parametrize("nowait", [False, True])
@pytest.mark.parametrize("name", FAILING)
async def test_a_send_that_fails_sends_nothing(open_channel: OpenChannel, name: str, nowait: bool) -> None:
    async with open_channel(2) as channel:
        for round_ in range(2):
            obj = FAILING[name](channel.sender)
            with pytest.raises(EncodeError):
                await send(channel.sender, obj, nowait)
            assert channel.claimed_spans == 0
            assert channel.slots_used == 0
            assert channel.sender.statistics().messages == round_
            await channel.sender.send(numbered(round_, 100_000))
            for receiver in channel.receivers:
                got, tensor = await receiver.recv()
                assert got == round_
                assert in_arena(receiver, tensor)
                del tensor
        await nothing_more(channel)


async def test_a_send_that_fails_between_others_disturbs_neither(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        calls: list[Awaitable[None]] = []
        for number in range(10):
            calls.append(channel.sender.send(numbered(number, 700_000 if number % 2 else 100)))
            calls.append(channel.sender.send([filled(3), lambda: 0]))
        results = asyncio.gather(*calls, return_exceptions=True)
        for number in range(10):
            await receives(channel.receiver, number)
        assert [type(result) for result in await results] == [type(None), EncodeError] * 10
        await nothing_more(channel)


async def test_a_copy_that_fails_fails_the_send(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in a thread comes out of the call, and the channel lives on."""

    def broken(self: MemorySource, destination: int) -> list[Portion]:
        def fail(start: int, stop: int) -> None:
            raise OSError("the memory is gone")

        return [Portion(self.nbytes, 1, fail)] * 3

    async with open_channel() as channel:
        for size in (100_000, 2 << 20, 5 << 20):
            with monkeypatch.context() as patch:
                patch.setattr(MemorySource, "portions", broken)
                with pytest.raises(OSError, match="the memory is gone"):
                    await channel.sender.send(filled(1, size))
            assert channel.claimed_spans == 0
            await channel.sender.send(numbered(1, size))
            await receives(channel.receiver, 1)
        await nothing_more(channel)


@pytest.mark.parametrize("call", ["start", "aclose"])
async def test_a_reader_cancelled_at_any_turn_of_its_start_or_close_is_not_a_lost_one(call: str) -> None:
    """Not even while it has a seat that it does not know of. Its rank can be taken at once."""
    async with Sender(1, arena=None, ring_bytes=RING_BYTES, on_reader_lost="raise") as sender:
        wait, whole = 1, 0
        while whole < 3:  # cancelled later and later, until it is through before
            receiver = Receiver(sender.handle, 0)
            if call == "aclose":
                await receiver.start()
            task = asyncio.create_task(receiver.start() if call == "start" else receiver.aclose())
            await turns(wait)
            task.cancel()
            await asyncio.wait([task])
            whole += not task.cancelled()
            wait += 1
            if call == "start" and not task.cancelled():
                await receiver.aclose()
            async with Receiver(sender.handle, 0) as successor:
                await sender.send(wait)
                assert await successor.recv() == wait
        assert wait > 3
    assert not sender._members.lost  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["a message", "the rest of a message"])
async def test_a_receive_that_timed_out_says_whom_it_waited_for(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    under_way: list[Any] = []
    async with open_channel(arena=None) as channel:
        await channel.sender.send(0)
        assert await channel.receiver.recv() == 0
        if what != "a message":
            monkeypatch.setattr(channel.sender._wire, "send_frames", lambda *frames: under_way.append(frames))
            await channel.sender.send(numbered(1, 300_000))
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.01):
                await channel.receiver.recv()
        (note,) = caught.value.__cause__.__notes__  # type: ignore[union-attr]
        assert note.startswith("reader 0 of channel")
        assert f"received 1 messages and was waiting for {what}" in note
        assert f"from the sender (pid {os.getpid()}), running" in note
        if under_way:
            monkeypatch.undo()
            channel.sender._wire.send_frames(*under_way[0])  # type: ignore[union-attr]
            await receives(channel.receiver, 1)
        await nothing_more(channel)


async def test_a_reader_waits_a_moment_for_a_rank_that_is_about_to_be_left() -> None:
    """Between the last words of one connection and the first of another there is no order."""
    async with Sender(1, arena=None, ring_bytes=RING_BYTES) as sender:
        first, second = Receiver(sender.handle, 0), Receiver(sender.handle, 0)
        await first.start()
        contending = sender._members._contending  # type: ignore[union-attr]
        task = asyncio.create_task(second.start())
        await until(lambda: contending)
        await cancelled(task)
        await until(lambda: not contending)  # it took back what it asked for
        third = Receiver(sender.handle, 0)
        task = asyncio.create_task(third.start())
        await until(lambda: contending)
        await first.aclose()
        await task
        assert not contending
        await sender.send(1)
        assert await third.recv() == 1
        await third.aclose()


async def test_a_waiter_that_is_cancelled_while_it_is_woken() -> None:
    """As by Ctrl-C, whose handler cancels a task wherever the loop is: the others are woken all the same."""

    class Interrupted(asyncio.Future[None]):
        def done(self) -> bool:
            done = super().done()
            self.cancel()
            return done

    async with Sender(1) as sender:
        interrupted: list[asyncio.Future[None]] = [Interrupted(), Interrupted()]
        other = asyncio.get_running_loop().create_future()
        sender._waiters |= {*interrupted, other}
        sender._notify()
        assert other.done()
        assert all(future.cancelled() for future in interrupted)
        sender._waiters -= {*interrupted, other}
