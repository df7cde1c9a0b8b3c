"""Ranges for a profiler: around what each end does, and only once they were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

import aioarena
from aioarena import _observing
from aioarena._platform.accelerator import TorchCuda
from aioarena.integrations import nvtx
from tests.fronts.support import fill_ring, until
from tests.gpu_seam.channel import NBYTES, channel, pass_on
from tests.gpu_seam.fake import FakeGpu
from tests.gpu_seam.loops import both_loops


@pytest.fixture
def ranges(gpu: FakeGpu) -> Iterator[nvtx.Ranges]:
    installed = nvtx.install()
    yield installed
    installed.uninstall()
    assert gpu.open_ranges == []
    assert _observing._observers == ()


@both_loops
async def test_sends_copies_receives_and_moves_are_ranges(gpu: FakeGpu, ranges: nvtx.Ranges) -> None:
    """Named after the channel; a copy lies in its send."""
    async with channel() as (sender, receiver):
        name = sender.handle.name
        received = await pass_on(sender, receiver)
        assert gpu.ranges == [f"copy {name} ({NBYTES} bytes)", f"send {name}", f"receive {name}"]
        gpu.initialize()
        await receiver.to_device(received, "cuda:0")
        assert gpu.ranges[3:] == [f"to_device {name}"]


@both_loops
async def test_ranges_of_tasks_overlap(gpu: FakeGpu, ranges: nvtx.Ranges) -> None:
    """A send that waits keeps its own open, while others in the same thread begin and end."""
    async with channel() as (sender, receiver):
        count = fill_ring(sender)
        waiting = asyncio.create_task(sender.send(b"x" * 4000))
        await until(lambda: sender.statistics().waits)
        gpu.ranges.clear()
        (mine,) = gpu.open_ranges
        await receiver.recv()
        assert gpu.ranges == [f"receive {sender.handle.name}"]
        assert gpu.open_ranges == [mine]
        for _ in range(count):
            await receiver.recv()
        await waiting


@both_loops
async def test_a_range_ends_with_what_fails(gpu: FakeGpu, ranges: nvtx.Ranges) -> None:
    async with channel() as (sender, _):
        with pytest.raises(aioarena.EncodeError):
            await sender.send(lambda: 0)
        assert gpu.ranges == [f"send {sender.handle.name}"]


@both_loops
async def test_unasked_there_are_none_and_no_message_changes(gpu: FakeGpu) -> None:
    """Nor does a profiler need anything to travel."""
    async with channel() as (sender, receiver):
        await sender.send(1)
        await receiver.recv()
        assert gpu.ranges == []
        before = sender.statistics().ring_bytes
        installed = nvtx.install()
        await sender.send(1)
        await receiver.recv()
        installed.uninstall()
        assert sender.statistics().ring_bytes == 2 * before


def test_where_there_is_no_profilers_interface_nothing_is_observed(gpu: FakeGpu) -> None:
    gpu.profiled = False
    installed = nvtx.install()
    assert not _observing.observing(nvtx.Ranges)
    installed.uninstall()


def test_they_are_installed_once(ranges: nvtx.Ranges) -> None:
    with pytest.raises(ValueError, match="ranges are on in this process"):
        nvtx.install()


def test_torch_has_them_where_it_has_cuda() -> None:
    """The real runtime; where there is none, it says so instead of failing at each send."""
    runtime = TorchCuda()
    assert runtime.has_ranges() == (torch.version.cuda is not None or torch.version.hip is not None)
    if runtime.has_ranges():
        runtime.end_range(runtime.begin_range("aioarena"))
