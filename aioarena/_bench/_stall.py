"""How long an event loop keeps others waiting: a task that wants to run every millisecond, and how late it was."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

_PERIOD = 0.001


class StallMeter:
    """``async with StallMeter() as stalls: ...`` in the loop that is to be watched. One object may be used again."""

    def __init__(self) -> None:
        self._ticks: list[tuple[float, float]] = []  # when a tick was due, when it came
        self._task: asyncio.Task[None] | None = None

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + _PERIOD
            await asyncio.sleep(_PERIOD)
            self._ticks.append((due, time.monotonic()))

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    def worst(self, since: float = 0.0, until: float = float("inf")) -> float:
        """The longest delay of a tick that was due or came between two moments of ``time.monotonic()``."""
        return max((came - due for due, came in self._ticks if due <= until and came >= since), default=0.0)
