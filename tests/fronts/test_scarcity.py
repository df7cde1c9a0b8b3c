"""When descriptors run out: an error that says so, nobody taken for dead, and all goes on once there are some."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioarena import HandleError, NoSpaceError, Receiver, Sender, blocking
from aioarena._platform import memory
from aioarena._platform.memory import Segment, sweep
from aioarena._platform.process import ProcessIdentity, describe_state, require_descriptors
from tests.conftest import RING_BYTES

SMALL: dict[str, Any] = {"arena": None, "ring_bytes": RING_BYTES}


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """So many more can be opened inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@contextlib.contextmanager
def limited(limit: int, to: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (to, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


@pytest.mark.parametrize("left", range(12))
async def test_an_end_that_finds_too_few_descriptors(left: int) -> None:
    """libzmq would end the process."""
    with descriptors_left(left), pytest.raises(NoSpaceError, match=rf"^{left} file descriptors are left") as caught:
        Sender(1, **SMALL)
    assert caught.value.available == left
    assert caught.value.needed > left
    async with Sender(1, **SMALL) as sender:
        receiver = Receiver(sender.handle, 0)
        with descriptors_left(left), pytest.raises(NoSpaceError, match="ulimit -n"):
            await receiver.start()
        late = Sender(1, **SMALL)
        with descriptors_left(left), pytest.raises(NoSpaceError, match="ulimit -n"):
            await late.start()
        async with Receiver(sender.handle, 0) as receiver:
            await sender.send(1)
            assert await receiver.recv() == 1


@pytest.mark.parametrize("left", range(4))
def test_a_blocking_end_that_finds_too_few_descriptors(left: int) -> None:
    """Its loop needs some before anything else does."""
    with blocking.Sender(1, **SMALL) as sender:
        for end in (blocking.Receiver(sender.handle, 0), blocking.Sender(1, **SMALL)):
            with descriptors_left(left), pytest.raises(NoSpaceError, match="ulimit -n"):
                end.start()
            end.start()  # it may be tried again
            end.close()


def test_enough_descriptors_are_none_taken() -> None:
    before = len(os.listdir("/proc/self/fd"))
    require_descriptors(100)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_sender_without_descriptors_refuses_and_admits_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is told, instead of waiting for ever."""
    async with Sender(1, **SMALL) as sender:
        open_pidfd = ProcessIdentity.open_pidfd
        calls = 0

        def fails_for_the_sender(self: ProcessIdentity) -> int | None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return open_pidfd(self)

        monkeypatch.setattr(ProcessIdentity, "open_pidfd", fails_for_the_sender)
        with pytest.raises(HandleError, match="for lack of descriptors"):
            await Receiver(sender.handle, 0).start()
        async with Receiver(sender.handle, 0) as receiver:
            await sender.send(1)
            assert await receiver.recv() == 1


def test_what_cannot_be_looked_at_is_not_dead(tmp_path: Path) -> None:
    """Sockets and segments of living channels are not swept for want of a descriptor to ask who owns them."""
    me = ProcessIdentity.current()
    living = tmp_path / f"aioarena-{me.pid_namespace}-{me.pid}-{me.start_ticks}-0badcafe.sock"
    dead = tmp_path / f"aioarena-{me.pid_namespace}-{me.pid}-{me.start_ticks + 1}-0badcafe.sock"
    for path in (living, dead):
        path.touch()
    for left in range(4):
        with descriptors_left(left):
            sweep(tmp_path)
        assert living.exists()
    with descriptors_left(0):
        with pytest.raises(OSError, match="Too many open files"):
            _ = me.alive
        with pytest.raises(OSError, match="Too many open files"):
            me.open_pidfd()
        assert "could not be read (Too many open files)" in describe_state(me.pid)
    sweep(tmp_path)
    assert living.exists()
    assert not dead.exists()


@pytest.mark.parametrize("backing", ["memfd", "shm"])
def test_a_limit_of_the_process_is_named(backing: str) -> None:
    """Address space and file size, each with its number and what raises it."""
    make = {"memfd": Segment.memfd, "shm": Segment.shm}[backing]
    names = {path.name for path in memory.SHM_DIRECTORY.iterdir()}
    with limited(resource.RLIMIT_FSIZE, 1 << 20), pytest.raises(NoSpaceError, match=r"1\.0 MiB.*ulimit -f") as caught:
        make("limited", 1 << 21)
    assert (caught.value.needed, caught.value.available) == (1 << 21, 1 << 20)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with limited(resource.RLIMIT_AS, in_use + (64 << 20)), pytest.raises(NoSpaceError, match="ulimit -v"):
        make("limited", 1 << 30)
    # Also while the error is there, and with it the frames in which it was raised.
    assert {path.name for path in memory.SHM_DIRECTORY.iterdir() if "limited" in path.name} <= names
