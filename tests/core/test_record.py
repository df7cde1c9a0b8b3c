"""How a message is laid out."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioarena._core.receiver import unpack
from aioarena._core.record import (
    ARENA,
    FRAME,
    INLINE,
    MAX_ARENA_BYTES,
    MAX_SLOTS,
    Placement,
    body_bytes,
    decode_table,
    encode_table,
    inline_offsets,
    table_bytes,
)
from aioarena.exceptions import InternalError

u64 = st.integers(0, 2**64 - 1)
inline = st.integers(0, 40).map(lambda nbytes: Placement(INLINE, nbytes))
arena = st.tuples(st.integers(1, 2**62 - 1), st.integers(0, MAX_SLOTS - 1), u64, st.integers(0, MAX_ARENA_BYTES - 1)).map(
    lambda sizes: Placement(ARENA, *sizes)
)
frame = st.integers(1, 2**62 - 1).map(lambda nbytes: Placement(FRAME, nbytes))
tables = st.lists(st.one_of(inline, arena, frame), min_size=1, max_size=12)


def make_body(placements: list[Placement], frame_number: int = 0) -> tuple[bytearray, list[bytes | None]]:
    """A body, and the inline buffers in it: each with bytes of its own, 0xEE in the gaps."""
    body = bytearray(b"\xee" * body_bytes(placements))
    body[: table_bytes(len(placements))] = encode_table(placements, frame_number)
    contents: list[bytes | None] = []
    for index, (placement, offset) in enumerate(zip(placements, inline_offsets(placements), strict=True)):
        contents.append(bytes([index]) * placement.nbytes if placement.where == INLINE else None)
        if placement.where == INLINE:
            body[offset : offset + placement.nbytes] = contents[-1] or b""
    return body, contents


@settings(deadline=None)
@given(tables, u64)
def test_a_table_comes_back_as_it_was(placements: list[Placement], frame_number: int) -> None:
    """Placements of all kinds, also with the largest numbers, and the number of the frame message."""
    body, _ = make_body(placements, frame_number)
    assert decode_table(memoryview(body)) == (placements, frame_number)


@settings(deadline=None)
@given(tables, u64)
def test_inline_buffers_come_back_as_private_copies(placements: list[Placement], frame_number: int) -> None:
    """``unpack`` gives each inline buffer its bytes, and nothing of it lies in the body any more."""
    body, contents = make_body(placements, frame_number)
    message = unpack(memoryview(body))
    body[:] = bytes(len(body))
    assert (message.placements, message.frame_number) == (placements, frame_number)
    assert message.inline == contents


@settings(deadline=None)
@given(tables)
def test_inline_buffers_are_aligned_and_do_not_overlap(placements: list[Placement]) -> None:
    """Each begins at a multiple of 8 behind the one before it, the last ends with the body."""
    end = table_bytes(len(placements))
    for placement, offset in zip(placements, inline_offsets(placements), strict=True):
        if placement.where == INLINE:
            assert offset % 8 == 0 and end <= offset < end + 8
            end = offset + placement.nbytes
        else:
            assert offset == -1
    assert end <= body_bytes(placements) < end + 8


@settings(deadline=None)
@given(tables, st.data())
def test_a_short_body_is_damage(placements: list[Placement], data: st.DataObject) -> None:
    """A body cut anywhere is refused, whatever is missing: the head, the table or inline bytes."""
    body, _ = make_body(placements)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(InternalError, match=f"a message body of {cut} bytes"):
        unpack(memoryview(body)[:cut])


def test_a_table_of_nothing_is_damage() -> None:
    """Every message has at least its pickled bytes."""
    with pytest.raises(InternalError, match="table of 0 buffers"):
        decode_table(memoryview(struct.pack("=2Q", 0, 0) + bytes(64)))


def test_an_absurd_count_is_damage() -> None:
    """A count that no body can hold is refused before anything of that size is made."""
    with pytest.raises(InternalError, match="cannot hold a table"):
        decode_table(memoryview(struct.pack("=2Q", 2**64 - 1, 0) + bytes(64)))


def test_a_body_may_be_longer_than_what_is_in_it() -> None:
    """Records are padded, so bytes behind the last buffer mean nothing."""
    body, contents = make_body([Placement(INLINE, 3)])
    assert unpack(memoryview(body + b"\xff" * 8)).inline == contents
