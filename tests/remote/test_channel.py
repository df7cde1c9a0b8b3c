"""A channel whose readers are here and elsewhere: the same messages, in the same order, to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import aioarena
from aioarena import (
    ArenaConfig,
    EndOfChannel,
    EvictedError,
    HandleError,
    ReaderLostError,
    Receiver,
    Relay,
    Sender,
    SenderLostError,
)
from tests.conftest import ARENA, RING_BYTES
from tests.fronts.support import filled, in_arena, shows, turns, until
from tests.remote.proxy import Proxy

BIND = "tcp://127.0.0.1:0"


@dataclass
class Remote:
    sender: Sender
    proxy: Proxy
    local: Receiver
    remote: Receiver

    @property
    def rank(self) -> int:
        return self.remote.rank


def remote_sender(readers: int = 1, remote_readers: int = 1, **options: Any) -> Sender:
    return Sender(
        readers,
        **{"arena": ARENA, "ring_bytes": RING_BYTES, "remote_readers": remote_readers, "bind": BIND, **options},
    )


@contextlib.asynccontextmanager
async def opened(*, receiver: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Remote]:
    """A sender, a reader here and one behind a wire that the test can cut."""
    async with (
        remote_sender(**options) as sender,
        Proxy(sender.handle) as proxy,
        Receiver(sender.handle, 0) as local,
        Receiver(proxy.handle, 1, **(receiver or {})) as remote,
    ):
        yield Remote(sender, proxy, local, remote)


def message(number: int) -> Any:
    """One for each way to travel, and each mixture."""
    match number % 6:
        case 0:
            return number
        case 1:
            return {"n": number, "array": np.full(100, number), "bytes": b"x" * 3000}
        case 2:
            return number, filled(number % 251)  # arena
        case 3:
            return [filled(number % 251, 100), filled(number % 251, 1 << 16), torch.empty(0), filled(number % 251, 5 << 20)]
        case 4:
            return {
                "parts": [np.full(50, (number + i) % 251, np.uint8) for i in range(300)],
                "large": filled(number % 251, 1 << 19),
            }
        case _:
            return "x" * (1 << 20)  # the pickled bytes themselves are large


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


async def expect(receiver: Receiver, first: int, count: int) -> None:
    for number in range(first, first + count):
        got = await receiver.recv()
        assert same(got, message(number)), f"message {number} of {receiver!r}"
        del got


@pytest.mark.parametrize("arena", [ARENA, None, ArenaConfig(slots=2, slot_bytes=1 << 20, min_bytes=1 << 12)])
async def test_all_readers_get_the_same(arena: ArenaConfig | None) -> None:
    """By every way, in order, once; with an arena, without, and with one that is mostly too small."""
    async with opened(arena=arena) as channel:
        readers = [asyncio.create_task(expect(end, 0, 36)) for end in (channel.local, channel.remote)]
        for number in range(36):
            await channel.sender.send(message(number))
        await asyncio.gather(*readers)
        await until(lambda: channel.sender.statistics().slots_used == 0)
        await until(lambda: channel.sender.statistics().frames_pending == 0)


async def test_large_tensors_lie_in_an_arena_there() -> None:
    """So that they can be pinned, and cost no copy after the one off the wire; lent memory, too."""
    async with opened() as channel:
        await channel.sender.send(filled(1))
        lent = await channel.sender.empty(1 << 20, torch.uint8)
        lent.fill_(2)
        await channel.sender.send(lent)
        for value in (1, 2):
            received = await channel.remote.recv()
            assert in_arena(channel.remote, received) and shows(received, value)
            await channel.local.recv()
            del received
        await channel.sender.reclaim(lent)


async def test_what_is_held_there_holds_nothing_here() -> None:
    """A remote reader's tensors are its own: the sender's slots are free once the bytes are over."""
    async with opened() as channel:
        await channel.sender.send(filled(1))
        held = await channel.remote.recv()
        await channel.local.recv()
        await until(lambda: channel.sender.statistics().slots_used == 0)
        for number in range(2, 12):
            await channel.sender.send(filled(number))
            assert shows(await channel.remote.recv(), number)
            await channel.local.recv()
        assert shows(held, 1)


async def test_the_caller_owns_its_memory_again() -> None:
    """When send has returned, whatever is overwritten is not what a remote reader gets."""
    async with opened() as channel:
        for nbytes in (100, 1 << 20, 6 << 20):
            tensor = filled(1, nbytes)
            channel.proxy.hold()
            await channel.sender.send(tensor)
            tensor.fill_(9)
            channel.proxy.release()
            assert shows(await channel.remote.recv(), 1)
            await channel.local.recv()


async def test_the_end_comes_after_everything() -> None:
    """Close waits until remote readers have all of it."""
    async with opened() as channel:
        for number in range(12):
            await channel.sender.send(message(number))
            await expect(channel.local, number, 1)
        await channel.sender.aclose()
        await expect(channel.remote, 0, 12)
        for end in (channel.local, channel.remote):
            with pytest.raises(EndOfChannel):
                await end.recv()


async def test_a_remote_reader_that_does_not_read_bounds_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    """It holds sends up like a local one, and the warning names it, its process and its host."""
    async with opened(stall_after=0.0, ring_bytes=RING_BYTES) as channel:
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await channel.sender.send(b"x" * 4000)
                sent += 1

        async def drain() -> None:
            while True:
                await channel.local.recv()

        tasks = [asyncio.create_task(send()), asyncio.create_task(drain())]
        await until(lambda: channel.sender.statistics().waits and channel.sender._stalls._needed is not None)
        status = channel.sender.statistics().readers[1]
        assert status.messages_behind > 0 and status.state == "joined"
        channel.sender._tick()
        channel.sender._tick()
        assert any("reader 1 (pid" in text and "on host" in text and "behind" in text for text in caplog.messages)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        for _ in range(sent):
            assert await channel.remote.recv() == b"x" * 4000
        tasks[1].cancel()
        await asyncio.wait(tasks)


async def test_eviction_is_told_with_what_is_missed() -> None:
    async with opened(evict_after=0.0) as channel:

        async def drain() -> None:
            with contextlib.suppress(EndOfChannel):
                while True:
                    await channel.local.recv()

        task = asyncio.create_task(drain())
        sent = 0
        while channel.sender.statistics().readers[1].state == "joined":
            send = asyncio.create_task(channel.sender.send(b"x" * 4000))
            while not send.done():
                await asyncio.sleep(0)
                channel.sender._stalls.tick()
            sent += 1
        received = 0
        caught: EvictedError | None = None
        while caught is None:
            try:
                await channel.remote.recv()
                received += 1
            except EvictedError as error:
                caught = error
        sent = channel.sender.statistics().messages  # the last one went on without it
        assert (
            0 < received < sent
            and f"of the {sent - 1} messages sent by then it misses the last {sent - 1 - received}" in str(caught)
        )
        await channel.sender.aclose()
        await task


@pytest.mark.parametrize("held", [False, True])
async def test_a_cut_that_is_mended_leaves_no_gap(held: bool) -> None:
    """The stream goes on where it was whole, in the middle of a large message too."""
    async with opened() as channel:
        tasks = [asyncio.create_task(expect(end, 0, 60)) for end in (channel.local, channel.remote)]
        for number in range(60):
            await channel.sender.send(message(number))
            if number % 24 == 3:
                passed = channel.proxy.passed
                await until(lambda before=passed: channel.proxy.passed > before)
                if held:
                    channel.proxy.hold()
                channel.proxy.cut()
                channel.proxy.release()
        await asyncio.gather(*tasks)
        assert channel.remote._relay._feed._session > 1
        assert channel.sender.statistics().readers[1].state == "joined"
        await until(lambda: channel.sender.statistics().slots_used == 0)


async def test_a_cut_that_stays_is_told_to_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(remote_timeout=0.4) as channel:
        await channel.sender.send(filled(1))
        await channel.local.recv()
        await channel.remote.recv()
        channel.proxy.refuse()
        channel.proxy.cut()
        with pytest.raises(SenderLostError, match="not heard of") as lost:
            await channel.remote.recv()
        assert lost.value.received == 1
        await until(lambda: channel.sender.statistics().readers[1].state == "lost")
        with pytest.raises(ReaderLostError, match=r"reader 1 \(pid \d+ on host .*lost its connection") as error:
            await channel.sender.send(2)
        assert error.value.rank == 1
        assert any("reader 1" in text and "lost its connection" in text for text in caplog.messages)


async def test_silence_is_a_cut() -> None:
    """No end of a connection to be seen: a cable was pulled. Heartbeats find out."""
    async with opened(remote_timeout=0.4) as channel:
        channel.proxy.hold()
        with pytest.raises(SenderLostError):
            await channel.remote.recv()
        await until(lambda: channel.sender.statistics().readers[1].state == "lost")


async def test_who_was_given_up_and_comes_back_is_told_what_it_missed() -> None:
    """Never a gap in silence."""
    async with opened(remote_timeout=3.0, on_reader_lost="continue") as channel:
        await channel.sender.send("first")
        assert await channel.remote.recv() == "first"
        await until(lambda: channel.sender.statistics().readers[1].messages_behind == 0)
        channel.proxy.refuse()
        channel.proxy.cut()
        await until(lambda: channel.sender.statistics().readers[1].process.startswith("without"))
        # Time passes at the sender only.
        serving = channel.sender._serving
        serving._gone(serving._links[1])
        for number in range(3):
            await channel.sender.send(number)
        channel.proxy.refuse(False)
        with pytest.raises(EvictedError, match="of the 4 messages sent by then it misses the last 3"):
            await channel.remote.recv()


async def test_slots_of_a_lost_reader_come_back() -> None:
    """Once libzmq does not look at them any more."""
    async with opened(remote_timeout=0.4, on_reader_lost="continue") as channel:
        channel.proxy.hold()
        for number in range(3):
            await channel.sender.send(filled(number))
            await channel.local.recv()
        assert channel.sender.statistics().slots_used == 3
        await until(lambda: channel.sender.statistics().readers[1].state == "lost")
        await until(lambda: channel.sender.statistics().slots_used == 0)


async def test_a_rank_may_be_taken_again() -> None:
    async with remote_sender() as sender, Receiver(sender.handle, 0) as local:
        for number in range(3):
            async with Receiver(sender.handle, 1) as remote:
                await sender.send(number)
                assert await remote.recv() == number == await local.recv()
            await until(lambda: sender.statistics().readers[1].state == "left")


async def test_a_taken_rank_is_refused() -> None:
    async with opened(remote_timeout=0.4) as channel:
        with pytest.raises(HandleError, match="rank 1 is taken by reader 1"):
            await Receiver(channel.sender.handle, 1).start()


async def test_a_reader_without_its_connection_gives_way() -> None:
    """A new process at its rank is the best sign that the old one is gone."""
    async with opened(remote_timeout=30.0) as channel:
        channel.proxy.refuse()
        channel.proxy.cut()
        async with Receiver(channel.sender.handle, 1) as successor:
            await channel.sender.send(1)
            assert await successor.recv() == 1


async def test_ranks_are_of_one_kind() -> None:
    async with remote_sender(1, 2) as sender:
        assert (sender.handle.readers, sender.handle.local_readers) == (3, 1)
        with pytest.raises(ValueError, match="1 to 2, not 0"):
            Relay(sender.handle, 1, rank=0)
        with pytest.raises(ValueError, match="0 to 2"):
            Receiver(sender.handle, 3)
    async with Sender(1) as sender:
        with pytest.raises(ValueError, match="no remote readers"):
            Relay(sender.handle, 1)


async def test_only_remote_readers() -> None:
    async with remote_sender(0, 2) as sender, Receiver(sender.handle, 0) as a, Receiver(sender.handle, 1) as b:
        await sender.send(filled(3))
        assert shows(await a.recv(), 3) and shows(await b.recv(), 3)


async def test_nobody_there() -> None:
    sender = remote_sender(remote_timeout=0.3)
    await sender.start()
    await sender.aclose()
    with pytest.raises(SenderLostError, match=r"nobody answers at tcp://127\.0\.0\.1:"):
        await Receiver(sender.handle, 1).start()


async def test_a_reader_may_come_before_the_sender_starts() -> None:
    sender = remote_sender(0, 1, remote_timeout=0.3)
    receiver = Receiver(sender.handle, 0)
    start = asyncio.create_task(receiver.start())
    await until(lambda: receiver._relay is not None and receiver._relay._feed is not None)
    feed = receiver._relay._feed
    await until(lambda: feed.wire.connection.reached)
    async with sender:
        await start
        await sender.send(1)
        assert await receiver.recv() == 1
        await receiver.aclose()


async def test_a_cancelled_start_leaves_nothing() -> None:
    async with remote_sender(0, 1) as sender:
        for turns in range(0, 40, 3):
            given_up = Receiver(sender.handle, 0)
            task = asyncio.create_task(given_up.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # it was quicker
                await given_up.aclose()
        async with Receiver(sender.handle, 0) as receiver:
            await sender.send(1)
            assert await receiver.recv() == 1


# Relays -----------------------------------------------------------------------------------------------------------


async def test_a_relay_serves_a_host() -> None:
    """One stream over the wire, however many readers there are, and views of one arena for all of them."""
    async with (
        remote_sender(1, 1) as sender,
        Proxy(sender.handle) as proxy,
        Receiver(sender.handle, 0) as local,
        Relay(proxy.handle, 3) as relay,
        contextlib.AsyncExitStack() as stack,
    ):
        ends = [await stack.enter_async_context(Receiver(relay.handle, rank)) for rank in range(3)]
        tasks = [asyncio.create_task(expect(end, 0, 30)) for end in (local, *ends)]
        for number in range(30):
            await sender.send(message(number))
        await asyncio.gather(*tasks)
        assert relay.rank == 1 and relay.received == 30
        nbytes = sender.statistics().arena_bytes + sender.statistics().frame_bytes
        assert nbytes < proxy.passed < 1.2 * nbytes
        await sender.aclose()
        await relay.wait_closed()
        for end in ends:
            with pytest.raises(EndOfChannel):
                await end.recv()


async def test_a_relay_unpickles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not have the classes, and nothing that arrives can make it run code."""
    import pickle

    async with remote_sender(0, 1) as sender, Relay(sender.handle, 1) as relay, Receiver(relay.handle, 0) as end:
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "loads", None)
            patch.setattr("aioarena._codec.decode", None)
            for number in range(6):
                await sender.send(message(number))
            await until(lambda: relay.received == 6)
        await expect(end, 0, 6)


async def test_a_tree_of_relays() -> None:
    async with (
        remote_sender(0, 1) as sender,
        Relay(sender.handle, 1, remote_readers=2, bind=BIND) as upper,
        Relay(upper.handle, 1) as lower,
        Receiver(upper.handle, 0) as a,
        Receiver(lower.handle, 0) as b,
        Receiver(upper.handle, 2) as c,
    ):
        assert (upper.rank, lower.rank) == (0, 1)
        tasks = [asyncio.create_task(expect(end, 0, 18)) for end in (a, b, c)]
        for number in range(18):
            await sender.send(message(number))
        await asyncio.gather(*tasks)
        await sender.aclose()
        await asyncio.gather(upper.wait_closed(), lower.wait_closed())
        for end in (a, b, c):
            with pytest.raises(EndOfChannel):
                await end.recv()


async def test_a_lost_sender_is_told_below_a_relay() -> None:
    async with (
        remote_sender(0, 1, remote_timeout=0.4) as sender,
        Proxy(sender.handle) as proxy,
        Relay(proxy.handle, 1, remote_readers=1, bind=BIND) as relay,
        Receiver(relay.handle, 0) as near,
        Receiver(relay.handle, 1) as far,
    ):
        await sender.send("whole")
        await until(lambda: relay.received == 1)
        proxy.refuse()
        proxy.cut()
        for end in (near, far):
            assert await end.recv() == "whole"
            with pytest.raises(SenderLostError, match=r"ended before its end.*not heard of any more"):
                await end.recv()
        with pytest.raises(SenderLostError, match="not heard of any more"):
            await relay.wait_closed()


async def test_a_lost_reader_is_told_above_a_relay() -> None:
    async with (
        remote_sender(0, 1) as sender,
        Relay(sender.handle, 2) as relay,
        Receiver(relay.handle, 0) as stays,
        Receiver(relay.handle, 1),
    ):
        await sender.send(1)
        await until(lambda: relay.received == 1)
        members = relay._mirror._members
        members.lose(members.by_rank[1], "reader 1 (pid 7) was killed by signal 9")
        relay._mirror._membership_changed()
        with pytest.raises(ReaderLostError, match=r"reader 1 .pid 7. was killed"):
            await relay.wait_closed()
        await until(lambda: sender.statistics().readers[0].state == "lost")
        with pytest.raises(ReaderLostError, match=r"gave up: .*reader 1 .pid 7. was killed by signal 9"):
            await sender.send(2)
        assert await stays.recv() == 1
        with pytest.raises(SenderLostError, match=r"reader 1 .pid 7. was killed"):
            await stays.recv()


async def test_a_relay_that_closes_early() -> None:
    """Its readers do not take it for the end, and the sender sees it leave."""
    async with remote_sender(0, 1) as sender, Relay(sender.handle, 1) as relay, Receiver(relay.handle, 0) as end:
        await sender.send(1)
        await until(lambda: relay.received == 1)
        await relay.aclose()
        assert await end.recv() == 1
        with pytest.raises(SenderLostError, match="its relay was closed"):
            await end.recv()
        await until(lambda: sender.statistics().readers[0].state == "left")


async def test_a_relay_waits_for_its_readers() -> None:
    """What it takes in before they are there is bounded, and theirs when they are."""
    async with remote_sender(0, 1) as sender, Relay(sender.handle, 1) as relay:
        for number in range(12):
            await sender.send(message(number))
        await until(lambda: relay._feed._position)
        assert relay.received == 0
        async with Receiver(relay.handle, 0) as end:
            await expect(end, 0, 12)


# Secrets ----------------------------------------------------------------------------------------------------------


async def test_keys_are_in_no_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with opened() as channel:
        remote = channel.sender.handle.remote
        words = [repr(channel.sender.handle), repr(remote), repr(channel.sender), repr(channel.remote)]
        await channel.sender.send(1)
        await channel.remote.recv()
        await channel.local.recv()
        words += [str(channel.sender.statistics()), *caplog.messages]
        for key in (remote.server_key, remote.public_key, remote.secret_key):
            assert len(key) == 40 and not any(key in text for text in words)
    other = remote_sender()
    assert other.handle.remote.secret_key != remote.secret_key
    await other.aclose()


def test_a_handle_as_text() -> None:
    sender = remote_sender()
    text = sender.handle.to_text()
    assert aioarena.Handle.from_text(text + "\n") == sender.handle and text.isascii() and "\n" not in text
    for damaged in ("", "x" + text, text[:-10], text[:20]):
        with pytest.raises(HandleError, match="no handle"):
            aioarena.Handle.from_text(damaged)


async def test_a_channel_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was given a seat has started, as a local reader has, and then sees the end."""
    connect = Receiver._connect

    async def connect_slowly(self: Receiver[Any]) -> None:
        await connect(self)
        await until(lambda: self._relay._feed.end == 0)
        await turns(20)

    monkeypatch.setattr(Receiver, "_connect", connect_slowly)
    sender = remote_sender(0, 1)
    await sender.start()
    receiver = Receiver(sender.handle, 0)
    start = asyncio.create_task(receiver.start())
    await sender.wait_ready()
    await sender.aclose()
    await start
    with pytest.raises(EndOfChannel):
        await receiver.recv()
    await receiver.aclose()
