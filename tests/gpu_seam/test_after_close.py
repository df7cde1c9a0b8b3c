"""Spans that outlive the receiver, its loop, or the interpreter."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aioarena
from aioarena._release import HeldSpan, SpanLedger
from tests.gpu_seam.channel import channel, make_sender, pass_on
from tests.gpu_seam.fake import FakeGpu
from tests.gpu_seam.loops import a_while, both_loops, run_on, until
from tests.gpu_seam.test_release import free


def drainers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aioarena-release"]


async def pinned(receiver: aioarena.Receiver) -> None:
    await until(lambda: receiver.statistics().pinned == "yes")


@both_loops
async def test_close_does_not_wait_for_pending_events(gpu: FakeGpu) -> None:
    """They go on to gate after it, in a thread that ends with the last span."""
    busy = gpu.default_streams[0]
    gpu.initialize()
    async with make_sender() as sender:
        async with aioarena.Receiver(sender.handle, 0) as receiver:
            received = await pass_on(sender, receiver)
            await pinned(receiver)
            busy.busy = True
            del received
            await until(lambda: gpu.recorded_on(busy))
            async with asyncio.timeout(2):
                await receiver.aclose()
        await a_while()
        assert not free(sender)
        assert len(drainers()) == 1
        busy.finish()
        await until(lambda: free(sender))
        await until(lambda: not drainers())


@both_loops
async def test_dropped_right_before_close(gpu: FakeGpu) -> None:
    """Poked, but the loop had no turn to look."""
    busy = gpu.default_streams[0]
    gpu.initialize()
    async with make_sender() as sender:
        async with aioarena.Receiver(sender.handle, 0) as receiver:
            received = await pass_on(sender, receiver)
            await pinned(receiver)
            busy.busy = True
            del received
        await until(lambda: gpu.recorded_on(busy))
        await a_while()
        assert not free(sender)
        busy.finish()
        await until(lambda: free(sender))


@both_loops
@pytest.mark.parametrize("where", ["here", "in a thread"])
@pytest.mark.parametrize("debugging", ["0", "1"])
async def test_dropped_after_close(gpu: FakeGpu, where: str, debugging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams current where it is dropped gate, and the one that was current for the receiver."""
    monkeypatch.setenv("AIOARENA_DEBUG", debugging)
    mine, side = gpu.stream("mine"), gpu.stream("side")
    gpu.initialize()
    async with make_sender() as sender:
        with gpu.using(mine):
            async with aioarena.Receiver(sender.handle, 0) as receiver:
                box = [await pass_on(sender, receiver)]
                await pinned(receiver)
        mine.busy = side.busy = True

        def drop() -> None:
            with gpu.using(side):
                box.clear()

        assert len(drainers()) == 1
        calls = len(gpu.calls)
        await a_while()
        assert len(gpu.calls) == calls, "the thread sleeps as long as the tensor is there"
        if where == "here":
            drop()
        else:
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
        await until(lambda: gpu.recorded_on(side) and gpu.recorded_on(mine))
        for stream in (mine, side):
            await a_while()
            assert not free(sender)
            stream.finish()
        await until(lambda: free(sender))
        await until(lambda: not drainers())


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_dropped_after_the_loop_ended(gpu: FakeGpu, loop_kind: str) -> None:
    """No loop is left in the process when the last tensor goes."""
    box: list[torch.Tensor] = []
    ends: list[Any] = []

    async def main() -> None:
        gpu.initialize()
        async with channel() as (sender, receiver):
            box.append(await pass_on(sender, receiver, 6))
            await pinned(receiver)
            ends.extend((sender, receiver))

    run_on(loop_kind, main())
    sender, receiver = ends
    assert box[0][-1] == 6
    assert sender.statistics().slots_used == 1
    box.clear()
    deadline = time.monotonic() + 5
    while sender.statistics().slots_used and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sender.statistics().slots_used == 0
    assert receiver.statistics().spans_held == 0


@both_loops
async def test_a_named_stream_gates_after_close_though_nothing_is_pinned(gpu: FakeGpu) -> None:
    """With pin="off" nothing else would keep somebody there to wait for it."""
    side = gpu.stream("side")
    gpu.initialize()
    async with make_sender() as sender:
        async with aioarena.Receiver(sender.handle, 0, pin="off") as receiver:
            named = await pass_on(sender, receiver)
            other = await pass_on(sender, receiver)
            receiver.record_stream(named, side)
            side.busy = True
        del other, named
        await until(lambda: gpu.recorded_on(side))
        await until(lambda: receiver.statistics().spans_held == 1)
        side.finish()
        await until(lambda: free(sender))
        await until(lambda: not drainers())


@both_loops
async def test_what_waited_for_a_registration_that_failed_right_before_close(gpu: FakeGpu) -> None:
    """The loop had no turn in between to see that nothing has to wait."""
    gpu.initialize()
    gpu.register_gate = threading.Event()
    gpu.register_problem = "no"
    async with make_sender() as sender:
        async with aioarena.Receiver(sender.handle, 0) as receiver:
            await pass_on(sender, receiver)
            await until(lambda: receiver.statistics().spans_pending == 1)
            gpu.register_gate.set()
            while receiver.statistics().pinned == "pending":
                time.sleep(0.001)
        await until(lambda: free(sender))


@both_loops
async def test_released_while_the_thread_begins(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that need not wait, dropped in a thread during close, is not one that is waited for ever after."""
    side = gpu.stream("side")
    gpu.initialize()
    closed, dropping = threading.Event(), threading.Event()
    release = SpanLedger._release

    def late(ledger: SpanLedger, held: HeldSpan) -> None:
        if threading.current_thread().name == "dropper":
            dropping.set()
            assert closed.wait(30)
        release(ledger, held)

    monkeypatch.setattr(SpanLedger, "_release", late)
    async with make_sender() as sender:
        async with aioarena.Receiver(sender.handle, 0, pin="off") as receiver:
            named = await pass_on(sender, receiver)
            box = [await pass_on(sender, receiver)]
            receiver.record_stream(named, side)
            thread = threading.Thread(target=box.clear, name="dropper")
            thread.start()
            await until(dropping.is_set)
        del named
        await until(lambda: receiver.statistics().spans_held == 1)
        await a_while()
        assert len(drainers()) == 1
        closed.set()
        thread.join()
        await until(lambda: not drainers())
        assert free(sender)


@both_loops
async def test_no_thread_where_nothing_is_left(gpu: FakeGpu) -> None:
    """Closing starts one only for spans that are there."""
    gpu.initialize()
    async with channel() as (sender, receiver):
        await pass_on(sender, receiver)
        await pinned(receiver)
        await until(lambda: free(sender))
        await receiver.aclose()
        assert drainers() == []


@both_loops
async def test_a_quarantined_span_does_not_keep_the_thread(gpu: FakeGpu) -> None:
    """There is nothing to wait for any more."""
    gpu.initialize()
    async with make_sender() as sender:
        async with aioarena.Receiver(sender.handle, 0) as receiver:
            received = await pass_on(sender, receiver)
            await pinned(receiver)
        gpu.query_error = RuntimeError("gone")
        del received
        await until(lambda: not drainers())
        assert receiver.statistics().spans_quarantined == 1
        assert not free(sender)


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_receiver_that_was_never_closed(gpu: FakeGpu, loop_kind: str) -> None:
    """Its loop just ended. Nothing is logged but that it was not closed, and the slots come back."""
    ends: list[Any] = []
    box: list[torch.Tensor] = []

    async def main() -> None:
        gpu.initialize()
        sender = make_sender()
        await sender.start()
        receiver = aioarena.Receiver(sender.handle, 0)
        await receiver.start()
        box.append(await pass_on(sender, receiver))
        await pinned(receiver)
        gpu.default_streams[0].busy = True
        await pass_on(sender, receiver)
        await until(lambda: gpu.events)
        ends.append(sender)
        await sender.aclose()

    run_on(loop_kind, main())
    [sender] = ends
    with pytest.warns(ResourceWarning, match="never closed"):
        gc.collect()
    box.clear()
    gpu.default_streams[0].finish()
    deadline = time.monotonic() + 5
    while sender.statistics().slots_used and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sender.statistics().slots_used == 0


# Exit ----------------------------------------------------------------------------------------------------------------

PRELUDE = """
import asyncio, os, sys, threading, time
import torch
import aioarena
from aioarena._platform import accelerator
from tests.gpu_seam.channel import make_sender, pass_on
from tests.gpu_seam.fake import FakeEvent, FakeGpu
from tests.gpu_seam.loops import until

gpu = FakeGpu()
accelerator._current = gpu
gpu.initialize()
"""

ENDINGS = {
    "tensor in a global": "kept = asyncio.run(one())",
    "tensor in a cycle": "kept = [asyncio.run(one())]; kept.append(kept)",
    "tensor in a module that outlives ours": """
import json
import aioarena._release
json.kept = asyncio.run(one())
sys.kept = aioarena._release  # somebody refers to it, so its names are set to None, and then json's
""",
    "tensor in a module that goes last": "sys.kept = asyncio.run(one())",
    "event pending": "gpu.default_streams[0].busy = True; asyncio.run(one())",
    "event pending in another thread": """
kept = [asyncio.run(one())]
gpu.default_streams[0].busy = True
threading.Thread(target=kept.clear).start()
""",
    "register under way": """
register = gpu.register
def slow(*arguments):
    time.sleep(0.3)
    print("registered", flush=True)
    return register(*arguments)
gpu.register = slow
asyncio.run(one(wait=False))
""",
    "unregister under way": """
unregister = gpu.unregister
def slow(*arguments):
    started.set()
    time.sleep(0.3)
    print("unregistered", flush=True)
    return unregister(*arguments)
started = threading.Event()
gpu.unregister = slow
asyncio.run(one())
import gc; gc.collect()
assert started.wait(5)
""",
    "query under way": """
def slow(event):
    started.set()
    time.sleep(0.3)
    print("queried", flush=True)
    return False
started = threading.Event()
gpu.default_streams[0].busy = True
kept = asyncio.run(one())
FakeEvent.query = slow
del kept
assert started.wait(5)
""",
}

ONE = """
async def one(wait=True):
    async with make_sender() as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        received = await pass_on(sender, receiver, 3)
        if wait:
            await until(lambda: receiver.statistics().pinned == "yes")
        return received
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_is_quiet_and_quick(ending: str) -> None:
    """Whatever is alive, pending or under way: exit code 0, nothing on stderr, and no thread is left inside the runtime.

    A thread that comes back from there into an interpreter that is gone aborts the process, so what is under way is
    waited for.
    """
    script = PRELUDE + ONE + ENDINGS[ending] + "\nprint('end', time.monotonic(), flush=True)\n"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    ended = time.monotonic()
    assert result.stderr == ""
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    [end] = [float(line.split()[1]) for line in lines if line.startswith("end")]
    assert ended - end < 10
    if "under way" in ending:
        assert lines[-1] in ("registered", "unregistered", "queried")
