"""The terminal while ``top`` has it: keys one by one, and signals as events that end nothing by themselves."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from enum import Enum
from types import TracebackType
from typing import Self


class Event(Enum):
    """What happened."""

    NOTHING = "nothing"  # the time is over
    RESIZE = "resize"
    QUIT = "quit"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    SUSPEND = "suspend"


_SIGNALS: dict[int, Event] = {
    signal.SIGINT: Event.INTERRUPT,
    signal.SIGTERM: Event.TERMINATE,
    signal.SIGHUP: Event.TERMINATE,
    signal.SIGTSTP: Event.SUSPEND,
    signal.SIGWINCH: Event.RESIZE,
}
_QUIT_KEYS = b"qQ\x04"  # the last is Ctrl-D


class Terminal:
    """A context manager: puts everything back as it was, however it is left.

    Signals are only noted while it is open, so that none comes in the middle of drawing; :meth:`wait` tells of them.
    """

    def __init__(self) -> None:
        self._keys: int | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._signals, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, self._signals)
            stack.callback(os.close, writing)
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
            for number in _SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            if sys.stdin is not None and sys.stdin.isatty():
                self._keys = sys.stdin.fileno()
                stack.callback(termios.tcsetattr, self._keys, termios.TCSAFLUSH, termios.tcgetattr(self._keys))
                tty.setcbreak(self._keys)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def wait(self, seconds: float) -> Event:
        """Wait for a key that means something, a signal, or until the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            sources = [self._signals] if self._keys is None else [self._signals, self._keys]
            ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
            if self._signals in ready:
                # Others may come too: whoever started us has handlers of their own, or a child of ours ends.
                events = [_SIGNALS[number] for number in os.read(self._signals, 64) if number in _SIGNALS]
                if events:
                    return next((event for event in events if event is not Event.RESIZE), Event.RESIZE)
            elif self._keys in ready:
                keys = _read(self._keys)
                if not keys or any(key in _QUIT_KEYS for key in keys):
                    return Event.QUIT  # without any, the terminal is gone
            elif not ready:
                return Event.NOTHING


def _read(fd: int | None) -> bytes:
    try:
        return os.read(fd, 1024) if fd is not None else b""
    except OSError:
        return b""


def suspend() -> None:
    """Stop this process, as Ctrl-Z does; returns when it goes on."""
    os.kill(os.getpid(), signal.SIGSTOP)
