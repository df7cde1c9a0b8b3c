"""Ring and arena drawn as lines of characters."""

from __future__ import annotations

from collections.abc import Sequence

from aioarena._look.channels import ChannelView, SpanView

# From nothing to full; for terminals that have no more than ASCII, the second.
_BLOCKS = "·▁▂▃▄▅▆▇█"
_ASCII = ".123456789"
_HEAD = ">"
_SEVERAL = "*"


def ring_map(view: ChannelView, width: int, *, ascii_only: bool = False) -> str:
    """The ring from its first byte to its last: the head as ``>``, tails as ranks, what lies between them filled.

    Ranks from 10 on, and several readers in one place, are ``*``. A reader that has received everything is not drawn.
    """
    empty, full = (".", "#") if ascii_only else (_BLOCKS[0], _BLOCKS[4])
    cells = [empty] * width
    behind = [reader for reader in view.readers if reader.bytes_behind]
    slowest = min((reader.tail for reader in behind), default=view.head)
    if slowest < view.head:
        first = slowest * width // view.ring_bytes
        last = (view.head - 1) * width // view.ring_bytes
        for cell in range(first, min(last, first + width - 1) + 1):
            cells[cell % width] = full
    cells[_place(view.head, view.ring_bytes, width)] = _HEAD
    taken: set[int] = set()
    for reader in behind:
        cell = _place(reader.tail, view.ring_bytes, width)
        cells[cell] = str(reader.rank) if reader.rank < 10 and cell not in taken else _SEVERAL
        taken.add(cell)
    return "".join(cells)


def _place(cursor: int, ring_bytes: int, width: int) -> int:
    return cursor % ring_bytes * width // ring_bytes


def slot_map(spans: Sequence[SpanView], slots: int, width: int, *, ascii_only: bool = False) -> str:
    """The first ``slots`` slots of the arena: each cell shows how much of its slots is in use."""
    width = min(width, slots)
    used = [0] * width
    for span in spans:
        if span.kind != "released":
            for cell in range(span.slot * width // slots, min(width, (span.slot + span.slots) * width // slots + 1)):
                start, stop = -(-cell * slots // width), -(-(cell + 1) * slots // width)
                used[cell] += max(0, min(stop, span.slot + span.slots) - max(start, span.slot))
    return "".join(
        level(count, -(-(cell + 1) * slots // width) - -(-cell * slots // width), ascii_only=ascii_only)
        for cell, count in enumerate(used)
    )


def level(part: float, whole: float, *, ascii_only: bool = False) -> str:
    """One character for a share: only nothing looks like nothing, and only everything like everything."""
    levels = _ASCII if ascii_only else _BLOCKS
    if part <= 0:
        return levels[0]
    if part >= whole:
        return levels[-1]
    return levels[1 + int(part / whole * (len(levels) - 2))]


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar that is full at 1; only nothing looks like nothing."""
    full, empty, parts = ("#", ".", "-") if ascii_only else (_BLOCKS[-1], _BLOCKS[0], "▏▎▍▌▋▊▉")
    cells = max(0.0, min(1.0, share)) * width
    whole = int(cells)
    part = parts[int((cells - whole) * len(parts))] if cells > whole else ""
    return (full * whole + part).ljust(width, empty)
