"""A remote reader that is the sender of a channel on its own host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import zmq

from aioarena._asyncio import Endpoint, State
from aioarena._core.layout import VERSION
from aioarena._platform.network import ANY_RANK, grace
from aioarena._remote.feed import FAILED_HANDSHAKES, Feed
from aioarena._remote.mirror import Mirror
from aioarena._types import ArenaConfig, Handle, SenderStatistics
from aioarena.exceptions import ArenaError, EvictedError, HandleError, PeerLostError, SenderLostError, text_of

logger = logging.getLogger("aioarena")

# Seconds for which what arrives is taken in before others on the loop get a turn. By the clock, because a copy into pages
# that were never touched takes ten times as long as into others.
_TURN = 0.0005

# Seconds that start waits before it says so; then twice as long each time.
_WARN_AFTER = 10.0

# What readers here are told of a relay that was closed before the end.
_CLOSED = "its relay was closed"

# Seconds after which a connection that libzmq makes no attempt to mend is made anew. It says that it will at once.
_REVIVE_AFTER = 0.1


class Relay(Endpoint):
    """Receives a channel from another host once, and is its sender to any number of readers on this one.

    The bytes go from the socket into this host's own ring and arena, and are never unpickled on the way. Readers attach to
    :attr:`handle` as to any other channel. With ``remote_readers`` a relay serves further hosts, and so trees of them.

    The end is passed on in both directions. When the sender closes, the readers here receive what is left and then
    :class:`EndOfChannel`; when it is lost, they get :class:`SenderLostError` instead, which says so. When a reader here is
    lost, the relay gives up and the sender's calls raise :class:`ReaderLostError`, which says which reader of which host;
    with ``on_reader_lost="continue"`` the others go on.

    Args:
        handle: That of the other host's channel, with remote readers. It is a secret.
        readers: How many readers there are on this host.
        rank: Which of the remote readers this is; None, the default, takes a free rank.
        **options: Those of :class:`Sender` for the channel here. Ring and arena are as large as at the sender by default.

    Raises:
        ValueError, TypeError: An argument makes no sense.
        NoSpaceError: There is not enough memory for the arena and the ring.
    """

    _what = "Relay"

    def __init__(self, handle: Handle, readers: int, *, rank: int | None = None, **options: Any) -> None:
        self._state = State.CLOSED  # nothing to close if what follows raises
        if not isinstance(handle, Handle):
            raise TypeError(f"handle must be the Handle of a Sender, not {type(handle).__name__}")
        if handle.remote is None:
            raise ValueError(
                f"the sender of channel {handle.name!r} has no remote readers: give it remote_readers= and bind="
            )
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
            raise TypeError(f"rank must be an int or None, not {type(rank).__name__}")
        if rank is not None and not handle.local_readers <= rank < handle.readers:
            raise ValueError(
                f"rank must be that of a remote reader, {handle.local_readers} to {handle.readers - 1}, not {rank}"
            )
        super().__init__(handle.name)
        layout = handle.layout
        options.setdefault("name", handle.name)
        options.setdefault("ring_bytes", layout.ring_bytes)
        if layout.slots:
            options.setdefault("arena", ArenaConfig(slots=layout.slots, slot_bytes=layout.slot_bytes))
        else:
            options.setdefault("arena", None)
        self._upstream = handle
        self._remote = handle.remote
        self._wanted = ANY_RANK if rank is None else rank
        self._mirror = Mirror(readers, **options)
        self._feed: Feed | None = None
        self._lost = False  # the sender is not heard of for too long
        self._deadline: asyncio.TimerHandle | None = None
        self._reviving: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._expects_readers = False  # a channel that ends at once waits here for its readers, which are sure to come
        self._ended = False
        self._asked = self._ask_again = 0.0
        self._turn_ends = 0.0
        self.error: Exception | None = None

    @property
    def handle(self) -> Handle:
        """What readers on this host attach with."""
        return self._mirror.handle

    @property
    def rank(self) -> int | None:
        """Which of the sender's readers this is; None before the start if it was not named."""
        rank = self._feed.rank if self._feed is not None else self._wanted
        return None if rank == ANY_RANK else rank

    @property
    def received(self) -> int:
        """Messages received so far."""
        return self._feed.received if self._feed is not None else 0

    @property
    def received_bytes(self) -> int:
        """Bytes received so far, without what encryption and TCP add."""
        return self._feed.nbytes if self._feed is not None else 0

    def statistics(self) -> SenderStatistics:
        """Of the channel on this host."""
        return self._mirror.statistics()

    @property
    def _label(self) -> str:
        return f"this Relay of channel {self._name!r}"

    # Life cycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the sender and wait for the seat there; begin to admit readers here.

        Raises:
            HandleError: The sender does not accept this handle: it is of another channel or version, or the rank is taken.
            SenderLostError: Nobody is at the sender's address.
            ArenaError: The handle makes no sense.
        """
        self._bind()
        try:
            if self._upstream.version != VERSION:
                raise HandleError(
                    f"the handle has layout version {self._upstream.version}, this is {VERSION}: install the same version "
                    "of aioarena at both ends",
                    expected=VERSION,
                    found=self._upstream.version,
                )
            await self._mirror.start()
            try:
                self._feed = Feed(self._remote, self._wanted, self._mirror)
            except (OverflowError, TypeError, ValueError, zmq.ZMQError) as error:
                raise HandleError(f"the handle of channel {self._name!r} is damaged, pass it anew: {error}") from error
            self._mirror.attend(self._notify)
            self._watch(self._feed.wire.fd, self._on_wire)
            self._watch(self._feed.wire.monitor_fd, self._on_wire)
            self._asked = time.monotonic()
            self._ask_again = _WARN_AFTER
            self._tick_after(1)
            assert self._loop is not None
            self._deadline = self._loop.call_later(self._remote.timeout, self._give_up_sender)
            self._on_wire()
            with self._explained(self._describe_wait):
                await self._until_welcome()
            self._task = self._loop.create_task(self._pass_on(), name=f"aioarena relay {self._name}")
        except BaseException as error:
            self._state = State.CLOSED
            self._fault = Endpoint._closed
            self._detach_from_loop()
            if self._feed is not None:
                self._feed.wire.leave()
            self._release_resources()
            # Not in good order: readers here have had nothing of the channel.
            await self._mirror.abort(text_of(error) if isinstance(error, Exception) else _CLOSED)
            raise
        self._state = State.OPEN
        self._fault = None

    async def _until_welcome(self) -> None:
        feed = self._feed
        assert feed is not None
        while True:
            # Only what concerns the seat: once that is given, messages may follow.
            while not feed.welcomed and feed.pull() is not None:
                pass
            if feed.welcomed:
                return
            self._raise_refusal(feed)
            if self._lost:
                raise SenderLostError(
                    f"nobody answers at {self._remote.endpoint}, the address of channel {self._name!r}, since "
                    f"{self._remote.timeout:.1f} s: its sender has closed or is dead, or a firewall is between",
                    pid=self._upstream.sender.pid,
                    received=0,
                )
            if not feed.wire.readable():
                await self._changed()
            if self._state is not State.STARTING:
                raise self._closed()

    def _raise_refusal(self, feed: Feed) -> None:
        connection = feed.wire.connection
        self._raise_failure(feed)
        if feed.given_up is not None:
            raise HandleError(f"the sender of channel {self._name!r} refused this reader: {feed.given_up.reason}")
        if connection.rejected or connection.failures >= FAILED_HANDSHAKES:
            raise HandleError(
                f"who listens at {self._remote.endpoint} does not accept this handle of channel {self._name!r}: it is of "
                "another channel, perhaps one that was closed; pass that of the current one"
            )

    async def wait_closed(self) -> None:
        """Wait for the end of the channel, until everything was passed on to readers that are there.

        Raises:
            SenderLostError: The sender was lost.
            EvictedError: The sender gave this relay up.
            ReaderLostError: A reader on this host was lost.
            ArenaError: Another error ended the relay.
        """
        if self._state is State.NEW:
            raise self._not_started()
        while not self._ended and self._state in (State.STARTING, State.OPEN):
            await self._changed()
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        """Leave the channel. Before its end, readers here get :class:`SenderLostError` once they have received what is
        there. Closing twice is harmless. Cancelled, it closes at once."""
        if not await self._begin_closing():
            return
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
            if self._feed is not None and not self._ended:
                self._feed.wire.leave()
            try:
                await self._mirror.abort(_CLOSED)
            finally:
                self._finish()

    def _abandon(self) -> None:
        with contextlib.suppress(StopIteration):
            self._mirror.aclose().send(None)  # of one that was never started, this does not wait

    def _release_resources(self) -> None:
        for timer in (self._deadline, self._reviving):
            if timer is not None:
                timer.cancel()
        if self._feed is not None:
            self._feed.close()
        self._mirror.attend(None)
        self._mirror.orphan(None)

    # Passing on ---------------------------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        feed, mirror = self._feed, self._mirror
        assert feed is not None
        try:
            await self._until_end(feed, mirror)
            feed.wire.leave()
            if self._expects_readers:
                await mirror.wait_ready()
            await mirror.aclose()
        except Exception as error:
            await self._end_with(error, feed, mirror)
        except asyncio.CancelledError:
            if self._state is State.OPEN:  # else aclose did it, and does the rest
                await self._end_with(
                    ArenaError(f"the task of {self._label} was cancelled, and not by closing it"), feed, mirror
                )
            raise
        self._ended = True
        self._notify()

    async def _end_with(self, error: Exception, feed: Feed, mirror: Mirror) -> None:
        self.error = error
        reason = text_of(error)
        log = logger.warning if isinstance(error, PeerLostError | EvictedError) else logger.error
        log("channel %r: its relay on this host ends: %s", self._name, reason)
        feed.wire.leave(reason)
        await mirror.abort(reason)
        self._ended = True
        self._notify()

    async def _until_end(self, feed: Feed, mirror: Mirror) -> None:
        while True:
            if (fault := mirror.fault) is not None:
                raise fault
            messages = feed.pull()
            if messages is None:
                if feed.end == feed.received:
                    return
                feed.acknowledge()
                self._raise_fate(feed)
                if not feed.wire.readable():
                    await self._changed()
                    self._turn_ends = time.perf_counter() + _TURN
                continue
            for message in messages:
                if not (isinstance(message, bytes) and mirror.forward_now(message)):
                    await mirror.forward(message)
                feed.done()
                if time.perf_counter() >= self._turn_ends:
                    await self._give_turn()
            if time.perf_counter() >= self._turn_ends:
                await self._give_turn()

    async def _give_turn(self) -> None:
        await asyncio.sleep(0)
        self._turn_ends = time.perf_counter() + _TURN

    def _raise_failure(self, feed: Feed) -> None:
        given_up = feed.given_up
        if given_up is not None and given_up.failed:
            raise SenderLostError(
                f"channel {self._name!r} ended before its end, after {feed.received} of {given_up.number} messages were "
                f"received: {given_up.reason}",
                pid=self._upstream.sender.pid,
                received=feed.received,
            )

    def _raise_fate(self, feed: Feed) -> None:
        self._raise_failure(feed)
        if (given_up := feed.given_up) is not None:
            raise EvictedError(
                f"the sender of channel {self._name!r} has no seat for this reader any more: {given_up.reason}; of the "
                f"{given_up.number} messages sent by then it misses the last {given_up.number - feed.received}; attach a "
                "new one to go on from the current message"
            )
        if self._lost:
            raise self._sender_lost()

    def _sender_lost(self) -> SenderLostError:
        return SenderLostError(
            f"the sender of channel {self._name!r} at {self._remote.endpoint} is not heard of any more; "
            f"{self.received} messages were received",
            pid=self._upstream.sender.pid,
            received=self.received,
        )

    # Events -------------------------------------------------------------------------------------------------------

    def _has_mail(self) -> bool:
        return self._feed is not None and self._feed.wire.readable()

    def _on_wire(self) -> None:
        feed = self._feed
        if feed is None or self._state is State.CLOSED:
            return
        if feed.look_at_connection():
            self._watch_over(feed)
            if feed.wire.connection.abandoned and self._reviving is None:
                assert self._loop is not None
                self._reviving = self._loop.call_later(_REVIVE_AFTER, self._revive, feed)
        self._notify()

    def _revive(self, feed: Feed) -> None:
        self._reviving = None
        if feed.wire.connection.abandoned:
            feed.wire.reconnect()

    def _watch_over(self, feed: Feed) -> None:
        """Set the time by which the sender has to be back, if it is away."""
        assert self._loop is not None
        if feed.down is None or (not feed.welcomed and feed.wire.connection.reached):
            # A sender that was not started yet holds its connections, and answers none.
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self._loop.call_later(grace(self._remote.timeout), self._give_up_sender)

    def _give_up_sender(self) -> None:
        # A loop that was held up may call its timers before it looks at what has come meanwhile.
        self._on_wire()
        if self._deadline is None:
            return
        self._deadline = None
        self._lost = True
        self._mirror.orphan(self._sender_lost)
        self._notify()

    def _pressing(self) -> bool:
        return self._state is State.STARTING

    def _tick(self) -> None:
        self._on_wire()
        if self._state is State.STARTING and time.monotonic() - self._asked >= self._ask_again:
            self._ask_again *= 2
            logger.warning("%s, since %.0f s", self._describe_wait(), time.monotonic() - self._asked)

    def _describe_wait(self) -> str:
        what = "to admit it" if self._feed is not None and self._feed.wire.connection.up else "to start"
        return f"{self._label} is waiting for the sender at {self._remote.endpoint}, {what}"
