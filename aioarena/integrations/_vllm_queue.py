"""vLLM's MessageQueue over aioarena's blocking ends. Imports vLLM."""

from __future__ import annotations

import logging
import threading
import time
from asyncio import _get_running_loop as running_loop
from asyncio import _set_running_loop as set_running_loop
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from vllm.distributed.device_communicators import shm_broadcast

from aioarena._driver import _Loop
from aioarena._types import ArenaConfig
from aioarena._types import Handle as ChannelHandle
from aioarena.blocking import Receiver, Sender
from aioarena.exceptions import BusyError, ClosedError, EndOfChannel, SenderLostError, TimedOutError

T = TypeVar("T")

logger = logging.getLogger("aioarena")

# Seconds that a reader whose writer is gone waits for vLLM to shut it down. Its monitors notice too, then end the other
# workers, by force after 10 s, and shut the queues down last: an error that is quicker would end the process meanwhile, and
# leave those workers behind. Only for the case that there is no monitor.
_MONITOR_SECONDS = 60.0

# Seconds that a queue waits, shut down, for readers to get what is under way. Whoever shuts down here has given them up.
_LINGER = 1.0

_Stock: Any = shm_broadcast.MessageQueue
_StockHandle: Any = shm_broadcast.Handle


@dataclass
class ArenaHandle(_StockHandle):  # type: ignore[misc]
    """A handle of vLLM, for a queue of ours.

    Attributes:
        local_reader_ranks: vLLM's ranks of the readers; the position of one is its rank on the channel.
        channel: What it needs to attach.
    """

    channel: ChannelHandle = field(default=cast(ChannelHandle, None), kw_only=True)


class ArenaMessageQueue(_Stock):  # type: ignore[misc]
    """Stands in for vLLM's MessageQueue: the same calls, for readers on this host.

    ``MessageQueue(...)`` with readers elsewhere, or none, makes one of vLLM's own. ``max_chunk_bytes`` and ``max_chunks``
    are of no use here: the ring takes records of any size, and what is too large for it travels otherwise.
    """

    _sender: Sender | None
    _receiver: Receiver | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return object.__new__(_Stock)  # as its create_from_handle does, for readers elsewhere
        n_reader, n_local_reader = _counts(*args, **kwargs)
        if n_local_reader == n_reader > 0:
            return object.__new__(cls)
        logger.info("a queue with %d of %d readers on other hosts is vLLM's own", n_reader - n_local_reader, n_reader)
        return _Stock(*args, **kwargs)

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 0,
        max_chunks: int = 0,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks
        assert len(ranks) == n_local_reader
        self._set_up(is_writer=True, rank=-1)
        self.n_local_reader = n_local_reader
        self.n_remote_reader = 0
        # Readers that die are seen by vLLM, which then ends the others too: until then it may go on sending.
        self._sender = Sender(
            n_reader,
            arena=ArenaConfig() if enable_shm_tensor_arena else None,
            on_reader_lost="continue",
            linger=_LINGER,
        )
        _wait(self._sender.start)
        self.handle = ArenaHandle(local_reader_ranks=ranks, channel=self._sender.handle)

    def _set_up(self, *, is_writer: bool, rank: int) -> None:
        self.shutting_down = False
        self._is_writer = is_writer
        self._is_local_reader = not is_writer
        self._is_remote_reader = False
        self.local_reader_rank = rank
        self._sender = None
        self._receiver = None
        self._shut_down = threading.Event()

    @staticmethod
    def create_from_handle(handle: Any, rank: int) -> Any:
        if not isinstance(handle, ArenaHandle):
            return _Stock.create_from_handle(handle, rank)
        queue: ArenaMessageQueue = object.__new__(ArenaMessageQueue)
        queue._set_up(is_writer=False, rank=handle.local_reader_ranks.index(rank))
        queue.handle = handle
        queue._receiver = Receiver(handle.channel, queue.local_reader_rank)
        return queue

    def export_handle(self) -> ArenaHandle:
        return self.handle

    def wait_until_ready(self) -> None:
        if self._sender is not None:
            _wait(self._sender.wait_ready)
        else:
            assert self._receiver is not None
            _wait(self._receiver.start)

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        assert self._sender is not None, "Only writers can enqueue"
        try:
            _wait(self._sender.send, obj, timeout)
        except ClosedError:
            self._raise_cancelled()
            raise

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("Only readers can dequeue")
        deadline = None if timeout is None else time.monotonic() + timeout
        # Who waits for an answer wants to know, now and then, that it still does; who waits for work does not.
        interval = None if indefinite else float(shm_broadcast.VLLM_RINGBUFFER_WARNING_INTERVAL)
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return _wait(receiver.recv, min((each for each in (left, interval) if each is not None), default=None))
            except TimedOutError as error:
                if left is not None and (interval is None or left <= interval):
                    raise
                logger.info("vLLM is still waiting: %s", str(error))  # not the error, which holds on to what it passed
            except (SenderLostError, EndOfChannel) as error:
                logger.warning("vLLM's queue has ended: %s", str(error))
                self._shut_down.wait(_MONITOR_SECONDS if left is None else min(left, _MONITOR_SECONDS))
                self._raise_cancelled()
                raise
            except ClosedError:
                self._raise_cancelled()
                raise

    def _raise_cancelled(self) -> None:
        if self.shutting_down:
            raise RuntimeError("cancelled") from None  # what vLLM's own says then

    def shutdown(self) -> None:
        self.shutting_down = True
        self._shut_down.set()
        end = self._sender or self._receiver
        if end is None:
            return
        try:
            _wait(end.close)
        except BusyError:
            # From a signal handler, while this thread waits here: the wait has to end first.
            threading.Thread(target=end.close, name="aioarena-shutdown").start()


def _wait(function: Callable[..., T], *args: Any) -> T:
    """Call what may wait, in a thread that runs an event loop, too: vLLM's own queue holds that up as well."""
    outer = running_loop()
    if outer is None or isinstance(outer, _Loop):
        return function(*args)
    set_running_loop(None)
    try:
        return function(*args)
    finally:
        set_running_loop(outer)


def _counts(n_reader: int, n_local_reader: int, *_: Any, **__: Any) -> tuple[int, int]:
    return n_reader, n_local_reader
