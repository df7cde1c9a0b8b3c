"""Calls of blocking ends in threads, and steps to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from aioarena import blocking
from tests.conftest import ARENA, PATIENCE, RING_BYTES


class Call:
    """A call in a thread of its own: begun at once, its outcome asked for later."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._outcome: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._outcome = function(*args, **options)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        """What it returned or raised."""
        self._thread.join(PATIENCE)
        assert self.over, "the call does not end"
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None
        return self._outcome


def eventually(condition: Callable[[], Any]) -> None:
    """Wait until something another thread does has been done."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.001)


def calls_wait(end: Any, count: int = 1) -> None:
    """Until so many calls of an end wait, one of them for the selector."""
    driver = end._driver

    def waiting() -> bool:
        with driver._lock:
            return driver._calls == count and driver._led and not driver._cared and driver._loop._parking.parked

    eventually(waiting)


def caretaker_leads(end: Any) -> None:
    """Until the caretaker has the loop, and sleeps in the selector."""
    eventually(lambda: end._driver._cared and end._driver._loop._parking.parked)


@contextmanager
def blocking_channel(
    readers: int = 1, *, receiver: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Any, ...]]:
    """A started sender and all its receivers, closed in the end: receivers first."""
    with ExitStack() as stack:
        sender = stack.enter_context(blocking.Sender(readers, **{"arena": ARENA, "ring_bytes": RING_BYTES, **options}))
        receivers = [
            stack.enter_context(blocking.Receiver(sender.handle, rank, **(receiver or {}))) for rank in range(readers)
        ]
        yield sender, *receivers
