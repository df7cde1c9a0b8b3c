"""What a receiver does once its process uses a GPU: pin the arena, watch streams, release spans when they are done.

Without a GPU in use none of this costs anything: no descriptor, no event, no poll.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import torch

from aioarena import _devices
from aioarena._copying import CopyPool
from aioarena._platform import accelerator as runtime
from aioarena._platform.accelerator import Accelerator, Event
from aioarena._platform.memory import Pin
from aioarena._release import FIRST_POLL, LONGEST_POLL, HeldSpan, SpanLedger


class GpuSide:
    """The release task of one receiver, and what feeds it.

    Args:
        ledger: The spans of the receiver.
        accelerator: The GPU runtime.
        pool: Threads for pinning and for copies from pageable memory.
        loop: The receiver's loop.
        watch: Calls back on the loop when a descriptor becomes readable.
        pin: Whether to pin the arena once the GPU is in use.
    """

    def __init__(
        self,
        ledger: SpanLedger,
        accelerator: Accelerator,
        pool: CopyPool,
        loop: asyncio.AbstractEventLoop,
        watch: Callable[[int, Callable[[], None]], None],
        pin: bool,
    ) -> None:
        self._ledger = ledger
        self._accelerator = accelerator
        self._pool = pool
        self._loop = loop
        self._watch = watch
        self._wants_pin = pin
        self._poked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pinning: asyncio.Future[None] | None = None

    # Pinning ------------------------------------------------------------------------------------------------------

    def pin_if_useful(self) -> None:
        """Pin the arena in a thread, once this process uses a GPU. Until that is done, copies are staged as ever."""
        ledger = self._ledger
        if not self._wants_pin or ledger.mapping.pin is not Pin.NO or not self._accelerator.initialized():
            return
        self._wants_pin = False
        if runtime.claim_pinning(ledger.mapping):
            self._start()
            # The device current here is the one the user chose; in the thread it would be device 0.
            device = self._accelerator.current_device()
            self._pinning = self._loop.run_in_executor(
                self._pool.executor, runtime.pin, self._accelerator, ledger.mapping, device
            )

    # Releasing ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the release task: from now on spans may have to wait for a stream."""
        if self._task is None:
            self._watch(self._ledger.poke_fd, self._on_poke)
            self._task = self._loop.create_task(self._release_when_done(), name="aioarena-release")

    def _on_poke(self) -> None:
        self._ledger.clear_poke()
        self._poked.set()

    async def _release_when_done(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            pause = FIRST_POLL
            while self._ledger.pump():
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL)

    async def stop(self) -> None:
        """End the task. What it had to wait for goes on in a thread, see :meth:`SpanLedger.drain_in_background`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._pinning is not None:
            await asyncio.wait([self._pinning])

    def _held_by(self, tensor: torch.Tensor) -> HeldSpan | None:
        return self._ledger.find(tensor.untyped_storage().data_ptr())

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        held = self._held_by(tensor)
        if held is not None and stream not in held.streams:
            self._start()
            held.streams.append(stream)

    async def to_device(self, obj: Any, device: Any, stream: Any) -> Any:
        def note(tensor: torch.Tensor, event: Event) -> None:
            held = self._held_by(tensor)
            if held is not None:
                held.events.append(event)

        if self._accelerator.initialized():
            self._start()
        pinned = self._ledger.mapping.pin is Pin.YES
        return await _devices.to_accelerator(obj, device, stream, self._accelerator, self._pool, pinned, note)
