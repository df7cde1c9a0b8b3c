"""Who a process is, and whether it lives. A pid alone is no identity: pids are reused."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

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
        """Whether it is known to be alive; of an invisible process, True."""
        if not self.visible:
            return True
        return start_ticks(self.pid) == self.start_ticks and process_state(self.pid) not in ("Z", "X")

    def open_pidfd(self) -> int | None:
        """A descriptor that becomes readable when the process dies.

        Returns:
            The descriptor; None where pids of that process mean nothing here.

        Raises:
            ProcessLookupError: It is dead already.
        """
        if not self.visible:
            return None
        pidfd = os.pidfd_open(self.pid)
        # Compared after opening: if the pid was reused before, the start time differs; if the process dies from here
        # on, the descriptor says so.
        if start_ticks(self.pid) != self.start_ticks:
            os.close(pidfd)
            raise ProcessLookupError(f"process {self.pid} is another one by now")
        return pidfd


def own_pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _stat_fields(pid: int | str) -> list[str] | None:
    with contextlib.suppress(OSError):
        # The command name in field 2 may hold spaces and parentheses, so split after its last one.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text[text.rindex(")") + 2 :].split()
    return None


def start_ticks(pid: int | str) -> int | None:
    """Start time of a process in clock ticks since boot, None if there is none with that pid."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int) -> str | None:
    """The one-letter state of /proc/<pid>/stat, None if there is no such process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def describe_state(pid: int) -> str:
    """The state in words, for log lines."""
    state = process_state(pid)
    return "gone" if state is None else _STATES.get(state, state)


def exit_signal(pidfd: int) -> int | None:
    """Signal that killed the process behind a pidfd, if it is our child and was killed. Does not reap it."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # not our child, or reaped by now
        return None
    if result is None or result.si_code not in (os.CLD_KILLED, os.CLD_DUMPED):
        return None
    return result.si_status
