"""The sending end of a channel, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import sys
import time
from asyncio import _get_running_loop as running_loop
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal

import numpy as np
import torch

from aioarena import _statistics
from aioarena._asyncio import BREATH_SHIFT, Endpoint, State, Turn
from aioarena._codec import Encoder, Plan, as_plan
from aioarena._core.arena import Loan
from aioarena._core.layout import Layout
from aioarena._core.record import INLINE
from aioarena._core.sender import ARENA_FULL, LARGER_THAN_ARENA, NOT_DIVERTIBLE, PlacedMessage, SenderCore
from aioarena._debug import describe_holdings
from aioarena._filling import FallbackLog, Filler
from aioarena._generic import Sent
from aioarena._lending import address_of, as_tensor, shape_of
from aioarena._membership import Members
from aioarena._platform.memory import SHM_DIRECTORY as SHM
from aioarena._platform.memory import Segment, require_memory, sweep
from aioarena._platform.network import Keys, Listener, RemoteRef, RemoteSenderWire
from aioarena._platform.process import ProcessIdentity, require_descriptors
from aioarena._platform.wire import SenderWire, Wake, new_address
from aioarena._remote.serving import Serving
from aioarena._stalls import Stalls
from aioarena._types import (
    DEFAULT_MIN_BYTES,
    DEFAULT_RING_BYTES,
    MIN_RING_BYTES,
    ArenaConfig,
    Handle,
    SenderStatistics,
)
from aioarena.exceptions import ArenaError, WouldBlock

logger = logging.getLogger("aioarena")

# Bytes of frames under way before the sender waits. A guess: a few of the largest messages we know of (200 MB).
DEFAULT_FRAME_BUDGET = 1 << 30

# Seconds until a remote reader that is not heard of is lost, and the most one can choose: heartbeats come more often.
DEFAULT_REMOTE_TIMEOUT = 5.0
_LONGEST_REMOTE_TIMEOUT = 3600.0

# Looking whether readers have released lent memory: first pause and longest, in seconds. A look costs microseconds.
_FIRST_LOOK = 0.0002
_LONGEST_LOOK = 0.005


class Sender(Endpoint, Generic[Sent]):
    """Broadcasts objects to a fixed number of readers.

    The constructor reserves address space and makes the handle; ``async with`` (or :meth:`start` and :meth:`aclose`)
    binds it to the running event loop. All calls belong on that loop.

    Args:
        readers: How many readers there are on this host, with ranks 0 to ``readers - 1``. Sending waits until all have
            attached.
        name: For logs and statistics; made up by default.
        arena: Size of the arena, or None to do without: large buffers then travel as frames.
        ring_bytes: Capacity of the ring, at least 64 KiB. 8 MiB by default.
        backing: ``"memfd"`` (anonymous memory, leaves nothing behind) or ``"shm"`` (files in /dev/shm, for readers in
            another pid namespace).
        on_reader_lost: ``"raise"``: when a reader dies, sending raises :class:`ReaderLostError` until a new process
            attaches at its rank. ``"continue"``: the others go on without it.
        frame_budget: Bytes of frames that may be under way before sending waits; one larger message may go alone. 1 GiB by
            default.
        evict_after: Seconds that sends may be held up by one reader before it is evicted: the others go on, it gets
            :class:`EvictedError` on its next call, and what it may still read is not reused until its process is dead.
            None, the default, never evicts.
        stall_after: Seconds a send waits for a reader before a warning says for whom, and then at growing intervals.
        linger: Seconds that :meth:`aclose` waits for readers to receive frames that are under way.
        wake: How parked readers are woken: ``"zmq"`` by one message for all of them, ``"pipe"`` by a byte in a pipe for
            each, which skips the I/O threads of ZMQ: a small message takes little more than half the time. Readers in
            another pid namespace are woken over ZMQ in any case.
        remote_readers: How many readers there are on other hosts, with the ranks after those of the local ones. They get
            the same messages over TCP, encrypted with keys that are made for this channel and travel in the handle.
        bind: With remote readers, the address of this host that they connect to, ``"tcp://10.0.0.5:0"``; port 0 takes a
            free one.
        advertise: Host that remote readers connect to, where it is another one than that in ``bind``.
        any_interface: Whether ``bind`` may be all interfaces (``"tcp://*:0"``), which needs ``advertise``, too.
        remote_timeout: Seconds after which a remote reader that is not heard of is lost.

    Raises:
        ValueError, TypeError: An argument makes no sense.
        NoSpaceError: There is not enough memory for the arena and the ring.
        ArenaError: ``bind`` cannot be bound.

    Attributes:
        handle: What a reader needs to attach.
    """

    _what = "Sender"

    def __init__(
        self,
        readers: int,
        *,
        name: str | None = None,
        arena: ArenaConfig | None = ArenaConfig(),  # noqa: B008 - frozen
        ring_bytes: int = DEFAULT_RING_BYTES,
        backing: Literal["memfd", "shm"] = "memfd",
        on_reader_lost: Literal["raise", "continue"] = "raise",
        frame_budget: int = DEFAULT_FRAME_BUDGET,
        evict_after: float | None = None,
        stall_after: float = 10.0,
        linger: float = 10.0,
        wake: Literal["zmq", "pipe"] = "zmq",
        remote_readers: int = 0,
        bind: str | None = None,
        advertise: str | None = None,
        any_interface: bool = False,
        remote_timeout: float = DEFAULT_REMOTE_TIMEOUT,
    ) -> None:
        self._state = State.CLOSED  # nothing to close if what follows raises
        for what, count in (("readers", readers), ("remote_readers", remote_readers)):
            if not isinstance(count, int) or isinstance(count, bool):
                raise TypeError(f"{what} must be an int, not {type(count).__name__}")
        if remote_readers < 0:
            raise ValueError(f"remote_readers must not be negative, not {remote_readers}")
        if readers < (0 if remote_readers else 1):
            raise ValueError(f"readers must be at least 1, not {readers}" if not remote_readers else f"readers: {readers}")
        if remote_readers and bind is None:
            raise ValueError('remote_readers need bind=, the address that they connect to, e.g. "tcp://10.0.0.5:0"')
        if not remote_readers and bind is not None:
            raise ValueError("bind is for remote readers: say how many there are with remote_readers=")
        if ring_bytes < MIN_RING_BYTES or ring_bytes >= 1 << 32:
            raise ValueError(f"ring_bytes must be at least {MIN_RING_BYTES} and below 4 GiB, not {ring_bytes}")
        if backing not in ("memfd", "shm"):
            raise ValueError(f'backing must be "memfd" or "shm", not {backing!r}')
        if on_reader_lost not in ("raise", "continue"):
            raise ValueError(f'on_reader_lost must be "raise" or "continue", not {on_reader_lost!r}')
        if wake not in ("zmq", "pipe"):
            raise ValueError(f'wake must be "zmq" or "pipe", not {wake!r}')
        if arena is not None and not isinstance(arena, ArenaConfig):
            raise TypeError(f"arena must be an ArenaConfig or None, not {type(arena).__name__}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, not {type(name).__name__}")
        if name is not None and "\0" in name:
            raise ValueError(f"name must not contain a zero character: {name!r}")
        for what, value in (
            ("frame_budget", frame_budget),
            ("stall_after", stall_after),
            ("linger", linger),
            ("remote_timeout", remote_timeout),
        ):
            _check_not_negative(what, value)
        if not 0.01 <= remote_timeout <= _LONGEST_REMOTE_TIMEOUT:
            raise ValueError(f"remote_timeout must be from 0.01 to {_LONGEST_REMOTE_TIMEOUT} seconds, not {remote_timeout}")
        if evict_after is not None:
            _check_not_negative("evict_after", evict_after)
        nonce = secrets.token_bytes(16)
        super().__init__(f"channel-{nonce.hex()[:6]}" if name is None else name)
        layout = Layout(
            readers=readers + remote_readers,
            ring_bytes=ring_bytes // 8 * 8,
            slots=arena.slots if arena else 0,
            slot_bytes=arena.slot_bytes if arena else 0,
        )
        self._on_reader_lost = on_reader_lost
        self._evict_after = evict_after
        self._stall_after = stall_after
        self._linger = linger
        self._nonce = nonce
        require_descriptors()
        sweep(SHM)  # whatever our backing, and before we look at what is free there
        require_memory(layout.control_bytes + layout.arena_bytes, on_shm=backing == "shm")
        self._keys = Keys.fresh() if remote_readers else None
        self._address = new_address()
        self._control = self._make_segment(backing, "control", layout.control_bytes)
        try:
            self._control.reserve(layout.control_bytes)
            self._listener = Listener(bind, advertise, any_interface) if bind is not None else None
            self._arena = self._make_segment(backing, "arena", layout.arena_bytes) if arena else None
        except BaseException:
            self._control.close()  # at once: this object is in a cycle, and is collected some time later
            if (listener := getattr(self, "_listener", None)) is not None:
                listener.close()
            raise
        header = self._control.mapping.view[: layout.ring_offset].cast("Q")
        inode = self._arena.ref.inode if self._arena else 0
        layout.format(header, nonce, pid=os.getpid(), arena=inode, name=self._name)
        self._core = SenderCore(
            self._control.mapping.view,
            layout,
            min_bytes=arena.min_bytes if arena else DEFAULT_MIN_BYTES,
            frame_budget=frame_budget,
            clock=time.monotonic,
        )
        self.handle = Handle(
            name=self._name,
            readers=readers + remote_readers,
            sender=ProcessIdentity.current(),
            nonce=nonce,
            layout=layout,
            control=self._control.ref,
            arena=self._arena.ref if self._arena else None,
            address=self._address,
            prefault=arena.prefault if arena else 0,
            wake=wake,
            remote=self._remote_ref(remote_readers, remote_timeout),
        )
        self._rings_bells = wake == "pipe"
        self._encoder = Encoder()
        self._filler = Filler(self._name, self._core, self._arena)
        self._wire: SenderWire | None = None
        self._members: Members | None = None
        self._serving: Serving | None = None  # of remote readers
        self._turns: deque[Turn] = deque()
        self._unplanned = 0  # sends that have not pickled their objects yet
        self._lending = 0  # calls that wait for lent memory, or give memory back
        self._wakeups = 0
        self._waits = 0
        self._wait_seconds = 0.0
        self._ring_peak = 0  # as statistics have seen it
        self._log_fallback = FallbackLog(self._name, self._core.arena)
        self._stalls: Stalls | None = None
        self._foreign_reported = 0

    def _make_segment(self, backing: str, kind: str, nbytes: int) -> Segment:
        if backing == "memfd":
            return Segment.memfd(f"aioarena-{self._name[:180]}-{kind}", nbytes)
        return Segment.shm(kind, nbytes)

    def _remote_ref(self, readers: int, timeout: float) -> RemoteRef | None:
        if self._listener is None or self._keys is None:
            return None
        keys = self._keys
        return RemoteRef(
            self._listener.endpoint, readers, timeout, keys.server_public, keys.reader_public, keys.reader_secret
        )

    # Life cycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the socket and begin to admit readers, on the running loop. Does not wait for them.

        Raises:
            ClosedError: It was started before.
        """
        self._bind()
        assert self._loop is not None
        try:
            self._wire = SenderWire(self._address, self._nonce)
            self._members = Members(
                self._name,
                self.handle.local_readers,
                self._core,
                self._wire,
                self._watch,
                self._unwatch,
                self._loop.call_later,
                self._membership_changed,
            )
            self._stalls = Stalls(self._name, self._core, self._members, self._stall_after, self._evict_after)
            self._watch(self._wire.fd, self._on_wire)
            self._serve_remote()
            self._tick_after(1)
            self._filler.start_prefault(self.handle.prefault)
        except BaseException:
            self._state = State.CLOSED
            self._fault = Endpoint._closed
            self._core.ring.close()  # as in aclose
            self._release_resources()
            raise
        self._state = State.OPEN
        self._fault = None
        self._on_wire()

    def _serve_remote(self) -> None:
        if self._listener is None or self._keys is None or self.handle.remote is None:
            return
        assert self._members is not None and self._loop is not None
        wire = RemoteSenderWire(self._listener, self._keys, self.handle.remote.timeout)
        self._serving = Serving(
            self._name,
            self._core,
            self._members,
            wire,
            range(self.handle.local_readers, self.handle.readers),
            self.handle.remote.timeout,
            self._control.mapping.view,
            self._arena.mapping.view if self._arena is not None else None,
            self._loop,
            self._membership_changed,
            self._notify,
        )
        self._watch(wire.fd, self._serving.on_wire)
        self._watch(wire.zap_fd, self._serving.on_wire)
        self._serving.on_wire()

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's exit modules are half gone, and readers learn of the exit by themselves.
        new = not exiting() and getattr(self, "_state", None) is State.NEW and hasattr(self, "handle")
        if new and self.handle.sender.pid == os.getpid():
            self._core.ring.close()  # readers may be waiting for the start; their slow timer sees it
            if self._listener is not None:
                self._listener.close()
        super().__del__()

    async def aclose(self) -> None:
        """Close in good order: everything sent stays receivable by the readers that attached, then their stream ends.

        Sends that are waiting raise :class:`ClosedError`. Waits only for frames that are under way, at most ``linger``
        seconds, and says in the log which reader was behind if that was not enough. Closing twice is harmless. Cancelled,
        it closes at once and drops what is under way.
        """
        if not await self._begin_closing():
            return
        try:
            try:
                # Sends under way hold spans and run copies; they see the fault and give both back.
                while self._turns or self._lending:
                    await self._changed()
            finally:
                # Also when cancelled: what is copied then is not published, and the readers' streams end in good order.
                self._core.ring.close()
                self._send_wake()
                if self._serving is not None:
                    self._serving.finish()
            until = asyncio.get_running_loop().time() + self._linger
            await self._linger_for_frames(until)
            await self._linger_for_remote(until)
        finally:
            self._finish()

    async def _linger_for_frames(self, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self._core.frames_pending:
                    if not self._core.ring.park(self._core.frames_end):
                        break
                    await self._changed()
        pending = self._core.frames_pending
        if pending and self._members is not None:
            rank = self._members.slowest()
            who = self._members.describe_behind(rank) if rank is not None else "no reader is left"
            logger.warning(
                "channel %r: closed with %d bytes of frames not received after %.1f s: %s. It will see the channel as "
                "lost. Raise linger= if it only needs more time.",
                self._name,
                pending,
                self._linger,
                who,
            )

    async def _linger_for_remote(self, until: float) -> None:
        serving = self._serving
        if serving is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while serving.unfinished:
                    await self._changed()
        for member in serving.unfinished:
            logger.warning(
                "channel %r: closed after %.1f s, when %s. It will see the channel as lost. Raise linger= if it only "
                "needs more time.",
                self._name,
                self._linger,
                self._members.describe_behind(member.rank),  # type: ignore[union-attr]
            )

    def _abandon(self) -> None:
        self._core.ring.close()  # as in __del__

    def _release_resources(self) -> None:
        if self._members is not None:
            self._members.close()
        if self._wire is not None:
            self._wire.close()
        if self._serving is not None:
            self._serving.close()
        if self._listener is not None:
            self._listener.close()
        self._filler.close()
        self._control.close()
        if self._arena is not None:
            self._arena.close()

    # Sending ------------------------------------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        """Wait until every rank has been taken by a reader.

        Raises:
            ReaderLostError: A reader died since (with ``on_reader_lost="raise"``).
            ClosedError: The sender was closed meanwhile.
        """
        self._check()
        with self._explained(self._describe_awaited):
            await self._until_ready()

    async def send(self, obj: Sent) -> None:
        """Send an object to all readers.

        Messages of several tasks are sent in the order of the calls. Waits until all readers attached, for the copies of
        large buffers (made in threads), and while the slowest reader leaves no room in the ring.

        When it returns or raises, the caller owns all memory of ``obj`` again. Cancelling is safe: the message is sent to
        all readers or to none, and nothing is held.

        Args:
            obj: Anything that pickles. Large CPU tensors, arrays and ``PickleBuffer`` are copied once, into the arena.

        Raises:
            EncodeError: It does not pickle.
            ReaderLostError: A reader died (with ``on_reader_lost="raise"``).
            ClosedError: The sender is closed, or was closed while this waited.
            BusyError: Called from inside an object's own pickling.
            WrongContextError: Called on another loop, or in a forked process.
        """
        if self._fault is not None or running_loop() is not self._loop:
            self._raise_fault()
        self._credit -= 1
        if self._credit < 0:
            # With a place in the queue, or calls made during the breath would overtake this one.
            await self._send_in_turn(None, obj)
            return
        message = self._encoder.encode(obj)
        if message.__class__ is bytes and not self._turns and self._core.awaited == 0:
            core = self._core
            if len(message) <= core.small_limit and core.send_small(message):
                self._credit -= len(message) >> BREATH_SHIFT
                if sleepers := core.sleepers():
                    self._wake(sleepers)
                return
        del obj
        await self._send_in_turn(as_plan(message))

    enqueue = send

    def send_nowait(self, obj: Sent) -> None:
        """Send without waiting. Large buffers are copied on the spot, by the calling thread.

        Raises:
            WouldBlock: A reader has not attached, other sends are waiting, or there is no room. Nothing was sent.
            EncodeError, ReaderLostError, ClosedError, BusyError, WrongContextError: As :meth:`send`.
        """
        self._check()
        message = self._encoder.encode(obj)
        if self._turns or self._core.awaited:
            raise WouldBlock(f"channel {self._name!r}: {self._describe_awaited() if self._core.awaited else 'busy'}")
        plan = as_plan(message)
        placed = self._filler.place(plan)
        try:
            if (tail := self._core.shortage(placed)) is not None:
                assert self._stalls is not None
                self._stalls.need(tail)
                self._stalls.need_no_more()
                self._tick_soon()  # its clock runs on
                raise WouldBlock(f"channel {self._name!r}: no room: {self._describe_slowest()}")
            placed = self._filler.back_now(plan, placed)
            frames = self._filler.fill_now(plan, placed)
            self._publish(plan, placed, frames)
        finally:
            self._core.unplace(placed)
            plan.clear()

    # Lent memory ----------------------------------------------------------------------------------------------------

    async def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A CPU tensor whose storage is a span of the arena, for the caller to fill: sending it copies nothing.

        Send it, an object that contains it, or a view of it, as often as wanted, and keep it as long as wanted; its slots
        are free once it is gone and the readers have released what was sent. Readers see this very memory, so it must not
        be written to between a send and :meth:`reclaim`.

        If no span is free, if the tensor is below ``ArenaConfig(min_bytes=...)`` or without an arena, it is an ordinary
        tensor, and sending it copies it like any other. Sent on another channel, it is copied there.

        Args:
            shape: Its sizes, or the only one.
            dtype: By default that of ``torch.get_default_dtype()``.

        Raises:
            ValueError, TypeError: An argument makes no sense.
            ClosedError, ReaderLostError, WrongContextError: As :meth:`send`.
        """
        sizes = shape_of(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
        memory = await self._lend(math.prod(sizes) * dtype.itemsize)
        return torch.empty(sizes, dtype=dtype, device="cpu") if memory is None else as_tensor(memory, sizes, dtype)

    async def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """:meth:`empty` of the shape and dtype of a tensor, which may be on any device."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, not {type(tensor).__name__}")
        return await self.empty(tuple(tensor.shape), tensor.dtype if dtype is None else dtype)

    async def empty_array(self, shape: int | Sequence[int], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """:meth:`empty` for numpy; by default of float64, as ``numpy.empty``.

        Raises:
            TypeError: Of a dtype with Python objects, too.
        """
        sizes, kind = shape_of(shape), np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(f"an array of dtype {kind} holds Python objects, which no other process can see")
        if kind.subdtype is not None:  # a dtype of small arrays: what numpy.empty makes of it has more axes
            kind, more = kind.subdtype
            sizes += more
        memory = await self._lend(math.prod(sizes) * kind.itemsize)
        return np.empty(sizes, kind) if memory is None else np.frombuffer(memory, kind).reshape(sizes)

    async def _lend(self, nbytes: int) -> memoryview | None:
        self._check()
        if nbytes < self._core.min_bytes or not self._core.arena.slots:
            return None
        self._lending += 1
        try:
            memory = await self._filler.lend(nbytes)
        finally:
            self._done_lending()
        self._check()
        if memory is None:
            self._core.fallbacks[ARENA_FULL if self._core.arena.fits(nbytes) else LARGER_THAN_ARENA] += 1
        return memory

    async def reclaim(self, lent: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Wait until no reader needs the memory of a lent tensor or array any more, so that it may be written again.

        That is when all have received what was sent of it and have dropped it, in all messages. For a tensor that is not
        lent this returns at once: sending has copied it.

        Raises:
            TypeError: It is no tensor and no array.
            ClosedError, ReaderLostError, WrongContextError: As :meth:`send`.
        """
        self._check()
        lender = self._filler.lender
        found = lender.find(address_of(lent), 1) if lender is not None else None
        pause = _FIRST_LOOK
        with self._explained(lambda: f"channel {self._name!r}: spans held by rank: {self._spans_held()}"):
            # What sends have not looked into yet may be of this memory, too.
            while found is not None and (self._unplanned or self._core.arena.is_out(found[0])):
                # Readers say by a store that they are done, and wake nobody.
                await asyncio.sleep(pause)
                self._check()
                pause = min(2 * pause, _LONGEST_LOOK)

    async def trim(self) -> int:
        """Give the memory of slots that nobody uses back to the system, e.g. after the largest message for long.

        Works in threads, piece by piece, while sends go on; the next message into those slots pays for fresh pages again.

        Returns:
            The bytes given back. 0 without an arena, and once a reader has pinned it: pinned memory cannot be given back.
            With ``backing="shm"`` only what lies behind everything in use is.

        Raises:
            ClosedError, ReaderLostError, WrongContextError: As :meth:`send`.
        """
        self._check()
        self._lending += 1
        try:
            return await self._filler.trim(self._check)
        finally:
            self._done_lending()

    def _done_lending(self) -> None:
        self._lending -= 1
        if not self._lending:
            self._notify()  # aclose waits for this

    async def _send_in_turn(self, plan: Plan | None, obj: object = None) -> None:
        """Send a plan; without one, give others a turn first and plan ``obj`` then."""
        turn = Turn(self._turns)
        placed: PlacedMessage | None = None
        lent: list[Loan] = []
        try:
            if plan is None:
                self._unplanned += 1
                try:
                    await self._breathe()
                    plan = as_plan(self._encoder.encode(obj))
                finally:
                    self._unplanned -= 1
                del obj
            lent = self._filler.hold(plan)
            if self._core.awaited:
                with self._explained(self._describe_awaited):
                    await self._until_ready()
            placed = self._filler.place(plan)
            if placed.spans:
                placed = await self._filler.back(plan, placed)
                self._check()
                await self._filler.fill_spans(plan, placed)
            while not turn.first:
                await turn.wait()
                self._check()
            with self._explained(self._describe_slowest):
                await self._until_room(placed)
            # Only now, so that waiting sends do not pile up copies beyond the budget.
            frames = await self._filler.fill_frames(plan, placed) if placed.frames else []
            self._check()
            self._publish(plan, placed, frames)
        finally:
            if placed is not None:
                self._core.unplace(placed)
            if plan is not None:
                plan.clear()
            for loan in lent:
                loan.pending -= 1
            turn.leave()
            if not self._turns:
                self._notify()  # aclose waits for this

    async def _until_ready(self) -> None:
        assert self._stalls is not None
        self._stalls.wait_for_seats()
        try:
            while self._core.awaited:
                await self._changed()
                self._check()
            self._check()
        finally:
            self._stalls.wait_no_more()

    async def _until_room(self, placed: PlacedMessage) -> None:
        ring, stalls = self._core.ring, self._stalls
        assert stalls is not None
        waited, began = False, time.monotonic()
        try:
            while (tail := self._core.shortage(placed)) is not None:
                self._waits += not waited
                waited = True
                stalls.need(tail)
                self._check()  # closed during a copy: nobody would wake us any more
                # Parked before the second look that park takes: a reader that frees the room in between sees us parked.
                if ring.park(tail):
                    await self._changed()
        finally:
            if waited:
                self._wait_seconds += time.monotonic() - began
                ring.unpark()
                stalls.need_no_more()

    def _publish(self, plan: Plan, placed: PlacedMessage, frames: list[np.ndarray[Any, Any]]) -> None:
        """Make a placed and copied message visible: no await in here, so it happens whole or not at all."""
        inline: list[tuple[int, bytes | memoryview]] = []
        if placed.pack is None:
            for source, placement, offset in zip(plan.sources, placed.placements, placed.offsets, strict=True):
                if placement.where == INLINE:
                    inline.append((offset, source.tobytes()))
        if placed.frames:
            assert self._wire is not None and self._members is not None
            # Before the record: if ZMQ refuses, nothing was published. A reader drops frames no record names.
            self._wire.send_frames(self._core.number_frames(placed), frames, self._members.seated())
        self._core.publish(placed, inline)
        if placed.frames and self._serving is not None:
            self._serving.keep_frames(placed.frame_number, frames)
        # All of it, since what is not large was copied on the loop.
        self._credit -= sum(placement.nbytes for placement in placed.placements) >> BREATH_SHIFT
        if plan.undivertible:
            self._core.fallbacks[NOT_DIVERTIBLE] += plan.undivertible
        if sleepers := self._core.sleepers():
            self._wake(sleepers)
        if placed.frames:
            self._drain_later()  # a bell does not, and frames went through the socket
        if placed.frames and self._core.arena.slots:
            self._log_fallback(placed, time.monotonic(), self._spans_held)

    # Events -------------------------------------------------------------------------------------------------------

    def _wake(self, ranks: Sequence[int]) -> None:
        """Wake parked readers."""
        if self._serving is not None:
            ranks = self._serving.kick(ranks)
            if not ranks:
                return
        if self._rings_bells and self._members.ring(ranks):  # type: ignore[union-attr]
            self._wakeups += len(ranks)
        else:
            self._send_wake()

    def _send_wake(self) -> None:
        assert self._wire is not None
        self._wakeups += 1
        self._wire.wake()
        self._drain_later()

    def _has_mail(self) -> bool:
        return self._wire is not None and self._wire.readable()

    def _on_wire(self) -> None:
        if self._wire is None or self._members is None or self._state is State.CLOSED:
            return
        for event in self._wire.drain():
            if isinstance(event, Wake):
                self._notify()
            else:
                self._members.handle(event)
        if self._pressing():
            self._tick_soon()
        self._drain_later()

    def _membership_changed(self) -> None:
        core = self._core
        if core.awaited == 0:
            self._control.unlink()
            if self._arena is not None:
                self._arena.unlink()
        if self._fault in (None, Sender._lost):
            assert self._members is not None
            self._fault = Sender._lost if self._on_reader_lost == "raise" and self._members.lost else None
        self._drain_later()  # readers may have been told, and not only from where the wire is drained anyway
        self._notify_all()

    def _lost(self) -> ArenaError:
        assert self._members is not None
        error = self._members.lost_error()
        assert error is not None
        return error

    def _notify_all(self) -> None:
        self._notify()
        for turn in self._turns:
            turn.notify()

    def _pressing(self) -> bool:
        assert self._members is not None and self._stalls is not None and self._wire is not None
        return self._stalls.running or self._members.pressing or self._wire.foreign != self._foreign_reported

    def _tick(self) -> None:
        assert self._members is not None and self._stalls is not None
        self._members.tick()
        if self._waiters:
            self._notify()  # in case a wake-up was lost
        if self._serving is not None:
            self._serving.on_wire()  # likewise
        self._stalls.tick()
        self._report_foreign()

    def _report_foreign(self) -> None:
        foreign = self._wire.foreign if self._wire is not None else 0
        if foreign > self._foreign_reported:
            logger.warning(
                "channel %r: ignored %d messages on its socket that no reader of this channel sent",
                self._name,
                foreign - self._foreign_reported,
            )
            self._foreign_reported = foreign

    # Checks and words ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._fault is not None or running_loop() is not self._loop:
            self._raise_fault()

    def _describe_awaited(self) -> str:
        assert self._stalls is not None
        return self._stalls.describe_absent()

    def _describe_slowest(self) -> str:
        rank = self._members.slowest() if self._members is not None else None
        return "no reader is left" if rank is None else self._members.describe_behind(rank)  # type: ignore[union-attr]

    def _spans_held(self) -> dict[int, int] | str:
        assert self._members is not None
        if self._debug is not None:
            return describe_holdings(self._members.holdings())
        arena = self._core.arena
        return {rank: len(arena.held_by(member.holder)) for rank, member in self._members.by_rank.items()}

    def statistics(self) -> SenderStatistics:
        """A snapshot of counters and state. Cheap; may be called any time, also after close, in any thread."""
        return _statistics.of_sender(self)


def _check_not_negative(what: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number, not {type(value).__name__}")
    if not value >= 0:  # NaN neither
        raise ValueError(f"{what} must not be negative, not {value}")
