"""Contexts, forks, broken devices and exits: each in a process of its own, which they would spoil for other tests."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.channel import run_script

PRELUDE = """
import asyncio, gc, os, sys, threading
import torch
import aioarena
from tests.gpu.channel import Blocker, channel, pass_on, pin, until, MIB
"""


def succeed(script: str, *, quiet: bool = True) -> str:
    result = run_script(PRELUDE + script)
    assert result.returncode == 0, result.stderr
    if quiet:
        assert result.stderr == ""
    return result.stdout


def test_a_reader_on_device_1_leaves_no_context_on_device_0() -> None:
    """Whether it chose its device or only ever names it: pinning, copies in threads, events, unpinning."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, there is {torch.cuda.device_count()}")
    for choose in ("torch.cuda.set_device(1); device = 'cuda'", "device = 'cuda:1'"):
        succeed(f"""
{choose}
contexts = lambda: [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]
async def main():
    torch.ones(1, device=device)
    for mode in ("off", "auto"):
        async with channel(pin=mode) as (sender, receiver):
            if mode == "auto":
                await pin(sender, receiver)
            kept = await pass_on(sender, receiver, torch.full((8 * MIB,), 7, dtype=torch.uint8))
            moved = await receiver.to_device(kept, device)
            assert moved.device.index == 1
            assert bool((moved == 7).all())
            await pass_on(sender, receiver, torch.ones(8 * MIB))
            assert contexts() == [1], contexts()
        threading.Thread(target=lambda box=[kept]: box.clear()).start()
        del kept
        await until(lambda: receiver.statistics().spans_held == 0)
        del sender, receiver
        gc.collect()
        await asyncio.sleep(0.5)
    assert contexts() == [1], contexts()
asyncio.run(main())
""")


def test_a_process_without_a_context_gets_none() -> None:
    """CUDA is there, and even initialised as far as torch goes, but nobody made a context."""
    succeed("""
async def main():
    torch.cuda.get_device_name(0)
    assert torch.cuda.is_initialized()
    if any(torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count())):
        print("this torch makes a context at once")
        return
    async with channel() as (sender, receiver):
        for _ in range(10):
            await pass_on(sender, receiver, torch.ones(2 * MIB))
        assert receiver.statistics().pinned == "no"
        assert receiver.statistics().spans_held == 0
    assert not any(torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count()))
asyncio.run(main())
""")


def test_to_device_as_the_first_use_of_cuda() -> None:
    """It initialises CUDA, in a thread; the slot comes back, and the next tensor has the arena pinned."""
    succeed("""
async def main():
    async with channel() as (sender, receiver):
        moved = await receiver.to_device(await pass_on(sender, receiver, torch.ones(2 * MIB)), "cuda")
        assert moved.sum().item() == 2 * MIB
        await until(lambda: receiver.statistics().spans_held == 0)
        await pin(sender, receiver)
asyncio.run(main())
""")


def test_a_forked_child_receives_anew() -> None:
    """CUDA cannot be used there, nothing is pinned, and slots come back."""
    succeed("""
import warnings
async def child(handle):
    async with aioarena.Receiver(handle, 1) as receiver:
        received = await receiver.recv()
        assert receiver.statistics().pinned == "no"
        assert received.sum() == 2 * MIB
        del received
        await until(lambda: receiver.statistics().spans_held == 0)
async def main():
    torch.ones(1, device="cuda")
    arena = aioarena.ArenaConfig(slots=4, slot_bytes=8 * MIB)
    async with aioarena.Sender(2, arena=arena) as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        async with aioarena.Receiver(sender.handle, 1) as left:
            await sender.send(torch.ones(2 * MIB))
            kept = await receiver.recv()
            await left.recv()
            await until(lambda: receiver.statistics().pinned == "yes", 30)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                asyncio.run(child(sender.handle))
                code = 0
            finally:
                os._exit(code)
        await until(lambda: sender.statistics().readers[1].pid == pid and sender.statistics().readers[1].state == "joined")
        await sender.send(torch.ones(2 * MIB))
        await receiver.recv()
        status = [0, 0]
        await until(lambda: status.__setitem__(slice(None), os.waitpid(pid, os.WNOHANG)) or status[0])
        assert os.waitstatus_to_exitcode(status[1]) == 0
        assert kept.is_pinned()
        del kept
        await until(lambda: sender.statistics().slots_used == 0)
asyncio.run(main())
""")


def test_a_device_in_error_quarantines_spans_and_the_channel_lives() -> None:
    """After an illegal access nothing can be known of the device: slots are not reused, messages flow."""
    output = succeed(
        """
async def main():
    async with channel() as (sender, receiver):
        torch.ones(1, device="cuda")
        await pin(sender, receiver)
        kept = await pass_on(sender, receiver, torch.ones(2 * MIB))
        try:
            torch.ones(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
            torch.cuda.synchronize()
        except RuntimeError as error:
            print("broken:", type(error).__name__)
        del kept
        await until(lambda: receiver.statistics().spans_quarantined == 1)
        for value in range(10):
            received = await pass_on(sender, receiver, torch.full((2 * MIB,), value))
            assert received[-1] == value
            del received
        assert sender.statistics().slots_used >= 1
        print("done", flush=True)
asyncio.run(main())
os._exit(0)  # what torch itself does at the exit with a broken device is not the question here
""",
        quiet=False,
    )
    assert "broken:" in output
    assert "done" in output


@pytest.mark.parametrize(
    "ending",
    [
        "kept = asyncio.run(main(False))",
        "asyncio.run(main(True))",
        "sys.kept = asyncio.run(main(True))",
        "asyncio.run(main(False)); gc.collect()",
    ],
    ids=["a tensor is alive", "an event is pending", "both", "being unregistered"],
)
def test_exit_is_quiet(ending: str) -> None:
    """With a registered arena, a stream that is not done, or an unregistration under way."""
    output = succeed(f"""
async def main(pending):
    torch.ones(1, device="cuda")
    async with channel(slots=64) as (sender, receiver):
        await pin(sender, receiver)
        if pending:
            blocker = Blocker(torch.cuda.current_stream(), 0.5)
            await pass_on(sender, receiver, torch.ones(2 * MIB))
        return await pass_on(sender, receiver, torch.ones(2 * MIB))
{ending}
print("end")
""")
    assert "end" in output
