"""ReceiverCore: taking messages, and what comes when there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aioarena._core.layout import HEAD
from aioarena._core.receiver import Fate, IncomingMessage, unpack
from aioarena._core.record import ARENA, FRAME, INLINE, Placement, encode_table, table_bytes
from aioarena._core.ring import TABLE
from aioarena._core.sender import Membership
from aioarena.exceptions import EvictedError, InternalError

from .support import Channel

# Taking -----------------------------------------------------------------------------------------------------------------


def test_small_message_is_its_bytes() -> None:
    """A message without a table comes as it was pickled; before it, there is None."""
    channel = Channel()
    assert channel.reader.take() is None
    channel.sender.send_small(b"pickled")
    assert channel.reader.take() == b"pickled"


def test_larger_message_is_its_parts() -> None:
    """Placements, the inline buffers, and the number of its frames."""
    channel = Channel(ring_bytes=2048, slots=2)
    channel.publish([8, 5, 100, 64, 0], fill=9)
    assert channel.reader.take() == IncomingMessage(
        placements=[
            Placement(INLINE, 8),
            Placement(INLINE, 5),
            Placement(ARENA, 100, 0, 1),
            Placement(FRAME, 64),
            Placement(INLINE, 0),
        ],
        frame_number=1,
        inline=[bytearray([9] * 8), bytearray([9] * 5), None, None, bytearray()],
        packed=False,
    )


def test_taking_twice_gives_the_same() -> None:
    """Only ``advance`` moves on, so that a receive that was cancelled loses nothing."""
    channel = Channel()
    channel.sender.send_small(b"first")
    channel.publish([8, 40], fill=3)
    assert channel.reader.take() == channel.reader.take() == b"first"
    channel.reader.advance()
    table = channel.reader.take()
    assert isinstance(table, IncomingMessage)
    assert channel.reader.take() == table
    channel.reader.advance()
    assert channel.reader.take() is None


def test_taken_message_is_private() -> None:
    """What the sender writes into the ring afterwards does not change it."""
    channel = Channel()
    channel.sender.send_small(b"first")
    small = channel.reader.take()
    channel.reader.advance()
    channel.publish([8, 8], fill=3)
    table = channel.reader.take()
    channel.control[channel.layout.ring_offset :] = b"\xff" * channel.layout.ring_bytes
    assert small == b"first"
    assert isinstance(table, IncomingMessage)
    assert table.inline == [bytearray([3] * 8)] * 2


def test_packed_message_comes_in_two_steps() -> None:
    """First the placement of the pack; what lies there is unpacked like a body in the ring."""
    channel = Channel(slots=8)
    sizes = [8, 8, 8, 8, 8, 8]
    message = channel.sender.place(sizes)
    body = bytearray(message.body_nbytes)
    body[: len(message.table)] = message.table
    for index, offset in enumerate(message.offsets):
        body[offset : offset + 8] = bytes([index] * 8)
    channel.publish_placed(message)
    taken = channel.reader.take()
    assert taken == IncomingMessage([Placement(ARENA, len(body), 0, 1)], 0, [None], packed=True)
    inner = unpack(memoryview(body))
    assert not inner.packed
    assert inner.inline == [bytearray([index] * 8) for index in range(6)]


def test_released_span_is_free_for_the_sender() -> None:
    """The reader names slot and generation as the message did."""
    channel = Channel(slots=1)
    channel.publish([8, 64])
    taken = channel.reader.take()
    assert isinstance(taken, IncomingMessage)
    _, _, slot, generation, _ = taken.placements[1]
    channel.reader.spans.release(slot, generation)
    channel.sender.arena.reap()
    assert channel.sender.arena.used_slots == 0


def test_unknown_kind_is_damage() -> None:
    """A record that no version of this sender makes is not guessed at."""
    channel = Channel()
    channel.sender.ring.append(9, b"12345678")
    with pytest.raises(InternalError, match="unknown kind 9 at cursor 0"):
        channel.reader.take()


def test_table_that_does_not_fit_its_record_is_damage() -> None:
    """Its size is checked against the record's."""
    channel = Channel()
    channel.sender.ring.append(TABLE, encode_table([Placement(INLINE, 100)], 0))
    with pytest.raises(InternalError, match="inline bytes"):
        channel.reader.take()


def test_damaged_ring_stays_damaged() -> None:
    """Taking again says the same; nothing is skipped."""
    channel = Channel()
    channel.sender.send_small(b"1")
    channel.words[channel.layout.ring_offset // 8] += 1 << 40
    for _ in range(2):
        with pytest.raises(InternalError, match="carries number 1, expected 0"):
            channel.reader.take()


# Beginning --------------------------------------------------------------------------------------------------------------


def test_reader_is_seated_only_under_its_own_number() -> None:
    """Another process that asked for the same rank is not."""
    channel = Channel(joined=False)
    mine, other = channel.make_reader(0, 5), channel.make_reader(0, 6)
    assert not mine.seated and not other.seated
    channel.sender.join(0, 5)
    assert mine.seated and not other.seated


def test_late_reader_begins_at_its_seat() -> None:
    """It gets what was published since it was seated, with the right message numbers, and counts from there."""
    channel = Channel(readers=2, slots=0, slot_bytes=0, joined=False)
    channel.join(0, 1)
    channel.publish([8, 40])
    channel.publish([8, 40])
    channel.sender.join(1, 2)
    channel.sender.send_small(b"after")
    channel.publish([8, 40])
    late = channel.make_reader(1, 2)
    late.start()
    assert late.take() == b"after"
    late.advance()
    framed = late.take()
    assert isinstance(framed, IncomingMessage) and framed.frame_number == 3
    late.advance()
    assert late.take() is None
    assert late.ring.received == channel.words[channel.layout.received(1)] == 2


def test_reader_may_join_on_any_lap() -> None:
    """Also where the ring has wrapped many times, and just before a pad."""
    channel = Channel(ring_bytes=256, joined=False)
    for number in range(50):
        channel.sender.send_small(bytes([number]) * 20)
        if channel.sender.ring.head % 256 > 256 - 32:
            break
    late = channel.join(0, 1)
    assert channel.sender.send_small(b"x" * 20)
    assert late.take() == b"x" * 20
    late.advance()
    assert late.fate() is Fate.OPEN


def test_successor_at_a_rank_begins_anew() -> None:
    """It gets nothing that its predecessor has left."""
    channel = Channel()
    channel.sender.send_small(b"left")
    channel.sender.unseat(0, Membership.LOST)
    successor = channel.join(0, 2)
    assert successor.take() is None
    channel.sender.send_small(b"new")
    assert successor.take() == b"new"


# Eviction ---------------------------------------------------------------------------------------------------------------


def test_evicted_reader_is_told_although_messages_are_there() -> None:
    """They may be overwritten any moment; the text says how far it came."""
    channel = Channel()
    channel.sender.send_small(b"1")
    channel.sender.send_small(b"2")
    channel.reader.take()
    channel.reader.advance()
    channel.sender.unseat(0, Membership.EVICTED)
    with pytest.raises(EvictedError, match="gave reader 0 up after 1 messages"):
        channel.reader.take()


def test_evicted_reader_is_told_although_its_ring_is_overwritten() -> None:
    """The damage it sees is none."""
    channel = Channel(ring_bytes=256)
    channel.sender.send_small(b"1")
    channel.sender.unseat(0, Membership.EVICTED)
    for _ in range(40):
        assert channel.sender.send_small(b"another")
    with pytest.raises(EvictedError):
        channel.reader.take()


def overwrite_table(channel: Channel) -> None:
    channel.control[channel.layout.ring_offset + 8 :] = b"\xff" * (channel.layout.ring_bytes - 8)


def overwrite_inline_bytes(channel: Channel) -> None:
    behind = 8 + table_bytes(2)
    channel.control[channel.layout.ring_offset + behind :] = b"\x01" * (channel.layout.ring_bytes - behind)


@pytest.mark.parametrize("overwrite", [overwrite_table, overwrite_inline_bytes])
def test_eviction_while_taking_is_seen_before_anything_stale_is_decoded(overwrite: Callable[[Channel], None]) -> None:
    """The seat is checked after the bytes were copied: nothing that was overwritten meanwhile is given out."""
    channel = Channel()
    channel.publish([16, 8], fill=7)
    look = channel.reader.ring.look

    def look_and_lose_the_seat() -> Any:
        found = look()
        channel.sender.unseat(0, Membership.EVICTED)
        overwrite(channel)
        return found

    channel.reader.ring.look = look_and_lose_the_seat  # type: ignore[method-assign]
    with pytest.raises(EvictedError):
        channel.reader.take()


def test_reader_whose_rank_was_given_away_is_evicted() -> None:
    """A successor in its seat is as good as none."""
    channel = Channel()
    channel.sender.send_small(b"1")
    channel.sender.unseat(0, Membership.LOST)
    channel.join(0, 2)
    with pytest.raises(EvictedError):
        channel.reader.take()
    assert channel.reader.fate() is Fate.EVICTED


# Fate -------------------------------------------------------------------------------------------------------------------


def test_channel_ends_only_after_everything_was_taken() -> None:
    """Closed is not the end for a reader that is behind."""
    channel = Channel()
    reader = channel.reader
    channel.sender.send_small(b"1")
    channel.sender.send_small(b"2")
    assert not reader.closed
    channel.sender.ring.close()
    assert reader.closed
    fates = []
    while reader.take() is not None:
        fates.append(reader.fate())
        reader.advance()
    assert fates == [Fate.OPEN, Fate.OPEN]
    assert reader.fate() is Fate.ENDED


def test_message_behind_a_pad_comes_before_the_end() -> None:
    """A reader that stands before a pad has not received everything."""
    channel = Channel(ring_bytes=256)
    for _ in range(7):
        channel.sender.send_small(b"x" * 24)
        channel.reader.take()
        channel.reader.advance()
    channel.sender.send_small(b"y" * 32)
    assert channel.sender.ring.head == 256 + 40
    channel.sender.ring.close()
    assert channel.reader.fate() is Fate.OPEN
    assert channel.reader.take() == b"y" * 32
    assert channel.reader.fate() is Fate.OPEN
    channel.reader.advance()
    assert channel.reader.fate() is Fate.ENDED


def test_open_channel_may_still_bring_something() -> None:
    """Nothing there is not the end."""
    assert Channel().reader.fate() is Fate.OPEN


def test_eviction_goes_before_the_end() -> None:
    """A reader without a seat has not received everything, whether the sender closed or not."""
    channel = Channel()
    channel.sender.unseat(0, Membership.EVICTED)
    channel.sender.ring.close()
    assert channel.reader.fate() is Fate.EVICTED


# Parking ----------------------------------------------------------------------------------------------------------------


def nothing(channel: Channel) -> None:
    pass


def publishes(channel: Channel) -> None:
    channel.sender.send_small(b"1")


def closes(channel: Channel) -> None:
    channel.sender.ring.close()


def evicts(channel: Channel) -> None:
    channel.sender.unseat(0, Membership.EVICTED)


@pytest.mark.parametrize(("event", "may_sleep"), [(nothing, True), (publishes, False), (closes, False), (evicts, False)])
def test_reader_sleeps_only_if_nothing_has_happened(event: Callable[[Channel], None], may_sleep: bool) -> None:
    """Whatever it has to look at again keeps it awake: a message, the end, its eviction."""
    channel = Channel()
    event(channel)
    assert channel.reader.park() is may_sleep
    assert channel.words[channel.layout.parked] == 1
    channel.reader.unpark()
    assert channel.words[channel.layout.parked] == 0


def test_advancing_tells_when_the_sender_has_to_be_woken() -> None:
    """It is the reader's ring that knows."""
    channel = Channel(ring_bytes=256)
    while channel.sender.send_small(b"12345678"):
        pass
    assert channel.sender.ring.park(channel.words[HEAD])
    woken = []
    while channel.reader.take() is not None:
        woken.append(channel.reader.advance())
    assert woken == [False] * 15 + [True]
