"""Scripts that first move their process elsewhere: to other mounts, another pid namespace, another user."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import aioarena
from aioarena import sender as sender_module
from aioarena._platform.process import ProcessIdentity
from tests.multiprocess.harness import Link, run_coroutine
from tests.multiprocess.messages import message, verify

# From linux/sched.h and linux/mount.h.
_CLONE_NEWNS = 0x00020000
_CLONE_NEWPID = 0x20000000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18

NOBODY = 65534
SHM = Path("/dev/shm")
MIB = 1 << 20


def _libc(name: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _own_mounts(shm_bytes: int | None) -> None:
    """Move to a mount namespace of its own, with an empty /dev/shm of a size."""
    _libc("unshare", _CLONE_NEWNS)
    _libc("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    if shm_bytes is not None:
        _libc("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={shm_bytes}".encode())


def may_unshare(link: Link) -> bool:
    """Whether this process may make namespaces; it has made some if so."""
    try:
        _libc("unshare", _CLONE_NEWNS | _CLONE_NEWPID)
    except OSError:
        return False
    return True


def with_own_shm(link: Link, script: Callable[..., Any], shm_bytes: int, *args: Any, **options: Any) -> Any:
    """Run a script where /dev/shm is a tmpfs of so many bytes."""
    _own_mounts(shm_bytes)
    outcome = script(link, *args, **options)
    return run_coroutine(outcome, "asyncio") if asyncio.iscoroutine(outcome) else outcome


def with_own_pids(link: Link, own_proc: bool, script: Callable[..., Any], *args: Any) -> str:
    """Run a coroutine script in a child that begins a new pid namespace. Its pid, as seen from here, is said first.

    Args:
        link: To the test.
        own_proc: Whether /proc shows that namespace, as in a container, or still the old one.
        script: What to run; what it returns is said.
        args: Of the script.
    """
    _libc("unshare", _CLONE_NEWNS | _CLONE_NEWPID)
    _libc("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    go_on, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_on, 1)
        if own_proc:
            _libc("mount", b"proc", b"/proc", b"proc", 0, None)
        else:
            _become_unknown()
        try:
            link.put(run_coroutine(script(link, *args), "asyncio"))
        except BaseException as error:
            link.put(f"{type(error).__name__}: {error}")
        os._exit(0)
    link.put(pid)
    os.write(told, b"!")
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return "its child has ended"


def _become_unknown() -> None:
    """Go on in a child whose pid means no process in the /proc that is mounted here."""
    while Path(f"/proc/{os.getpid()}").exists():
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            os._exit(0)


def as_nobody(link: Link, script: Callable[..., Any], *args: Any) -> Any:
    """Run a coroutine script as another user."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return run_coroutine(script(link, *args), "asyncio")


# In a small /dev/shm -----------------------------------------------------------------------------------------------------


def _listing() -> list[str]:
    return sorted(path.name for path in SHM.iterdir())


def _fill(leave: int) -> None:
    """Fill /dev/shm until so many bytes are left."""
    free = os.statvfs(SHM)
    with open(SHM / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave)


def too_small(link: Link, leave: int | None, **options: Any) -> Any:
    """Make a channel that does not fit: the error, and what it left."""
    if leave is not None:
        _fill(leave)
    before = _listing()
    try:
        aioarena.Sender(1, backing="shm", **options)
    except OSError as error:
        found = (type(error).__name__, str(error), error.needed, error.available)  # type: ignore[attr-defined]
    else:
        raise AssertionError("it was made")
    return found, before == _listing()


def taken_in_between(link: Link) -> Any:
    """Memory that was there when it was looked at, and is taken before it can be reserved: the error, and what it left."""
    sender_module.require_memory = lambda *args, **options: None
    return too_small(link, None, arena=None)


async def written_to_the_last_slot(link: Link, fill_after: bool) -> Any:
    """Write every slot of an arena, perhaps in a /dev/shm that somebody filled after the channel was made."""
    arena = aioarena.ArenaConfig(slots=32, slot_bytes=1 << 20)
    sender = aioarena.Sender(1, backing="shm", arena=arena, ring_bytes=1 << 20)
    async with sender as chan, aioarena.Receiver(sender.handle, 0) as reader:
        if fill_after:
            _fill(leave=10 * MIB)
        held = []
        for number in range(32):
            tensor = torch.full((1 << 18,), number, dtype=torch.int32)
            if number % 2:
                await chan.send(tensor)
            else:
                chan.send_nowait(tensor)
            held.append(await reader.recv())
        intact = all(bool((tensor == number).all()) for number, tensor in enumerate(held))
        statistics = chan.statistics()
        held.clear()
        await chan.send(torch.ones(1 << 18, dtype=torch.int32))
        intact = intact and int((await reader.recv()).sum()) == 1 << 18
        return intact, statistics.slots_used, statistics.fallbacks["arena_full"]


async def after_a_death(link: Link, dead: ProcessIdentity) -> Any:
    """What the dead left fills /dev/shm: a start removes it before it looks whether there is room."""
    name = f"aioarena-{dead.pid_namespace}-{dead.pid}-{dead.start_ticks}-0badcafe.arena"
    with open(SHM / name, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 50 * MIB)
    sender = aioarena.Sender(1, backing="shm", arena=aioarena.ArenaConfig(slots=32, slot_bytes=MIB))
    async with sender as chan, aioarena.Receiver(sender.handle, 0) as reader:
        await chan.send(message("arena", 1))
        received = verify(await reader.recv())
    return received, _listing()


def reserved_only(link: Link) -> Any:
    """A channel of which nothing has been used: bytes taken from /dev/shm, and kept by this process."""
    free = os.statvfs(SHM)
    big = aioarena.ArenaConfig(slots=1024)
    kept = [aioarena.Sender(2, arena=big, backing="shm"), aioarena.Sender(2, arena=big)]
    taken = (free.f_bavail - os.statvfs(SHM).f_bavail) * free.f_frsize
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem"))
    del kept
    return taken, resident


# Elsewhere ---------------------------------------------------------------------------------------------------------------


async def planted(link: Link, handle: aioarena.Handle) -> str:
    """Attach where another file has the name and size of the segment."""
    for ref in (handle.control, handle.arena):
        assert ref is not None
        with open(ref.path, "wb") as file:
            os.truncate(file.fileno(), ref.nbytes)
    try:
        await aioarena.Receiver(handle, 0).start()
    except aioarena.ArenaError as error:
        return f"{type(error).__name__}: {error}"
    return "attached"


async def attach_and_receive(link: Link, handle: aioarena.Handle, rank: int) -> Any:
    """Attach, say so, receive until something ends it: the numbers, and what ended it."""
    numbers: list[int] = []
    try:
        async with asyncio.timeout(10):
            chan = aioarena.Receiver(handle, rank)
            await chan.start()
            link.put("joined")
        async with contextlib.aclosing(chan):
            while True:
                numbers.append(verify(await chan.recv()))
    except (aioarena.ArenaError, TimeoutError) as error:
        return numbers, type(error).__name__, str(error)


def end(link: Link, pid: int) -> None:
    """Kill a process."""
    os.kill(pid, signal.SIGKILL)
