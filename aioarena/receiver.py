"""The receiving end of a channel, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
import traceback
from asyncio import _get_running_loop as running_loop
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Generic, Literal

import torch
import zmq

from aioarena import _devices, _statistics
from aioarena._allow import AllowList
from aioarena._assembly import Assembler
from aioarena._asyncio import BREATH, BREATH_SHIFT, TICK, Endpoint, State
from aioarena._checking import CheckedAssembler, CheckedLedger
from aioarena._codec import decode
from aioarena._copying import CopyPool
from aioarena._core.layout import VERSION
from aioarena._core.receiver import Fate, IncomingMessage, ReceiverCore
from aioarena._core.record import INLINE
from aioarena._core.words import FENCES
from aioarena._debug import show_crashes
from aioarena._generic import Received
from aioarena._gpu import GpuSide
from aioarena._platform import accelerator, memory, process
from aioarena._platform.bell import NO_BELL, Bell
from aioarena._platform.process import ProcessIdentity
from aioarena._platform.wire import ReceiverWire
from aioarena._release import SpanLedger
from aioarena._types import Handle, ReceiverStatistics
from aioarena._warming import Prefault
from aioarena.exceptions import (
    ArenaError,
    BusyError,
    DecodeError,
    EndOfChannel,
    EvictedError,
    HandleError,
    NotAllowedError,
    SenderLostError,
    WouldBlock,
    text_of,
)
from aioarena.relay import Relay

logger = logging.getLogger("aioarena")

# Seconds that start waits before it says so; then twice as long each time. As long as a sender's stall_after by default.
_WARN_AFTER = 10.0

# Seconds that aclose waits for the sender to take note of the leave. It only bounds how long a hung sender can hold us.
_LEAVE_TIMEOUT = 1.0


class Receiver(Endpoint, Generic[Received]):
    """Receives what a :class:`Sender` broadcasts, as one of its ranks.

    Large CPU tensors, arrays and buffers arrive as views of the arena, without a copy: treat them as read-only, because
    the other readers look at the same memory. They hold their slots until the last view, slice or Parameter over them is
    gone, and stay valid after the channel, and the sender, are gone. Clone what you keep for long.

    Args:
        handle: The sender's ``handle``.
        rank: Which reader this is, 0 to ``handle.readers - 1``. One live process per rank. From ``handle.local_readers`` on
            it is a remote reader, which gets the messages over TCP, into a ring and an arena of its own.
        spin: Seconds to look at the ring, letting other tasks run, before parking. 0 parks at once and uses no CPU.
        pin: ``"auto"`` registers the arena as pinned memory once CUDA is in use in this process, in a thread; ``"off"``
            never does.
        private: Give private, plain copies instead of views, for code that writes into what it receives.
        allow: What messages may name, where the sender is not trusted: names of modules, for the classes defined in them,
            and classes and functions. Plain data, dates, collections, tensors, arrays and builtin exceptions always may.
            A message that names anything else raises :class:`NotAllowedError`. None is for senders you trust: it lets a
            message run any code. Slower, see docs/allow.md, which says what this does not protect from.

    Raises:
        ValueError, TypeError: An argument makes no sense.

    Attributes:
        handle: That of the sender.
        rank: Which reader this is.
    """

    _what = "Receiver"

    def __init__(
        self,
        handle: Handle,
        rank: int,
        *,
        spin: float = 0.0,
        pin: Literal["auto", "off"] = "auto",
        private: bool = False,
        allow: Iterable[str | Callable[..., Any]] | None = None,
    ) -> None:
        self._state = State.CLOSED  # nothing to close if what follows raises
        if not isinstance(handle, Handle):
            raise TypeError(f"handle must be the Handle of a Sender, not {type(handle).__name__}")
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"rank must be an int, not {type(rank).__name__}")
        if not 0 <= rank < handle.readers:
            raise ValueError(
                f"rank must be from 0 to {handle.readers - 1}, not {rank}: the channel has {handle.readers} readers"
            )
        if spin < 0:
            raise ValueError(f"spin must not be negative, not {spin}")
        if pin not in ("auto", "off"):
            raise ValueError(f'pin must be "auto" or "off", not {pin!r}')
        self._unpickle = decode if allow is None else AllowList(allow).decode
        super().__init__(handle.name)
        self.handle = handle
        self.rank = rank
        self._spin = spin
        self._pin = pin
        self._private = private
        # Where it reads: a remote reader, once connected, in a channel of its own, which the stream is written to.
        self._local, self._seat = handle, rank
        self._relay: Relay | None = None
        self._accelerator = accelerator.current()
        self._core: ReceiverCore | None = None
        self._wire: ReceiverWire | None = None
        self._bell: Bell | None = None
        self._ledger: SpanLedger | None = None
        self._sender_pidfd: int | None = None
        self._sender_dead = False
        self._last_words: asyncio.TimerHandle | None = None
        self._hung_up = False  # the sender is dead or hung up, and what it said before has had its time to arrive
        self._turn = asyncio.Lock()
        self._receiving = 0  # tasks that wait for a message or for their turn to
        self._moving = 0  # calls that copy received memory to private memory
        self._decoding = False
        self._pool = CopyPool("read")
        self._gpu: GpuSide | None = None
        self._prefault: Prefault | None = None
        self._assembler: Assembler  # from start on
        self._asked = self._ask_again = 0.0  # when it asked for its seat, and seconds from then to the next warning
        self._parks = 0
        self._decode_errors = 0
        self._wakeups = 0
        self._move_seconds = 0.0

    def _survives_fork(self) -> bool:
        return self._state is State.NEW

    @property
    def _label(self) -> str:
        return f"reader {self.rank} of channel {self._name!r}"

    # Life cycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Attach to the channel and wait for the seat at this rank; the sender may be started later.

        Cancelling is safe: nothing is left behind.

        Raises:
            HandleError: The handle is of another version, or damaged, or what it names is not the channel.
            NoSpaceError: Too few file descriptors are left.
            SenderLostError: The sender is gone, or dies meanwhile.
            EndOfChannel: The sender closed before this reader joined.
            ArenaError: The sender refused, e.g. because a live process has the rank.
        """
        self._bind()
        try:
            if self.rank >= self.handle.local_readers:
                await self._connect()
            try:
                self._attach()
            except (OverflowError, TypeError, ValueError, zmq.ZMQError) as error:  # of what nobody has ever written there
                raise HandleError(f"the handle of channel {self._name!r} is damaged, pass it anew: {error}") from error
            await self._join()
        except BaseException:
            if self._wire is not None:
                # Cancelled between asking for the seat and learning of it, it is there and nobody sits on it.
                self._wire.leave()
            self._state = State.CLOSED
            self._fault = Endpoint._closed
            self._detach_from_loop()
            self._release_resources()
            if self._relay is not None:
                await self._relay.aclose()
            raise
        self._state = State.OPEN
        self._fault = None

    async def _connect(self) -> None:
        """Over the network, into a channel of our own whose memory is ours alone."""
        # Both ends of that are in this process, where a wake-up need not go through the threads of ZMQ.
        self._relay = Relay(self.handle, 1, rank=self.rank, wake="pipe")
        self._relay._expects_readers = True
        self._asked = time.monotonic()
        await self._relay.start()
        self._local, self._seat = self._relay.handle, 0

    def _attach(self) -> None:
        handle = self._local
        if handle.version != VERSION:
            raise HandleError(
                f"the handle has layout version {handle.version}, this is {VERSION}: install the same "
                "version of aioarena at both ends",
                expected=VERSION,
                found=handle.version,
            )
        if handle.sender.pid < 1 or "\0" in handle.address:
            raise ValueError(f"no pid is {handle.sender.pid}, or no path is {handle.address!r}")
        process.require_descriptors()
        try:
            self._sender_pidfd = handle.sender.open_pidfd()
        except ProcessLookupError:
            raise self._sender_gone() from None
        if (handle.control.nbytes, handle.arena.nbytes if handle.arena else 0) != (
            handle.layout.control_bytes,
            handle.layout.arena_bytes,
        ):
            raise HandleError("the handle contradicts itself about the size of its segments: it is damaged, pass it anew")
        control = self._map(handle.control)
        difference = handle.layout.mismatch(control.view[: handle.layout.ring_offset].cast("Q"), handle.nonce)
        if difference is not None:
            field, expected, found = difference
            raise HandleError(
                f"the segment the handle names belongs to something else: {field} is {found}, expected {expected}",
                expected=expected,
                found=found,
            )
        incarnation = secrets.randbits(63) | 1
        self._core = ReceiverCore(control.view, handle.layout, self._seat, incarnation)
        if handle.arena is not None:
            arena = self._map(handle.arena)
            if self._debug is None or self._private:
                self._ledger = SpanLedger(arena, self._core.spans, self._accelerator)
            else:
                self._ledger = CheckedLedger(arena, self._core, self._accelerator, self._label, self._debug)
                if self._debug.readonly:
                    show_crashes()
                    arena.protect()
                    self._pin = "off"  # the GPU's driver would want to write
            assert self._loop is not None
            self._gpu = GpuSide(
                self._ledger,
                self._accelerator,
                self._pool,
                self._loop,
                self._watch,
                pin=self._core.may_pin if self._pin == "auto" else None,
            )
            if handle.prefault:
                self._prefault = Prefault(self._label, arena, handle.prefault)
        if handle.wake == "pipe" and handle.sender.visible:
            self._bell = Bell()
        self._wire = ReceiverWire(handle.address, handle.nonce, self._seat, incarnation)
        viewed = self._gpu.pin_if_useful if self._gpu is not None else lambda: None
        if isinstance(self._ledger, CheckedLedger):
            self._assembler = CheckedAssembler(self._wire, self._ledger, self._pool, viewed)
        else:
            self._assembler = Assembler(self._wire, self._ledger, self._private, self._pool, viewed)
        self._watch(self._wire.fd, self._on_messages)
        self._watch(self._wire.monitor_fd, self._on_wire)
        if self._sender_pidfd is not None:
            self._watch(self._sender_pidfd, self._on_sender_death)
        self._tick_after(1)

    def _map(self, ref: memory.SegmentRef) -> memory.Mapping:
        try:
            return memory.attach(ref)
        except PermissionError:
            raise HandleError(
                f"no permission to attach channel {self._name!r}: it belongs to another user; run sender and readers as "
                "one user"
            ) from None
        except FileNotFoundError:
            if not self._local.sender.alive:
                raise self._sender_gone() from None
            raise HandleError(
                f"the memory of channel {self._name!r} is not to be found from here ({ref.path}): the sender closed it, "
                'or runs in another container; with backing="shm" and a shared /dev/shm containers can share a channel'
            ) from None

    async def _join(self) -> None:
        core, wire = self._core, self._wire
        assert core is not None and wire is not None
        wire.join(ProcessIdentity.current(), self._bell.ref if self._bell is not None else NO_BELL)
        self._on_wire()
        self._asked = time.monotonic()
        self._ask_again = _WARN_AFTER
        with self._explained(self._describe_admission):
            while not core.seated:
                if wire.refusal is not None:
                    raise HandleError(f"the sender refused {self._label}: {wire.refusal}")
                if self._sender_dead or self._hung_up or core.aborted:
                    raise self._sender_gone()
                if core.closed:
                    raise EndOfChannel(f"the sender of channel {self._name!r} closed before reader {self.rank} joined")
                await self._changed()
                if self._state is not State.STARTING:
                    raise self._closed()
        core.start()
        if self._bell is not None:
            self._watch(self._bell.fd, self._on_bell)

    async def aclose(self) -> None:
        """Leave the channel. What was not received is skipped; tensors already received stay valid.

        Receives that are waiting raise :class:`ClosedError`. Closing twice is harmless.
        """
        if not await self._begin_closing():
            return
        try:
            # They see the fault, or end by themselves. Their copies run in threads that closing would wait for, blocking.
            while self._receiving or self._moving:
                await self._changed()
            if self._gpu is not None:
                await self._gpu.stop()
            await self._leave()
        finally:
            if self._wire is not None:
                self._wire.leave()  # when cancelled before; saying it twice is harmless
            if self._relay is not None:
                await self._relay.aclose()
            self._finish()

    async def _leave(self) -> None:
        core, wire = self._core, self._wire
        if core is None or wire is None:
            return
        wire.leave()
        if not core.seated or core.closed or self._sender_dead:
            return
        self._drain_later()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                # The sender empties the seat once it has read the leave, and can give it to another from then on.
                while core.seated and not core.closed and not self._sender_dead and not wire.disconnected:
                    await self._changed()

    def _release_resources(self) -> None:
        if self._last_words is not None:
            self._last_words.cancel()
        if self._wire is not None:
            self._wire.close()
        if self._bell is not None:
            self._bell.close()
        if self._sender_pidfd is not None:
            memory.close_quietly(self._sender_pidfd)
            self._sender_pidfd = None
        self._pool.close()
        if self._prefault is not None:
            self._prefault.close()
        if self._ledger is not None:
            self._ledger.drain_in_background()

    # Receiving ----------------------------------------------------------------------------------------------------

    async def recv(self) -> Received:
        """Receive the next message.

        Several tasks may wait; each message goes to one of them, in the order of their calls. Cancelling is safe: the
        message waits for the next call.

        Returns:
            The object that was sent. Its large CPU tensors have the sent shape and dtype, are writable memory to torch,
            and alias the arena (see the class).

        Raises:
            EndOfChannel: The sender closed and everything was received.
            SenderLostError: The sender died; everything it had published was received.
            EvictedError: The sender gave this reader up.
            DecodeError: The message does not unpickle here. It counts as received.
            ClosedError: This end is closed, or was closed while this waited.
            WrongContextError: Called on another loop, or in a forked process.
        """
        if self._fault is not None or running_loop() is not self._loop:
            self._raise_fault()
        self._credit -= 1
        if self._credit >= 0 and not self._receiving and not self._decoding:
            taken = self._core.take()  # type: ignore[union-attr]
            if isinstance(taken, bytes):
                return self._decode(taken)
            if taken is not None and self._assembler.ready(taken):
                return self._assemble(taken)
        self._receiving += 1
        try:
            async with self._turn:
                if self._credit < 0:
                    # In turn, or calls made during the breath would overtake this one.
                    await self._breathe()
                return await self._recv_in_turn()
        except asyncio.CancelledError as error:
            error.add_note(self._describe_wait())
            raise
        finally:
            self._receiving -= 1
            if self._state is State.CLOSING:
                self._notify()  # aclose waits for this

    dequeue = recv

    def __aiter__(self) -> AsyncIterator[Received]:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.recv()
        except EndOfChannel:
            raise StopAsyncIteration from None

    def recv_nowait(self) -> Received:
        """Receive a message that is there.

        Raises:
            WouldBlock: There is none, its frames have not arrived, or another task is receiving.
            Others: As :meth:`recv`.
        """
        self._check()
        if self._receiving:
            raise WouldBlock(f"{self._label}: another task is receiving")
        taken = self._take()
        if taken is None:
            self._raise_fate()
            raise WouldBlock(f"{self._label}: no message")
        if isinstance(taken, bytes):
            return self._decode(taken)
        if not self._assembler.complete(taken):
            self._on_wire()
            if not self._assembler.complete(taken):
                raise WouldBlock(f"{self._label}: the frames of the next message have not arrived yet")
        return self._assemble(taken)

    async def _recv_in_turn(self) -> Received:
        while True:
            self._check()
            taken = self._take()
            if taken is None:
                self._raise_fate()
                await self._until_published()
            elif isinstance(taken, bytes):
                return self._decode(taken)
            elif not self._assembler.complete(taken):
                await self._until_framed()
            elif self._assembler.wants_copies(taken):
                copies = await self._assembler.private_copies(taken)
                self._check()
                return self._assemble(taken, copies)
            else:
                return self._assemble(taken)

    def _take(self) -> bytes | IncomingMessage | None:
        if self._decoding:
            raise BusyError("recv called while this receiver is unpickling a message (from its __setstate__)")
        assert self._core is not None
        return self._core.take()

    async def _until_published(self) -> None:
        """Park until the ring, or the fate of the channel, may have changed."""
        core = self._core
        assert core is not None
        if self._spin:
            deadline = time.monotonic() + self._spin
            while time.monotonic() < deadline:
                await asyncio.sleep(0)
                # Where there are more processes than cores, what we look for may need this one.
                os.sched_yield()
                if self._fault is not None or core.take() is not None or core.fate() is not Fate.OPEN:
                    return
        self._parks += 1
        try:
            # Parked before the second look that park takes: a message published in between finds us parked.
            if core.park() and not self._sender_dead:
                await self._changed()
                self._credit = BREATH
        finally:
            core.unpark()

    def _raise_fate(self) -> None:
        """Raise if nothing will come any more. Called when the ring is empty."""
        core, wire = self._core, self._wire
        assert core is not None and wire is not None
        fate = core.fate()
        if fate is Fate.ENDED:
            raise EndOfChannel(f"the sender of channel {self._name!r} closed; {self._label} received all of it")
        if fate is Fate.EVICTED:
            raise EvictedError(
                f"the sender gave {self._label} up; close it and attach a new one to go on from the current message"
            )
        if (self._sender_dead or self._hung_up) and core.take() is None:
            raise self._sender_gone()

    async def _until_framed(self) -> None:
        assert self._wire is not None
        if self._wire.disconnected or self._hung_up:
            # Whatever was on its way has arrived; this has not.
            raise self._sender_gone()
        await self._changed()

    # Decoding ----------------------------------------------------------------------------------------------------

    def _assemble(self, taken: IncomingMessage, copies: dict[int, memoryview] | None = None) -> Received:
        """Turn the parts of a message into the object. No await: it is taken and returned, or still there."""
        try:
            buffers = self._assembler.buffers(taken, copies)
        except BaseException:
            self._decode_errors += 1
            assert self._core is not None
            if self._core.advance():
                self._wake_sender()
            raise
        # What was copied on the loop; or in a thread, but then others had their turn anyway.
        copied = (p.nbytes for p in taken.placements if p.where == INLINE or self._private or taken.packed)
        self._credit -= sum(copied) >> BREATH_SHIFT
        obj = self._decode(buffers.pop(0), buffers)
        if self._debug is not None and isinstance(self._ledger, CheckedLedger):
            self._ledger.name(obj)
        return obj

    def _decode(self, pickled: bytes | memoryview, buffers: list[memoryview] | None = None) -> Received:
        self._decoding = True
        try:
            return self._unpickle(pickled, buffers)  # type: ignore[no-any-return]
        except BaseException as error:
            self._decode_errors += 1
            # Nothing of the message may stay referenced from here, not even by a traceback that somebody keeps.
            traceback.clear_frames(error.__traceback__)
            if not isinstance(error, Exception):
                raise
            number = self._core.ring.received + 1  # type: ignore[union-attr]
            text = (
                f"message {number} of {self._label} does not unpickle here: {type(error).__name__}: {text_of(error)}. It "
                "counts as received; the next receive gives the next message"
            )
            if isinstance(error, NotAllowedError):
                raise NotAllowedError(text, what=error.what) from error
            raise DecodeError(text) from error
        finally:
            self._decoding = False
            del pickled
            if buffers is not None:
                buffers.clear()
            if self._core.advance():  # type: ignore[union-attr]
                self._wake_sender()

    def _wake_sender(self) -> None:
        assert self._wire is not None
        self._wakeups += 1
        self._wire.wake()
        self._drain_later()

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell that a stream reads a received tensor: its slot is not reused before that work is done.

        Needed for copies you start yourself (``tensor.to(device, non_blocking=True)``) on another stream than the one
        that is current when the tensor is dropped. A tensor that is not in the arena is ignored.

        Args:
            tensor: A received CPU tensor, or any view of one.
            stream: A ``torch.cuda.Stream``.
        """
        self._check()
        if self._gpu is not None:
            self._gpu.record_stream(tensor, stream)

    async def to_device(self, obj: Any, device: Any, stream: Any = None) -> Any:
        """Copy all CPU tensors in an object to a device.

        Args:
            obj: A tensor, or any nesting of dict, list, tuple, named tuple and dataclass with tensors in it. Other
                objects, and tensors that are on the device, are passed through.
            device: Where to, e.g. ``"cuda:2"``. With ``"cpu"`` the tensors become private copies.
            stream: A ``torch.cuda.Stream`` to copy on and to use the result on; by default the current one.

        Returns:
            The same nesting over tensors on the device. The copies are complete, and usable on ``stream``. Received
            tensors may be dropped at once: their slots wait for the copies by themselves.

        Raises:
            ClosedError, WrongContextError: As :meth:`recv`.
        """
        self._check()
        began = time.perf_counter()
        try:
            return await self._move(obj, device, stream)
        finally:
            self._move_seconds += time.perf_counter() - began

    async def _move(self, obj: Any, device: Any, stream: Any) -> Any:
        if torch.device(device).type == "cpu":
            self._moving += 1
            try:
                return await _devices.to_cpu(obj, self._pool)
            finally:
                self._moving -= 1
                if self._state is State.CLOSING:
                    self._notify()  # aclose waits for this
        if self._gpu is None:
            return await _devices.to_accelerator(obj, device, stream, self._accelerator, self._pool, pinned=False)
        return await self._gpu.to_device(obj, device, stream)

    # Events -------------------------------------------------------------------------------------------------------

    def _on_messages(self) -> None:
        if self._wire is not None and self._state is not State.CLOSED and self._wire.drain_messages():
            if self._wire.failure is not None:
                self._hung_up = True
            self._notify()

    def _on_wire(self) -> None:
        if self._wire is None or self._state is State.CLOSED:
            return
        if self._wire.drain():
            if self._wire.failure is not None:
                self._hung_up = True
            if self._wire.disconnected and not self._local.sender.visible:
                self._sender_dead = True  # its pid means nothing here, so the connection is all there is to go by
            if self._wire.disconnected:
                # It closed, or gave us up, or lost its Sender while its process lives: the first two it says itself.
                self._hear_last_words()
            self._notify()

    def _on_bell(self) -> None:
        assert self._bell is not None
        self._bell.silence()
        self._notify()

    def _has_mail(self) -> bool:
        return self._wire is not None and self._wire.readable()

    def _on_sender_death(self) -> None:
        assert self._sender_pidfd is not None
        self._unwatch(self._sender_pidfd)
        self._sender_dead = True
        # A child that it forked may keep the connection open, so its end does not tell that no frame will come.
        self._hear_last_words()
        self._notify()

    def _hear_last_words(self) -> None:
        if self._last_words is None:
            assert self._loop is not None
            self._last_words = self._loop.call_later(TICK, self._hang_up)

    def _hang_up(self) -> None:
        self._hung_up = True
        self._notify()

    def _pressing(self) -> bool:
        # A sender that closes before it has started tells nobody.
        return self._state is State.STARTING or (bool(self._waiters) and not FENCES)

    def _tick(self) -> None:
        if self._state is State.STARTING and time.monotonic() - self._asked >= self._ask_again:
            self._ask_again *= 2
            logger.warning("%s, since %.0f s", self._describe_admission(), time.monotonic() - self._asked)
        if self._waiters and self._core is not None:
            self._on_wire()
            # In case a wake-up was lost, and for frames of a dead sender that will not come. Whoever would only park again
            # sleeps on.
            if self._state is not State.OPEN or self._has_news(self._core):
                self._notify()

    def _has_news(self, core: ReceiverCore) -> bool:
        try:
            return core.take() is not None or core.fate() is not Fate.OPEN
        except ArenaError:  # evicted, or a damaged ring: for whoever waits to run into
            return True

    def _sender_gone(self) -> ArenaError:
        received = self._core.ring.received if self._core is not None else 0
        if self._relay is not None and isinstance(self._relay.error, ArenaError):
            return self._relay.error
        if self._wire is not None and self._wire.failure is not None:
            return SenderLostError(
                f"channel {self._name!r} ended before its end, after {self._label} received {received} messages: "
                f"{self._wire.failure}",
                pid=self._local.sender.pid,
                received=received,
            )
        return SenderLostError(
            f"the sender of channel {self._name!r} (pid {self.handle.sender.pid}) is gone without closing; {self._label} "
            f"received {received} messages; make a new channel",
            pid=self.handle.sender.pid,
            received=received,
        )

    def _describe_sender(self) -> str:
        if self.handle.remote is not None and self.rank >= self.handle.local_readers:
            return f"the sender at {self.handle.remote.endpoint}"
        sender = self.handle.sender
        state = process.describe_state(sender.pid) if sender.visible else "in another pid namespace"
        return f"the sender (pid {sender.pid}), {state}"

    def _describe_admission(self) -> str:
        what = "to admit it" if self._wire is not None and self._wire.connected else "to start"
        return f"{self._label} is waiting for {self._describe_sender()}, {what}"

    def _describe_wait(self) -> str:
        if self._core is None:
            return f"{self._label} was closed meanwhile"
        ring = self._core.ring
        what = f"the rest of a message that is under way ({ring.lag} bytes in the ring)" if ring.lag else "a message"
        return f"{self._label} received {ring.received} messages and was waiting for {what} from {self._describe_sender()}"

    def _check(self) -> None:
        if self._fault is not None or running_loop() is not self._loop:
            self._raise_fault()

    def statistics(self) -> ReceiverStatistics:
        """A snapshot of counters and state. Cheap; may be called any time, also after close, in any thread."""
        return _statistics.of_receiver(self)
