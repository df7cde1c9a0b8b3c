"""However a relay ends, it is told to all who wait for it, and is no good end where there was none."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import pytest

from aioarena import (
    ArenaError,
    HandleError,
    ReaderLostError,
    Receiver,
    Relay,
    Sender,
    SenderLostError,
    WrongContextError,
)
from tests.conftest import ARENA, RING_BYTES
from tests.fronts.support import filled, until
from tests.remote.proxy import Proxy
from tests.remote.test_channel import BIND, remote_sender


@contextlib.asynccontextmanager
async def attached(relay: Relay) -> Any:
    """A relay that is about to start, whose reader has its seat already."""
    start = asyncio.create_task(relay.start())
    async with Receiver(relay.handle, 0) as end:
        yield start, end


async def test_a_relay_that_finds_no_sender_is_no_good_end_for_its_readers() -> None:
    sender = remote_sender(0, 1, remote_timeout=0.3)
    async with attached(Relay(sender.handle, 1)) as (start, end):
        await sender.aclose()
        with pytest.raises(SenderLostError, match="nobody answers"):
            await start
        with pytest.raises(SenderLostError, match=r"ended before its end.*nobody answers"):
            await end.recv()


async def test_a_relay_whose_start_is_cancelled_is_no_good_end_for_its_readers() -> None:
    sender = remote_sender(0, 1)
    async with attached(Relay(sender.handle, 1)) as (start, end):
        start.cancel()
        await asyncio.wait([start])
        with pytest.raises(SenderLostError, match="its relay was closed"):
            await end.recv()
    await sender.aclose()


async def test_a_reader_that_has_not_come_further_than_the_memory_of_a_relay() -> None:
    """It waits for a socket that was there for a moment only, of a process that lives."""
    sender = remote_sender(0, 1, remote_timeout=30.0)
    relay = Relay(sender.handle, 1)
    early = Receiver(relay.handle, 0)
    attach = asyncio.create_task(early.start())
    await until(lambda: early._core is not None)
    early._wire.socket.disconnect(f"ipc://{relay.handle.address}")
    start = asyncio.create_task(relay.start())
    await until(lambda: relay._feed is not None)
    start.cancel()
    await asyncio.wait([start])
    with pytest.raises(SenderLostError):
        await attach
    await sender.aclose()


async def test_a_relay_does_not_wait_for_its_readers_when_the_sender_is_lost() -> None:
    """They might never come, and what waits for them is of a channel that is over."""
    async with (
        remote_sender(0, 1, remote_timeout=0.4) as sender,
        Proxy(sender.handle) as proxy,
        Relay(proxy.handle, 1) as relay,
    ):
        await sender.send(filled(1))
        await until(lambda: relay._mirror._stalls.running)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(SenderLostError, match="not heard of any more"):
            await relay.wait_closed()


async def test_a_lost_sender_takes_nothing_from_readers_that_have_attached() -> None:
    """Also what waits for room reaches them, before the end."""
    count = 40
    async with (
        remote_sender(0, 1, remote_timeout=0.4, ring_bytes=1 << 20) as sender,
        Proxy(sender.handle) as proxy,
        Relay(proxy.handle, 1, ring_bytes=RING_BYTES) as relay,
        Receiver(relay.handle, 0) as end,
    ):
        for number in range(count):
            await sender.send((number, b"x" * 4000))
        await until(lambda: relay._feed._position > count * 4000)
        proxy.refuse()
        proxy.cut()
        await until(lambda: relay._lost)
        for number in range(relay._feed._given):
            assert (await end.recv())[0] == number
        with contextlib.suppress(SenderLostError):
            while True:
                number += 1
                assert (await end.recv())[0] == number
        assert number == count


async def test_a_relay_whose_task_is_cancelled_says_so() -> None:
    """As by who cancels all tasks of a loop: nobody waits for it without end."""
    async with (
        remote_sender(0, 1) as sender,
        Relay(sender.handle, 1) as relay,
        Receiver(relay.handle, 0) as end,
    ):
        relay._task.cancel()
        with pytest.raises(ArenaError, match="was cancelled, and not by closing it"):
            await relay.wait_closed()
        with pytest.raises(SenderLostError, match="was cancelled"):
            await end.recv()
        await until(lambda: sender.statistics().readers[0].state == "lost")
        with pytest.raises(ReaderLostError, match="was cancelled"):
            await sender.send(1)


async def test_closing_a_relay_may_be_cancelled() -> None:
    """It is closed all the same, readers here know it, and so does the sender."""
    async with remote_sender(0, 1) as sender:
        relay = Relay(sender.handle, 1, arena=ARENA, ring_bytes=RING_BYTES)
        await relay.start()
        async with Receiver(relay.handle, 0) as end:
            await sender.send(1)
            await until(lambda: relay.received == 1)
            closing = asyncio.create_task(relay.aclose())
            await asyncio.sleep(0)  # it waits for its task
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert await end.recv() == 1
            with pytest.raises(SenderLostError, match="its relay was closed"):
                await end.recv()
            await until(lambda: sender.statistics().readers[0].state == "left")


async def test_a_relay_is_of_the_process_that_made_it() -> None:
    """Its handle names memory of that, so a forked child cannot start it."""
    sender = Sender(0, remote_readers=1, bind=BIND, arena=None)
    relay = Relay(sender.handle, 1)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            relay.start().send(None)
        except WrongContextError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as words:
        assert "this Relay of channel" in words.read()
    os.waitpid(pid, 0)
    await relay.aclose()
    await sender.aclose()


async def test_a_relay_too_many_takes_no_rank_of_one_that_only_lost_its_connection() -> None:
    """Without a rank of its own it takes those that are free."""
    async with (
        remote_sender(0, 1, remote_timeout=4.0) as sender,
        Proxy(sender.handle) as proxy,
        Relay(proxy.handle, 1) as relay,
    ):
        serving = sender._serving
        proxy.refuse()
        proxy.cut()
        await until(lambda: serving._links[0].member.away)
        extra = asyncio.create_task(Relay(sender.handle, 1).start())
        await until(lambda: serving._asking)
        proxy.refuse(False)
        with pytest.raises(HandleError, match=r"rank 0 is taken by reader 0 .*, connected from"):
            await extra
        async with Receiver(relay.handle, 0) as end:
            await sender.send(1)
            assert await end.recv() == 1


async def test_a_relay_takes_the_rank_of_one_that_is_gone() -> None:
    """As soon as that is certain, and before it is refused itself."""
    async with (
        remote_sender(0, 1, remote_timeout=1.0, on_reader_lost="continue") as sender,
        Proxy(sender.handle) as proxy,
        Relay(proxy.handle, 1) as relay,
    ):
        proxy.refuse()
        proxy.cut()
        await until(lambda: sender._serving._links[0].member.away)
        async with Relay(sender.handle, 1) as successor:
            assert successor.rank == 0
        with pytest.raises(ArenaError):
            await relay.wait_closed()
