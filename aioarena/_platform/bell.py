"""A bell: what wakes a parked reader directly, instead of through the I/O threads of two ZMQ sockets.

It is a pipe that the reader makes. The sender opens its other end through ``/proc/<pid>/fd``, so nothing of it has a name
that could be left behind, and each seating has a bell of its own: no byte meant for a reader reaches its successor. Ringing
is one system call, and so is falling silent. What it says is as little as a ZMQ wake-up says: look at the ring.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

# A ring is one byte, and no pipe has more room than this unless somebody asks for it (pipe(7)).
_ALL = 64 << 10


@dataclass(frozen=True, slots=True)
class BellRef:
    """Where a reader's bell is: a descriptor of its process, and the inode of the pipe. (0, 0) for none."""

    fd: int
    inode: int


NO_BELL = BellRef(0, 0)


class Bell:
    """The reader's end."""

    def __init__(self) -> None:
        # Our own writing end keeps the pipe from ever looking ended to us.
        self.fd, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pid = os.getpid()
        self.ref = BellRef(self.fd, os.fstat(self.fd).st_ino)

    def silence(self) -> None:
        """Take in all that was rung, so that the descriptor is readable again only after the next ring."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, _ALL)

    def close(self) -> None:
        if self.fd >= 0 and self._pid == os.getpid():
            os.close(self.fd)
            os.close(self._writing)
            self.fd = -1


class BellRope:
    """The sender's end.

    Raises:
        OSError: There is no such bell, or no descriptor is left.
    """

    def __init__(self, pid: int, ref: BellRef) -> None:
        # For reading, too, which we never do: a pipe that nobody reads would end our process with SIGPIPE, where a program
        # has given that its default action.
        self._fd = os.open(f"/proc/{pid}/fd/{ref.fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != ref.inode:
            os.close(self._fd)
            raise FileNotFoundError(f"descriptor {ref.fd} of process {pid} is not the bell it said")

    def ring(self) -> None:
        # Full: it has not heard the last ones yet, and will; or it is gone, which others notice.
        with contextlib.suppress(BlockingIOError):
            os.write(self._fd, b"\0")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
