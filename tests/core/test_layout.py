"""Where the words of the control segment lie."""

from __future__ import annotations

import pytest

from aioarena._core import layout as module
from aioarena._core.layout import (
    ARENA_SENT,
    CLOSED,
    FRAMES_SENT,
    HEAD,
    MAGIC,
    MAGIC_WORD,
    PUBLISHED,
    SENDER_PARKED,
    SPANS_END,
    Layout,
)

from .support import NONCE, Recording, make_control

LINE = 8  # words of a cache line
SIZES = pytest.mark.parametrize(
    "layout",
    [
        Layout(readers=1, ring_bytes=64, slots=0, slot_bytes=0),
        Layout(readers=3, ring_bytes=1 << 16, slots=5, slot_bytes=4096),
        Layout(readers=64, ring_bytes=1 << 23, slots=8192, slot_bytes=1 << 18),
    ],
    ids=repr,
)


def sender_words(layout: Layout) -> set[int]:
    """Words that only the sender writes while readers read."""
    seats = [place(rank) for rank in range(layout.readers) for place in (layout.seat, layout.seat_head, layout.seat_number)]
    with_head = (HEAD, PUBLISHED, ARENA_SENT, FRAMES_SENT)
    return {*range(module.SLOT_BYTES_WORD + 1), *with_head, SENDER_PARKED, CLOSED, module.TRIMMING, SPANS_END, *seats}


def reader_words(layout: Layout, rank: int) -> set[int]:
    """Words that reader ``rank`` writes, but for its done words."""
    return {layout.tail(rank), layout.received(rank), layout.parked + rank}


def done_words(layout: Layout, rank: int) -> set[int]:
    return {layout.done + slot * layout.readers + rank for slot in range(layout.slots)}


def span_words(layout: Layout) -> set[int]:
    """The span table, which nobody but onlookers reads."""
    entry = layout.span(1) - layout.span(0)
    assert entry == 6 + layout.rank_words
    return {layout.span(slot) + word for slot in range(layout.slots) for word in range(entry)}


@SIZES
def test_no_two_fields_share_a_word(layout: Layout) -> None:
    """Every word has one meaning and one writer, and all lie before the ring."""
    fields = [sender_words(layout), span_words(layout)]
    for rank in range(layout.readers):
        fields += [reader_words(layout, rank), done_words(layout, rank)]
    every = set().union(*fields)
    assert len(every) == sum(len(words) for words in fields)
    assert len(sender_words(layout)) == 8 + 4 + 4 + 3 * layout.readers
    assert max(every) < layout.ring_offset // 8


@SIZES
def test_words_written_on_every_message_have_lines_of_their_own(layout: Layout) -> None:
    """Head and tails are not slowed down by words that somebody else writes."""
    lines: dict[int, set[str]] = {}
    for word in sender_words(layout):
        lines.setdefault(word // LINE, set()).add("sender")
    for rank in range(layout.readers):
        lines.setdefault(layout.tail(rank) // LINE, set()).add(f"reader {rank}")
        lines.setdefault(layout.received(rank) // LINE, set()).add(f"reader {rank}")
        lines.setdefault((layout.parked + rank) // LINE, set()).add("parked")
        for word in done_words(layout, rank):
            lines.setdefault(word // LINE, set()).add("done")
    for word in span_words(layout):
        lines.setdefault(word // LINE, set()).add("spans")
    assert all(len(writers) == 1 for writers in lines.values())
    with_head = {HEAD, PUBLISHED, ARENA_SENT, FRAMES_SENT}  # the last two change only where the first two do
    assert not {word // LINE for word in sender_words(layout) - with_head} & {HEAD // LINE}


def test_parked_words_lie_together() -> None:
    """The sender finds those of eight readers in one cache line."""
    layout = Layout(readers=8, ring_bytes=64, slots=1, slot_bytes=8)
    assert {(layout.parked + rank) // LINE for rank in range(8)} == {layout.parked // LINE}


@SIZES
def test_ring_follows_on_a_page_of_its_own(layout: Layout) -> None:
    """The ring starts at the next page boundary and ends with the segment."""
    assert layout.ring_offset % 4096 == 0
    last = max(sender_words(layout) | reader_words(layout, layout.readers - 1) | span_words(layout))
    assert 0 <= layout.ring_offset - 8 * (last + 1) < 4096
    assert layout.control_bytes == layout.ring_offset + layout.ring_bytes


def test_arena_is_all_slots() -> None:
    """Its size is slots times slot_bytes."""
    assert Layout(readers=1, ring_bytes=64, slots=3, slot_bytes=100).arena_bytes == 300


def test_words_lie_where_version_4_has_them() -> None:
    """Processes of two builds of one layout version find each other's words: moving one needs a new version."""
    layout = Layout(readers=2, ring_bytes=64, slots=3, slot_bytes=8)
    assert module.VERSION == 4
    assert int.from_bytes(b"AIOARENA", "little") == MAGIC
    assert (HEAD, PUBLISHED, ARENA_SENT, FRAMES_SENT, SENDER_PARKED, CLOSED) == (16, 17, 18, 19, 24, 32)
    assert (module.TRIMMING, SPANS_END) == (33, 34)
    places = (layout.seat, layout.seat_head, layout.seat_number, layout.seat_pid, layout.tail, layout.received)
    assert [place(0) for place in places] == [40, 41, 42, 43, 48, 49]
    assert [place(1) for place in places] == [56, 57, 58, 59, 64, 65]
    assert (layout.parked, layout.done, layout.ring_offset) == (72, 80, 4096)
    assert [layout.span(slot) for slot in range(3)] == [88, 95, 102]


def test_a_formatted_header_is_recognized() -> None:
    """What ``format`` writes, ``mismatch`` accepts."""
    layout = Layout(readers=2, ring_bytes=128, slots=3, slot_bytes=4096)
    assert layout.mismatch(make_control(layout).cast("Q"), NONCE) is None


@pytest.mark.parametrize(
    ("word", "field"),
    list(
        enumerate(
            ["magic", "layout version", "channel", "channel (second half)", "readers", "ring_bytes", "slots", "slot_bytes"]
        )
    ),
)
def test_another_header_is_refused_with_the_first_difference(word: int, field: str) -> None:
    """Each word of the header is compared: field, expected and found value tell what differs."""
    layout = Layout(readers=2, ring_bytes=128, slots=3, slot_bytes=4096)
    words = make_control(layout).cast("Q")
    expected, words[word] = words[word], words[word] + 1
    assert layout.mismatch(words, NONCE) == (field, expected, expected + 1)


def test_magic_is_stored_last() -> None:
    """Half a header has no magic: who sees the magic sees all of it."""
    layout = Layout(readers=2, ring_bytes=128, slots=3, slot_bytes=4096)
    words = Recording(memoryview(bytearray(layout.control_bytes)).cast("Q"))
    layout.format(words, NONCE)  # type: ignore[arg-type]
    assert [index for index, _ in words.stores].index(MAGIC_WORD) == len(words.stores) - 1 == 9
