"""Who a process is, and whether it lives."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from aioarena._platform.process import (
    ProcessIdentity,
    describe_state,
    exit_signal,
    own_pid_namespace,
    process_state,
    start_ticks,
)
from tests.multiprocess.harness import PATIENCE, eventually


class Child:
    """A forked child that waits to be killed. It stays a zombie until it is reaped."""

    def __init__(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()  # a child that a test lets die by SIGABRT has nothing to report
            while True:
                signal.pause()
        self.reaped = False

    @property
    def identity(self) -> ProcessIdentity:
        ticks = start_ticks(self.pid)
        assert ticks is not None
        return ProcessIdentity(self.pid, ticks, own_pid_namespace())

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> None:
        if not self.reaped:
            os.waitpid(self.pid, 0)
            self.reaped = True


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    if not child.reaped:
        os.kill(child.pid, signal.SIGKILL)
        child.reap()


def readable(fd: int, timeout: float = 0) -> bool:
    return bool(select.select([fd], [], [], timeout)[0])


def test_this_process() -> None:
    """It lives, it is visible to itself, and it stays the same."""
    me = ProcessIdentity.current()
    assert me.pid == os.getpid()
    assert me.visible
    assert me.alive
    assert me == ProcessIdentity.current()
    assert pickle.loads(pickle.dumps(me)) == me


def test_an_identity_from_a_thread() -> None:
    """Of the process, whichever thread asks."""
    found: list[ProcessIdentity] = []
    thread = threading.Thread(target=lambda: found.append(ProcessIdentity.current()))
    thread.start()
    thread.join()
    assert found == [ProcessIdentity.current()]


def test_alive_stopped_dead_reaped(child: Child) -> None:
    """A stopped process lives; a zombie does not; one that is gone neither."""
    identity = child.identity
    assert identity.alive
    os.kill(child.pid, signal.SIGSTOP)
    eventually(lambda: process_state(child.pid) == "T", "it does not stop")
    assert identity.alive
    assert describe_state(child.pid) == "stopped by a signal"
    child.kill()
    assert process_state(child.pid) == "Z"
    assert not identity.alive
    assert describe_state(child.pid) == "dead, not yet reaped by its parent"
    child.reap()
    assert not identity.alive
    assert start_ticks(child.pid) is None
    assert process_state(child.pid) is None
    assert describe_state(child.pid) == "gone"


def test_a_reused_pid_is_another_process(child: Child) -> None:
    """The start time is part of the identity."""
    identity = child.identity
    before = ProcessIdentity(identity.pid, identity.start_ticks - 1, identity.pid_namespace)
    assert before != identity
    assert not before.alive
    with pytest.raises(ProcessLookupError):
        before.open_pidfd()


def test_another_pid_namespace(child: Child) -> None:
    """Of a process whose pid means nothing here nothing is claimed: not dead, and no descriptor."""
    identity = child.identity
    elsewhere = ProcessIdentity(identity.pid, identity.start_ticks + 5, identity.pid_namespace + 1)
    assert not elsewhere.visible
    assert elsewhere.alive
    assert elsewhere.open_pidfd() is None


def test_pidfd_becomes_readable_at_death(child: Child) -> None:
    """Also before anybody has waited for the process, and for one that is a zombie already."""
    pidfd = child.identity.open_pidfd()
    assert pidfd is not None
    assert not readable(pidfd)
    child.kill()
    assert readable(pidfd, PATIENCE)
    of_a_zombie = child.identity.open_pidfd()
    assert of_a_zombie is not None
    assert readable(of_a_zombie)
    child.reap()
    assert readable(pidfd)
    for fd in (pidfd, of_a_zombie):
        os.close(fd)


def test_pidfd_of_the_gone(child: Child) -> None:
    """A process that is gone has none, and no descriptor is left by the attempt."""
    identity = child.identity
    child.kill()
    child.reap()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ProcessLookupError):
        identity.open_pidfd()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity(os.getpid(), 1, own_pid_namespace()).open_pidfd()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_the_signal_that_killed_a_child(child: Child, number: int) -> None:
    """Known without reaping the child, so that its parent can still wait for it; afterwards newer kernels tell."""
    pidfd = child.identity.open_pidfd()
    assert pidfd is not None
    assert exit_signal(pidfd) is None
    child.kill(number)
    assert exit_signal(pidfd) == number
    assert exit_signal(pidfd) == number
    _, status = os.waitpid(child.pid, 0)
    child.reaped = True
    assert os.WTERMSIG(status) == number
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert exit_signal(pidfd) == (number if release >= (6, 15) else None)
    os.close(pidfd)


def test_no_signal() -> None:
    """None for a child that exited, and for a process that is not a child."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        pidfd = os.pidfd_open(process.pid)
        assert readable(pidfd, PATIENCE)
        assert exit_signal(pidfd) is None
        os.close(pidfd)
    pidfd = os.pidfd_open(os.getppid())
    assert exit_signal(pidfd) is None
    os.close(pidfd)


def test_odd_names_of_commands() -> None:
    """The name of a command may hold anything, blanks and parentheses too."""
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') Z 1 (x'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_state(process.pid) in ("S", "R", "D")
        ticks = start_ticks(process.pid)
        assert ticks is not None and ticks >= ProcessIdentity.current().start_ticks
        process.communicate()
