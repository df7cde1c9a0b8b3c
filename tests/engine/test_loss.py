"""A worker ends: everything that was asked of the group fails, and says who it was. The parent ends: so do the workers."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aioarena import WorkerLostError
from aioarena.engine import WorkerGroup
from tests.engine.conftest import OpenGroup
from tests.multiprocess.harness import PATIENCE

ROOT = Path(__file__).parents[2]


def assert_killed(error: Any, rank: int, pid: int, number: int = signal.SIGKILL) -> None:
    assert isinstance(error, WorkerLostError)
    assert (error.rank, error.pid, error.signal, error.exit_code) == (rank, pid, number, None)
    assert f"worker {rank} (pid {pid})" in str(error)
    assert f"was killed by {signal.Signals(number).name}" in str(error)


async def test_a_death_fails_all_calls(open_group: OpenGroup) -> None:
    """Those that are pending, also those that wait for another worker, and all later ones. Closing does not wait, then."""
    async with open_group(3, grace=1e3) as group:
        assert group.loss is None
        pids = group.pids
        pending = [
            group.call("wait_for_ever"),
            group.call("see", 1),
            group.call_one(0, "see", 2),
            group.call_one(1, "see", 3),
        ]
        tasks = [asyncio.create_task(call) for call in pending]
        await asyncio.sleep(0)  # they are sent
        os.kill(pids[1], signal.SIGKILL)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert_killed(outcome, 1, pids[1])
        for later in (group.call("see", 4), group.call_one(0, "see", 5)):
            with pytest.raises(WorkerLostError) as caught:
                await later
            assert_killed(caught.value, 1, pids[1])
        assert_killed(group.loss, 1, pids[1])


async def test_calls_that_are_not_sent_yet_when_a_worker_dies(open_group: OpenGroup) -> None:
    """A call that waits for room in the ring fails like those that are sent."""
    async with open_group() as group:
        calls = [asyncio.create_task(group.call("block"))]
        filler = b"x" * (100 << 10)  # small enough for the ring
        while not group.channel.statistics().waits:
            calls.append(asyncio.create_task(group.call("see", 1, filler)))
            await asyncio.sleep(0)
        os.kill(group.pids[0], signal.SIGKILL)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert_killed(outcome, 0, group.pids[0])


async def test_a_call_whose_copy_is_under_way_when_a_worker_is_lost(open_group: OpenGroup) -> None:
    """It may still be sent, but nobody will reply."""
    async with open_group() as group:
        call = asyncio.create_task(group.call("see", 1, torch.ones(1 << 20)))
        await asyncio.sleep(0)
        assert not group._workers[0].pending
        # As the pump does; the sender has not noticed.
        group._lose(group._workers[0])
        with pytest.raises(WorkerLostError):
            await call


async def test_what_a_worker_replied_before_its_end_counts(open_group: OpenGroup) -> None:
    async with open_group() as group:
        before, end, after = await asyncio.gather(
            group.call_one(0, "see", 1),
            group.call_one(0, "exit_at_once", 3),
            group.call_one(1, "see", 2),
            return_exceptions=True,
        )
        assert before == 1
        assert isinstance(end, WorkerLostError)
        assert (end.rank, end.signal, end.exit_code) == (0, None, 3)
        assert "ended with code 3" in str(end)
        assert after == 2 or isinstance(after, WorkerLostError)


async def test_a_method_that_exits(open_group: OpenGroup) -> None:
    """A worker that ends in good order is lost all the same."""
    async with open_group() as group:
        with pytest.raises(WorkerLostError, match="ended with code 0") as caught:
            await group.call_one(1, "exit", 0)
        assert (caught.value.rank, caught.value.exit_code) == (1, 0)


async def test_a_method_that_exits_and_does_not_come_to_an_end(open_group: OpenGroup) -> None:
    """It is killed, so that its caller learns of it."""
    async with open_group(grace=0.1) as group:
        with pytest.raises(WorkerLostError) as caught:
            await group.call_one(1, "exit_slowly")
        assert_killed(caught.value, 1, group.pids[1])


async def test_a_loss_matters_more_than_what_its_peers_raise(open_group: OpenGroup) -> None:
    """They raise because of it, as collective operations do. It is noted."""
    async with open_group() as group:
        call = asyncio.create_task(group.call("fail_or_wait", 0))
        await asyncio.sleep(0)  # it is sent
        assert await group.call_one(0, "see", 1) == 1  # by now it has failed
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError) as caught:
            await call
        assert_killed(caught.value, 1, group.pids[1])
        assert f"worker 0 (pid {group.pids[0]}) raised, too: ValueError: rank 0 fails" in caught.value.__notes__


async def test_an_error_is_raised_though_others_never_reply(open_group: OpenGroup) -> None:
    """As when they wait for the one that raised."""
    async with open_group(grace=0.1) as group:
        with pytest.raises(ValueError, match="rank 1 fails") as caught:
            await group.call("fail_or_wait", 1)
        assert "no reply yet from rank 0" in caught.value.__notes__
        assert await group.call_one(1, "see", 1) == 1


# The parent -------------------------------------------------------------------------------------------------------------


def wait_for_ends(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE)[0], "a worker outlives its parent"
        os.close(pidfd)


def start_parent(method: str, loop: str, grace: float) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with two workers that are in a call, in a process group of its own."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.parent", method, loop, str(grace)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert parent.stdout is not None
    line = parent.stdout.readline()
    assert line, parent.communicate()[1]
    return parent, [os.pidfd_open(int(pid)) for pid in line.split()]


@pytest.mark.parametrize(
    ("method", "loop", "grace"), [("who", "asyncio", 1e3), ("wait_for_ever", "uvloop", 0.1), ("block", "asyncio", 0.1)]
)
def test_workers_end_with_their_parent(no_leaks: None, method: str, loop: str, grace: float) -> None:
    """Those that wait for a call end at once, those in a call some time later, whether their loop turns or not."""
    parent, pidfds = start_parent(method, loop, grace)
    parent.kill()
    wait_for_ends(pidfds)
    _, errors = parent.communicate()
    assert "Traceback" not in errors


def test_ctrl_c_is_for_the_parent(no_leaks: None) -> None:
    """All processes of a terminal get it: the parent ends the workers, and none of them complains."""
    parent, pidfds = start_parent("block", "asyncio", 0.1)
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=PATIENCE)
    wait_for_ends(pidfds)
    assert parent.returncode == -signal.SIGINT
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt\n") + errors.count("CancelledError\n")
    assert "Process " not in errors  # what multiprocessing prints before a worker's traceback


async def test_workers_ignore_sigint(open_group: OpenGroup) -> None:
    async with open_group() as group:
        for pid in group.pids:
            os.kill(pid, signal.SIGINT)
        assert await group.call("see", 1) == [1, 1]


async def test_a_group_on_spawned_processes(no_leaks: None) -> None:
    """The default start method; its workers die alike."""
    from tests.engine.conftest import OPTIONS
    from tests.engine.objects import Recorder

    async with WorkerGroup(Recorder, 2, "argument", **{**OPTIONS, "method": "spawn", "loop": "uvloop"}) as group:
        assert await group.call("made_with") == [("argument",)] * 2
        assert await group.call("loop") == ["uvloop", "uvloop"]
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError) as caught:
            await group.call("wait_for_ever")
        assert_killed(caught.value, 1, group.pids[1])
