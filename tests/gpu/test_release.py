"""Slots and streams: no copy ever reads the bytes of a later message, however the tensor was used and dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aioarena
from aioarena._release import HeldSpan, SpanLedger
from tests.gpu.channel import MIB, Blocker, channel, pass_on, pin, until

SLOTS, NBYTES = 4, 8 * MIB
REUSES = 1000


def tensor(value: int) -> torch.Tensor:
    return torch.full((NBYTES,), value % 251, dtype=torch.uint8)


async def overwrite(sender: aioarena.Sender, receiver: aioarena.Receiver, value: int = 250) -> None:
    """Send enough to write every free slot."""
    for _ in range(2 * SLOTS):
        await pass_on(sender, receiver, tensor(value))


@pytest.mark.slow
async def test_a_thousand_reuses_without_one_wrong_byte(report: Callable[[str], None]) -> None:
    """Asynchronous copies on a side stream that lags behind; the sender reuses each slot as soon as it may."""
    side = torch.cuda.Stream()
    target = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    reuses = messages = 0
    async with channel(SLOTS, NBYTES) as (sender, receiver):
        await pin(sender, receiver)
        while reuses < REUSES:
            messages += 1
            received = await pass_on(sender, receiver, tensor(messages))
            in_arena = received.is_pinned()
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)  # the copy starts some 0.6 ms after the tensor is dropped
                target.copy_(received, non_blocking=in_arena)
                wrong += (target != messages % 251).sum()
            receiver.record_stream(received, side)
            del received
            reuses += in_arena
        side.synchronize()
        assert wrong.item() == 0
        await until(lambda: sender.statistics().slots_used == 0)
        fallbacks = sender.statistics().fallbacks["arena_full"]
        report(f"{reuses} reuses of {SLOTS} slots, {messages} messages, {fallbacks} as frames while all slots were read")
        assert receiver.statistics().spans_released > REUSES
        assert receiver.statistics().spans_quarantined == 0


async def use_record_stream(receiver: aioarena.Receiver, box: list[torch.Tensor], target: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    receiver.record_stream(box[0], side)
    behind_a_kernel(side, target, box[0])
    box.clear()


async def use_two_streams(receiver: aioarena.Receiver, box: list[torch.Tensor], target: torch.Tensor) -> None:
    """The second one copies, the first one is done at once."""
    idle, side = torch.cuda.Stream(), torch.cuda.Stream()
    receiver.record_stream(box[0], idle)
    receiver.record_stream(box[0], side)
    behind_a_kernel(side, target, box[0])
    box.clear()


async def use_the_current_stream(receiver: aioarena.Receiver, box: list[torch.Tensor], target: torch.Tensor) -> None:
    behind_a_kernel(torch.cuda.current_stream(), target, box[0])
    box.clear()


async def drop_where_the_stream_is_current(
    receiver: aioarena.Receiver, box: list[torch.Tensor], target: torch.Tensor
) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        behind_a_kernel(side, target, box[0])
        box.clear()


async def use_another_thread(receiver: aioarena.Receiver, box: list[torch.Tensor], target: torch.Tensor) -> None:
    def work() -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            behind_a_kernel(torch.cuda.current_stream(), target, box[0])
            box.clear()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def cancel_to_device(receiver: aioarena.Receiver, box: list[torch.Tensor], target: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    blockers.append(Blocker(side, 1.5))
    copies: list[torch.Tensor] = []
    copy = receiver._accelerator.copy

    def into_target(source: torch.Tensor, device: Any, stream: Any) -> Any:
        moved, event = copy(source, device, stream)
        copies.append(moved)
        return moved, event

    receiver._accelerator.copy = into_target  # type: ignore[method-assign]
    try:
        task = asyncio.create_task(receiver.to_device(box[0], "cuda", side))
        await until(lambda: copies)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        del receiver._accelerator.copy
    with torch.cuda.stream(side):
        target.copy_(copies[0], non_blocking=True)
    copies[0].record_stream(side)
    box.clear()


blockers: list[Blocker] = []


def behind_a_kernel(stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
    """A copy that starts in a second or so."""
    blockers.append(Blocker(stream, 1.5))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


USES = [
    use_record_stream,
    use_two_streams,
    use_the_current_stream,
    drop_where_the_stream_is_current,
    use_another_thread,
    cancel_to_device,
]


@pytest.mark.parametrize("use", USES)
async def test_a_copy_behind_a_long_kernel_reads_the_old_bytes(use: Callable[..., Any]) -> None:
    """The tensor is dropped at once, and the sender overwrites every slot that it may."""
    wrong, still = await wrong_bytes(use)
    assert still, "the copy was over before all slots could be overwritten: this machine is too slow for the test"
    assert wrong == 0


async def test_without_waiting_it_would_read_the_new_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the tests here would notice."""

    def release_at_once(ledger: SpanLedger, held: HeldSpan) -> None:
        ledger._release(held)

    monkeypatch.setattr(SpanLedger, "drop", release_at_once)
    wrong, still = await wrong_bytes(use_record_stream)
    assert still
    assert wrong == NBYTES


async def wrong_bytes(use: Callable[..., Any]) -> tuple[int, bool]:
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    async with channel(SLOTS, NBYTES) as (sender, receiver):
        await pin(sender, receiver)
        box = [await pass_on(sender, receiver, tensor(7))]
        assert box[0].is_pinned()
        blockers.clear()
        await use(receiver, box, target)
        assert box == []
        await overwrite(sender, receiver)
        still = all(blocker.still for blocker in blockers)
        torch.cuda.synchronize()
        await until(lambda: sender.statistics().slots_used == 0)
    return int((target != 7).sum().item()), still


async def test_only_a_slice_is_copied() -> None:
    """Its data pointer is not the one of the span."""
    side = torch.cuda.Stream()
    target = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    async with channel(SLOTS, NBYTES) as (sender, receiver):
        await pin(sender, receiver)
        received = await pass_on(sender, receiver, tensor(7))
        part = received[3 * MIB : 4 * MIB]
        del received
        receiver.record_stream(part, side)
        behind_a_kernel(side, target, part)
        del part
        await overwrite(sender, receiver)
        torch.cuda.synchronize()
        assert bool((target == 7).all())


async def test_after_close_and_in_another_thread() -> None:
    """The receiver is gone, the tensor is used all the same."""
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    arena = aioarena.ArenaConfig(slots=SLOTS, slot_bytes=NBYTES)
    async with aioarena.Sender(2, arena=arena) as sender, aioarena.Receiver(sender.handle, 1) as other:
        async with aioarena.Receiver(sender.handle, 0) as receiver:
            await sender.send(tensor(7))
            box = [await receiver.recv()]
            await other.recv()
            await until(lambda: receiver.statistics().pinned == "yes", 30)
        await use_another_thread(receiver, box, target)
        await overwrite(sender, other)
        torch.cuda.synchronize()
        await until(lambda: sender.statistics().slots_used == 0)
    assert bool((target == 7).all())


async def test_released_with_another_device_current() -> None:
    """Events are those of the stream's device, whichever is current where the tensor is dropped."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, there is {torch.cuda.device_count()}")
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:1")
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize(1)
    async with channel(SLOTS, NBYTES) as (sender, receiver):
        await pin(sender, receiver)
        received = await pass_on(sender, receiver, tensor(7))
        receiver.record_stream(received, side)
        behind_a_kernel(side, target, received)
        with torch.cuda.device(0):
            del received
        await overwrite(sender, receiver)
        torch.cuda.synchronize(1)
        await until(lambda: sender.statistics().slots_used == 0)
        assert receiver.statistics().spans_quarantined == 0
    assert bool((target == 7).all())


# to_device -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "off"])
async def test_to_device(mode: str) -> None:
    """Complete when it returns, on the stream it was asked to use, for tensors of the arena and others."""
    side = torch.cuda.Stream()
    async with channel(SLOTS, NBYTES, pin=mode) as (sender, receiver):
        if mode == "auto":
            await pin(sender, receiver)
        for stream in (None, side):
            sent = {
                "image": torch.randn(3, 512, 512).to(torch.bfloat16),
                "list": [torch.arange(1 << 20), "text"],
                "small": torch.ones(3, dtype=torch.bool),
                "gaps": torch.randn(1024, 1024)[:, ::2],
                "sparse": torch.eye(300).to_sparse(),
            }
            received = await pass_on(sender, receiver, sent)
            moved = await receiver.to_device(received, "cuda", stream)
            del received
            with torch.cuda.stream(stream):
                assert torch.equal(moved["image"], sent["image"].cuda())
                assert torch.equal(moved["list"][0], sent["list"][0].cuda())
                assert torch.equal(moved["gaps"], sent["gaps"].cuda())
                assert torch.equal(moved["sparse"].to_dense(), torch.eye(300, device="cuda"))
            assert moved["list"][1] == "text"
            assert moved["small"].device == torch.device("cuda", torch.cuda.current_device())
            await until(lambda: receiver.statistics().spans_held == 0)


# Graph capture -------------------------------------------------------------------------------------------------------


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """For elementwise operations, which need no handles or workspaces that a capture could stumble over."""
    a, b = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    (a * b).sum().item()
    return a, b


async def test_a_graph_captured_on_the_loop_is_left_alone() -> None:
    """Spans are dropped, and the release task has its turns, while the loop's own thread captures."""
    a, b = operands()
    side = torch.cuda.Stream()
    async with channel(SLOTS, NBYTES) as (sender, receiver):
        await pin(sender, receiver)
        named, unnamed = [await pass_on(sender, receiver, tensor(value)) for value in (1, 2)]
        receiver.record_stream(named, side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            del named, unnamed
            product = a * b
            await asyncio.sleep(0.1)
            # The side stream is not captured: its event was recorded and queried in the middle of the capture.
            assert receiver.statistics().spans_pending == 1
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(product, a * b)
        await until(lambda: receiver.statistics().spans_held == 0)
        assert receiver.statistics().spans_quarantined == 0


async def test_a_graph_captured_in_another_thread_is_left_alone() -> None:
    """Events are pending and polled, and the arena is registered, while that thread captures in the global mode."""
    a, b = operands()
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    capturing, finish = threading.Event(), threading.Event()
    products: list[torch.Tensor] = []
    failures: list[BaseException] = []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, capture_error_mode="global"):
                products.append(a * b)
                capturing.set()
                assert finish.wait(30)
        except BaseException as error:
            failures.append(error)
        finally:
            capturing.set()

    thread = threading.Thread(target=capture)
    async with channel(SLOTS, NBYTES) as (sender, receiver):
        thread.start()
        await until(capturing.is_set)
        try:
            await pass_on(sender, receiver, tensor(1))
            await until(lambda: receiver.statistics().pinned in ("yes", "failed"), 30)
            blocker = Blocker(side, 0.2)
            received = await pass_on(sender, receiver, tensor(2))
            receiver.record_stream(received, side)
            del received
            await asyncio.sleep(0.05)
            assert receiver.statistics().spans_pending >= 1
            del blocker
            await asyncio.sleep(0.3)
        finally:
            finish.set()
            thread.join()
        assert failures == []
        assert receiver.statistics().pinned == "yes"
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(products[0], a * b)
        await until(lambda: receiver.statistics().spans_held == 0)
        assert receiver.statistics().spans_quarantined == 0
