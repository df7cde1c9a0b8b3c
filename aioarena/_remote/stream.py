"""A channel's messages as a stream of bytes, cut anywhere.

One message::

    buffers (u32) | check (u32) | number (u64) | bytes of each buffer (u64 each) | the buffers, back to back

Buffer 0 is the pickled bytes, the others are out-of-band. Numbers count the messages of one reader from 0, so that a gap
or a repetition is noticed. All words are little-endian. What arrives is checked before memory is taken for it; it comes
from whoever holds the channel's keys, but may have been cut and mended on the way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from aioarena.exceptions import InternalError

_HEAD = struct.Struct("<IIQ")
_CHECK = 0x4152_4E41  # a head that does not say so is none
_MOST_BUFFERS = 1 << 24
_LARGEST = 1 << 48  # more than any machine has
_WHOLE = struct.Struct("<IIQQ")  # the head of a message that is one buffer, with its size


class Incoming(Protocol):
    """A message that arrives.

    Attributes:
        destinations: Where its buffers go.
    """

    @property
    def destinations(self) -> Sequence[memoryview]: ...


M = TypeVar("M", bound=Incoming)


def head_of(number: int, sizes: Sequence[int]) -> bytes:
    """What stands before the buffers of a message."""
    return struct.pack(f"<IIQ{len(sizes)}Q", len(sizes), _CHECK, number, *sizes)


class StreamParser(Generic[M]):
    """Takes messages out of a stream and puts their buffers where they belong.

    Args:
        number: Number of the first message.
        allocate: Makes room for the buffers of a message whose sizes are known. What it raises comes out of :meth:`feed`.
        small: A message of at most so many bytes in one buffer, whole in one piece of the stream, needs no room made: it is
            given as bytes.
    """

    def __init__(self, number: int, allocate: Callable[[list[int]], M], small: int) -> None:
        self._number = number
        self._allocate = allocate
        self._small = small
        self._head = bytearray()  # of a head and its sizes, what has arrived
        self._message: M | None = None
        self._buffer = 0  # of the message, which is being filled
        self._filled = 0  # bytes of that

    @property
    def partial(self) -> M | None:
        """The message that has arrived in part."""
        return self._message

    def feed(self, piece: memoryview) -> Iterator[bytes | M]:
        """Take in a piece of the stream; the messages that are complete by it.

        Raises:
            InternalError: This is not such a stream.
        """
        position, end = 0, len(piece)
        while position < end:
            if self._message is None:
                if not self._head and end - position >= _WHOLE.size:
                    count, check, number, nbytes = _WHOLE.unpack_from(piece, position)
                    start = position + _WHOLE.size
                    if count == 1 and nbytes <= self._small and start + nbytes <= end:
                        self._check(count, check, number)
                        self._number += 1
                        position = start + nbytes
                        yield piece[start:position].tobytes()
                        continue
                position = self._read_head(piece, position)
            else:
                position = self._fill(self._message, piece, position)
            if self._message is not None and self._buffer == len(self._message.destinations):
                message, self._message = self._message, None
                self._number += 1
                yield message

    def _read_head(self, piece: memoryview, position: int) -> int:
        head = self._head
        if len(head) < _HEAD.size:
            wanted = _HEAD.size
        else:
            count, check, number = _HEAD.unpack_from(head)
            self._check(count, check, number)
            wanted = _HEAD.size + 8 * count
        taken = min(wanted - len(head), len(piece) - position)
        head += piece[position : position + taken]
        if len(head) > _HEAD.size and len(head) == wanted:
            sizes = list(struct.unpack_from(f"<{(len(head) - _HEAD.size) // 8}Q", head, _HEAD.size))
            if sum(sizes) > _LARGEST:
                raise InternalError(f"a message on the network says it has {sum(sizes)} bytes")
            head.clear()
            self._message = self._allocate(sizes)
            self._buffer = self._filled = 0
            self._skip_full(self._message)
        return position + taken

    def _check(self, count: int, check: int, number: int) -> None:
        if check != _CHECK or not 1 <= count <= _MOST_BUFFERS:
            raise InternalError("what arrived over the network is no message")
        if number != self._number:
            raise InternalError(f"message {number} arrived over the network where {self._number} was due")

    def _fill(self, message: M, piece: memoryview, position: int) -> int:
        destination = message.destinations[self._buffer]
        taken = min(len(destination) - self._filled, len(piece) - position)
        destination[self._filled : self._filled + taken] = piece[position : position + taken]
        self._filled += taken
        self._skip_full(message)
        return position + taken

    def _skip_full(self, message: M) -> None:
        while self._buffer < len(message.destinations) and self._filled == len(message.destinations[self._buffer]):
            self._buffer += 1
            self._filled = 0
