"""Numbers and tables for people, progress for the impatient."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Sequence
from typing import Any, TextIO

import torch
import zmq

import aioarena


def show_bytes(nbytes: float) -> str:
    """``201.3 MB``, decimal, as disks and networks count."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def show_size(nbytes: int) -> str:
    """``256 KiB``, binary, for powers of two."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes //= 1024
        del units[0]
    return f"{nbytes} {units[0]}"


def show_seconds(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show_micros(seconds: float) -> str:
    """Three digits of microseconds, for columns that are to be compared."""
    micros = seconds * 1e6
    return f"{micros:.2f}" if micros < 10 else f"{micros:.1f}" if micros < 100 else f"{micros:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> str:
    """Columns under a header: the first and those in ``left`` to the left, the others to the right.

    An empty row is a blank line.
    """
    filled = [header, *[row for row in rows if row]]
    widths = [max(len(row[column]) for row in filled) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        if not row:
            return ""
        cells = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        return "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([line(header), "-" * len(line(header)), *map(line, rows)])


def machine() -> dict[str, Any]:
    """Where a measurement was made."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pyzmq": zmq.__version__,
        "aioarena": aioarena.__version__,
    }


def show_machine() -> str:
    about = machine()
    return (
        f"{about['cpus']} CPUs ({about['machine']}), {about['system']}, Python {about['python']}, torch {about['torch']}, "
        f"pyzmq {about['pyzmq']}, aioarena {about['aioarena']}"
    )


class Progress:
    """What is being done: one line that is rewritten on a terminal, else one line for each new thing."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._what = ""

    def say(self, what: str, detail: str = "") -> None:
        """Say what is being done.

        Args:
            what: A new one gives a new line where lines cannot be rewritten.
            detail: How far it is, for terminals.
        """
        if self._terminal:
            self._stream.write(f"\r\x1b[K{what} {detail}".rstrip())
        elif what != self._what:
            self._stream.write(f"{what}\n")
        self._what = what
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self._terminal and self._what:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._what = ""
