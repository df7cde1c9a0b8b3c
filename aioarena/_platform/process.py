"""Who a process is, and whether it lives. A pid alone is no identity: pids are reused."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from aioarena.exceptions import NoSpaceError

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (disk or driver)",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, not yet reaped by its parent",
    "X": "dead",
    "I": "idle",
}


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told from every other that had or will have its pid.

    Attributes:
        pid: Its id, in its own pid namespace.
        start_ticks: When it started, in clock ticks since boot (field 22 of /proc/<pid>/stat).
        pid_namespace: Inode of its pid namespace; pids only mean something to processes in the same one.
    """

    pid: int
    start_ticks: int
    pid_namespace: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        # Not by the pid: the /proc mounted here may be of another pid namespace, where it means somebody else or nobody.
        ticks = start_ticks("self")
        assert ticks is not None, "/proc is not mounted"
        return cls(os.getpid(), ticks, own_pid_namespace())

    @property
    def visible(self) -> bool:
        """Whether the pid means the same process here as there."""
        return self.pid_namespace == own_pid_namespace()

    @property
    def alive(self) -> bool:
        """Whether it is known to be alive; of an invisible process, True. Raises as :func:`start_ticks`."""
        if not self.visible:
            return True
        return start_ticks(self.pid) == self.start_ticks and process_state(self.pid) not in ("Z", "X")

    def open_pidfd(self) -> int | None:
        """A descriptor that becomes readable when the process dies.

        Returns:
            The descriptor; None where pids of that process mean nothing here.

        Raises:
            ProcessLookupError: It is dead already.
            OSError: There is no descriptor left.
        """
        if not self.visible:
            return None
        pidfd = os.pidfd_open(self.pid)
        try:
            # Compared after opening: if the pid was reused before, the start time differs; if the process dies from here
            # on, the descriptor says so.
            if start_ticks(self.pid) != self.start_ticks:
                raise ProcessLookupError(f"process {self.pid} is another one by now")
        except BaseException:
            os.close(pidfd)
            raise
        return pidfd


@functools.cache
def clock_identity() -> str:
    """What is the same in two processes if their ``time.monotonic()`` is, and may be compared; "" if nobody knows.

    That is the boot of one host, seen from one time namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).hexdigest()


def own_pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _stat_fields(pid: int | str) -> list[str] | None:
    try:
        # The command name in field 2 may hold spaces and parentheses, so split after its last one.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None  # these two say that it is dead; any other error, as of too many open files, says nothing of it
    return text[text.rindex(")") + 2 :].split()


def start_ticks(pid: int | str) -> int | None:
    """Start time of a process in clock ticks since boot, None if there is none with that pid.

    Raises:
        OSError: /proc could not be read, e.g. for want of a descriptor.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int) -> str | None:
    """The one-letter state of /proc/<pid>/stat, None if there is no such process; raises as :func:`start_ticks`."""
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def describe_state(pid: int) -> str:
    """The state in words, for log lines."""
    try:
        state = process_state(pid)
    except OSError as error:
        return f"in a state that could not be read ({error.strerror})"
    return "gone" if state is None else _STATES.get(state, state)


def exit_signal(pidfd: int) -> int | None:
    """Signal that killed the process behind a pidfd, as far as it can be known. Does not reap it.

    Of our child until it is reaped; and of any process once its parent has reaped it, from Linux 6.15 on.
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # not our child, or reaped by now
        return _signal_of_reaped(pidfd)
    if result is None or result.si_code not in (os.CLD_KILLED, os.CLD_DUMPED):
        return None
    return result.si_status


# linux/pidfd.h: struct pidfd_info (its first version: mask first, exit code last), PIDFD_INFO_EXIT, PIDFD_GET_INFO.
_PIDFD_INFO = struct.Struct("=Q52xi")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


def _signal_of_reaped(pidfd: int) -> int | None:
    try:
        info = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    except OSError:  # an older kernel, or it is not reaped yet
        return None
    mask, status = _PIDFD_INFO.unpack(info)
    return os.WTERMSIG(status) if mask & _PIDFD_INFO_EXIT and os.WIFSIGNALED(status) else None


# Descriptors that one end takes at most when it starts, libzmq's context and two contexts of pyzmq included.
_DESCRIPTORS = 40


def require_descriptors(count: int = _DESCRIPTORS) -> None:
    """Check that descriptors are left. libzmq ends the whole process when it finds none.

    Raises:
        NoSpaceError: There are fewer.
    """
    got: list[int] = []
    try:
        while len(got) < count:
            got.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise NoSpaceError(
            f"{len(got)} file descriptors are left to this process ({error.strerror}), a channel needs up to {count}: "
            f"close some, or raise the limit of {limit} (ulimit -n)",
            needed=count,
            available=len(got),
        ) from None
    finally:
        for fd in got:
            os.close(fd)
