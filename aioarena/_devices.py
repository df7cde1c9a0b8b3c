"""Moving the tensors of a received object to a device, and into private memory."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from aioarena._codec import MemorySource
from aioarena._copying import ON_LOOP_BYTES, CopyPool, Portion
from aioarena._core.record import Placement
from aioarena._platform.accelerator import Accelerator, Event
from aioarena._platform.memory import Mapping
from aioarena._release import FIRST_POLL, LONGEST_POLL, HeldSpan


def map_tensors(obj: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Rebuild a nesting of dict, list, tuple, named tuple and dataclass with its tensors changed.

    A tensor that occurs twice is changed once. Containers keep their type; what holds no tensor that changed is passed
    through.
    """
    return _Walk(change).through(obj)


class _Walk:
    """One walk through a nesting.

    Not a function inside a function: one that calls itself is part of a cycle, which would keep the tensors alive until
    the garbage collector comes by.
    """

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._change = change
        # With the tensor, which keeps its id from becoming another one's.
        self._changed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def through(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._changed:
                self._changed[id(value)] = value, self._change(value)
            return self._changed[id(value)][1]
        if isinstance(value, dict):
            return self._through_dict(value)
        if isinstance(value, tuple | list):
            items = [self.through(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._through_dataclass(value)
        return value

    def _through_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        items = {key: self.through(item) for key, item in value.items()}
        if all(item is value[key] for key, item in items.items()):
            return value
        if type(value) is dict:
            return items
        clone = copy.copy(value)  # defaultdict and other subclasses keep what else they carry
        for key, item in items.items():
            clone[key] = item
        return clone

    def _through_dataclass(self, value: Any) -> Any:
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        items = {name: self.through(getattr(value, name)) for name in names}
        if all(item is getattr(value, name) for name, item in items.items()):
            return value
        clone = object.__new__(type(value))
        if hasattr(value, "__dict__"):
            clone.__dict__.update(value.__dict__)
        for name, item in items.items():
            object.__setattr__(clone, name, item)  # also where it is frozen
        return clone


async def to_accelerator(
    obj: Any,
    device: Any,
    stream: Any,
    accelerator: Accelerator,
    pool: CopyPool,
    pinned: bool,
    held_by: Callable[[torch.Tensor], list[HeldSpan]] = lambda tensor: [],
    under_way: set[asyncio.Future[Any]] | None = None,
) -> Any:
    """Copy CPU tensors to an accelerator and wait for the copies.

    Args:
        obj: What to copy.
        device: Where to.
        stream: What to copy on, or None for the current stream.
        accelerator: The GPU runtime.
        pool: Threads for copies that are more than enqueued.
        pinned: Whether the arena is pinned memory.
        held_by: Finds the spans a tensor lies in. They are not reused before the copies from them are complete.
        under_way: Where to note the work of threads while it goes on.
    """
    # Here, because another thread has another current device and other current streams.
    device, stream = accelerator.destination(device, stream)
    noted: list[tuple[HeldSpan, Event]] = []
    events: list[Event] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor
        spans = held_by(tensor)
        moved, event = accelerator.copy(tensor, device, stream)
        for held in spans:
            held.events.append(event)
            noted.append((held, event))
        events.append(event)
        return moved

    if pinned and _staged_nbytes(obj, held_by) <= ON_LOOP_BYTES:
        moved = map_tensors(obj, move)  # only enqueues
    else:
        # From pageable memory the runtime stages the copy in the calling thread, which takes as long as the copy does.
        moved = await _in_thread(pool, lambda: map_tensors(obj, move), under_way)
    pause = FIRST_POLL
    while events:
        events = [event for event in events if not event.query()]
        if events:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
    for held, event in noted:
        # One has to stay, as a sign that somebody said which streams count; more would only pile up.
        if len(held.events) > 1:
            with contextlib.suppress(ValueError):
                held.events.remove(event)
    return moved


def _staged_nbytes(obj: Any, held_by: Callable[[torch.Tensor], list[HeldSpan]]) -> int:
    """Bytes that the calling thread has to copy itself: of tensors outside of the arena, or with gaps."""
    total = 0

    def measure(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        if tensor.is_cpu and (not held_by(tensor) or not tensor.is_contiguous()):
            total += tensor.numel() * tensor.element_size()
        return tensor

    map_tensors(obj, measure)
    return total


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


async def _in_thread(pool: CopyPool, work: Callable[[], Any], under_way: set[asyncio.Future[Any]] | None = None) -> Any:
    """Run in a thread; when cancelled, wait until the thread no longer uses the memory, then say so."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run() -> Any:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):  # a thread has its own modes
            return work()

    future = asyncio.wrap_future(pool.executor.submit(run))
    under_way = set() if under_way is None else under_way
    under_way.add(future)
    cancelled: tuple[Any, ...] | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error.args
    under_way.discard(future)
    try:
        failure = future.exception()
        # A new exception, and no name left that refers to one: an exception that is referred to by a frame of its own
        # traceback keeps all of the caller's tensors alive until the garbage collector comes by.
        if cancelled is not None:
            raise asyncio.CancelledError(*cancelled)
        if failure is not None:
            raise failure
        return future.result()
    finally:
        del future, failure


def private_portions(
    arena: Mapping, placements: Sequence[tuple[int, Placement]]
) -> tuple[dict[int, memoryview], list[Portion]]:
    """Memory for private copies of spans, by buffer index, and what to copy."""
    copies: dict[int, memoryview] = {}
    portions: list[Portion] = []
    for index, placement in placements:
        target = np.empty(placement.nbytes, np.uint8)
        source = MemorySource(arena.address + placement.start, placement.nbytes, arena)
        portions += source.portions(target.ctypes.data)
        copies[index] = target.data
    return copies, portions
