"""Which channels there are, and how they are doing, seen from outside.

There is no registry: whoever takes part in a channel has its control segment open, and /proc shows it. The segment says the
rest. It is mapped read-only, so looking disturbs nobody; what is read is a moment's, and not of one moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aioarena._core.layout import ARENA_INODE, CLOSED, HEAD, PUBLISHED, SENDER_PARKED, SENDER_PID, Layout
from aioarena._platform.process import describe_state

_PROC = Path("/proc")
# What /proc calls the two kinds of control segments; a file's name goes once all readers are in.
_CONTROL = re.compile(r"(?:/memfd:aioarena-.*-control|.*/aioarena-\d+-\d+-\d+-[0-9a-f]+\.control)(?: \(deleted\))?")
_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True)
class ReaderView:
    """One rank.

    Attributes:
        rank: Its rank.
        pid: The process that has or had it; None before the first.
        seated: Whether it takes part now.
        parked: Whether it sleeps until something is sent.
        messages: Messages it received.
        messages_behind: Messages sent that it has not received.
        bytes_behind: Ring bytes sent that it has not received.
        process: What its process is doing.
    """

    rank: int
    pid: int | None
    seated: bool
    parked: bool
    messages: int
    messages_behind: int
    bytes_behind: int
    process: str


@dataclass(frozen=True, slots=True)
class ChannelView:
    """One channel, at one moment.

    Attributes:
        name: Its name, the first 48 bytes of it.
        pid: Process of the sender.
        process: What that is doing.
        backing: ``memfd`` or ``shm``.
        inode: Of its control segment, which tells channels of one name apart.
        closed: Whether the sender closed it in good order.
        waiting: Whether a send waits for readers.
        messages: Messages sent.
        ring_bytes: Capacity of the ring.
        arena_bytes: Capacity of the arena, 0 without one.
        arena_in_memory: Bytes of it that have memory behind them; None where its file was not found.
        readers: Each rank.
    """

    name: str
    pid: int
    process: str
    backing: str
    inode: int
    closed: bool
    waiting: bool
    messages: int
    ring_bytes: int
    arena_bytes: int
    arena_in_memory: int | None
    readers: tuple[ReaderView, ...]


class Channel:
    """A channel that was found; :meth:`view` looks at it again each time.

    Raises:
        ValueError: It is of another version of aioarena, or only being made; the message says so.
        OSError: It is gone, or it is another user's.
    """

    def __init__(self, path: Path, target: str) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.inode = status.st_ino
            if status.st_size < _HEADER_BYTES:
                raise ValueError("no channel, or one that is being made")
            self._mapping = mmap.mmap(file.fileno(), status.st_size, prot=mmap.PROT_READ)
        words = memoryview(self._mapping)[: status.st_size // 8 * 8].cast("Q")
        self._words = words
        self._layout = Layout.read(words)
        if self._layout.control_bytes > status.st_size:
            raise ValueError("its header does not fit its size")
        self._backing = "memfd" if target.startswith("/memfd:") else "shm"

    @property
    def pid(self) -> int:
        """Process of the sender."""
        return self._words[SENDER_PID]

    def view(self) -> ChannelView:
        words, layout = self._words, self._layout
        # Readers first: what they have received was sent before, so nobody is ahead of the sender.
        received = [words[layout.received(rank)] for rank in range(layout.readers)]
        tails = [words[layout.tail(rank)] for rank in range(layout.readers)]
        return ChannelView(
            name=layout.name(words),
            pid=self.pid,
            process=describe_state(self.pid),
            backing=self._backing,
            inode=self.inode,
            closed=words[CLOSED] == 1,
            waiting=words[SENDER_PARKED] != 0,
            messages=words[PUBLISHED],
            ring_bytes=layout.ring_bytes,
            arena_bytes=layout.arena_bytes,
            arena_in_memory=self._arena_in_memory() if layout.slots else 0,
            readers=tuple(self._reader(rank, received[rank], tails[rank]) for rank in range(layout.readers)),
        )

    def _reader(self, rank: int, received: int, tail: int) -> ReaderView:
        words, layout = self._words, self._layout
        pid = words[layout.seat_pid(rank)]
        seated = words[layout.seat(rank)] != 0
        return ReaderView(
            rank=rank,
            pid=pid or None,
            seated=seated,
            parked=seated and words[layout.parked + rank] != 0,
            messages=received,
            messages_behind=max(0, words[PUBLISHED] - words[layout.seat_number(rank)] - received) if seated else 0,
            bytes_behind=max(0, words[HEAD] - tail) if seated else 0,
            process=describe_state(pid) if pid else "awaited",
        )

    def _arena_in_memory(self) -> int | None:
        inode = self._words[ARENA_INODE]
        for path, target in _descriptors(self.pid):
            if "arena" in target:
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if status.st_ino == inode:
                        return status.st_blocks * 512
        return None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A channel that was found and cannot be looked at.

    Attributes:
        pid: A process that takes part in it.
        why: Why not.
    """

    pid: int
    why: str


def find() -> tuple[list[Channel], list[Unreadable]]:
    """All channels of processes that this user may look into, by name; and those of other versions."""
    found: dict[tuple[int, int], Channel] = {}
    refused: dict[tuple[int, int], Unreadable] = {}
    for pid in sorted(int(entry) for entry in os.listdir(_PROC) if entry.isdigit()):
        for path, target in _descriptors(pid):
            if _CONTROL.fullmatch(target) is None:
                continue
            with contextlib.suppress(OSError):
                status = path.stat()
                key = (status.st_dev, status.st_ino)
                if key in found or key in refused:
                    continue
                try:
                    found[key] = Channel(path, target)
                except ValueError as error:
                    refused[key] = Unreadable(pid, str(error))
    return sorted(found.values(), key=lambda channel: (channel.view().name, channel.inode)), list(refused.values())


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """Descriptors of a process and what they lead to; none if it is gone or another user's."""
    directory = _PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                yield directory / name, os.readlink(directory / name)
