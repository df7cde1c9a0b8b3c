"""A process that makes the namespaces of one host and keeps them until its stdin closes. Run as a script of its own.

It says the pid whose namespaces they are. With an argument, a directory, the host has memory of its own: a pid namespace
with its /proc, and an empty /dev/shm and directory. All that runs there is killed with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

# From linux/sched.h and linux/mount.h.
_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18


def _libc(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def main(directory: str | None) -> None:
    # Ctrl-C is for the tests to hear.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc("unshare", _CLONE_NEWNET | (_CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID if directory else 0))
    # Nothing on the wires but what the tests send.
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    if directory is None:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        return
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        # The init of the host: who is orphaned there comes to it.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _libc("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _libc("mount", b"proc", b"/proc", b"proc", 0, None)
        _libc("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
        _libc("mount", b"tmpfs", os.fsencode(directory), b"tmpfs", 0, None)
        os.write(told, b"!")
    else:
        os.close(told)
        if os.read(ready, 1) == b"!":
            print(pid, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
