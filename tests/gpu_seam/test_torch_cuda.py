"""The real adapter, over a torch whose CUDA functions are stand-ins: what it calls, with which device current."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aioarena._platform import accelerator
from aioarena._platform.accelerator import TorchCuda

SUCCESS, OUT_OF_MEMORY = 0, 2
RELAXED = 2


class StubCuda:
    """As much of ``torch.cuda`` and of the runtime as the adapter uses.

    Like the real one, nearly any call makes a context on the device that is current in the thread.
    """

    def __init__(self) -> None:
        self.initialized = True
        self.contexts = {1}
        self.capture_mode = 0
        self.log: list[tuple[Any, ...]] = []
        self.result = SUCCESS
        self.raises: Exception | None = None
        self.event_error: Exception | None = None
        self._threads = threading.local()

    # The runtime

    @property
    def device(self) -> int:
        return getattr(self._threads, "device", 0)

    def runtime(self, name: str, *details: Any) -> None:
        self.contexts.add(self.device)
        self.log.append((name, self.device, self.capture_mode, *details))

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        self.runtime("register", address, nbytes, flags)
        if self.raises is not None:
            raise self.raises
        return self.result

    def host_unregister(self, address: int) -> int:
        self.runtime("unregister", address)
        return self.result

    def runtime_function(self, name: str) -> Callable[..., int]:
        def get_last_error() -> int:
            self.log.append(("clear", self.device))
            return self.result

        def exchange(mode: Any) -> int:
            self.contexts.add(self.device)
            self.capture_mode, mode._obj.value = mode._obj.value, self.capture_mode
            return 0

        return {"GetLastError": get_last_error, "ThreadExchangeStreamCaptureMode": exchange}[name]

    # torch.cuda

    @contextmanager
    def use_device(self, device: Any) -> Iterator[None]:
        index = device if isinstance(device, int) else torch.device(device).index
        before, self._threads.device = self.device, index
        try:
            yield
        finally:
            self._threads.device = before

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        # It is made current, and with it its device; afterwards, the device that was.
        self.contexts |= {self.device, stream.device.index}
        before = getattr(self._threads, "stream", None)
        self._threads.stream = stream
        try:
            yield
        finally:
            self._threads.stream = before

    def is_capturing(self) -> bool:
        return bool(self._threads.stream.capturing)

    def current_stream(self, device: int | None = None) -> Any:
        return make_stream(self.device if device is None else device)

    def event(self) -> Any:
        def query() -> bool:
            self.runtime("query")
            if self.event_error is not None:
                raise self.event_error
            return True

        return SimpleNamespace(record=lambda stream: self.runtime("record", stream), query=query)


def make_stream(device: int, capturing: bool = False) -> Any:
    return SimpleNamespace(device=torch.device("cuda", device), capturing=capturing)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StubCuda:
    """A machine with 4 GPUs, of which this process uses number 1."""
    stub = StubCuda()
    cudart = SimpleNamespace(
        cudaHostRegister=stub.host_register,
        cudaHostUnregister=stub.host_unregister,
        cudaGetErrorString=lambda result: f"error string of {result}",
    )
    replacements: dict[str, Any] = {
        "is_initialized": lambda: stub.initialized,
        "device_count": lambda: 4,
        "current_device": lambda: stub.device,
        "device": stub.use_device,
        "stream": stub.use_stream,
        "current_stream": stub.current_stream,
        "is_current_stream_capturing": stub.is_capturing,
        "cudart": lambda: cudart,
        "Event": stub.event,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device in stub.contexts, raising=False)
    monkeypatch.setattr(accelerator, "_runtime_function", stub.runtime_function)
    return stub


def test_initialized_means_that_there_is_a_context(cuda: StubCuda) -> None:
    """torch is also initialised by asking for a device's name, and then pinning would make a context."""
    gpu = TorchCuda()
    assert gpu.initialized()
    cuda.contexts.clear()
    assert not gpu.initialized()
    cuda.contexts.add(3)
    cuda.initialized = False  # also what it says in the child of a process that used CUDA
    assert not gpu.initialized()
    assert cuda.log == []


def test_the_current_device_is_one_with_a_context(cuda: StubCuda) -> None:
    """A process that only ever says "cuda:1" never changed its current device from 0."""
    gpu = TorchCuda()
    assert gpu.current_device() == 1
    with cuda.use_device(3):
        assert gpu.current_device() == 1
        cuda.contexts.add(3)
        assert gpu.current_device() == 3


def test_register_and_unregister_run_on_the_device_they_are_given(cuda: StubCuda) -> None:
    """In a thread that never chose one, and without a context on device 0; portable, so that every device can copy."""
    gpu = TorchCuda()
    answers: list[Any] = []

    def work() -> None:
        answers.append(gpu.register(4096, 8192, 1))
        answers.append(gpu.unregister(4096, 1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [None, None]
    assert cuda.log == [("register", 1, RELAXED, 4096, 8192, 1), ("unregister", 1, RELAXED, 4096)]
    assert cuda.contexts == {1}
    assert cuda.capture_mode == 0, "the thread's mode is put back"


def test_a_failed_register_clears_the_error_and_says_why(cuda: StubCuda) -> None:
    """Once, in the thread that has it, on the runtime that has it."""
    cuda.result = OUT_OF_MEMORY
    problem = TorchCuda().register(4096, 8192, 1)
    assert problem == "CUDA error 2 (error string of 2)"
    assert [entry[0] for entry in cuda.log] == ["register", "clear"]
    assert cuda.log[1] == ("clear", 1)


def test_a_register_that_raises_is_a_failed_one(cuda: StubCuda) -> None:
    """As on some releases of torch."""
    cuda.raises = RuntimeError("CUDA error: out of memory")
    assert TorchCuda().register(4096, 8192, 1) == "CUDA error: out of memory"
    assert [entry[0] for entry in cuda.log] == ["register", "clear"]


def test_without_access_to_the_runtime_a_launch_of_our_own_takes_the_error(
    cuda: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch's libraries do not give the function away."""
    launches: list[Any] = []

    def zeros(*shape: int, device: str) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(accelerator, "_runtime_function", lambda name: None)
    monkeypatch.setattr(torch, "zeros", zeros)
    cuda.result = OUT_OF_MEMORY
    assert "error string" in (TorchCuda().register(4096, 8192, 1) or "")
    assert launches == ["cuda:1"]


def test_unregister_never_raises_and_leaves_no_error(cuda: StubCuda) -> None:
    """The context may be gone."""
    cuda.result = OUT_OF_MEMORY
    TorchCuda().unregister(4096, 1)
    assert [entry[0] for entry in cuda.log] == ["unregister", "clear"]
    cuda.host_unregister = None  # type: ignore[assignment, method-assign]
    TorchCuda().unregister(4096, 1)


def test_recording_leaves_devices_without_a_context_alone(cuda: StubCuda) -> None:
    """The current stream of a device nobody uses has no work."""
    gpu = TorchCuda()
    streams = gpu.current_streams()
    assert [stream.device.index for stream in streams] == [0, 1, 2, 3]
    events = [gpu.record(stream) for stream in streams if not gpu.capturing(stream)]
    assert [event is not None for event in events] == [False, True, False, False]
    assert [entry[:3] for entry in cuda.log] == [("record", 1, RELAXED)]
    assert cuda.contexts == {1}


def test_capturing_asks_for_the_stream_that_is_named(cuda: StubCuda) -> None:
    """The current one may be another."""
    gpu = TorchCuda()
    assert gpu.capturing(make_stream(1, capturing=True))
    assert not gpu.capturing(make_stream(1))
    assert cuda.contexts == {1}


def test_an_event_is_queried_on_its_device_and_without_breaking_captures(cuda: StubCuda) -> None:
    """By a thread whose current device has no context; another thread's capture forbids queries to all."""
    event = TorchCuda().record(make_stream(1))
    assert event is not None
    cuda.log.clear()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(event.query()))
    thread.start()
    thread.join()
    assert answers == [True]
    assert cuda.log == [("query", 1, RELAXED)]
    assert cuda.contexts == {1}
    assert cuda.capture_mode == 0


def test_a_query_refused_during_a_capture_is_not_an_error_of_the_device(cuda: StubCuda) -> None:
    """ROCm refuses also in the relaxed mode. Other errors are raised."""
    event = TorchCuda().record(make_stream(1))
    assert event is not None
    cuda.event_error = RuntimeError("HIP error: operation not permitted when stream is capturing")
    assert event.query() is False
    cuda.event_error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        event.query()
    assert cuda.capture_mode == 0


def test_destination_is_what_the_calling_thread_means(cuda: StubCuda) -> None:
    """With its current device, and the current stream of the device it is."""
    gpu = TorchCuda()
    with cuda.use_device(1):
        device, stream = gpu.destination("cuda", None)
        assert (device, stream.device.index) == (torch.device("cuda:1"), 1)
        device, stream = gpu.destination("cuda:3", None)
        assert (device, stream.device.index) == (torch.device("cuda:3"), 3)
    named = make_stream(2)
    assert gpu.destination("cuda", named) == (torch.device("cuda:2"), named)
    assert gpu.destination("cuda:2", named) == (torch.device("cuda:2"), named)
    with pytest.raises(ValueError, match=r"stream is one of cuda:2, it cannot copy to cuda:1"):
        gpu.destination("cuda:1", named)
    with pytest.raises(ValueError, match="xpu"):
        gpu.destination("xpu:0", None)


def test_destination_does_not_initialise_cuda_on_the_loop(cuda: StubCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes long; the copying thread does it."""
    cuda.initialized = False
    monkeypatch.delattr(torch.cuda, "current_device")
    monkeypatch.delattr(torch.cuda, "current_stream")
    assert TorchCuda().destination("cuda", None) == (torch.device("cuda:0"), None)
    assert TorchCuda().destination("cuda:2", None) == (torch.device("cuda:2"), None)


class Recorded(torch.Tensor):
    """A subclass, which may hold memory of the arena in tensors of its own."""


@pytest.mark.parametrize(
    ("tensor", "non_blocking"),
    [
        (torch.ones(3), True),
        (torch.nn.Parameter(torch.ones(3)), True),
        (torch.ones(3).as_subclass(Recorded), False),
        (torch.eye(3).to_sparse(), False),
    ],
)
def test_what_cannot_be_watched_is_waited_for(
    cuda: StubCuda, monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, non_blocking: bool
) -> None:
    """Copies are asynchronous for plain tensors only; the event is recorded on the stream that copied, after it."""
    calls: list[dict[str, Any]] = []

    def to(self: torch.Tensor, device: Any, **options: Any) -> torch.Tensor:
        cuda.runtime("copy", cuda._threads.stream)
        calls.append(options)
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    stream = make_stream(1)
    TorchCuda().copy(tensor, torch.device("cuda:1"), stream)
    assert calls == [{"non_blocking": non_blocking}]
    assert [(entry[0], entry[1], entry[3]) for entry in cuda.log] == [("copy", 1, stream), ("record", 1, stream)]


def test_functions_come_from_the_runtime_that_torch_depends_on() -> None:
    """None without CUDA; and the look-up works on a library that is loaded, going through what it depends on."""
    accelerator._runtime_function.cache_clear()
    if torch.version.cuda is None and torch.version.hip is None:
        assert accelerator._runtime_function("GetLastError") is None
    else:
        assert accelerator._runtime_function("GetLastError") is not None
        assert accelerator._runtime_function("ThreadExchangeStreamCaptureMode") is not None
    accelerator._runtime_function.cache_clear()


def test_importing_and_using_the_channel_does_not_initialise_cuda() -> None:
    """Neither in the process, nor so that a forked child of it could not use CUDA any more."""
    script = """
import asyncio, os, torch, aioarena
async def main():
    async with aioarena.Sender(1) as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        await sender.send(torch.ones(1 << 20))
        assert (await receiver.recv()).sum() == 1 << 20
asyncio.run(main())
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    os._exit(torch.cuda._is_in_bad_fork())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    result = subprocess.run(
        # Python warns from 3.12 on of forking where torch has threads of its own, as its builds with CUDA have.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert (result.returncode, result.stderr) == (0, "")
