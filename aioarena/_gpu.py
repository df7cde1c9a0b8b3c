"""What a receiver does once its process uses a GPU: pin the arena, watch streams, release spans when they are done.

Without a GPU in use none of this costs anything: no descriptor, no event, no poll.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import torch

from aioarena import _devices
from aioarena._copying import CopyPool
from aioarena._platform import accelerator as runtime
from aioarena._platform.accelerator import Accelerator
from aioarena._platform.memory import Pin
from aioarena._release import FIRST_POLL, LONGEST_POLL, HeldSpan, SpanLedger, expect_gpu


class GpuSide:
    """The release task of one receiver, and what feeds it.

    The task is made of callbacks of the loop: it is there when a span was dropped and until that is released, and who
    cancels all tasks does not end it.

    Args:
        ledger: The spans of the receiver.
        accelerator: The GPU runtime.
        pool: Threads for copies from pageable memory.
        loop: The receiver's loop.
        watch: Calls back on the loop when a descriptor becomes readable.
        pin: Asked before the arena is pinned, once the GPU is in use; False if that has to wait. None not to pin it.
    """

    def __init__(
        self,
        ledger: SpanLedger,
        accelerator: Accelerator,
        pool: CopyPool,
        loop: asyncio.AbstractEventLoop,
        watch: Callable[[int, Callable[[], None]], None],
        pin: Callable[[], bool] | None,
    ) -> None:
        self._ledger = ledger
        self._accelerator = accelerator
        self._pool = pool
        self._loop = loop
        self._watch = watch
        self._may_pin = pin
        self._started = False
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._pause = FIRST_POLL
        self._copies: set[asyncio.Future[Any]] = set()
        ledger.attend(self._start_soon)
        if ledger.mapping.pin in (Pin.PENDING, Pin.YES):  # by another receiver of this process
            self._start()

    # Pinning ------------------------------------------------------------------------------------------------------

    def pin_if_useful(self) -> None:
        """Pin the arena in a thread, once this process uses a GPU. Until that is done, copies are staged as ever."""
        mapping = self._ledger.mapping
        if self._may_pin is None or mapping.pin is not Pin.NO:
            return
        try:
            if not self._accelerator.initialized():
                return
            # The device current here is the one the user chose; in the thread it would be device 0.
            device = self._accelerator.current_device()
        except Exception as error:  # a broken GPU is no reason to lose a message
            runtime.give_up_pinning(mapping, str(error))
            return
        if not self._may_pin():
            return  # it is being trimmed; the next message asks again
        self._may_pin = None
        if runtime.claim_pinning(mapping):
            self._start()
            expect_gpu(mapping)
            # A thread of its own: for a second, copies would wait for it in the pool. Not a daemon, because one that
            # comes back from the runtime into an interpreter that is gone would abort the process.
            thread = threading.Thread(
                target=runtime.pin, args=(self._accelerator, mapping, device), name="aioarena-pin", daemon=False
            )
            try:
                thread.start()
            except RuntimeError as error:
                runtime.give_up_pinning(mapping, str(error))

    # Releasing ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the release task: from now on spans may have to wait for a stream."""
        if not self._started and not self._stopped:
            self._started = True
            self._watch(self._ledger.poke_fd, self._on_poke)

    def _start_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._start)

    def _on_poke(self) -> None:
        self._ledger.clear_poke()
        if self._timer is not None:
            self._timer.cancel()
        self._pause = FIRST_POLL
        self._poll()

    def _poll(self) -> None:
        self._timer = None
        if not self._stopped and self._ledger.pump():
            self._timer = self._loop.call_later(self._pause, self._poll)
            self._pause = min(2 * self._pause, LONGEST_POLL)

    async def stop(self) -> None:
        """End the task. What it had to wait for goes on in a thread, see :meth:`SpanLedger.drain_in_background`.

        Waits for copies that are made in threads, because closing the pool would do so without letting the loop turn.
        """
        while self._copies:
            await asyncio.wait(self._copies)
        self._stopped = True
        self._watch = _ignore  # it belongs to the receiver that owns us: kept, the two would be a reference cycle
        self._may_pin = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _held_by(self, tensor: torch.Tensor) -> list[HeldSpan]:
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have no storage of their own
            return []
        return self._ledger.find(address)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        for held in self._held_by(tensor):
            if stream not in held.streams:
                self._start()
                held.streams.append(stream)

    async def to_device(self, obj: Any, device: Any, stream: Any) -> Any:
        self._start()
        pinned = self._ledger.mapping.pin is Pin.YES
        return await _devices.to_accelerator(
            obj, device, stream, self._accelerator, self._pool, pinned, self._held_by, self._copies
        )


def _ignore(fd: int, callback: Callable[[], None]) -> None:
    """What watches for a receiver that is closed."""
