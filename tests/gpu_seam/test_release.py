"""From a dropped tensor to a free slot, once the arena is pinned: which streams count, how they are asked, and when not."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import torch

import aioarena
from aioarena._release import LONGEST_POLL, SpanLedger
from tests.gpu_seam.channel import NBYTES, SLOTS, channel, frames, in_arena, pass_on, tensor
from tests.gpu_seam.fake import FakeEvent, FakeGpu
from tests.gpu_seam.loops import a_while, both_loops, until


@asynccontextmanager
async def pinned_channel(gpu: FakeGpu, **options: Any) -> AsyncIterator[tuple[aioarena.Sender, aioarena.Receiver]]:
    """A channel to one reader whose arena is pinned, with nothing under way."""
    gpu.initialize()
    async with channel(**options) as (sender, receiver):
        await pass_on(sender, receiver)
        await until(lambda: receiver.statistics().pinned == "yes" and receiver.statistics().spans_held == 0)
        gpu.events.clear()
        yield sender, receiver


def free(sender: aioarena.Sender) -> bool:
    """Whether the sender, without any message, sees all slots free."""
    return sender.statistics().slots_used == 0


# Gating --------------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_slot_is_not_reused_while_its_event_is_pending(gpu: FakeGpu) -> None:
    """The sender goes on with frames; once the events are complete the slots are free, without another receive."""
    busy = gpu.default_streams[0]
    async with pinned_channel(gpu) as (sender, receiver):
        busy.busy = True
        for value in range(SLOTS):
            await pass_on(sender, receiver, value)
        await until(lambda: gpu.recorded_on(busy))
        for value in range(10):
            await sender.send(tensor(value))
            assert (await receiver.recv())[0] == value
        assert frames(sender) == 10
        assert sender.statistics().slots_used == SLOTS
        await a_while()
        assert receiver.statistics().spans_held == receiver.statistics().spans_pending == SLOTS
        assert receiver.statistics().events_pending == SLOTS  # of the other stream, they are complete
        busy.finish()
        await until(lambda: free(sender))
        assert receiver.statistics().spans_held == receiver.statistics().spans_pending == 0
        assert receiver.statistics().events_pending == 0
        assert (await pass_on(sender, receiver, 3))[0] == 3
        assert frames(sender) == 10


@both_loops
async def test_the_memory_stays_as_it_was_while_the_event_is_pending(gpu: FakeGpu) -> None:
    """What a copy engine would read is not overwritten, whatever is sent meanwhile."""
    busy = gpu.default_streams[0]
    async with pinned_channel(gpu) as (sender, receiver):
        assert receiver._ledger is not None
        busy.busy = True
        received = await pass_on(sender, receiver, 42)
        offset = received.data_ptr() - receiver._ledger.mapping.address
        memory = receiver._ledger.mapping.view[offset : offset + NBYTES]
        del received
        for value in range(3 * SLOTS):
            await sender.send(tensor(value))
            await receiver.recv()
        assert bytes(memory) == bytes([42]) * NBYTES
        busy.finish()
        await until(lambda: free(sender))
        for value in range(SLOTS):
            await sender.send(tensor(value))
            await receiver.recv()
        assert bytes(memory) != bytes([42]) * NBYTES
        memory.release()


@both_loops
async def test_both_streams_gate(gpu: FakeGpu) -> None:
    """Named with record_stream: the slot waits for either, in whatever order they finish."""
    for first, second in ((0, 1), (1, 0)):
        streams = [gpu.stream("a"), gpu.stream("b")]
        async with pinned_channel(gpu) as (sender, receiver):
            for stream in streams:
                stream.busy = True
            received = await pass_on(sender, receiver)
            receiver.record_stream(received, streams[0])
            receiver.record_stream(received[7:], streams[1])
            receiver.record_stream(received.view(torch.int16), streams[1])
            await a_while()
            assert gpu.events == [], "recorded when the tensor is dropped, so that all work up to then counts"
            del received
            await until(lambda: len(gpu.events) == 2)
            streams[first].finish()
            await a_while()
            assert receiver.statistics().spans_pending == 1
            streams[second].finish()
            await until(lambda: free(sender))
            assert {event.stream for event in gpu.events} == set(streams)


@both_loops
async def test_named_streams_take_the_place_of_the_current_ones(gpu: FakeGpu) -> None:
    """Whoever says which stream reads a tensor need not wait for what else the GPU does."""
    gpu.default_streams[0].busy = True
    side = gpu.stream("side")
    async with pinned_channel_unchecked(gpu) as (sender, receiver):
        received = await pass_on(sender, receiver)
        receiver.record_stream(received, side)
        del received
        await until(lambda: free(sender))
        assert gpu.recorded_on(side)
        assert gpu.recorded_on(gpu.default_streams[0]) == []


@asynccontextmanager
async def pinned_channel_unchecked(gpu: FakeGpu) -> AsyncIterator[tuple[aioarena.Sender, aioarena.Receiver]]:
    """As pinned_channel, where the default stream never finishes."""
    gpu.initialize()
    async with channel() as (sender, receiver):
        received = await pass_on(sender, receiver)
        await until(lambda: receiver.statistics().pinned == "yes")
        receiver.record_stream(received, gpu.stream("another"))
        del received
        await until(lambda: receiver.statistics().spans_held == 0)
        gpu.events.clear()
        yield sender, receiver


@both_loops
async def test_without_named_streams_the_current_stream_of_every_device_in_use_gates(gpu: FakeGpu) -> None:
    """Of every device with a context; the others are left without one."""
    gpu.devices = 3
    async with pinned_channel(gpu) as (sender, receiver):
        await pass_on(sender, receiver)
        await until(lambda: free(sender))
        assert [event.stream for event in gpu.events] == [gpu.default_streams[0]]
        gpu.events.clear()
        gpu.contexts.add(1)
        gpu.default_streams[1].busy = True
        await pass_on(sender, receiver)
        await until(lambda: len(gpu.events) == 2)
        assert {event.stream for event in gpu.events} == set(gpu.default_streams[:2])
        await a_while()
        assert not free(sender)
        gpu.default_streams[1].finish()
        await until(lambda: free(sender))


@both_loops
async def test_the_stream_current_at_the_drop_gates(gpu: FakeGpu) -> None:
    """Also if another one is current again when the release task gets its turn."""
    side = gpu.stream("side")
    side.busy = True
    async with pinned_channel(gpu) as (sender, receiver):
        received = await pass_on(sender, receiver)
        with gpu.using(side):
            del received
        await until(lambda: gpu.recorded_on(side))
        await a_while()
        assert not free(sender)
        side.finish()
        await until(lambda: free(sender))


@both_loops
async def test_dropped_in_another_thread_its_stream_and_that_of_the_loop_gate(gpu: FakeGpu) -> None:
    """The work may have been started in either."""
    side, mine = gpu.stream("side"), gpu.stream("mine")
    side.busy = mine.busy = True
    async with pinned_channel(gpu) as (sender, receiver):
        box = [await pass_on(sender, receiver)]

        def drop() -> None:
            with gpu.using(side):
                box.clear()

        with gpu.using(mine):
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
            await until(lambda: gpu.recorded_on(side) and gpu.recorded_on(mine))
        side.finish()
        await a_while()
        assert not free(sender)
        mine.finish()
        await until(lambda: free(sender))


@both_loops
async def test_dropped_by_the_garbage_collector(gpu: FakeGpu) -> None:
    """A cycle ends anywhere; the finalizer may run in the middle of the release task as well."""
    threshold = gc.get_threshold()
    async with pinned_channel(gpu) as (sender, receiver):
        gc.set_threshold(1)
        try:
            for value in range(2 * SLOTS):
                cycle: list[Any] = [await pass_on(sender, receiver, value)]
                cycle.append(cycle)
                del cycle
                await until(lambda: bool(gc.collect() or True) and free(sender))
        finally:
            gc.set_threshold(*threshold)


@both_loops
async def test_unpinned_streams_that_were_named_gate(gpu: FakeGpu) -> None:
    """With pin="off" copies are staged and nothing waits, but for a stream that the user names."""
    side = gpu.stream("side")
    gpu.initialize()
    async with channel(pin="off") as (sender, receiver):
        side.busy = True
        received = await pass_on(sender, receiver)
        other = await pass_on(sender, receiver)
        receiver.record_stream(received, side)
        del other
        assert receiver.statistics().spans_held == 1
        del received
        await until(lambda: gpu.recorded_on(side))
        await a_while()
        assert receiver.statistics().spans_pending == 1
        side.finish()
        await until(lambda: free(sender))
        assert len(gpu.events) == 1
        assert gpu.registrations == []


@both_loops
async def test_record_stream_finds_what_starts_inside_of_a_span(gpu: FakeGpu) -> None:
    """An array's slice as a tensor has a storage of its own, which need not even begin in the span's first slot."""
    side = gpu.stream("side")
    async with pinned_channel(gpu) as (sender, receiver):
        side.busy = True
        for start in (9, 2 * NBYTES + 1, 3 * NBYTES - 1):
            gpu.events.clear()
            await sender.send(torch.zeros(3 * NBYTES, dtype=torch.uint8))
            received = await receiver.recv()
            part = torch.from_numpy(received.numpy()[start:])
            del received
            assert receiver.statistics().spans_held == 1
            receiver.record_stream(part, side)
            del part
            await until(lambda: gpu.recorded_on(side))
            side.finish()
            await until(lambda: free(sender))
            side.busy = True
        side.finish()


@both_loops
async def test_record_stream_ignores_what_is_not_in_the_arena(gpu: FakeGpu) -> None:
    """A tensor of the user's own, a small one, an empty one, and one that has no storage."""
    side = gpu.stream("side")
    async with pinned_channel(gpu) as (sender, receiver):
        await sender.send(torch.ones(3))
        small = await receiver.recv()
        for foreign in (tensor(), small, torch.empty(0), torch.eye(3).to_sparse()):
            receiver.record_stream(foreign, side)
        received = await pass_on(sender, receiver)
        del received
        await until(lambda: free(sender))
        assert gpu.recorded_on(side) == []


# Capture -------------------------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("named", [True, False])
async def test_nothing_is_recorded_while_a_graph_is_captured(gpu: FakeGpu, named: bool) -> None:
    """The slot waits for the end of the capture, and only then for the stream."""
    stream = gpu.stream("side") if named else gpu.default_streams[0]
    async with pinned_channel(gpu) as (sender, receiver):
        stream.capturing = stream.busy = True
        received = await pass_on(sender, receiver)
        if named:
            receiver.record_stream(received, stream)
        del received
        await a_while()
        assert gpu.events == []
        assert receiver.statistics().spans_pending == 1
        stream.capturing = False
        await until(lambda: gpu.recorded_on(stream))
        await a_while()
        assert not free(sender)
        stream.finish()
        await until(lambda: free(sender))
        assert receiver.statistics().spans_quarantined == 0


# Polling -------------------------------------------------------------------------------------------------------------


@both_loops
async def test_polling_runs_only_while_something_is_pending(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast at first, then backing off, and not at all when there is nothing to wait for, held tensors or not."""
    busy = gpu.default_streams[0]
    turns = 0
    pump = SpanLedger.pump

    def counted(ledger: SpanLedger) -> bool:
        nonlocal turns
        turns += 1
        return pump(ledger)

    monkeypatch.setattr(SpanLedger, "pump", counted)
    async with pinned_channel(gpu) as (sender, receiver):
        kept = await pass_on(sender, receiver)
        calls, before = len(gpu.calls), turns
        await a_while(0.1)
        assert (len(gpu.calls), turns) == (calls, before), "nothing pending, nothing asked"

        busy.busy = True
        await pass_on(sender, receiver)
        await until(lambda: gpu.recorded_on(busy))
        await a_while(0.05)  # by now the pause is the longest
        before, started = gpu.queries, asyncio.get_running_loop().time()
        await a_while(0.2)
        polls = gpu.queries - before
        elapsed = asyncio.get_running_loop().time() - started
        assert 2 <= polls <= elapsed / LONGEST_POLL + 2
        busy.finish()
        await until(lambda: receiver.statistics().spans_pending == 0)

        calls, before = len(gpu.calls), turns
        await a_while(0.1)
        assert (len(gpu.calls), turns) == (calls, before)
        del kept


@both_loops
async def test_a_complete_event_is_not_asked_again(gpu: FakeGpu) -> None:
    """Of two streams the one that is done is done."""
    done, busy = gpu.stream("done"), gpu.stream("busy")
    async with pinned_channel(gpu) as (sender, receiver):
        busy.busy = True
        received = await pass_on(sender, receiver)
        receiver.record_stream(received, done)
        receiver.record_stream(received, busy)
        del received
        await until(lambda: len(gpu.events) == 2)
        await a_while()
        assert [event.queries for event in gpu.recorded_on(done)] == [1]
        assert gpu.recorded_on(busy)[0].queries > 2
        busy.finish()
        await until(lambda: free(sender))


@both_loops
async def test_spans_dropped_together_share_their_events(gpu: FakeGpu) -> None:
    """A message of a thousand tensors does not cost a thousand events, and a thousand queries at each poll."""
    busy = gpu.default_streams[0]
    async with pinned_channel(gpu, slots=64) as (sender, receiver):
        busy.busy = True
        await sender.send([tensor(value) for value in range(60)])
        received = await receiver.recv()
        assert receiver.statistics().spans_held == 60
        del received
        await until(lambda: gpu.events)
        await a_while()
        assert receiver.statistics().spans_pending == 60
        assert len(gpu.events) == 1
        assert gpu.events[0].queries < 60
        busy.finish()
        await until(lambda: free(sender))


@both_loops
async def test_cancelling_every_task_does_not_end_the_release(gpu: FakeGpu) -> None:
    """A program that winds up its tasks that way, and goes on with the channel, still gets its slots back."""
    busy = gpu.default_streams[0]
    async with pinned_channel(gpu) as (sender, receiver):
        busy.busy = True
        await pass_on(sender, receiver)
        await until(lambda: gpu.events)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await a_while()
        await pass_on(sender, receiver)
        busy.finish()
        await until(lambda: free(sender))


@both_loops
@pytest.mark.parametrize("seed", range(5))
async def test_whatever_the_order_of_events_no_work_reads_new_bytes(gpu: FakeGpu, seed: int) -> None:
    """Streams that lag and finish, captures, drops here and in threads, in a random order; then everything is free."""
    random = Random(seed)
    streams = [gpu.default_streams[0], gpu.stream("a"), gpu.stream("b")]
    held: list[tuple[torch.Tensor, int]] = []
    work: list[tuple[int, int, FakeEvent]] = []  # address, value, and whether the stream has come to read it

    async with pinned_channel(gpu) as (sender, receiver):
        assert receiver._ledger is not None
        mapping = receiver._ledger.mapping

        def use() -> None:
            received, value = random.choice(held)
            stream = random.choice(streams)
            done = FakeEvent(gpu, stream)
            stream.put(done)
            work.append((received.data_ptr() - mapping.address, value, done))
            receiver.record_stream(received[random.randrange(NBYTES) :], stream)

        def drop() -> None:
            held.pop(random.randrange(len(held)))

        for step in range(300):
            action = random.choice(["receive", "receive", "use", "use", "drop", "drop in a thread", "stream", "wait"])
            if action == "receive":
                await sender.send(tensor(step % 251))
                received = await receiver.recv()
                assert received[0] == received[-1] == step % 251
                if in_arena(receiver, received):
                    held.append((received, step % 251))
                del received
            elif action == "use" and held:
                use()
            elif action == "drop" and held:
                drop()
            elif action == "drop in a thread" and held:
                await asyncio.to_thread(drop)
            elif action == "stream":
                stream = random.choice(streams)
                if stream.busy:
                    stream.finish()
                else:
                    stream.busy = True
                stream.capturing = random.random() < 0.2
            elif action == "wait":
                await asyncio.sleep(0.002)
            work = [item for item in work if not item[2].done]
            for offset, value, _ in work:
                assert mapping.view[offset] == mapping.view[offset + NBYTES - 1] == value
        reused = receiver.statistics().spans_released
        held.clear()
        for stream in streams:
            stream.capturing = False
            stream.finish()
        await until(lambda: free(sender))
        assert reused > 3 * SLOTS, "or this showed little"
        assert receiver.statistics().spans_quarantined == 0


# Errors --------------------------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("failing", ["query_error", "record_error", "streams_error"])
async def test_a_span_the_gpu_says_nothing_about_is_quarantined(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """It is never reused, one warning says so, it is counted, and the channel lives on with the other slots."""
    async with pinned_channel(gpu) as (sender, receiver):
        setattr(gpu, failing, RuntimeError("CUDA error: an illegal memory access was encountered"))
        for value in range(2):
            received = await pass_on(sender, receiver, value)
            del received
        await until(lambda: receiver.statistics().spans_quarantined == 2)
        assert receiver.statistics().spans_pending == 0
        setattr(gpu, failing, None)
        for value in range(3 * SLOTS):
            await pass_on(sender, receiver, value)
            await until(lambda: receiver.statistics().spans_held == 0)
        assert sender.statistics().slots_used == 2
        assert frames(sender) == 0
        kept = [await pass_on(sender, receiver, value) for value in range(SLOTS - 2)]
        await sender.send(tensor())
        await receiver.recv()
        assert frames(sender) == 1
        del kept
    warnings = [record.getMessage() for record in caplog.records if "cannot tell" in record.getMessage()]
    levels = [record.levelno for record in caplog.records if "cannot tell" in record.getMessage()]
    assert levels.count(logging.WARNING) == 1
    assert "illegal memory access" in warnings[0]
