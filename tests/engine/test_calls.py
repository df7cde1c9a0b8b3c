"""Calls: to whom, in what order, what comes back, and what is raised."""

from __future__ import annotations

import asyncio
import os
import traceback
from typing import Any

import pytest
import torch

from aioarena import DecodeError, EncodeError, WorkerError
from tests.engine.conftest import Gate, OpenGroup
from tests.engine.objects import (
    GiveOnlyIn,
    OnlyIn,
    a_lambda,
    cancelled,
    complicated,
    give_cancels,
    local,
    panic,
    with_wrong_notes,
)
from tests.multiprocess.harness import eventually_async


async def test_results_come_by_rank(open_group: OpenGroup) -> None:
    """Of plain methods and of coroutines, with arguments of any name."""
    async with open_group() as group:
        assert await group.call("who") == [(rank, 2, pid) for rank, pid in enumerate(group.pids)]
        for method in ("echo", "aecho"):
            results = await group.call(method, 1, "two", method=3, rank=4)
            assert results == [(rank, (1, "two"), {"method": 3, "rank": 4}) for rank in range(2)]


async def test_call_one_is_executed_by_one(open_group: OpenGroup) -> None:
    """The others skip it, and answer the calls after it rightly."""
    async with open_group() as group:
        assert await group.call_one(1, "see", 7) == 7
        assert await group.call_one(0, "echo", rank=3) == (0, (), {"rank": 3})
        assert await group.call("all_seen") == [[], [7]]
        with pytest.raises(ValueError, match="from 0 to 1, not 2"):
            await group.call_one(2, "see", 0)
        with pytest.raises(TypeError, match="rank must be an int"):
            await group.call_one("0", "see", 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="name of one"):
            await group.call(print)  # type: ignore[arg-type]


async def test_calls_of_many_tasks_are_executed_in_their_order(open_group: OpenGroup) -> None:
    """Plain methods do not overtake coroutines that suspend, nor small calls a large one whose copy is under way."""
    large = torch.ones(1 << 20)
    async with open_group() as group:
        calls: list[asyncio.Task[Any]] = []
        for number in range(300):
            method = "asee" if number % 3 == 0 else "see"
            args = (large,) if number % 50 == 10 else ()
            if number % 7 == 5:
                calls.append(asyncio.create_task(group.call_one(number % 2, method, number, *args)))
            else:
                calls.append(asyncio.create_task(group.call(method, number, *args)))
        results = await asyncio.gather(*calls)
        assert results == [number if number % 7 == 5 else [number, number] for number in range(300)]
        expected = [[n for n in range(300) if n % 7 != 5 or n % 2 == rank] for rank in range(2)]
        assert await group.call("all_seen") == expected


async def test_calls_are_sent_while_others_are_executed(open_group: OpenGroup, gate: Gate) -> None:
    """They are in the channel before the first is answered, and their results come to their callers."""
    async with open_group() as group:
        before = group.channel.statistics().messages
        calls = [asyncio.create_task(group.call("wait_at", gate.path))]
        calls += [asyncio.create_task(group.call("see", number)) for number in range(20)]
        await eventually_async(lambda: group.channel.statistics().messages == before + 21, "they wait for each other")
        assert not any(call.done() for call in calls)
        gate.open(2)
        assert await asyncio.gather(*calls) == [[0, 1], *[[number, number] for number in range(20)]]


# Errors ---------------------------------------------------------------------------------------------------------------


async def test_an_exception_is_raised_at_the_caller(open_group: OpenGroup) -> None:
    """The exception itself, with the worker's traceback and name where it is printed; and the group goes on."""
    async with open_group() as group:
        with pytest.raises(KeyError) as caught:
            await group.call("fail", 1, error=KeyError("weights", 3))
        assert caught.value.args == ("weights", 3)
        printed = "".join(traceback.format_exception(caught.value))
        assert f"worker 1 (pid {group.pids[1]}), calling fail()" in printed
        assert "raise error or ValueError" in printed
        assert "raised, too" not in printed
        assert await group.call("fail", 5) == [0, 1]
        with pytest.raises(AttributeError, match="no_such_method"):
            await group.call("no_such_method")


async def test_of_several_exceptions_the_lowest_rank_is_raised(open_group: OpenGroup) -> None:
    """The others are noted."""
    async with open_group(3) as group:
        with pytest.raises(ValueError, match="rank 1 fails") as caught:
            await group.call("fail", 2, 1)
        notes = "\n".join(caught.value.__notes__)
        assert f"worker 2 (pid {group.pids[2]}) raised, too: ValueError: rank 2 fails" in notes


@pytest.mark.parametrize("make", [complicated, local, cancelled, panic, with_wrong_notes])
async def test_an_exception_that_does_not_travel(open_group: OpenGroup, make: Any) -> None:
    """One that does not pickle, does not unpickle, takes no notes, or would mean something else here: its text comes."""
    async with open_group(1) as group:
        with pytest.raises(WorkerError, match=type(make()).__name__) as caught:
            await group.call("fail_with", make)
        assert "in fail_with" in str(caught.value.__cause__)
        assert await group.call("see", 1) == [1]


async def test_arguments_that_do_not_pickle(open_group: OpenGroup) -> None:
    """Nothing is sent, and no reply is waited for."""
    async with open_group() as group:
        with pytest.raises(EncodeError, match="function"):
            await group.call("echo", a_lambda())
        assert await group.call("see", 1) == [1, 1]


async def test_a_result_that_does_not_pickle(open_group: OpenGroup) -> None:
    """It is an error of that call alone."""
    async with open_group() as group:
        calls = [group.call("see", 1), group.call("give", a_lambda), group.call("see", 2)]
        before, error, after = await asyncio.gather(*calls, return_exceptions=True)
        assert (before, after) == ([1, 1], [2, 2])
        assert isinstance(error, EncodeError)
        assert "in what give() returned" in error.__notes__


async def test_arguments_that_do_not_unpickle(open_group: OpenGroup) -> None:
    """An error of that call alone; and of no call, if it happens in a worker that skips the call anyway."""
    async with open_group() as group:
        first = group.pids[0]
        calls = [group.call("echo", OnlyIn(first)), group.call_one(0, "echo", OnlyIn(first)), group.call("see", 2)]
        error, one, after = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(error, DecodeError)
        assert "unpickled elsewhere" in str(error.__cause__)
        assert "worker 1" in str(error.__cause__)
        assert one == (0, ("unpickled",), {})
        assert after == [2, 2]


async def test_a_result_that_does_not_unpickle(open_group: OpenGroup) -> None:
    async with open_group() as group:
        calls = [group.call("give", GiveOnlyIn(group.pids[0])), group.call("see", 2)]
        error, after = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(error, DecodeError)
        assert "unpickled elsewhere" in str(error.__cause__)
        assert after == [2, 2]
        assert await group.call("give", GiveOnlyIn(os.getpid())) == ["unpickled", "unpickled"]


async def test_a_result_that_looks_like_a_cancellation(open_group: OpenGroup) -> None:
    """It is an error of that call, and the replies after it are taken."""
    async with open_group(1) as group:
        with pytest.raises(WorkerError, match="CancelledError: by what was unpickled"):
            await group.call("give", give_cancels)
        assert await group.call("see", 1) == [1]


# Cancelling -----------------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_is_executed_and_its_results_are_dropped(open_group: OpenGroup, gate: Gate) -> None:
    """Calls after it get their own results."""
    async with open_group() as group:
        calls = [asyncio.create_task(group.call("wait_at", gate.path))]
        calls += [asyncio.create_task(group.call("see", number)) for number in (1, 2)]
        await asyncio.sleep(0)  # they are sent
        for call in calls[:2]:
            call.cancel()
        gate.open(2)
        assert await calls[2] == [2, 2]
        assert all(call.cancelled() for call in calls[:2])
        assert await group.call("all_seen") == [["waits", 1, 2]] * 2


async def test_a_call_that_is_cancelled_before_it_was_sent(open_group: OpenGroup) -> None:
    """No worker executes it."""
    async with open_group() as group:
        never = asyncio.create_task(group.call("see", 1))
        copied = asyncio.create_task(group.call("see", 2, torch.ones(1 << 20)))
        never.cancel()
        await asyncio.sleep(0)  # the other one's copy is under way
        copied.cancel()
        await asyncio.wait([never, copied])
        assert never.cancelled() and copied.cancelled()
        assert await group.call("see", 3) == [3, 3]
        assert await group.call("all_seen") == [[3], [3]]
        assert group.channel.statistics().slots_used == 0


async def test_a_method_that_cancels_its_own_task(open_group: OpenGroup) -> None:
    """Which is the worker's, and goes on."""
    async with open_group() as group:
        assert await group.call("cancel_itself") == [0, 1]
        assert await group.call("asee", 1) == [1, 1]
