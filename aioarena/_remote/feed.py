"""A remote reader's connection: sessions, what arrives in them, and what is acknowledged."""

from __future__ import annotations

import secrets
import socket as sockets
import time
from collections.abc import Iterator

from aioarena._core.layout import VERSION
from aioarena._platform.network import Ack, Data, End, GivenUp, RemoteJoin, RemoteReceiverWire, RemoteRef, Welcome
from aioarena._platform.process import ProcessIdentity
from aioarena._remote.mirror import ArrivingMessage, Mirror
from aioarena._remote.stream import StreamParser
from aioarena.exceptions import InternalError

# Bytes of the stream that the sender may be ahead of what was taken from the socket: what libzmq may hold here. A guess:
# the product of 100 Gbit/s and 5 ms.
WINDOW_BYTES = 64 << 20
# What is taken in and not acknowledged, at most: it holds the sender's ring and arena.
_ACK_BYTES = 4 << 20
# Handshakes that have to fail in a row, with nothing else, before it is the keys: a connection may also break in one.
FAILED_HANDSHAKES = 3


class Feed:
    """What a remote reader receives, as messages on a mirror.

    Args:
        remote: Whom to connect to.
        rank: As which reader, or ANY_RANK.
        mirror: Where the messages are to go.

    Attributes:
        rank: Its rank, once the sender has given it one.
        received: Messages taken over by :meth:`done`.
        nbytes: Bytes of the stream that arrived.
        down: Since when there is no connection, ``time.monotonic()``; None while there is one.
        end: Messages that the sender sent in all, once it has closed.
        given_up: Why the sender has no seat for this reader, once it said so.
    """

    def __init__(self, remote: RemoteRef, rank: int, mirror: Mirror) -> None:
        self.incarnation = secrets.randbits(63) | 1
        self.wire = RemoteReceiverWire(remote, self.incarnation)
        self.rank = rank
        self._wanted = rank
        self._mirror = mirror
        self._session = 0
        self._sequence = 0
        self._position = 0  # in the session's stream
        self._acked = 0, 0  # messages, and position
        self._parser: StreamParser[ArrivingMessage] | None = None
        self.received = 0
        self._given = 0  # messages given out: the last of them may wait for room
        self.nbytes = 0
        self.welcomed = False
        self.down: float | None = time.monotonic()
        self.end: int | None = None
        self.given_up: GivenUp | None = None

    # Connections ------------------------------------------------------------------------------------------------------

    def look_at_connection(self) -> bool:
        """Take in what became of the connection; whether anything did."""
        connection = self.wire.connection
        if not self.wire.drain_monitor():
            return False
        if not connection.up:
            # What has arrived is still to be taken in: perhaps there will be no more.
            self.down = self.down or time.monotonic()
        else:
            self.down = None
            if connection.sessions != self._session:
                self._begin(connection.sessions)
        return True

    def _begin(self, session: int) -> None:
        """Ask for the seat, or to go on after the last message given: if it is not taken over, nothing ever is again."""
        self._drop_partial()
        self._session = session
        self._sequence = self._position = 0
        self._acked = self._given, 0
        # What was given out is here, even if it still waits for room: it is not to come again.
        me = ProcessIdentity.current()
        self.wire.join(
            RemoteJoin(
                self.incarnation,
                VERSION,
                self._wanted,
                session,
                self.welcomed,
                self._given,
                WINDOW_BYTES,
                me,
                sockets.gethostname(),
                "",
            )
        )

    def _drop_partial(self) -> None:
        if self._parser is not None and self._parser.partial is not None:
            self._mirror.drop(self._parser.partial)
        self._parser = None

    # Messages ---------------------------------------------------------------------------------------------------------

    def pull(self) -> Iterator[bytes | ArrivingMessage] | None:
        """Take in one message from the socket, None if there is none: the channel's messages that are complete by it.

        Raises:
            InternalError: What arrives is no stream of this version.
            NoSpaceError: There is not enough memory for it.
        """
        event = self.wire.receive()
        match event:
            case None:
                return None
            case Data():
                return self._take(event)
            case Welcome():
                self._welcome(event)
            case End():
                self.end = event.number
            case GivenUp():
                self.given_up = event
        return iter(())

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.session != self._session:
            return  # of a connection that is over
        if welcome.number != self._given:
            raise InternalError(f"the sender goes on with message {welcome.number} where {self._given} was due")
        self.rank = self._wanted = welcome.rank
        self.welcomed = True
        self._parser = StreamParser(welcome.number, self._mirror.allocate, self._mirror.small_limit)

    def _take(self, data: Data) -> Iterator[bytes | ArrivingMessage]:
        if data.session != self._session or self._parser is None:
            return  # of a connection that is over
        if data.sequence != self._sequence:
            # Nothing is lost within a connection. If it is, the next one begins where this one was whole.
            self._drop_partial()
            self.wire.reconnect()
            return
        self._sequence += 1
        parser = self._parser
        for part in data.parts:
            nbytes = len(part)
            self._position += nbytes
            self.nbytes += nbytes
            for message in parser.feed(part.buffer):
                self._given += 1
                yield message
                if self._parser is not parser:
                    return  # cut while that was taken over, and what follows comes again
        self._acknowledge_much()

    def done(self) -> None:
        """The message last given was taken over."""
        self.received += 1
        self._acknowledge_much()

    def _acknowledge_much(self) -> None:
        if self._position - self._acked[1] >= _ACK_BYTES:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Tell the sender how far this reader is, if it does not know."""
        progress = self.received, self._position
        # A part of a message frees nothing at the sender, so it is told with the rest: it would have to be woken each time.
        news = self.received != self._acked[0] or self._position - self._acked[1] >= _ACK_BYTES
        if self._parser is not None and news and self.wire.connection.up:
            self._acked = progress
            self.wire.ack(Ack(self.incarnation, self._session, self.received, self._position + WINDOW_BYTES))

    def close(self) -> None:
        self._drop_partial()
        self.wire.close()
