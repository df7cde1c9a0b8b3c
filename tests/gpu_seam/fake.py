"""A GPU runtime that only exists in the test: its work is done when the test says so, and misuse is noted.

It has what makes the real one hard: a current device and current streams per thread, contexts that come into being on
the device that happens to be current, captures that break, and registration that holds up every other call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FakeStream:
    """A stream. While it is busy, events recorded on it are pending."""

    def __init__(self, device: int, name: str) -> None:
        self.device = device
        self.name = name
        self.busy = False
        self.capturing = False
        self._waiting: list[FakeEvent] = []

    def __repr__(self) -> str:
        return f"<stream {self.name}>"

    def put(self, event: FakeEvent) -> None:
        if self.busy:
            self._waiting.append(event)
        else:
            event.done = True

    def finish(self) -> None:
        """Complete the work so far."""
        self.busy = False
        for event in self._waiting:
            event.done = True
        self._waiting.clear()


class FakeEvent:
    def __init__(self, gpu: FakeGpu, stream: FakeStream) -> None:
        self._gpu = gpu
        self.stream = stream
        self.done = False
        self.queries = 0

    def query(self) -> bool:
        self._gpu.enter("query")
        self.queries += 1
        if self._gpu.query_error is not None:
            raise self._gpu.query_error
        return self.done


class FakeGpu:
    """Implements ``Accelerator``.

    Attributes:
        contexts: Devices with a context; CUDA counts as initialised once there is one.
        calls: Names of the calls made, in order; ``initialized`` is not among them.
        misuse: What the real runtime would have punished.
        events: All events ever recorded.
        registered: Arguments of the successful registrations that were not undone.
        registrations: ``(address, nbytes, device, thread name)`` of every try to register.
        unregistrations: ``(address, device, thread name)``.
        copies: ``(device, stream, thread name)`` of every copy.
        profiled: Whether there is a profiler's interface.
        open_ranges: Ranges that have begun, in order.
        ranges: Names of those that have ended, in order.
    """

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.contexts: set[int] = set()
        self.default_streams = [FakeStream(device, f"default of {device}") for device in range(devices)]
        self.calls: list[str] = []
        self.misuse: list[str] = []
        self.events: list[FakeEvent] = []
        self.registered: dict[int, int] = {}
        self.registrations: list[tuple[int, int, int, str]] = []
        self.unregistrations: list[tuple[int, int, str]] = []
        self.copies: list[tuple[int, FakeStream, str]] = []
        self.register_problem: str | Exception | None = None
        self.register_gate: threading.Event | None = None
        self.registering = threading.Event()
        self.copy_gate: threading.Event | None = None
        self.copying = threading.Event()
        self.query_error: Exception | None = None
        self.record_error: Exception | None = None
        self.streams_error: Exception | None = None
        self.profiled = True
        self.open_ranges: list[list[str]] = []
        self.ranges: list[str] = []
        self._threads = threading.local()

    # What a test does ---------------------------------------------------------------------------------------------

    def initialize(self, device: int = 0) -> None:
        """What the user's first operation on a GPU does."""
        self.contexts.add(device)
        self._threads.device = device

    def stream(self, name: str, device: int = 0) -> FakeStream:
        stream = FakeStream(device, name)
        return stream

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the calling thread's current one of its device."""
        current = self._current()
        before = current[stream.device]
        current[stream.device] = stream
        try:
            yield
        finally:
            current[stream.device] = before

    def recorded_on(self, stream: FakeStream) -> list[FakeEvent]:
        return [event for event in self.events if event.stream is stream]

    @property
    def queries(self) -> int:
        return sum(event.queries for event in self.events)

    def _current(self) -> list[FakeStream]:
        if not hasattr(self._threads, "streams"):
            self._threads.streams = list(self.default_streams)
        streams: list[FakeStream] = self._threads.streams
        return streams

    def enter(self, call: str) -> None:
        self.calls.append(call)
        if not self.contexts and call not in ("destination", "copy"):
            self.misuse.append(f"{call} without a context")
        if self.registering.is_set() and call not in ("destination", "current_streams"):
            self.misuse.append(f"{call} while memory is being registered: it would have been held up")

    # Accelerator --------------------------------------------------------------------------------------------------

    def initialized(self) -> bool:
        return bool(self.contexts)

    def current_device(self) -> int:
        self.enter("current_device")
        device: int = getattr(self._threads, "device", 0)
        return device

    def current_streams(self) -> list[Any]:
        self.enter("current_streams")
        if self.streams_error is not None:
            raise self.streams_error
        return list(self._current())

    def register(self, address: int, nbytes: int, device: int) -> str | None:
        self.enter("register")
        self.registrations.append((address, nbytes, device, threading.current_thread().name))
        if device not in self.contexts:
            self.misuse.append(f"register makes a context on device {device}")
        if address in self.registered:
            self.misuse.append("register twice")
        self.registering.set()
        try:
            if self.register_gate is not None and not self.register_gate.wait(30):
                self.misuse.append("the test never opened the gate of register")
        finally:
            self.registering.clear()
        if isinstance(self.register_problem, Exception):
            raise self.register_problem
        if self.register_problem is None:
            self.registered[address] = nbytes
        return self.register_problem

    def unregister(self, address: int, device: int) -> None:
        self.enter("unregister")
        self.unregistrations.append((address, device, threading.current_thread().name))
        nbytes = self.registered.pop(address, None)
        if nbytes is None:
            self.misuse.append("unregister of what is not registered")
        elif not is_mapped(address, nbytes):
            self.misuse.append("unregister after unmap")

    def capturing(self, stream: Any) -> bool:
        self.enter("capturing")
        return bool(stream.capturing)

    def record(self, stream: Any) -> FakeEvent | None:
        self.enter("record")
        if self.record_error is not None:
            raise self.record_error
        if stream.device not in self.contexts:
            return None
        return self._record(stream)

    def _record(self, stream: FakeStream) -> FakeEvent:
        if stream.capturing:
            self.misuse.append("record while a graph is captured")
        event = FakeEvent(self, stream)
        self.events.append(event)
        stream.put(event)
        return event

    def destination(self, device: Any, stream: Any) -> tuple[Any, Any]:
        self.enter("destination")
        index = torch.device(device).index
        if stream is not None:
            return stream.device, stream
        index = getattr(self._threads, "device", 0) if index is None else index
        return index, self._current()[index]

    def copy(self, tensor: torch.Tensor, device: Any, stream: Any) -> tuple[torch.Tensor, FakeEvent]:
        self.enter("copy")
        self.copying.set()
        if self.copy_gate is not None and not self.copy_gate.wait(30):
            self.misuse.append("the test never opened the gate of copy")
        self.contexts.add(device)
        self.copies.append((device, stream, threading.current_thread().name))
        return tensor.clone(), self._record(stream)

    def has_ranges(self) -> bool:
        return self.profiled

    def begin_range(self, name: str) -> list[str]:
        mark = [name]  # an object of its own, so that each can be told from another of the same name
        self.open_ranges.append(mark)
        return mark

    def end_range(self, mark: list[str]) -> None:
        self.open_ranges = [open_range for open_range in self.open_ranges if open_range is not mark]
        self.ranges.append(mark[0])


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether this process has a mapping that covers some memory."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address and address + nbytes <= int(end, 16):
                return True
    return False
