"""All channel ends of this process, blocking ones by the asyncio end inside: for who looks at all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioarena._core.arena import snapshot

if TYPE_CHECKING:
    from aioarena._asyncio import Endpoint

_ends: weakref.WeakSet[Endpoint] = weakref.WeakSet()
_when_started: list[Callable[[Endpoint], None]] = []


def add(end: Endpoint) -> None:
    """Note a new end, for as long as it lives."""
    _ends.add(end)


def ends() -> list[Endpoint]:
    """All that live, started or not. Any thread may ask."""
    return snapshot(_ends)


def call_when_started(callback: Callable[[Endpoint], None]) -> None:
    """Have every end that is started from now on passed to a function, on its loop, before anything else."""
    _when_started.append(callback)


def started(end: Endpoint) -> None:
    """Tell that an end is being started."""
    for callback in _when_started:
        callback(end)
