"""Refuse to run where the design does not hold, with a reason."""

from __future__ import annotations

import platform
import sys

_MACHINES = ("x86_64", "aarch64")


def check(system: str | None = None, machine: str | None = None) -> None:
    """Raise ImportError unless this is 64-bit Linux on x86-64 or aarch64.

    The channel needs memfd or /dev/shm, /proc and pidfd (Linux), and single-move aligned u64 loads and stores that the
    two CPUs give; nothing else has been looked at.
    """
    system = platform.system() if system is None else system
    machine = platform.machine() if machine is None else machine
    if system != "Linux":
        raise ImportError(f"aioarena runs on Linux only (memfd, /proc, pidfd); this is {system}")
    if machine not in _MACHINES or sys.maxsize < 2**32:
        raise ImportError(f"aioarena runs on {' and '.join(_MACHINES)} with a 64-bit Python; this is {machine}")
