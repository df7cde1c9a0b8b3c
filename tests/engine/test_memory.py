"""Large tensors travel through the arenas, and nobody holds them for longer than needed."""

from __future__ import annotations

import asyncio
import weakref

import pytest
import torch

from aioarena.engine import WorkerGroup
from tests.engine.conftest import Gate, OpenGroup
from tests.multiprocess.harness import eventually_async

NUMEL = 1 << 20  # of float32: 4 MiB


def numbers(start: int) -> torch.Tensor:
    return torch.arange(start, start + NUMEL, dtype=torch.float32)


async def all_released(group: WorkerGroup) -> None:
    """Wait, without calling, until no slot is in use."""
    await eventually_async(
        lambda: group.channel.statistics().slots_used == 0,
        f"workers hold {[status.spans_held for status in group.channel.statistics().readers]} spans of arguments",
    )


async def test_large_tensors_travel_through_the_arenas_both_ways(open_group: OpenGroup) -> None:
    """Without a frame, whole, and as views that hold their slots only while they are there."""
    async with open_group() as group:
        results = await group.call("echo", numbers(0), more={"x": numbers(5)})
        for rank, (answered, args, kwargs) in enumerate(results):
            assert answered == rank
            assert torch.equal(args[0], numbers(0))
            assert torch.equal(kwargs["more"]["x"], numbers(5))
        sent = group.channel.statistics()
        assert (sent.arena_bytes, sent.frame_bytes) == (8 * NUMEL, 0)
        received = [worker.replies.statistics() for worker in group._workers if worker.replies is not None]
        assert [(reply.arena_bytes, reply.frame_bytes, reply.spans_held) for reply in received] == [(8 * NUMEL, 0, 2)] * 2
        del results, args, kwargs
        held = [worker.replies.statistics().spans_held for worker in group._workers if worker.replies is not None]
        assert held == [0, 0]
        await all_released(group)


@pytest.mark.parametrize("method", ["see", "asee", "echo", "fail", "fail_in_a_cycle", "no_such_method"])
async def test_workers_hold_no_arguments_while_they_wait(open_group: OpenGroup, method: str) -> None:
    """Whatever came of the call; nor do those that were not asked."""
    async with open_group() as group:
        await asyncio.gather(
            group.call(method, 1, numbers(0)), group.call_one(1, method, 2, numbers(0)), return_exceptions=True
        )
        await all_released(group)
        assert await group.call("spans_held") == [0, 0]


async def test_arguments_are_free_when_the_reply_is_here(open_group: OpenGroup) -> None:
    """So a caller that waits for the reply finds the arena empty."""
    async with open_group() as group:
        for number in range(5):
            await group.call("see", number, numbers(number))
            assert group.channel.statistics().slots_used == 0


async def test_arguments_are_not_held_until_the_replies_are_here(open_group: OpenGroup, gate: Gate) -> None:
    """Once the call is in the channel, the caller's memory is not needed any more."""
    async with open_group() as group:
        before = group.channel.statistics().messages
        tensor = numbers(0)
        gone = weakref.ref(tensor)
        call = asyncio.create_task(group.call("wait_at", gate.path, tensor))
        del tensor
        await eventually_async(lambda: group.channel.statistics().messages == before + 1, "it is not sent")
        await asyncio.sleep(0)
        assert gone() is None
        assert not call.done()
        gate.open(2)
        assert await call == [0, 1]


async def test_results_of_a_cancelled_call_are_not_held(open_group: OpenGroup, gate: Gate) -> None:
    """Neither those that came before it was cancelled, while others are to come, nor those that come after."""
    async with open_group() as group:
        early, late = (group._workers[rank].replies for rank in range(2))
        assert early is not None and late is not None
        before = early.statistics().messages
        call = asyncio.create_task(group.call("echo_or_wait_at", 0, gate.path, numbers(0)))
        after = asyncio.create_task(group.call("echo", numbers(0)))
        await eventually_async(lambda: early.statistics().messages == before + 2, "no reply")
        assert early.statistics().spans_held == 2
        call.cancel()
        after.cancel()
        await asyncio.wait([call, after])
        assert early.statistics().spans_held == 0
        gate.open(1)
        assert await group.call("see", 1) == [1, 1]
        assert late.statistics().spans_held == 0
        await all_released(group)


async def test_lent_memory_is_sent_without_a_copy(open_group: OpenGroup) -> None:
    async with open_group() as group:
        lent = await group.channel.empty(NUMEL, torch.float32)
        lent.copy_(numbers(3))
        results = await group.call("echo", lent)
        assert all(torch.equal(args[0], numbers(3)) for _, args, _ in results)
        assert group.channel.statistics().lent_bytes == 4 * NUMEL


async def test_without_arenas(open_group: OpenGroup) -> None:
    """Everything works, by frames."""
    async with open_group(arena=None, reply_arena=None) as group:
        results = await group.call("echo", numbers(0))
        assert all(torch.equal(args[0], numbers(0)) for _, args, _ in results)
        assert group.channel.statistics().frame_bytes == 4 * NUMEL
