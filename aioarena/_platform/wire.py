"""The ZMQ sockets of a channel: an XPUB at the sender, an XSUB at each reader, over a Unix socket.

They carry wake-ups, frames, joins and leaves; never the bytes of the arena. A message starts with one letter:

=========  ==================  =======================================================================
direction  message             meaning
=========  ==================  =======================================================================
down       ``W``               look at the ring
down       ``W!`` text         no message follows those in the ring, since whoever the sender had them from is lost
down       ``F`` incarnation,  parts of frame message ``number`` for that reader follow
           number
down       ``I`` incarnation   refusal of that reader's join; the reason follows
up         ``J`` ...           join: nonce, layout version, rank, incarnation, pid, start ticks, pid namespace, bell
up         ``L`` ...           leave: nonce, rank, incarnation
up         ``W`` ...           the sender's wait is over: nonce, rank
=========  ==================  =======================================================================

Every reader subscribes to ``W`` and to its own ``F`` and ``I`` topics. Frames are addressed to each seated reader, so that
nothing is queued for one that was given up and does not read; libzmq shares the bytes among them. The ``I`` topic doubles
as a sign of life: when the connection ends, libzmq hands the sender an unsubscription from it.

ZMQ's descriptor is edge-triggered, and every operation on the socket may consume the edge. So whoever sends has to ask
:meth:`~Wire.readable` afterwards and drain if it says so, or what arrived meanwhile sits there until the next message.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import stat
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.garbage import gc as zmq_collector
from zmq.utils.monitor import parse_monitor_message

from aioarena._core.layout import VERSION
from aioarena._platform.bell import NO_BELL, BellRef
from aioarena._platform.memory import owned_name, sweep
from aioarena._platform.process import ProcessIdentity, require_descriptors
from aioarena.exceptions import ArenaError

# sockaddr_un.sun_path has 108 bytes with its terminating zero (unix(7)).
_MAX_SOCKET_PATH = 107
# While a reader waits for its sender to bind: first pause, and where doubling it ends. A guess, safe because it bounds
# only how long a reader that was started first takes to notice.
_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 200

# How long closing a reader's connected socket may take to write its leave: a few bytes into a Unix socket. A bound for a
# sender's process that is stopped with its socket's buffer full, in which case the leave is lost.
_LEAVE_MS = 100

_JOIN = struct.Struct("=c16sIIQQQQIQ")
_LEAVE = struct.Struct("=c16sIQ")
_WAKE = struct.Struct("=c16sI")
_TOPIC = struct.Struct("=cQ")  # letter and incarnation
_FRAMES = struct.Struct("=cQQ")  # topic and number of the frame message
_FAILURE = b"W!"  # as a topic it begins with that of wake-ups, which all readers have


# One context a process, so one I/O thread however many channels it has; terminated with its last socket.


class _Context:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0
        _contexts.add(self)

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
                self._context.set(zmq.MAX_SOCKETS, 4096)
            self._users += 1
            return self._context

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._context is not None:
                # Our sockets are closed with linger 0, but for a leave: this only waits for the I/O thread to notice.
                self._context.term()
                self._context = None

    def _forget(self) -> None:
        # A child has no I/O thread and must not touch the parent's sockets; the inherited objects are left alone.
        _orphans.append(self._context)
        self._lock = threading.Lock()
        self._context = None
        self._users = 0


_contexts: weakref.WeakSet[_Context] = weakref.WeakSet()
_orphans: list[object] = []
_context = _Context()


def _forget_contexts() -> None:
    for context in list(_contexts):
        context._forget()


os.register_at_fork(after_in_child=_forget_contexts)

sender_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_before_exit() -> None:
    """Close what a program left open, before pyzmq frees the memory of frames that are still being sent.

    Registered after pyzmq's own handler, which importing it does, and so called before it.
    """
    if not zmq_collector.is_alive():
        return  # no frame was ever sent
    for wire in list(sender_wires):
        if wire._pid != os.getpid():
            continue
        if wire._owner is threading.current_thread() or not wire._owner.is_alive():
            wire.close()
        else:
            # A daemon thread may be using it, and a socket is for one thread. So the memory stays until the process is
            # gone: nobody stops pyzmq's collector, and the interpreter cannot take it down either.
            atexit.unregister(zmq_collector._atexit)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(zmq_collector))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(wire))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(wire._context))


atexit.register(_close_before_exit)


def runtime_directory() -> Path:
    """The private directory for sockets of this user: 0700, ours, not a link; swept of dead processes' sockets."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > _MAX_SOCKET_PATH - 80:
        base = Path("/tmp")
    for name in _directory_names():
        preferred = base / name
        with contextlib.suppress(FileExistsError):
            preferred.mkdir(mode=0o700)
        status = preferred.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            sweep(preferred)
            return preferred
    return Path(tempfile.mkdtemp(prefix=f"aioarena-{os.getuid()}-", dir=base))


def _directory_names() -> list[str]:
    # Somebody may have taken the name, or opened it up: whatever that means, it must not stop us. The next names are as
    # fixed as the first, so that directories do not pile up and later starts sweep them.
    first = f"aioarena-{os.getuid()}"
    return [first, *(f"{first}-{number}" for number in range(1, 10))]


def new_address() -> str:
    """A fresh socket path in the runtime directory.

    Raises:
        ArenaError: The path is too long for a Unix socket.
    """
    path = str(runtime_directory() / owned_name("sock"))
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ArenaError(f"socket path {path!r} is longer than {_MAX_SOCKET_PATH} bytes; set TMPDIR to a shorter one")
    return path


@dataclass(frozen=True, slots=True)
class Join:
    version: int
    rank: int
    incarnation: int
    identity: ProcessIdentity
    bell: BellRef = NO_BELL


@dataclass(frozen=True, slots=True)
class Leave:
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The connection of a reader ended."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Wake:
    rank: int


Event = Join | Leave | Disconnect | Wake


def events_of(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.EVENTS))


class Wire:
    """A socket that an event loop looks after.

    Args:
        kind: Of ZMQ socket.
        alone: Whether it gets a context, and so an I/O thread, of its own.
    """

    def __init__(self, kind: int, *, alone: bool = False) -> None:
        self._pid = os.getpid()
        self._context = _Context() if alone else _context
        self._owner = threading.current_thread()
        self._socket: zmq.Socket[bytes] | None = None
        require_descriptors()
        context = self._context.acquire()
        try:
            socket = context.socket(kind)
        except BaseException:
            self._context.release()
            raise
        try:
            socket.setsockopt(zmq.LINGER, 0)
            # No mark at which libzmq would drop: the channel bounds what is under way itself, in bytes.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            self.fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        except BaseException:
            socket.close()
            self._context.release()
            raise
        self._socket = socket

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._socket is not None, "the wire is closed"
        return self._socket

    def readable(self) -> bool:
        """Whether something is there to drain; asking re-arms the descriptor."""
        return self._socket is not None and bool(events_of(self._socket) & zmq.POLLIN)

    def close(self) -> None:
        if self._socket is None or self._pid != os.getpid():
            return
        self._socket.close()
        self._socket = None
        self._context.release()


class SenderWire(Wire):
    """The sender's socket.

    Args:
        path: Unix socket path to bind.
        nonce: 16 bytes that every message from a reader of this channel carries.
    """

    def __init__(self, path: str, nonce: bytes) -> None:
        super().__init__(zmq.XPUB)
        self._path = path
        self._nonce = nonce
        self.foreign = 0  # messages that no reader of this channel sent
        sender_wires.add(self)
        try:
            self.socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            super().close()
            raise ArenaError(f"cannot bind the channel's socket {path}: {error.strerror}; make a new Sender") from error
        except BaseException:
            super().close()
            raise

    def wake(self) -> None:
        self.socket.send(b"W")

    def send_frames(self, number: int, parts: Sequence[Any], incarnations: Iterable[int]) -> None:
        """Queue a frame message for some readers. ``parts`` become libzmq's: nobody may write to them any more."""
        if not zmq_collector.is_alive():
            require_descriptors()  # for the thread that pyzmq starts with the first frame
        # One message object per part, whose memory all queues share; it goes once the last of them has sent it.
        frames = [zmq.Frame(part, copy=False) for part in parts]
        for incarnation in incarnations:
            self.socket.send_multipart([_FRAMES.pack(b"F", incarnation, number), *frames], copy=False)

    def refuse(self, incarnation: int, reason: str) -> None:
        self.socket.send(_TOPIC.pack(b"I", incarnation) + reason.encode())

    def fail(self, reason: str) -> None:
        """Tell all readers that no message will come any more, and why."""
        self.socket.send(_FAILURE + reason.encode(errors="replace"))
        self.socket.setsockopt(zmq.LINGER, _LEAVE_MS)

    def drain(self) -> list[Event]:
        """Everything that arrived."""
        events: list[Event] = []
        while self.readable():
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(parts) > 1:
                self.foreign += 1
                continue
            event = self._parse(parts[0])
            if event is not None:
                events.append(event)
        return events

    def _parse(self, message: bytes) -> Event | None:
        kind = message[:1]
        if kind == b"\x00" and message[1:2] == b"I" and len(message) == 1 + _TOPIC.size:
            return Disconnect(_TOPIC.unpack(message[1:])[1])
        if kind in (b"\x00", b"\x01"):
            return None  # other (un)subscriptions
        if message[1:17] == self._nonce:
            if kind == b"J" and len(message) == _JOIN.size:
                _, _, version, rank, incarnation, pid, ticks, namespace, *bell = _JOIN.unpack(message)
                return Join(version, rank, incarnation, ProcessIdentity(pid, ticks, namespace), BellRef(*bell))
            if kind == b"L" and len(message) == _LEAVE.size:
                return Leave(*_LEAVE.unpack(message)[2:])
            if kind == b"W" and len(message) == _WAKE.size:
                return Wake(_WAKE.unpack(message)[2])
        self.foreign += 1
        return None

    def close(self) -> None:
        if self._socket is not None and self._pid == os.getpid():
            super().close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)


class ReceiverWire(Wire):
    """A reader's socket.

    Attributes:
        refusal: Why the sender refused the join, once it did.
        failure: Why no message will come any more, once the sender said so.
        connected: Whether a connection stood at some time.
        disconnected: Whether a connection that stood has ended. Everything that arrived over it is drained by then.
    """

    def __init__(self, path: str, nonce: bytes, rank: int, incarnation: int) -> None:
        super().__init__(zmq.XSUB)
        self._path = path
        self._nonce = nonce
        self._rank = rank
        self._incarnation = incarnation
        self._frames: dict[int, list[zmq.Frame]] = {}
        self.refusal: str | None = None
        self.failure: str | None = None
        self._left = False
        self.connected = False
        self.disconnected = False
        self.foreign = 0
        socket = self.socket
        try:
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            self._monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self.monitor_fd: int = self._monitor.getsockopt(zmq.FD)  # type: ignore[assignment]
            socket.connect(f"ipc://{path}")
            # Before the join on the same connection: by the time the sender reads the join, it sends us these topics.
            self._refusals = _TOPIC.pack(b"I", incarnation)
            self._own_frames = _TOPIC.pack(b"F", incarnation)
            for topic in (b"W", self._own_frames, self._refusals):
                socket.send(b"\x01" + topic)
        except BaseException:
            self.close()
            raise

    def join(self, identity: ProcessIdentity, bell: BellRef = NO_BELL) -> None:
        self.socket.send(
            _JOIN.pack(
                b"J",
                self._nonce,
                VERSION,
                self._rank,
                self._incarnation,
                identity.pid,
                identity.start_ticks,
                identity.pid_namespace,
                bell.fd,
                bell.inode,
            )
        )

    def leave(self) -> None:
        """Give the seat back, or what was asked for. Closing at once does not lose it, if a connection stands."""
        if self._left or self._socket is None or self._pid != os.getpid():
            return
        self.drain()
        # The monitor may not have told of a connection that stands, and over which the join goes out at this very moment.
        if (self.connected or os.path.exists(self._path)) and not self.disconnected:
            self._left = True
            self.socket.send(_LEAVE.pack(b"L", self._nonce, self._rank, self._incarnation))
            self.socket.setsockopt(zmq.LINGER, _LEAVE_MS)

    def wake(self) -> None:
        self.socket.send(_WAKE.pack(b"W", self._nonce, self._rank))

    def drain(self) -> bool:
        """Take in everything that arrived; whether there was anything."""
        # The monitor first: libzmq reports a disconnect after it has queued what came before it, so that draining the
        # socket afterwards really gets everything.
        disconnected = False
        while events_of(self._monitor) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            disconnected |= event["event"] == zmq.EVENT_DISCONNECTED
            self.connected |= event["event"] == zmq.EVENT_CONNECTED
        any_message = self.drain_messages()
        self.disconnected |= disconnected
        return any_message or disconnected

    def drain_messages(self) -> bool:
        """Take in the messages that arrived; whether there were any. Less than :meth:`drain`, for each wake-up."""
        any_message = False
        socket = self.socket
        while self.readable():
            any_message = True
            head: bytes = socket.recv(zmq.NOBLOCK)
            if head == b"W":  # has one part
                continue
            parts = socket.recv_multipart(zmq.NOBLOCK, copy=False) if socket.getsockopt(zmq.RCVMORE) else []
            self._take(head, parts)
        return any_message

    def _take(self, head: bytes, parts: list[zmq.Frame]) -> None:
        topic = head[: _TOPIC.size]
        if topic == self._own_frames and len(head) == _FRAMES.size:
            self._frames[_FRAMES.unpack(head)[2]] = parts
        elif topic == self._refusals:
            self.refusal = head[_TOPIC.size :].decode(errors="replace")
        elif head.startswith(_FAILURE):
            self.failure = head[len(_FAILURE) :].decode(errors="replace")
        else:
            self.foreign += 1

    def frames(self, number: int) -> list[zmq.Frame] | None:
        """Parts of a frame message, None if it is not here yet. They stay until :meth:`drop_frames`."""
        return self._frames.get(number)

    def drop_frames(self, number: int) -> None:
        """Forget a frame message and all before it."""
        for known in [known for known in self._frames if known <= number]:
            del self._frames[known]

    def close(self) -> None:
        if self._socket is not None and self._pid == os.getpid():
            monitor = getattr(self, "_monitor", None)
            if monitor is not None:
                self.socket.disable_monitor()
                monitor.close()
            self._frames.clear()
            super().close()
