"""``AIOARENA_DEBUG=1``: what users get wrong is found, put down to who did it, and harms nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import ArenaConfig, Receiver, Sender, TimedOutError, WrongContextError, blocking
from aioarena._assembly import Assembler
from aioarena._checking import BLOCK, CheckedLedger, Fingerprint, _checkers
from aioarena._release import SpanLedger
from tests.conftest import ARENA, PATIENCE, RING_BYTES, LoopFactory, OpenChannel
from tests.fronts.support import cancelled, filled, shows, until

FOUR_SLOTS = ArenaConfig(slots=4, slot_bytes=1 << 20, min_bytes=16 << 10)


@pytest.fixture
def _debugging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AIOARENA_DEBUG", "1")
    monkeypatch.setattr("aioarena._checking._LOOK_EVERY", 1000.0)
    yield
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    for thread in list(_checkers):  # they end once nothing is held
        thread.join(max(0.0, deadline - time.monotonic()))


debugging = pytest.mark.usefixtures("_debugging")


def ledger_of(receiver: Receiver) -> CheckedLedger:
    assert isinstance(receiver._ledger, CheckedLedger)
    return receiver._ledger


def changed(receiver: Receiver) -> int:
    return receiver.statistics().spans_changed


def said(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if about in record.getMessage()]


async def receive_pixels(receiver: Receiver) -> Any:
    """A call site to be named."""
    return await receiver.recv()


# Writes ---------------------------------------------------------------------------------------------------------------


@debugging
async def test_a_write_is_found_when_the_tensor_is_dropped(
    open_channel: OpenChannel, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        await channel.sender.send("step")
        await channel.receiver.recv()
        await channel.sender.send({"pixels": [0, torch.zeros(1024, 256)]})
        message = await receive_pixels(channel.receiver)
        message["pixels"][1][100, 7] = 1.0
        del message
        await until(lambda: changed(channel.receiver))
        await until(lambda: channel.slots_used == 0)
    (warning,) = said(caplog, "written to")
    assert "reader 0 of channel" in warning
    assert (
        f"message['pixels'][1], float32 of shape (1024, 256) (message 2 of the channel, slot 0, {1 << 20} bytes)" in warning
    )
    # Element [100, 7] is at byte 102428.
    first = 102428 // BLOCK * BLOCK
    assert f"bytes {first} to {first + BLOCK - 1} (elements [96, 0] to [111, 255])" in warning
    assert "in receive_pixels" in warning
    assert "more places" not in warning


@debugging
async def test_a_write_is_found_while_the_tensor_is_held(
    open_channel: OpenChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """And told once."""
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        await channel.sender.send(torch.zeros(1 << 20, dtype=torch.uint8))
        tensor = await channel.receiver.recv()
        tensor[5] = tensor[5 * BLOCK] = tensor[-1] = 1
        ledger = ledger_of(channel.receiver)
        for times in (1, 2):
            ledger._look_due = 0.0
            ledger.wake()
            await until(lambda: ledger._look_due)
            assert changed(channel.receiver) == times
            tensor += 1
        ledger._look_due = 0.0
        ledger.wake()
        await until(lambda: changed(channel.receiver) == 3)
        del tensor
        await until(lambda: channel.slots_used == 0)
        assert changed(channel.receiver) == 3
    first, *_ = said(caplog, "written to")
    assert f"bytes 0 to {BLOCK - 1} (" in first
    assert f"bytes {5 * BLOCK} to {6 * BLOCK - 1} (" in first
    assert f"bytes {(1 << 20) - BLOCK} to {(1 << 20) - 1} (" in first


@debugging
async def test_a_write_is_found_at_every_reader(open_channel: OpenChannel, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can tell who it was, so that all are told of."""
    async with open_channel(2) as channel, asyncio.timeout(PATIENCE):
        await channel.sender.send(np.zeros(1 << 20, np.uint8))
        one, other = [await receiver.recv() for receiver in channel.receivers]
        one[:] = 1
        del one, other
        for receiver in channel.receivers:
            await until(lambda: changed(receiver))  # noqa: B023
        await until(lambda: channel.slots_used == 0)
    assert len(said(caplog, "AIOARENA_DEBUG_READONLY=1")) == 2


@debugging
async def test_a_write_into_lent_memory_is_found(open_channel: OpenChannel) -> None:
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        lent = await channel.sender.empty(1 << 20, torch.uint8)
        lent.zero_()
        await channel.sender.send(lent)
        tensor = await channel.receiver.recv()
        lent[7] = 1
        del tensor
        await until(lambda: changed(channel.receiver))
        await channel.sender.reclaim(lent)
        lent.zero_()  # now it may
        await channel.sender.send(lent)
        tensor = await channel.receiver.recv()
        del tensor
        await channel.sender.reclaim(lent)
        assert changed(channel.receiver) == 1
        del lent


@debugging
@pytest.mark.parametrize("nowait", [False, True])
async def test_memory_that_nobody_writes_is_left_alone(
    open_channel: OpenChannel, caplog: pytest.LogCaptureFixture, nowait: bool
) -> None:
    """Of all sizes and ways to travel; it arrives unchanged, and its slots come back."""
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        for round_ in range(3):
            for nbytes in (10, 100_000, BLOCK, BLOCK + 1, 3 << 20, 5 << 20):
                await channel.sender.send([filled(round_, nbytes), b"x" * 9000, bytes(9000)])
                if nowait:
                    await until(channel.receiver._core.take)  # type: ignore[union-attr]
                    await until(lambda: channel.receiver._assembler.complete(channel.receiver._core.take()))  # type: ignore[union-attr, arg-type]
                    message = channel.receiver.recv_nowait()
                else:
                    message = await channel.receiver.recv()
                assert shows(message[0], round_)
                del message
                await until(lambda: channel.slots_used == 0)
        assert changed(channel.receiver) == 0
    assert not said(caplog, "written to")


@debugging
async def test_private_copies_may_be_written(open_channel: OpenChannel) -> None:
    async with open_channel(receiver={"private": True}) as channel, asyncio.timeout(PATIENCE):
        await channel.sender.send(filled(1))
        tensor = await channel.receiver.recv()
        tensor += 1
        del tensor
        assert type(channel.receiver._ledger) is SpanLedger


@debugging
async def test_a_receive_that_is_cancelled_while_it_looks_loses_nothing(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, go_on = threading.Event(), threading.Event()
    add = Fingerprint.add

    def slowly(self: Fingerprint, start: int, stop: int) -> None:
        looking.set()
        assert go_on.wait(PATIENCE)
        add(self, start, stop)

    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        monkeypatch.setattr(Fingerprint, "add", slowly)
        channel.receiver._pool._threads = 1  # so that it takes several steps
        await channel.sender.send(filled(3, 3 << 20))
        receiving = asyncio.create_task(channel.receiver.recv())
        await until(looking.is_set)
        receiving.cancel()
        go_on.set()
        await cancelled(receiving)
        tensor = await channel.receiver.recv()
        assert shows(tensor, 3)
        del tensor
        await until(lambda: channel.slots_used == 0)
        assert changed(channel.receiver) == 0


@debugging
def test_calls_with_the_shortest_of_time_outs_receive_it() -> None:
    with (
        blocking.Sender(1, arena=ARENA, ring_bytes=RING_BYTES) as sender,
        blocking.Receiver(sender.handle, 0) as receiver,
    ):
        sender.send(filled(3, 1 << 20), PATIENCE)
        with contextlib.suppress(TimedOutError):
            receiver.recv(0)
        assert shows(receiver.recv(0), 3)


@debugging
async def test_what_is_kept_when_the_receiver_closes_is_looked_at(open_channel: OpenChannel) -> None:
    """Then, and when it is dropped; after which nothing is left."""
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        await channel.sender.send(filled(3))
        tensor = await channel.receiver.recv()
        tensor[0] = 4
        ledger = ledger_of(channel.receiver)
        await channel.receiver.aclose()
        await until(lambda: changed(channel.receiver) == 1)
        tensor[0] = 5
        del tensor
        await until(lambda: changed(channel.receiver) == 2)
        await until(lambda: channel.slots_used == 0)
        await until(lambda: not ledger._thread.is_alive())


@debugging
def test_blocking_ends(caplog: pytest.LogCaptureFixture) -> None:
    with (
        blocking.Sender(1, arena=ARENA, ring_bytes=RING_BYTES) as sender,
        blocking.Receiver(sender.handle, 0) as receiver,
    ):
        sender.send({"x": filled(3)}, PATIENCE)
        message = receiver.recv(PATIENCE)
        message["x"][0] = 4
        del message
        deadline = time.monotonic() + PATIENCE
        while not receiver.statistics().spans_changed:
            assert time.monotonic() < deadline
    (warning,) = said(caplog, "written to")
    assert "message['x'], uint8" in warning
    assert "in test_blocking_ends" in warning


# Kept too long --------------------------------------------------------------------------------------------------------


async def keep(receiver: Receiver, kept: list[Any]) -> None:
    kept.append(await receiver.recv())


@debugging
async def test_a_tensor_that_is_kept_is_told_of(open_channel: OpenChannel, caplog: pytest.LogCaptureFixture) -> None:
    """Again after twice the time, and with all that the same call received."""
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        kept: list[Any] = []
        for number in range(2):
            await channel.sender.send({"prompt": filled(number)})
            await keep(channel.receiver, kept)
        await channel.sender.send(filled(2))
        other = await channel.receiver.recv()
        ledger = ledger_of(channel.receiver)
        watches = list(ledger._watched.values())
        for watch, since in zip(watches, (0.0, 10.0, 65.0), strict=True):
            watch.held.since = since
        for now in (50.0, 59.9):
            ledger._look_at_ages(watches, now)
        assert not said(caplog, "held for more than")
        for now in (62.0, 75.0, 120.0, 123.9):
            ledger._look_at_ages(watches, now)
        (first,) = said(caplog, "held for more than")
        assert "a received tensor is held for more than 60 s, the oldest for 62 s, received at" in first
        assert "in keep" in first
        assert "The oldest is message['prompt'], uint8 of shape (1048576,) (message 1 of the channel, slot 0" in first
        ledger._look_at_ages(watches, 124.5)
        _, second = said(caplog, "held for more than")
        assert "2 received tensors are held for more than 60 s, the oldest for 124 s" in second
        for watch in watches:
            watch.held.since = time.monotonic()
        del kept, other, watch, watches
        await until(lambda: channel.slots_used == 0)


@debugging
async def test_the_thread_looks_at_ages(
    open_channel: OpenChannel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOARENA_DEBUG_RETAINED", "0")
    async with open_channel() as channel, asyncio.timeout(PATIENCE):
        await channel.sender.send(filled(1))
        kept: list[Any] = []
        await keep(channel.receiver, kept)
        await until(lambda: said(caplog, "held for more than 0 s"))
        kept.clear()
        await until(lambda: channel.slots_used == 0)


# A full arena ---------------------------------------------------------------------------------------------------------


@debugging
async def test_a_full_arena_is_put_down_to_who_holds_it(
    open_channel: OpenChannel, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_channel(2, arena=FOUR_SLOTS) as channel, asyncio.timeout(PATIENCE):
        kept: list[Any] = []
        hoarder, other = channel.receivers
        for number in range(3):
            await channel.sender.send(filled(number))
            await keep(hoarder, kept)
            await other.recv()
        await channel.sender.send(filled(3))
        both = [await receiver.recv() for receiver in channel.receivers]
        spans = channel.sender._core.arena.published_spans
        spans[0].since -= 42.0
        for span in ledger_of(hoarder).held.values():
            span.since -= 21.0
        await until(lambda: ledger_of(other).released == 3)  # by a thread
        await channel.sender.send(filled(4))
        for receiver in channel.receivers:
            assert shows(await receiver.recv(), 4)
        (warning,) = said(caplog, "no free span")
        pid = channel.sender.handle.sender.pid
        assert (
            f"4 of 4 slots are in use, spans held by rank: reader 0 (pid {pid}) holds 4 of them in 4 spans, the oldest "
            "(slot 0, message 1) for 42."
        ) in warning
        assert f"; reader 1 (pid {pid}) holds 1 of them in 1 spans, the oldest (slot 3, message 4) for 0." in warning
        (warning,) = said(caplog, "the arena was full")  # of the hoarder alone
        assert "reader 0 of channel" in warning
        assert "when message 5 of the channel was sent" in warning
        assert "this reader holds 4 of the 4 slots:\n3 slots, the oldest for 21." in warning
        assert warning.index("in keep") < warning.index("\n1 slots")
        del kept, both
        await until(lambda: channel.slots_used == 0)


@debugging
async def test_who_left_and_kept_something_is_named(open_channel: OpenChannel, caplog: pytest.LogCaptureFixture) -> None:
    async with open_channel(2, arena=FOUR_SLOTS) as channel, asyncio.timeout(PATIENCE):
        kept: list[Any] = []
        await channel.sender.send([filled(number) for number in range(4)])
        await keep(channel.receiver, kept)
        await channel.receivers[1].recv()
        await channel.receiver.aclose()
        await until(lambda: channel.sender.statistics().readers[0].state == "left")
        await channel.sender.send(filled(4))
        (warning,) = said(caplog, "no free span")
        assert f"reader 0 (pid {channel.sender.handle.sender.pid}) holds 4 of them in 4 spans" in warning
        kept.clear()
        await until(lambda: channel.slots_used == 0)


# Foreign loops --------------------------------------------------------------------------------------------------------


def with_loop(new_loop: LoopFactory, coroutine: Any) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(coroutine)


@debugging
async def test_a_call_from_elsewhere_says_where_the_end_lives(open_channel: OpenChannel, new_loop: LoopFactory) -> None:
    async with open_channel() as channel:
        errors: list[str] = []

        async def call() -> None:
            with pytest.raises(WrongContextError) as caught:
                await channel.sender.send(1)
            errors.append(str(caught.value))

        def without_loop() -> None:
            with pytest.raises(WrongContextError) as caught:
                channel.receiver.recv_nowait()
            errors.append(str(caught.value))

        for name, work in (("stranger", lambda: with_loop(new_loop, call())), ("loopless", without_loop)):
            thread = threading.Thread(target=work, name=name)
            thread.start()
            thread.join(PATIENCE)
        errors.append(str(channel.sender._forked()))
    of_sender, of_receiver, _ = errors
    loop = asyncio.get_running_loop()
    home = f"thread 'MainThread', event loop {type(loop).__name__} at {id(loop):#x}, task 'Task-"
    for text in errors:
        assert "It was started in process" in text
        assert home in text.partition("This call is made in")[0]
        assert "in _open_channel" in text
    assert "thread 'stranger', event loop" in of_sender.partition("This call is made in")[2]
    assert "thread 'loopless', which runs no event loop" in of_receiver.partition("This call is made in")[2]


# On and off -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "0"])
async def test_nothing_of_it_is_there_when_it_is_off(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("AIOARENA_DEBUG", raising=False)
    monkeypatch.setenv("AIOARENA_DEBUG_READONLY", "1")
    if value is not None:
        monkeypatch.setenv("AIOARENA_DEBUG", value)
    async with open_channel() as channel:
        assert type(channel.receiver._ledger) is SpanLedger
        assert type(channel.receiver._assembler) is Assembler
        assert channel.sender._birth is None
        assert "aioarena-debug" not in {thread.name for thread in threading.enumerate()}
        await channel.sender.send(filled(1))
        tensor = await channel.receiver.recv()
        tensor += 1  # memory is writable
        del tensor
        assert channel.receiver.statistics().spans_changed == 0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AIOARENA_DEBUG", "yes"),
        ("AIOARENA_DEBUG_READONLY", "true"),
        ("AIOARENA_DEBUG_RETAINED", "long"),
        ("AIOARENA_DEBUG_RETAINED", "-1"),
        ("AIOARENA_DEBUG_RETAINED", "nan"),
    ],
)
def test_wrong_values_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv("AIOARENA_DEBUG", "1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} must be"):
        Sender(1)


# Memory that cannot be written --------------------------------------------------------------------------------------


def test_who_writes_into_read_only_memory_ends_there() -> None:
    """What it reads is as ever, and the sender, which writes, does so too."""
    script = """
        import torch
        from aioarena import blocking

        def vandalize(tensor):
            tensor[0] = 7

        with blocking.Sender(1) as sender, blocking.Receiver(sender.handle, 0) as receiver:
            for number in range(3):
                sender.send(torch.full((1 << 20,), number))
                tensor = receiver.recv()
                print(int(tensor.sum()) >> 20, flush=True)
            vandalize(tensor)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "AIOARENA_DEBUG": "1", "AIOARENA_DEBUG_READONLY": "1"},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert done.returncode == -11, done.stderr
    assert done.stdout.split() == ["0", "1", "2"]
    assert "Segmentation fault" in done.stderr
    assert "in vandalize" in done.stderr
