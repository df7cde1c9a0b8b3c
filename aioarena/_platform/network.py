"""The ZMQ sockets between hosts: an XPUB at the sender, an XSUB at each remote reader, over TCP with CURVE.

CURVE encrypts and authenticates both ends: the reader knows the sender's public key, the sender admits the one key that the
handle carries, and both are made anew for each channel. Whoever has no handle gets no further than the handshake.

The sender's end binds in its constructor, before the handle exists, with a socket of the standard library: the handle can
name the port, an address that cannot be bound is an error at once, and connections made early wait in the kernel.

=========  =================================  ========================================================================
direction  message                            meaning
=========  =================================  ========================================================================
up         ``J`` ...                          :class:`RemoteJoin`
up         ``A`` ...                          :class:`Ack`
up         ``L`` incarnation, text            :class:`RemoteLeave`
up         subscription                       :class:`Connect`
down       ``R`` incarnation, ``W`` ...       :class:`Welcome`
down       ``R`` incarnation, ``D`` ...       :class:`Data`: session, sequence; parts of the stream follow
down       ``R`` incarnation, ``E``, number   :class:`End`: the sender closed in good order after so many messages
down       ``R`` incarnation, ``G``, ...      :class:`GivenUp`: refused, evicted or lost; number and text
down       ``R`` incarnation, ``F``, ...      the same, of all readers: whoever the sender had its messages from is lost
=========  =================================  ========================================================================

A reader subscribes to its own topic, ``R`` and its incarnation, and so gets nothing else; when its connection ends, libzmq
hands the sender an unsubscription from it. When it connects again, libzmq subscribes again, whatever the reader's loop is
busy with. All numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket as sockets
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.utils.z85 as z85
from zmq.utils.garbage import gc as zmq_collector
from zmq.utils.monitor import parse_monitor_message

from aioarena._platform.process import ProcessIdentity, require_descriptors
from aioarena._platform.wire import Disconnect, Wire, events_of, sender_wires
from aioarena.exceptions import ArenaError

# Largest message to a sender: a join with a long host name. Whoever sends more is cut off before it is read.
_LARGEST_UP = 4096
# Bytes of the stream in one message. Small enough that a heartbeat finds its way between two, and that a message larger
# than any of ours is refused by its header; at 256 KiB the cost for each is below a thousandth of the encryption.
CHUNK_BYTES = 256 << 10
_LARGEST_DOWN = CHUNK_BYTES + 4096

# Seconds until a connection has to have shown its keys: what a stranger can hold a connection open for.
_HANDSHAKE_SECONDS = 3.0
# First pause between attempts to connect, and where doubling it ends, in seconds. A guess: soon after a cut, and little
# traffic while a host is away.
_RECONNECT = 0.05
_RECONNECT_MAX = 0.5
# Connections that wait to be accepted; the kernel may hold fewer (net.core.somaxconn).
_BACKLOG = 128
# Parts of a second that closing may take to write what is queued: a few bytes that say why.
_LAST_WORDS_MS = 200

# Messages that are taken in before others on the loop get a turn: about a millisecond.
_MOST_DRAINED = 100

_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # RFC 27 of ZeroMQ: where libzmq asks whom to admit

_JOIN = struct.Struct("<cQIqI?QQIQQ")
_ACK = struct.Struct("<cQIQQ")
_LEAVE = struct.Struct("<cQ")
_TOPIC = struct.Struct("<cQ")
_WELCOME = struct.Struct("<cQcIIQ")
_DATA = struct.Struct("<cQcIQ")
_END = struct.Struct("<cQcQ")
_GIVEN_UP = struct.Struct("<cQcQ")
_LONGEST_TEXT = 1000

ANY_RANK = -1


@dataclass(frozen=True, slots=True)
class RemoteRef:
    """What a remote reader needs to connect. A secret: whoever has it can read the channel.

    Attributes:
        endpoint: ``tcp://host:port``.
        readers: How many remote readers there are; theirs are the highest ranks.
        timeout: Seconds after which an end that is not heard of is given up.
        server_key: The sender's public key, Z85.
        public_key: The readers' public key, Z85.
        secret_key: The readers' secret key, Z85.
    """

    endpoint: str
    readers: int
    timeout: float
    server_key: str = field(repr=False)
    public_key: str = field(repr=False)
    secret_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RemoteJoin:
    """A reader asks for its seat, or to go on after its connection was cut.

    Attributes:
        incarnation: Number of this reader.
        version: Layout version of its library.
        rank: Its rank, or ANY_RANK.
        session: Counts its connections.
        returning: Whether it has had a seat before.
        received: Messages it has received before.
        limit: See :class:`Ack`.
        identity: Its process, on its own host.
        host: The name of that.
        address: Whence it connected, as seen from here.
    """

    incarnation: int
    version: int
    rank: int
    session: int
    returning: bool
    received: int
    limit: int
    identity: ProcessIdentity
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Ack:
    """How far a reader has come.

    Attributes:
        incarnation, session: Whose, and in which connection.
        received: Messages it has received.
        limit: Position in the session's stream, in bytes, up to which it may be sent.
    """

    incarnation: int
    session: int
    received: int
    limit: int


@dataclass(frozen=True, slots=True)
class RemoteLeave:
    """A reader goes; ``reason`` says why if not in good order."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Connect:
    """A reader has a connection; nothing goes over it before it asks."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The seat is given, or the connection resumed: the stream of ``session`` begins with message ``number``."""

    rank: int
    session: int
    number: int


@dataclass(frozen=True, slots=True)
class Data:
    """A piece of a session's stream."""

    session: int
    sequence: int
    parts: list[zmq.Frame]


@dataclass(frozen=True, slots=True)
class End:
    """The sender closed after ``number`` messages to this reader."""

    number: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The sender has no seat for this reader, and says why, and how many messages it had sent to that seat by then.

    With ``failed`` it has none for any reader: its channel ends, and in no good order.
    """

    reason: str
    number: int
    failed: bool = False


Upward = RemoteJoin | Ack | RemoteLeave | Connect | Disconnect
Downward = Welcome | Data | End | GivenUp


# Addresses --------------------------------------------------------------------------------------------------------


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``.

    Raises:
        ValueError, TypeError: It is none.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f'an address must be a str like "tcp://10.0.0.5:0", not {type(endpoint).__name__}')
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f'{endpoint!r} is no address like "tcp://10.0.0.5:0": {error}') from None
    strange = parts.path or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme != "tcp" or not host or port is None or strange or not _is_one_word(endpoint):
        raise ValueError(f'{endpoint!r} is no address like "tcp://10.0.0.5:0" (IPv6: "tcp://[fd00::5]:0")')
    return host, port


def _is_one_word(text: str) -> bool:
    return text.isprintable() and " " not in text


def endpoint_of(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _advertised_host(advertise: str) -> str:
    if not isinstance(advertise, str):
        raise TypeError(f"advertise must be a str or None, not {type(advertise).__name__}")
    host = advertise.strip("[]")
    try:
        reachable = parse_endpoint(endpoint_of(host, 1)) == (host.lower(), 1) and host != "*" and not _is_unspecified(host)
    except ValueError:
        reachable = False
    if not reachable:
        raise ValueError(f'advertise must be a host that readers can connect to, like "10.0.0.5", not {advertise!r}')
    return host


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False  # a name


class Listener:
    """A bound and listening TCP socket, until a :class:`RemoteSenderWire` takes it over.

    Args:
        bind: ``tcp://host:port``; port 0 takes a free one.
        advertise: Host that readers connect to, if another one than that.
        any_interface: Whether ``bind`` may be the address of all interfaces.

    Attributes:
        endpoint: What readers connect to.

    Raises:
        ValueError: The address makes no sense, or means all interfaces and that was not asked for.
        ArenaError: It cannot be bound.
    """

    def __init__(self, bind: str, advertise: str | None, any_interface: bool) -> None:
        host, port = parse_endpoint(bind)
        everywhere = host == "*"
        try:
            family, _, _, _, address = sockets.getaddrinfo(
                None if everywhere else host, port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE
            )[0]
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ArenaError(f"cannot bind {bind}: {reason}; name an address of this host") from error
        everywhere = everywhere or _is_unspecified(str(address[0]))
        if everywhere and not any_interface:
            raise ValueError(
                f"{bind!r} is every interface of this host: bind the one address that the readers reach, or pass "
                "any_interface=True if it has to be all"
            )
        if everywhere and advertise is None:
            raise ValueError(f"{bind!r} is no address to connect to: say with advertise= which one the readers are to take")
        own = host if advertise is None else _advertised_host(advertise)
        socket = sockets.socket(family, sockets.SOCK_STREAM)
        try:
            socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            socket.bind(address)
            socket.listen(_BACKLOG)
        except OSError as error:
            socket.close()
            raise ArenaError(
                f"cannot bind {bind}: {error.strerror or error}; name an address of this host and a free port, or port 0"
            ) from error
        socket.setblocking(False)
        port = socket.getsockname()[1]
        self.endpoint = endpoint_of(own, port)
        self.ipv6 = family == sockets.AF_INET6
        self._bound = endpoint_of(str(address[0]), port)
        # Without its object, which would complain when a sender that was never started is dropped.
        self._fd: int | None = socket.detach()

    def hand_over(self, socket: zmq.Socket[bytes]) -> None:
        """Have a ZMQ socket accept the connections."""
        assert self._fd is not None, "handed over before"
        socket.setsockopt(zmq.IPV6, int(self.ipv6))
        fd, self._fd = self._fd, None
        try:
            socket.setsockopt(zmq.USE_FD, fd)
            socket.bind(self._bound)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a channel, Z85: of the sender, and the one pair that all its readers have."""

    server_public: str
    server_secret: str = field(repr=False)
    reader_public: str
    reader_secret: str = field(repr=False)

    @classmethod
    def fresh(cls) -> Keys:
        """Raises ArenaError where libzmq was built without CURVE."""
        if not zmq.has("curve"):
            raise ArenaError("libzmq has no CURVE here, and without it nothing goes over a network: pip install pyzmq")
        server, reader = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(*(key.decode() for key in (*server, *reader)))


def _heartbeats(socket: zmq.Socket[bytes], timeout: float) -> None:
    if not timeout > 0:
        raise ValueError(f"the timeout of a connection must be positive, not {timeout}")
    # An end that is gone is noticed after a pause and a half-time at most, which leaves a quarter for it to come back.
    milliseconds = max(1, int(timeout * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, milliseconds // 4))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, milliseconds // 2))
    # While what was sent before is stuck in the kernel, libzmq sends no heartbeat and misses none. So the kernel has to
    # give up what is not acknowledged (TCP_USER_TIMEOUT, tcp(7)).
    socket.setsockopt(zmq.TCP_MAXRT, max(1, milliseconds // 4 * 3))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_SECONDS * 1000))


def grace(timeout: float) -> float:
    """Seconds that an end whose connection is gone has to come back, for all to take no longer than ``timeout``."""
    return timeout / 4


# Wires ------------------------------------------------------------------------------------------------------------


class RemoteSenderWire(Wire):
    """The sender's socket for remote readers.

    Args:
        listener: Where they connect; it is taken over.
        keys: Of the channel.
        timeout: Seconds after which a reader that is not heard of is disconnected, about.

    Attributes:
        foreign: Messages that made no sense.
        admitted: Connections that had the right keys.
        strangers: Connections that were refused for their keys.
    """

    def __init__(self, listener: Listener, keys: Keys, timeout: float) -> None:
        # A context of its own: libzmq asks one place in each whom to admit, and encryption is not to delay wake-ups.
        super().__init__(zmq.XPUB, alone=True)
        self._key = z85.decode(keys.reader_public)
        self.foreign = 0
        self.admitted = 0
        self.strangers = 0
        sender_wires.add(self)
        socket = self.socket
        self._zap = None
        try:
            self._zap = zap = socket.context.socket(zmq.REP)
            zap.setsockopt(zmq.LINGER, 0)
            zap.bind(_ZAP_ADDRESS)
            self.zap_fd: int = zap.getsockopt(zmq.FD)
            socket.curve_server = True
            socket.curve_publickey = keys.server_public.encode()
            socket.curve_secretkey = keys.server_secret.encode()
            socket.setsockopt(zmq.ZAP_DOMAIN, b"aioarena")
            socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_UP)
            _heartbeats(socket, timeout)
            listener.hand_over(socket)
        except BaseException:
            self.close()
            raise

    def admit(self) -> None:
        """Answer libzmq, which asks whether the keys of new connections are ours. To be called after the wire was used."""
        zap = self._zap
        while zap is not None and events_of(zap) & zmq.POLLIN:
            version, request, _, _, _, mechanism, *credentials = zap.recv_multipart()
            admitted = mechanism == b"CURVE" and credentials == [self._key]
            self.admitted += admitted
            self.strangers += not admitted
            zap.send_multipart([version, request, b"200" if admitted else b"400", b"", b"", b""])

    def welcome(self, incarnation: int, welcome: Welcome) -> None:
        self.socket.send(_WELCOME.pack(b"R", incarnation, b"W", welcome.rank, welcome.session, welcome.number))

    def send(self, incarnation: int, session: int, sequence: int, parts: Sequence[Any]) -> list[weakref.ref[memoryview]]:
        """Queue a piece of a stream. Parts that are not bytes are sent from where they lie.

        Returns:
            One for each of those: dead once libzmq is done with the memory.
        """
        if not zmq_collector.is_alive():
            require_descriptors()  # for the thread that pyzmq starts with the first frame
        frames: list[bytes | zmq.Frame] = [_DATA.pack(b"R", incarnation, b"D", session, sequence)]
        used = []
        for part in parts:
            if isinstance(part, bytes):
                frames.append(part)
            else:
                # Of its own, so that none but libzmq refers to it. pyzmq's trackers say the same for twice the time.
                view = memoryview(part)
                used.append(weakref.ref(view))
                frames.append(zmq.Frame(view, copy=False))
        try:
            self.socket.send_multipart(frames, copy=False)
        except BaseException:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send(b"")  # ends it, wherever it broke off; what comes next is not to be a part of it
            raise
        return used

    def end(self, incarnation: int, number: int) -> None:
        self.socket.send(_END.pack(b"R", incarnation, b"E", number))

    def give_up(self, incarnation: int, given_up: GivenUp) -> None:
        kind = b"F" if given_up.failed else b"G"
        self.socket.send(_GIVEN_UP.pack(b"R", incarnation, kind, given_up.number) + _text(given_up.reason))
        self.socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)

    def drain(self) -> list[Upward]:
        """What arrived, up to a bound: whoever sends without end is not to stop all else."""
        self.admit()
        events: list[Upward] = []
        for _ in range(_MOST_DRAINED):
            if not self.readable():
                break
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            event = self._parse(frames[0]) if len(frames) == 1 else None
            if event is not None:
                events.append(event)
            elif frames[0].bytes[:1] not in (b"\x00", b"\x01"):  # another (un)subscription
                self.foreign += 1
        return events

    def _parse(self, frame: zmq.Frame) -> Upward | None:
        message = frame.bytes
        kind = message[:1]
        if kind in (b"\x00", b"\x01") and message[1:2] == b"R" and len(message) == 1 + _TOPIC.size:
            incarnation = _TOPIC.unpack(message[1:])[1]
            return Connect(incarnation) if kind == b"\x01" else Disconnect(incarnation)
        if kind == b"J" and len(message) >= _JOIN.size:
            _, incarnation, version, rank, session, returning, received, limit, *process = _JOIN.unpack_from(message)
            host = _read_text(message[_JOIN.size :])
            try:
                address = str(frame.get("Peer-Address"))
            except zmq.ZMQError:
                address = "an address unknown"
            identity = ProcessIdentity(*process)
            return RemoteJoin(incarnation, version, rank, session, returning, received, limit, identity, host, address)
        if kind == b"A" and len(message) == _ACK.size:
            return Ack(*_ACK.unpack(message)[1:])
        if kind == b"L" and len(message) >= _LEAVE.size:
            return RemoteLeave(_LEAVE.unpack_from(message)[1], _read_text(message[_LEAVE.size :]))
        return None

    def close(self) -> None:
        if self._socket is not None and self._pid == os.getpid():
            if self._zap is not None:
                self._zap.close()
                self._zap = None
            super().close()


@dataclass(slots=True)
class Connection:
    """What became of a reader's connections, from libzmq's reports.

    Attributes:
        reached: Whether something at the address accepts connections.
        sessions: Connections that stood, keys checked.
        up: Whether one stands now.
        failures: Handshakes that failed in a row.
        rejected: Whether the sender has refused our keys.
        abandoned: Whether libzmq makes no other connection by itself: after something came that no ZMQ sends.
    """

    reached: bool = False
    sessions: int = 0
    up: bool = False
    failures: int = 0
    rejected: bool = False
    abandoned: bool = False


class RemoteReceiverWire(Wire):
    """A remote reader's socket.

    Args:
        remote: Where to connect, and with which keys.
        incarnation: Number of this reader, which nobody else has.
    """

    def __init__(self, remote: RemoteRef, incarnation: int) -> None:
        super().__init__(zmq.XSUB, alone=True)
        self._incarnation = incarnation
        self._endpoint = remote.endpoint
        self._topic = _TOPIC.pack(b"R", incarnation)
        self._monitor: zmq.Socket[bytes] | None = None
        self.connection = Connection()
        self._shaking_hands = False
        self.foreign = 0
        socket = self.socket
        try:
            host, port = parse_endpoint(remote.endpoint)
            if not port:
                raise ValueError(f"{remote.endpoint!r} names no port")
            socket.setsockopt(zmq.IPV6, int(":" in host))
            socket.setsockopt(zmq.RECONNECT_IVL, int(_RECONNECT * 1000))
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(_RECONNECT_MAX * 1000))
            socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_DOWN)
            socket.curve_serverkey = str.encode(remote.server_key)
            socket.curve_publickey = str.encode(remote.public_key)
            socket.curve_secretkey = str.encode(remote.secret_key)
            _heartbeats(socket, remote.timeout)
            self._monitor = monitor = socket.get_monitor_socket(
                zmq.EVENT_CONNECTED
                | zmq.EVENT_CLOSED
                | zmq.EVENT_CONNECT_RETRIED
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            )
            monitor.setsockopt(zmq.LINGER, 0)
            self.monitor_fd: int = monitor.getsockopt(zmq.FD)  # type: ignore[assignment]
            socket.connect(remote.endpoint)
            socket.send(b"\x01" + self._topic)
        except BaseException:
            self.close()
            raise

    def drain_monitor(self) -> bool:
        """Bring :attr:`connection` up to date; whether anything happened."""
        changed = False
        while self._monitor is not None and events_of(self._monitor) & zmq.POLLIN:
            report = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            self._take_in(report["event"], report["value"])
            changed = True
        return changed

    def _take_in(self, event: int, value: int) -> None:
        connection = self.connection
        if event == zmq.EVENT_CONNECT_RETRIED:
            connection.abandoned = False
            return
        was_shaking_hands, self._shaking_hands = self._shaking_hands, event == zmq.EVENT_CONNECTED
        if event == zmq.EVENT_CONNECTED:
            connection.reached = True
            connection.abandoned = False
            return
        connection.up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            connection.sessions += 1
            connection.failures = 0
        elif event == zmq.EVENT_CLOSED:
            connection.reached = False  # nobody listens there
        elif event == zmq.EVENT_DISCONNECTED:
            connection.abandoned = True  # unless a report that another connection is made follows
            connection.failures += was_shaking_hands
        else:
            # A sender that was not started yet holds its connections and answers none: they end when their time is over,
            # of which libzmq makes no error of its own.
            silent = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN
            connection.rejected |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            # Also when what comes later does not decrypt: libzmq 4.3.5 then reads no more until a heartbeat is missed.
            connection.abandoned |= event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            connection.failures += not silent

    def receive(self) -> Downward | None:
        """The next message, None if there is none."""
        while self.readable():
            head, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            event = self._parse(head.bytes, parts)
            if event is not None:
                return event
            self.foreign += 1
        return None

    def _parse(self, head: bytes, parts: list[zmq.Frame]) -> Downward | None:
        if not head.startswith(self._topic):
            return None
        kind = head[_TOPIC.size : _TOPIC.size + 1]
        if kind == b"D" and len(head) == _DATA.size:
            _, _, _, session, sequence = _DATA.unpack(head)
            return Data(session, sequence, parts)
        if parts:
            return None
        if kind == b"W" and len(head) == _WELCOME.size:
            return Welcome(*_WELCOME.unpack(head)[3:])
        if kind == b"E" and len(head) == _END.size:
            return End(_END.unpack(head)[3])
        if kind in (b"G", b"F") and len(head) >= _GIVEN_UP.size:
            return GivenUp(_read_text(head[_GIVEN_UP.size :]), _GIVEN_UP.unpack_from(head)[3], kind == b"F")
        return None

    def reconnect(self) -> None:
        """Break the connection off, and make another."""
        self.connection.up = self.connection.abandoned = False
        with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up itself
            self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)

    def join(self, join: RemoteJoin) -> None:
        identity = join.identity
        self.socket.send(
            _JOIN.pack(
                b"J",
                join.incarnation,
                join.version,
                join.rank,
                join.session,
                join.returning,
                join.received,
                join.limit,
                identity.pid,
                identity.start_ticks,
                identity.pid_namespace,
            )
            + _text(join.host)
        )

    def ack(self, ack: Ack) -> None:
        self.socket.send(_ACK.pack(b"A", ack.incarnation, ack.session, ack.received, ack.limit))

    def leave(self, reason: str = "") -> None:
        """Say that this reader goes, and why if not in good order. Closing at once does not lose it."""
        if self._socket is not None and self._pid == os.getpid() and self.connection.up:
            self.socket.send(_LEAVE.pack(b"L", self._incarnation) + _text(reason))
            self.socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)

    def close(self) -> None:
        if self._socket is not None and self._pid == os.getpid():
            if self._monitor is not None:
                self.socket.disable_monitor()
                self._monitor.close()
                self._monitor = None
            super().close()


def _text(text: str) -> bytes:
    return text.encode(errors="replace")[:_LONGEST_TEXT]


def _read_text(text: bytes) -> str:
    """What the other end says, fit for a line of a log: it may hold anything."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_LONGEST_TEXT].decode(errors="replace"))
