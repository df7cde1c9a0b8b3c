"""Every exception aioarena raises, sorted by what the caller should do next.

::

    ArenaError
    ├── ClosedError          you closed this end                     fix the calling code
    ├── EndOfChannel         the sender left, all was received       stop; ``async for`` does it for you
    ├── PeerLostError        the other end died                      reopen the channel
    │   ├── ReaderLostError  a reader died or vanished (.rank)       restart that rank, or close
    │   ├── SenderLostError  the sender died (.received)             wait for a new sender
    │   └── WorkerLostError  a worker of a group died (.rank)        close the group, make a new one
    ├── WorkerError          what a worker raised does not pickle    see its cause
    ├── EvictedError         the sender gave this reader up          attach again
    ├── BusyError            this end is already in that call        one such call at a time
    ├── WouldBlock           only from ``*_nowait``                  wait, or skip
    ├── TimedOutError        a blocking call's time is over          try again; nothing was lost (TimeoutError)
    ├── EncodeError          the object does not pickle (TypeError)  fix the object; nothing was sent
    ├── DecodeError          a message does not unpickle here        that message is consumed; go on
    │   └── NotAllowedError  ``allow=`` does not list it (.what)     list it, or mistrust the sender
    ├── HandleError          not a handle this version can attach    match versions, hosts and users
    ├── GroupError           not all ranks of a group could attach   see which, and why
    ├── NoSpaceError         memory is not there (OSError)           free or raise it
    ├── WrongContextError    wrong loop, thread or forked process    use it where it was started
    └── InternalError        an invariant broke                      report it

Wrong arguments raise ``ValueError`` or ``TypeError``; time-outs of the asyncio ends are ``TimeoutError`` from
``asyncio.timeout``, with a note on whom the call was waiting for.
"""

from __future__ import annotations

import errno

__all__ = [
    "ArenaError",
    "BusyError",
    "ClosedError",
    "DecodeError",
    "EncodeError",
    "EndOfChannel",
    "EvictedError",
    "GroupError",
    "HandleError",
    "InternalError",
    "NoSpaceError",
    "NotAllowedError",
    "PeerLostError",
    "ReaderLostError",
    "SenderLostError",
    "TimedOutError",
    "WorkerError",
    "WorkerLostError",
    "WouldBlock",
    "WrongContextError",
]


class ArenaError(Exception):
    """Root of everything this library raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Past the constructor, which wants more than the message.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[ArenaError], args: tuple[object, ...], attributes: dict[str, object]) -> ArenaError:
    error = cls.__new__(cls, *args)
    (OSError if isinstance(error, OSError) else Exception).__init__(error, *args)
    error.__dict__.update(attributes)
    return error


class ClosedError(ArenaError):
    """This end of the channel was closed in this process, or not started yet."""


class EndOfChannel(ArenaError):
    """The sender closed the channel and every message before that was received."""


class PeerLostError(ArenaError):
    """The process at the other end died without closing.

    Attributes:
        pid: Process id of the dead peer, as its own host numbers it.
    """

    pid: int

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


class ReaderLostError(PeerLostError):
    """A reader died, or dropped its connection without leaving.

    Raised by :meth:`Sender.send` and :meth:`Sender.wait_ready` for as long as the rank is vacant; a new process that
    attaches at the rank ends it. The message that raised it was not sent.

    Attributes:
        rank: Rank of the reader.
        signal: Number of the signal that killed it, where the sender is its parent; else None.
    """

    rank: int
    signal: int | None

    def __init__(self, message: str, *, pid: int, rank: int, signal: int | None = None) -> None:
        super().__init__(message, pid=pid)
        self.rank = rank
        self.signal = signal


class SenderLostError(PeerLostError):
    """The sender died without closing. Everything it had published was received before this is raised.

    Attributes:
        received: How many messages this reader received in all.
    """

    received: int

    def __init__(self, message: str, *, pid: int, received: int = 0) -> None:
        super().__init__(message, pid=pid)
        self.received = received


class WorkerLostError(PeerLostError):
    """A worker of a :class:`aioarena.engine.WorkerGroup` ended, and with it the group.

    Raised by all calls that were pending and by all later ones.

    Attributes:
        rank: Rank of the worker.
        signal: Number of the signal that killed it, else None.
        exit_code: The code it ended with; None if a signal killed it, or if somebody else has reaped it.
    """

    rank: int
    signal: int | None
    exit_code: int | None

    def __init__(
        self, message: str, *, pid: int, rank: int, signal: int | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__(message, pid=pid)
        self.rank = rank
        self.signal = signal
        self.exit_code = exit_code


class WorkerError(ArenaError):
    """A worker of a :class:`aioarena.engine.WorkerGroup` raised something that does not pickle, or is no ``Exception``.

    The message has its type and text, the ``__cause__`` its traceback.
    """


class EvictedError(ArenaError):
    """The sender gave this reader up because it did not keep up; messages after that were not received."""


class BusyError(ArenaError):
    """This end is inside the same call already, e.g. a pickled object's ``__reduce__`` that sends."""


class WouldBlock(ArenaError):
    """The call would have to wait. Nothing was sent or received."""


class TimedOutError(ArenaError, TimeoutError):
    """The time that a call of :mod:`aioarena.blocking` was given is over; the message says what it waited for.

    Nothing was sent, and a message that was not received waits for the next call.
    """


class EncodeError(ArenaError, TypeError):
    """The object cannot be pickled. Nothing was sent and nothing is held."""


class DecodeError(ArenaError):
    """A message could not be unpickled in this process; the original error is the ``__cause__``.

    The message counts as received by this reader: the next receive returns the next message.
    """


class NotAllowedError(DecodeError):
    """A message names something that the receiver's ``allow=`` does not list. It was not called, nor imported.

    What the message named before that may have been made, from what is allowed.

    Attributes:
        what: What it named, such as ``"os.system"``.
    """

    what: str

    def __init__(self, message: str, *, what: str) -> None:
        super().__init__(message)
        self.what = what


class HandleError(ArenaError):
    """The handle does not name a channel this process can attach to.

    Attributes:
        expected: What this version looked for, or None.
        found: What was there instead, or None.
    """

    expected: object
    found: object

    def __init__(self, message: str, *, expected: object = None, found: object = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class GroupError(ArenaError):
    """A process group got no channel, since one of its ranks could not make or attach it; raised at all of them."""


class NoSpaceError(ArenaError, OSError):
    """Memory for the channel is not there, or file descriptors are not.

    Attributes:
        needed: Bytes, or descriptors, that the channel needs from the resource that is short.
        available: How many are left there.
    """

    needed: int
    available: int

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(errno.ENOSPC, message)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return str(self.args[1])


class WrongContextError(ArenaError, RuntimeError):
    """The channel is used from another event loop, thread or forked process than the one that started it."""


class InternalError(ArenaError):
    """An invariant of the library broke: please report it, with the message."""


def text_of(error: BaseException) -> str:
    """The text of an error that is not ours: its ``__str__`` may fail."""
    try:
        return str(error)
    except Exception:
        return "(it fails to say why)"
