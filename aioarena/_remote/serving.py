"""The sender's side: its remote readers, and what goes to each of them when."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aioarena._core.ahead import AheadReader, Memory
from aioarena._core.arena import Holder
from aioarena._core.layout import VERSION
from aioarena._core.sender import Membership, SenderCore
from aioarena._membership import Member, Members
from aioarena._platform.network import (
    ANY_RANK,
    CHUNK_BYTES,
    Ack,
    Connect,
    GivenUp,
    RemoteJoin,
    RemoteLeave,
    RemoteSenderWire,
    Upward,
    Welcome,
    grace,
)
from aioarena._platform.wire import Disconnect
from aioarena._remote.stream import head_of
from aioarena.exceptions import text_of

logger = logging.getLogger("aioarena")

# Seconds that streams are worked on before others on the loop get a turn: queueing 256 KiB of a large message takes about
# 20 us, of small ones the parts below 0.5 ms.
_TURN = 0.0005
# Parts that are looked at for one piece of a stream; a small message has two.
_MOST_PARTS = 200
# The most that a reader may ask to be sent ahead: what libzmq may hold of one stream.
_MOST_AHEAD = 1 << 30
# Buffers below this are copied together into one part of a ZMQ message; for larger ones that costs more than a part.
_JOINED_BYTES = 16 << 10
# Seconds until a look whether libzmq is done with memory of a reader that is gone; then twice as long each time, up to the
# second. An evicted one may not read what is under way to it for long.
_LOOK = 0.01
_LONGEST_LOOK = 1.0
# Readers that were given up and may come back to hear why.
_PAST = 64


class RemoteMember(Member):
    """A reader on another host, as a member of the channel.

    Attributes:
        host: The name of its host.
        address: Whence it connected.
        cut: Since when nothing can be sent to it for want of a connection, ``time.monotonic()``; None while it can.
        back: Whether it is connected again after that, and has not asked to go on: its loop is busy.
    """

    local = False

    def __init__(self, join: RemoteJoin, rank: int, holder: Holder, on_evicted: Callable[[RemoteMember], None]) -> None:
        super().__init__(rank, join.incarnation, join.identity, holder)
        self.host: str = join.host
        self.address = join.address
        self.cut: float | None = None
        self.back = False
        self._on_evicted = on_evicted

    def is_dead(self) -> bool:
        return False  # as far as can be known from here

    @property
    def away(self) -> bool:
        """Whether it has no connection."""
        return self.cut is not None and not self.back

    def process_state(self) -> str:
        cut = self.cut  # once: statistics ask in another thread
        if cut is not None and self.back:
            return f"connected again from {self.address}, but busy for {time.monotonic() - cut:.1f} s"
        if cut is not None:
            return f"without a connection for {time.monotonic() - cut:.1f} s"
        return f"connected from {self.address}"

    def describe(self) -> str:
        return f"reader {self.rank} (pid {self.identity.pid} on host {self.host!r})"

    def on_evicted(self) -> None:
        self._on_evicted(self)


class Link:
    """The stream to one remote reader.

    Args:
        member: The reader.
        ahead: Reads the channel for it.
        wire: The socket.
        wake_sender: Called when it has made the room that the sender waits for.
    """

    def __init__(
        self, member: RemoteMember, ahead: AheadReader, wire: RemoteSenderWire, wake_sender: Callable[[], None]
    ) -> None:
        self.member = member
        self.ahead = ahead
        self._wire = wire
        self._wake_sender = wake_sender
        self._session = 0
        self._limit = 0
        self._sent = 0
        self._sequence = 0
        self._parts: deque[Memory] = deque()  # of the stream, read and not sent
        self._in_part = 0  # bytes of the first of them that were sent
        self._used: deque[weakref.ref[memoryview]] = deque()  # memory that libzmq looks at, dead once it does no more
        self.ended = False
        self._torn = False  # while a piece is made and sent, and for ever if something is raised meanwhile

    def begin(self, join: RemoteJoin) -> None:
        """Start the stream of a new connection with the first message that was not acknowledged."""
        self._parts.clear()
        self._in_part = self._sent = self._sequence = 0
        self.ended = self._torn = False
        self._session = join.session
        self._limit = 0
        self._acknowledge(join.received)
        self.ahead.rewind()
        self._extend(join.limit)
        self._wire.welcome(join.incarnation, Welcome(self.member.rank, self._session, self.ahead.read))
        self.member.cut = None
        self.member.back = False

    def acknowledge(self, ack: Ack) -> None:
        if ack.session == self._session and self.member.cut is None:
            self._acknowledge(ack.received)
            self._extend(ack.limit)

    def _acknowledge(self, received: int) -> None:
        if self.ahead.acknowledged < received <= self.ahead.read and self.ahead.acknowledge(received):
            self._wake_sender()

    def _extend(self, limit: int) -> None:
        self._limit = max(self._limit, min(limit, self._sent + _MOST_AHEAD))

    def pump(self, closed: bool, deadline: float) -> bool:
        """Send what may be sent.

        Args:
            closed: Whether no message will follow those in the ring.
            deadline: When others are to have their turn, ``time.perf_counter()``.

        Returns:
            True if this is to be called again after others had their turn; False if there is nothing to do before the
            reader acknowledges, or a message is published.
        """
        self.ahead.unpark()
        while self.member.cut is None and not self.ended and self._sent < self._limit:
            if self._torn:
                # A signal handler may have raised anywhere in here, and nobody knows what went out. The reader sees a
                # gap, connects again, and the stream goes on where it was whole.
                self._limit = 0
                self._wire.send(self.member.incarnation, self._session, self._sequence + 2, [])
                return False
            self._torn = True
            chunk = self._chunk()
            if chunk:
                nbytes = sum(map(len, chunk))
                self._forget_done()
                self._used += self._wire.send(self.member.incarnation, self._session, self._sequence, chunk)
                self._sequence += 1
                self._sent += nbytes
                self._torn = False
                if time.perf_counter() >= deadline:
                    return True
            elif closed:
                self.ended = True
                self._wire.end(self.member.incarnation, self.ahead.read)
                self._torn = False
            else:
                parked = self.ahead.park()
                self._torn = False
                if parked:
                    return False
        return False

    def _chunk(self) -> list[Memory]:
        """The next piece of the stream."""
        parts: list[Memory] = []
        joined: list[Memory] = []
        room = CHUNK_BYTES
        for _ in range(_MOST_PARTS):
            if not room or not (self._parts or self._read()):
                break
            part, start = self._parts[0], self._in_part
            taken = min(room, len(part) - start)
            room -= taken
            piece = part if taken == len(part) else memoryview(part)[start : start + taken]
            if start + taken == len(part):
                self._parts.popleft()
                self._in_part = 0
            else:
                self._in_part = start + taken
            if taken < _JOINED_BYTES:
                joined.append(piece)
            else:
                if joined:
                    parts.append(b"".join(joined))
                    joined = []
                parts.append(piece)
        if joined:
            parts.append(b"".join(joined))
        return parts

    def _read(self) -> bool:
        number = self.ahead.read
        passage = self.ahead.take()
        if passage is None:
            return False
        self._parts.append(head_of(number, [len(buffer) for buffer in passage.buffers]))
        self._parts += [buffer for buffer in passage.buffers if len(buffer)]
        return True

    def _forget_done(self) -> None:
        while self._used and self._used[0]() is None:
            self._used.popleft()

    @property
    def sending(self) -> bool:
        """Whether libzmq may still look at memory of the arena for this reader."""
        self._used = deque(used for used in self._used if used() is not None)
        return bool(self._used)

    def give_up(self, given_up: GivenUp) -> None:
        self._parts.clear()
        self._wire.give_up(self.member.incarnation, given_up)


class _Past(NamedTuple):
    """A reader that has no seat any more: its number, that of its first message, and why it was given up."""

    incarnation: int
    first: int
    reason: str


class Serving:
    """All remote readers of a channel.

    Args:
        name: Of the channel, for logs.
        core: Of the sender.
        members: Its readers.
        wire: The socket.
        ranks: Which are for remote readers.
        timeout: Seconds after which a reader that is not heard of is lost.
        control: The control segment.
        arena: The memory of the arena, None without one.
        loop: The sender's.
        changed: Called after every change of membership.
        wake_sender: Called when a reader has made the room that the sender waits for, or is finished.
    """

    def __init__(
        self,
        name: str,
        core: SenderCore,
        members: Members,
        wire: RemoteSenderWire,
        ranks: range,
        timeout: float,
        control: memoryview,
        arena: memoryview | None,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        wake_sender: Callable[[], None],
    ) -> None:
        self._name = name
        self._core = core
        self._members = members
        self.wire = wire
        self._ranks = ranks
        self._timeout = timeout
        self._control = control
        self._arena = arena
        self._loop = loop
        self._changed = changed
        self._wake_sender = wake_sender
        self._links: dict[int, Link] = {}  # by rank, those seated
        self._runs: dict[int, None] = {}  # ranks whose links have something to do, in the order of their turns
        self._runner: asyncio.Handle | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}  # incarnation -> until it is lost, or its join refused
        self._asking: dict[int, RemoteJoin] = {}  # incarnation -> asks for a taken rank
        self._leaving: list[Link] = []  # gone, but libzmq may look at what they were sent
        self._look_timer: asyncio.TimerHandle | None = None
        self._frames: deque[tuple[int, int, Sequence[Any]]] = deque()  # (head behind it, number, parts)
        self._past: deque[_Past] = deque(maxlen=_PAST)
        self._foreign_reported = 0
        self._strangers_reported = 0

    # Messages ---------------------------------------------------------------------------------------------------------

    def keep_frames(self, number: int, frames: Sequence[Any]) -> None:
        """Have the parts of a frame message, which was just published, ready for the links."""
        if self._links:
            self._frames.append((self._core.ring.head, number, frames))

    def _find_frames(self, number: int) -> Sequence[Memory]:
        for _, known, frames in self._frames:
            if known == number:
                return [frame.data for frame in frames]
        raise AssertionError(f"frame message {number} was dropped before all remote readers had it")

    def _drop_frames(self) -> None:
        tail = min((link.ahead.tail for link in self._links.values()), default=self._core.ring.head)
        while self._frames and self._frames[0][0] <= tail:
            self._frames.popleft()

    def kick(self, ranks: Sequence[int]) -> list[int]:
        """Something was published: go on with those of these ranks that are remote; the others."""
        local = []
        for rank in ranks:
            if rank in self._links:
                self._run_soon(rank)
            else:
                local.append(rank)
        return local

    def _run_soon(self, rank: int) -> None:
        self._runs[rank] = None
        if self._runner is None:
            self._runner = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._runner = None
        deadline = time.perf_counter() + _TURN
        # One turn for all of them: each of its own, the loop would be held as often as there are readers.
        while self._runs:
            rank = next(iter(self._runs))
            del self._runs[rank]
            link = self._links.get(rank)
            if link is not None and self._pump(link, deadline):
                self._runs[rank] = None
            if time.perf_counter() >= deadline:
                break
        if self._runs:
            self._runner = self._loop.call_soon(self._run)
        self._changed_wire()

    def _pump(self, link: Link, deadline: float) -> bool:
        try:
            return link.pump(self._core.ring.closed, deadline)
        except Exception as error:
            # The loop would only log it, while the reader waits for the rest.
            reason = text_of(error)
            link.give_up(GivenUp(f"the sender cannot send to it: {reason}", self._core.ring.published - link.ahead.first))
            self._lose(link, f"{link.member.describe()} cannot be sent to: {reason}")
            return False
        except BaseException:
            # Raised by a signal handler. Whoever goes on after it is to find everything in its place.
            self._run_soon(link.member.rank)
            raise

    def finish(self) -> None:
        """The ring is closed: send what is left, and the end."""
        for rank in self._links:
            self._run_soon(rank)

    @property
    def unfinished(self) -> list[RemoteMember]:
        """Who has not received all of a closed channel yet."""
        return [link.member for link in self._links.values()]

    # Events -----------------------------------------------------------------------------------------------------------

    def on_wire(self) -> None:
        for event in self.wire.drain():
            self._handle(event)
        self._report()
        self._changed_wire()

    def _report(self) -> None:
        """Say what came from nobody of ours, and again when it has doubled: who sends it is not to fill the log."""
        wire = self.wire
        if wire.foreign > 2 * self._foreign_reported:
            self._foreign_reported = wire.foreign
            logger.warning(
                "channel %r: ignored %d messages from remote readers that made no sense; are both ends of one version?",
                self._name,
                wire.foreign,
            )
        if wire.strangers > 2 * self._strangers_reported:
            self._strangers_reported = wire.strangers
            logger.warning(
                "channel %r: refused %d connections whose keys are not those of its handle; does somebody use that of an "
                "earlier channel?",
                self._name,
                wire.strangers,
            )

    def _changed_wire(self) -> None:
        # Sending may have eaten the edge of the descriptor, and one drain does not take all of a flood.
        if self.wire.readable():
            self._loop.call_soon(self.on_wire)

    def _handle(self, event: Upward) -> None:
        match event:
            case RemoteJoin():
                self._join(event)
            case Ack():
                self._acknowledge(event)
            case RemoteLeave():
                self._leave(event)
            case Connect():
                self._connect(event)
            case Disconnect():
                self._disconnect(event)

    def _find(self, incarnation: int) -> Link | None:
        return next((link for link in self._links.values() if link.member.incarnation == incarnation), None)

    def _acknowledge(self, ack: Ack) -> None:
        link = self._find(ack.incarnation)
        if link is not None:
            link.acknowledge(ack)
            self._drop_frames()
            self._run_soon(link.member.rank)

    # Members ----------------------------------------------------------------------------------------------------------

    def _join(self, join: RemoteJoin) -> None:
        link = self._find(join.incarnation)
        if link is not None:
            self._stop_timer(join.incarnation)
            if link.member.cut is not None:
                logger.info("channel %r: %s is connected again", self._name, link.member.describe())
            link.begin(join)
            self._run_soon(link.member.rank)
            return
        if join.version != VERSION:
            self._refuse(join, f"the sender speaks version {VERSION}, this reader {join.version}: install the same")
        elif join.returning or join.received:
            # Was given up, while it had no connection to be told so.
            self._tell_what_it_missed(join)
        elif join.rank == ANY_RANK:
            self._seat_anywhere(join)
        elif join.rank not in self._ranks:
            self._refuse(
                join, f"rank {join.rank} is not for a remote reader: those have ranks {self._ranks[0]} to {self._ranks[-1]}"
            )
        else:
            self._contend_or_seat(join, join.rank)

    def _tell_what_it_missed(self, join: RemoteJoin) -> None:
        gone = next((past for past in self._past if past.incarnation == join.incarnation), None)
        if gone is None:
            self._refuse(join, "it has no seat any more", join.received)
        else:
            self._refuse(join, gone.reason, self._core.ring.published - gone.first)

    def _seat_anywhere(self, join: RemoteJoin) -> None:
        members = self._core.members
        for states in ((Membership.AWAITED,), (Membership.LEFT, Membership.LOST, Membership.EVICTED)):
            for rank in self._ranks:
                if members[rank] in states:
                    self._seat(join, rank)
                    return
        # Not that of one that only lost its connection: this may be one too many. Its time is over before that of this.
        self._contend(join, self._ranks[0])

    def _contend_or_seat(self, join: RemoteJoin, rank: int) -> None:
        holder = self._links.get(rank)
        if holder is None:
            self._seat(join, rank)
        elif holder.member.away:
            # A new process at this rank is the best sign that the old one is gone.
            self._lose(holder, f"{holder.member.describe()} lost its connection, and another took its rank")
            self._seat(join, rank)
        else:
            self._contend(join, rank)

    def _contend(self, join: RemoteJoin, rank: int) -> None:
        """Wait for a rank that is taken, as long as its holder may turn out to be gone."""
        if join.incarnation not in self._asking:
            self._asking[join.incarnation] = join
            self._timers[join.incarnation] = self._loop.call_later(grace(self._timeout), self._refuse_taken, join, rank)

    def _refuse_taken(self, join: RemoteJoin, rank: int) -> None:
        if not self._look_first(join.incarnation, self._refuse_taken, join, rank):
            return
        holder = self._links.get(rank)
        self._stop_timer(join.incarnation)
        if holder is None:
            self._seat(join, rank)
        else:
            self._refuse(join, f"rank {rank} is taken by {holder.member.describe()}, {holder.member.process_state()}")

    def _seat(self, join: RemoteJoin, rank: int) -> None:
        self._stop_timer(join.incarnation)
        core = self._core
        if core.ring.closed:
            self._refuse(join, "the channel is closed")
            return
        member = RemoteMember(join, rank, core.join(rank, join.incarnation), self._on_evicted)
        ahead = AheadReader(self._control, core.layout, rank, self._arena, self._find_frames)
        link = self._links[rank] = Link(member, ahead, self.wire, self._wake_sender)
        self._members.by_rank[rank] = member
        self._members.lost.pop(rank, None)
        logger.info("channel %r: %s joined from %s", self._name, member.describe(), member.address)
        link.begin(join)
        self._run_soon(rank)
        self._changed()

    def _refuse(self, join: RemoteJoin, reason: str, number: int = 0) -> None:
        logger.warning(
            "channel %r: refused a remote reader (pid %d on host %r, from %s): %s",
            self._name,
            join.identity.pid,
            join.host,
            join.address,
            reason,
        )
        self.wire.give_up(join.incarnation, GivenUp(reason, number))
        self._changed_wire()

    def _leave(self, leave: RemoteLeave) -> None:
        self._stop_timer(leave.incarnation)
        link = self._find(leave.incarnation)
        if link is None:
            return
        if leave.reason:
            self._lose(link, f"{link.member.describe()} gave up: {leave.reason}")
            return
        logger.debug("channel %r: %s left", self._name, link.member.describe())
        self._core.unseat(link.member.rank, Membership.LEFT)
        self._retire(link, "it left")

    def _connect(self, event: Connect) -> None:
        link = self._find(event.incarnation)
        if link is not None and link.member.cut is not None:
            # It lives. A local reader whose loop is busy is waited for, too.
            link.member.back = True
            self._stop_timer(event.incarnation)

    def _disconnect(self, event: Disconnect) -> None:
        self._stop_timer(event.incarnation)
        link = self._find(event.incarnation)
        if link is not None:
            link.member.cut = time.monotonic()
            link.member.back = False
            self._timers[event.incarnation] = self._loop.call_later(grace(self._timeout), self._gone, link)
            self._admit_asking()

    def _look_first(self, incarnation: int, decide: Callable[..., None], *args: Any) -> bool:
        """Take in what has come before a timer decides: a loop that was held up may call its timers first.

        Returns:
            Whether there is still something to decide. It is to be later if more has come than is taken in at once, or if
            connections waited for our answer, which may bring the news.
        """
        timer, admitted = self._timers[incarnation], self.wire.admitted
        self.on_wire()
        if self._timers.get(incarnation) is not timer:
            return False
        answered = self.wire.admitted != admitted
        if answered or self.wire.readable():
            timer.cancel()
            self._timers[incarnation] = self._loop.call_later(grace(self._timeout) if answered else 0, decide, *args)
            return False
        return True

    def _gone(self, link: Link) -> None:
        if self._look_first(link.member.incarnation, self._gone, link):
            self._stop_timer(link.member.incarnation)
            self._lose(
                link,
                f"{link.member.describe()} lost its connection from {link.member.address} and did not come back in time",
            )

    def _lose(self, link: Link, what: str) -> None:
        self._members.lose(link.member, what)
        self._retire(link, what)

    def _on_evicted(self, member: RemoteMember) -> None:
        link = self._links[member.rank]
        reason = "the sender gave it up, because it fell behind"
        link.give_up(GivenUp(reason, self._core.ring.published - link.ahead.first))
        self._retire(link, reason)
        self._changed_wire()

    def _retire(self, link: Link, reason: str) -> None:
        """A reader without a seat: forget it, and free what it held once libzmq does not look at it any more."""
        member = link.member
        del self._links[member.rank]
        self._stop_timer(member.incarnation)
        self._runs.pop(member.rank, None)
        self._past.append(_Past(member.incarnation, link.ahead.first, reason))
        self._leaving.append(link)
        self._free_soon()
        self._drop_frames()
        self._changed()
        self._admit_asking()

    def _free_soon(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._free(_LOOK)

    def _free(self, pause: float) -> None:
        self._look_timer = None
        for link in [link for link in self._leaving if not link.sending]:
            self._leaving.remove(link)
            link.member.holder.dead = True
            self._core.arena.forget(link.member.holder, 0)
        if self._leaving:
            self._look_timer = self._loop.call_later(pause, self._free, min(2 * pause, _LONGEST_LOOK))

    def _admit_asking(self) -> None:
        for join in list(self._asking.values()):
            if join.rank == ANY_RANK:
                free = [rank for rank in self._ranks if rank not in self._links]
            else:
                holder = self._links.get(join.rank)
                free = [join.rank] if holder is None or holder.member.away else []
            if free:
                self._stop_timer(join.incarnation)
                self._contend_or_seat(join, free[0])

    def _stop_timer(self, incarnation: int) -> None:
        self._asking.pop(incarnation, None)
        if incarnation in self._timers:
            self._timers.pop(incarnation).cancel()

    # Closing ----------------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Tell all readers that no message will come any more, and why."""
        for link in self._links.values():
            link.give_up(GivenUp(reason, self._core.ring.published - link.ahead.first, failed=True))

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._runs.clear()
        if self._runner is not None:
            self._runner.cancel()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._links.clear()
        self._leaving.clear()
        self.wire.close()
        # They belong to the sender that owns us: kept, they would keep it until the collector finds the cycle.
        self._changed = self._wake_sender = _ignore


def _ignore() -> None:
    """What is called for of a closed channel."""
