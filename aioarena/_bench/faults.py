"""`bench faults`: how soon each side learns that the other died, left or closed.

Every fault is real: processes are spawned and killed with SIGKILL. Times run from the call that causes the fault to the
moment a waiting ``await`` of the other side has raised or returned.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from aioarena import (
    ArenaConfig,
    EndOfChannel,
    Handle,
    ReaderLostError,
    Receiver,
    Sender,
    SenderLostError,
    WouldBlock,
)
from aioarena._bench._result import Result, Section
from aioarena._bench._text import Progress, show_seconds
from aioarena._bench._workers import Team, Worker

_RING_BYTES = 64 << 10
_TENSOR_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FaultsOptions:
    """What the command line said."""

    runs: int = 5
    quick: bool = False


# In the workers ---------------------------------------------------------------------------------------------------


def _reader(rank: int, pipe: Any, handle: Handle) -> None:
    """Attach, hold what it receives, and tell when and how the channel ended."""

    async def read() -> None:
        began = time.monotonic()
        chan = Receiver(handle, rank)
        await chan.start()
        pipe.send(("attached", time.monotonic() - began))
        held = []
        try:
            while True:
                message = await chan.recv()
                if message == "leave":
                    break
                held.append(message)
        except (EndOfChannel, SenderLostError) as error:
            pipe.send((type(error).__name__, time.monotonic()))
        await chan.aclose()
        pipe.send(("left", time.monotonic()))
        pipe.recv()

    asyncio.run(read())


def _sender(rank: int, pipe: Any) -> None:
    """A sender in a process of its own, to be killed."""

    async def send() -> None:
        async with Sender(1, name="bench-faults") as chan:
            pipe.send(chan.handle)
            await chan.send("hello")
            pipe.send("sent")
            await asyncio.Event().wait()

    asyncio.run(send())


# In the parent ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _channel(readers: int) -> AsyncIterator[tuple[Sender, list[Worker]]]:
    arena = ArenaConfig(slots=64, slot_bytes=256 << 10)
    async with Sender(readers, name="bench-faults", arena=arena, ring_bytes=_RING_BYTES) as chan:
        with Team(readers, _reader, chan.handle) as team:
            await team.answers()
            yield chan, team.workers


def _kill(worker: Worker) -> float:
    now = time.monotonic()
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGKILL)
    return now


async def _reader_killed_while_sending() -> float:
    """Rank 0 is stopped and the ring full, so that a send waits; rank 1 is killed."""
    async with _channel(2) as (chan, workers):
        assert workers[0].process.pid is not None
        os.kill(workers[0].process.pid, signal.SIGSTOP)
        try:
            while True:
                chan.send_nowait(b"x" * 4000)
        except WouldBlock:
            pass
        waiting = asyncio.create_task(chan.send(b"x" * 4000))
        await asyncio.sleep(0)  # let it park
        killed = _kill(workers[1])
        try:
            await waiting
        except ReaderLostError:
            return time.monotonic() - killed
        raise AssertionError("the send went through without its reader")


async def _slots_of_killed_reader() -> float:
    """The reader holds a tensor; how soon its slots are free."""
    async with _channel(1) as (chan, workers):
        await chan.send(torch.zeros(_TENSOR_BYTES, dtype=torch.uint8))
        assert chan.statistics().slots_used
        killed = _kill(workers[0])
        while chan.statistics().slots_used:  # noqa: ASYNC110 - what is timed has no event
            await asyncio.sleep(0.0005)
        return time.monotonic() - killed


async def _reader_left() -> float:
    """How long aclose of a reader takes, which ends when the sender has taken note."""
    async with _channel(1) as (chan, workers):
        sent = time.monotonic()
        await chan.send("leave")
        return float((await workers[0].answer())[1]) - sent


async def _rank_taken_over() -> float:
    """A reader died; how long the start of its successor takes, in a process that is there."""
    async with _channel(1) as (chan, workers):
        _kill(workers[0])
        while chan.statistics().readers[0].state != "lost":  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.0005)
        began = time.monotonic()
        async with Receiver(chan.handle, 0):
            return time.monotonic() - began


async def _sender_killed() -> float:
    """How soon the pending receive of a reader raises."""
    with Team(1, _sender) as senders:
        handle = await senders.workers[0].answer()
        async with Receiver(handle, 0) as chan:
            await chan.recv()
            pending = asyncio.create_task(chan.recv())
            await senders.workers[0].answer()
            killed = _kill(senders.workers[0])
            try:
                await pending
            except SenderLostError:
                return time.monotonic() - killed
            raise AssertionError("a message came from nowhere")


async def _sender_closed() -> float:
    """How soon the pending receive of a reader ends."""
    async with _channel(1) as (chan, workers):
        closed = time.monotonic()
        await chan.aclose()
        how, when = await workers[0].answer()
        assert how == "EndOfChannel", how
        return float(when) - closed


_FAULTS: list[tuple[str, str, Callable[[], Awaitable[float]]]] = [
    ("reader killed", "a send that waits raises ReaderLostError", _reader_killed_while_sending),
    ("reader killed", "the slots it held are free", _slots_of_killed_reader),
    ("reader closes", "its aclose returns, the sender knows", _reader_left),
    ("rank vacant", "a new reader's start returns", _rank_taken_over),
    ("sender killed", "a pending recv raises SenderLostError", _sender_killed),
    ("sender closes", "a pending recv raises EndOfChannel", _sender_closed),
]


async def measure(options: FaultsOptions, progress: Progress) -> Result:
    """Run every fault several times."""
    section = Section(
        f"Time from a fault to its effect at the other end, median and longest of {options.runs}:",
        ["what happens", "what it causes", "median", "longest"],
    )
    for what, effect, fault in _FAULTS:
        times = []
        for run in range(options.runs):
            progress.say(f"{what}: {effect}", f"{run + 1}/{options.runs}")
            times.append(await fault())
        section.rows.append([what, effect, show_seconds(median(times)), show_seconds(max(times))])
        section.records.append({"fault": what, "effect": effect, "median": median(times), "longest": max(times)})
    return Result("faults", [section], {"runs": options.runs})
