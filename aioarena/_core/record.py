"""How one message is laid out: where each of its buffers travels, and the bytes that say so.

Buffer 0 is the pickled bytes; the out-of-band buffers follow in pickle's order. Each travels

* INLINE: its bytes stand in the body, aligned to 8;
* ARENA: its bytes lie in a span of the arena;
* FRAME: its bytes come as a part of the ZMQ message whose number the body names.

Body of a TABLE record, u64 words::

    buffers | frame message (0: none) | per buffer: nbytes and placement, start and slot, generation | inline bytes ...

Nothing of this is inside the pickled bytes, so the same message can be placed differently for different readers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from aioarena.exceptions import InternalError

INLINE = 0
ARENA = 1
FRAME = 2

_PLACEMENT_SHIFT = 62
_NBYTES_MASK = (1 << _PLACEMENT_SHIFT) - 1
_SLOT_SHIFT = 40
_START_MASK = (1 << _SLOT_SHIFT) - 1

# What a placement can tell.
MAX_ARENA_BYTES = 1 << _SLOT_SHIFT
MAX_SLOTS = 1 << 64 - _SLOT_SHIFT

_HEAD = struct.Struct("=2Q")
_ENTRY = struct.Struct("=3Q")


class Placement(NamedTuple):
    """Where one buffer travels. The last three are 0 unless it is ARENA.

    Attributes:
        where: INLINE, ARENA or FRAME.
        nbytes: Its bytes.
        slot: Slot whose done word releases it, with
        generation: this number.
        start: Offset of its first byte in the arena.
    """

    where: int
    nbytes: int
    slot: int = 0
    generation: int = 0
    start: int = 0


def aligned(nbytes: int) -> int:
    return (nbytes + 7) & ~7


def table_bytes(count: int) -> int:
    """Bytes of a table of ``count`` buffers, without inline bytes."""
    return _HEAD.size + count * _ENTRY.size


def body_bytes(placements: Sequence[Placement]) -> int:
    """Bytes of a whole TABLE body."""
    return table_bytes(len(placements)) + sum(aligned(p.nbytes) for p in placements if p.where == INLINE)


def encode_table(placements: Sequence[Placement], frame_number: int) -> bytes:
    words = [len(placements), frame_number]
    for where, nbytes, slot, generation, start in placements:
        words += (nbytes | where << _PLACEMENT_SHIFT, start | slot << _SLOT_SHIFT, generation)
    return struct.pack(f"={len(words)}Q", *words)


def inline_offsets(placements: Sequence[Placement]) -> list[int]:
    """Offset of each INLINE buffer in the body; -1 for the others."""
    offset = table_bytes(len(placements))
    offsets = []
    for placement in placements:
        if placement.where == INLINE:
            offsets.append(offset)
            offset += aligned(placement.nbytes)
        else:
            offsets.append(-1)
    return offsets


def decode_table(body: memoryview) -> tuple[list[Placement], int]:
    """Read the table at the start of a body: (placements, number of the frame message).

    Raises:
        InternalError: The body is too short for what it says.
    """
    if len(body) < _HEAD.size:
        raise InternalError(f"a message body of {len(body)} bytes has no table")
    count, frame_number = _HEAD.unpack_from(body)
    if count < 1 or table_bytes(count) > len(body):
        raise InternalError(f"a message body of {len(body)} bytes cannot hold a table of {count} buffers")
    end = table_bytes(count)
    placements = [
        Placement(first >> _PLACEMENT_SHIFT, first & _NBYTES_MASK, second >> _SLOT_SHIFT, generation, second & _START_MASK)
        for first, second, generation in _ENTRY.iter_unpack(body[_HEAD.size : end])
    ]
    inline = sum(aligned(p.nbytes) for p in placements if p.where == INLINE)
    if end + inline > len(body):
        raise InternalError(f"a message body of {len(body)} bytes cannot hold {inline} inline bytes")
    return placements, frame_number
