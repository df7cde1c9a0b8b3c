"""Actors of a real Ray, one node, as ends of a channel. Skipped where there is no Ray: see CONTRIBUTING."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aioarena
from tests.multiprocess.harness import PATIENCE, eventually_async

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray==2.60.0"),
    pytest.mark.multiprocess,
    pytest.mark.timeout(6 * PATIENCE),
    # Ray's own, in our process.
    pytest.mark.filterwarnings("default"),
]

# Of the driver; the actors have uvloop.
on_one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

ROOT = Path(__file__).parents[2]
# Nothing leaves this machine, and nothing is written to the user's home.
OFFLINE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
        )
        yield
        ray.shutdown()


def actors() -> Any:
    from tests.ray import actors

    return actors


async def send(chan: aioarena.Sender, number: int) -> None:
    async with asyncio.timeout(PATIENCE):
        await chan.send((number, torch.full((1 << 16,), number)))


async def result(reference: Any) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await reference


@on_one_loop
async def test_actors_read(cluster: None) -> None:
    """An async and a plain actor, attached to the memory of the driver; the handle goes through Ray in any nesting."""
    import ray

    kinds = actors()
    async with aioarena.Sender(2) as chan:
        one, other = kinds.AsyncReader.remote(), kinds.PlainReader.remote()
        results = [one.read.remote(ray.put(chan.handle), 0), other.read.remote(chan.handle, 1)]
        for number in range(5):
            await send(chan, number)
        numbers, arena_bytes = await result(one.so_far.remote(5))
        assert numbers == list(range(5))
        assert arena_bytes == 5 * (8 << 16)
        assert chan.statistics().readers[0].pid == await result(one.pid.remote())
        assert chan.statistics().frame_bytes == 0
    assert [await result(reference) for reference in results] == [(list(range(5)), "EndOfChannel")] * 2


@on_one_loop
@pytest.mark.parametrize("kind", ["AsyncReader", "PlainReader"])
async def test_an_actor_dies_and_is_restarted(cluster: None, kind: str) -> None:
    """The sender is told who died; Ray's restart attaches at the same rank and receives what comes then."""
    kinds = actors()
    async with aioarena.Sender(2) as chan:
        stays = kinds.AsyncReader.remote()
        dies = getattr(kinds, kind).remote()
        staying, dying = stays.read.remote(chan.handle, 0), dies.read.remote(chan.handle, 1)
        await send(chan, 0)
        pid = chan.statistics().readers[1].pid
        os.kill(pid, signal.SIGKILL)
        await eventually_async(lambda: chan.statistics().readers[1].state != "joined", "its death is not noticed")
        with pytest.raises(aioarena.ReaderLostError) as caught:
            await send(chan, 1)
        assert (caught.value.rank, caught.value.pid) == (1, pid)
        await eventually_async(
            lambda: chan.statistics().readers[1].state == "joined", "it does not come back", 2 * PATIENCE
        )
        assert chan.statistics().readers[1].pid != pid
        for number in (2, 3):
            await send(chan, number)
    assert await result(staying) == ([0, 2, 3], "EndOfChannel")
    assert await result(dying) == ([2, 3], "EndOfChannel")


@on_one_loop
async def test_an_actor_that_is_killed_for_good(cluster: None) -> None:
    """``ray.kill`` is a death, too; the others may go on."""
    import ray

    kinds = actors()
    async with aioarena.Sender(2, on_reader_lost="continue") as chan:
        stays, dies = kinds.AsyncReader.remote(), kinds.AsyncReader.remote()
        staying = stays.read.remote(chan.handle, 0)
        dies.read.remote(chan.handle, 1)
        await send(chan, 0)
        ray.kill(dies)
        await eventually_async(lambda: chan.statistics().readers[1].state == "lost", "its death is not noticed")
        await send(chan, 1)
    assert await result(staying) == ([0, 1], "EndOfChannel")


@on_one_loop
async def test_an_actor_sends_to_actors(cluster: None) -> None:
    """Siblings attach each other's memory, and learn of the death of the sender."""
    kinds = actors()
    sender = kinds.Broadcaster.remote()
    handle = await result(sender.open.remote(2))
    one, other = kinds.AsyncReader.remote(), kinds.PlainReader.remote()
    results = [one.read.remote(handle, 0), other.read.remote(handle, 1)]
    await result(sender.send.remote(0))
    assert (await result(one.so_far.remote(1)))[1] == 8 << 16
    os.kill(await result(sender.pid.remote()), signal.SIGKILL)
    assert [await result(reference) for reference in results] == [([0], "SenderLostError")] * 2


def test_the_example(tmp_path: Path) -> None:
    """It runs as its docstring says."""
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray_workers.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith("sent")] == [f"step {number} sent" for number in range(6)]
    assert any(line.startswith("rank 1 is lost (pid ") for line in lines)
    assert lines[-2:] == ["rank 0 received steps [0, 1, 2, 3, 4, 5]", "rank 1 received steps [3, 4, 5]"]
