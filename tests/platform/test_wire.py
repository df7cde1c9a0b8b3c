"""The sockets of a channel, without one: what arrives is told apart, what is foreign is counted."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from aioarena._core.layout import VERSION
from aioarena._platform import wire
from aioarena._platform.process import ProcessIdentity
from aioarena._platform.wire import Disconnect, Join, Leave, ReceiverWire, SenderWire, Wake, new_address, runtime_directory
from aioarena.exceptions import ArenaError
from tests.multiprocess.harness import eventually

NONCE = bytes(range(16))


@pytest.fixture
def short_tmpdir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR that is short enough for sockets."""
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="a-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


@pytest.fixture
def sender(short_tmpdir: Path) -> Iterator[SenderWire]:
    sender = SenderWire(new_address(), NONCE)
    yield sender
    sender.close()


@pytest.fixture
def receiver(sender: SenderWire) -> Iterator[ReceiverWire]:
    receiver = ReceiverWire(sender._path, NONCE, 3, 77)
    yield receiver
    receiver.close()


def received(sender: SenderWire, count: int) -> list[wire.Event]:
    """The next events at a sender."""
    events: list[wire.Event] = []

    def enough() -> bool:
        events.extend(sender.drain())
        return len(events) >= count

    eventually(enough, f"only {events} arrived")
    return events


def test_what_a_reader_says(sender: SenderWire, receiver: ReceiverWire) -> None:
    """Join, wake, leave arrive as what they are, in order; the end of the connection is an event too."""
    me = ProcessIdentity.current()
    receiver.join(me)
    receiver.wake()
    receiver.leave()
    assert received(sender, 3) == [Join(VERSION, 3, 77, me), Wake(3), Leave(3, 77)]
    receiver.close()
    assert received(sender, 1) == [Disconnect(77)]
    assert sender.foreign == 0


def test_what_a_sender_says(sender: SenderWire, receiver: ReceiverWire) -> None:
    """Wake-ups are taken in; frames are kept under their number; refusals are for one reader alone."""
    receiver.join(ProcessIdentity.current())
    received(sender, 1)
    sender.wake()
    sender.send_frames(4, [b"for another reader"], [78])
    sender.send_frames(5, [b"first", b"second"], [76, 77])
    sender.send_frames(6, [b"third"], [77])
    sender.refuse(78, "not you")
    sender.refuse(77, "you, for a reason")
    eventually(lambda: receiver.drain() and receiver.refusal is not None, "the refusal does not arrive")
    assert receiver.refusal == "you, for a reason"
    assert [bytes(part) for part in receiver.frames(5) or ()] == [b"first", b"second"]
    assert [bytes(part) for part in receiver.frames(6) or ()] == [b"third"]
    assert receiver.frames(4) is None
    assert receiver.frames(7) is None
    receiver.drop_frames(5)
    assert receiver.frames(5) is None
    assert receiver.frames(6) is not None
    assert receiver.foreign == 0


def test_the_end_of_the_sender(sender: SenderWire, receiver: ReceiverWire) -> None:
    """A reader notices that the connection ended, after everything that came over it."""
    receiver.join(ProcessIdentity.current())
    received(sender, 1)
    sender.send_frames(1, [bytes(1000)], [77])
    eventually(lambda: receiver.drain() and receiver.frames(1), "the frame does not arrive")
    assert not receiver.disconnected
    sender.close()
    eventually(lambda: receiver.drain() and receiver.disconnected, "the end goes unnoticed")
    assert receiver.frames(1) is not None


def test_a_reader_may_speak_before_the_sender_binds(short_tmpdir: Path) -> None:
    """What it says waits in its socket."""
    path = new_address()
    receiver = ReceiverWire(path, NONCE, 0, 5)
    receiver.join(ProcessIdentity.current())
    sender = SenderWire(path, NONCE)
    (join,) = received(sender, 1)
    assert isinstance(join, Join)
    receiver.close()
    sender.close()


def test_strangers_are_counted(sender: SenderWire) -> None:
    """Anything that does not carry the channel's nonce, or has another length than it should, is no event."""
    said = [b"J" + NONCE, b"W" + bytes(20), b"L" + NONCE + b"x", b"X" + NONCE, b"", b"hello"]
    with zmq.Context() as context, context.socket(zmq.XSUB) as stranger:
        stranger.connect(f"ipc://{sender._path}")
        for message in said:
            stranger.send(message)
        stranger.send_multipart([b"two", b"parts"])
        events: list[wire.Event] = []
        eventually(lambda: events.extend(sender.drain()) or sender.foreign == len(said) + 1, "they are not counted")
        assert events == []


def test_closing(short_tmpdir: Path) -> None:
    """The socket's file goes with it; closing again is harmless; the context ends with its last socket."""
    path = new_address()
    first, second = SenderWire(path, NONCE), SenderWire(new_address(), NONCE)
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    first.close()
    first.close()
    assert not os.path.exists(path)
    assert wire._context._context is not None
    second.close()
    assert wire._context._context is None
    assert wire._context._users == 0


def test_a_path_that_cannot_be_bound(short_tmpdir: Path) -> None:
    """An error of ours that names the path, and no socket left open."""
    with pytest.raises(ArenaError, match=r"cannot bind the channel's socket /nowhere/sock: .*; make a new Sender"):
        SenderWire("/nowhere/sock", NONCE)
    assert wire._context._context is None


def test_the_runtime_directory(short_tmpdir: Path) -> None:
    """Private, the same each time, and swept of what is dead."""
    directory = runtime_directory()
    assert directory == short_tmpdir / f"aioarena-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    me = ProcessIdentity.current()
    dead = directory / f"aioarena-{me.pid_namespace}-{me.pid}-{me.start_ticks + 1}-00.sock"
    dead.touch()
    assert runtime_directory() == directory
    assert not dead.exists()


def test_a_directory_under_a_loose_umask(short_tmpdir: Path) -> None:
    """0700 whatever the umask says."""
    umask = os.umask(0)
    try:
        assert runtime_directory().stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(umask)


def test_addresses_are_fresh_and_short(short_tmpdir: Path) -> None:
    """Random names, which fit a Unix socket."""
    addresses = {new_address() for _ in range(50)}
    assert len(addresses) == 50
    assert all(len(os.fsencode(address)) <= 107 for address in addresses)


def test_a_directory_that_is_too_deep(short_tmpdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no short path can be had, the error says what to set."""
    monkeypatch.setattr(wire, "_MAX_SOCKET_PATH", 40)
    with pytest.raises(ArenaError, match="longer than 40 bytes; set TMPDIR to a shorter one"):
        new_address()
