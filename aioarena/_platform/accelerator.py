"""CUDA, behind one small seam: pinning, events, copies. Tests put a fake runtime in its place.

Nothing here initialises CUDA: :meth:`Accelerator.initialized` asks whether somebody else did, and every other call is
made only after it said yes, or because the user asked for a copy to a GPU.

Three things are easy to get wrong, and all calls here see to them:

* A thread's current device is device 0 until it says otherwise, and almost any call makes a context on the current
  device. So the device is set, to one that has a context, around every call that may come from a thread of ours.
* While any thread captures a graph, the runtime forbids querying events and registering memory to all threads, and
  answers an attempt by breaking the capture. So both are done with the calling thread's capture mode relaxed.
* A failed call leaves its error behind in the calling thread's runtime state, for torch to raise at the next launch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from aioarena._platform.memory import Mapping, Pin

logger = logging.getLogger("aioarena")

# cudaHostRegisterPortable of the CUDA runtime API: pinned for every context of the process, not only the current one.
_HOST_REGISTER_PORTABLE = 1

# cudaStreamCaptureModeRelaxed of the CUDA runtime API.
_CAPTURE_MODE_RELAXED = 2

# Seconds that the interpreter's exit waits for an unregistration that is under way. 2 GiB take a fraction of one.
_EXIT_TIMEOUT = 2.0


class Event(Protocol):
    """A point in a stream, like ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether everything before that point is done. Any thread may ask, also while a graph is captured."""


class Accelerator(Protocol):
    """What the channel needs from a GPU runtime."""

    def initialized(self) -> bool:
        """Whether this process has a context. Never makes one."""

    def current_device(self) -> int:
        """Index of the calling thread's current device; if that has no context, of one that has."""

    def current_streams(self) -> list[Any]:
        """The calling thread's current stream of every device, with a context or without.

        Asks torch, not the runtime: safe in a finalizer, and never held up by a thread that registers memory.
        """

    def register(self, address: int, nbytes: int, device: int) -> str | None:
        """Pin memory, with ``device`` current. None, or why it failed; no error is left pending in the runtime."""

    def unregister(self, address: int, device: int) -> None:
        """Undo :meth:`register`, with ``device`` current. Never raises."""

    def capturing(self, stream: Any) -> bool:
        """Whether a stream is capturing a graph, so that no event may be recorded on it."""

    def record(self, stream: Any) -> Event | None:
        """Record an event on a stream; None if its device has no context, so that nothing can be running there."""

    def destination(self, device: Any, stream: Any) -> tuple[Any, Any]:
        """Device and stream of a copy as the calling thread means them, to be used by another one.

        Raises:
            ValueError: It is not a device of this runtime, or the stream is one of another device.
        """

    def copy(self, tensor: torch.Tensor, device: Any, stream: Any) -> tuple[torch.Tensor, Event]:
        """Copy a CPU tensor to a :meth:`destination`; the event marks the copy's end."""

    def has_ranges(self) -> bool:
        """Whether there is a profiler's interface to mark ranges with. Never makes a context, nor do the next two."""

    def begin_range(self, name: str) -> Any:
        """Begin a range of the profiler, in any thread; what :meth:`end_range` has to get."""

    def end_range(self, mark: Any) -> None:
        """End a range, in any thread."""


class TorchCuda:
    """The real runtime, through torch. Serves ROCm too, where torch keeps CUDA's names."""

    def initialized(self) -> bool:
        # torch can be initialised before there is a context anywhere (torch.cuda.get_device_name does that).
        return torch.cuda.is_initialized() and any(map(_has_context, range(torch.cuda.device_count())))  # type: ignore[no-untyped-call]

    def current_device(self) -> int:
        # A process that only ever says "cuda:1" has device 0 as its current one, and no context there.
        current = torch.cuda.current_device()
        if _has_context(current):
            return current
        return next(filter(_has_context, range(torch.cuda.device_count())), current)

    def current_streams(self) -> list[Any]:
        return [torch.cuda.current_stream(device) for device in range(torch.cuda.device_count())]

    def register(self, address: int, nbytes: int, device: int) -> str | None:
        with torch.cuda.device(device), _allowed_while_capturing():
            try:
                result = _cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE)
                if int(result) == 0:
                    return None
                problem = f"CUDA error {int(result)} ({_cudart().cudaGetErrorString(result)})"
            except Exception as error:  # the binding raises on some torch releases instead of returning
                problem = str(error)
            self._clear_error(device)
            return problem

    def _clear_error(self, device: int) -> None:
        clear = _runtime_function("GetLastError")
        if clear is not None:
            clear()
            return
        # No way to ask the runtime directly: let torch run into the error at a launch of our own, which clears it.
        with contextlib.suppress(Exception):
            torch.zeros(1, device=f"cuda:{device}")

    def unregister(self, address: int, device: int) -> None:
        # The context may be gone already.
        with contextlib.suppress(Exception), torch.cuda.device(device), _allowed_while_capturing():
            if int(_cudart().cudaHostUnregister(address)) != 0:
                self._clear_error(device)

    def capturing(self, stream: Any) -> bool:
        if not _has_context(stream.device.index):  # making it current would make one
            return False
        # The device first: leaving a stream of another device sets the device that was, which makes a context there.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def record(self, stream: Any) -> Event | None:
        device = stream.device.index
        if not _has_context(device):
            return None
        with torch.cuda.device(device), _allowed_while_capturing():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return _CudaEvent(event, device)

    def destination(self, device: Any, stream: Any) -> tuple[Any, Any]:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"can copy to cuda devices and to cpu, not to {device}")
        if stream is not None:
            if device.index not in (None, stream.device.index):
                raise ValueError(f"stream is one of {stream.device}, it cannot copy to {device}")
            return stream.device, stream
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Then nobody has chosen a device or a stream either. The copy will initialise CUDA, off the loop.
            return torch.device("cuda", device.index or 0), None
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.device("cuda", index), torch.cuda.current_stream(index)

    def copy(self, tensor: torch.Tensor, device: Any, stream: Any) -> tuple[torch.Tensor, Event]:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream() if stream is None else stream
            with torch.cuda.stream(stream):
                # Allocated on the stream that copies and that the caller uses it on, so the allocator keeps the order.
                # A sparse tensor or a subclass may have memory of the arena inside, in tensors that nobody sees here:
                # those are waited for.
                plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
                copy = tensor.to(device, non_blocking=plain)
            event = self.record(stream)
        assert event is not None, "the copy made a context if there was none"
        return copy, event

    def has_ranges(self) -> bool:
        try:
            self.end_range(self.begin_range("aioarena"))
        except (AttributeError, RuntimeError):  # of what stands in for it in a torch without CUDA
            return False
        return True

    # Not push and pop, which nest per thread: tasks take turns in one.
    def begin_range(self, name: str) -> Any:
        return torch.cuda.nvtx.range_start(name)

    def end_range(self, mark: Any) -> None:
        torch.cuda.nvtx.range_end(mark)


class _CudaEvent:
    """A recorded event that any thread may query, without side effects on contexts or captures."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: int) -> None:
        self._event = event
        self._device = device

    def query(self) -> bool:
        with torch.cuda.device(self._device), _allowed_while_capturing():
            try:
                return bool(self._event.query())  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                # ROCm refuses in spite of the relaxed mode (pytorch/pytorch#177309). Nothing is wrong with the device.
                if "when stream is capturing" in str(error):
                    return False
                raise


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _has_context(device: int) -> bool:
    check = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(check(device)) if check else device == torch.cuda.current_device()


@contextlib.contextmanager
def _allowed_while_capturing() -> Iterator[None]:
    """Let the calling thread do what is forbidden while any thread captures a graph. Needs its device to be set."""
    exchange = _runtime_function("ThreadExchangeStreamCaptureMode")
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    exchange(ctypes.byref(mode))  # and now mode is the one that was
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _runtime_function(name: str) -> Any:
    """A function of the CUDA or HIP runtime that torch uses, or None.

    A process may have several copies of the runtime, each with its own pending error. The one among the dependencies of
    torch's own library is the right one. PyDLL, because these calls take less time than giving up the GIL for them.
    """
    library, prefix = ("libc10_hip.so", "hip") if torch.version.hip else ("libc10_cuda.so", "cuda")
    with contextlib.suppress(OSError, AttributeError):
        return getattr(ctypes.PyDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), prefix + name)
    return None


_current: Accelerator = TorchCuda()


def current() -> Accelerator:
    """The runtime in use."""
    return _current


# Pinning ----------------------------------------------------------------------------------------------------------

_pin_lock = threading.Lock()
_claimed: weakref.WeakSet[Mapping] = weakref.WeakSet()


def devices() -> list[str]:
    """Names of the GPUs that torch can use here; empty if none. Initialises CUDA: only for a process that just looks."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def device_of_thread() -> Callable[[], None]:
    """What makes the device that is current in this thread the current one in another, if a GPU is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


def claim_pinning(mapping: Mapping) -> bool:
    """Whether the caller is the one to pin a mapping: true once per process and mapping."""
    with _pin_lock:
        if mapping.pin is not Pin.NO:
            return False
        mapping.pin = Pin.PENDING
        _claimed.add(mapping)
        return True


def pin(accelerator: Accelerator, mapping: Mapping, device: int) -> None:
    """Register a whole mapping; takes about a second for 2 GiB, so call it in a thread. Never raises."""
    try:
        problem = accelerator.register(mapping.address, mapping.nbytes, device)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        give_up_pinning(mapping, problem)
        return
    _start_unpinning()
    # Unregister before the memory is unmapped: the thread keeps it mapped until then. At the interpreter's exit the
    # registration goes with the process.
    finalizer = weakref.finalize(mapping, _unpin, accelerator, mapping.address, device, mapping.memory, os.getpid())
    finalizer.atexit = False
    mapping.pin = Pin.YES


def give_up_pinning(mapping: Mapping, problem: str) -> None:
    """Go on without pinned memory, and say so once."""
    mapping.pin = Pin.FAILED
    logger.warning(
        "aioarena: could not pin the arena (%.1f GiB): %s. Copies to the GPU work, but through a staging buffer and "
        "slower. Raise the locked-memory limit (ulimit -l, docker --ulimit memlock=-1), or pass a smaller "
        'ArenaConfig, or Receiver(pin="off") to not try.',
        mapping.nbytes / 2**30,
        problem,
    )


# Unpinning --------------------------------------------------------------------------------------------------------
#
# The last user of a mapping may go anywhere, also inside the garbage collector, where starting a thread would take
# locks. So one thread waits for mappings to unregister, as long as any is registered; a SimpleQueue may be put to from a
# finalizer.

_Retired = tuple[Accelerator, int, int, object]
_retired: queue.SimpleQueue[_Retired | None] = queue.SimpleQueue()
_unpinning: threading.Thread | None = None
_registered = 0


def _start_unpinning() -> None:
    global _registered, _unpinning
    with _pin_lock:
        _registered += 1
        if _unpinning is None:
            thread = threading.Thread(target=_unregister_retired, args=(_retired,), name="aioarena-unpin", daemon=True)
            # From Python 3.12 on none starts at the interpreter's exit, where the registration goes with the process.
            with contextlib.suppress(RuntimeError):
                thread.start()
                _unpinning = thread


def _unregister_retired(retired: queue.SimpleQueue[_Retired | None]) -> None:
    global _registered, _unpinning
    while (item := retired.get()) is not None:
        accelerator, address, device, memory = item
        with contextlib.suppress(Exception):
            accelerator.unregister(address, device)
        # Only now, and not when the next one comes, may it be unmapped.
        del item, accelerator, memory
        with _pin_lock:
            _registered -= 1
            if not _registered:
                _unpinning = None
                return


def _stop_unpinning() -> None:
    # A daemon thread that comes back from the runtime into an interpreter that is gone would abort the process.
    thread = _unpinning
    if thread is not None:
        _retired.put(None)
        thread.join(_EXIT_TIMEOUT)


atexit.register(_stop_unpinning)


def _unpin(accelerator: Accelerator, address: int, device: int, memory: object, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the memory, but not the registration
        _retired.put((accelerator, address, device, memory))


def _after_fork_in_child() -> None:
    global _pin_lock, _registered, _retired, _unpinning
    _pin_lock = threading.Lock()
    _retired = queue.SimpleQueue()
    _unpinning = None
    _registered = 0
    for mapping in list(_claimed):
        mapping.pin = Pin.NO


os.register_at_fork(after_in_child=_after_fork_in_child)
