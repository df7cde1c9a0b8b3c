"""Where this runs, and that it says so elsewhere."""

from __future__ import annotations

import sys

import pytest

from aioarena._platform import support


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_supported(machine: str) -> None:
    """64-bit Linux on the two CPUs."""
    support.check("Linux", machine)
    support.check()


@pytest.mark.parametrize(
    ("system", "machine", "said"),
    [
        ("Darwin", "arm64", "Linux only .*; this is Darwin"),
        ("Windows", "AMD64", "Linux only .*; this is Windows"),
        ("Linux", "riscv64", "x86_64 and aarch64 .*; this is riscv64"),
        ("Linux", "armv7l", "this is armv7l"),
    ],
)
def test_unsupported(system: str, machine: str, said: str) -> None:
    """An ImportError that says what is supported and what this is."""
    with pytest.raises(ImportError, match=said):
        support.check(system, machine)


def test_32_bit_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 32-bit Python on such a CPU cannot move a word at once."""
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    with pytest.raises(ImportError, match="64-bit Python"):
        support.check("Linux", "x86_64")
