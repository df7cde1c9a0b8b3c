"""Words shared between processes: how they are loaded and stored, and what order that keeps.

A shared word is an aligned u64 with one writer at a time. It is read and written through a ``memoryview`` cast to
``"Q"``, which CPython compiles to one 8-byte move: never torn on x86-64 and aarch64.

Two orders are needed, and each has its function here:

* *publication*: data, then the cursor that announces it; and on the other side the cursor, then the data. A release
  store and an acquire load. x86-64 keeps both for plain moves (stores are not reordered with stores, nor loads with
  loads), so :data:`order` does nothing there; elsewhere it is a full fence.
* *parking*: store my flag, then load the other side's cursor, while the other side stores its cursor and then loads
  my flag. If either pair is reordered both sides miss each other and the wake-up is lost. Every CPU reorders a store
  with a later load, so :data:`fence` is a sequentially consistent fence everywhere.

The fence is ``atomic_thread_fence(seq_cst)`` of libatomic where that library is installed. Elsewhere it is the
acquire-release of a fresh lock: a full barrier on x86-64 (a locked instruction), and on aarch64 one in practice but not
by the letter of the memory model, which is why :func:`fence_kind` lets the fronts say so. The lock is never shared, so
a fence inside a finalizer that interrupts a fence cannot deadlock.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

# Value of memory_order_seq_cst in C11 <stdatomic.h>, as gcc, clang and libatomic number it.
_SEQ_CST = 5


class Words(Protocol):
    """A run of shared words: a ``memoryview`` cast to ``"Q"`` in use, a simulated memory in tests."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


def _lock_fence() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.release()


def _no_op() -> None:
    pass


def _load_fence() -> tuple[Callable[[], None], str]:
    try:
        # PyDLL keeps the GIL: the call takes nanoseconds, and giving the GIL up would cost far more.
        thread_fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return _lock_fence, "lock"
    # No argtypes: ctypes passes an int as a C int without them, in 70 ns a call instead of 170.
    thread_fence.restype = None
    return partial(thread_fence, _SEQ_CST), "libatomic"


fence, _kind = _load_fence()
order: Callable[[], None] = _no_op if platform.machine() in ("x86_64", "AMD64") else fence


# Whether the memory model says that no wake-up is lost. Where it does not, whoever is parked has to look now and then.
FENCES = _kind == "libatomic" or order is _no_op


def fence_kind() -> str:
    """Which fence is in use: ``"libatomic"``, or ``"lock"`` where libatomic.so.1 is not installed."""
    return _kind
