"""``top``: what it draws, and what it does with a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aioarena import blocking, cli
from aioarena._core.layout import PUBLISHED, Layout
from aioarena._look import top as module
from aioarena._look.channels import ChannelView, LookError, ReaderView, SpanView, find
from aioarena._look.listing import Seen, describe_stalls
from aioarena._look.maps import bar, level, ring_map, slot_map
from aioarena._look.rates import Rates, Stalls, rates
from tests.conftest import ARENA, PATIENCE, OpenChannel
from tests.fronts.support import filled

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _leaves_nothing(no_leaks: None) -> None:
    pass


def reader(rank: int = 0, **changes: Any) -> ReaderView:
    made = ReaderView(rank, 4243 + rank, True, False, False, 0, 0, 0, 0, 0, "sleeping")
    return replace(made, **changes)


def channel(*readers: ReaderView, **changes: Any) -> ChannelView:
    made = ChannelView(
        name="engine",
        identity="00" * 16,
        pid=4242,
        process="sleeping",
        backing="memfd",
        inode=1,
        closed=False,
        trimming=False,
        waiting=False,
        held_up_by=(),
        messages=0,
        head=0,
        arena_sent=0,
        frames_sent=0,
        ring_bytes=1000,
        slots=0,
        slot_bytes=0,
        slots_used=0,
        slots_reached=0,
        arena_bytes=0,
        arena_in_memory=0,
        readers=readers or (reader(),),
        spans=(),
    )
    return replace(made, **changes)


def span(slot: int, slots: int = 1, kind: str = "held") -> SpanView:
    return SpanView(kind, slot, slots, slots * 10, 1, 0, 1.0, ())


# Maps -------------------------------------------------------------------------------------------------------------------


def behind(rank: int, tail: int, head: int) -> ReaderView:
    return reader(rank, tail=tail, bytes_behind=head - tail)


@pytest.mark.parametrize(
    ("head", "tails", "drawn"),
    [
        (0, [], ">........."),
        (1234, [], "..>......."),
        (500, [100], ".0###>...."),
        (500, [100, 300], ".0#1#>...."),
        (500, [100, 150], ".*###>...."),
        (1200, [800], "##>.....0#"),
        (1500, [500], "#####0####"),
        (1000, [0], "0#########"),
        (999, [0], "0########>"),
        (10**15 + 350, [10**15 + 100], ".0#>......"),
    ],
)
def test_the_ring_is_drawn(head: int, tails: list[int], drawn: str) -> None:
    """From its first byte to its last, whatever the cursors are."""
    view = channel(*(behind(rank, tail, head) for rank, tail in enumerate(tails)), head=head)
    assert ring_map(view, 10, ascii_only=True) == drawn


def test_ranks_of_two_digits_are_drawn_as_one() -> None:
    view = channel(*(reader(rank) for rank in range(12)), behind(12, 100, 500), head=500)
    assert ring_map(view, 10, ascii_only=True) == ".*###>...."


@pytest.mark.parametrize(
    ("spans", "slots", "width", "drawn"),
    [
        ([], 10, 10, ".........."),
        ([span(0), span(3, 2)], 10, 10, "9..99....."),
        ([span(0), span(3, 2, "released")], 10, 10, "9........."),
        ([span(0, 10)], 10, 5, "99999"),
        ([span(0, 3)], 10, 5, "95..."),
        ([span(2, 1)], 100, 10, "1........."),
        ([span(9, 2)], 100, 10, "11........"),
        ([span(0)], 3, 10, "9.."),
        ([span(0, 7)], 7, 3, "999"),
        ([span(6)], 7, 3, "..5"),
    ],
)
def test_slots_are_drawn(spans: list[SpanView], slots: int, width: int, drawn: str) -> None:
    """Each cell shows how much of its slots is in use; cells need not have the same number of slots."""
    assert slot_map(spans, slots, width, ascii_only=True) == drawn


def test_only_nothing_looks_like_nothing() -> None:
    assert level(0, 100) == "·"
    assert level(1, 10_000) == "▁"
    assert level(9_999, 10_000) == "▇"
    assert level(100, 100) == "█"
    assert (bar(0, 4), bar(0.001, 4), bar(0.5, 4), bar(1, 4), bar(7, 4)) == ("····", "▏···", "██··", "████", "████")


# Rates and stalls -------------------------------------------------------------------------------------------------------


def test_rates_are_what_changed() -> None:
    """A reader that took the rank over counts from 0, and a rate is never below that."""
    before = channel(reader(0, messages=10), reader(1, messages=90), messages=100, head=1000, arena_sent=5, frames_sent=7)
    after = channel(reader(0, messages=30), reader(1, messages=2), messages=120, head=3000, arena_sent=105, frames_sent=27)
    rate = rates(before, after, 2.0)
    assert rate == Rates(messages=10, ring=1000, arena=50, frames=10, received=(10, 0))
    assert rate.bytes == 1060
    assert rates(before, after, 0.0).messages == 0


def test_a_stall_lasts_until_the_reader_moves() -> None:
    """Or until no send waits for it any more."""
    stalls = Stalls()
    stuck = channel(reader(0, tail=5), reader(1, tail=9), held_up_by=(0,), waiting=True)
    assert stalls.look(stuck, 10.0) == {0: 0.0}
    assert stalls.look(stuck, 13.5) == {0: 3.5}
    both = replace(stuck, held_up_by=(0, 1))
    assert stalls.look(both, 14.0) == {0: 4.0, 1: 0.0}
    moved = channel(reader(0, tail=6), reader(1, tail=9), held_up_by=(0, 1), waiting=True)
    assert stalls.look(moved, 15.0) == {0: 0.0, 1: 1.0}
    assert stalls.look(channel(reader(0, tail=6), reader(1, tail=9)), 16.0) == {}
    assert stalls.look(both, 17.0) == {0: 0.0, 1: 0.0}


def test_a_stall_is_told_without_a_time_that_says_nothing() -> None:
    seen = Seen(channel(), rates(channel(), channel(), 1), {0: 0.0, 3: 200.0})
    assert describe_stalls(seen) == [
        "a send waits for reader 0",
        "a send waits for reader 3, which has not moved for 3 min",
    ]


# The picture ------------------------------------------------------------------------------------------------------------


class Watch(module._Watch):
    """What is drawn here, instead of what there is."""

    def __init__(self, *seen: Seen) -> None:
        super().__init__(None)
        self.seen = list(seen)


def drawn(*seen: Seen, width: int = 80, height: int = 24, live: bool = False, encoding: str = "utf-8") -> list[str]:
    """Lines of a picture, as a terminal would have them."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height, highlight=False, force_terminal=False)
    picture = module._Picture(Watch(*seen), 1.0, console, live=live)
    console.print(picture.fitting() if live else picture.whole())
    file.seek(0)
    return file.read().splitlines()


def busy(readers: int = 2) -> Seen:
    """A channel with large numbers everywhere."""
    ends = [
        reader(
            rank,
            pid=4194304,
            process="in uninterruptible sleep (disk or driver)",
            messages=10**12,
            messages_behind=9_999_999,
            bytes_behind=900,
            tail=10**9 + 100,
            spans_held=32_768,
        )
        for rank in range(readers)
    ]
    view = channel(
        *ends,
        pid=4194304,
        head=10**9 + 1000,
        messages=10**12,
        waiting=True,
        slots=32768,
        slot_bytes=65536,
        arena_bytes=2 << 30,
        slots_used=30_000,
        slots_reached=30_000,
        spans=(span(0, 100), span(200, 29_800)),
    )
    rate = Rates(1_234_567.8, 1.234e9, 1.234e10, 1.2e8, (1_234_567.8,) * readers)
    return Seen(view, rate, {0: 12.0})


def test_eighty_columns_are_enough() -> None:
    """Also for large numbers; only the words of a process's state may be cut off."""
    lines = drawn(busy(), live=True)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "q quits" in lines[0]
    for what in (
        "engine  pid 4194304",
        "1,234,568 msg/s: 1.23 GB/s ring, 12.34 GB/s arena, 120.0 MB/s frames",
        "90% of 1000 B",
        "1875.0 MiB of 2 GiB",
        "! a send waits for reader 0, which has not moved for 12.0 s",
    ):
        assert what in text
    (row,) = [line for line in lines if line.split()[:2] == ["1", "4194304"]]
    assert row.split()[-5:] == ["1,234,568", "9,999,999", "███████▎", "90%", "32,768"]


def test_a_terminal_without_blocks_gets_letters() -> None:
    lines = drawn(busy(), encoding="ascii")
    assert all(line.isascii() for line in lines)
    assert any("#######-" in line for line in lines)


def test_what_does_not_fit_is_counted() -> None:
    """The last line says how much is missing; all of it is printed where there is no height."""
    lines = drawn(busy(30), height=10, live=True)
    assert len(lines) == 10
    assert lines[-1].startswith("29 more lines; `aioarena top NAME`")
    assert len(drawn(busy(30), height=10)) == 38


def test_a_name_of_any_length_is_cut_off() -> None:
    long = Seen(channel(name="x" * 48, process="y" * 60), rates(channel(), channel(), 1), {})
    assert max(map(len, drawn(long))) <= 80


# One picture ------------------------------------------------------------------------------------------------------------


async def test_once_prints_a_picture_of_what_there_is(
    open_channel: OpenChannel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two looks, so that it has rates; what a name would have a terminal do is not done."""
    monkeypatch.delenv("COLUMNS", raising=False)
    async with open_channel(2, name="[bold]in top\x1b") as opened:
        await opened.sender.send(filled(1))
        kept = await opened.receivers[0].recv()
        assert cli.main(["top", "--once", "--interval", "0.05", "[bold]in top\x1b"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "1 channel " in lines[0]
        assert lines[2].startswith(f"[bold]in top?  pid {os.getpid()}, ")
        assert "0.0 msg/s" in lines[3]
        assert "█···" in lines[5] and lines[5].endswith("1.0 MiB of 4 MiB")
        assert [line.split()[-1] for line in lines[7:9]] == ["1", "1"]
        assert max(map(len, lines)) <= 80
        del kept


def test_a_channel_that_goes_is_not_an_error() -> None:
    """The picture says that nothing is left; what never was is one."""
    with pytest.raises(LookError, match="nowhere"):
        module._Watch("nowhere").look()
    layout = Layout(readers=1, ring_bytes=4096, slots=0, slot_bytes=0)
    words = memoryview(bytearray(layout.control_bytes)).cast("Q")
    layout.format(words, bytes(16), name="soon gone")
    fd = os.memfd_create("aioarena-soon gone-control")
    os.write(fd, words)
    watch = module._Watch("soon gone")
    watch.look()
    assert watch.seen[0].rates.messages == 0
    os.pwrite(fd, (5).to_bytes(8, "little"), 8 * PUBLISHED)
    watch.look()
    assert watch.seen[0].view.messages == 5
    assert watch.seen[0].rates.messages > 0
    os.close(fd)
    watch.look()
    assert watch.gone
    assert (watch.seen, watch._channels) == ([], [])  # nothing of it is kept in memory by the looking
    watch.look()


async def test_channels_that_come_are_drawn(open_channel: OpenChannel) -> None:
    watch = module._Watch(None)
    async with open_channel(name="first") as one:
        watch.look()
        known = {found.key for found in watch._channels}
        async with open_channel(name="second") as other:
            watch.look()
            inodes = {found.inode for found in watch._channels}
            assert {one.sender.handle.control.inode, other.sender.handle.control.inode} <= inodes
            assert known <= {found.key for found in watch._channels}


async def test_channels_that_are_known_are_not_opened_again(open_channel: OpenChannel) -> None:
    async with open_channel() as opened:
        (known,) = [found for found in find()[0] if found.inode == opened.sender.handle.control.inode]
        assert known in find([known])[0]


@pytest.mark.parametrize("arguments", [["top"], ["top", "--once"]])
def test_without_rich_it_says_what_to_install(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "aioarena._look.top")
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("aioarena: error: top draws with rich, which is not installed")
    assert captured.err.endswith("pip install 'aioarena[cli]'\n")
    assert captured.err.count("\n") == 1


def test_without_a_terminal_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top"]) == 1
    assert "aioarena top --once" in capsys.readouterr().err


# A terminal -------------------------------------------------------------------------------------------------------------

ALTERNATE, NORMAL = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"


class Screen:
    """A command on a terminal of its own, 80 x 24.

    Attributes:
        process: The command.
        output: Everything it has drawn so far.
    """

    def __init__(self, *arguments: str) -> None:
        self._terminal, mine = pty.openpty()
        fcntl.ioctl(mine, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(mine)
        self._mine = mine
        self.output = b""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONWARNINGS": "error"}
        environment.pop("COLUMNS", None)
        # With the terminal as its controlling one, so that keys become signals.
        become = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        become += "os.execv(sys.executable, [sys.executable, '-m', 'aioarena', *sys.argv[1:]])"
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", become, *arguments], env=environment, stdin=mine, stdout=mine, stderr=mine
        )

    def press(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self._mine)

    def read_until(self, condition: Any) -> None:
        deadline = time.monotonic() + 3 * PATIENCE  # each starts a process that imports torch
        while not condition(self.output):
            assert time.monotonic() < deadline, f"this never came; last: {self.output[-500:]!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.output += os.read(self._terminal, 65536)

    def wait_until_stopped(self) -> None:
        def stopped(_: bytes) -> bool:
            # Without reaping, which is the business of Popen.
            status = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG)
            return status is not None and status.si_code == os.CLD_STOPPED

        self.read_until(stopped)

    def end(self) -> int:
        """Wait for its end; the exit code."""
        self.read_until(lambda _: self.process.poll() is not None)
        while select.select([self._terminal], [], [], 0)[0]:
            self.output += os.read(self._terminal, 65536)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        os.close(self._mine)


@contextlib.contextmanager
def screen(*arguments: str) -> Iterator[Screen]:
    made = Screen(*arguments)
    try:
        yield made
    finally:
        made.close()


def assert_put_back(terminal: Screen) -> None:
    """The terminal is as it was, and nothing was printed on it."""
    assert terminal.attributes == terminal.before
    assert terminal.output.count(ALTERNATE) == terminal.output.count(NORMAL) > 0
    assert terminal.output.rindex(NORMAL) > terminal.output.rindex(ALTERNATE)
    assert terminal.output.rindex(SHOWN) > terminal.output.rindex(HIDDEN)
    after = re.sub(rb"\x1b\[[?\d;]*[A-Za-z]", b"", terminal.output[terminal.output.rindex(NORMAL) :])
    assert after.strip() in (b"", b"^C")


@pytest.mark.multiprocess
def test_top_on_a_terminal() -> None:
    """It draws until somebody quits, and puts the terminal back: by q, Ctrl-C and SIGTERM, and for as long as it sleeps."""
    with (
        blocking.Sender(1, name="on a screen", arena=ARENA) as sender,
        blocking.Receiver(sender.handle, 0),
        contextlib.ExitStack() as stack,
    ):
        # All at once: they take seconds to start.
        by_key, by_interrupt, by_signal = (
            stack.enter_context(screen("top", "on a screen", "--interval", "0.05")) for _ in range(3)
        )
        for each in (by_key, by_interrupt, by_signal):
            each.read_until(lambda output: b"on a screen" in output)
        assert by_key.attributes != by_key.before

        sender.send(1)
        by_key.read_until(lambda output: b"1 message" in output)
        by_key.resize(24, 60)
        by_key.press(b"x")
        by_key.read_until(lambda output: re.search(rb"every 0.05 s {9}q quits", output))
        by_key.press(b"\x1a")
        by_key.wait_until_stopped()
        by_key.read_until(lambda output: NORMAL in output)
        assert_put_back(by_key)
        drawn_before = len(by_key.output)
        by_key.process.send_signal(signal.SIGCONT)
        by_key.read_until(lambda output: b"on a screen" in output[drawn_before:])
        assert by_key.attributes != by_key.before
        by_key.press(b"q")
        assert by_key.end() == 0
        assert_put_back(by_key)

        by_interrupt.press(b"\x03")
        assert by_interrupt.end() == 130
        assert_put_back(by_interrupt)

        by_signal.process.terminate()
        assert by_signal.end() == 143
        assert_put_back(by_signal)
