"""Steps and objects that tests of the fronts share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from aioarena import Receiver, Sender, WouldBlock, blocking
from tests.conftest import PATIENCE


async def turns(count: int) -> None:
    """Let the loop turn ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)  # a step, not a delay


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop turn until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        await asyncio.sleep(0)  # the next turn of the loop; sockets and threads need some


async def parked(receiver: Receiver) -> None:
    """Until the receiver waits for a message."""
    core = receiver._core
    assert core is not None
    await until(lambda: core._words[core.layout.parked + core.rank])


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and see that it ends as cancelled."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled(), f"ended as {task}"


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """No garbage collection: what comes back in here came back by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def filled(value: int, nbytes: int = 1 << 20) -> torch.Tensor:
    """A tensor that shows its number everywhere."""
    return torch.full((nbytes,), value, dtype=torch.uint8)


def shows(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


def fill_ring(sender: Sender | blocking.Sender) -> int:
    """Send until there is no room for anything: how many messages fitted."""
    count = 0
    for message in (b"x" * 4000, b"x" * 100, 0):
        with contextlib.suppress(WouldBlock):
            while True:
                sender.send_nowait(message)
                count += 1
    return count


def in_arena(receiver: Receiver, array: torch.Tensor | np.ndarray[Any, Any] | memoryview) -> bool:
    """Whether memory lies in the arena's mapping, so that it came without a copy."""
    assert receiver._ledger is not None
    mapping = receiver._ledger.mapping
    address = array.data_ptr() if isinstance(array, torch.Tensor) else np.asarray(array).ctypes.data
    return bool(mapping.address <= address < mapping.address + mapping.nbytes)
