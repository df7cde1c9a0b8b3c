"""What streams cost others on the loop: they get their turn, and nobody is woken for nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aioarena import ArenaConfig, Receiver, Relay, Sender, relay
from aioarena._platform.network import Ack, RemoteReceiverWire
from aioarena._remote import feed, serving
from tests.fronts.support import filled, until
from tests.remote.proxy import Proxy

BIND = "tcp://127.0.0.1:0"
ARENA = ArenaConfig(slots=64, slot_bytes=1 << 20)
_MESSAGES = 1000


@contextlib.asynccontextmanager
async def longest_step(count: Callable[[], int]) -> AsyncIterator[list[int]]:
    """By how much a count grew at most between two turns of another task."""
    longest = [0]

    async def look() -> None:
        before = count()
        while True:
            await asyncio.sleep(0)
            now = count()
            longest[0] = max(longest[0], now - before)
            before = now

    task = asyncio.create_task(look())
    yield longest
    task.cancel()


async def test_others_have_their_turn_while_small_messages_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are in the ring, and however many readers there are."""
    monkeypatch.setattr(serving, "_TURN", 0.0)
    async with (
        Sender(0, remote_readers=2, bind=BIND, arena=None) as sender,
        Receiver(sender.handle, 0) as one,
        Receiver(sender.handle, 1) as other,
    ):
        links = list(sender._serving._links.values())
        async with longest_step(lambda: sum(link.ahead.read for link in links)) as longest:
            for number in range(_MESSAGES):
                sender.send_nowait(number)
            for end in (one, other):
                assert [await end.recv() for _ in range(_MESSAGES)] == list(range(_MESSAGES))
        assert 0 < longest[0] <= 100


async def test_others_have_their_turn_while_small_messages_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them come in one piece."""
    monkeypatch.setattr(relay, "_TURN", 0.0)
    async with (
        Sender(0, remote_readers=1, bind=BIND, arena=None) as sender,
        Relay(sender.handle, 1) as passing,
        Receiver(passing.handle, 0) as end,
    ):
        async with longest_step(lambda: passing.received) as longest:
            for number in range(_MESSAGES):
                sender.send_nowait(number)
            assert [await end.recv() for _ in range(_MESSAGES)] == list(range(_MESSAGES))
        assert longest[0] <= 2


async def test_a_large_message_is_acknowledged_in_large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of it would wake the sender otherwise."""
    acks: list[Ack] = []
    send = RemoteReceiverWire.ack

    def count(wire: Any, ack: Ack) -> None:
        acks.append(ack)
        send(wire, ack)

    monkeypatch.setattr(RemoteReceiverWire, "ack", count)
    async with Sender(0, remote_readers=1, bind=BIND, arena=ARENA) as sender, Receiver(sender.handle, 0) as end:
        await sender.send(filled(3, 40 << 20))
        assert (await end.recv())[-1] == 3
        await until(lambda: sender.statistics().readers[0].messages_behind == 0)
        assert 2 <= len(acks) <= (40 << 20) // feed._ACK_BYTES + 2


async def test_memory_counts_as_used_until_libzmq_has_sent_it() -> None:
    """A reader that is gone holds slots for so long."""
    async with (
        Sender(0, remote_readers=1, bind=BIND, arena=ARENA) as sender,
        Proxy(sender.handle) as proxy,
        Receiver(proxy.handle, 0) as end,
    ):
        (link,) = sender._serving._links.values()
        proxy.hold()
        await sender.send(filled(5, 40 << 20))
        await until(lambda: link._sent > 40 << 20)
        assert link.sending
        proxy.release()
        assert (await end.recv())[-1] == 5
        await until(lambda: not link.sending)


async def test_looks_for_memory_that_is_under_way_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted reader may leave it there for long."""

    class Stuck:
        sending = True

    class Later:
        def __init__(self) -> None:
            self.pauses: list[float] = []

        def call_later(self, pause: float, look: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
            self.pauses.append(pause)
            if len(self.pauses) < 12:
                look(*args)
            return asyncio.get_running_loop().call_later(0, lambda: None)

    async with Sender(0, remote_readers=1, bind=BIND, arena=None) as sender:
        streams, later = sender._serving, Later()
        with monkeypatch.context() as patch:
            patch.setattr(streams, "_loop", later)
            streams._leaving.append(Stuck())
            streams._free_soon()
        assert later.pauses == sorted(later.pauses) and later.pauses[0] == 0.01 and later.pauses[-1] == 1.0
        streams._leaving.clear()


async def test_closing_lingers_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For frames and for remote readers together."""
    bounds = []
    real = asyncio.timeout_at

    def timeout_at(when: float) -> asyncio.Timeout:
        bounds.append(when)
        return real(asyncio.get_running_loop().time() + 0.1)

    async with Sender(0, remote_readers=1, bind=BIND, arena=None) as sender, Relay(sender.handle, 1):
        await sender.send(filled(1))
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "timeout_at", timeout_at)
            await sender.aclose()
        assert len(bounds) == 2 and bounds[0] == bounds[1]
        assert sum("closed" in text and "lost" in text for text in caplog.messages) == 2
