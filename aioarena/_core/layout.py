"""The control segment: what lies where, who writes it, who reads it.

All words are u64, little-endian as the machine has them (both supported CPUs are). Indices below are in words.

======================  =========  ==========  ===============================================================
index                   written    read        field
======================  =========  ==========  ===============================================================
0                       sender     readers     magic ``AIOARENA``; stored last at creation
1                       sender     readers     layout version
2, 3                    sender     readers     channel nonce, 128 random bits
4 .. 7                  sender     readers     readers, ring capacity (bytes), slots, slot_bytes
8                       sender     onlookers   pid of the sender, as it sees itself
9                       sender     onlookers   inode of the arena
10 .. 15                sender     onlookers   name of the channel, UTF-8, cut off and padded with zeros
16 (own line)           sender     readers     head: byte cursor of the ring, only grows
17 (head's line)        sender     readers     messages published
18, 19 (head's line)    sender     onlookers   bytes that went through the arena, and as frames
24 (own line)           sender     readers     sender parked: the tail it waits for, 0 when awake
32 (own line)           sender     readers     closed: 1 once the sender closed in good order, 2 not so
33                      sender     readers     trimming: 1 while memory is given back, when no reader may begin to pin
34                      sender     onlookers   entries of the span table that were ever used: none lies behind them
40 + 16 r               sender     reader r    seat: incarnation that owns rank r, 0 when vacant
41 + 16 r               sender     reader r    head at the moment the seat was given
42 + 16 r               sender     reader r    messages published at that moment
43 + 16 r               sender     onlookers   pid of the reader that has or had the seat, as it sees itself
48 + 16 r (own line)    reader r*  sender      tail: byte cursor up to which reader r is done
49 + 16 r               reader r*  sender      messages received
50 + 16 r               reader r*  sender      pins: 1 once the reader may have pinned the arena
parked + r              reader r   sender      number of this park of reader r, 0 when awake
done + slot n + r       reader r   sender      last generation of that slot that reader r released
spans + slot k ..       sender     onlookers   span table: k words for each slot, see spans.py
======================  =========  ==========  ===============================================================

(*) While the seat is vacant the sender owns the line: it sets the tail before it gives the seat away.
The parked words lie together, so that the sender finds them in one or two cache lines on every send; they are written
only when a reader runs dry. Ring bytes follow, from the next page boundary to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = int.from_bytes(b"AIOARENA", "little")
# Raised whenever this file, record.py, or the messages of _platform/wire.py, _platform/network.py or _remote/stream.py
# change meaning.
VERSION = 4

MAGIC_WORD = 0
VERSION_WORD = 1
NONCE_WORD = 2
READERS_WORD = 4
RING_WORD = 5
SLOTS_WORD = 6
SLOT_BYTES_WORD = 7
SENDER_PID = 8
ARENA_INODE = 9
_NAME = slice(10, 16)
HEAD = 16
PUBLISHED = 17
ARENA_SENT = 18
FRAMES_SENT = 19
SENDER_PARKED = 24
CLOSED = 32
TRIMMING = 33
SPANS_END = 34
_SEATS = 40
_SEAT_STRIDE = 16  # two 64-byte cache lines: one that the sender writes, one that the reader writes

_SPAN_WORDS = 6  # of an entry of the span table, before its set of ranks

_PAGE = 4096  # only alignment of the ring's start; works with larger pages too


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one channel, and the word indices that follow from them.

    Attributes:
        readers: Number of ranks, at least 1.
        ring_bytes: Capacity of the ring, a multiple of 8.
        slots: Slots of the arena, 0 without one.
        slot_bytes: Bytes of a slot.
    """

    readers: int
    ring_bytes: int
    slots: int
    slot_bytes: int

    def seat(self, rank: int) -> int:
        return _SEATS + _SEAT_STRIDE * rank

    def seat_head(self, rank: int) -> int:
        return self.seat(rank) + 1

    def seat_number(self, rank: int) -> int:
        return self.seat(rank) + 2

    def seat_pid(self, rank: int) -> int:
        return self.seat(rank) + 3

    def tail(self, rank: int) -> int:
        return self.seat(rank) + 8

    def received(self, rank: int) -> int:
        return self.seat(rank) + 9

    def pins(self, rank: int) -> int:
        return self.seat(rank) + 10

    @property
    def parked(self) -> int:
        return _SEATS + _SEAT_STRIDE * self.readers

    @property
    def done(self) -> int:
        return (self.parked + self.readers + 7) // 8 * 8

    @property
    def rank_words(self) -> int:
        """Words of a set of ranks."""
        return (self.readers + 63) // 64

    @property
    def spans(self) -> int:
        return (self.done + self.slots * self.readers + 7) // 8 * 8

    def span(self, slot: int) -> int:
        """First word of a slot's entry in the span table."""
        return self.spans + slot * (_SPAN_WORDS + self.rank_words)

    @property
    def ring_offset(self) -> int:
        """First byte of the ring."""
        words = self.span(self.slots)
        return (words * 8 + _PAGE - 1) // _PAGE * _PAGE

    @property
    def control_bytes(self) -> int:
        return self.ring_offset + self.ring_bytes

    @property
    def arena_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def format(self, words: memoryview, nonce: bytes, *, pid: int = 0, arena: int = 0, name: str = "") -> None:
        """Write the header into a zeroed control segment. The magic goes last: half a header is no header."""
        words[SENDER_PID] = pid
        words[ARENA_INODE] = arena
        place = words[_NAME].cast("B")
        encoded = name.encode()[: place.nbytes]
        place[: len(encoded)] = encoded
        words[VERSION_WORD] = VERSION
        words[NONCE_WORD] = int.from_bytes(nonce[:8], "little")
        words[NONCE_WORD + 1] = int.from_bytes(nonce[8:], "little")
        words[READERS_WORD] = self.readers
        words[RING_WORD] = self.ring_bytes
        words[SLOTS_WORD] = self.slots
        words[SLOT_BYTES_WORD] = self.slot_bytes
        words[MAGIC_WORD] = MAGIC

    @classmethod
    def read(cls, words: memoryview) -> Layout:
        """The sizes that a header gives. Raises ValueError if it is none of this version, or makes no sense."""
        if words[MAGIC_WORD] != MAGIC:
            raise ValueError("no channel, or one that is being made")
        if words[VERSION_WORD] != VERSION:
            raise ValueError(f"layout version {words[VERSION_WORD]}, this is {VERSION}")
        return cls(words[READERS_WORD], words[RING_WORD], words[SLOTS_WORD], words[SLOT_BYTES_WORD])

    @staticmethod
    def name(words: memoryview) -> str:
        """The channel's name in a header."""
        return words[_NAME].tobytes().rstrip(b"\0").decode(errors="ignore")

    def mismatch(self, words: memoryview, nonce: bytes) -> tuple[str, object, object] | None:
        """Compare a mapped header with what the handle promised: (field, expected, found) of the first difference."""
        expected = {
            "magic": (MAGIC_WORD, MAGIC),
            "layout version": (VERSION_WORD, VERSION),
            "channel": (NONCE_WORD, int.from_bytes(nonce[:8], "little")),
            "channel (second half)": (NONCE_WORD + 1, int.from_bytes(nonce[8:], "little")),
            "readers": (READERS_WORD, self.readers),
            "ring_bytes": (RING_WORD, self.ring_bytes),
            "slots": (SLOTS_WORD, self.slots),
            "slot_bytes": (SLOT_BYTES_WORD, self.slot_bytes),
        }
        for field, (index, value) in expected.items():
            if words[index] != value:
                return field, value, words[index]
        return None
