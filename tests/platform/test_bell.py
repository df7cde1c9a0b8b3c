"""A pipe that wakes: what a ring does, what it does not, and who may hold the rope."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import pytest

from aioarena._platform.bell import Bell, BellRef, BellRope


@pytest.fixture
def bell(no_leaks: None) -> Iterator[Bell]:
    bell = Bell()
    yield bell
    bell.close()
    bell.close()


@pytest.fixture
def rope(bell: Bell) -> Iterator[BellRope]:
    rope = BellRope(os.getpid(), bell.ref)
    yield rope
    rope.close()
    rope.close()


def rings(bell: Bell) -> bool:
    return bool(select.select([bell.fd], [], [], 0)[0])


def test_it_rings_until_it_is_silenced(bell: Bell, rope: BellRope) -> None:
    assert not rings(bell)
    rope.ring()
    rope.ring()
    assert rings(bell)
    bell.silence()
    assert not rings(bell)
    rope.ring()
    assert rings(bell)


def test_silencing_a_silent_one_returns(bell: Bell) -> None:
    bell.silence()
    assert not rings(bell)


def test_a_reader_that_never_listens_holds_nobody_up(bell: Bell, rope: BellRope) -> None:
    for _ in range(70_000):  # more than a pipe has room for
        rope.ring()
    bell.silence()
    assert not rings(bell)
    rope.ring()
    assert rings(bell)


def test_it_does_not_ring_because_the_sender_is_gone(bell: Bell, rope: BellRope) -> None:
    """An end that hung up is readable for ever: that would be a loop that spins."""
    rope.close()
    assert not rings(bell)


def test_ringing_for_one_that_is_gone_is_harmless(no_leaks: None) -> None:
    bell = Bell()
    rope = BellRope(os.getpid(), bell.ref)
    bell.close()
    rope.ring()
    rope.close()


def test_ringing_for_one_that_is_gone_sends_no_signal(no_leaks: None) -> None:
    """SIGPIPE, which ends programs that leave it to its default."""
    other = Bell()
    rope = BellRope(os.getpid(), other.ref)
    other.close()
    sent: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, frame: sent.append(number))
    try:
        for _ in range(70_000):
            rope.ring()
    finally:
        signal.signal(signal.SIGPIPE, before)
        rope.close()
    assert not sent


def test_a_descriptor_that_means_something_else_by_now(bell: Bell, no_leaks: None) -> None:
    other = Bell()
    with pytest.raises(FileNotFoundError, match="is not the bell it said"):
        BellRope(os.getpid(), BellRef(other.fd, bell.ref.inode))
    other.close()
    with pytest.raises(FileNotFoundError):
        BellRope(os.getpid(), other.ref)
    with open("/dev/null", "rb") as file, pytest.raises(FileNotFoundError, match="is not the bell it said"):
        BellRope(os.getpid(), BellRef(file.fileno(), os.fstat(file.fileno()).st_ino))


def test_a_forked_child_does_not_close_the_bell_of_its_parent(bell: Bell, rope: BellRope) -> None:
    """A number that is closed twice may be somebody else's the second time."""
    child = os.fork()
    if not child:
        before = bell.fd
        bell.close()
        os._exit(0 if bell.fd == before and os.fstat(before) else 1)
    assert os.waitpid(child, 0)[1] == 0
    rope.ring()
    assert rings(bell)
