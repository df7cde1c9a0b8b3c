"""to_device: the right device and stream in whatever thread the copy runs, and slots that wait for it by themselves."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch

import aioarena
from aioarena._devices import map_tensors
from tests.gpu_seam.channel import channel, pass_on, tensor
from tests.gpu_seam.fake import FakeGpu
from tests.gpu_seam.loops import a_while, both_loops, until
from tests.gpu_seam.test_release import free, pinned_channel

LOOP_THREAD = threading.main_thread().name


# Gating --------------------------------------------------------------------------------------------------------------


@both_loops
async def test_the_event_is_recorded_at_the_copy_and_gates(gpu: FakeGpu) -> None:
    """What the stream does after the copy does not hold up the slot, and no other stream is asked."""
    side = gpu.stream("side")
    async with pinned_channel(gpu) as (sender, receiver):
        received = await pass_on(sender, receiver, 5)
        moved = await receiver.to_device(received, "cuda", side)
        assert torch.equal(moved, tensor(5))
        [event] = gpu.events
        assert event.stream is side
        side.busy = True
        gpu.default_streams[0].busy = True
        del received
        await until(lambda: free(sender))
        assert gpu.events == [event]


@both_loops
async def test_a_pending_copy_gates(gpu: FakeGpu) -> None:
    """A cancelled to_device leaves a copy under way that still reads the slot."""
    side = gpu.stream("side")
    async with pinned_channel(gpu) as (sender, receiver):
        side.busy = True
        received = await pass_on(sender, receiver)
        task = asyncio.create_task(receiver.to_device(received, "cuda", side))
        await until(lambda: gpu.events)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del received, task
        await a_while()
        assert receiver.statistics().spans_pending == 1
        side.finish()
        await until(lambda: free(sender))


@both_loops
async def test_cancelled_while_a_thread_copies(gpu: FakeGpu) -> None:
    """The thread is waited for, and what it enqueued gates."""
    gpu.initialize()
    side = gpu.stream("side")
    gpu.copy_gate = threading.Event()
    async with channel(pin="off") as (sender, receiver):
        side.busy = True
        received = await pass_on(sender, receiver)
        task = asyncio.create_task(receiver.to_device(received, "cuda", side))
        await until(gpu.copying.is_set)
        task.cancel()
        await a_while()
        assert not task.done(), "the thread still uses the memory"
        gpu.copy_gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del received, task
        await a_while()
        assert receiver.statistics().spans_pending == 1
        side.finish()
        await until(lambda: free(sender))


@both_loops
async def test_it_returns_only_when_the_copies_are_complete(gpu: FakeGpu) -> None:
    """All of them, each of which may be on its own."""
    side = gpu.stream("side")
    async with pinned_channel(gpu) as (sender, receiver):
        side.busy = True
        message = {"a": await pass_on(sender, receiver, 1), "b": [await pass_on(sender, receiver, 2)]}
        task = asyncio.create_task(receiver.to_device(message, "cuda", side))
        await until(lambda: len(gpu.events) == 2)
        gpu.events[0].done = True
        await a_while()
        assert not task.done()
        side.finish()
        moved = await task
        assert moved["a"][0] == 1
        assert moved["b"][0][0] == 2


@both_loops
async def test_both_a_copy_and_a_named_stream_gate(gpu: FakeGpu) -> None:
    """record_stream adds to what to_device knows."""
    side = gpu.stream("side")
    async with pinned_channel(gpu) as (sender, receiver):
        received = await pass_on(sender, receiver)
        await receiver.to_device(received, "cuda")
        receiver.record_stream(received, side)
        side.busy = True
        del received
        await until(lambda: gpu.recorded_on(side))
        await a_while()
        assert not free(sender)
        side.finish()
        await until(lambda: free(sender))


@both_loops
async def test_slots_come_back_when_it_is_the_first_use_of_the_gpu(gpu: FakeGpu) -> None:
    """Nothing was running for the GPU then; and the arena is pinned with the next tensor."""
    async with channel() as (sender, receiver):
        received = await pass_on(sender, receiver)
        await receiver.to_device(received, "cuda:0")
        del received
        await until(lambda: free(sender))
        await pass_on(sender, receiver)
        await until(lambda: receiver.statistics().pinned == "yes")


@both_loops
async def test_events_of_a_tensor_that_stays_do_not_pile_up(gpu: FakeGpu) -> None:
    """A tensor that is kept and copied at every step."""
    async with pinned_channel(gpu) as (sender, receiver):
        assert receiver._ledger is not None
        received = await pass_on(sender, receiver)
        for _ in range(20):
            await receiver.to_device(received, "cuda")
        [held] = receiver._ledger.held.values()
        assert len(held.events) == 1
        del received


# Where it runs -------------------------------------------------------------------------------------------------------


@both_loops
async def test_unpinned_copies_run_in_a_thread_on_the_device_and_stream_of_the_loop(gpu: FakeGpu) -> None:
    """A thread of a pool has device 0 and the default streams as its current ones."""
    gpu.initialize(device=1)
    mine = gpu.stream("mine", device=1)
    async with channel(pin="off") as (sender, receiver):
        received = await pass_on(sender, receiver)
        with gpu.using(mine):
            await receiver.to_device(received, "cuda")
        [(device, stream, thread)] = gpu.copies
        assert (device, stream) == (1, mine)
        assert thread.startswith("aioarena-")
        assert gpu.contexts == {1}
        del received


@both_loops
async def test_the_loop_turns_while_a_thread_copies(gpu: FakeGpu) -> None:
    """From pageable memory a copy takes as long as the copying."""
    gpu.initialize()
    gpu.copy_gate = threading.Event()
    async with channel(pin="off") as (sender, receiver):
        task = asyncio.create_task(receiver.to_device(await pass_on(sender, receiver, 1), "cuda"))
        await until(gpu.copying.is_set)
        assert (await pass_on(sender, receiver, 2))[0] == 2
        gpu.copy_gate.set()
        assert (await task)[0] == 1


@both_loops
async def test_close_waits_for_a_thread_that_copies_while_the_loop_turns(gpu: FakeGpu) -> None:
    """The copy is finished, and its caller gets it."""
    gpu.initialize()
    gpu.copy_gate = threading.Event()
    async with channel(pin="off") as (sender, receiver):
        received = await pass_on(sender, receiver, 3)
        task = asyncio.create_task(receiver.to_device(received, "cuda"))
        await until(gpu.copying.is_set)
        close = asyncio.create_task(receiver.aclose())
        await a_while()
        assert not close.done()
        gpu.copy_gate.set()
        await close
        assert (await task)[0] == 3
        del received, task
        await until(lambda: free(sender))


@both_loops
async def test_copies_need_not_wait_for_a_registration(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second, and the pool may have one thread only. (The runtime may hold them up; we do not.)"""
    gpu.initialize()
    gpu.register_gate = threading.Event()
    async with channel() as (sender, receiver):
        monkeypatch.setattr(receiver._pool, "_threads", 1)
        received = await pass_on(sender, receiver)
        await until(gpu.registering.is_set)
        task = asyncio.create_task(receiver.to_device(received, "cuda"))
        await until(lambda: gpu.copies)
        gpu.register_gate.set()
        await task
        del received, task
        await until(lambda: receiver.statistics().pinned == "yes" and free(sender))
    gpu.misuse = [misuse for misuse in gpu.misuse if "held up" not in misuse]


@both_loops
async def test_pinned_copies_are_only_enqueued_on_the_loop(gpu: FakeGpu) -> None:
    """No thread is crossed for what takes microseconds, as long as it does."""
    async with pinned_channel(gpu) as (sender, receiver):
        received = await pass_on(sender, receiver)
        small = torch.ones(1000)
        large = torch.ones(1 << 18)  # 1 MiB
        gaps = received.view(-1, 2)[:, 0]
        for message, in_loop in (
            (received, True),
            ([received[100:], small], True),
            (large, False),
            ([received, large], False),
            ([gaps] * 40, True),  # a tensor that occurs again is copied once
        ):
            gpu.copies.clear()
            await receiver.to_device(message, "cuda")
            assert {thread == LOOP_THREAD for _, _, thread in gpu.copies} == {in_loop}
        del received, gaps, message


@both_loops
async def test_a_pinned_tensor_with_gaps_is_gathered_in_a_thread(gpu: FakeGpu) -> None:
    """Its elements are collected by the CPU first, whatever the memory is."""
    gpu.initialize()
    arena = aioarena.ArenaConfig(slots=4, slot_bytes=4 << 20)
    async with aioarena.Sender(1, arena=arena) as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        await sender.send(torch.zeros(1 << 20))
        received = await receiver.recv()
        await until(lambda: receiver.statistics().pinned == "yes")
        for part, in_loop in ((received[::2], False), (received[: 1 << 19], True)):
            gpu.copies.clear()
            await receiver.to_device(part, "cuda")
            assert [thread == LOOP_THREAD for _, _, thread in gpu.copies] == [in_loop]
        del received, part


@both_loops
async def test_a_thread_copies_in_the_modes_of_the_caller(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether gradients are tracked must not depend on which thread copies."""
    gpu.initialize()
    modes: list[tuple[bool, bool]] = []
    copy = gpu.copy

    def spy(tensor: torch.Tensor, device: Any, stream: Any) -> Any:
        modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return copy(tensor, device, stream)

    monkeypatch.setattr(gpu, "copy", spy)
    async with channel(pin="off") as (_, receiver):
        await receiver.to_device(tensor(), "cuda")
        with torch.no_grad():
            await receiver.to_device(tensor(), "cuda")
        with torch.inference_mode():
            await receiver.to_device(tensor(), "cuda")
    assert modes == [(True, False), (False, False), (False, True)]


# What it takes and gives ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


class Counted(dict):  # type: ignore[type-arg]
    """A dict with more to it."""

    count = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    pixels: Any
    name: str


@dataclasses.dataclass
class Loose:
    pixels: Any
    late: Any = dataclasses.field(init=False)


def test_containers_keep_their_type_and_what_holds_no_tensor_its_identity() -> None:
    """Dict and list subclasses, named tuples, frozen dataclasses with slots, fields without a value."""
    one = torch.ones(2)
    counted = Counted(x=one)
    counted.count = 3
    default = collections.defaultdict(list, x=one)
    untouched = {"a": [1, (2, 3)], "b": Pair(1, "x"), "size": torch.Size([2, 3]), "d": Frozen(1, "n")}
    loose = Loose([one])
    loose.more = "extra"  # type: ignore[attr-defined]
    message = {
        "pair": Pair(one, [one, 5]),
        "counted": counted,
        "default": default,
        "ordered": collections.OrderedDict(z=one, a=1),
        "frozen": Frozen((one,), "n"),
        "loose": loose,
        "untouched": untouched,
    }
    moved = map_tensors(message, lambda tensor: tensor + 1)
    two = moved["pair"].left
    assert torch.equal(two, one + 1)
    assert moved["pair"] == Pair(two, [two, 5]), "the same tensor twice is one tensor"
    assert type(moved["counted"]) is Counted
    assert moved["counted"].count == 3
    assert moved["counted"]["x"] is two
    assert moved["default"]["missing"] == []
    assert moved["default"]["x"] is two
    assert list(moved["ordered"]) == ["z", "a"]
    assert moved["frozen"] == Frozen((two,), "n")
    assert moved["loose"].pixels[0] is two
    assert moved["loose"].more == "extra"
    assert not hasattr(moved["loose"], "late")
    assert moved["untouched"] is untouched
    assert message["pair"].left is one, "the message itself is as it was"
    assert counted["x"] is one


@both_loops
async def test_cpu_as_destination_gives_private_copies(gpu: FakeGpu) -> None:
    """And asks no runtime."""
    async with channel() as (sender, receiver):
        received = await pass_on(sender, receiver, 4)
        private = await receiver.to_device({"x": received}, "cpu")
        del received
        assert receiver.statistics().spans_held == 0
        assert torch.equal(private["x"], tensor(4))
    assert gpu.calls == []


@both_loops
@pytest.mark.parametrize("pin", ["auto", "off"])
@pytest.mark.parametrize("way", ["done", "failed", "cancelled", "cpu", "large cpu"])
async def test_nothing_is_kept_of_what_was_copied(
    gpu: FakeGpu, pin: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the received tensor nor the copy, also without the garbage collector, however it ended."""
    gpu.initialize()
    slots = 64 if way == "large cpu" else 4
    async with channel(slots=slots, pin=pin) as (sender, receiver):
        if pin == "auto":
            await pass_on(sender, receiver)
            await until(lambda: receiver.statistics().pinned == "yes" and receiver.statistics().spans_held == 0)
        copies: list[weakref.ref[torch.Tensor]] = []
        copy = gpu.copy

        def spy(tensor: torch.Tensor, device: Any, stream: Any) -> Any:
            if way == "failed" and copies:
                raise RuntimeError("no")
            copied, event = copy(tensor, device, stream)
            copies.append(weakref.ref(copied))
            return copied, event

        monkeypatch.setattr(gpu, "copy", spy)
        side = gpu.stream("side")
        gc.disable()
        try:
            large = [torch.ones(1 << 18)] if way == "large cpu" else []
            await sender.send([tensor(1), {"x": tensor(2)}, tensor(3), *large])
            received = await receiver.recv()
            assert receiver.statistics().spans_held >= 3
            if way == "cancelled":
                side.busy = True
                task = asyncio.create_task(receiver.to_device(received, "cuda", side))
                await until(lambda: gpu.recorded_on(side))
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                del task
                side.finish()
            elif way == "failed":
                with contextlib.suppress(RuntimeError):
                    await receiver.to_device(received, "cuda", side)
            else:
                moved = await receiver.to_device(
                    received, "cuda" if way == "done" else "cpu", side if way == "done" else None
                )
                assert moved[0][0] == 1
                del moved
            del received
            await until(lambda: receiver.statistics().spans_held == 0)
            assert bool(copies) == ("cpu" not in way)
            assert [reference() for reference in copies] == [None] * len(copies)
        finally:
            gc.enable()


@both_loops
async def test_a_failing_copy_is_the_callers_error(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory at the second tensor: the first one's copy still gates."""
    side = gpu.stream("side")
    copy = gpu.copy
    async with pinned_channel(gpu) as (sender, receiver):

        def out_of_memory(tensor: torch.Tensor, device: Any, stream: Any) -> Any:
            if gpu.copies:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return copy(tensor, device, stream)

        gpu.copies.clear()
        monkeypatch.setattr(gpu, "copy", out_of_memory)
        side.busy = True
        message = [await pass_on(sender, receiver, 1), await pass_on(sender, receiver, 2)]
        with pytest.raises(torch.OutOfMemoryError):
            await receiver.to_device(message, "cuda", side)
        message.clear()
        await until(lambda: receiver.statistics().spans_held == 1)
        await a_while()
        assert receiver.statistics().spans_pending == 1
        side.finish()
        await until(lambda: free(sender))
