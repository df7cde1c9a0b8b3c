"""The byte ring, step by step; its races are in test_interleavings.py."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioarena._core.layout import CLOSED, HEAD, PUBLISHED, SENDER_PARKED
from aioarena._core.ring import SMALL, TABLE
from aioarena.exceptions import InternalError

from .support import Recording, Ring

FAR = 1 << 40


def body(number: int, nbytes: int = 8) -> bytes:
    return bytes([number % 251 + 1]) * nbytes


# Records ----------------------------------------------------------------------------------------------------------------


def test_records_come_in_order() -> None:
    """A reader gets what was put, oldest first, and then nothing."""
    ring = Ring(256)
    for number in range(5):
        assert ring.put(body(number))
    assert ring.get_all() == [body(number) for number in range(5)]
    assert ring.get() is None


@pytest.mark.parametrize(("nbytes", "size"), [(0, 8), (1, 16), (7, 16), (8, 16), (9, 24), (16, 24), (17, 32)])
def test_record_is_a_header_and_a_padded_body(nbytes: int, size: int) -> None:
    """The head moves by 8 bytes and the body rounded up to 8; the body has the bytes it was given."""
    ring = Ring()
    assert ring.put(body(1, nbytes))
    assert ring.writer.head == ring.words[HEAD] == size
    assert ring.get() == body(1, nbytes)


def test_kind_comes_with_the_record() -> None:
    """The reader is told the kind and where the body stands."""
    ring = Ring()
    ring.writer.append(TABLE, b"12345")
    assert ring.reader.look() == (TABLE, 8, 5)


def test_parts_are_put_at_their_offsets() -> None:
    """A body may be given in pieces, with gaps."""
    ring = Ring()
    assert ring.writer.append_parts(SMALL, 16, [(0, b"ab"), (8, memoryview(b"cdef"))])
    assert ring.get() == b"ab" + bytes(6) + b"cdef" + bytes(4)


def test_nothing_is_visible_before_publish() -> None:
    """A reader sees a record that was reserved and filled only once it is published."""
    ring = Ring()
    start = ring.writer.reserve(8)
    ring.data[start : start + 8] = body(1)
    assert ring.get() is None
    ring.writer.publish(SMALL, start, 8)
    assert ring.get() == body(1)


def test_looking_twice_gives_the_same_record() -> None:
    """Only ``advance`` moves on, also past a pad."""
    ring = Ring(64)
    for number in range(3):
        ring.put(body(number, 16))
        assert ring.look() == ring.look() == body(number, 16)
        assert ring.get() == body(number, 16)


def test_published_messages_are_counted_for_all_to_see() -> None:
    """The count stands beside the head; what a reader is done with stands beside its tail."""
    ring = Ring()
    ring.put(b"a")
    ring.put(b"b")
    ring.get()
    assert ring.writer.published == ring.words[PUBLISHED] == 2
    assert ring.reader.received == ring.words[ring.layout.received(0)] == 1


def test_reader_knows_how_far_it_is_behind() -> None:
    """Its lag is the bytes between its cursor and the head."""
    ring = Ring()
    ring.put(body(1))
    ring.put(body(2))
    assert ring.reader.lag == 32
    ring.get()
    assert ring.reader.lag == 16


# Laps -------------------------------------------------------------------------------------------------------------------


def test_record_that_ends_with_the_lap_needs_no_pad() -> None:
    """Four records of 16 fill a ring of 64; the fifth begins the next lap at offset 0."""
    ring = Ring(64)
    for number in range(4):
        assert ring.put(body(number))
    assert ring.get_all() == [body(number) for number in range(4)]
    assert ring.put(body(4))
    assert ring.writer.head == 80
    assert ring.reader.look() == (SMALL, 8, 8)
    assert ring.get() == body(4)


@pytest.mark.parametrize(("second", "pad"), [(16, 16), (24, 8)])
def test_record_that_would_wrap_begins_after_a_pad(second: int, pad: int) -> None:
    """A pad, of one word at the least, fills the lap, and the record begins the next one whole."""
    ring = Ring(64)
    for number, nbytes in enumerate([16, second]):
        ring.put(body(number, nbytes))
        ring.get()
    assert ring.writer.head == 64 - pad
    assert ring.put(body(2, 16))
    assert ring.writer.head == 64 + 24
    assert ring.get() == body(2, 16)
    assert ring.get() is None


def test_pad_takes_room_like_a_record() -> None:
    """A record fits only together with the pad before it."""
    ring = Ring(64)
    ring.put(body(0, 16))
    ring.put(body(1, 16))
    # 16 bytes are left at the end and none at the start.
    assert not ring.put(body(2, 16))
    assert ring.get() == body(0, 16)
    assert ring.put(body(2, 16))
    assert ring.get_all() == [body(1, 16), body(2, 16)]


def test_pad_that_was_not_used_does_not_matter() -> None:
    """A place reserved behind a pad and given up leaves nothing: a smaller record takes the end of the lap."""
    ring = Ring(64)
    for number in range(2):
        ring.put(body(number, 16))
        ring.get()
    assert ring.writer.reserve(16) == 8
    assert ring.put(body(2))
    assert ring.writer.head == 64
    assert ring.get() == body(2)


@settings(deadline=None)
@given(
    ring_bytes=st.sampled_from([64, 72, 104, 128]),
    start=st.one_of(st.just(0), st.integers(0, 1 << 20), st.integers(FAR // 8, FAR // 8 + 64)).map(lambda n: n * 8),
    number=st.sampled_from([0, (1 << 24) - 3, FAR]),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    eager=st.booleans(),
)
def test_any_records_come_through_any_ring(ring_bytes: int, start: int, number: int, sizes: list[int], eager: bool) -> None:
    """Whatever the sizes, the capacity and where it begins: all records arrive as they are, in order."""
    ring = Ring(ring_bytes, start=start, number=number)
    sent = [body(index, nbytes) for index, nbytes in enumerate(sizes)]
    received = []
    for record in sent:
        while not ring.put(record):
            got = ring.get()
            assert got is not None, "the ring is empty and full at once"
            received.append(got)
        if eager:
            received += ring.get_all()
    assert received + ring.get_all() == sent
    assert ring.reader.cursor == ring.writer.head


def test_cursors_grow_beyond_32_and_40_bits() -> None:
    """Cursors are only ever added to, so a long-lived channel is no different."""
    ring = Ring(64, start=FAR - 24)
    for number in range(20):
        assert ring.put(body(number, 16))
        assert ring.get() == body(number, 16)
    assert ring.writer.head == ring.words[HEAD] == ring.words[ring.layout.tail(0)] > FAR + 64


def test_message_numbers_wrap() -> None:
    """The header has 24 bits of the number: message 2**24 carries 0, and is what the reader expects."""
    ring = Ring(128, number=(1 << 24) - 2)
    for number in range(4):
        ring.put(body(number))
    assert ring.get_all() == [body(number) for number in range(4)]


# Room -------------------------------------------------------------------------------------------------------------------


def test_full_ring_takes_nothing() -> None:
    """A record without room is refused and leaves no trace; one that was received makes room for one."""
    ring = Ring(64)
    assert [ring.put(body(number)) for number in range(5)] == [True] * 4 + [False]
    assert (ring.writer.head, ring.writer.published, ring.words[HEAD]) == (64, 4, 64)
    assert ring.get() == body(0)
    assert [ring.put(body(5)), ring.put(body(6))] == [True, False]
    assert ring.get_all() == [body(1), body(2), body(3), body(5)]


def test_slowest_reader_holds_the_writer_up() -> None:
    """Room is what every reader has received; the others do not matter."""
    ring = Ring(64, readers=3)
    for number in range(4):
        ring.put(body(number))
    ring.get_all(0)
    ring.get(2)
    assert not ring.put(body(4))
    assert ring.writer.slowest_tail() == 0
    ring.get(1)
    assert ring.writer.slowest_tail() == 16
    assert ring.put(body(4))
    assert not ring.put(body(5))


def test_every_reader_gets_everything_at_its_own_pace() -> None:
    """Readers do not disturb each other."""
    ring = Ring(64, readers=2)
    received: list[list[bytes]] = [[], []]
    for number in range(12):
        assert ring.put(body(number))
        received[0] += ring.get_all(0)
        if number % 3 == 2:
            received[1] += ring.get_all(1)
    assert received[0] == received[1] == [body(number) for number in range(12)]


def test_dropped_reader_holds_nothing_up() -> None:
    """Once the slowest reader is dropped, the next one counts."""
    ring = Ring(64, readers=2)
    for number in range(4):
        ring.put(body(number))
    ring.get(1)
    ring.writer.drop_reader(0)
    assert ring.writer.room == 16
    assert ring.put(body(4))
    assert not ring.put(body(5))


def test_without_readers_the_ring_is_never_full() -> None:
    """What nobody waits for may be overwritten, and a reader that comes then begins at the head."""
    ring = Ring(64, readers=1)
    ring.writer.drop_reader(0)
    for number in range(20):
        assert ring.put(body(number))
    assert ring.writer.slowest_tail() == ring.writer.head
    ring.writer.add_reader(0)
    late = ring.make_reader(0, ring.words)
    late.start(ring.writer.head, ring.writer.published)
    assert late.look() is None
    assert [ring.put(body(number)) for number in range(5)] == [True] * 4 + [False]
    assert late.look() is not None


def test_room_is_what_can_be_written_before_any_reader_moves() -> None:
    """It shrinks with each record and grows as the slowest reader goes on."""
    ring = Ring(64)
    assert ring.writer.room == 64
    ring.put(body(0))
    assert ring.writer.room == 48
    ring.get()
    assert ring.writer.room == 64


def test_peak_is_the_most_that_was_seen_when_the_tails_were_read() -> None:
    """A burst that needed no look does not show; a ring without room does, also once it is empty again."""
    ring = Ring(64)
    ring.put(body(0))
    ring.put(body(1))
    ring.get_all()
    assert ring.writer.peak == 0
    for number in range(4):
        ring.put(body(number))  # the third finds what it knows of the tails used up
    assert not ring.put(body(4))
    assert ring.writer.peak == 64
    ring.get_all()
    ring.put(body(5))
    assert ring.writer.peak == 64


def test_tails_are_read_only_when_the_known_ones_do_not_suffice() -> None:
    """A writer that is not held up leaves the readers' cache lines alone."""
    ring = Ring(64)
    words = Recording(ring.words)
    writer = ring.make_writer(words)
    writer.add_reader(0)
    tail = ring.layout.tail(0)
    for number in range(4):
        writer.append(SMALL, body(number))
        ring.get()
    assert tail not in words.loads
    writer.append(SMALL, body(4))
    assert words.loads.count(tail) == 1


# Damage -----------------------------------------------------------------------------------------------------------------


def test_wrong_number_is_damage() -> None:
    """A record with another number than the next is not delivered; the text says where and what."""
    ring = Ring(64, number=5)
    ring.put(body(0))
    ring.words[ring.layout.ring_offset // 8] += 1 << 40
    with pytest.raises(InternalError, match="cursor 0 carries number 6, expected 5"):
        ring.reader.look()


def test_record_of_another_lap_is_damage() -> None:
    """A reader that was overrun notices, even if a whole record lies where it looks."""
    ring = Ring(64)
    for number in range(4):
        ring.put(body(number))
    ring.look()
    ring.writer.drop_reader(0)
    ring.put(body(4))
    with pytest.raises(InternalError, match="carries number 4, expected 0"):
        ring.reader.look()


# The writer parks -------------------------------------------------------------------------------------------------------


def fill(ring: Ring) -> None:
    while ring.put(body(0)):
        pass


def test_threshold_asks_for_a_quarter_of_the_ring_more() -> None:
    """So that one wake-up serves many messages, and not one each."""
    ring = Ring(128)
    fill(ring)
    assert ring.writer.head == 128
    assert ring.writer.threshold(8) == 16 + 32
    assert ring.writer.threshold(16) == 24 + 32


def test_threshold_counts_the_pad() -> None:
    """The record behind the pad needs room for both."""
    ring = Ring(128)
    for nbytes in (32, 32, 24):
        ring.put(body(0, nbytes))
    assert ring.writer.head == 112
    assert ring.writer.threshold(8) == 112 + 16 - 128 + 32
    assert ring.writer.threshold(16) == 112 + 16 + 24 - 128 + 32


def test_threshold_never_asks_for_more_than_everything() -> None:
    """Readers cannot pass the head."""
    ring = Ring(32)
    fill(ring)
    assert ring.writer.threshold(24) == ring.writer.head == 32


@settings(deadline=None)
@given(
    start=st.integers(0, 200).map(lambda n: n * 8),
    sizes=st.lists(st.integers(0, 16), min_size=1, max_size=40),
    wanted=st.integers(0, 16),
)
def test_record_fits_once_the_threshold_is_reached(start: int, sizes: list[int], wanted: int) -> None:
    """Nobody is woken in vain: where the writer wakes up, its record has room, if it is an eighth of the ring at most."""
    ring = Ring(128, start=start)
    for nbytes in sizes:
        ring.put(body(0, nbytes))
    if ring.writer.reserve(wanted) < 0:
        threshold = ring.writer.threshold(wanted)
        assert ring.writer.slowest_tail() < threshold <= ring.writer.head
        while ring.writer.slowest_tail() < threshold:
            assert ring.get() is not None
        assert ring.writer.reserve(wanted) >= 0


def test_writer_may_sleep_until_the_threshold_is_reached() -> None:
    """``park`` leaves the threshold for the readers to see, and tells whether it is reached already."""
    ring = Ring(64)
    fill(ring)
    assert ring.writer.park(16) is True
    assert ring.words[SENDER_PARKED] == 16
    ring.get()
    assert ring.writer.park(16) is False
    ring.writer.unpark()
    assert ring.words[SENDER_PARKED] == 0


def test_writer_looks_again_after_it_announced_itself() -> None:
    """A reader that goes on between the announcement and the second look saw no one parked: the writer must not sleep."""
    ring = Ring(64, readers=2)
    fill(ring)
    ring.get(0)
    words = Recording(ring.words)
    writer = ring.make_writer(words)
    writer.head = ring.writer.head
    writer._tails, writer._parked = ring.writer._tails, ring.writer._parked

    def reader_moves(index: int) -> None:
        words.before_load = lambda index: None
        assert words.stores == [(SENDER_PARKED, 16)]
        ring.get(1)

    words.before_load = reader_moves
    assert writer.park(16) is False


def test_only_the_step_over_the_threshold_wakes_the_writer() -> None:
    """Not the steps before it and not those after it."""
    ring = Ring(64)
    fill(ring)
    ring.writer.park(40)
    woken = []
    while ring.look() is not None:
        woken.append(ring.reader.advance())
    assert woken == [False, False, True, False]


def test_step_onto_the_threshold_wakes_the_writer() -> None:
    """The threshold itself is enough."""
    ring = Ring(64)
    fill(ring)
    ring.writer.park(32)
    woken = []
    while ring.look() is not None:
        woken.append(ring.reader.advance())
    assert woken == [False, True, False, False]


def test_nobody_wakes_a_writer_that_is_awake() -> None:
    """A writer that did not park, or not any more, costs no wake-up."""
    ring = Ring(64)
    fill(ring)
    ring.look()
    assert not ring.reader.advance()
    ring.writer.park(32)
    ring.writer.unpark()
    ring.look()
    assert not ring.reader.advance()


def test_each_reader_wakes_the_writer_when_it_passes_the_threshold() -> None:
    """The last one to pass is the one that matters, and none of them can know that it is."""
    ring = Ring(64, readers=2)
    fill(ring)
    ring.writer.park(16)
    for rank in (1, 0):
        ring.look(rank)
        assert ring.readers[rank].advance()
        ring.look(rank)
        assert not ring.readers[rank].advance()


@pytest.mark.parametrize("threshold", [56, 64, 88])
def test_step_over_a_pad_wakes_the_writer(threshold: int) -> None:
    """The pad belongs to the step of the record behind it, wherever in both the threshold lies."""
    ring = Ring(64)
    for number in range(2):
        ring.put(body(number, 16))
        ring.get()
    ring.put(body(2, 16))
    assert ring.writer.park(threshold)
    # Looking moves the cursor over the pad, but the writer still sees the tail before it.
    assert ring.look() == ring.look() == body(2, 16)
    assert ring.reader.cursor == 64 and ring.words[ring.layout.tail(0)] == 48
    assert ring.reader.advance()


# Readers park -----------------------------------------------------------------------------------------------------------


def test_parked_reader_is_woken_once_per_park() -> None:
    """The first publication wakes it, the others do not until it has parked anew."""
    ring = Ring(256)
    assert ring.reader.park()
    assert [ring.put(b"a") and ring.writer.sleepers() for _ in range(3)] == [[0], (), ()]
    ring.reader.unpark()
    ring.get_all()
    assert ring.reader.park()
    assert [ring.put(b"a") and ring.writer.sleepers() for _ in range(3)] == [[0], (), ()]


def test_reader_that_is_awake_is_not_woken() -> None:
    """Under load nobody is parked, and no wake-up is sent."""
    ring = Ring(256)
    ring.put(b"a")
    assert not ring.writer.sleepers()
    ring.reader.park()
    ring.reader.unpark()
    ring.put(b"b")
    assert not ring.writer.sleepers()


def test_all_who_are_parked_are_named_at_once() -> None:
    """One ZMQ message wakes them all, and of those with a bell nobody is left out."""
    ring = Ring(256, readers=3)
    ring.readers[0].park()
    ring.readers[2].park()
    ring.put(b"a")
    assert ring.writer.sleepers() == [0, 2]
    assert not ring.writer.sleepers()
    ring.readers[1].unpark()
    ring.get_all(1)
    ring.readers[1].park()
    assert ring.writer.sleepers()


def test_dropped_reader_is_not_woken() -> None:
    """Whatever a reader without a seat has left in its parked word, nobody looks at it."""
    ring = Ring(256, readers=2)
    ring.readers[0].park()
    ring.writer.drop_reader(0)
    ring.put(b"a")
    assert not ring.writer.sleepers()


def test_successor_at_a_rank_is_woken_like_any_other() -> None:
    """Its first park has the same number as its predecessor's, which was woken."""
    ring = Ring(256)
    ring.reader.park()
    ring.put(b"a")
    assert ring.writer.sleepers()
    ring.writer.drop_reader(0)
    ring.writer.add_reader(0)
    assert not ring.writer.sleepers()
    successor = ring.make_reader(0, ring.words)
    successor.start(ring.writer.head, ring.writer.published)
    assert successor.park()
    ring.put(b"b")
    assert ring.writer.sleepers()


def test_reader_may_not_sleep_if_something_is_there() -> None:
    """Whatever was published before it announced itself."""
    ring = Ring(64)
    ring.put(body(1))
    assert ring.reader.park() is False
    ring.get()
    assert ring.reader.park() is True


def test_reader_looks_again_after_it_announced_itself() -> None:
    """A writer that publishes between the announcement and the second look may have seen nobody: no sleep."""
    ring = Ring(64)
    words = Recording(ring.words)
    reader = ring.make_reader(0, words)

    def writer_publishes(index: int) -> None:
        words.before_load = lambda index: None
        assert words.stores == [(ring.layout.parked, 1)]
        ring.put(body(1))

    words.before_load = writer_publishes
    assert reader.park() is False


# The end ----------------------------------------------------------------------------------------------------------------


def test_close_leaves_everything_to_be_received() -> None:
    """Closing sets a word of its own and moves nothing."""
    ring = Ring(64)
    ring.put(body(1))
    ring.writer.close()
    assert ring.words[CLOSED] == 1
    assert ring.get_all() == [body(1)]
