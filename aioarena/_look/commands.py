"""The commands that look: ``ps``, ``doctor`` and ``clean``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from aioarena._bench._text import show_size, table
from aioarena._look import doctor as surgery
from aioarena._look.channels import ChannelView, ReaderView, Unreadable, find
from aioarena._platform import memory

# Seconds between the two looks that rates are taken from. A guess: long enough for a rate, short enough to wait for.
_INTERVAL = 0.25


def ps(*, as_json: bool) -> int:
    """Print all channels of this user. Returns 0."""
    channels, refused = find()
    before = [(channel.view().messages, time.monotonic()) for channel in channels]
    if channels:
        time.sleep(_INTERVAL)
    seen = []
    for channel, (messages, since) in zip(channels, before, strict=True):
        view = channel.view()
        seen.append((view, (view.messages - messages) / (time.monotonic() - since)))
    print(_ps_json(seen, refused) if as_json else _ps_text(seen, refused))
    return 0


def _ps_json(seen: list[tuple[ChannelView, float]], refused: list[Unreadable]) -> str:
    channels = [{**dataclasses.asdict(view), "messages_per_second": round(rate, 1)} for view, rate in seen]
    return json.dumps({"channels": channels, "unreadable": [dataclasses.asdict(one) for one in refused]}, indent=2)


def _ps_text(seen: list[tuple[ChannelView, float]], refused: list[Unreadable]) -> str:
    parts = []
    if seen:
        rows: list[list[str]] = []
        for view, rate in seen:
            rows += [[], *_ps_rows(view, rate)] if rows else _ps_rows(view, rate)
        parts.append(table(["channel", "pid", "state", "messages", "a second", "behind", "arena"], rows))
    elif not refused:
        parts.append("no channels of this user")
    parts += [f"process {one.pid} has a channel that cannot be read: {one.why}" for one in refused]
    return "\n".join(parts)


def _ps_rows(view: ChannelView, rate: float) -> list[list[str]]:
    behind = max((reader.messages_behind for reader in view.readers), default=0)
    state = "closed" if view.closed else f"{view.process}, waits for readers" if view.waiting else view.process
    if not view.arena_bytes:
        arena = "off"
    elif view.arena_in_memory is None:
        arena = f"of {show_size(view.arena_bytes)}"
    else:
        arena = f"{view.arena_in_memory / 2**20:.1f} MiB of {show_size(view.arena_bytes)}"
    sender = [view.name, str(view.pid), state, f"{view.messages:,}", f"{rate:,.0f}", f"{behind:,}", arena]
    return [sender, *map(_ps_reader, view.readers)]


def _ps_reader(reader: ReaderView) -> list[str]:
    if reader.seated:
        state = f"{reader.process}, parked" if reader.parked else reader.process
    else:
        state = "awaited" if reader.pid is None else "has left"
    pid = "-" if reader.pid is None else str(reader.pid)
    return [f"  reader {reader.rank}", pid, state, f"{reader.messages:,}", "", f"{reader.messages_behind:,}", ""]


def doctor(*, as_json: bool) -> int:
    """Print what this machine allows. Returns 1 if no channel can be made on it."""
    findings = list(surgery.examine())
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            print(f"{finding.grade:4}  {finding.what.ljust(width)}  {finding.found}")
            if finding.remedy:
                print(f"{'':4}  {'':{width}}  -> {finding.remedy}")
    return 1 if any(finding.grade == surgery.FAIL for finding in findings) else 0


def clean(*, yes: bool) -> int:
    """Remove, or only list, what dead processes of this user left. Returns 0."""
    found = [directory / name for directory in surgery.directories() for name in memory.sweep(directory, dry=not yes)]
    for path in found:
        print(f"removed {path}" if yes else path)
    if not found:
        print("nothing of dead processes was found")
    elif not yes:
        sys.stdout.flush()
        print(f"{len(found)} files of dead processes; `aioarena clean --yes` removes them", file=sys.stderr)
    return 0
