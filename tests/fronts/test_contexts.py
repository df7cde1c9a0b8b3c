"""Loops, threads and channels in all combinations: what works, and what is refused with a clear error."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from aioarena import Handle, Receiver, Sender, WrongContextError
from tests.conftest import ARENA, PATIENCE, RING_BYTES, LoopFactory, OpenChannel
from tests.fronts.support import filled, shows, turns, until

SMALL_CHANNEL: dict[str, Any] = {"arena": ARENA, "ring_bytes": RING_BYTES}
WRONG = "lives on the event loop that started it; call it from a task there, e.g. with asyncio.run_coroutine_threadsafe"


def in_thread(work: Callable[[], Any]) -> Any:
    """Run in a foreign thread; its result, or its error raised here."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error
    return result


def on_loop(new_loop: LoopFactory, coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)


async def calls_of(sender: Sender, receiver: Receiver) -> None:
    """Each call, on a loop that is not theirs."""
    for call in (
        sender.send(1),
        sender.enqueue(1),
        sender.wait_ready(),
        receiver.recv(),
        receiver.dequeue(),
        anext(receiver),
        receiver.to_device(1, "cpu"),
        receiver.aclose(),
        sender.aclose(),
    ):
        with pytest.raises(WrongContextError, match=WRONG):
            await call
    plain_calls(sender, receiver)


def plain_calls(sender: Sender, receiver: Receiver) -> None:
    for call in (lambda: sender.send_nowait(1), receiver.recv_nowait, lambda: receiver.record_stream(torch.ones(1), None)):
        with pytest.raises(WrongContextError, match=WRONG):
            call()


async def works(sender: Sender, receiver: Receiver) -> None:
    await sender.send(filled(3))
    assert shows(await receiver.recv(), 3)


async def test_calls_from_a_foreign_thread_are_refused(open_channel: OpenChannel, new_loop: LoopFactory) -> None:
    """With a loop of its own, or without any. Looking at statistics is allowed."""
    async with open_channel() as channel:
        sender, receiver = channel.sender, channel.receiver
        in_thread(lambda: plain_calls(sender, receiver))
        in_thread(lambda: on_loop(new_loop, calls_of(sender, receiver)))
        assert in_thread(lambda: sender.statistics().messages) == 0
        assert in_thread(lambda: receiver.statistics().messages) == 0
        assert "open" in in_thread(lambda: repr(sender))
        await works(sender, receiver)


async def test_a_thread_can_send_through_the_loop(open_channel: OpenChannel) -> None:
    """As the error says."""
    async with open_channel() as channel:
        loop = asyncio.get_running_loop()

        def send() -> None:
            asyncio.run_coroutine_threadsafe(channel.sender.send(filled(5)), loop).result(PATIENCE)

        thread = threading.Thread(target=send)
        thread.start()
        assert shows(await channel.receiver.recv(), 5)
        await until(lambda: not thread.is_alive())
        thread.join()


def test_another_loop_in_the_same_thread_is_refused(new_loop: LoopFactory) -> None:
    """While the first is there, and after it ended."""

    async def start() -> tuple[Sender, Receiver]:
        sender = Sender(1, **SMALL_CHANNEL)
        await sender.start()
        receiver = Receiver(sender.handle, 0)
        await receiver.start()
        return sender, receiver

    async def close(sender: Sender, receiver: Receiver) -> None:
        await works(sender, receiver)
        await receiver.aclose()
        await sender.aclose()

    with asyncio.Runner(loop_factory=new_loop) as first:
        ends = first.run(start())
        on_loop(new_loop, calls_of(*ends))
        first.run(close(*ends))

    async def both_ends_closed() -> None:
        for end in ends:
            await end.aclose()

    on_loop(new_loop, both_ends_closed())


def test_a_second_loop_with_a_channel_of_its_own(new_loop: LoopFactory, open_channel: OpenChannel) -> None:
    async def use() -> None:
        async with open_channel() as channel:
            await works(channel.sender, channel.receiver)

    for _ in range(3):
        on_loop(new_loop, use())


def test_made_before_any_loop_and_in_another_thread(new_loop: LoopFactory) -> None:
    """Both ends bind to the loop that starts them."""
    sender = Sender(1, **SMALL_CHANNEL)
    receiver = in_thread(lambda: Receiver(sender.handle, 0))

    async def use() -> None:
        async with sender, receiver:
            await works(sender, receiver)

    on_loop(new_loop, use())


def test_two_loops_in_two_threads(new_loop: LoopFactory) -> None:
    """A sender in one, a receiver in the other, with messages of all kinds."""
    handles: queue.Queue[Handle] = queue.Queue()
    sizes = [100, 100_000, 1 << 20, 5 << 20, 0, 9_000]
    count = 120

    async def send() -> None:
        async with Sender(2, **SMALL_CHANNEL) as sender:
            for _ in range(2):
                handles.put(sender.handle)
            async with asyncio.timeout(PATIENCE):
                for number in range(count):
                    await sender.send((number, filled(number % 251, sizes[number % len(sizes)])))

    async def receive(rank: int) -> None:
        async with Receiver(handles.get(timeout=PATIENCE), rank) as receiver, asyncio.timeout(PATIENCE):
            number = 0
            async for got, tensor in receiver:
                assert got == number
                assert shows(tensor, number % 251)
                del tensor
                number += 1
            assert number == count

    failures: list[BaseException] = []

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            on_loop(new_loop, coroutine)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(coroutine,)) for coroutine in (send(), receive(0), receive(1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_channels_in_many_threads_at_once(new_loop: LoopFactory, open_channel: OpenChannel) -> None:
    """They share a ZMQ context, which comes and goes with them."""
    failures: list[BaseException] = []

    async def use() -> None:
        for number in range(5):
            async with open_channel() as channel, asyncio.timeout(PATIENCE):
                for size in (10, 1 << 20, 5 << 20):
                    await channel.sender.send(filled(number, size))
                    assert shows(await channel.receiver.recv(), number)

    def run() -> None:
        try:
            on_loop(new_loop, use())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


async def test_several_channels_in_one_loop(open_channel: OpenChannel) -> None:
    """Messages of one never come out of another, closing one leaves the others alone."""
    async with open_channel(2) as first, open_channel() as second, open_channel(arena=None) as third:
        channels = [first, second, third]
        for number in range(30):
            for index, channel in enumerate(channels):
                await channel.sender.send((index, number, filled(number, [100, 100_000, 1 << 20][number % 3])))
            for index, channel in enumerate(channels):
                for receiver in channel.receivers:
                    origin, got, tensor = await receiver.recv()
                    assert (origin, got) == (index, number)
                    assert shows(tensor, number)
                    del tensor
        await second.receiver.aclose()
        await second.sender.aclose()
        for channel in (first, third):
            await channel.sender.send("still")
            assert await channel.receiver.recv() == "still"


async def test_waiting_on_several_channels_at_once(open_channel: OpenChannel) -> None:
    """Each wake-up finds its own receiver."""
    async with open_channel() as first, open_channel() as second, asyncio.timeout(PATIENCE):
        for number in range(20):
            waiting = [asyncio.create_task(channel.receiver.recv()) for channel in (first, second)]
            await turns(number % 4)  # parked, or not yet
            await second.sender.send(("second", number))
            assert await waiting[1] == ("second", number)
            assert not waiting[0].done()
            await first.sender.send(("first", number))
            assert await waiting[0] == ("first", number)


async def test_a_relay(open_channel: OpenChannel) -> None:
    """A receiver of one channel and a sender of another, in one process."""
    async with open_channel() as upstream, open_channel(2) as downstream, asyncio.timeout(PATIENCE):

        async def relay() -> None:
            async for message in upstream.receiver:
                await downstream.sender.send(message)
                del message

        relaying = asyncio.create_task(relay())
        sizes = [100, 100_000, 1 << 20, 5 << 20]
        for number in range(20):
            await upstream.sender.send((number, filled(number, sizes[number % 4])))
            for receiver in downstream.receivers:
                got, tensor = await receiver.recv()
                assert got == number
                assert shows(tensor, number)
                del tensor
        await upstream.sender.aclose()
        await relaying
        assert upstream.slots_used == 0
        assert downstream.slots_used == 0


async def test_a_ping_pong_of_two_channels(open_channel: OpenChannel) -> None:
    """Each end waits for the other, again and again: no wake-up is lost."""
    async with open_channel() as there, open_channel() as back, asyncio.timeout(PATIENCE):

        async def answer() -> None:
            async for number in there.receiver:
                await back.sender.send(number + 1)

        answering = asyncio.create_task(answer())
        for number in range(300):
            await there.sender.send(number)
            assert await back.receiver.recv() == number + 1
        await there.sender.aclose()
        await answering
