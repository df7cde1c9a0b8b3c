"""The frozen dataclasses users see: what they configure, pass around and read."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field, fields

from aioarena._core.layout import VERSION, Layout
from aioarena._core.record import MAX_ARENA_BYTES, MAX_SLOTS
from aioarena._platform.memory import SegmentRef
from aioarena._platform.network import RemoteRef
from aioarena._platform.process import ProcessIdentity
from aioarena.exceptions import HandleError, text_of

# Defaults of ArenaConfig, from `python -m aioarena bench placement` on a 2-core x86-64 VM (Linux 6.18, Python 3.11,
# torch 2.13), 2026-11-30. CPU time of sender and 4 readers for one message, through the ring / through the arena, in us:
# 16 KiB 185/247, 64 KiB 241/266, 128 KiB 279/265, 256 KiB 370/296, 1 MiB 1336/928: they cross at 128 KiB, with 1 reader
# too. The slot size makes no difference to CPU time; of the slots of a 300 KiB buffer, 94% is used with 64 KiB slots, 59%
# with 256 KiB ones; smaller ones make the table of releases larger (64 KiB: 1 MiB for 2 GiB and 4 readers).
DEFAULT_SLOT_BYTES = 64 << 10
DEFAULT_SLOTS = (2 << 30) // DEFAULT_SLOT_BYTES
DEFAULT_MIN_BYTES = 128 << 10

# Thousands of steps of a burst fit (a step is a few hundred bytes); costs nothing until it is used.
DEFAULT_RING_BYTES = 8 << 20
MIN_RING_BYTES = 64 << 10

TEXT_PREFIX = "aioarena-handle:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaConfig:
    """Size of the arena.

    A buffer takes ``ceil(nbytes / slot_bytes)`` neighbouring slots. Memory is only used once a slot was written.

    Attributes:
        slots: Number of slots. 32768 by default.
        slot_bytes: Bytes of a slot, a multiple of 4096. 64 KiB by default: little of a span is left unused, and the table
            of releases stays small (8 bytes for each slot and reader).
        min_bytes: Buffers smaller than this are copied through the ring, at least 1. 128 KiB by default, which is where
            the fixed cost of a span equals that of the ring's two copies.
        prefault: Bytes, from the lowest slot on, that sender and readers have memory brought behind and mapped, in the
            background from their start on. 0 by default: the first message into each page pays for it then.
    """

    slots: int = DEFAULT_SLOTS
    slot_bytes: int = DEFAULT_SLOT_BYTES
    min_bytes: int = DEFAULT_MIN_BYTES
    prefault: int = 0

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("slot_bytes", 1), ("min_bytes", 1), ("prefault", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"ArenaConfig.{name} must be an int, not {type(value).__name__}")
            if value < least:
                raise ValueError(f"ArenaConfig.{name} must be at least {least}, not {value}")
        if self.slot_bytes % 4096:
            raise ValueError(f"ArenaConfig.slot_bytes must be a multiple of 4096, not {self.slot_bytes}")
        if self.slots > MAX_SLOTS or self.capacity > MAX_ARENA_BYTES:
            raise ValueError(
                f"ArenaConfig must have at most {MAX_SLOTS} slots and {MAX_ARENA_BYTES} bytes, not {self.slots} slots of "
                f"{self.slot_bytes} bytes"
            )
        if self.prefault > self.capacity:
            raise ValueError(f"ArenaConfig.prefault must be at most the arena's {self.capacity} bytes, not {self.prefault}")

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Handle:
    """What a reader needs to attach: pass it to the readers' processes by pickling it, or as :meth:`to_text`.

    Whoever has it and runs as the same user on the same host can read the channel. With remote readers it also carries the
    keys of the channel, so that whoever has it and reaches the sender's address can read the channel: it is a secret then,
    and belongs in no log, command line or environment. Messages are pickles, so a reader trusts its sender.

    Attributes:
        name: The channel's name, for logs.
        readers: Number of ranks, those of remote readers included.
        sender: The sender's process.
        remote: Where remote readers connect, None without any.
    """

    name: str
    readers: int
    sender: ProcessIdentity
    nonce: bytes = field(repr=False)
    layout: Layout = field(repr=False)
    control: SegmentRef = field(repr=False)
    arena: SegmentRef | None = field(repr=False)
    address: str = field(repr=False)
    prefault: int = field(default=0, repr=False)
    wake: str = field(default="zmq", repr=False)
    version: int = field(default=VERSION, repr=False)
    remote: RemoteRef | None = None

    @property
    def local_readers(self) -> int:
        """How many ranks, from 0 on, are for readers on the sender's host; the others are for remote readers."""
        return self.readers - (self.remote.readers if self.remote is not None else 0)

    def to_text(self) -> str:
        """The handle as one line of ASCII, for files and standard input. As secret as the handle."""
        return TEXT_PREFIX + base64.urlsafe_b64encode(json.dumps(asdict(self), default=bytes.hex).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> Handle:
        """The handle that :meth:`to_text` made a text of.

        Raises:
            HandleError: It is none, or of another version.
        """
        try:
            if not text.startswith(TEXT_PREFIX):
                raise ValueError(f"it does not begin with {TEXT_PREFIX!r}")
            values = json.loads(base64.urlsafe_b64decode(text[len(TEXT_PREFIX) :].strip().encode()))
            version = values["version"]
            if version == VERSION:
                values["sender"] = ProcessIdentity(**values["sender"])
                values["nonce"] = bytes.fromhex(values["nonce"])
                values["layout"] = Layout(**values["layout"])
                for name, kind in (("control", SegmentRef), ("arena", SegmentRef), ("remote", RemoteRef)):
                    values[name] = None if values[name] is None else kind(**values[name])
                return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HandleError(f"this text is no handle, or only a part of one: {text_of(error)}") from None
        raise _wrong_version(version)

    def __reduce__(self) -> tuple[object, ...]:
        # The version first and by itself, so that another version can refuse by name whatever else has changed.
        return _load_handle, (self.version, tuple(getattr(self, field.name) for field in fields(self)))


def _load_handle(version: int, values: tuple[object, ...]) -> Handle:
    if version != VERSION:
        raise _wrong_version(version)
    return Handle(*values)  # type: ignore[arg-type]


def _wrong_version(version: object) -> HandleError:
    return HandleError(
        f"the handle has layout version {version}, this is {VERSION}: install one version of aioarena at both ends",
        expected=VERSION,
        found=version,
    )


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """One rank, as the sender sees it.

    Attributes:
        rank: Its rank.
        state: ``awaited``, ``joined``, ``left``, ``lost`` or ``evicted``.
        pid: Process id of the reader that has or last had the rank, on its own host; None before the first.
        host: Name of that host, if it is a remote reader.
        messages_behind: Messages sent that it has not received.
        bytes_behind: Ring bytes sent that it has not received.
        process: What its process is doing, from /proc (``sleeping``, ``stopped by a signal`` ...), None before the first.
        waited_for: Seconds that a send has been waiting for it, 0.0 if none is.
        spans_held: Spans of the arena it has not released, those of messages that it has not received included.
        bytes_held: Bytes in use of those spans.
        oldest_held: Seconds since the oldest of them was sent, 0.0 if there is none.
        slots_held: Their first slots, from the lowest on.
        ages_held: Seconds since each of them was sent, in the same order.
    """

    rank: int
    state: str
    pid: int | None
    host: str | None
    messages_behind: int
    bytes_behind: int
    process: str | None
    waited_for: float
    spans_held: int
    bytes_held: int
    oldest_held: float
    slots_held: tuple[int, ...]
    ages_held: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """A snapshot of a sender.

    What is marked with *now* is a state, and sizes are what they are. All else counts from 0 at the channel's start, or is
    the most ever seen, and never goes backwards.

    Attributes:
        messages: Messages sent.
        ring_bytes: Bytes that went through the ring, tables included.
        arena_bytes: Bytes sent through the arena.
        lent_bytes: Of those, bytes that lay in lent memory, and were not copied.
        frame_bytes: Bytes sent as frames.
        prefaulted_bytes: Bytes of the arena that were populated in the background so far.
        fallbacks: Buffers that did not take the arena, by reason: ``arena_full``, ``larger_than_arena``,
            ``below_min_bytes``, ``arena_off``, ``not_divertible`` (a tensor that torch itself had to pickle); and lent
            buffers that were copied, since they were under way as often as they can be at once: ``lent_busy``.
        copy_seconds: Seconds that sends spent copying into the arena and into frames.
        wakeups: Wake-ups sent to readers.
        waits: Sends that had to wait for ring space or frame budget.
        wait_seconds: Seconds that those sends waited, once they are over.
        ring_used: Bytes of the ring that the slowest reader has not received, now.
        ring_peak: Most bytes in use when the sender looked: each time that it had written as much as the ring holds since
            its last look, whenever there was no room, and in each call of this. So a ring that once had no room shows as
            nearly full; a burst that filled it in part and was over before the next look does not show.
        ring_capacity: Bytes of the ring.
        frames_pending: Bytes of frames that some reader has not received, now.
        slots: Slots of the arena.
        slot_bytes: Bytes of a slot.
        slots_used: Slots claimed, lent, or held by some reader, now.
        slots_peak: Most slots used at any time, counting those that readers had released and nobody had looked at since.
        spans_held: Spans that some reader has not released, now.
        readers: Each rank, now.
        foreign_messages: Messages on the socket that no reader of this channel sent; they are ignored.
    """

    messages: int
    ring_bytes: int
    arena_bytes: int
    lent_bytes: int
    frame_bytes: int
    prefaulted_bytes: int
    fallbacks: dict[str, int]
    copy_seconds: float
    wakeups: int
    waits: int
    wait_seconds: float
    ring_used: int
    ring_peak: int
    ring_capacity: int
    frames_pending: int
    slots: int
    slot_bytes: int
    slots_used: int
    slots_peak: int
    spans_held: int
    readers: tuple[ReaderStatus, ...]
    foreign_messages: int


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """A snapshot of a receiver.

    What is marked with *now* is a state. All else counts from 0 when it attaches, and never goes backwards.

    Attributes:
        messages: Messages received.
        decode_errors: Messages that did not unpickle here.
        ring_bytes: Bytes of the ring that it has read, headers and padding included.
        arena_bytes: Bytes received as views of the arena.
        frame_bytes: Bytes received as frames.
        copy_seconds: Seconds that private copies and calls of ``to_device`` took.
        bytes_behind: Ring bytes sent and not received, now.
        parks: Times it waited for a message.
        wakeups: Wake-ups sent to a sender that waits for room.
        spans_held: Spans it holds: tensors alive, or GPU work pending, now.
        bytes_held: Bytes of those spans, now.
        oldest_held: Seconds that the oldest of them has been held, now; 0.0 if there is none.
        slots_held: Their first slots, now, from the lowest on.
        ages_held: Seconds that each of them has been held, now, in the same order.
        spans_released: Spans given back.
        spans_pending: Held spans that are dropped and only wait for GPU work, now.
        events_pending: Events in GPU streams that those spans wait for, now. 0 while none could be recorded yet.
        spans_quarantined: Spans never given back because the GPU stopped answering.
        pinned: ``no`` (no GPU context, or ``pin="off"``), ``pending``, ``yes`` or ``failed``, now.
        spans_changed: Times that held memory was found written to. Only looked for with ``AIOARENA_DEBUG=1``.
    """

    messages: int
    decode_errors: int
    ring_bytes: int
    arena_bytes: int
    frame_bytes: int
    copy_seconds: float
    bytes_behind: int
    parks: int
    wakeups: int
    spans_held: int
    bytes_held: int
    oldest_held: float
    slots_held: tuple[int, ...]
    ages_held: tuple[float, ...]
    spans_released: int
    spans_pending: int
    events_pending: int
    spans_quarantined: int
    pinned: str
    spans_changed: int
