"""Which channels there are, and how they are doing, seen from outside.

There is no registry: whoever takes part in a channel has its control segment open, and /proc shows it; of processes that
/proc does not show, /dev/shm has the files. The segment says the rest. It is mapped read-only, so looking disturbs nobody;
what is read is a moment's, and not of one moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aioarena._core import words as shared
from aioarena._core.layout import (
    ARENA_INODE,
    ARENA_SENT,
    CLOSED,
    FRAMES_SENT,
    HEAD,
    NONCE_WORD,
    PUBLISHED,
    SENDER_PARKED,
    SENDER_PID,
    SPANS_END,
    TRIMMING,
    Layout,
)
from aioarena._core.spans import LoanEntry, read_spans
from aioarena._platform.memory import SHM_DIRECTORY
from aioarena._platform.process import describe_state, own_pid_namespace

_PROC = Path("/proc")
# What /proc calls the two kinds of control segments; a file's name goes once all readers are in.
_CONTROL = re.compile(
    r"(?:/memfd:aioarena-.*-control|.*/aioarena-(?P<ns>\d+)-\d+-\d+-[0-9a-f]+\.control)(?: \(deleted\))?",
    re.DOTALL,  # names may have line breaks
)
_HEADER_BYTES = 128
# Of pids: PROC_PID_INIT_INO of linux/proc_ns.h. /proc of this one shows all processes there are.
_INITIAL_NAMESPACE = 0xEFFFFFFC
_NAME_BYTES = 48  # what a header keeps of a name


class LookError(Exception):
    """What was asked for cannot be looked at; the message says why and what helps."""


@dataclass(frozen=True, slots=True)
class HolderView:
    """A reader that has not released a span.

    Attributes:
        rank: Its rank.
        received: Whether it has received the message.
        earlier: Whether it had the rank before the one that has it now.
    """

    rank: int
    received: bool
    earlier: bool


@dataclass(frozen=True, slots=True)
class SpanView:
    """Slots of the arena that are in use, or a use of lent ones.

    Attributes:
        kind: ``filled`` (its message is not sent yet), ``held``, ``released`` (by all; the sender takes it back when it
            needs slots) or ``lent`` (to the sender's own code).
        slot: First slot.
        slots: Number of slots; 0 for a message that lies in lent ones.
        nbytes: Bytes of it in use.
        generation: Its generation, None of what is lent.
        message: Number of its message, from 0, None before that is sent.
        age: Seconds since it was claimed or lent, None if that is not known.
        holders: Readers that have not released it.
    """

    kind: str
    slot: int
    slots: int
    nbytes: int
    generation: int | None
    message: int | None
    age: float | None
    holders: tuple[HolderView, ...]


@dataclass(frozen=True, slots=True)
class ReaderView:
    """One rank.

    Attributes:
        rank: Its rank.
        pid: The process that has or had it; None before the first, and of one on another host.
        seated: Whether it takes part now.
        parked: Whether it sleeps until something is sent.
        pins: Whether it may have pinned the arena.
        messages: Messages it received.
        messages_behind: Messages sent that it has not received.
        bytes_behind: Ring bytes sent that it has not received.
        tail: Where it is in the ring, a cursor that only grows.
        spans_held: Spans of the arena that it has not released.
        process: What its process is doing.
    """

    rank: int
    pid: int | None
    seated: bool
    parked: bool
    pins: bool
    messages: int
    messages_behind: int
    bytes_behind: int
    tail: int
    spans_held: int
    process: str

    @property
    def state(self) -> str:
        """In a few words, how it is."""
        if self.seated:
            # What is parked for a remote reader is the sender's own part that feeds it.
            return f"{self.process}, parked" if self.parked and self.pid is not None else self.process
        return "awaited" if self.pid is None else "has left"


@dataclass(frozen=True, slots=True)
class ChannelView:
    """One channel, at one moment.

    Attributes:
        name: Its name, the first 48 bytes of it.
        identity: Random number of the channel, in hexadecimal.
        pid: Process of the sender.
        process: What that is doing.
        backing: ``memfd`` or ``shm``.
        inode: Of its control segment, which tells channels of one name apart.
        closed: Whether the sender closed it in good order.
        trimming: Whether memory of the arena is being given back.
        waiting: Whether a send waits for readers.
        held_up_by: Ranks that this send waits for.
        messages: Messages sent.
        head: Where the sender is in the ring, a cursor that only grows: all bytes that went through it.
        arena_sent: Bytes that went through the arena.
        frames_sent: Bytes that went as frames.
        ring_bytes: Capacity of the ring.
        slots: Slots of the arena, 0 without one.
        slot_bytes: Bytes of a slot.
        slots_used: Slots that are filled, held or lent.
        slots_reached: Slots from the first to the last at which a span ever began.
        arena_bytes: Capacity of the arena, 0 without one.
        arena_in_memory: Bytes of it that have memory behind them; None where its file was not found.
        readers: Each rank.
        spans: Everything in the arena, by slot.
    """

    name: str
    identity: str
    pid: int
    process: str
    backing: str
    inode: int
    closed: bool
    trimming: bool
    waiting: bool
    held_up_by: tuple[int, ...]
    messages: int
    head: int
    arena_sent: int
    frames_sent: int
    ring_bytes: int
    slots: int
    slot_bytes: int
    slots_used: int
    slots_reached: int
    arena_bytes: int
    arena_in_memory: int | None
    readers: tuple[ReaderView, ...]
    spans: tuple[SpanView, ...]

    @property
    def state(self) -> str:
        """In a few words, how the sender is."""
        if self.closed:
            return "closed"
        return f"{self.process}, waits for readers" if self.waiting else self.process

    @property
    def shown_name(self) -> str:
        """The name as a terminal may see it."""
        return "".join(char if char.isprintable() else "?" for char in self.name) or "(no name)"


class Channel:
    """A channel that was found; :meth:`view` looks at it again each time.

    Args:
        path: Where to open it.
        target: What /proc calls it.
        foreign: Whether its processes are of another pid namespace, so that their pids mean nothing here.

    Raises:
        ValueError: It is of another version of aioarena, or only being made; the message says so.
        OSError: It is gone, or it is another user's.
    """

    def __init__(self, path: Path, target: str, *, foreign: bool = False) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.key = (status.st_dev, status.st_ino)
            if status.st_size < _HEADER_BYTES:
                raise ValueError("no channel, or one that is being made")
            self._mapping = mmap.mmap(file.fileno(), status.st_size, prot=mmap.PROT_READ)
        words = memoryview(self._mapping)[: status.st_size // 8 * 8].cast("Q")
        self._words = words
        self._layout = Layout.read(words)
        if self._layout.control_bytes > status.st_size:
            raise ValueError("its header does not fit its size")
        if not self._layout.ring_bytes or (self._layout.slots and not self._layout.slot_bytes):
            raise ValueError("its header makes no sense")
        self.foreign = foreign
        self._backing = "memfd" if target.startswith("/memfd:") else "shm"

    @property
    def inode(self) -> int:
        """Of its control segment."""
        return self.key[1]

    @property
    def pid(self) -> int:
        """Process of the sender."""
        return self._words[SENDER_PID]

    @property
    def name(self) -> str:
        """The first 48 bytes of its name."""
        return self._layout.name(self._words)

    def view(self) -> ChannelView:
        words, layout = self._words, self._layout
        # Readers first: what they have received was sent before, so nobody is ahead of the sender.
        received = [words[layout.received(rank)] for rank in range(layout.readers)]
        tails = [words[layout.tail(rank)] for rank in range(layout.readers)]
        shared.order()
        spans = tuple(self._spans(received))
        needed = words[SENDER_PARKED]
        return ChannelView(
            name=self.name,
            identity=words[NONCE_WORD : NONCE_WORD + 2].tobytes().hex(),
            pid=self.pid,
            process=self._describe(self.pid),
            backing=self._backing,
            inode=self.inode,
            closed=words[CLOSED] == 1,
            trimming=words[TRIMMING] == 1,
            waiting=needed != 0,
            held_up_by=tuple(rank for rank, tail in enumerate(tails) if words[layout.seat(rank)] and tail < needed),
            messages=words[PUBLISHED],
            head=words[HEAD],
            arena_sent=words[ARENA_SENT],
            frames_sent=words[FRAMES_SENT],
            ring_bytes=layout.ring_bytes,
            slots=layout.slots,
            slot_bytes=layout.slot_bytes,
            slots_used=sum(span.slots for span in spans if span.kind != "released"),
            slots_reached=min(words[SPANS_END], layout.slots),
            arena_bytes=layout.arena_bytes,
            arena_in_memory=self._arena_in_memory() if layout.slots else 0,
            readers=tuple(self._reader(rank, received[rank], tails[rank], spans) for rank in range(layout.readers)),
            spans=spans,
        )

    def _reader(self, rank: int, received: int, tail: int, spans: tuple[SpanView, ...]) -> ReaderView:
        words, layout = self._words, self._layout
        pid = words[layout.seat_pid(rank)]
        seated = words[layout.seat(rank)] != 0
        return ReaderView(
            rank=rank,
            pid=pid or None,
            seated=seated,
            parked=seated and words[layout.parked + rank] != 0,
            pins=seated and words[layout.pins(rank)] != 0,
            messages=received,
            messages_behind=max(0, words[PUBLISHED] - words[layout.seat_number(rank)] - received) if seated else 0,
            bytes_behind=max(0, words[HEAD] - tail) if seated else 0,
            tail=tail,
            spans_held=sum(holder.rank == rank and not holder.earlier for span in spans for holder in span.holders),
            # A remote reader sits there without a process of this host.
            process=self._describe(pid) if pid else "on another host" if seated else "awaited",
        )

    def _describe(self, pid: int) -> str:
        return "in another pid namespace" if self.foreign else describe_state(pid)

    def _spans(self, received: list[int]) -> Iterator[SpanView]:
        now = time.monotonic_ns()
        lent_until = 0  # the slot behind the loan last seen
        for entry in read_spans(self._words, self._layout, shared.order):
            slots = -(-entry.nbytes // self._layout.slot_bytes)
            if isinstance(entry, LoanEntry):
                lent_until = entry.slot + slots
                yield SpanView("lent", entry.slot, slots, entry.nbytes, None, None, _age(now, entry.lent), ())
            else:
                holders = tuple(self._holder(rank, entry.number or 0, received[rank]) for rank in entry.ranks)
                yield SpanView(
                    "filled" if entry.number is None else "held" if holders else "released",
                    entry.slot,
                    0 if entry.slot < lent_until else slots,
                    entry.nbytes,
                    entry.generation,
                    entry.number,
                    _age(now, entry.claimed),
                    holders,
                )

    def _holder(self, rank: int, number: int, received: int) -> HolderView:
        first = self._words[self._layout.seat_number(rank)]
        return HolderView(rank, received=number < first + received, earlier=number < first)

    def _arena_in_memory(self) -> int | None:
        inode = self._words[ARENA_INODE]
        for path, target in _descriptors(self.pid):
            if "arena" in target:
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if status.st_ino == inode:
                        return status.st_blocks * 512
        return None


def _age(now: int, then: int) -> float | None:
    # A sender in another time namespace has another clock.
    return max(0, now - then) / 1e9 if then else None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A channel that was found and cannot be looked at.

    Attributes:
        pid: A process that takes part in it.
        why: Why not.
    """

    pid: int
    why: str


def find(known: Iterable[Channel] = (), pid: int | None = None) -> tuple[list[Channel], list[Unreadable]]:
    """All channels of this user, by name; and those of other versions.

    Args:
        known: Channels that were found before: those that are still there are not opened again.
        pid: Only those that this process takes part in.
    """
    before = {channel.key: channel for channel in known}
    found: dict[tuple[int, int], Channel] = {}
    refused: dict[tuple[int, int], Unreadable] = {}
    for each, path, target, foreign in _controls(pid):
        with contextlib.suppress(OSError):
            status = path.stat()
            key = (status.st_dev, status.st_ino)
            # Root sees those of others, and would trust what they have written.
            if key in refused or status.st_uid != os.getuid():
                continue
            if key in found:
                found[key].foreign &= foreign  # a reader in a container does not make the sender one of it
                continue
            try:
                found[key] = before[key] if key in before else Channel(path, target, foreign=foreign)
            except ValueError as error:
                refused[key] = Unreadable(each, str(error))
    return sorted(found.values(), key=lambda channel: (channel.name, channel.inode)), list(refused.values())


def _controls(pid: int | None) -> Iterator[tuple[int, Path, str, bool]]:
    """Control segments: (a process, where to open it, what it is called, whether pids in it mean nothing here)."""
    namespace = own_pid_namespace()
    for each in sorted(int(entry) for entry in os.listdir(_PROC) if entry.isdigit()) if pid is None else [pid]:
        for path, target in _descriptors(each):
            match = _CONTROL.fullmatch(target)
            with contextlib.suppress(OSError):
                # Who only looks, as we do, has it open for reading only, and takes no part.
                if match is not None and path.lstat().st_mode & stat.S_IWUSR:
                    foreign = int(match["ns"] or namespace) != namespace or _namespace(each) != namespace
                    yield each, path, target, foreign
    # Processes that /proc does not show may share the directory. Other files that nobody has open are what the dead left.
    if pid is None and namespace != _INITIAL_NAMESPACE:
        for path in sorted(SHM_DIRECTORY.glob("aioarena-*.control")):
            match = _CONTROL.fullmatch(str(path))
            if match is not None and int(match["ns"]) != namespace:
                yield int(path.name.split("-")[2]), path, str(path), True


def _namespace(pid: int) -> int:
    return (_PROC / str(pid) / "ns" / "pid").stat().st_ino


def choose(which: str, known: Iterable[Channel] = ()) -> list[Channel]:
    """The channels that a process takes part in, or those of a name.

    Args:
        which: A pid, or a name (or its first 48 bytes).
        known: As for :func:`find`.

    Raises:
        LookError: There is none, or it is another user's; the message says so.
    """
    process = _PROC / which
    if which.isdecimal() and process.exists():
        channels, refused = find(known, int(which))
        if not channels:
            raise LookError(_why_none(int(which), refused))
        return channels
    channels, refused = find(known)
    name = which.encode()[:_NAME_BYTES].decode(errors="ignore")
    chosen = [channel for channel in channels if channel.name == name]
    if not chosen and which.isdecimal():
        raise LookError(
            f"there is no process {which}, and no channel of that name; `aioarena ps` lists the channels there are"
        )
    if not chosen:
        unread = f" ({len(refused)} cannot be read)" if refused else ""
        raise LookError(
            f"no channel of user {_user(os.getuid())} has the name {which!r}{unread}; `aioarena ps` lists those there are"
        )
    return chosen


def _why_none(pid: int, refused: list[Unreadable]) -> str:
    if refused:
        return f"process {pid} has a channel that cannot be read: {refused[0].why}"
    try:
        owner = (_PROC / str(pid)).stat().st_uid
        os.listdir(_PROC / str(pid) / "fd")
    except FileNotFoundError:
        return f"process {pid} has just ended"
    except PermissionError:
        pass
    if owner != os.getuid():
        return (
            f"process {pid} belongs to user {_user(owner)}, and channels are looked into by their own user only; "
            f"as root: sudo -u {_user(owner)} aioarena inspect {pid}"
        )
    return f"process {pid} takes part in no channel; `aioarena ps` lists those there are"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """Descriptors of a process and what they lead to; none if it is gone or another user's."""
    directory = _PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                yield directory / name, os.readlink(directory / name)
