"""``statistics()``: every field has its meaning, nothing changes by looking, and any thread may look at any time."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioarena import ReaderStatus, Receiver, ReceiverStatistics, SenderStatistics, _statistics
from tests.conftest import RING_BYTES, Channel, OpenChannel
from tests.fronts.support import fill_ring, filled, until
from tests.fronts.threads import Call, blocking_channel

# What is a state; all else is a counter, or the most ever seen.
STATES = {
    "ring_used", "ring_capacity", "frames_pending", "slots", "slot_bytes", "slots_used", "spans_held", "readers",
    "bytes_behind", "bytes_held", "oldest_held", "slots_held", "ages_held", "spans_pending", "events_pending", "pinned",
}  # fmt: skip


def counters(statistics: SenderStatistics | ReceiverStatistics) -> dict[str, float]:
    found = {
        field.name: getattr(statistics, field.name) for field in dataclasses.fields(statistics) if field.name not in STATES
    }
    return {**found.pop("fallbacks", {}), **found}


def went_backwards(before: dict[str, float], after: dict[str, float]) -> list[str]:
    return [f"{name}: {value} after {before[name]}" for name, value in after.items() if value < before.get(name, 0)]


@pytest.mark.parametrize("kind", [SenderStatistics, ReaderStatus, ReceiverStatistics])
def test_every_field_is_documented(kind: Any) -> None:
    """In the order in which they stand, and nothing that is not there."""
    documented = re.findall(r"^        (\w+): ", kind.__doc__.partition("Attributes:")[2], re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(kind)]


async def test_bytes_are_told_by_placement(open_channel: OpenChannel) -> None:
    """At both ends, and what was lent is part of what went through the arena."""
    async with open_channel() as channel:
        lent = await channel.sender.empty(1 << 20, torch.uint8)
        await channel.sender.send([lent, filled(1, 1 << 20), filled(2, 5 << 20), filled(3, 1000)])
        sent = channel.sender.statistics()
        assert (sent.arena_bytes, sent.lent_bytes, sent.frame_bytes) == (2 << 20, 1 << 20, 5 << 20)
        assert sent.slot_bytes * sent.slots == 4 << 20
        await channel.receiver.recv()
        received = channel.receiver.statistics()
        assert (received.arena_bytes, received.frame_bytes) == (sent.arena_bytes, sent.frame_bytes)
        # With a header, and filled up to a multiple of 8.
        assert 8 <= received.ring_bytes - sent.ring_bytes < 16


async def test_the_fullest_ring_is_remembered(open_channel: OpenChannel) -> None:
    """A ring that had no room, when it is empty again; and whatever statistics themselves have seen."""
    async with open_channel() as channel:
        await channel.sender.send(b"x" * 1000)
        seen = channel.sender.statistics()
        assert seen.ring_peak == seen.ring_used > 1000
        await channel.receiver.recv()
        assert channel.sender.statistics().ring_peak == seen.ring_peak
        for _ in range(fill_ring(channel.sender)):
            await channel.receiver.recv()
        emptied = channel.sender.statistics()
        assert emptied.ring_used == 0
        assert RING_BYTES * 0.9 < emptied.ring_peak <= RING_BYTES


async def test_what_is_sent_while_another_thread_looks_does_not_count(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and tail are read one after the other; what both pass meanwhile was never in the ring together."""
    async with open_channel() as channel:
        ring = channel.sender._core.ring
        slowest_tail = ring.slowest_tail

        def look_and_be_interrupted() -> int:
            tail = slowest_tail()
            context.undo()
            channel.sender.send_nowait(b"x" * 1000)
            channel.receiver.recv_nowait()
            return tail

        with monkeypatch.context() as context:
            context.setattr(ring, "slowest_tail", look_and_be_interrupted)
            assert channel.sender.statistics().ring_peak == 0
        assert channel.sender.statistics().messages == 1


async def test_time_of_waiting_and_who_ended_it(open_channel: OpenChannel) -> None:
    """Counted when the wait is over; the reader that made room sent one wake-up."""
    async with open_channel() as channel:
        count = fill_ring(channel.sender)
        waiting = asyncio.create_task(channel.sender.send(b"x" * 4000))
        await until(lambda: channel.sender.statistics().waits)
        assert channel.sender.statistics().wait_seconds == 0
        for _ in range(count + 1):
            await channel.receiver.recv()
        await waiting
        assert channel.sender.statistics().wait_seconds > 0
        assert channel.receiver.statistics().wakeups == 1


async def test_who_holds_what_since_when(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots with their ages, at both ends."""
    async with open_channel(2) as channel:
        await channel.sender.send(filled(1, 1000 << 10))
        await channel.sender.send(filled(2, 2000 << 10))
        kept = [await channel.receiver.recv() for _ in range(2)]
        await channel.receivers[1].recv()
        first, second = channel.sender._core.arena.published_spans
        later = max(first.since, second.since) + 5.0
        monkeypatch.setattr(_statistics, "time", Clock(later))
        by_rank = channel.sender.statistics().readers
        ages = (later - first.since, later - second.since)
        assert (by_rank[0].slots_held, by_rank[0].ages_held) == ((first.slot, second.slot), ages)
        assert (by_rank[0].spans_held, by_rank[0].bytes_held, by_rank[0].oldest_held) == (2, 3000 << 10, ages[0])
        # The other has dropped what it received, and has not received the rest.
        assert (by_rank[1].slots_held, by_rank[1].ages_held, by_rank[1].bytes_held) == (
            (second.slot,),
            ages[1:],
            2000 << 10,
        )
        received = channel.receiver.statistics()
        assert received.slots_held == (first.slot, second.slot)
        assert received.oldest_held == received.ages_held[0] >= received.ages_held[1] >= 5.0 - (later - first.since)
        kept.clear()
        assert (channel.receiver.statistics().slots_held, channel.receiver.statistics().oldest_held) == ((), 0.0)
        assert channel.sender.statistics().readers[0].ages_held == ()


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("size", [100_000, 2 << 20], ids=["on the loop", "in threads"])
async def test_time_of_private_copies(open_channel: OpenChannel, size: int) -> None:
    async with open_channel(receiver={"private": True}) as channel:
        await channel.sender.send("small")
        await channel.receiver.recv()
        assert channel.receiver.statistics().copy_seconds == 0
        await channel.sender.send(filled(1, size))
        await channel.receiver.recv()
        assert channel.receiver.statistics().copy_seconds > 0


async def test_time_of_moving_to_a_device(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.sender.send(filled(1))
        await channel.receiver.to_device(await channel.receiver.recv(), "cpu")
        assert channel.receiver.statistics().copy_seconds > 0


async def test_looking_changes_nothing(open_channel: OpenChannel) -> None:
    """So that another thread may: released spans, received frames and dropped loans stay what the sender knows of them."""
    async with open_channel() as channel:
        sender, core = channel.sender, channel.sender._core
        lent = await sender.empty(100_000)
        await sender.send([filled(1), filled(2, 5 << 20)])
        await channel.receiver.recv()
        del lent
        known = state(channel)
        assert core.arena.used_slots == 2 and len(core._frames) == 1 and len(core.arena._loans) == 1
        statistics = sender.statistics()
        assert (statistics.slots_used, statistics.spans_held, statistics.frames_pending) == (0, 0, 0)
        assert state(channel) == known


def state(channel: Channel) -> tuple[object, ...]:
    core = channel.sender._core
    return (
        core.arena.used_slots,
        core.arena.published_spans,
        tuple(core.arena._loans),
        tuple(core._frames),
        core.frame_nbytes,
    )


async def test_counters_never_go_backwards_in_another_thread(open_channel: OpenChannel) -> None:
    """While messages of all kinds are under way, readers come and go, and both ends close."""
    with Scraper() as scraper:
        async with open_channel(2) as channel:
            scraper.scrape(channel.sender.statistics, *(receiver.statistics for receiver in channel.receivers))
            for number in range(60):
                kept = [await work(channel, number)]
                if number % 20 == 19:
                    await channel.receivers[1].aclose()
                    channel.receivers[1] = Receiver(channel.sender.handle, 1)
                    await channel.receivers[1].start()
                    scraper.scrape(channel.receivers[1].statistics)
                del kept
            await channel.receivers[1].aclose()
        scraper.looked_again()
        last = channel.sender.statistics()
    assert last.messages == 60 * 3
    assert last.arena_bytes and last.lent_bytes and last.frame_bytes and last.fallbacks["larger_than_arena"] == 60


async def work(channel: Channel, number: int) -> list[Any]:
    lent = await channel.sender.empty(10_000)
    for message in (number, [filled(1, 100_000), lent], [filled(2, 5 << 20), filled(3, 1000)]):
        await channel.sender.send(message)
    return [[await receiver.recv() for _ in range(3)] for receiver in channel.receivers]


class Scraper:
    """A thread that looks at statistics all the time, and at how they change."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Any]] = []
        self._stop = threading.Event()
        self._rounds = 0
        self._thread = Call(self._run)

    def scrape(self, *sources: Callable[[], Any]) -> None:
        self._sources += sources

    def _run(self) -> None:
        before: list[dict[str, float]] = []
        while not self._stop.is_set():
            for index, source in enumerate(list(self._sources)):
                statistics = source()
                now = counters(statistics)
                if index == len(before):
                    before.append(now)
                assert not went_backwards(before[index], now)
                before[index] = now
                if isinstance(statistics, SenderStatistics):
                    assert 0 <= statistics.slots_used <= statistics.slots
                    assert 0 <= statistics.ring_used <= statistics.ring_peak <= statistics.ring_capacity
                    assert all(reader.messages_behind >= 0 <= reader.bytes_behind for reader in statistics.readers)
            self._rounds += 1

    def looked_again(self) -> None:
        """Wait until it has looked at everything once more."""
        rounds = self._rounds
        while self._rounds < rounds + 2 and not self._thread.over:
            self._stop.wait(0.001)

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.result()


def test_blocking_ends_answer_while_another_call_is_at_work() -> None:
    """A thread that pickles for long has the end's lock; who only looks does not wait for it."""
    with blocking_channel() as (sender, receiver):
        for end in (sender, receiver):
            assert end._driver is not None
            with end._driver._lock:
                assert Call(end.statistics).result().messages == 0
