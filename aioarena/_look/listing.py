"""What ``ps`` prints: a table for people, a document for programs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from aioarena._bench._text import show_bytes, show_size, table
from aioarena._look.channels import ChannelView, ReaderView, Unreadable
from aioarena._look.rates import Rates


class Seen(NamedTuple):
    """A channel after two looks.

    Attributes:
        view: The second.
        rates: What changed between them.
        stalls: Seconds for which ranks have held a send up, by rank.
    """

    view: ChannelView
    rates: Rates
    stalls: dict[int, float]


def as_document(seen: list[Seen], refused: list[Unreadable]) -> dict[str, Any]:
    """For programs: bytes, seconds, and numbers a second."""
    return {"channels": list(map(_channel, seen)), "unreadable": [dataclasses.asdict(one) for one in refused]}


def _channel(seen: Seen) -> dict[str, Any]:
    document = dataclasses.asdict(seen.view)
    document["spans"] = len(document["spans"])
    for reader, received in zip(document["readers"], seen.rates.received, strict=True):
        reader["messages_per_second"] = round(received, 1)
        reader["held_up_for"] = seen.stalls.get(reader["rank"])
    return document | {
        "messages_per_second": round(seen.rates.messages, 1),
        "ring_bytes_per_second": round(seen.rates.ring),
        "arena_bytes_per_second": round(seen.rates.arena),
        "frame_bytes_per_second": round(seen.rates.frames),
    }


def as_table(seen: list[Seen], refused: list[Unreadable]) -> str:
    """For people."""
    parts = []
    if seen:
        rows: list[list[str]] = []
        for one in seen:
            rows += [[], *_rows(one)] if rows else _rows(one)
        header = ["channel", "pid", "state", "messages", "a second", "bytes/s", "behind", "arena"]
        parts.append(table(header, rows, left=["state"]))
        parts += [f"{one.view.shown_name}: {stall}" for one in seen for stall in describe_stalls(one)]
    elif not refused:
        parts.append("no channels of this user")
    parts += [f"process {one.pid} has a channel that cannot be read: {one.why}" for one in refused]
    return "\n".join(parts)


def describe_stalls(seen: Seen) -> list[str]:
    """Whom a send waits for, each with how long it has not moved, as far as that was seen."""
    return [
        f"a send waits for reader {rank}" + (f", which has not moved for {show_age(seconds)}" if seconds else "")
        for rank, seconds in seen.stalls.items()
    ]


def show_age(seconds: float) -> str:
    """``0.2 s``, ``3 min``, ``5 h``: how old something is, roughly."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def describe_arena(view: ChannelView) -> str:
    """How much of it is in use."""
    return f"{show_mib(view.slots_used * view.slot_bytes)} of {show_size(view.arena_bytes)}" if view.slots else "off"


def show_mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _rows(seen: Seen) -> list[list[str]]:
    view = seen.view
    behind = max((reader.messages_behind for reader in view.readers), default=0)
    sender = [
        view.shown_name,
        str(view.pid),
        view.state,
        f"{view.messages:,}",
        f"{seen.rates.messages:,.0f}",
        show_bytes(seen.rates.bytes),
        f"{behind:,}",
        describe_arena(view),
    ]
    return [sender, *(_reader(reader, seen.rates.received[reader.rank]) for reader in view.readers)]


def _reader(reader: ReaderView, received: float) -> list[str]:
    pid = "-" if reader.pid is None else str(reader.pid)
    spans = show_count(reader.spans_held, "span") if reader.spans_held else ""
    name = f"  reader {reader.rank}"
    return [name, pid, reader.state, f"{reader.messages:,}", f"{received:,.0f}", "", f"{reader.messages_behind:,}", spans]


def show_count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
