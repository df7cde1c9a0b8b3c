"""Registering the arena: what torch makes of it, how fast copies get, what the loop notices, what a failure leaves."""

from __future__ import annotations

import asyncio
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aioarena
from aioarena._platform import accelerator
from aioarena._platform.accelerator import TorchCuda
from aioarena._platform.memory import Mapping, Pin, Segment
from tests.gpu.channel import MIB, channel, pass_on, pin, run_script, until


async def test_received_tensors_and_their_slices_are_pinned() -> None:
    """Of any dtype and offset, on a device where torch asks the runtime about each pointer."""
    async with channel() as (sender, receiver):
        await pin(sender, receiver)
        sent = torch.randn(2, 3, 128, 128, dtype=torch.bfloat16)
        received = await pass_on(sender, receiver, sent)
        for view in (received, received[1], received[0, 2:], received.flatten()[12345:], received.view(torch.int16)):
            assert view.is_pinned()
        assert torch.equal(received.cuda(), sent.cuda())
        await until(lambda: receiver.statistics().spans_held == 1)
        del received, view
        await until(lambda: receiver.statistics().spans_held == 0)


async def test_pin_off_leaves_the_memory_as_it_is() -> None:
    """And everything works."""
    async with channel(pin="off") as (sender, receiver):
        received = await pass_on(sender, receiver, torch.arange(MIB))
        assert not received.is_pinned()
        assert torch.equal(received.cuda(), torch.arange(MIB, device="cuda"))
        assert receiver.statistics().pinned == "no"


async def test_bandwidth_side_by_side_with_pinned_memory_of_torch(report: Callable[[str], None]) -> None:
    """256 MiB to the GPU from the arena, pinned and not, and from torch.empty(pin_memory=True): the figures are printed."""
    nbytes = 256 * MIB
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    theirs = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    theirs.copy_(sent)
    figures = {"torch's pinned memory": bandwidth(target, theirs)}
    for name, mode in (("the arena, pinned", "auto"), ("the arena, not pinned", "off")):
        async with channel(slots=2, slot_bytes=nbytes, pin=mode) as (sender, receiver):
            if mode == "auto":
                await pin(sender, receiver)
            received = await pass_on(sender, receiver, sent)
            assert received.is_pinned() == (mode == "auto")
            target.zero_()
            figures[name] = bandwidth(target, received)
            assert torch.equal(target.cpu(), sent)
            del received
    reference = figures["torch's pinned memory"]
    for name, figure in figures.items():
        report(f"host to device, 256 MiB from {name}: {figure / 1e9:.1f} GB/s ({figure / reference:.2f} of torch's)")


def bandwidth(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second, the median of several copies."""
    seconds = []
    for _ in range(11):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return target.nbytes / statistics.median(seconds[1:])


async def test_the_loop_turns_while_2_gib_are_pinned(report: Callable[[str], None]) -> None:
    """The default arena, its memory never touched before: registering takes long, and in a thread."""
    stalls: list[float] = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            stalls.append(loop.time() - before - 0.001)

    async with aioarena.Sender(1) as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        await sender.send(torch.ones(MIB))
        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0.05)
        quiet, start = max(stalls), time.monotonic()
        stalls.clear()
        received = await receiver.recv()
        assert receiver.statistics().pinned == "pending"
        await until(lambda: receiver.statistics().pinned != "pending", 60)
        seconds = time.monotonic() - start
        ticker.cancel()
        assert receiver.statistics().pinned == "yes"
        report(
            f"pinning 2 GiB took {seconds:.2f} s; meanwhile a timer was late by {max(stalls) * 1e3:.1f} ms at most "
            f"({quiet * 1e3:.1f} ms before), {len(stalls)} turns"
        )
        assert received.is_pinned()
        # On the loop it would be one turn, as long as the registration.
        assert len(stalls) > 10
        assert max(stalls) < max(0.1, seconds / 3)
        del received


async def test_memory_is_unregistered_before_it_is_unmapped() -> None:
    """Memory that takes its place, most likely at the same address, can be registered again."""
    async with channel() as (sender, receiver):
        await pin(sender, receiver)
        assert receiver._ledger is not None
        address, nbytes = receiver._ledger.mapping.address, receiver._ledger.mapping.nbytes
    del sender, receiver
    await until(lambda: f"{address:x}-" not in open("/proc/self/maps").read())  # noqa: SIM115
    segment = Segment.memfd("again", nbytes)
    gpu = TorchCuda()
    assert gpu.register(segment.mapping.address, nbytes, torch.cuda.current_device()) is None
    gpu.unregister(segment.mapping.address, torch.cuda.current_device())


# Failure -------------------------------------------------------------------------------------------------------------


def registered_twice() -> tuple[int, int, Any]:
    segment = Segment.memfd("twice", MIB)
    assert int(torch.cuda.cudart().cudaHostRegister(segment.mapping.address, MIB, 1)) == 0
    return segment.mapping.address, MIB, segment


def read_only() -> tuple[int, int, Any]:
    memory = mmap.mmap(-1, MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    return address_of(memory), MIB, memory


def inaccessible() -> tuple[int, int, Any]:
    memory = mmap.mmap(-1, MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)  # PROT_NONE
    return address_of(memory), MIB, memory


def address_of(memory: mmap.mmap) -> int:
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@pytest.mark.parametrize("make", [registered_twice, read_only, inaccessible])
def test_a_failed_registration_leaves_no_error_behind(make: Callable[[], tuple[int, int, Any]]) -> None:
    """In the very thread that made it, where torch would raise it at the next launch."""
    outcome: list[Any] = []

    def work() -> None:
        device = torch.cuda.current_device()
        address, nbytes, memory = make()
        problem = TorchCuda().register(address, nbytes, device)
        outcome.append(problem)
        ones = torch.ones(512, 512, device="cuda")
        outcome.append((ones @ ones).sum().item())
        torch.cuda.synchronize()
        if problem is None or make is registered_twice:
            TorchCuda().unregister(address, device)
        del memory

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome[1:] == [512**3]
    if outcome[0] is None:
        pytest.skip("this driver registers such memory")
    assert "CUDA error" in outcome[0]


def test_the_pending_error_is_seen_on_the_runtime_that_torch_uses() -> None:
    """That is what makes clearing it work: another copy of the runtime would have nothing pending."""
    get_last_error = accelerator._runtime_function("GetLastError")
    assert get_last_error is not None
    assert accelerator._runtime_function("ThreadExchangeStreamCaptureMode") is not None
    address, nbytes, segment = registered_twice()
    get_last_error()
    result = torch.cuda.cudart().cudaHostRegister(address, nbytes, 1)
    assert int(result) != 0
    assert get_last_error() == int(result)
    assert get_last_error() == 0
    TorchCuda().unregister(address, torch.cuda.current_device())
    del segment


async def test_a_channel_whose_arena_cannot_be_pinned_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered before by somebody else: one warning, staged copies, right bytes, and the GPU goes on to work."""
    taken: list[Mapping] = []
    claim = accelerator.claim_pinning

    def claim_after_somebody_else(mapping: Mapping) -> bool:
        if not taken:
            taken.append(mapping)
            assert int(torch.cuda.cudart().cudaHostRegister(mapping.address, mapping.nbytes, 1)) == 0
        return claim(mapping)

    monkeypatch.setattr(accelerator, "claim_pinning", claim_after_somebody_else)
    async with channel() as (sender, receiver):
        for value in range(10):
            received = await pass_on(sender, receiver, torch.full((8 * MIB,), value, dtype=torch.uint8))
            moved = await receiver.to_device(received, "cuda")
            assert bool((moved == value).all())
            del received, moved
        await until(lambda: receiver.statistics().pinned == "failed")
        await until(lambda: receiver.statistics().spans_held == 0)
    assert len([record for record in caplog.records if "could not pin" in record.getMessage()]) == 1
    assert taken[0].pin is Pin.FAILED
    TorchCuda().unregister(taken[0].address, torch.cuda.current_device())
    taken.clear()


def test_a_limit_on_locked_memory_is_survived() -> None:
    """Whether or not the driver honours it (as root it cannot): pinned or not, the next matrix product succeeds."""
    result = run_script("""
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
import asyncio, torch
from tests.gpu.channel import channel, pass_on, until, MIB
async def main():
    torch.ones(1, device="cuda")
    async with channel() as (sender, receiver):
        received = await pass_on(sender, receiver, torch.full((8 * MIB,), 7, dtype=torch.uint8))
        await until(lambda: receiver.statistics().pinned in ("yes", "failed"))
        assert bool(((await receiver.to_device(received, "cuda")) == 7).all())
        ones = torch.ones(512, 512, device="cuda")
        assert (ones @ ones).sum().item() == 512 ** 3
        print(receiver.statistics().pinned)
asyncio.run(main())
""")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in ("yes", "failed")


def test_the_doctor_pins_and_lets_go() -> None:
    """In a process without a context so far, as the command has it."""
    result = run_script("""
from aioarena._look import doctor
finding = doctor._pinning()
assert finding.grade == "ok", finding
import torch
ones = torch.ones(512, 512, device="cuda")
assert (ones @ ones).sum().item() == 512 ** 3
print(finding.found)
""")
    assert result.returncode == 0, result.stderr
    assert "pinned and let go" in result.stdout
