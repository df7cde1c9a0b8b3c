"""``inspect``: every span of an arena, and who holds it, seen from outside."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aioarena import Receiver, Sender, cli
from aioarena._look.channels import ChannelView, HolderView, LookError, SpanView, choose, find
from tests.conftest import OpenChannel
from tests.fronts.support import filled, until

MIB = 1 << 20
as_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")


@pytest.fixture(autouse=True)
def _leaves_nothing(no_leaks: None) -> None:
    pass


def view_of(sender: Sender) -> ChannelView:
    (view,) = [channel.view() for channel in find()[0] if channel.inode == sender.handle.control.inode]
    return view


def spans_of(sender: Sender) -> list[tuple[Any, ...]]:
    """(kind, slot, slots, bytes, message, holders) of each span; their ages make sense."""
    spans = view_of(sender).spans
    assert all(span.age is not None and span.age >= 0 for span in spans)
    return [(span.kind, span.slot, span.slots, span.nbytes, span.message, span.holders) for span in spans]


def holder(rank: int, *, received: bool = True, earlier: bool = False) -> HolderView:
    return HolderView(rank, received, earlier)


# What is seen ---------------------------------------------------------------------------------------------------------


async def test_spans_and_their_holders(open_channel: OpenChannel) -> None:
    """Who has received it, who has not, and who has let it go."""
    async with open_channel(2) as channel:
        await channel.sender.send("small")
        await channel.sender.send(filled(1, MIB + 1))
        await channel.receivers[0].recv()
        kept = await channel.receivers[0].recv()
        both = (holder(0), holder(1, received=False))
        assert spans_of(channel.sender) == [("held", 0, 2, MIB + 1, 1, both)]
        view = view_of(channel.sender)
        assert (view.slots_used, view.slots_reached, view.arena_sent) == (2, 1, MIB + 1)
        assert [reader.spans_held for reader in view.readers] == [1, 1]
        del kept
        await until(lambda: [reader.spans_held for reader in view_of(channel.sender).readers] == [0, 1])
        for _ in range(2):
            await channel.receivers[1].recv()
        await until(lambda: spans_of(channel.sender) == [("released", 0, 2, MIB + 1, 1, ())])
        assert view_of(channel.sender).slots_used == 0
        channel.sender._core.arena.reap()
        assert spans_of(channel.sender) == []


async def test_a_span_that_is_filled(open_channel: OpenChannel) -> None:
    """It is nobody's yet, and takes slots already."""
    async with open_channel() as channel:
        message = channel.sender._core.place([8, 100_000])
        assert spans_of(channel.sender) == [("filled", 0, 1, 100_000, None, ())]
        assert view_of(channel.sender).slots_used == 1
        channel.sender._core.unplace(message)


async def test_lent_memory_and_its_messages(open_channel: OpenChannel) -> None:
    """A message of lent memory takes no slots besides."""
    async with open_channel() as channel:
        lent = await channel.sender.empty((MIB + 5,), torch.uint8)
        assert spans_of(channel.sender) == [("lent", 0, 2, MIB + 5, None, ())]
        await channel.sender.send(lent)
        assert spans_of(channel.sender) == [
            ("lent", 0, 2, MIB + 5, None, ()),
            ("held", 0, 0, MIB + 5, 0, (holder(0, received=False),)),
        ]
        assert view_of(channel.sender).slots_used == 2
        del lent
        received = await channel.receiver.recv()
        del received
        gc.collect()
        channel.sender._core.arena.reap()
        assert spans_of(channel.sender) == []


async def test_readers_that_had_the_rank_before(open_channel: OpenChannel) -> None:
    """They may hold what they received although another has their rank."""
    async with Sender(1) as sender:
        async with Receiver(sender.handle, 0) as first:
            await sender.send(filled(1))
            kept = await first.recv()
        assert [span[-1] for span in spans_of(sender)] == [(holder(0),)]
        async with Receiver(sender.handle, 0) as second:
            await until(lambda: view_of(sender).readers[0].seated)
            assert [span[-1] for span in spans_of(sender)] == [(holder(0, earlier=True),)]
            assert view_of(sender).readers[0].spans_held == 0
            await sender.send(1)
            await second.recv()
        del kept


async def test_a_look_takes_no_memory(open_channel: OpenChannel) -> None:
    """Of a table of thousands of entries only those that were written are read; others would get memory by that."""
    async with Sender(2) as sender, Receiver(sender.handle, 0), Receiver(sender.handle, 1):
        for _ in range(2):
            await sender.send(filled(1))
        before = sender._control.in_memory
        spans = view_of(sender).spans
        assert len(spans) == 2
        # The words with which readers release, which nobody touched so far, are two words on one page.
        assert sender._control.in_memory <= before + os.sysconf("SC_PAGESIZE")


# What is printed --------------------------------------------------------------------------------------------------------


async def test_inspect_prints_it(open_channel: OpenChannel, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_channel(2, name="to be inspected") as channel:
        await channel.sender.send(filled(1, MIB + 1))
        kept = await channel.receivers[1].recv()
        lent = await channel.sender.empty((20_000,), torch.uint8)
        assert cli.main(["inspect", "to be inspected"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "to be inspected"
        header = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:7]}
        assert header["sender"].startswith(f"pid {os.getpid()}, ")
        assert header["state"] == "open"
        assert header["channel"].startswith(f"{channel.sender._nonce.hex()}, ")
        assert "0 B as frames" in header["sent"] and "1.0 MB through the arena" in header["sent"]
        assert header["arena"].startswith("4 MiB in 4 slots of 1 MiB; 3 slots (3.0 MiB) in use")
        readers = lines[lines.index("", 3) + 1 :][2:4]
        assert [line.split()[:2] for line in readers] == [["0", f"{os.getpid()}"], ["1", f"{os.getpid()}"]]
        assert [line.split()[-2:] for line in readers] == [["1", "no"], ["1", "no"]]
        table = lines[-3:]
        assert table[0].split()[:5] == ["0", "2", f"{MIB + 1:,}", "1", "0"]
        assert table[0].endswith(" 0* 1")
        assert table[1].split()[:5] == ["2", "1", "20,000", "-", "-"]
        assert table[1].endswith("sender's code")
        assert table[2] == "* has not received that message yet"
        del kept, lent


async def test_inspect_for_programs(open_channel: OpenChannel, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_channel(name="for programs") as channel:
        await channel.sender.send(filled(1))
        assert cli.main(["inspect", "for programs", "--json"]) == 0
        (document,) = json.loads(capsys.readouterr().out)
        assert document["pid"] == os.getpid()
        (span,) = document["spans"]
        assert (span["kind"], span["generation"], span["holders"]) == (
            "held",
            1,
            [{"rank": 0, "received": False, "earlier": False}],
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arena": None}, ["arena     off"]),
        ({}, ["nothing is in the arena", "open; reader 0 not attached yet"]),
    ],
)
async def test_inspect_of_little(options: dict[str, Any], says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No arena, no spans, no readers."""
    async with Sender(1, name="bare", **options):
        assert cli.main(["inspect", "bare"]) == 0
        text = capsys.readouterr().out
        assert all(what in text for what in says)


async def test_a_name_that_would_draw_on_the_terminal(
    open_channel: OpenChannel, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is looked for as it is, and printed without what terminals obey."""
    async with open_channel(name="\x1b[31mred\n"):
        assert cli.main(["inspect", "\x1b[31mred\n"]) == 0
        assert capsys.readouterr().out.startswith("?[31mred?\n")
        assert cli.main(["ps", "--interval", "0.05"]) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_kinds_of_holders_have_their_marks() -> None:
    from aioarena._look.inspection import _spans

    span = SpanView("held", 0, 1, 5, 1, 7, 7000.0, (holder(0, received=False), holder(1, earlier=True)))
    lines = _spans([span, SpanView("released", 1, 1, 5, 2, 8, None, ())]).splitlines()
    assert lines[2].split()[-4:] == ["2", "h", "0*", "1'"]
    assert lines[3].split()[-2:] == ["-", "nobody"]
    assert lines[4:] == [
        "* has not received that message yet",
        "' a process that had the rank before the one that has it now",
    ]


# Which channel ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process that takes part in nothing."""
    process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
    yield process.pid
    process.kill()
    process.wait()


async def test_channels_are_chosen_by_pid_and_by_name(open_channel: OpenChannel) -> None:
    """All of a process, and all of a name; a long name by its beginning; digits are a name if they are no pid."""
    async with (
        open_channel(name="one") as one,
        open_channel(name="two") as two,
        open_channel(name="two") as other,
        open_channel(name="99999999999") as digits,
        open_channel(name="ä" * 100) as long,
    ):
        inodes = {
            name: channel.sender.handle.control.inode
            for name, channel in {"one": one, "two": two, "other": other, "digits": digits, "long": long}.items()
        }
        assert [channel.inode for channel in choose("one")] == [inodes["one"]]
        assert {channel.inode for channel in choose("two")} == {inodes["two"], inodes["other"]}
        assert [channel.inode for channel in choose("99999999999")] == [inodes["digits"]]
        assert [channel.inode for channel in choose("ä" * 100)] == [inodes["long"]]
        assert {channel.inode for channel in choose(str(os.getpid()))} == set(inodes.values())
        (known,) = choose("one")
        assert choose("one", [known]) == [known]  # not opened again


def test_what_is_not_there_is_said(bystander: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with exit code 1."""
    for which, says in {
        "nobody": "no channel of user .* has the name 'nobody'",
        "99999999999": "there is no process 99999999999, and no channel of that name",
        str(bystander): f"process {bystander} takes part in no channel; `aioarena ps` lists those there are",
    }.items():
        with pytest.raises(LookError, match=says):
            choose(which)
        assert cli.main(["inspect", which]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("aioarena: error: ")
        assert captured.err.count("\n") == 1


def test_a_channel_of_another_version_is_named() -> None:
    fd = os.memfd_create("aioarena-strange-control")
    try:
        os.ftruncate(fd, 8192)
        with pytest.raises(LookError, match=f"process {os.getpid()} has a channel that cannot be read: no channel"):
            choose(str(os.getpid()))
    finally:
        os.close(fd)


@as_root
async def test_another_user_is_refused_politely(open_channel: OpenChannel) -> None:
    """By pid it is told whose process that is; by name there is nothing to see."""
    async with open_channel(name="not yours"):
        for which, says in {str(os.getpid()): b"belongs to user root", "not yours": b"has the name 'not yours'"}.items():
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with contextlib.redirect_stderr(os.fdopen(writing, "w", buffering=1)):
                    os._exit(cli.main(["inspect", which]))
            os.close(writing)
            with os.fdopen(reading, "rb") as pipe:
                said = pipe.read()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
            assert says in said
            assert b"Traceback" not in said
