"""SenderCore: where buffers travel, when a message can go, and who gets it."""

from __future__ import annotations

import pytest

from aioarena._core.receiver import IncomingMessage
from aioarena._core.record import ARENA, FRAME, INLINE, Placement, decode_table, table_bytes
from aioarena._core.ring import PACKED, SMALL, TABLE
from aioarena._core.sender import (
    ARENA_FULL,
    ARENA_OFF,
    BELOW_MIN_BYTES,
    LARGER_THAN_ARENA,
    LENT_BUSY,
    NOT_DIVERTIBLE,
    Membership,
    PlacedMessage,
)

from .support import Channel

# A channel in these tests, unless it says otherwise: bodies of up to 128 bytes in the ring, buffers of at least 32 bytes
# leave it, an arena of 4 slots of 64 bytes.


def wheres(message: PlacedMessage) -> list[int]:
    return [placement.where for placement in message.placements]


# Placement --------------------------------------------------------------------------------------------------------------


def test_small_message_is_its_pickled_bytes() -> None:
    """Without buffers, and of at most ``small_limit`` bytes: a SMALL record, and no table."""
    channel = Channel()
    assert channel.sender.small_limit == 32
    for nbytes in (0, 1, 31):
        message = channel.sender.place([nbytes])
        assert (message.kind, message.record_nbytes, message.offsets) == (SMALL, nbytes, [0])


@pytest.mark.parametrize(("min_bytes", "limit"), [(32, 32), (128, 128), (500, 128)])
def test_small_limit_is_the_lower_of_min_bytes_and_the_ring_share(min_bytes: int, limit: int) -> None:
    """A body takes at most an eighth of the ring, however large buffers may be that stay in it."""
    channel = Channel(min_bytes=min_bytes)
    assert channel.sender.small_limit == limit
    assert channel.sender.place([limit]).kind == SMALL
    assert channel.sender.place([limit + 1]).kind != SMALL


def test_large_pickled_bytes_take_the_arena() -> None:
    """They are a buffer like any other."""
    message = Channel().sender.place([33])
    assert message.kind == TABLE
    assert message.placements == [Placement(ARENA, 33, 0, 1)]
    assert message.fallbacks == []


@pytest.mark.parametrize(("nbytes", "where"), [(0, INLINE), (1, INLINE), (31, INLINE), (32, ARENA), (256, ARENA)])
def test_buffers_leave_the_ring_from_min_bytes_on(nbytes: int, where: int) -> None:
    """Smaller ones, empty ones too, stand in the body, and that is counted."""
    message = Channel().sender.place([8, nbytes])
    assert wheres(message) == [INLINE, where]
    assert message.fallbacks == ([BELOW_MIN_BYTES] if where == INLINE else [])


def test_pickled_bytes_in_the_body_are_no_fallback() -> None:
    """Reasons are about buffers."""
    assert Channel().sender.place([8, 100]).fallbacks == []


def test_buffers_of_one_message_get_spans_of_their_own() -> None:
    """Lowest slots first, as many as each needs, every one with its generation."""
    message = Channel().sender.place([8, 64, 65, 40])
    assert message.placements[1:] == [
        Placement(ARENA, 64, 0, 1, 0),
        Placement(ARENA, 65, 1, 2, 64),
        Placement(ARENA, 40, 3, 3, 192),
    ]
    assert {index: (span.slot, span.slots, span.nbytes) for index, span in message.spans.items()} == {
        1: (0, 1, 64),
        2: (1, 2, 65),
        3: (3, 1, 40),
    }


def test_buffer_without_a_free_span_goes_as_a_frame() -> None:
    """Nothing waits for the arena; what fits after it still takes it."""
    message = Channel().sender.place([8, 192, 128, 64])
    assert wheres(message) == [INLINE, ARENA, FRAME, ARENA]
    assert (message.frames, message.frame_nbytes, message.fallbacks) == ([2], 128, [ARENA_FULL])


def test_buffer_larger_than_the_arena_goes_as_a_frame() -> None:
    """However empty the arena is."""
    message = Channel().sender.place([8, 257])
    assert (wheres(message), message.fallbacks) == ([INLINE, FRAME], [LARGER_THAN_ARENA])


def test_without_an_arena_large_buffers_go_as_frames() -> None:
    """In their order, and each counts."""
    message = Channel(slots=0, slot_bytes=0).sender.place([40, 8, 100, 50])
    assert (wheres(message), message.frames) == ([FRAME, INLINE, FRAME, FRAME], [0, 2, 3])
    assert message.frame_nbytes == 190
    assert sorted(message.fallbacks) == [ARENA_OFF, ARENA_OFF, ARENA_OFF, BELOW_MIN_BYTES]


def test_fallbacks_count_when_the_message_is_published() -> None:
    """A message that was given back has not fallen back to anything."""
    channel = Channel()
    sender = channel.sender
    sender.unplace(sender.place([8, 8, 300]))
    assert set(sender.fallbacks.values()) == {0}
    channel.publish([8, 8, 8])
    channel.publish([8, 300])
    channel.publish([8, 256, 40])
    assert sender.fallbacks == {
        ARENA_FULL: 1,
        LARGER_THAN_ARENA: 1,
        BELOW_MIN_BYTES: 2,
        ARENA_OFF: 0,
        NOT_DIVERTIBLE: 0,
        LENT_BUSY: 0,
    }


def test_bytes_count_by_the_way_they_travel() -> None:
    """Ring, arena and frames."""
    channel = Channel()
    sender = channel.sender
    assert sender.send_small(b"12345")
    channel.publish([8, 200])
    channel.publish([8, 100])
    assert sender.inline_nbytes == 5 + 2 * (table_bytes(2) + 8)
    assert (sender.arena_nbytes, sender.framed_nbytes) == (200, 100)


# Packed bodies ----------------------------------------------------------------------------------------------------------


def test_body_too_large_for_the_ring_takes_the_arena_whole() -> None:
    """Many small buffers: the record only says where their table and bytes lie."""
    channel = Channel()
    message = channel.sender.place([8, *[8] * 5])
    body = table_bytes(6) + 6 * 8
    assert message.kind == PACKED
    assert message.pack == Placement(ARENA, body, 0, 1)
    assert message.record_nbytes == table_bytes(1)
    assert message.spans[-1].nbytes == message.body_nbytes == body
    assert message.offsets == [table_bytes(6) + 8 * index for index in range(6)]
    assert decode_table(memoryview(message.table + bytes(48))) == (message.placements, 0)


@pytest.mark.parametrize(("nbytes", "kind"), [(40, TABLE), (41, PACKED)])
def test_body_stays_in_the_ring_up_to_an_eighth_of_it(nbytes: int, kind: int) -> None:
    """That is 128 bytes here: a table of two buffers, 64 bytes, and the buffers."""
    message = Channel(min_bytes=100).sender.place([24, nbytes])
    assert wheres(message) == [INLINE, INLINE]
    assert message.kind == kind


def test_packed_message_may_have_spans_and_frames_besides() -> None:
    """Its large buffers travel by themselves, and the pack is the first of the frames."""
    channel = Channel(slots=3)
    message = channel.sender.place([8, 100, 200, *[8] * 5])
    assert wheres(message)[:3] == [INLINE, ARENA, FRAME]
    assert message.pack is not None and message.pack.where == FRAME
    assert message.frames == [-1, 2]
    assert message.frame_nbytes == 200 + message.body_nbytes


def test_record_of_a_packed_message_names_the_pack_and_the_frames() -> None:
    """The reader finds one placement, marked as a pack, and the number of the ZMQ message."""
    channel = Channel(slots=0, slot_bytes=0)
    message = channel.publish([8, *[8] * 5])
    taken = channel.reader.take()
    assert isinstance(taken, IncomingMessage)
    assert taken.packed
    assert taken.placements == [message.pack]
    assert taken.frame_number == message.frame_number == 1
    assert taken.inline == [None]


# Giving back ------------------------------------------------------------------------------------------------------------


def test_unplaced_message_gives_its_spans_back() -> None:
    """A send that failed or was cancelled leaves no claim, that of the pack included; giving back twice is harmless."""
    channel = Channel(slots=8)
    message = channel.sender.place([8, 100, *[8] * 5])
    assert channel.sender.arena.claimed_spans == 2
    channel.sender.unplace(message)
    channel.sender.unplace(message)
    assert (channel.sender.arena.claimed_spans, channel.sender.arena.used_slots) == (0, 0)


def test_unplacing_a_published_message_is_harmless() -> None:
    """The spans belong to the readers by then."""
    channel = Channel()
    message = channel.publish([8, 100])
    channel.sender.unplace(message)
    assert (channel.sender.arena.claimed_spans, channel.sender.arena.used_slots) == (0, 2)


# Room -------------------------------------------------------------------------------------------------------------------


def test_small_messages_go_until_the_ring_is_full() -> None:
    """The one that does not fit is refused and not counted."""
    channel = Channel(ring_bytes=256)
    sent = 0
    while channel.sender.send_small(b"12345678"):
        sent += 1
    assert sent == 16
    assert (channel.sender.inline_nbytes, channel.sender.ring.published) == (16 * 8, 16)


def test_message_waits_for_the_slowest_reader() -> None:
    """``shortage`` gives the tail to wait for, and None once the slowest reader is there."""
    channel = Channel(readers=2, ring_bytes=256)
    while channel.sender.send_small(b"12345678"):
        pass
    message = channel.sender.place([8])
    tail = channel.sender.shortage(message)
    assert tail == channel.sender.ring.threshold(8) == 16 + 64
    for _ in range(16):
        channel.readers[1].take()
        channel.readers[1].advance()
    assert channel.sender.shortage(message) == tail
    for _ in range(5):
        channel.readers[0].take()
        channel.readers[0].advance()
    assert channel.sender.shortage(message) is None
    channel.publish_placed(message)


def test_publishing_without_room_is_a_mistake() -> None:
    """``shortage`` has to be asked before."""
    channel = Channel(ring_bytes=256)
    while channel.sender.send_small(b"12345678"):
        pass
    with pytest.raises(AssertionError, match="shortage"):
        channel.publish_placed(channel.sender.place([8]))


# Frames -----------------------------------------------------------------------------------------------------------------


def receive(channel: Channel, rank: int = 0) -> None:
    assert channel.readers[rank].take() is not None
    channel.readers[rank].advance()


def framed(**options: int) -> Channel:
    """A channel without an arena, and with a budget of 100 bytes of frames."""
    return Channel(slots=0, slot_bytes=0, min_bytes=16, frame_budget=100, **options)


def test_frame_messages_are_numbered_as_they_are_published() -> None:
    """From 1 on, in the order of publication and not of placement; messages without frames have 0."""
    channel = framed()
    one, two, plain = (channel.sender.place(sizes) for sizes in ([8, 40], [8, 40], [8, 8]))
    for message in (plain, two, one):
        channel.publish_placed(message)
    numbers = []
    for _ in range(3):
        taken = channel.reader.take()
        assert isinstance(taken, IncomingMessage)
        numbers.append(taken.frame_number)
        channel.reader.advance()
    assert numbers == [0, 1, 2]
    assert (two.frame_number, one.frame_number) == (1, 2)


def test_frames_wait_for_the_budget() -> None:
    """Until so much was received that the new ones fit, and no longer: the oldest first."""
    channel = framed()
    ends = []
    for nbytes in (40, 32, 28):
        channel.publish([8, nbytes])
        ends.append(channel.sender.ring.head)
    sender = channel.sender
    assert sender.frame_nbytes == 100
    assert sender.shortage(sender.place([8, 40])) == ends[0]
    assert sender.shortage(sender.place([8, 41])) == ends[1]
    assert sender.shortage(sender.place([8, 100])) == ends[2]
    receive(channel)
    assert sender.shortage(sender.place([8, 40])) is None
    assert sender.shortage(sender.place([8, 41])) == ends[1]


def test_budget_is_used_up_to_the_last_byte() -> None:
    """What fits exactly goes, one byte more waits."""
    channel = framed()
    channel.publish([8, 60])
    assert channel.sender.shortage(channel.sender.place([8, 41])) is not None
    assert channel.sender.shortage(channel.sender.place([8, 40])) is None


def test_message_larger_than_the_budget_goes_alone() -> None:
    """It waits until no other frame is under way, and then the next one waits for it."""
    channel = framed(ring_bytes=4096)
    channel.publish([8, 40])
    channel.publish([8, 40])
    large = channel.sender.place([8, 1000])
    assert channel.sender.shortage(large) == channel.sender.ring.head
    receive(channel)
    assert channel.sender.shortage(large) == channel.sender.ring.head
    receive(channel)
    assert channel.sender.shortage(large) is None
    channel.publish_placed(large)
    assert channel.sender.shortage(channel.sender.place([8, 40])) == channel.sender.ring.head
    receive(channel)
    assert channel.sender.shortage(channel.sender.place([8, 40])) is None


def test_messages_without_frames_do_not_wait_for_the_budget() -> None:
    """They only need room in the ring."""
    channel = framed()
    channel.publish([8, 200])
    assert channel.sender.shortage(channel.sender.place([8, 8])) is None


def test_frames_count_until_the_slowest_reader_received_them() -> None:
    """``frames_pending`` is their bytes, ``frames_end`` the tail at which none is left."""
    channel = framed(readers=2)
    channel.publish([8, 40])
    channel.publish([8, 50])
    sender = channel.sender
    assert (sender.frames_pending, sender.frames_end) == (90, sender.ring.head)
    receive(channel, 0)
    receive(channel, 0)
    assert sender.frames_pending == 90
    receive(channel, 1)
    assert sender.frames_pending == 50
    receive(channel, 1)
    assert (sender.frames_pending, sender.frames_end) == (0, 0)


def test_frames_do_not_wait_for_readers_that_are_gone() -> None:
    """Neither for the one that left, nor, without any, for nobody."""
    channel = framed(readers=2)
    channel.publish([8, 40])
    receive(channel, 0)
    channel.sender.unseat(1, Membership.LOST)
    assert channel.sender.frame_nbytes == 0
    channel.publish([8, 40])
    channel.sender.unseat(0, Membership.LEFT)
    assert channel.sender.frame_nbytes == 0
    channel.publish([8, 99])
    assert channel.sender.shortage(channel.sender.place([8, 99])) is None


# Members ----------------------------------------------------------------------------------------------------------------


def test_all_ranks_are_awaited_first() -> None:
    """The count falls with each rank that is seated for the first time."""
    channel = Channel(readers=2, joined=False)
    sender = channel.sender
    assert (sender.members, sender.awaited, sender.seated) == ([Membership.AWAITED] * 2, 2, [])
    channel.join(1, 11)
    assert (sender.members[1], sender.awaited, sender.seated) == (Membership.JOINED, 1, [1])
    sender.unseat(1, Membership.LEFT)
    assert (sender.members[1], sender.awaited, sender.seated) == (Membership.LEFT, 1, [])
    channel.join(1, 12)
    assert (sender.members[1], sender.awaited, sender.seated) == (Membership.JOINED, 1, [1])


def test_a_rank_is_given_to_one_reader_only() -> None:
    """It has to be empty."""
    channel = Channel()
    with pytest.raises(AssertionError):
        channel.sender.join(0, 2)


def test_an_empty_rank_cannot_be_emptied() -> None:
    """Only a seated reader is unseated."""
    channel = Channel(joined=False)
    with pytest.raises(AssertionError):
        channel.sender.unseat(0, Membership.LOST)


def test_reader_gets_what_is_published_after_it_was_seated() -> None:
    """The seat tells where that begins: cursor, number, and last frame message."""
    channel = Channel(slots=0, slot_bytes=0, joined=False)
    channel.publish([8, 40])
    channel.publish([8])
    words, layout, sender = channel.words, channel.layout, channel.sender
    sender.join(0, 77)
    assert words[layout.seat(0)] == 77
    assert words[layout.seat_head(0)] == words[layout.tail(0)] == sender.ring.head > 0
    assert words[layout.seat_number(0)] == 2


def test_unseated_reader_holds_nothing_up() -> None:
    """Its seat is empty, and the ring no longer waits for it."""
    channel = Channel(readers=2, ring_bytes=256)
    while channel.sender.send_small(b"12345678"):
        channel.readers[1].take()
        channel.readers[1].advance()
    channel.sender.unseat(0, Membership.EVICTED)
    assert channel.words[channel.layout.seat(0)] == 0
    assert channel.sender.send_small(b"12345678")
    assert channel.sender.seated == [1]


def test_spans_go_to_the_readers_seated_at_that_moment() -> None:
    """Not to those before, and not to those after: neither keeps them."""
    channel = Channel(readers=3, joined=False)
    holders = [channel.sender.join(rank, rank + 1) for rank in range(2)]
    channel.sender.unseat(0, Membership.LEFT)
    channel.publish([8, 64])
    holders.append(channel.sender.join(2, 3))
    arena = channel.sender.arena
    assert [len(arena.held_by(holder)) for holder in holders] == [0, 1, 0]
    (span,) = arena.published_spans
    channel.make_reader(1, 2).spans.release(span.slot, span.generation)
    arena.reap()
    assert arena.used_slots == 0


@pytest.mark.parametrize("reason", [Membership.LEFT, Membership.LOST, Membership.EVICTED])
def test_spans_stay_held_by_an_unseated_reader_until_it_releases_them_or_is_dead(reason: Membership) -> None:
    """It may still read them, in whatever way it lost its seat."""
    channel = Channel(slots=2, joined=False)
    holder = channel.sender.join(0, 1)
    message = channel.publish([8, 64, 64])
    placement = message.placements[1]
    channel.sender.unseat(0, reason)
    assert channel.sender.place([8, 64]).fallbacks == [ARENA_FULL]
    channel.make_reader(0, 1).spans.release(placement.slot, placement.generation)
    assert channel.sender.place([8, 64]).spans[1].slot == placement.slot
    holder.dead = True
    channel.sender.arena.reap()
    assert channel.sender.arena.published_spans == ()


def test_message_to_nobody_frees_its_spans() -> None:
    """With all readers gone the arena does not fill up."""
    channel = Channel(slots=2, joined=False)
    for _ in range(5):
        assert channel.publish([8, 128]).fallbacks == []
    channel.sender.arena.reap()
    assert channel.sender.arena.used_slots == 0


def test_reader_that_leaves_keeps_nothing_it_did_not_receive() -> None:
    """Only spans of what it received stay held; messages are counted from where it was seated."""
    channel = Channel(slots=3, joined=False)
    channel.publish([8, 8])
    holder = channel.sender.join(0, 1)
    reader = channel.make_reader(0, 1)
    reader.start()
    received = channel.publish([8, 64]).placements[1]
    channel.publish([8, 64])
    channel.publish([8, 64])
    reader.take()
    reader.advance()
    channel.sender.skip_unread(0, holder)
    channel.sender.unseat(0, Membership.LEFT)
    (span,) = channel.sender.arena.held_by(holder)
    assert (span.slot, span.generation) == (received.slot, received.generation)
    assert channel.sender.arena.used_slots == 1


def test_lag_is_what_a_reader_has_not_received() -> None:
    """Messages and bytes, counted from where it was seated."""
    channel = Channel(readers=2, joined=False)
    channel.join(0, 1)
    channel.sender.send_small(b"12345678")
    late = channel.join(1, 2)
    assert [channel.sender.lag(rank) for rank in range(2)] == [(1, 16), (0, 0)]
    channel.sender.send_small(b"1")
    channel.sender.send_small(b"123456789")
    assert [channel.sender.lag(rank) for rank in range(2)] == [(3, 56), (2, 40)]
    late.take()
    late.advance()
    assert channel.sender.lag(1) == (1, 24)


def test_successor_does_not_inherit_the_lag() -> None:
    """A reader that takes over a rank begins with nothing to catch up with."""
    channel = Channel()
    channel.sender.send_small(b"1")
    channel.sender.send_small(b"2")
    receive(channel)
    channel.sender.unseat(0, Membership.LOST)
    channel.sender.send_small(b"3")
    channel.join(0, 2)
    assert channel.sender.lag(0) == (0, 0)


def test_sleepers_are_those_of_the_ring() -> None:
    """A parked reader has to be woken, once."""
    channel = Channel()
    assert channel.reader.park()
    channel.sender.send_small(b"1")
    assert [channel.sender.sleepers(), channel.sender.sleepers()] == [[0], ()]
