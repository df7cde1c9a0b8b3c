"""Pinning: once per process and arena, off the loop, on the right device, undone once; and what happens when it fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch

import aioarena
from aioarena._platform import accelerator
from aioarena._platform.memory import Pin, Segment
from tests.gpu_seam.channel import SLOTS, channel, frames, make_sender, pass_on, tensor
from tests.gpu_seam.fake import FakeGpu, is_mapped
from tests.gpu_seam.loops import a_while, both_loops, until


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def pinned(receiver: aioarena.Receiver) -> None:
    await until(lambda: receiver.statistics().pinned == "yes")


async def all_released(*receivers: aioarena.Receiver) -> None:
    await until(lambda: not any(receiver.statistics().spans_held for receiver in receivers))


@both_loops
async def test_pinning_waits_for_the_first_use_of_the_gpu(gpu: FakeGpu) -> None:
    """A process that initialises CUDA after its first tensors pins with the next one."""
    async with channel() as (sender, receiver):
        for value in range(3):
            await pass_on(sender, receiver, value)
        gpu.initialize()
        assert gpu.registrations == []
        await pass_on(sender, receiver)
        await pinned(receiver)
        assert len(gpu.registrations) == 1


@both_loops
async def test_register_runs_in_a_thread_on_the_device_of_the_loop_thread(gpu: FakeGpu) -> None:
    """The whole arena is registered at once; a thread of its own would have device 0 as its current one."""
    gpu.initialize(device=1)
    async with channel() as (sender, receiver):
        received = await pass_on(sender, receiver)
        await pinned(receiver)
        [(address, nbytes, device, thread)] = gpu.registrations
        assert device == 1
        assert thread != threading.current_thread().name
        assert nbytes == sender.handle.layout.arena_bytes
        assert address <= received.data_ptr() < address + nbytes
        del received


@both_loops
async def test_register_happens_once_however_many_messages(gpu: FakeGpu) -> None:
    """Also while the first try is still going on."""
    gpu.initialize()
    gpu.register_gate = threading.Event()
    async with channel() as (sender, receiver):
        kept = [await pass_on(sender, receiver) for _ in range(2)]
        gpu.register_gate.set()
        await pinned(receiver)
        kept.clear()
        for _ in range(5):
            await pass_on(sender, receiver)
            await all_released(receiver)
        await a_while()
        assert len(gpu.registrations) == 1


@both_loops
async def test_the_loop_turns_while_register_blocks(gpu: FakeGpu) -> None:
    """Messages flow, and nobody asks the runtime anything, which would be held up until the registration is done."""
    gpu.initialize()
    gpu.register_gate = threading.Event()
    async with channel() as (sender, receiver):
        await pass_on(sender, receiver)
        await until(gpu.registering.is_set)
        # Dropped: they wait, because a copy started now may find the memory pinned already.
        for value in range(SLOTS - 1):
            await pass_on(sender, receiver, value)
        assert receiver.statistics().pinned == "pending"
        await sender.send(tensor(9))
        assert (await receiver.recv())[0] == 9
        assert frames(sender) == 1
        await a_while()
        assert receiver.statistics().spans_pending == SLOTS
        gpu.register_gate.set()
        await all_released(receiver)
        assert receiver.statistics().pinned == "yes"
        assert gpu.events, "the streams were asked as soon as that was possible"


@both_loops
@pytest.mark.parametrize("problem", ["CUDA error 2 (out of memory)", RuntimeError("boom")])
async def test_failed_register_degrades_with_one_warning(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, problem: str | Exception
) -> None:
    """All works, unpinned: one line in the log, visible in the statistics, nothing to undo, no second try."""
    gpu.initialize()
    gpu.register_problem = problem
    async with channel(readers=2) as (sender, first, second):
        for value in range(3 * SLOTS):
            await sender.send(tensor(value))
            for receiver in (first, second):
                assert (await receiver.recv())[0] == value
            await until(lambda: first.statistics().pinned == "failed")
        assert second.statistics().pinned == "failed"
        assert frames(sender) == 0
        kept = await pass_all(sender, first, second)
        calls = len(gpu.calls)
        kept.clear()
        assert first.statistics().spans_held == second.statistics().spans_held == 0, "staged copies: free at once"
        assert len(gpu.calls) == calls
    gc.collect()
    await a_while()
    assert len(gpu.registrations) == 1
    assert gpu.unregistrations == []
    [message] = warnings_in(caplog)
    assert str(problem) in message
    assert 'pin="off"' in message


async def pass_all(sender: aioarena.Sender, *receivers: aioarena.Receiver) -> list[torch.Tensor]:
    await sender.send(tensor())
    return [await receiver.recv() for receiver in receivers]


@both_loops
async def test_what_is_dropped_while_register_fails_is_released(gpu: FakeGpu) -> None:
    """Spans dropped before the answer was known do not stay behind."""
    gpu.initialize()
    gpu.register_gate = threading.Event()
    gpu.register_problem = "no"
    async with channel() as (sender, receiver):
        for value in range(SLOTS):
            await pass_on(sender, receiver, value)
        assert receiver.statistics().spans_pending == SLOTS
        gpu.register_gate.set()
        await all_released(receiver)
        assert gpu.events == []


@both_loops
async def test_a_broken_gpu_loses_no_message(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for the state of the GPU may raise once a kernel failed; the message arrives all the same."""

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "initialized", broken)
    async with channel() as (sender, receiver):
        for value in range(2):
            assert (await pass_on(sender, receiver, value))[0] == value
        assert receiver.statistics().pinned == "failed"
    assert len(warnings_in(caplog)) == 1


@both_loops
async def test_unregister_once_after_the_last_tensor_before_unmap(gpu: FakeGpu) -> None:
    """The registration lives as long as a tensor of the arena; then it is undone, on its device, and the memory goes."""
    gpu.initialize(device=1)
    async with channel() as (sender, receiver):
        kept = await pass_on(sender, receiver, 7)
        await pinned(receiver)
    del sender, receiver
    gc.collect()
    await a_while()
    assert gpu.unregistrations == []
    assert kept[-1] == 7
    [(address, nbytes)] = gpu.registered.items()
    assert is_mapped(address, nbytes)
    del kept
    # The thread that released the span may hold the ledger, and with it the mapping, for another moment.
    await until(lambda: gpu.unregistrations)
    await until(lambda: not is_mapped(address, nbytes))
    await a_while()
    [(undone, device, _)] = gpu.unregistrations
    assert (undone, device) == (address, 1)
    assert gpu.misuse == []


@both_loops
async def test_an_arena_is_unmapped_while_another_stays_registered(gpu: FakeGpu) -> None:
    """Each goes for itself, and when the last one has gone no thread is left."""
    gpu.initialize()
    async with channel() as (other, second):
        async with channel() as (sender, first):
            await pass_on(sender, first)
            await pinned(first)
        [(address, nbytes)] = gpu.registered.items()
        await pass_on(other, second)
        await pinned(second)
        del sender, first
        gc.collect()
        await until(lambda: address not in gpu.registered)
        await until(lambda: not is_mapped(address, nbytes))
        assert len(gpu.registered) == 1
        assert "aioarena-unpin" in [thread.name for thread in threading.enumerate()]
    del second, other
    gc.collect()
    await until(lambda: "aioarena-unpin" not in [thread.name for thread in threading.enumerate()])
    assert gpu.registered == {}


@both_loops
async def test_the_loop_turns_while_unregister_blocks(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last user may be dropped on the loop, or by the garbage collector: it starts nothing and waits for nothing."""
    gate = threading.Event()
    unregister = gpu.unregister

    def slow(address: int, device: int) -> None:
        assert gate.wait(30)
        unregister(address, device)

    monkeypatch.setattr(gpu, "unregister", slow)
    gpu.initialize()
    async with channel() as (sender, receiver):
        await pass_on(sender, receiver)
        await pinned(receiver)
    del sender, receiver
    gc.collect()
    await a_while()
    [(address, nbytes)] = gpu.registered.items()
    assert is_mapped(address, nbytes), "the memory is there as long as it is registered"
    gate.set()
    await until(lambda: gpu.unregistrations and not is_mapped(address, nbytes))


@both_loops
async def test_pin_off_never_registers(gpu: FakeGpu) -> None:
    """And then copies are staged, so a dropped span is free at once."""
    gpu.initialize()
    async with channel(pin="off") as (sender, receiver):
        for value in range(2 * SLOTS):
            await pass_on(sender, receiver, value)
            assert receiver.statistics().spans_held == 0
        assert receiver.statistics().pinned == "no"
        assert frames(sender) == 0
    assert gpu.calls == []


# Several receivers of one arena in one process -----------------------------------------------------------------------


@both_loops
async def test_two_receivers_pin_once_and_both_release(gpu: FakeGpu) -> None:
    """The one that did not pin has to wait for the GPU as well."""
    gpu.initialize()
    async with channel(readers=2) as (sender, first, second):
        for _ in range(3 * SLOTS):
            kept = await pass_all(sender, first, second)
            kept.clear()
            await all_released(first, second)
        assert second.statistics().pinned == "yes"
        assert frames(sender) == 0
        assert len(gpu.registrations) == 1
    del sender, first, second
    gc.collect()
    await until(lambda: len(gpu.unregistrations) == 1)


@both_loops
async def test_a_receiver_that_attaches_to_pinned_memory_releases(gpu: FakeGpu) -> None:
    """It never pinned anything itself, private or not."""
    gpu.initialize()
    async with channel(readers=3) as (sender, first, *others):
        kept = await pass_all(sender, first, *others)
        await pinned(first)
        for receiver in others:
            await receiver.aclose()
        async with (
            aioarena.Receiver(sender.handle, 1, pin="off") as second,
            aioarena.Receiver(sender.handle, 2, private=True) as third,
        ):
            assert second.statistics().pinned == "yes"
            again = await pass_all(sender, first, second, third)
            again.clear()
            kept.clear()
            await until(lambda: sender.statistics().slots_used == 0)


@both_loops
async def test_an_idle_receiver_on_another_loop_releases_what_it_held(gpu: FakeGpu) -> None:
    """Its tensor came before anybody used the GPU, and is dropped after another loop's receiver pinned the memory."""
    dropped, joined, done = threading.Event(), threading.Event(), threading.Event()
    failures: list[BaseException] = []
    async with make_sender(2) as sender:

        async def other() -> None:
            async with aioarena.Receiver(sender.handle, 0) as receiver:
                joined.set()
                kept = await receiver.recv()
                received.set()
                while not dropped.is_set():
                    await asyncio.sleep(0.001)
                assert receiver.statistics().pinned == "yes"
                assert receiver.statistics().spans_held == 1
                del kept
                await all_released(receiver)

        def run() -> None:
            try:
                asyncio.run(other())
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        received = threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        async with aioarena.Receiver(sender.handle, 1) as receiver:
            await sender.send(tensor(1))
            await receiver.recv()
            await until(received.is_set)
            gpu.initialize()
            await sender.send(tensor(2))
            await receiver.recv()
            await pinned(receiver)
            dropped.set()
            await until(done.is_set)
        thread.join()
        assert failures == []


@both_loops
async def test_a_closed_receiver_releases_what_it_held_when_another_pins(gpu: FakeGpu) -> None:
    """It closed when no GPU was in use, so nothing was left running for it."""
    async with make_sender(2) as sender, aioarena.Receiver(sender.handle, 1) as receiver:
        async with aioarena.Receiver(sender.handle, 0) as closed:
            kept = await pass_all(sender, closed, receiver)
        gpu.initialize()
        await sender.send(tensor(2))
        await receiver.recv()
        await pinned(receiver)
        busy = gpu.default_streams[0]
        busy.busy = True
        kept.clear()
        await until(lambda: closed.statistics().spans_pending == 1 and gpu.recorded_on(busy))
        await a_while()
        assert closed.statistics().spans_held == 1, "it may still be read: it waits for the GPU now"
        busy.finish()
        await until(lambda: closed.statistics().spans_held == 0)
        await until(lambda: sender.statistics().slots_used == 0)


# Fork ----------------------------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_forked_child_shares_no_registration(gpu: FakeGpu) -> None:
    """A child can attach anew and its spans come back; what it inherited it neither releases nor unregisters."""
    gpu.initialize()
    async with make_sender(2) as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        async with aioarena.Receiver(sender.handle, 1) as left:
            held = await pass_all(sender, receiver, left)
            await pinned(receiver)
            del held[1]
            await until(lambda: left.statistics().spans_held == 0)
        child = fork_into(lambda: in_child(sender.handle, gpu, held))
        await until(
            lambda: sender.statistics().readers[1].pid == child and sender.statistics().readers[1].state == "joined"
        )
        await sender.send(tensor(2))
        await receiver.recv()
        assert await exit_code(child) == 0
        assert receiver.statistics().spans_held == 1
        await until(lambda: sender.statistics().slots_used == 1)
        await a_while()
        assert sender.statistics().slots_used == 1, "what the child dropped is still held here"
        held.clear()
        await until(lambda: sender.statistics().slots_used == 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_mapping_that_ends_in_a_child_is_not_unregistered_there(gpu: FakeGpu) -> None:
    """The child has the memory, but not the registration."""
    gpu.initialize()
    segment = Segment.memfd("pinned", 1 << 20)
    assert accelerator.claim_pinning(segment.mapping)
    accelerator.pin(gpu, segment.mapping, 0)
    address, nbytes, calls = segment.mapping.address, segment.mapping.nbytes, len(gpu.calls)

    def child() -> None:
        assert segment.mapping.pin is Pin.NO
        del segment.mapping
        assert not is_mapped(address, nbytes)
        time.sleep(0.05)
        assert len(gpu.calls) == calls

    assert os.waitstatus_to_exitcode(os.waitpid(fork_into(child), 0)[1]) == 0
    assert len(gpu.calls) == calls
    del segment.mapping


def fork_into(main: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            main()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def in_child(handle: aioarena.Handle, gpu: FakeGpu, inherited: list[torch.Tensor]) -> None:
    gpu.contexts.clear()  # what torch makes of a parent's CUDA in its child
    calls = len(gpu.calls)

    async def main() -> None:
        async with aioarena.Receiver(handle, 1) as receiver:
            received = await receiver.recv()
            assert receiver.statistics().pinned == "no"
            del received
            await all_released(receiver)
        inherited.clear()
        gc.collect()
        await a_while()

    asyncio.run(main())
    assert gpu.calls[calls:] == []


async def exit_code(pid: int) -> int:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        await asyncio.sleep(0.001)
