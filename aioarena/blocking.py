"""Both ends of a channel for threads without an event loop.

The same channel as with :class:`aioarena.Sender` and :class:`aioarena.Receiver`: handles, guarantees and options are the
same, and asyncio ends and blocking ends work with each other. Any thread may call, also several at once; sends happen in
the order of the calls, and each message goes to one of the threads that receive. What a signal handler raises in the main
thread, as Ctrl-C does, ends a waiting call like a time-out.

Calls that wait take a ``timeout`` in seconds; None, the default, waits without end. When it is over they raise
:class:`TimedOutError`, which says what they waited for, and nothing is lost: a message was sent to all readers or to none,
and one that was not received waits for the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypedDict, TypeVar, Unpack

import numpy as np
import torch

from aioarena import _process_groups, receiver, sender
from aioarena._asyncio import State
from aioarena._driver import LoopDriver
from aioarena._generic import Received, Sent
from aioarena._platform.process import require_descriptors
from aioarena._types import ArenaConfig, Handle, ReceiverStatistics, SenderStatistics
from aioarena.exceptions import ClosedError, EndOfChannel, WrongContextError

__all__ = ["Receiver", "ReceiverOptions", "Sender", "SenderOptions", "from_process_group"]

T = TypeVar("T")
E = TypeVar("E", sender.Sender, receiver.Receiver)


class SenderOptions(TypedDict, total=False):
    """The options of :class:`aioarena.Sender`, with the same defaults."""

    name: str | None
    arena: ArenaConfig | None
    ring_bytes: int
    backing: Literal["memfd", "shm"]
    on_reader_lost: Literal["raise", "continue"]
    frame_budget: int
    evict_after: float | None
    stall_after: float
    linger: float
    wake: Literal["zmq", "pipe"]
    remote_readers: int
    bind: str | None
    advertise: str | None
    any_interface: bool
    remote_timeout: float


class ReceiverOptions(TypedDict, total=False):
    """The options of :class:`aioarena.Receiver`, with the same defaults."""

    spin: float
    pin: Literal["auto", "off"]
    private: bool
    allow: Iterable[str | Callable[..., Any]] | None


class _BlockingEnd(Generic[E]):
    """An asyncio end, and what runs its coroutines."""

    def __init__(self, end: E) -> None:
        self._end: E = end
        self._driver: LoopDriver | None = None  # from the start on
        self._claim = threading.Lock()  # of the driver

    def _start(self, timeout: float | None) -> None:
        if self._end._born_elsewhere():
            raise self._end._forked()
        _check_timeout(timeout)
        require_descriptors()  # the loop takes some, too
        driver = LoopDriver(self._end._label) if self._startable else None
        with self._claim:  # from other threads that start or close it at the same time
            if self._startable:
                self._driver = driver
        if driver is None or self._driver is not driver:
            if driver is not None:
                driver.close()
            raise ClosedError(f"{self._end._label} was started before; make a new one")
        try:
            driver.run(self._end.start, timeout=timeout)
        except BaseException:
            driver.close()
            if self._end._state is State.NEW:  # it did not come to that
                self._driver = None
            raise

    @property
    def _startable(self) -> bool:
        return self._driver is None and self._end._state is State.NEW

    def _run(
        self, function: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...] = (), timeout: float | None = None
    ) -> T:
        if timeout is not None:
            _check_timeout(timeout)
        driver = self._driver
        if driver is None:
            driver = self._driven()
        return driver.run(function, args, timeout)

    def _driven(self) -> LoopDriver:
        if self._driver is None:
            if self._end._state is State.NEW:
                raise ClosedError(f"{self._end._label} is not started: use `with`, or call start() first")
            raise self._end._closed()
        return self._driver

    def close(self) -> None:
        with self._claim:
            driver = self._driver
            if driver is None:
                # Never started: this does not wait, and needs no loop.
                with contextlib.suppress(StopIteration):
                    self._end.aclose().send(None)
                return
        if self._end._born_elsewhere():
            raise self._end._forked()
        try:
            driver.run(_close, (self._end,))
        finally:
            if self._end._state is State.CLOSED:
                driver.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's exit modules are half gone, and nobody is left who would close it.
        driver = None if exiting() else getattr(self, "_driver", None)
        if driver is None or self._end._state is State.CLOSED or self._end._born_elsewhere():
            return
        driver.abandon(self._end.aclose)
        warnings.warn(f"{self._end._label} was never closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<blocking {self._end!r}>"


class Sender(_BlockingEnd[sender.Sender], Generic[Sent]):
    """Broadcasts objects to a fixed number of readers, from any thread.

    The constructor reserves address space and makes the handle; ``with`` (or :meth:`start` and :meth:`close`) opens the
    channel.

    Args:
        readers: How many readers there are, with ranks 0 to ``readers - 1``. Sending waits until all have attached.
        options: As for :class:`aioarena.Sender`.

    Attributes:
        handle: What a reader needs to attach, blocking or not.

    Raises:
        ValueError, TypeError: An argument makes no sense.
        NoSpaceError: There is not enough memory for the arena and the ring.
    """

    handle: Handle

    def __init__(self, readers: int, **options: Unpack[SenderOptions]) -> None:
        super().__init__(sender.Sender(readers, **options))
        self.handle = self._end.handle

    # Life cycle ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the socket and begin to admit readers. Does not wait for them.

        Raises:
            ClosedError: It was started before.
            WrongContextError: An event loop runs in this thread.
        """
        self._start(None)

    def close(self) -> None:
        """Close in good order: everything sent stays receivable by the readers that attached, then their stream ends.

        Calls that wait in other threads raise :class:`ClosedError`. Waits for frames that are under way, at most ``linger``
        seconds; interrupted, it drops them. Closing twice is harmless.

        Raises:
            WrongContextError: An event loop runs in this thread, or it is a forked process.
        """
        super().close()

    def __enter__(self) -> Self:
        self.start()
        return self

    # Sending ------------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every rank has been taken by a reader.

        Raises:
            TimedOutError: The time is over.
            ReaderLostError: A reader died since (with ``on_reader_lost="raise"``).
            ClosedError: The sender was closed meanwhile.
        """
        self._run(self._end.wait_ready, (), timeout)

    def send(self, obj: Sent, timeout: float | None = None) -> None:
        """Send an object to all readers.

        Waits until all readers attached, for the copies of large buffers (made in threads), and while the slowest reader
        leaves no room in the ring. When it returns or raises, the caller owns all memory of ``obj`` again.

        Args:
            obj: Anything that pickles. Large CPU tensors, arrays and ``PickleBuffer`` are copied once, into the arena.
            timeout: Seconds to wait at most.

        Raises:
            TimedOutError: The time is over. Nothing was sent.
            EncodeError: It does not pickle.
            ReaderLostError: A reader died (with ``on_reader_lost="raise"``).
            ClosedError: The sender is closed, or was closed while this waited.
            BusyError: Called from inside an object's own pickling.
            WrongContextError: An event loop runs in this thread, or it is a forked process.
        """
        self._run(self._end.send, (obj,), timeout)

    enqueue = send

    def send_nowait(self, obj: Sent) -> None:
        """Send without waiting. Large buffers are copied on the spot, by the calling thread.

        Raises:
            WouldBlock: A reader has not attached, other sends are waiting, or there is no room. Nothing was sent.
            EncodeError, ReaderLostError, ClosedError, BusyError, WrongContextError: As :meth:`send`.
        """
        self._driven().call(self._end.send_nowait, obj)

    # Lent memory ----------------------------------------------------------------------------------------------------

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """A CPU tensor whose storage is a span of the arena, for the caller to fill: sending it copies nothing.

        See :meth:`aioarena.Sender.empty`. Waits only while the system finds memory for a new part of the arena.

        Args:
            shape: Its sizes, or the only one.
            dtype: By default that of ``torch.get_default_dtype()``.
            timeout: Seconds to wait at most.

        Raises:
            ValueError, TypeError: An argument makes no sense.
            TimedOutError, ClosedError, ReaderLostError, WrongContextError: As :meth:`send`.
        """
        return self._run(self._end.empty, (shape, dtype), timeout)

    def empty_like(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """:meth:`empty` of the shape and dtype of a tensor, which may be on any device."""
        return self._run(self._end.empty_like, (tensor, dtype), timeout)

    def empty_array(
        self, shape: int | Sequence[int], dtype: Any = np.float64, timeout: float | None = None
    ) -> np.ndarray[Any, Any]:
        """:meth:`empty` for numpy; by default of float64, as ``numpy.empty``.

        Raises:
            TypeError: Of a dtype with Python objects, too.
        """
        return self._run(self._end.empty_array, (shape, dtype), timeout)

    def reclaim(self, lent: torch.Tensor | np.ndarray[Any, Any], timeout: float | None = None) -> None:
        """Wait until no reader needs the memory of a lent tensor or array any more, so that it may be written again.

        That is when all have received what was sent of it and have dropped it, in all messages. For a tensor that is not
        lent this returns at once: sending has copied it.

        Raises:
            TypeError: It is no tensor and no array.
            TimedOutError, ClosedError, ReaderLostError, WrongContextError: As :meth:`send`.
        """
        self._run(self._end.reclaim, (lent,), timeout)

    def trim(self, timeout: float | None = None) -> int:
        """Give the memory of slots that nobody uses back to the system, e.g. after the largest message for long.

        Works in threads, piece by piece, while sends of other threads go on; the next message into those slots pays for
        fresh pages again.

        Returns:
            The bytes given back. 0 without an arena, and once a reader has pinned it: pinned memory cannot be given back.
            With ``backing="shm"`` only what lies behind everything in use is.

        Raises:
            TimedOutError, ClosedError, ReaderLostError, WrongContextError: As :meth:`send`.
        """
        return self._run(self._end.trim, (), timeout)

    def statistics(self) -> SenderStatistics:
        """A snapshot of counters and state. Cheap; may be called any time, also after close; waits for no other call."""
        return self._end.statistics()


class Receiver(_BlockingEnd[receiver.Receiver], Generic[Received]):
    """Receives what a Sender broadcasts, as one of its ranks, in any thread.

    Large CPU tensors, arrays and buffers arrive as views of the arena, without a copy: treat them as read-only, because
    the other readers look at the same memory. They hold their slots until the last view, slice or Parameter over them is
    gone, and stay valid after the channel, and the sender, are gone. Clone what you keep for long.

    A received tensor that is copied to a GPU should be dropped in the thread whose current stream copies it; for other
    streams see :meth:`record_stream`.

    Args:
        handle: The ``handle`` of a sender, blocking or not.
        rank: Which reader this is, 0 to ``handle.readers - 1``. One live process per rank.
        options: As for :class:`aioarena.Receiver`.

    Raises:
        ValueError, TypeError: An argument makes no sense.
    """

    handle: Handle
    rank: int

    def __init__(self, handle: Handle, rank: int, **options: Unpack[ReceiverOptions]) -> None:
        super().__init__(receiver.Receiver(handle, rank, **options))
        self.handle = handle
        self.rank = rank

    # Life cycle ---------------------------------------------------------------------------------------------------

    def start(self, timeout: float | None = None) -> None:
        """Attach to the channel and wait for the seat at this rank; the sender may be started later.

        When it raises, nothing is left behind; make a new one to try again.

        Raises:
            TimedOutError: The time is over.
            HandleError: The handle is of another version, or damaged, or what it names is not the channel.
            NoSpaceError: Too few file descriptors are left.
            SenderLostError: The sender is gone, or dies meanwhile.
            EndOfChannel: The sender closed before this reader joined.
            ArenaError: The sender refused, e.g. because a live process has the rank.
            WrongContextError: An event loop runs in this thread.
        """
        self._start(timeout)

    def close(self) -> None:
        """Leave the channel. What was not received is skipped; tensors already received stay valid.

        Calls that wait in other threads raise :class:`ClosedError`. Closing twice is harmless.

        Raises:
            WrongContextError: An event loop runs in this thread, or it is a forked process.
        """
        super().close()

    def __enter__(self) -> Self:
        self.start()
        return self

    # Receiving ----------------------------------------------------------------------------------------------------

    def recv(self, timeout: float | None = None) -> Received:
        """Receive the next message.

        Args:
            timeout: Seconds to wait at most. 0 takes a message that is there.

        Returns:
            The object that was sent. Its large CPU tensors have the sent shape and dtype, are writable memory to torch,
            and alias the arena (see the class).

        Raises:
            TimedOutError: The time is over. The message waits for the next call.
            EndOfChannel: The sender closed and everything was received.
            SenderLostError: The sender died; everything it had published was received.
            EvictedError: The sender gave this reader up.
            DecodeError: The message does not unpickle here. It counts as received.
            ClosedError: This end is closed, or was closed while this waited.
            BusyError: Called from inside an object's own unpickling.
            WrongContextError: An event loop runs in this thread, or it is a forked process.
        """
        return self._run(self._end.recv, (), timeout)  # type: ignore[no-any-return]

    dequeue = recv

    def __iter__(self) -> Iterator[Received]:
        return self

    def __next__(self) -> Received:
        try:
            return self.recv()
        except EndOfChannel:
            raise StopIteration from None

    def recv_nowait(self) -> Received:
        """Receive a message that is there.

        Raises:
            WouldBlock: There is none, its frames have not arrived, or another thread is receiving.
            Others: As :meth:`recv`.
        """
        return self._driven().call(self._end.recv_nowait)  # type: ignore[no-any-return]

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell that a stream reads a received tensor: its slot is not reused before that work is done.

        Needed for copies you start yourself (``tensor.to(device, non_blocking=True)``) on another stream than the one
        that is current when the tensor is dropped, in the thread that drops it. A tensor that is not in the arena is
        ignored.

        Args:
            tensor: A received CPU tensor, or any view of one.
            stream: A ``torch.cuda.Stream``.
        """
        self._driven().call(self._end.record_stream, tensor, stream)

    def to_device(self, obj: Any, device: Any, stream: Any = None) -> Any:
        """Copy all CPU tensors in an object to a device.

        Args:
            obj: A tensor, or any nesting of dict, list, tuple, named tuple and dataclass with tensors in it. Other
                objects, and tensors that are on the device, are passed through.
            device: Where to, e.g. ``"cuda:2"``. With ``"cpu"`` the tensors become private copies.
            stream: A ``torch.cuda.Stream`` to copy on and to use the result on; by default the one current in this thread.

        Returns:
            The same nesting over tensors on the device. The copies are complete, and usable on ``stream``. Received
            tensors may be dropped at once: their slots wait for the copies by themselves.

        Raises:
            ClosedError, WrongContextError: As :meth:`recv`.
        """
        return self._run(self._end.to_device, (obj, device, stream))

    def statistics(self) -> ReceiverStatistics:
        """A snapshot of counters and state. Cheap; may be called any time, also after close; waits for no other call."""
        return self._end.statistics()


def from_process_group(
    group: Any = None,
    src: int = 0,
    *,
    sender: SenderOptions | None = None,
    receiver: ReceiverOptions | None = None,
) -> Sender | Receiver:
    """As :func:`aioarena.from_process_group`, with a blocking Sender and blocking Receivers. Ranks may mix both calls.

    Raises:
        WrongContextError: An event loop runs in this thread.
        Others: As :func:`aioarena.from_process_group`.
    """
    if asyncio._get_running_loop() is not None:
        raise WrongContextError(
            "blocking.from_process_group would hold up the event loop that runs in this thread: await "
            "aioarena.from_process_group there"
        )
    connecting = _process_groups.connect(
        group,
        src,
        sender,
        lambda readers, options: Sender(readers, **options),
        lambda handle, rank: Receiver(handle, rank, **(receiver or {})),
        _start_of_group,
        _close_of_group,
        _process_groups.wait_in_thread,
    )
    try:
        connecting.send(None)  # nothing in there suspends
    except StopIteration as done:
        end: Sender | Receiver = done.value
        return end
    raise AssertionError("connecting suspended")


async def _start_of_group(end: Sender | Receiver) -> None:
    if isinstance(end, Receiver):
        end.start(_process_groups.ATTACH_SECONDS)
    else:
        end.start()


async def _close_of_group(end: Sender | Receiver) -> None:
    end.close()


async def _close(end: sender.Sender | receiver.Receiver) -> None:
    if end._state is not State.CLOSED:  # by another thread; then there is no loop either
        # In a task, because only tasks can have the time-outs of asyncio that closing uses.
        await asyncio.get_running_loop().create_task(end.aclose())


def _check_timeout(timeout: float | None) -> None:
    if timeout is None:
        return
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds or None, not {type(timeout).__name__}")
    if not timeout >= 0:  # NaN neither
        raise ValueError(f"timeout must not be negative, not {timeout}")
