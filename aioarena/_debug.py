"""``AIOARENA_DEBUG=1``: what tells users of their own mistakes, and costs nothing when it is off.

Here is what both ends share and what the sender adds; :mod:`aioarena._checking` watches what a receiver has handed out.
docs/debugging.md shows each message.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

from aioarena._core.arena import Span

VARIABLE = "AIOARENA_DEBUG"
RETAINED = "AIOARENA_DEBUG_RETAINED"
READONLY = "AIOARENA_DEBUG_READONLY"

# Seconds. A guess: far above the time of any step, and short enough to be seen by whoever looks at the log.
_RETAINED = 60.0

# Frames of a call site that are shown. A guess: the way from a task's function to the call is rarely longer.
_FRAMES_SHOWN = 12

# Frames that say nothing about who called: our own, and what runs loops, threads and processes.
_PACKAGE = os.path.dirname(__file__) + os.sep
_STANDARD = os.path.dirname(os.__file__)
_LIBRARY = (
    *(f"{_STANDARD}/{name}" for name in ("asyncio/", "concurrent/", "multiprocessing/", "threading.py")),
    "<frozen ",
)


@dataclass(frozen=True, slots=True)
class Debugging:
    """What to look out for.

    Attributes:
        retained: Seconds that a received tensor may be kept before a warning.
        readonly: Whether received memory is really read-only.
    """

    retained: float = _RETAINED
    readonly: bool = False

    @classmethod
    def of_environment(cls) -> Debugging | None:
        """What the environment asks for; None if debugging is off.

        Raises:
            ValueError: A variable has no such value.
        """
        if not _switch(VARIABLE):
            return None
        text = os.environ.get(RETAINED, "")
        try:
            retained = float(text) if text else _RETAINED
        except ValueError:
            retained = -1.0
        if not retained >= 0:  # NaN neither
            raise ValueError(f"{RETAINED} must be a number of seconds, not {text!r}")
        return cls(retained, _switch(READONLY))


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {value!r}")
    return value == "1"


# Who called ---------------------------------------------------------------------------------------------------------

# (file, line, function) of the calls that led somewhere, the innermost first. Numbers and names only: a frame would keep
# what its variables refer to.
Site = tuple[tuple[str, int, str], ...]


def call_site() -> Site:
    """The calls of users' code that led here: of a task the coroutines that await each other, too."""
    ours: list[tuple[str, int, str]] = []
    theirs: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(theirs) < _FRAMES_SHOWN:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARY):
            (ours if file.startswith(_PACKAGE) else theirs).append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(theirs or ours[:_FRAMES_SHOWN])


def describe_site(site: Site) -> str:
    """As in a traceback: the innermost call last."""
    return "".join(traceback.format_list([traceback.FrameSummary(*call) for call in reversed(site)])).rstrip()


class Birth:
    """Where and by whom an end was started, for those who call it from elsewhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._site = call_site()
        self._where = describe_context(loop)

    def explain(self) -> str:
        """For an error that is raised because the calling loop, thread or process is another."""
        return (
            f"\nIt was started in {self._where} at\n{describe_site(self._site)}\nThis call is made in "
            + describe_context(asyncio._get_running_loop())
        )


def describe_context(loop: asyncio.AbstractEventLoop | None) -> str:
    """This process and thread, with the loop that runs in it."""
    where = f"process {os.getpid()}, thread {threading.current_thread().name!r}"
    if loop is None:
        return f"{where}, which runs no event loop"
    try:
        task = asyncio.current_task(loop)
    except RuntimeError:
        task = None
    of_task = f", task {task.get_name()!r}" if task is not None else ""
    return f"{where}, event loop {type(loop).__name__} at {id(loop):#x}{of_task}"


# Who fills the arena --------------------------------------------------------------------------------------------------


def describe_holdings(members: Iterable[tuple[str, Sequence[Span]]]) -> str:
    """Who holds how many slots, and since when; who holds most comes first.

    Args:
        members: All readers, also those that left and kept some, and their spans.
    """
    now = time.monotonic()
    lines = []
    for name, spans in members:
        if spans:
            oldest = min(spans, key=lambda span: span.generation)
            slots = sum(max(1, span.slots) for span in spans)
            text = (
                f"{name} holds {slots} of them in {len(spans)} spans, the oldest (slot {oldest.slot}, message "
                f"{oldest.number + 1}) for {now - oldest.since:.1f} s"
            )
            lines.append((-slots, text))
    return "; ".join(text for _, text in sorted(lines)) or "no reader holds any"


# Memory that cannot be written --------------------------------------------------------------------------------------


def show_crashes() -> None:
    """Have the interpreter say where a write into read-only memory was, before it ends."""
    if not faulthandler.is_enabled():
        faulthandler.enable()
