"""``top``: the channels of this user, live."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

from aioarena._bench._text import show_bytes, show_size
from aioarena._look import terminal
from aioarena._look.channels import Channel, ChannelView, LookError, ReaderView, Unreadable, choose, find
from aioarena._look.listing import Seen, describe_arena, describe_stalls, show_count
from aioarena._look.maps import bar, ring_map, slot_map
from aioarena._look.rates import Stalls, rates

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text
except ImportError as error:
    raise LookError(f"top draws with rich, which is not installed ({error}); pip install 'aioarena[cli]'") from None

# A share of the ring from which a reader's lag is shown in yellow, and in red. Guesses.
_MUCH, _ALMOST_ALL = 0.5, 0.9

# Seconds until the second look, which the first rates need. A guess.
_FIRST = 0.25

_ROW = "  {:>4} {:>8}  {:<19.19} {:>9} {:>9}  {:8} {:>4} {:>6}"


def top(which: str | None, *, interval: float, once: bool) -> int:
    """Draw all channels, or those of a pid or a name, until somebody quits.

    Args:
        which: A pid or a name; None for all channels.
        interval: Seconds between two pictures.
        once: Print one picture and return.

    Returns:
        0 after a key that quits or one picture; 130 after Ctrl-C and 143 after SIGTERM, as if they had ended it.

    Raises:
        LookError: There is nothing of that pid or name, or no terminal to draw on.
    """
    console = Console(highlight=False)
    watch = _Watch(which)
    if once:
        watch.look()
        time.sleep(interval)
        watch.look()
        console.print(_Picture(watch, interval, console, live=False).whole())
        return 0
    if not sys.stdout.isatty() or not console.is_terminal or console.is_dumb_terminal:
        raise LookError("top draws on a terminal; for a pipe, a file or a dumb terminal: aioarena top --once")
    watch.look()
    event = terminal.Event.SUSPEND
    while event is terminal.Event.SUSPEND:
        event = _draw(watch, interval, console)
        if event is terminal.Event.SUSPEND:
            terminal.suspend()
    return {terminal.Event.INTERRUPT: 128 + signal.SIGINT, terminal.Event.TERMINATE: 128 + signal.SIGTERM}.get(event, 0)


def _draw(watch: _Watch, interval: float, console: Console) -> terminal.Event:
    """Draw one picture after the other; returns what ended that, with the terminal as it was."""
    due = time.monotonic() + min(interval, _FIRST)
    with terminal.Terminal() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_Picture(watch, interval, console, live=True).fitting(), refresh=True)
            event = keys.wait(due - time.monotonic())
            if event is terminal.Event.NOTHING:
                watch.look()
                due = time.monotonic() + interval
            elif event is not terminal.Event.RESIZE:
                return event


class _Watch:
    """What is drawn: channels, each after two looks."""

    def __init__(self, which: str | None) -> None:
        self._which = which
        self._channels: list[Channel] = []
        self._last: dict[tuple[int, int], tuple[ChannelView, float, Stalls]] = {}
        self.seen: list[Seen] = []
        self.unreadable: list[Unreadable] = []
        self.gone = False

    def look(self) -> None:
        """Look again. Raises LookError if there never was what is asked for."""
        self._find()
        last, self._last, self.seen = self._last, {}, []
        for channel in self._channels:
            now, view = time.monotonic(), channel.view()
            before, then, stalls = last.get(channel.key, (view, now, Stalls()))
            self.seen.append(Seen(view, rates(before, view, now - then), stalls.look(view, now)))
            self._last[channel.key] = view, now, stalls

    def _find(self) -> None:
        if self._which is None:
            self._channels, self.unreadable = find(self._channels)
            return
        try:
            self._channels, self.gone = choose(self._which, self._channels), False
        except LookError:
            if not self._channels and not self.gone:
                raise
            self._channels, self.gone = [], True


class _Picture:
    """One picture of what a watch has seen."""

    def __init__(self, watch: _Watch, interval: float, console: Console, *, live: bool) -> None:
        self._watch = watch
        self._interval = interval
        self._live = live
        self._width = console.width
        self._height = console.height
        self._ascii = console.options.ascii_only

    def whole(self) -> Group:
        """All of it."""
        return Group(*self._lines())

    def fitting(self) -> Group:
        """As much as the terminal has lines for."""
        lines = list(self._lines())
        over = len(lines) - self._height
        if over > 0:
            more = f"{over + 1} more lines; `aioarena top NAME` shows one channel"
            lines[self._height - 1 :] = [Text(more, "dim", no_wrap=True, overflow="crop")]
        return Group(*lines)

    def _lines(self) -> Iterator[Text]:
        seen = self._watch.seen
        title = f"aioarena  {show_count(len(seen), 'channel')}  {time.strftime('%H:%M:%S')}  every {self._interval:g} s"
        yield _line((title.ljust(self._width - 8) + "q quits ", "reverse")) if self._live else _line((title, ""))
        if not seen:
            yield _line(("what was asked for is gone" if self._watch.gone else "no channels of this user", ""))
        for one in seen:
            yield Text()
            yield from self._channel(one)
        for other in self._watch.unreadable:
            yield _line((f"process {other.pid} has a channel that cannot be read: {other.why}", "yellow"))

    def _channel(self, seen: Seen) -> Iterator[Text]:
        view, rate, _ = seen
        sender = f"  pid {view.pid}, {view.state}  {show_count(view.messages, 'message')}"
        yield _line((view.shown_name, "bold"), (sender, ""))
        yield _line(
            (f"  sends  {_number(rate.messages)} msg/s: {show_bytes(rate.ring)}/s ring, ", ""),
            (f"{show_bytes(rate.arena)}/s arena, {show_bytes(rate.frames)}/s frames", ""),
        )
        behind = max((reader.bytes_behind for reader in view.readers), default=0) / view.ring_bytes
        yield self._map(
            "ring", ring_map(view, self._cells, ascii_only=self._ascii), f"{behind:.0%} of {show_size(view.ring_bytes)}"
        )
        if view.slots:
            # Spans begin at the lowest slots that are free, so that most of a large arena is never used.
            shown = min(
                view.slots, max(view.slots_reached, self._cells, *(span.slot + span.slots for span in view.spans), 1)
            )
            drawn = slot_map(view.spans, shown, self._cells, ascii_only=self._ascii)
            yield self._map("slots", drawn, describe_arena(view))
        yield _line((_ROW.format("rank", "pid", "state", "recv/s", "behind", "ring", "", "spans"), "dim"))
        for reader in view.readers:
            yield self._reader(reader, rate.received[reader.rank], view.ring_bytes)
        for stall in describe_stalls(seen):
            yield _line((f"  ! {stall}", "bold red"))

    def _map(self, what: str, drawn: str, text: str) -> Text:
        return _line((f"  {what:5}  ", ""), (drawn.ljust(self._cells), "cyan"), (f"  {text}", ""))

    @property
    def _cells(self) -> int:
        return max(10, self._width - 9 - 24)

    def _reader(self, reader: ReaderView, received: float, ring_bytes: int) -> Text:
        share = reader.bytes_behind / ring_bytes
        text = _ROW.format(
            reader.rank,
            "-" if reader.pid is None else reader.pid,
            reader.state,
            _number(received),
            f"{reader.messages_behind:,}",
            bar(share, 8, ascii_only=self._ascii),
            f"{share:.0%}",
            f"{reader.spans_held:,}",
        )
        alive = not reader.seated or not reader.process.startswith(("gone", "dead"))
        return _line((text, "red" if share > _ALMOST_ALL or not alive else "yellow" if share > _MUCH else ""))


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _number(value: float) -> str:
    """Three digits at least, no more than nine characters."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
