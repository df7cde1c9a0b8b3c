"""CUDA, behind one small seam: pinning, events, copies. Tests put a fake runtime in its place.

Nothing here initialises CUDA: :meth:`Accelerator.initialized` asks whether somebody else did, and every other call is
made only after it said yes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from typing import Any, Protocol, cast

import torch

from aioarena._platform.memory import Mapping, Pin

logger = logging.getLogger("aioarena")

# cudaHostRegisterPortable of the CUDA runtime API: pinned for every context of the process, not only the current one.
_HOST_REGISTER_PORTABLE = 1


class Event(Protocol):
    """A point in a stream, like ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether everything before that point is done."""


class Accelerator(Protocol):
    """What the channel needs from a GPU runtime."""

    def initialized(self) -> bool:
        """Whether this process has a context. Never makes one."""

    def current_device(self) -> int:
        """Index of the calling thread's current device."""

    def register(self, address: int, nbytes: int, device: int) -> str | None:
        """Pin memory, with ``device`` current. None, or why it failed; no error is left pending in the runtime."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`. Never raises."""

    def capturing(self) -> bool:
        """Whether the current stream is capturing a graph, so that no event may be recorded."""

    def record_current(self) -> list[Event]:
        """Record an event on the current stream of every device that has a context."""

    def record(self, stream: Any) -> Event:
        """Record an event on a stream."""

    def copy(self, tensor: torch.Tensor, device: Any, stream: Any) -> tuple[torch.Tensor, Event]:
        """Copy a CPU tensor to a device on ``stream`` (None: the current one); the event marks the copy's end."""


class TorchCuda:
    """The real runtime, through torch. Serves ROCm too, where torch keeps CUDA's names."""

    def initialized(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def register(self, address: int, nbytes: int, device: int) -> str | None:
        with torch.cuda.device(device):
            try:
                result = _cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE)
            except Exception as error:  # the binding raises on some torch releases instead of returning
                self._clear_error(device)
                return str(error)
            if int(result) == 0:
                return None
            # The error stays behind in this thread's runtime state and would be raised by torch at the next launch.
            self._clear_error(device)
            return f"CUDA error {int(result)} ({_cudart().cudaGetErrorString(result)})"

    def _clear_error(self, device: int) -> None:
        clear = _last_error_function()
        if clear is not None:
            clear()
            return
        # No way to ask the runtime directly: let torch run into the error at a launch of our own, which clears it.
        with contextlib.suppress(Exception):
            torch.zeros(1, device=f"cuda:{device}")

    def unregister(self, address: int) -> None:
        with contextlib.suppress(Exception):  # the context may be gone already
            _cudart().cudaHostUnregister(address)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record_current(self) -> list[Event]:
        return [
            self.record(torch.cuda.current_stream(device))
            for device in range(torch.cuda.device_count())
            if _has_context(device)
        ]

    def record(self, stream: Any) -> Event:
        # An event belongs to the device of the stream it is recorded on, whatever device is current here.
        with torch.cuda.device(stream.device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return cast(Event, event)

    def copy(self, tensor: torch.Tensor, device: Any, stream: Any) -> tuple[torch.Tensor, Event]:
        device = torch.device(device)
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream() if stream is None else stream
            with torch.cuda.stream(stream):
                # Allocated on the stream that copies and that the caller uses it on, so the allocator keeps the order.
                return tensor.to(device, non_blocking=True), self.record(stream)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _has_context(device: int) -> bool:
    # Asking for a stream of a device without a context would make one there.
    check = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(check(device)) if check else device == torch.cuda.current_device()


def _last_error_function() -> Any:
    """cudaGetLastError of the very runtime that torch has loaded, or None."""
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split()[-1]
            if "libcudart" in path or "libamdhip64" in path:
                library = ctypes.CDLL(path)
                return library.cudaGetLastError if "libcudart" in path else library.hipGetLastError
    return None


_current: Accelerator = TorchCuda()


def current() -> Accelerator:
    """The runtime in use."""
    return _current


# Pinning ----------------------------------------------------------------------------------------------------------

_pin_lock = threading.Lock()


def claim_pinning(mapping: Mapping) -> bool:
    """Whether the caller is the one to pin a mapping: true once per process and mapping."""
    with _pin_lock:
        if mapping.pin is not Pin.NO:
            return False
        mapping.pin = Pin.PENDING
        return True


def pin(accelerator: Accelerator, mapping: Mapping, device: int) -> None:
    """Register a whole mapping; takes about a second for 2 GiB, so call it in a thread. Never raises."""
    problem = accelerator.register(mapping.address, mapping.nbytes, device)
    if problem is not None:
        mapping.pin = Pin.FAILED
        logger.warning(
            "aioarena: could not pin the arena (%.1f GiB): %s. Copies to the GPU work, but through a staging buffer and "
            "slower. Raise the locked-memory limit (ulimit -l, docker --ulimit memlock=-1), or pass a smaller "
            'ArenaConfig, or Receiver(pin="off") to not try.',
            mapping.nbytes / 2**30,
            problem,
        )
        return
    mapping.pin = Pin.YES
    # Unregister before the memory is unmapped: the thread keeps it mapped until then, and off the garbage collector's
    # hands. At interpreter exit the registration goes with the process.
    finalizer = weakref.finalize(mapping, _unpin, accelerator, mapping.memory, mapping.address)
    finalizer.atexit = False


def _unpin(accelerator: Accelerator, memory: object, address: int) -> None:
    threading.Thread(
        target=lambda memory: accelerator.unregister(address), args=(memory,), name="aioarena-unpin", daemon=True
    ).start()
