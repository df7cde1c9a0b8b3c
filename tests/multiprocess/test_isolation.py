"""Other containers, other users, wrong handles and strangers on the socket: a clear error or none at all, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

import aioarena
from aioarena._core.layout import VERSION
from tests.multiprocess import namespaces
from tests.multiprocess.harness import PATIENCE, Farm, Worker, eventually_async, timed
from tests.multiprocess.messages import CHANNEL, message, numbered
from tests.multiprocess.namespaces import MIB, NOBODY
from tests.multiprocess.senders import attach

as_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")


@pytest.fixture
def may_unshare(farm: Farm) -> None:
    if not farm.worker().call("may_unshare"):
        pytest.skip("needs mount and pid namespaces, which this user may not make here")


async def assert_undisturbed(chan: aioarena.Sender, readers: list[Worker], first: int) -> None:
    for kind, number in numbered(7, first=first):
        await chan.send(message(kind, number))
    for worker in readers:
        assert await worker.aask("recv", 7) == list(range(first, first + 7))


# Namespaces: B44 ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("may_unshare")
@pytest.mark.parametrize("backing", ["memfd", "shm"])
async def test_a_reader_with_a_dev_shm_of_its_own(farm: Farm, backing: str) -> None:
    """As long as it sees the sender's /proc it attaches all the same, to the same memory."""
    async with aioarena.Sender(2, backing=backing, **CHANNEL) as chan:
        here, there = farm.several(2)
        here.start("reader", chan.handle, 0)
        assert await here.aget() == "joined"
        there.start("with_own_shm", namespaces.attach_and_receive, MIB, chan.handle, 1)
        assert await there.aget() == "joined"
        await assert_undisturbed(chan, [here], 0)
    assert (await there.aresult())[:2] == (list(range(7)), "EndOfChannel")


@pytest.mark.usefixtures("may_unshare")
async def test_a_foreign_file_of_the_right_name_and_size(farm: Farm) -> None:
    """What lies under the name of the segment is not taken for it."""
    async with aioarena.Sender(2, backing="shm", **CHANNEL) as chan:
        (here,) = farm.several(1)
        here.start("reader", chan.handle, 0)
        assert await here.aget() == "joined"
        with timed():
            error = await farm.worker().acall("with_own_shm", namespaces.planted, 64 * MIB, chan.handle)
        assert error.startswith("HandleError: ")
        assert "is not the segment the handle names: inode is " in error
        there = farm.worker()
        there.start("reader", chan.handle, 1)
        assert await there.aget() == "joined"
        await assert_undisturbed(chan, [here, there], 0)


@pytest.mark.usefixtures("may_unshare")
@pytest.mark.parametrize("own_proc", [True, False])
async def test_a_reader_in_a_container(farm: Farm, own_proc: bool) -> None:
    """In another pid namespace memfd segments cannot be reached: an error that says so, and what would help."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        here, there = farm.several(2)
        here.start("reader", chan.handle, 0)
        assert await here.aget() == "joined"
        there.start("with_own_pids", own_proc, namespaces.attach_and_receive, chan.handle, 1)
        await there.aget()
        answer = await there.aget()
        if own_proc:
            numbers, error, text = answer
            assert (numbers, error) == ([], "HandleError")
            assert 'backing="shm"' in text or "another container" in text
        else:  # /proc shows the sender, though as another process than the reader would think
            assert answer == "joined"
        assert chan.statistics().readers[0].state == "joined"
        if own_proc:
            there = farm.worker()
            there.start("reader", chan.handle, 1)
            assert await there.aget() == "joined"
            await assert_undisturbed(chan, [here, there], 0)
        else:
            await assert_undisturbed(chan, [here], 0)
    if not own_proc:
        assert (await there.aget())[:2] == (list(range(7)), "EndOfChannel")


@pytest.mark.usefixtures("may_unshare")
@pytest.mark.parametrize("ending", ["close", "reader killed", "sender killed"])
def test_containers_that_share_dev_shm(farm: Farm, ending: str) -> None:
    """With files in a shared /dev/shm a channel spans pid namespaces, and a death on either side is noticed."""
    sender, here, there, late = farm.several(4)
    sender.start("sender", 2, backing="shm", on_reader_lost="continue", **CHANNEL)
    handle = sender.get()
    here.start("reader", handle, 0)
    assert here.get() == "joined"
    there.start("with_own_pids", True, namespaces.attach_and_receive, handle, 1)
    inner = there.get()
    assert there.get() == "joined"
    assert sender.ask("statistics").readers[1].pid != inner  # it knows itself under another number
    sender.ask("send", numbered(7))
    assert here.ask("recv", 7) == list(range(7))
    match ending:
        case "close":
            sender.put("close")
            assert sender.result() == "closed"
            assert there.get()[:2] == (list(range(7)), "EndOfChannel")
        case "sender killed":
            sender.kill()
            with timed():
                numbers, error, _ = there.get()
            assert (numbers, error) == (list(range(7)), "SenderLostError")
        case "reader killed":
            os.kill(inner, 9)
            with timed():
                while sender.ask("statistics").readers[1].state == "joined":
                    pass
            assert sender.ask("statistics").readers[1].state == "lost"
            late.start("reader", handle, 1)
            assert late.get() == "joined"
            sender.ask("send", [("arena", 7)])
            assert late.ask("recv", 1) == here.ask("recv", 1) == [7]


# Users -------------------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("backing", ["memfd", "shm"])
async def test_another_user_cannot_attach(farm: Farm, backing: str) -> None:
    """Segments and sockets are for one user: another gets an error that says so, and disturbs nobody."""
    async with aioarena.Sender(2, backing=backing, **CHANNEL) as chan:
        here, stranger = farm.several(2)
        here.start("reader", chan.handle, 0)
        assert await here.aget() == "joined"
        with timed():
            numbers, error, text = await stranger.acall("as_nobody", namespaces.attach_and_receive, chan.handle, 1)
        assert (numbers, error) == ([], "HandleError")
        assert "it belongs to another user" in text
        there = farm.worker()
        there.start("reader", chan.handle, 1)
        assert await there.aget() == "joined"
        await assert_undisturbed(chan, [here, there], 0)


# The directory of sockets: B43 -------------------------------------------------------------------------------------------


def _open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def _of_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


def _a_link(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


def _a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _a_file(path: Path) -> None:
    path.touch()


HIJACKS: dict[str, Callable[[Path], None]] = {
    "open to others": _open_to_others,
    "of another user": _of_another_user,
    "a link": _a_link,
    "a dangling link": _a_dangling_link,
    "a file": _a_file,
}


@as_root
@pytest.mark.parametrize("hijack", HIJACKS)
async def test_a_directory_that_somebody_else_took(farm: Farm, tmpdir_for_sockets: Path, hijack: str) -> None:
    """The name of our directory is in foreign hands: nothing of ours goes there, the channel works, and leaves nothing."""
    path = tmpdir_for_sockets / f"aioarena-{os.getuid()}"
    HIJACKS[hijack](path)
    for first in (0, 7):
        async with aioarena.Sender(2, **CHANNEL) as chan:
            directory = Path(chan.handle.address).parent
            assert directory != path
            assert directory.resolve() == directory
            assert directory.stat().st_mode & 0o777 == 0o700
            assert directory.stat().st_uid == os.getuid()
            await assert_undisturbed(chan, await attach(farm, chan.handle), first)
        assert not os.path.exists(chan.handle.address)
    # One directory at most was made in place of the one that was taken, however many channels there were.
    ours = {entry.name for entry in tmpdir_for_sockets.iterdir()} - {path.name, "elsewhere"}
    assert len([name for name in ours if name.startswith("aioarena-")]) <= 1


def test_all_names_taken(farm: Farm, tmpdir_for_sockets: Path) -> None:
    """However many names somebody took, a private directory is found."""
    for number in range(200):
        (tmpdir_for_sockets / f"aioarena-{os.getuid()}{f'-{number}' if number else ''}").touch()
    chan = aioarena.Sender(1, arena=None)
    directory = Path(chan.handle.address).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.getuid()


@pytest.mark.parametrize("name", ["long" * 30, "日本語" * 7, "with blank 'n quote"])
async def test_an_odd_tmpdir(farm: Farm, tmpdir_for_sockets: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Socket paths hold 107 bytes: with a TMPDIR that is too long for them the channel works none the less."""
    odd = tmpdir_for_sockets / name
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    async with aioarena.Sender(1, **CHANNEL) as chan:
        assert len(os.fsencode(chan.handle.address)) <= 107
        await assert_undisturbed(chan, await attach(farm, chan.handle), 0)
    assert not os.path.exists(chan.handle.address)


async def test_a_socket_that_cannot_be_bound(farm: Farm, tmpdir_for_sockets: Path) -> None:
    """If the directory vanished before the start, start raises an error of ours, and leaves nothing; readers are told."""
    chan = aioarena.Sender(1, **CHANNEL)
    worker = farm.worker()
    worker.start("reader", chan.handle, 0, announce=True)
    assert await worker.aget() == "asked"
    os.rmdir(tmpdir_for_sockets / f"aioarena-{os.getuid()}")
    with pytest.raises(aioarena.ArenaError, match=r"cannot bind the channel.s socket .*; make a new Sender"):
        await chan.start()
    with pytest.raises(aioarena.ClosedError):
        await chan.send("hello")
    with timed():
        assert (await worker.aresult())["type"] == "EndOfChannel"


# Handles -----------------------------------------------------------------------------------------------------------------


def _ref(handle: aioarena.Handle, which: str, **changes: Any) -> aioarena.Handle:
    return dataclasses.replace(handle, **{which: dataclasses.replace(getattr(handle, which), **changes)})


def _layout(handle: aioarena.Handle, **changes: Any) -> aioarena.Handle:
    layout = dataclasses.replace(handle.layout, **changes)
    return _ref(dataclasses.replace(handle, layout=layout), "control", nbytes=layout.control_bytes)


DAMAGES: dict[str, tuple[Callable[[aioarena.Handle], aioarena.Handle], str]] = {
    "inode of control": (lambda h: _ref(h, "control", inode=h.control.inode + 1), "inode is "),
    "inode of arena": (lambda h: _ref(h, "arena", inode=h.arena.inode + 1), "inode is "),  # type: ignore[union-attr]
    "device": (lambda h: _ref(h, "control", device=h.control.device + 1), "inode is "),
    "size of control": (lambda h: _ref(h, "control", nbytes=h.control.nbytes + 4096), "contradicts itself"),
    "size of arena": (lambda h: _ref(h, "arena", nbytes=4096), "contradicts itself"),
    "both sizes of the ring": (lambda h: _layout(h, ring_bytes=h.layout.ring_bytes * 2), "size is "),
    "readers, here and in the layout": (lambda h: dataclasses.replace(_layout(h, readers=3), readers=3), "readers is 2"),
    "number of readers": (lambda h: dataclasses.replace(h, readers=9), "rank 8 is out of range"),
    "nonce": (lambda h: dataclasses.replace(h, nonce=bytes(16)), "channel is "),
    "version": (lambda h: dataclasses.replace(h, version=99), "layout version 99"),
    "segments swapped": (lambda h: dataclasses.replace(h, control=h.arena, arena=h.control), "contradicts itself"),
    "path of another segment": (lambda h: _ref(h, "control", path=h.arena.path), "inode is "),  # type: ignore[union-attr]
    "path of nothing": (lambda h: _ref(h, "control", path="/proc/1/fd/9999", fallback=None), "is not to be found"),
    "path of a directory": (lambda h: _ref(h, "control", path="/tmp"), "not the segment"),
    "path of a device": (lambda h: _ref(h, "control", path="/dev/null"), "not the segment"),
    "no arena": (lambda h: dataclasses.replace(h, arena=None), "contradicts itself"),
}


async def test_damaged_handles(farm: Farm) -> None:
    """Each way of damaging a handle is refused with what was expected and found; the channel does not notice."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        here, there = farm.several(2)
        here.start("reader", chan.handle, 0)
        assert await here.aget() == "joined"
        for name, (damage, text) in DAMAGES.items():
            damaged = damage(chan.handle)
            with timed(), pytest.raises(aioarena.HandleError) as caught:
                await aioarena.Receiver(damaged, damaged.readers - 1).start()
            assert text in str(caught.value), name
        there.start("reader", chan.handle, 1)
        assert await there.aget() == "joined"
        await assert_undisturbed(chan, [here, there], 0)


def test_a_handle_of_another_version_does_not_unpickle(farm: Farm) -> None:
    """Refused by name wherever it arrives, whatever else another version has changed; expected and found are attributes."""
    handle = aioarena.Sender(1, arena=None).handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    with pytest.raises(aioarena.HandleError, match=f"layout version 99, this is {VERSION}") as caught:
        pickle.loads(pickle.dumps(dataclasses.replace(handle, version=99)))
    assert (caught.value.expected, caught.value.found) == (VERSION, 99)


@pytest.mark.parametrize("reuse", ["socket", "pipe", "file", "another channel", "nothing"])
async def test_the_handle_of_a_channel_that_was_closed(farm: Farm, reuse: str) -> None:
    """The process lives, its channel is gone, and the number of its descriptor means something else by now."""
    chan = aioarena.Sender(1, **CHANNEL)
    number = int(chan.handle.control.path.rpartition("/")[2])
    await chan.start()
    await chan.aclose()
    fds: list[int] = []
    other = None
    match reuse:
        case "socket":
            fds = [one.detach() for one in socket.socketpair()]
        case "pipe":
            fds = list(os.pipe())
        case "file":
            fds = [os.open("/tmp", os.O_TMPFILE | os.O_RDWR)]
        case "another channel":
            other = aioarena.Sender(1, **CHANNEL)
    try:
        if fds and number not in fds:
            os.dup2(fds[0], number)
            fds.append(number)
        with timed():
            error = await farm.worker().acall("reader", chan.handle, 0)
        assert error["type"] == "HandleError"
    finally:
        for fd in fds:
            os.close(fd)
        del other


# Strangers on the socket -------------------------------------------------------------------------------------------------


async def test_foreign_bytes(farm: Farm) -> None:
    """Bytes that are no ZMQ, and connections that say nothing, change nothing."""
    async with aioarena.Sender(2, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        strangers = []
        for said in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), b"\xff" + bytes(9) + b"\x7f\x03", b""):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.setblocking(False)
            stranger.connect(chan.handle.address)
            with contextlib.suppress(BlockingIOError):
                stranger.send(said)
            strangers.append(stranger)
            await assert_undisturbed(chan, readers, 7 * len(strangers))
        for stranger in strangers:
            stranger.close()
        await assert_undisturbed(chan, readers, 7 * len(strangers) + 7)
        assert [reader.state for reader in chan.statistics().readers] == ["joined", "joined"]


async def test_foreign_peers(farm: Farm, caplog: pytest.LogCaptureFixture) -> None:
    """ZMQ peers that do not know the channel's nonce are not taken for readers; their messages are ignored and counted."""
    nonce = bytes(16)
    said = [
        [b"hello"],
        [b""],
        [b"J" + nonce],
        [b"J" + nonce + bytes(200)],
        [b"L" + nonce + bytes(12)],
        [b"W" + nonce + bytes(4)],
        [b"W"],
        [b"two", b"parts"],
    ]
    async with aioarena.Sender(2, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        with zmq.Context() as context, context.socket(zmq.XSUB) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(f"ipc://{chan.handle.address}")
            for parts in said:
                stranger.send_multipart(parts)
            await eventually_async(lambda: chan.statistics().foreign_messages >= len(said), "they are not counted")
            # Subscriptions of all kinds are no messages, and bring no joins.
            for topic in (b"", b"W", b"F", b"I" + bytes(8)):
                stranger.send(b"\x01" + topic)
            await assert_undisturbed(chan, readers, 0)
        for kind in (zmq.DEALER, zmq.PULL, zmq.REQ):
            with zmq.Context() as context, context.socket(kind) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.connect(f"ipc://{chan.handle.address}")
                await asyncio.sleep(0.02)  # for the handshake, which is refused
        await assert_undisturbed(chan, readers, 7)
        statistics = chan.statistics()
        assert statistics.foreign_messages == len(said)
        assert [reader.state for reader in statistics.readers] == ["joined", "joined"]
        await eventually_async(lambda: f"ignored {len(said)} messages on its socket" in caplog.text, "they are not logged")


async def test_a_peer_that_hangs_up_at_once(farm: Farm) -> None:
    """Many connections that come and go leave nothing with the sender."""
    async with aioarena.Sender(1, **CHANNEL) as chan:
        readers = await attach(farm, chan.handle)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(chan.handle.address)
        await assert_undisturbed(chan, readers, 0)
        await eventually_async(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors stay open", PATIENCE)
