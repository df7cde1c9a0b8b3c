"""Start and end of a group."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioarena import ClosedError, EncodeError, NoSpaceError, WorkerLostError, WrongContextError, _group, engine
from aioarena.engine import WorkerGroup
from tests.engine import objects
from tests.engine.conftest import OPTIONS, Gate, OpenGroup
from tests.multiprocess.harness import PATIENCE, eventually_async

ROOT = Path(__file__).parents[2]


def new_group(factory: Callable[..., Any] = objects.Recorder, size: int = 2, *args: Any, **options: Any) -> WorkerGroup:
    return WorkerGroup(factory, size, *args, **{**OPTIONS, **options})


async def test_the_factory_gets_its_arguments(open_group: OpenGroup) -> None:
    """Large ones, too; it may be a coroutine function."""
    tensor = torch.ones(1 << 20)
    async with open_group(2, "one", tensor) as group:
        for text, received in await group.call("made_with"):
            assert text == "one"
            assert torch.equal(received, tensor)
        assert group.channel.statistics().arena_bytes == tensor.nbytes
    async with open_group(factory=objects.make_slowly) as group:
        assert await group.call("made_with") == [("slowly",)] * 2


async def test_the_workers_loop(open_group: OpenGroup) -> None:
    for loop in ("asyncio", "uvloop"):
        async with open_group(1, loop=loop) as group:
            assert (await group.call("loop"))[0].split(".")[0] == loop


async def test_an_error_of_the_factory(no_leaks: None) -> None:
    """Start raises it, with the worker's traceback, and no process is left."""
    group = new_group(objects.fail_at, 2, 1)
    with pytest.raises(LookupError, match="no model for rank 1") as caught:
        await group.start()
    assert "in fail_at" in str(caught.value.__cause__)
    assert f"worker 1 (pid {group.pids[1]}), making the object" in str(caught.value.__cause__)
    assert_gone(group.pids)
    with pytest.raises(ClosedError):
        await group.call("see", 1)
    await group.aclose()


async def test_a_factory_that_does_not_pickle(no_leaks: None) -> None:
    group = new_group(lambda rank, size: None)
    with pytest.raises(EncodeError):
        await group.start()
    assert_gone(group.pids)


async def test_a_worker_that_cannot_attach(no_leaks: None) -> None:
    """Start raises what kept it from that."""
    group = new_group(size=1, reply_arena=engine.ArenaConfig(slots=1 << 16, slot_bytes=1 << 24))
    with pytest.raises(NoSpaceError, match="pass a smaller ArenaConfig") as caught:
        await group.start()
    assert caught.value.needed > caught.value.available
    assert_gone(group.pids)


async def test_a_worker_that_dies_before_it_attaches(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed, too, where somebody keeps its pipe open, as a child would that was forked meanwhile."""
    start = _group.Worker.start
    kept: list[int] = []

    def start_and_kill(*args: Any) -> _group.Worker:
        worker = start(*args)
        kept.append(os.open(f"/proc/self/fd/{worker._pipe.fileno()}", os.O_WRONLY))
        os.kill(worker.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(_group.Worker, "start", start_and_kill)
    group = new_group(size=1)
    with pytest.raises(WorkerLostError) as caught:
        await group.start()
    assert (caught.value.rank, caught.value.signal) == (0, signal.SIGKILL)
    assert_gone(group.pids)
    os.close(kept[0])


async def test_a_worker_that_dies_while_it_starts(no_leaks: None, tmp_path: Path) -> None:
    group = new_group(objects.block_in, 2, f"{tmp_path}/pid")
    starting = asyncio.create_task(group.start())
    await eventually_async((tmp_path / "pid-1").exists, "the factory is not called")
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLostError) as caught:
        await starting
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)
    assert_gone(group.pids)


@pytest.mark.parametrize("when", ["at once", "attaching", "making"])
async def test_a_start_that_is_cancelled(no_leaks: None, tmp_path: Path, when: str) -> None:
    group = new_group(objects.block_in, 2, f"{tmp_path}/pid")
    starting = asyncio.create_task(group.start())
    await reach(when, group, tmp_path)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert_gone(group.pids)


@pytest.mark.parametrize("when", ["at once", "attaching", "making"])
async def test_a_group_that_is_closed_while_it_starts(no_leaks: None, tmp_path: Path, when: str) -> None:
    group = new_group(objects.block_in, 2, f"{tmp_path}/pid", grace=0.0)
    starting = asyncio.create_task(group.start())
    await reach(when, group, tmp_path)
    await group.aclose()
    with pytest.raises(ClosedError, match="closed while it started"):
        await starting
    assert_gone(group.pids)


async def reach(when: str, group: WorkerGroup, tmp_path: Path) -> None:
    await asyncio.sleep(0)
    if when == "attaching":
        await eventually_async(lambda: len(group.pids) == 2, "no worker starts")
    elif when == "making":
        await eventually_async((tmp_path / "pid-1").exists, "the factory is not called")


async def test_closing_lets_workers_finish_what_was_sent(open_group: OpenGroup, gate: Gate) -> None:
    """Its callers get their results; who calls later does not."""
    async with open_group() as group:
        calls = [asyncio.create_task(group.call("wait_at", gate.path))]
        calls += [asyncio.create_task(group.call("asee", number)) for number in range(10)]
        await asyncio.sleep(0)  # they are sent
        closing = asyncio.create_task(group.aclose())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await group.call("see", 10)
        gate.open(2)
        await closing
        assert await asyncio.gather(*calls) == [[0, 1], *[[number, number] for number in range(10)]]
        assert [worker.exit_code for worker in group._workers] == [0, 0]
        await group.aclose()


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_worker_that_does_not_end(open_group: OpenGroup, deaf: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is terminated, and killed if it does not listen. Its call says so, and so does the log."""
    async with open_group(grace=0.1) as group:
        call = asyncio.create_task(group.call_one(1, "block", deaf))
        await asyncio.sleep(0)
        if deaf:
            await eventually_async(lambda: ignores_sigterm(group.pids[1]), "it is not called")
        with caplog.at_level(logging.WARNING, "aioarena"):
            await group.aclose()
        with pytest.raises(WorkerLostError) as caught:
            await call
        assert caught.value.signal == (signal.SIGKILL if deaf else signal.SIGTERM)
        assert [f"worker 1 (pid {group.pids[1]})" in message for message in caplog.messages] == [True] * (1 + deaf)


def ignores_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(mask >> (signal.SIGTERM - 1) & 1)


async def test_closing_that_is_cancelled_kills_the_workers(open_group: OpenGroup) -> None:
    """At once, whatever ``grace`` is, and though they ignore SIGTERM."""
    async with open_group(grace=1e3) as group:
        call = asyncio.create_task(group.call("block", True))
        await asyncio.sleep(0)  # it is sent
        for pid in group.pids:
            await eventually_async(lambda pid=pid: ignores_sigterm(pid), "it is not called")
        closing = asyncio.create_task(group.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert_gone(group.pids)
        with pytest.raises(WorkerLostError) as caught:
            await call
        assert caught.value.signal == signal.SIGKILL


async def test_closing_whose_task_is_cancelled_with_all_others(open_group: OpenGroup) -> None:
    """As asyncio.run does after the second Ctrl-C: it kills the workers and frees everything all the same."""
    async with open_group(grace=1e3) as group:
        call = asyncio.create_task(group.call("see", 1))
        for pid in group.pids:
            os.kill(pid, signal.SIGSTOP)
        closing = asyncio.create_task(group.aclose())
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it has begun
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert_gone(group.pids)
        with pytest.raises((asyncio.CancelledError, WorkerLostError)):
            await call


async def test_a_worker_that_somebody_else_has_reaped(no_leaks: None) -> None:
    """Its group closes, and its process id, which may be another process's by now, is nobody's to be signalled."""
    group = new_group(size=1, method="spawn")
    await group.start()
    os.kill(group.pids[0], signal.SIGKILL)
    os.waitpid(group.pids[0], 0)
    with pytest.raises(WorkerLostError, match="ended; close"):
        await group.call("see", 1)
    await group.aclose()
    assert not multiprocessing.active_children()


async def test_a_worker_starts_no_group(open_group: OpenGroup) -> None:
    async with open_group(1) as group:
        with pytest.raises(WrongContextError, match="start the group in their parent"):
            await group.call("start_a_group")
        assert await group.call("see", 1) == [1]


def test_a_main_module_that_starts_a_group_when_it_is_imported(no_leaks: None, tmp_path: Path) -> None:
    """Both the worker and the parent say what to do."""
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\n"
        "from aioarena.engine import WorkerGroup\n"
        "async def main():\n"
        "    async with WorkerGroup(dict, 1, arena=None, reply_arena=None): pass\n"
        "asyncio.run(main())\n"
    )
    done = run_program(str(program))
    assert done.returncode == 1
    assert "importing because it is to become a worker itself" in done.stderr
    assert "WorkerLostError: worker 0" in done.stderr
    assert "it had not got as far as making its object" in done.stderr
    assert "multiprocessing/popen" not in done.stderr


def test_a_forked_child_that_exits(no_leaks: None) -> None:
    """It does not end its parent's workers, and is told that it cannot use them."""
    done = run_program("-m", "tests.engine.exits", "fork")
    assert done.stdout.splitlines() == ["in the child: WrongContextError", "in the parent: [1, 1]"], done.stderr
    assert done.returncode == 0


def test_a_group_that_nobody_closes(no_leaks: None) -> None:
    """Its process ends all the same, though a worker is stopped and would never end by itself; no worker is left."""
    done = run_program("-m", "tests.engine.exits", "forget")
    assert done.returncode == 0, done.stderr
    assert_gone(tuple(map(int, done.stdout.split())))


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )


async def test_several_close_at_a_time(open_group: OpenGroup) -> None:
    async with open_group() as group:
        await asyncio.gather(group.aclose(), group.aclose())
        assert_gone(group.pids)


async def test_a_group_that_was_not_started(no_leaks: None) -> None:
    group = new_group()
    with pytest.raises(ClosedError, match="not started"):
        await group.call("see", 1)
    assert group.pids == ()
    await group.aclose()
    with pytest.raises(ClosedError, match="closed"):
        await group.call("see", 1)
    with pytest.raises(ClosedError, match="make a new one"):
        await group.start()


async def test_calls_belong_on_the_loop_of_the_group(open_group: OpenGroup) -> None:
    async with open_group(1) as group:
        with pytest.raises(WrongContextError):
            await asyncio.to_thread(lambda: asyncio.run(group.call("see", 1)))


def test_only_workers_have_a_receiver() -> None:
    with pytest.raises(WrongContextError, match="not a worker"):
        engine.receiver()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"factory": 5}, TypeError),
        ({"size": 0}, ValueError),
        ({"size": 2.0}, TypeError),
        ({"size": True}, TypeError),
        ({"name": 5}, TypeError),
        ({"arena": 5}, TypeError),
        ({"reply_arena": 5}, TypeError),
        ({"wake": "shout"}, ValueError),
        ({"method": "fork"}, ValueError),
        ({"loop": "trio"}, ValueError),
        ({"grace": -1.0}, ValueError),
        ({"grace": float("nan")}, ValueError),
        ({"grace": "long"}, TypeError),
    ],
)
def test_wrong_arguments(no_leaks: None, arguments: dict[str, Any], error: type[Exception]) -> None:
    options = {"factory": objects.Recorder, "size": 2, **arguments}
    with pytest.raises(error):
        WorkerGroup(options.pop("factory"), options.pop("size"), **options)


def assert_gone(pids: tuple[int, ...]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
