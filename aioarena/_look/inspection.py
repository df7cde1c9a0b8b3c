"""What ``inspect`` prints: all there is to see of a channel."""

from __future__ import annotations

from collections.abc import Sequence

from aioarena._bench._text import show_bytes, show_size, table
from aioarena._core.layout import VERSION
from aioarena._look.channels import ChannelView, HolderView, ReaderView, SpanView
from aioarena._look.listing import show_age, show_count, show_mib

_NOT_RECEIVED = "*"
_EARLIER = "'"


def as_text(views: Sequence[ChannelView]) -> str:
    """For people; several channels one after the other."""
    return "\n\n\n".join(map(_channel, views))


def _channel(view: ChannelView) -> str:
    parts = [_header(view), _readers(view.readers)]
    if view.slots:
        parts.append(_spans(view.spans) if view.spans else "nothing is in the arena")
    return "\n\n".join(parts)


def _header(view: ChannelView) -> str:
    lines = {
        "channel": f"{view.identity}, layout {VERSION}, {view.backing}, inode {view.inode}",
        "sender": f"pid {view.pid}, {view.process}",
        "state": _state(view),
        "sent": f"{show_count(view.messages, 'message')}; {show_bytes(view.head)} through the ring, "
        f"{show_bytes(view.arena_sent)} through the arena, {show_bytes(view.frames_sent)} as frames",
        "ring": _ring(view),
        "arena": _arena(view),
    }
    return "\n".join([view.shown_name, *(f"  {what:8}  {text}" for what, text in lines.items())])


def _state(view: ChannelView) -> str:
    awaited = [reader.rank for reader in view.readers if reader.pid is None]
    if view.closed:
        return "closed"
    if view.held_up_by:
        return f"open; a send waits for {_ranks(view.held_up_by)}"
    said = f"open; {_ranks(awaited)} not attached yet" if awaited else "open"
    return f"{said}; memory of the arena is being given back" if view.trimming else said


def _ranks(ranks: Sequence[int]) -> str:
    return f"reader{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _ring(view: ChannelView) -> str:
    used = max((reader.bytes_behind for reader in view.readers), default=0)
    return (
        f"{show_size(view.ring_bytes)}, head at {view.head:,}; "
        f"{used:,} bytes ({used / view.ring_bytes:.1%}) not received by all"
    )


def _arena(view: ChannelView) -> str:
    if not view.slots:
        return "off"
    in_memory = "" if view.arena_in_memory is None else f", {show_mib(view.arena_in_memory)} in memory"
    return (
        f"{show_size(view.arena_bytes)} in {view.slots:,} slots of {show_size(view.slot_bytes)}; "
        f"{show_count(view.slots_used, 'slot')} ({show_mib(view.slots_used * view.slot_bytes)}) in use{in_memory}"
    )


def _readers(readers: Sequence[ReaderView]) -> str:
    rows = [
        [
            str(reader.rank),
            "-" if reader.pid is None else str(reader.pid),
            reader.state,
            f"{reader.messages:,}",
            f"{reader.messages_behind:,}",
            f"{reader.bytes_behind:,}",
            f"{reader.tail:,}",
            f"{reader.spans_held:,}",
            "yes" if reader.pins else "no",
        ]
        for reader in readers
    ]
    return table(
        ["reader", "pid", "state", "received", "behind", "bytes behind", "tail", "spans", "pins"], rows, left=["state"]
    )


def _spans(spans: Sequence[SpanView]) -> str:
    rows = [
        [
            f"{span.slot:,}",
            f"{span.slots:,}" if span.slots else "lent",
            f"{span.nbytes:,}",
            "-" if span.generation is None else f"{span.generation:,}",
            "-" if span.message is None else f"{span.message:,}",
            "-" if span.age is None else show_age(span.age),
            _holders(span),
        ]
        for span in spans
    ]
    marks = {mark for span in spans for holder in span.holders for mark in _marks(holder)}
    notes = {
        _NOT_RECEIVED: f"{_NOT_RECEIVED} has not received that message yet",
        _EARLIER: f"{_EARLIER} a process that had the rank before the one that has it now",
    }
    text = table(["slot", "slots", "bytes", "generation", "message", "age", "held by"], rows, left=["held by"])
    return "\n".join([text, *(note for mark, note in notes.items() if mark in marks)])


def _holders(span: SpanView) -> str:
    if span.kind == "filled":
        return "sender, fills it"
    if span.kind == "lent":
        return "sender's code"
    return " ".join(f"{holder.rank}{_marks(holder)}" for holder in span.holders) or "nobody"


def _marks(holder: HolderView) -> str:
    return (_NOT_RECEIVED if not holder.received else "") + (_EARLIER if holder.earlier else "")
