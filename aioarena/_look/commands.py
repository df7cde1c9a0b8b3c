"""The commands that look: ``ps``, ``inspect``, ``doctor`` and ``clean``. ``top`` has a module of its own."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from aioarena._look import doctor as surgery
from aioarena._look.channels import choose, find
from aioarena._look.inspection import as_text
from aioarena._look.listing import Seen, as_document, as_table, show_count
from aioarena._look.rates import Stalls, rates
from aioarena._platform import memory


def ps(*, as_json: bool, interval: float) -> int:
    """Print all channels of this user. Returns 0.

    Args:
        as_json: For programs.
        interval: Seconds between the two looks that rates are taken from.
    """
    channels, refused = find()
    before = []
    for channel in channels:
        now, stalls = time.monotonic(), Stalls()
        view = channel.view()
        stalls.look(view, now)
        before.append((view, now, stalls))
    if channels:
        time.sleep(interval)
    seen = []
    for channel, (earlier, since, stalls) in zip(channels, before, strict=True):
        now = time.monotonic()
        view = channel.view()
        seen.append(Seen(view, rates(earlier, view, now - since), stalls.look(view, now)))
    print(json.dumps(as_document(seen, refused), indent=2) if as_json else as_table(seen, refused))
    return 0


def inspect(which: str, *, as_json: bool) -> int:
    """Print all there is to see of one channel, or of all of a process or a name. Returns 0.

    Raises:
        LookError: There is none.
    """
    views = [channel.view() for channel in choose(which)]
    print(json.dumps([dataclasses.asdict(view) for view in views], indent=2) if as_json else as_text(views))
    return 0


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
    """Remove, or only list, what dead processes of this user left. Returns 1 if some of it could not be removed."""
    found = [directory / name for directory in surgery.directories() for name in memory.sweep(directory, dry=not yes)]
    for path in found:
        print(f"removed {path}" if yes else path)
    kept = [directory / name for directory in surgery.directories() for name in memory.sweep(directory, dry=True)]
    if yes and kept:
        sys.stdout.flush()
        for path in kept:
            print(f"aioarena: could not remove {path}", file=sys.stderr)
        return 1
    if not found:
        print("nothing of dead processes was found")
    elif not yes:
        sys.stdout.flush()
        print(f"{show_count(len(found), 'file')} of dead processes; `aioarena clean --yes` removes them", file=sys.stderr)
    return 0
