"""What this machine allows: each thing that a channel needs or is faster with, tried out where that can be done."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

from aioarena._core import words
from aioarena._platform import accelerator, memory, support
from aioarena._platform.process import ProcessIdentity
from aioarena._platform.wire import new_address
from aioarena._types import DEFAULT_RING_BYTES, ArenaConfig
from aioarena.exceptions import ArenaError

OK, WARN, FAIL = "ok", "warn", "fail"

# What a channel with default sizes may use, and descriptors that a process with a few channels needs. The second is a
# guess, well below any usual limit.
_CHANNEL_BYTES = DEFAULT_RING_BYTES + ArenaConfig().capacity
_DESCRIPTORS = 256

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

# Pinned for a trial: more than the 64 KiB that old systems allow a user to lock. A guess.
_PINNED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        what: What was looked at.
        grade: ``ok``, ``warn`` (it works, but not for everything, or more slowly) or ``fail`` (no channel can be made).
        found: What was found.
        remedy: What to do about it, or what could be had besides; empty if there is nothing to do.
    """

    what: str
    grade: str
    found: str
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything, one after the other. Never raises: what cannot be found out is a finding too."""
    for check in _CHECKS:
        try:
            yield check()
        except Exception as error:
            yield Finding(check.__name__.strip("_").replace("_", " "), WARN, f"could not be found out: {error!r}")


def _system() -> Finding:
    about = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    try:
        support.check()
    except ImportError as error:
        return Finding("system", FAIL, about, str(error))
    return Finding("system", OK, about)


def _memfd() -> Finding:
    try:
        segment = memory.Segment.memfd("aioarena-doctor", mmap.PAGESIZE)
    except OSError as error:
        return Finding("memfd", FAIL, f"anonymous shared memory: {error.strerror}", 'use backing="shm"')
    try:
        mapping = memory.attach(segment.ref)
        grown = _refuses(lambda: os.ftruncate(segment._fd, 0))
        del mapping
    except (OSError, ArenaError) as error:
        return Finding(
            "memfd",
            FAIL,
            f"made, but not attached through /proc: {error}",
            "mount /proc, and run all processes as one user",
        )
    finally:
        segment.close()
    if not grown:
        return Finding("memfd", WARN, "made, but seals do not hold", 'a newer kernel, or backing="shm"')
    return Finding("memfd", OK, "made, sealed, attached through /proc")


def _refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return True
    return False


def _pidfd() -> Finding:
    try:
        pidfd = ProcessIdentity.current().open_pidfd()
    except OSError as error:
        return Finding(
            "pidfd", FAIL, f"cannot be opened: {error.strerror}", "Linux 5.3 or later; or allow pidfd_open in seccomp"
        )
    assert pidfd is not None
    os.close(pidfd)
    return Finding("pidfd", OK, "deaths are noticed at once")


def _populate() -> Finding:
    segment = memory.Segment.memfd("aioarena-doctor", mmap.PAGESIZE)
    try:
        segment.mapping.populate(0, mmap.PAGESIZE, write=True)
    except OSError as error:
        return Finding("populate", WARN, f"MADV_POPULATE_WRITE: {error.strerror}", "Linux 5.14 or later for prefault=")
    finally:
        segment.close()
    return Finding("populate", OK, "prefault= works")


def _fence() -> Finding:
    if words.fence_kind() == "libatomic":
        return Finding("fence", OK, "libatomic")
    if words.FENCES:
        return Finding("fence", OK, "a lock, which is a full fence on this CPU")
    return Finding("fence", WARN, "a lock, which is no full fence by this CPU's memory model", "install libatomic.so.1")


def _free_memory() -> Finding:
    lefts = {"machine": memory.available_memory(), "cgroup": memory.cgroup_headroom()}
    known = {where: left for where, left in lefts.items() if left is not None}
    found = ", ".join(f"{_size(left)} left in the {where}" for where, left in known.items()) or "unknown"
    if "cgroup" not in known:
        found += ", no limit by a cgroup"
    if known and min(known.values()) < _CHANNEL_BYTES:
        return Finding(
            "memory",
            WARN,
            found,
            f"a default channel may use {_size(_CHANNEL_BYTES)}: raise the limit, or pass a smaller arena",
        )
    return Finding("memory", OK, found)


def _shared_memory_mount() -> Finding:
    status = os.statvfs(memory.SHM_DIRECTORY)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"/dev/shm: {_size(free)} of {_size(size)} free"
    if free < _CHANNEL_BYTES:
        return Finding(
            "/dev/shm",
            WARN,
            found,
            'too little for a default channel with backing="shm"; --shm-size, or an emptyDir of Memory',
        )
    return Finding("/dev/shm", OK, found + '; only backing="shm" uses it')


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _DESCRIPTORS:
        return Finding("descriptors", WARN, f"ulimit -n is {soft}", f"raise it to {_DESCRIPTORS} or more (at most {hard})")
    return Finding("descriptors", OK, f"ulimit -n is {'not set' if soft < 0 else soft}")


def _locked_memory() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"ulimit -l is {'not set' if soft < 0 else _size(soft)}"
    if accelerator.devices() and 0 <= soft < ArenaConfig().capacity:
        return Finding("locked memory", WARN, found, "some drivers count pinned memory: raise it if pinning fails")
    return Finding("locked memory", OK, found)


def _huge_pages() -> Finding:
    if not _SHMEM_ENABLED.exists():
        return Finding("huge pages", OK, "not for shared memory in this kernel")
    chosen = _SHMEM_ENABLED.read_text().partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        return Finding(
            "huge pages",
            OK,
            f"shmem_enabled is {chosen}: fresh pages cost more",
            f"for less, as root: echo within_size > {_SHMEM_ENABLED}; or ArenaConfig(prefault=...)",
        )
    return Finding("huge pages", OK, f"shmem_enabled is {chosen}")


def _sockets() -> Finding:
    if not zmq.has("ipc"):
        return Finding("sockets", FAIL, f"this ZMQ {zmq.zmq_version()} has no ipc://", "another build of pyzmq")
    try:
        address = new_address()
    except (OSError, ArenaError) as error:
        return Finding("sockets", FAIL, f"no directory for them: {error}", "set TMPDIR to a short path that is writable")
    return Finding("sockets", OK, f"in {os.path.dirname(address)}, ZMQ {zmq.zmq_version()}, pyzmq {zmq.__version__}")


def _loops() -> Finding:
    return Finding("event loops", OK, f"asyncio, uvloop {importlib.metadata.version('uvloop')}")


def _gpu() -> Finding:
    names = accelerator.devices()
    if not names:
        why = "a torch without CUDA" if torch.version.cuda is None else "no device"
        return Finding("CUDA", OK, f"torch {torch.__version__}, {why}: nothing is pinned, all works")
    return Finding("CUDA", OK, f"torch {torch.__version__}, {', '.join(names)}: readers pin the arena once they use it")


def _pinning() -> Finding:
    if not accelerator.devices():
        return Finding("pinning", OK, "no device, nothing to pin for")
    runtime = accelerator.current()
    device = runtime.current_device()
    segment = memory.Segment.memfd("aioarena-doctor", _PINNED_BYTES)
    try:
        problem = runtime.register(segment.mapping.address, _PINNED_BYTES, device)
        if problem is None:
            runtime.unregister(segment.mapping.address, device)
    finally:
        segment.close()
    if problem is not None:
        return Finding(
            "pinning",
            WARN,
            f"shared memory cannot be pinned: {problem}",
            "copies to the GPU are staged, and slower; raise ulimit -l (docker --ulimit memlock=-1)",
        )
    return Finding("pinning", OK, f"{_size(_PINNED_BYTES)} of shared memory pinned and let go")


def _numa() -> Finding:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    cpus = len(os.sched_getaffinity(0))
    if len(nodes) > 1:
        return Finding(
            "CPUs",
            OK,
            f"{cpus} in {len(nodes)} NUMA nodes: the arena lies where the sender first writes it; bind it near its GPUs",
        )
    return Finding("CPUs", OK, f"{cpus}, one NUMA node")


def _left_behind() -> Finding:
    left = [name for directory in directories() for name in memory.sweep(directory, dry=True)]
    if left:
        return Finding(
            "left behind", WARN, f"{len(left)} files of dead processes", "aioarena clean --yes, or start any sender"
        )
    return Finding("left behind", OK, "nothing of dead processes")


def directories() -> list[Path]:
    """Where dead processes of this user may have left something: shared memory, and the directories of sockets."""
    own = f"aioarena-{os.getuid()}"
    bases = {Path(tempfile.gettempdir()), Path("/tmp")}
    sockets = [
        path for base in sorted(bases) for path in sorted(base.glob(f"{own}*")) if path.is_dir() and not path.is_symlink()
    ]
    return [memory.SHM_DIRECTORY, *sockets]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


_CHECKS: list[Callable[[], Finding]] = [
    _system,
    _memfd,
    _pidfd,
    _populate,
    _fence,
    _free_memory,
    _shared_memory_mount,
    _descriptors,
    _locked_memory,
    _huge_pages,
    _sockets,
    _loops,
    _gpu,
    _pinning,
    _numa,
    _left_behind,
]
