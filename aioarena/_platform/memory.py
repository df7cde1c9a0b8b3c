"""Shared segments: created by the sender, attached by readers, verified on both sides.

``memfd`` segments have no name in any file system: readers open ``/proc/<pid>/fd/<n>`` of the sender. They vanish with
the last process that maps them, are not bounded by the size of /dev/shm, and are sealed against shrinking, so nobody can
cut the memory away under a reader. ``shm`` segments are files in /dev/shm, for processes that do not see each
other's /proc; see :class:`Segment` for when they vanish.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import secrets
import stat
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from aioarena._platform.process import ProcessIdentity, own_pid_namespace
from aioarena.exceptions import HandleError, NoSpaceError

SHM_DIRECTORY = Path("/dev/shm")

# From linux/fcntl.h; the fcntl module has them from Python 3.9 on, but mypy's stubs not everywhere.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Names of what we leave in shared directories: who made it, in which pid namespace, so that a sweep can prove him dead.
_OWNED_NAME = re.compile(r"aioarena-(?P<ns>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+\.(?:control|arena|sock)")


def owned_name(suffix: str) -> str:
    """A fresh file name that says which process it belongs to; suffix is ``control``, ``arena`` or ``sock``."""
    me = ProcessIdentity.current()
    return f"aioarena-{me.pid_namespace}-{me.pid}-{me.start_ticks}-{secrets.token_hex(4)}.{suffix}"


def sweep(directory: Path, *, dry: bool = False) -> list[str]:
    """Remove what processes of this user left behind that are provably dead. Never raises.

    A file stays if its owner lives, runs in another pid namespace, or is another user.

    Args:
        directory: Where to look.
        dry: Only look.

    Returns:
        The names that were removed, or would have been.
    """
    removed = []
    with contextlib.suppress(OSError):
        namespace = own_pid_namespace()
        for entry in os.scandir(directory):
            match = _OWNED_NAME.fullmatch(entry.name)
            if match is None or int(match["ns"]) != namespace:
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                    continue
                if ProcessIdentity(int(match["pid"]), int(match["start"]), namespace).alive:
                    continue
                if not dry:
                    os.unlink(entry.path)
                removed.append(entry.name)
    return removed


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """What another process needs to attach a segment and to know that it is the right one.

    Attributes:
        path: Where to open it.
        fallback: Where to open it once ``path`` is unlinked, or None.
        device: st_dev of the file.
        inode: st_ino of the file.
        nbytes: Its exact size.
        sealed: Whether it must be sealed against shrinking (memfd).
    """

    path: str
    fallback: str | None
    device: int
    inode: int
    nbytes: int
    sealed: bool


class Pin(Enum):
    """Whether a mapping is registered with the accelerator as pinned memory."""

    NO = "no"  # not tried: there was no context so far, or nobody asked
    PENDING = "pending"
    YES = "yes"
    FAILED = "failed"


class Mapping:
    """A shared mapping, alive as long as anything refers to it: it is never unmapped by hand.

    Whatever is built over ``address`` has to keep a reference to this object; then no view can outlive the memory.

    Attributes:
        address: Address of its first byte.
        nbytes: Its size.
        view: The whole mapping as writable bytes.
        memory: What keeps the memory mapped.
        pin: Whether the accelerator knows this memory as pinned.
    """

    __slots__ = ("__weakref__", "address", "memory", "nbytes", "pin", "view")

    def populate(self, start: int, stop: int, *, write: bool) -> None:
        """Have memory behind some bytes and mapped here, for reading or for writing too. Takes long, without the GIL.

        Raises:
            OSError: The kernel cannot (before Linux 5.14), or has no memory.
        """
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        if _madvise(self.address + start, stop - start, advice):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def protect(self) -> None:
        """Make it read-only here: whoever writes is ended by SIGSEGV. For good, and for all that share this mapping."""
        if _mprotect(self.address, self.nbytes, mmap.PROT_READ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def __init__(self, fd: int, nbytes: int) -> None:
        self.memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.nbytes = nbytes
        self.pin = Pin.NO


# From linux/mman.h. By ctypes, because mmap.madvise keeps the GIL meanwhile.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mprotect = _libc.mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


# Mappings attached in this process by (device, inode), so that several readers of one arena share one mapping and pin
# it once. The lock guards attach only, never a finalizer.
_attached: weakref.WeakValueDictionary[tuple[int, int], Mapping] = weakref.WeakValueDictionary()
_attach_lock = threading.Lock()


def _renew_lock() -> None:
    global _attach_lock
    _attach_lock = threading.Lock()


# A thread of the parent may hold it while another forks, and would never let it go in the child.
os.register_at_fork(after_in_child=_renew_lock)


class Segment:
    """A segment that this process created. Closes itself when it is collected, so a failed start leaves nothing.

    A ``shm`` segment keeps its name until :meth:`unlink`, which the sender calls as soon as all readers are in, and at
    the latest at close; a sender that is killed before leaves it for the next :func:`sweep`. Its memory is taken from
    /dev/shm piece by piece with :meth:`reserve`, so that a full /dev/shm is an error here and not a SIGBUS later.
    """

    def __init__(self, fd: int, path: Path | None, nbytes: int) -> None:
        self._fd = fd
        self._path = path
        self._pid = os.getpid()
        self._reserved = 0
        self._reserving = threading.Lock()  # of reserve and give_back, each in some thread
        self.nbytes = nbytes
        self.mapping: Mapping

    @classmethod
    def memfd(cls, name: str, nbytes: int) -> Segment:
        """Create an anonymous segment, zeroed, of this user only."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        segment = cls(fd, None, nbytes)
        with segment._closed_on_error(), _limits_explained(nbytes):
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            segment.mapping = Mapping(fd, nbytes)
        return segment

    @classmethod
    def shm(cls, suffix: str, nbytes: int, directory: Path | None = None) -> Segment:
        """Create a file segment in /dev/shm, zeroed, mode 0600."""
        path = (directory or SHM_DIRECTORY) / owned_name(suffix)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        segment = cls(fd, path, nbytes)
        with segment._closed_on_error(), _limits_explained(nbytes):
            os.ftruncate(fd, nbytes)
            segment.mapping = Mapping(fd, nbytes)
        return segment

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        # At once: the frames of an error refer to it, and may be in a cycle or kept.
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def ref(self) -> SegmentRef:
        status = os.fstat(self._fd)
        descriptor = f"/proc/{self._pid}/fd/{self._fd}"
        return SegmentRef(
            path=str(self._path) if self._path else descriptor,
            fallback=descriptor if self._path else None,
            device=status.st_dev,
            inode=status.st_ino,
            nbytes=self.nbytes,
            sealed=self._path is None,
        )

    @property
    def has_quota(self) -> bool:
        """Whether memory has to be reserved before it is touched: in /dev/shm, not in a memfd."""
        return self._path is not None

    def needs_reserve(self, end: int) -> bool:
        """Whether bytes below ``end`` have no memory behind them for certain. Never for memfd, which has no quota."""
        return self._path is not None and end > self._reserved

    def reserve(self, end: int) -> None:
        """Take memory for all bytes below ``end``. May take long: call it off the loop.

        Raises:
            NoSpaceError: The file system is full.
        """
        with self._reserving:
            if not self.needs_reserve(end):
                return
            try:
                os.posix_fallocate(self._fd, self._reserved, end - self._reserved)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                needed, free = end - self._reserved, _free_bytes(SHM_DIRECTORY)
                raise NoSpaceError(
                    f"/dev/shm is full: {_size(needed)} more needed, {_size(free)} free; raise --shm-size, "
                    'pass a smaller arena, or use backing="memfd"',
                    needed=needed,
                    available=free,
                ) from None
            self._reserved = end

    def give_back(self, start: int, stop: int) -> None:
        """Give the memory behind some bytes back to the system; they read as zero afterwards. Takes a while.

        Raises:
            OSError: The file system cannot.
        """
        with self._reserving:
            self._reserved = min(self._reserved, start)
            if _fallocate(self._fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, stop - start):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))

    @property
    def in_memory(self) -> int:
        """Bytes that have memory behind them."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def reserved(self) -> int:
        """Bytes from the start that are known to have memory behind them, for a shm segment."""
        return self._reserved

    def __del__(self) -> None:
        self.close()

    def unlink(self) -> None:
        """Remove the name of a shm segment. Whoever is attached keeps the memory. Only its creator does, once."""
        if self._path is not None and self._pid == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def close(self) -> None:
        """Give up name, descriptor and mapping. The memory lives on as long as something else refers to the mapping."""
        if getattr(self, "_fd", -1) < 0:  # also after a failed construction
            return
        self.unlink()
        os.close(self._fd)
        self._fd = -1
        # A closed sender that somebody still holds must not hold gigabytes.
        self.__dict__.pop("mapping", None)


@contextlib.contextmanager
def _limits_explained(nbytes: int) -> Iterator[None]:
    """Say of a process limit that is too low for a segment which it is."""
    try:
        yield
    except OSError as error:
        limits = {
            errno.ENOMEM: (resource.RLIMIT_AS, "address space", "ulimit -v"),
            errno.EFBIG: (resource.RLIMIT_FSIZE, "file size", "ulimit -f"),
        }
        if error.errno not in limits:
            raise
        limit, what, remedy = limits[error.errno]
        soft = resource.getrlimit(limit)[0]
        raise NoSpaceError(
            f"a segment of {_size(nbytes)} cannot be mapped ({error.strerror}); the limit of {what} of this process is "
            f"{'not set' if soft == resource.RLIM_INFINITY else _size(soft)}: raise it ({remedy}) or pass a smaller "
            "ArenaConfig(slots=..., slot_bytes=...)",
            needed=nbytes,
            available=max(0, soft),
        ) from error


def attach(ref: SegmentRef) -> Mapping:
    """Map a segment of another process.

    Raises:
        FileNotFoundError: It is not there (any more), as seen from this process.
        PermissionError: It belongs to another user.
        HandleError: What is there is another file, has another size, or is not sealed.
    """
    with _attach_lock:
        known = _attached.get((ref.device, ref.inode))
        if known is not None and known.nbytes == ref.nbytes:
            return known
        fd = _open(ref)
        try:
            with _limits_explained(ref.nbytes):
                mapping = Mapping(fd, ref.nbytes)
        finally:
            os.close(fd)
        _attached[ref.device, ref.inode] = mapping
        return mapping


# What opening says of things that a descriptor's number may mean once the segment is closed: sockets, directories ...
_OPENS_NO_SEGMENT = (errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EROFS, errno.ETXTBSY)


def _open(ref: SegmentRef) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    fd = -1
    for path in filter(None, (ref.path, ref.fallback)):
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in _OPENS_NO_SEGMENT:
                raise
            problem: tuple[str, object, object] = "type", "a memory file", error.strerror
        else:
            found = _mismatch(fd, ref)
            if found is None:
                return fd
            os.close(fd)
            problem = found
        raise HandleError(
            f"{path} is not the segment the handle names: {problem[0]} is {problem[2]}, expected {problem[1]}; the "
            "sender is gone or runs in another container, make a new handle",
            expected=problem[1],
            found=problem[2],
        )
    raise FileNotFoundError(errno.ENOENT, "segment not found", ref.path)


def _mismatch(fd: int, ref: SegmentRef) -> tuple[str, object, object] | None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "type", "a memory file", "something else"
    found = (status.st_dev, status.st_ino)
    if found != (ref.device, ref.inode):
        return "inode", (ref.device, ref.inode), found
    if status.st_size != ref.nbytes:
        return "size", ref.nbytes, status.st_size
    if ref.sealed and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        return "seals", "sealed against shrinking", "not sealed"
    return None


# Is the memory there? --------------------------------------------------------------------------------------------


def require_memory(nbytes: int, *, on_shm: bool, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
    """Check that a channel of ``nbytes`` in all its segments could be backed by memory, now.

    Raises:
        NoSpaceError: It could not; the message names the limit, both numbers and the remedy.
    """
    if on_shm:
        free = _free_bytes(SHM_DIRECTORY)
        if free < nbytes:
            raise NoSpaceError(
                f"the channel needs {_size(nbytes)}, /dev/shm has {_size(free)} free; raise --shm-size (docker) or the "
                'size of the emptyDir (Kubernetes), pass a smaller ArenaConfig, or use backing="memfd"',
                needed=nbytes,
                available=free,
            )
    for name, left in (("the memory cgroup", cgroup_headroom(proc, cgroup)), ("the machine", available_memory(proc))):
        if left is not None and left < nbytes:
            raise NoSpaceError(
                f"the channel may use up to {_size(nbytes)}, {name} has {_size(left)} left; raise the memory limit or "
                "pass a smaller ArenaConfig(slots=..., slot_bytes=...) or arena=None",
                needed=nbytes,
                available=left,
            )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def available_memory(proc: Path = Path("/proc")) -> int | None:
    """MemAvailable of /proc/meminfo in bytes, None where it is not readable."""
    with contextlib.suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def cgroup_headroom(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes this process may still use before a memory cgroup's limit, None without a limit. Knows v2 and v1."""
    with contextlib.suppress(OSError, ValueError):
        lefts = []
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, limit, usage, cache = cgroup, "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                root, limit, usage = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cache = "total_inactive_file"
            else:
                continue
            # A limit of any ancestor binds. Inside a container the path may not exist below the mount: then only the
            # mount's own files count.
            group = root / path.lstrip("/")
            for directory in (group, *group.parents):
                lefts.append(_headroom_of(directory, limit, usage, cache))
                if directory == root:
                    break
        known = [left for left in lefts if left is not None]
        return max(0, min(known)) if known else None
    return None


def _headroom_of(directory: Path, limit: str, usage: str, cache: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        maximum = int((directory / limit).read_text())  # "max" is no number: no limit here
        # v1 says "no limit" with a number near 2**63.
        if maximum < 1 << 60:
            used = int((directory / usage).read_text())
            return maximum - used + _statistic(directory / "memory.stat", cache)
    return None


def _statistic(path: Path, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == field:
                return int(value)
    return 0


# Small helpers ----------------------------------------------------------------------------------------------------


def close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def address_of(buffer: memoryview) -> int:
    """Address of the first byte of a writable buffer of at least one byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
