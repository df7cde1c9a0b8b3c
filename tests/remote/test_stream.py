"""The stream of messages: cut anywhere it gives the same, and what is none is refused before memory is taken for it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioarena._remote.stream import StreamParser, head_of
from aioarena.exceptions import InternalError, NoSpaceError

SMALL = 64


class Message:
    """A message that arrives, into memory of its own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.buffers = [bytearray(size) for size in sizes]
        self.destinations = [memoryview(buffer) for buffer in self.buffers]


class Stream:
    """A parser, what it asked room for, and what it gave."""

    def __init__(self, number: int = 0, small: int = SMALL) -> None:
        self.allocated: list[list[int]] = []
        self.parser: StreamParser[Message] = StreamParser(number, self.allocate, small)
        self.given: list[list[bytes]] = []

    def allocate(self, sizes: list[int]) -> Message:
        self.allocated.append(sizes)
        return Message(sizes)

    def feed(self, piece: bytes) -> None:
        for message in self.parser.feed(memoryview(piece)):
            if isinstance(message, bytes):
                self.given.append([message])
            else:
                self.given.append([bytes(buffer) for buffer in message.buffers])

    def feed_in_pieces(self, data: bytes, nbytes: int) -> None:
        for start in range(0, len(data), nbytes):
            self.feed(data[start : start + nbytes])


def encode(messages: Sequence[Sequence[bytes]], number: int = 0) -> bytes:
    return b"".join(
        head_of(number + index, [len(buffer) for buffer in buffers]) + b"".join(buffers)
        for index, buffers in enumerate(messages)
    )


MESSAGES = st.lists(st.lists(st.binary(max_size=2 * SMALL), min_size=1, max_size=4), max_size=6)


@given(MESSAGES, st.lists(st.integers(0, 2000), max_size=30), st.integers(0, 1 << 50))
def test_cut_anywhere_it_gives_the_same(messages: list[list[bytes]], cuts: list[int], number: int) -> None:
    """Empty buffers, empty pieces and messages of many pieces too; and at every moment those that are complete by then."""
    data = encode(messages, number)
    ends = [len(encode(messages[: count + 1], number)) for count in range(len(messages))]
    stream = Stream(number)
    places = sorted(min(cut, len(data)) for cut in cuts)
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        stream.feed(data[start:end])
        assert len(stream.given) == sum(known <= end for known in ends)
    assert stream.given == messages
    assert stream.parser.partial is None


@given(MESSAGES)
def test_byte_by_byte(messages: list[list[bytes]]) -> None:
    stream = Stream()
    stream.feed_in_pieces(encode(messages), 1)
    assert stream.given == messages


@pytest.mark.parametrize(("nbytes", "rooms"), [(0, 0), (SMALL, 0), (SMALL + 1, 1)])
def test_small_messages_in_one_piece_need_no_room(nbytes: int, rooms: int) -> None:
    """They are given as bytes. Neither a larger one is, nor one of two buffers, nor one in two pieces."""
    stream = Stream()
    data = encode([[b"x" * nbytes], [b"", b""], [b"y" * nbytes]])
    stream.feed(data[:-1])
    stream.feed(data[-1:])
    assert len(stream.allocated) == rooms + 2
    assert stream.given == [[b"x" * nbytes], [b"", b""], [b"y" * nbytes]]


def test_buffers_go_where_they_belong() -> None:
    """Straight into the memory that was made for them, and into nothing else."""
    memory = bytearray(b"." * 20)
    message = Message([])
    message.destinations = [memoryview(memory)[2:5], memoryview(memory)[5:5], memoryview(memory)[10:14]]
    parser: StreamParser[Message] = StreamParser(0, lambda sizes: message, 0)
    data = encode([[b"abc", b"", b"defg"]])
    for start in range(0, len(data), 7):
        list(parser.feed(memoryview(data)[start : start + 7]))
    assert memory == b"..abc.....defg......"


def test_what_has_arrived_in_part_is_known() -> None:
    """So that its room can be given back."""
    stream = Stream()
    data = encode([[b"x" * 100]])
    stream.feed(data[:23])
    assert stream.parser.partial is None
    stream.feed(data[23:50])
    assert stream.parser.partial is not None and stream.allocated == [[100]]
    stream.feed(data[50:])
    assert stream.parser.partial is None


GOOD = 0x4152_4E41


def head(count: int, check: int = GOOD, number: int = 0, *sizes: int) -> bytes:
    return struct.pack(f"<IIQ{len(sizes)}Q", count, check, number, *sizes)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (head(0), "no message"),
        (head(1, GOOD + 1, 0, 5), "no message"),
        (head(1, 0, 0, 1 << 60), "no message"),
        (head((1 << 24) + 1), "no message"),
        (head((1 << 32) - 1), "no message"),
        (head(1, GOOD, 1, 5), "message 1 arrived .* where 0 was due"),
        (head(1, GOOD, 1, 500), "message 1 arrived .* where 0 was due"),
        (head(2, GOOD, (1 << 64) - 1, 1, 1), "where 0 was due"),
        (head(1, GOOD, 0, (1 << 48) + 1), r"says it has \d+ bytes"),
        (head(1, GOOD, 0, (1 << 64) - 1), r"says it has \d+ bytes"),
        (head(3, GOOD, 0, 1 << 47, 1 << 47, 1), r"says it has \d+ bytes"),
        (bytes(100), "no message"),
        (b"\xff" * 100, "no message"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no message"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 5, 1000])
def test_what_is_no_message_takes_no_memory(data: bytes, reason: str, pieces: int) -> None:
    """Refused by its head, however that is cut."""
    stream = Stream()
    data += b"12345"
    with pytest.raises(InternalError, match=reason):
        stream.feed_in_pieces(data, -(-len(data) // pieces))
    assert stream.allocated == [] and stream.given == []


@given(st.binary(min_size=24, max_size=300))
def test_noise_is_no_message(noise: bytes) -> None:
    stream = Stream()
    with pytest.raises(InternalError):
        stream.feed(noise)
    assert stream.allocated == [] and stream.given == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_gap_or_a_repetition_is_noticed(whole: bool) -> None:
    """By the numbers, behind messages that were right."""
    body = b"x" * (SMALL if whole else SMALL + 1)
    for number in (0, 2, (1 << 64) - 1):
        stream = Stream()
        with pytest.raises(InternalError, match=f"message {number} arrived .* where 1 was due"):
            stream.feed(encode([[body]]) + encode([[body]], number))
        assert stream.given == [[body]]


def test_no_room_is_told() -> None:
    """What cannot be allocated comes out of feed, and nothing is left of it."""

    def refuse(sizes: list[int]) -> Message:
        raise NoSpaceError("none", needed=sum(sizes), available=0)

    parser: StreamParser[Message] = StreamParser(0, refuse, 0)
    with pytest.raises(NoSpaceError):
        list(parser.feed(memoryview(head(1, GOOD, 0, 1 << 47))))
    assert parser.partial is None
