"""Others on the loop get their turns, however much is sent and received. Counted in turns, never in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import ArenaConfig, DecodeError, EncodeError
from aioarena._asyncio import BREATH, BREATH_SHIFT
from aioarena._copying import ON_LOOP_BYTES
from tests.conftest import PATIENCE, OpenChannel
from tests.fronts.support import cancelled, filled, shows, turns, until


class Ticker:
    """A task that counts its turns.

    Attributes:
        turns: So far.
    """

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)  # a turn for the others


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[Ticker]:
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    await turns(1)  # until it runs
    try:
        yield ticker
    finally:
        task.cancel()
        await asyncio.wait([task])


async def longest_run(operation: Callable[[], Awaitable[Any]], count: int) -> int:
    """Most operations in a row, of ``count``, in which nobody else had a turn."""
    longest = run = 0
    async with ticking() as ticker:
        seen = ticker.turns
        for _ in range(count):
            await operation()
            run = run + 1 if ticker.turns == seen else 0
            seen = ticker.turns
            longest = max(longest, run)
    return longest


# Tight loops ----------------------------------------------------------------------------------------------------------


async def test_a_burst_of_sends_lets_others_run(open_channel: OpenChannel) -> None:
    async with open_channel(ring_bytes=1 << 20) as channel:
        assert await longest_run(lambda: channel.sender.send(1), 3000) <= BREATH
        assert channel.sender.statistics().waits == 0


async def test_a_burst_of_receives_lets_others_run(open_channel: OpenChannel) -> None:
    async with open_channel(ring_bytes=1 << 20) as channel:
        for number in range(3000):
            channel.sender.send_nowait(number)
        assert await longest_run(channel.receiver.recv, 3000) <= BREATH
        assert channel.receiver.statistics().messages == 3000


async def test_a_loop_over_messages_lets_others_run(open_channel: OpenChannel) -> None:
    async with open_channel(ring_bytes=1 << 20) as channel:
        for number in range(1000):
            channel.sender.send_nowait(number)
        await channel.sender.aclose()
        async with ticking() as ticker:
            before = ticker.turns
            assert len([message async for message in channel.receiver]) == 1000
            assert ticker.turns - before >= 1000 // (BREATH + 1)


async def test_senders_and_receivers_that_never_wait_let_others_run(open_channel: OpenChannel) -> None:
    """Each message is there when it is received: neither end ever has a reason to wait."""
    async with open_channel() as channel:

        async def both() -> None:
            await channel.sender.send(1)
            await channel.receiver.recv()

        assert await longest_run(both, 1000) <= BREATH


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "frames"])
async def test_copies_on_the_loop_count_by_their_size(open_channel: OpenChannel, arena: bool) -> None:
    """A burst of tensors that are just small enough to be copied on the loop."""
    nbytes = ON_LOOP_BYTES // 2
    allowed = (BREATH << BREATH_SHIFT) // nbytes + 2
    config = ArenaConfig(slots=64, slot_bytes=1 << 20, min_bytes=4096) if arena else None
    tensor = filled(1, nbytes)
    async with open_channel(arena=config) as channel:

        async def both() -> None:
            await channel.sender.send(tensor)
            if arena:
                channel.receiver.recv_nowait()

        assert await longest_run(both, 50) <= allowed
        if not arena:
            for _ in range(50):
                await channel.receiver.recv()


async def test_large_small_messages_count_by_their_size(open_channel: OpenChannel) -> None:
    async with open_channel(ring_bytes=4 << 20) as channel:
        message = b"x" * 15_000
        allowed = (BREATH << BREATH_SHIFT) // len(message) + 20
        assert await longest_run(lambda: channel.sender.send(message), 200) <= allowed


async def test_private_copies_on_the_loop_count_by_their_size(open_channel: OpenChannel) -> None:
    nbytes = ON_LOOP_BYTES // 2
    allowed = (BREATH << BREATH_SHIFT) // nbytes + 2
    config = ArenaConfig(slots=50, slot_bytes=1 << 20, min_bytes=4096)
    async with open_channel(arena=config, receiver={"private": True}) as channel:
        for number in range(50):
            await channel.sender.send(filled(number, nbytes))
        assert await longest_run(channel.receiver.recv, 50) <= allowed


async def test_sends_that_fail_let_others_run(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:

        async def fail() -> None:
            with pytest.raises(EncodeError):
                await channel.sender.send(threading.Lock())

        assert await longest_run(fail, 500) <= BREATH


class Broken:
    def __setstate__(self, state: Any) -> None:
        raise ValueError

    def __getstate__(self) -> int:
        return 1


async def test_receives_that_fail_let_others_run(open_channel: OpenChannel) -> None:
    async with open_channel(ring_bytes=1 << 20) as channel:
        for _ in range(500):
            channel.sender.send_nowait(Broken())

        async def fail() -> None:
            with pytest.raises(DecodeError):
                await channel.receiver.recv()

        assert await longest_run(fail, 500) <= BREATH


async def test_a_tight_loop_can_be_cancelled(open_channel: OpenChannel) -> None:
    """It ends within one breath."""
    async with open_channel(ring_bytes=1 << 20) as channel:
        counts = [0, 0]

        async def send_for_ever() -> None:
            while True:
                await channel.sender.send(1)
                counts[0] += 1

        async def receive_for_ever() -> None:
            while True:
                await channel.receiver.recv()
                counts[1] += 1

        sending = asyncio.create_task(send_for_ever())
        await until(lambda: counts[0] > BREATH)
        before = counts[0]
        await cancelled(sending)
        assert counts[0] - before <= BREATH
        receiving = asyncio.create_task(receive_for_ever())
        await until(lambda: counts[1] > 0)
        before = counts[1]
        await cancelled(receiving)
        assert before < counts[0]
        assert counts[1] - before <= BREATH


async def test_two_tight_loops_share_the_loop(open_channel: OpenChannel) -> None:
    """A sender and a receiver that do nothing else, in one loop: both get on."""
    async with open_channel() as channel, asyncio.timeout(PATIENCE):

        async def send_all() -> None:
            for number in range(5000):
                await channel.sender.send(number)

        sending = asyncio.create_task(send_all())
        assert [await channel.receiver.recv() for _ in range(5000)] == list(range(5000))
        await sending


async def test_spinning_lets_others_run(open_channel: OpenChannel) -> None:
    """And finds what is sent meanwhile without a wake-up."""
    async with open_channel(receiver={"spin": PATIENCE}) as channel:
        receiving = asyncio.create_task(channel.receiver.recv())
        async with ticking() as ticker:
            await until(lambda: ticker.turns > 50)
            before = channel.sender.statistics().wakeups
            await channel.sender.send("here")
            assert await receiving == "here"
        assert channel.receiver.statistics().parks == 0
        assert channel.sender.statistics().wakeups == before


async def test_spinning_gives_up_the_core(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """To other processes that are ready to run: with more of them than cores, the sender may be one."""
    yielded: list[int] = []
    monkeypatch.setattr("os.sched_yield", lambda: yielded.append(1))
    async with open_channel(receiver={"spin": PATIENCE}) as channel, asyncio.timeout(PATIENCE / 2):
        receiving = asyncio.create_task(channel.receiver.recv())
        await until(lambda: len(yielded) > 3)
        await channel.sender.send("here")
        assert await receiving == "here"


async def test_spinning_ends_in_parking(open_channel: OpenChannel) -> None:
    async with open_channel(receiver={"spin": 0.001}) as channel:
        receiving = asyncio.create_task(channel.receiver.recv())
        await until(lambda: channel.receiver.statistics().parks)
        await channel.sender.send("here")
        assert await receiving == "here"


async def test_spinning_ends_with_the_channel(open_channel: OpenChannel) -> None:
    async with open_channel(receiver={"spin": PATIENCE}) as channel, asyncio.timeout(PATIENCE / 2):
        receiving = asyncio.create_task(channel.receiver.recv())
        await turns(3)  # it spins
        await channel.receiver.aclose()
        with pytest.raises(Exception, match="is closed"):
            await receiving


# Large copies ---------------------------------------------------------------------------------------------------------

HUGE = ArenaConfig(slots=52, slot_bytes=4 << 20, min_bytes=64 << 10)
HUGE_BYTES = 200 << 20
# A copy of 200 MiB takes 10 ms or more, a turn of the loop some microseconds. Copied on the loop it would be 1 or 2 turns.
MANY_TURNS = 100


async def test_the_loop_keeps_turning_while_a_large_tensor_is_sent(open_channel: OpenChannel) -> None:
    async with open_channel(arena=HUGE) as channel:
        tensor = filled(7, HUGE_BYTES)
        async with ticking() as ticker:
            before = ticker.turns
            await channel.sender.send({"t": tensor})
            assert ticker.turns - before > MANY_TURNS
        message = await channel.receiver.recv()
        assert torch.equal(message["t"], tensor)
        assert channel.sender.statistics().arena_bytes == HUGE_BYTES


@pytest.mark.parametrize("kind", ["gathered", "array", "pickled", "frame"])
async def test_the_loop_keeps_turning_whatever_is_large(open_channel: OpenChannel, kind: str) -> None:
    nbytes = 96 << 20
    message: Any = {
        "gathered": lambda: filled(7, 2 * nbytes).view(-1, 2)[:, 0],
        "array": lambda: np.full(nbytes, 7, np.uint8),
        "pickled": lambda: b"\7" * nbytes,
        "frame": lambda: filled(7, nbytes),
    }[kind]()
    async with open_channel(arena=None if kind == "frame" else HUGE) as channel:
        async with ticking() as ticker:
            before = ticker.turns
            await channel.sender.send(message)
            assert ticker.turns - before > MANY_TURNS / 8
        received = await channel.receiver.recv()
        assert (np.frombuffer(received, np.uint8) if kind == "pickled" else np.asarray(received)).min() == 7


@pytest.mark.parametrize("smalls", [0, 20], ids=["alone", "beside a pack"])
async def test_the_loop_keeps_turning_while_a_private_copy_is_made(open_channel: OpenChannel, smalls: int) -> None:
    """Also of a message with so many small buffers that they travel together."""
    async with open_channel(arena=HUGE, receiver={"private": True}) as channel:
        await channel.sender.send([*[filled(number, 9_000) for number in range(smalls)], filled(7, 64 << 20)])
        async with ticking() as ticker:
            before = ticker.turns
            *rest, tensor = await channel.receiver.recv()
            assert ticker.turns - before > MANY_TURNS / 4
        assert shows(tensor, 7)
        assert all(shows(small, number) for number, small in enumerate(rest))
        assert channel.slots_used == 0


async def test_the_loop_keeps_turning_while_tensors_are_moved(open_channel: OpenChannel) -> None:
    async with open_channel(arena=HUGE) as channel:
        await channel.sender.send(filled(7, 64 << 20))
        message = await channel.receiver.recv()
        async with ticking() as ticker:
            before = ticker.turns
            tensor = await channel.receiver.to_device(message, "cpu")
            assert ticker.turns - before > MANY_TURNS / 4
        assert shows(tensor, 7)


async def test_small_copies_stay_on_the_loop(open_channel: OpenChannel) -> None:
    """Handing them to a thread would cost more than they do: no thread is started for them."""
    async with open_channel() as channel:
        for _ in range(5):
            await channel.sender.send([filled(1, 100_000), filled(2, 400_000)])
            await channel.receiver.recv()
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("aioarena")]
        assert names == []
        await channel.sender.send(filled(1, ON_LOOP_BYTES + 1))
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("aioarena")]
        assert names
