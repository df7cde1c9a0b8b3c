"""Moving the tensors of a received object to a device, and into private memory."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from aioarena._codec import MemorySource
from aioarena._copying import ON_LOOP_BYTES, STEP_BYTES, CopyPool, join
from aioarena._core.record import Placement
from aioarena._platform.accelerator import Accelerator, Event
from aioarena._platform.memory import Mapping
from aioarena._release import FIRST_POLL, LONGEST_POLL


def map_tensors(obj: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Rebuild a nesting of dict, list, tuple, named tuple and dataclass with its tensors changed.

    A tensor that occurs twice is changed once. Containers keep their type; what holds no tensor is passed through.
    """
    changed: dict[int, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]
        if isinstance(value, dict):
            items = {key: walk(item) for key, item in value.items()}
            if type(value) is dict:
                return items
            copy = value.copy()  # defaultdict and other subclasses keep what else they carry
            copy.update(items)
            return copy
        if isinstance(value, tuple):
            walked = [walk(item) for item in value]
            return type(value)(*walked) if hasattr(value, "_fields") else type(value)(walked)
        if isinstance(value, list):
            return type(value)(walk(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: walk(getattr(value, field.name)) for field in dataclasses.fields(value)}
            if all(item is getattr(value, name) for name, item in fields.items()):
                return value
            clone = object.__new__(type(value))
            if hasattr(value, "__dict__"):
                clone.__dict__.update(value.__dict__)
            for name, item in fields.items():
                object.__setattr__(clone, name, item)
            return clone
        return value

    return walk(obj)


async def to_accelerator(
    obj: Any,
    device: Any,
    stream: Any,
    accelerator: Accelerator,
    pool: CopyPool,
    pinned: bool,
    note: Callable[[torch.Tensor, Event], None] | None = None,
) -> Any:
    """Copy CPU tensors to an accelerator and wait for the copies; ``note`` is told the event of each."""
    events: list[Event] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor
        moved, event = accelerator.copy(tensor, device, stream)
        if note is not None:
            note(tensor, event)
        events.append(event)
        return moved

    if pinned:
        moved = map_tensors(obj, copy)  # only enqueues
    else:
        # From pageable memory the runtime stages the copy in the calling thread, which takes as long as the copy does.
        moved = await _in_thread(pool, lambda: map_tensors(obj, copy))
    pause = FIRST_POLL
    while events:
        events = [event for event in events if not event.query()]
        if events:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
    return moved


async def to_cpu(obj: Any, pool: CopyPool) -> Any:
    """Private copies of all CPU tensors, large ones made in a thread."""
    total = 0

    def measure(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    map_tensors(obj, measure)

    def clone() -> Any:
        return map_tensors(obj, lambda tensor: tensor.clone() if tensor.is_cpu else tensor.cpu())

    return clone() if total <= ON_LOOP_BYTES else await _in_thread(pool, clone)


async def _in_thread(pool: CopyPool, work: Callable[[], Any]) -> Any:
    """Run in a thread; when cancelled, wait until the thread no longer uses the memory, then say so."""
    future = asyncio.wrap_future(pool.executor.submit(work))
    await join([future])
    return future.result()


def copy_steps(
    arena: Mapping, slot_bytes: int, placements: Sequence[tuple[int, Placement]]
) -> tuple[dict[int, memoryview], list[Callable[[], object]]]:
    """Memory and copy steps for private copies of spans, by buffer index."""
    copies: dict[int, memoryview] = {}
    steps: list[Callable[[], object]] = []
    for index, placement in placements:
        target = np.empty(placement.nbytes, np.uint8)
        source = MemorySource(arena.address + placement.slot * slot_bytes, placement.nbytes, arena)
        steps += source.pieces(target.ctypes.data, STEP_BYTES)
        copies[index] = target.data
    return copies, steps
