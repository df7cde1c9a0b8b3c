"""A sender and a reader in one process, and work that keeps a stream busy for as long as wanted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

import aioarena

MIB = 1 << 20


@asynccontextmanager
async def channel(
    slots: int = 4, slot_bytes: int = 8 * MIB, **options: Any
) -> AsyncIterator[tuple[aioarena.Sender, aioarena.Receiver]]:
    arena = aioarena.ArenaConfig(slots=slots, slot_bytes=slot_bytes)
    async with aioarena.Sender(1, arena=arena) as sender, aioarena.Receiver(sender.handle, 0, **options) as receiver:
        yield sender, receiver


async def pass_on(sender: aioarena.Sender, receiver: aioarena.Receiver, obj: Any) -> Any:
    await sender.send(obj)
    return await receiver.recv()


async def pin(sender: aioarena.Sender, receiver: aioarena.Receiver) -> None:
    """Receive one tensor, and wait until the arena is pinned and the tensor's slot free."""
    await pass_on(sender, receiver, torch.zeros(MIB, dtype=torch.uint8))
    await until(lambda: receiver.statistics().pinned not in ("no", "pending"), 30)
    assert receiver.statistics().pinned == "yes"
    await until(lambda: receiver.statistics().spans_held == 0)


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


class Blocker:
    """Holds up a stream until it is told to go on, or for some seconds."""

    def __init__(self, stream: torch.cuda.Stream, seconds: float) -> None:
        # Cycles of a clock of 1 to 2 GHz; the exact time does not matter as long as it is longer than what goes on
        # meanwhile, which `still` checks.
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * 1.5e9))
            self._end = torch.cuda.Event()
            self._end.record(stream)

    @property
    def still(self) -> bool:
        return not self._end.query()


def run_script(script: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, from the project's root."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
