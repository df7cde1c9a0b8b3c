"""Who reads the channel: joins, leaves and deaths, as the sender decides them.

A reader asks to join; the sender seats it, or refuses with a reason. Deaths come from two independent signs: the pidfd of
the process becomes readable, and libzmq reports the end of the connection. The pidfd is proof, and only proof of death
frees what a reader still holds; the connection alone is proof only where pids mean nothing (another pid namespace).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from asyncio import TimerHandle
from collections.abc import Callable, Sequence

from aioarena._core.arena import Holder, Span
from aioarena._core.layout import VERSION
from aioarena._core.sender import Membership, SenderCore
from aioarena._platform.bell import NO_BELL, BellRope
from aioarena._platform.process import ProcessIdentity, describe_state, exit_signal
from aioarena._platform.wire import Disconnect, Join, Leave, SenderWire
from aioarena.exceptions import ReaderLostError

logger = logging.getLogger("aioarena")

_SLOTS_SHOWN = 8  # in a log line

# Seconds that a process whose connection ended gets to turn out dead, before it counts as alive without a connection. A
# guess: dying takes milliseconds, tearing down large memory included.
_DYING_SECONDS = 0.25

# Seconds that a reader waits for a rank whose holder may be about to leave or to turn out dead, before it is refused:
# between two connections there is no order. A guess, far above what a message takes.
_CONTENDING_SECONDS = 0.1


class Member:
    """A process that was seated at a rank.

    Attributes:
        rank: Its rank.
        incarnation: Number of this seating.
        identity: The process.
        holder: What it holds of the arena.
        pidfd: Readable once it is dead; None in another pid namespace, or once it is closed.
        rope: Rings its bell; None if it has none, or once it is closed.
    """

    local = True  # attached to the memory, and not over a network
    host: str | None = None  # another one than ours

    def __init__(
        self,
        rank: int,
        incarnation: int,
        identity: ProcessIdentity,
        holder: Holder,
        pidfd: int | None = None,
        rope: BellRope | None = None,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.identity = identity
        self.holder = holder
        self.pidfd = pidfd
        self.rope = rope

    def is_dead(self) -> bool:
        """Whether the process is dead by now."""
        if self.pidfd is None:
            try:
                return not self.identity.alive
            except OSError:
                return False
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def process_state(self) -> str:
        """What the process is doing, from /proc, in words."""
        return describe_state(self.identity.pid) if self.identity.visible else "in another pid namespace"

    def describe(self) -> str:
        return f"reader {self.rank} (pid {self.identity.pid})"

    def on_evicted(self) -> None:
        """Its seat was taken from it. A local reader sees that by itself."""


class Members:
    """The sender's list of readers.

    Args:
        name: Of the channel, for logs.
        local_readers: How many ranks, from 0 on, are for readers that share the memory.
        core: Seats and unseats.
        wire: Carries refusals.
        watch: Calls back when a descriptor becomes readable.
        unwatch: Ends that.
        later: Calls back after some seconds.
        changed: Called after every change of membership.
    """

    def __init__(
        self,
        name: str,
        local_readers: int,
        core: SenderCore,
        wire: SenderWire,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        later: Callable[[float, Callable[[], None]], TimerHandle],
        changed: Callable[[], None],
    ) -> None:
        self._name = name
        self._local_readers = local_readers
        self._core = core
        self._wire = wire
        self._watch = watch
        self._unwatch = unwatch
        self._later = later
        self._changed = changed
        self.by_rank: dict[int, Member] = {}  # who has, or last had, each rank
        self._suspects: dict[Member, float] = {}  # connection ended, process alive, since when
        self._contending: dict[int, tuple[Join, TimerHandle]] = {}  # incarnation -> asks for a taken rank
        self._departed: list[Member] = []  # gone from their rank, but holding spans in a process that lives
        self.lost: dict[int, tuple[str, Member, int | None]] = {}  # vacant ranks: what happened, to whom, signal

    def lost_error(self) -> ReaderLostError | None:
        """The error for the lowest lost rank that nobody took over, or None."""
        if not self.lost:
            return None
        what, member, signal = self.lost[min(self.lost)]
        return ReaderLostError(
            f"channel {self._name!r}: {what}; start a process that attaches at rank {member.rank}, or pass "
            'on_reader_lost="continue" to go on without',
            pid=member.identity.pid,
            rank=member.rank,
            signal=signal,
        )

    def handle(self, event: Join | Leave | Disconnect) -> None:
        match event:
            case Join():
                self._join(event)
            case Leave():
                self._leave(event)
            case Disconnect():
                self._disconnect(event)

    def _join(self, join: Join, last: bool = False) -> None:
        """Seat a reader or refuse it; ``last`` if it has waited for a taken rank long enough."""
        core = self._core
        if join.version != VERSION:
            self._refuse(join, f"the sender speaks layout version {VERSION}, this reader {join.version}: install the same")
            return
        if join.rank >= self._local_readers:
            self._refuse(join, self._out_of_range(join.rank))
            return
        known = self.by_rank.get(join.rank)
        if (
            known is not None
            and known.incarnation != join.incarnation
            and core.members[join.rank] in (Membership.JOINED, Membership.EVICTED)
            and known.is_dead()
        ):
            # Its death is on its way to us; the successor was quicker.
            self._died(known)
            known = self.by_rank[join.rank]  # maybe this one by now, or another that was waiting for the rank
        if known is not None and known.incarnation == join.incarnation:
            return  # asked twice
        state = core.members[join.rank]
        if known is not None and state in (Membership.JOINED, Membership.EVICTED):
            if not last:
                self._contend(join)
            elif state is Membership.JOINED:
                self._refuse(join, f"rank {join.rank} is taken by process {known.identity.pid}, which lives")
            else:
                self._refuse(
                    join,
                    f"rank {join.rank} was evicted, and its process {known.identity.pid} still lives: close that "
                    "Receiver or end the process",
                )
            return
        # Ticks may be half a minute apart, and meanwhile many may have come and gone.
        self._tidy_up()
        try:
            pidfd = join.identity.open_pidfd()
        except ProcessLookupError:
            self._stop_contending(join.incarnation)  # died since it asked
            return
        except OSError as error:
            self._stop_contending(join.incarnation)
            self._refuse(
                join, f"the sender cannot watch it for lack of descriptors ({error.strerror}); raise ulimit -n there"
            )
            return
        self._stop_contending(join.incarnation)
        rope = self._open_bell(join) if pidfd is not None else None
        holder = core.join(join.rank, join.incarnation, join.identity.pid)
        member = Member(join.rank, join.incarnation, join.identity, holder, pidfd, rope)
        self.by_rank[join.rank] = member
        self.lost.pop(join.rank, None)
        if pidfd is not None:
            self._watch(pidfd, lambda: self._died(member))
        logger.debug("channel %r: %s joined", self._name, member.describe())
        self._wire.wake()
        self._changed()

    def _out_of_range(self, rank: int) -> str:
        if not self._local_readers:
            return f"rank {rank} is not for a local reader: the channel has remote ones only"
        whose = " for local readers" if self._local_readers < self._core.layout.readers else ""
        return f"rank {rank} is out of range: the channel has ranks 0 to {self._local_readers - 1}{whose}"

    def _open_bell(self, join: Join) -> BellRope | None:
        if join.bell == NO_BELL:
            return None
        try:
            return BellRope(join.identity.pid, join.bell)
        except OSError as error:
            logger.warning(
                "channel %r: reader %d (pid %d) is woken over ZMQ, since its pipe cannot be opened: %s",
                self._name,
                join.rank,
                join.identity.pid,
                error.strerror or error,
            )
            return None

    def ring(self, ranks: Sequence[int]) -> bool:
        """Ring the bells of these readers; False, and nothing rung, if one has none."""
        ropes = [self.by_rank[rank].rope for rank in ranks]
        if None in ropes:
            return False
        for rope in ropes:
            rope.ring()  # type: ignore[union-attr]
        return True

    def _contend(self, join: Join) -> None:
        """Wait a moment for a rank that is taken."""
        if join.incarnation not in self._contending:
            self._contending[join.incarnation] = join, self._later(_CONTENDING_SECONDS, lambda: self._decide(join))

    def _decide(self, join: Join) -> None:
        self._stop_contending(join.incarnation)
        # Whoever lost its connection is about to lose its rank too.
        self._join(join, last=self.by_rank[join.rank] not in self._suspects)
        self._changed()  # a refusal went out, from where nobody looks at the wire afterwards

    def _stop_contending(self, incarnation: int) -> None:
        if incarnation in self._contending:
            self._contending.pop(incarnation)[1].cancel()

    def _admit_contending(self) -> None:
        for join, _ in list(self._contending.values()):
            self._join(join)

    def _refuse(self, join: Join, reason: str) -> None:
        logger.warning("channel %r: refused reader %d (pid %d): %s", self._name, join.rank, join.identity.pid, reason)
        self._wire.refuse(join.incarnation, reason)

    def _leave(self, leave: Leave) -> None:
        self._stop_contending(leave.incarnation)
        member = self.by_rank.get(leave.rank)
        if member is None or member.incarnation != leave.incarnation:
            return
        state = self._core.members[leave.rank]
        if state is Membership.EVICTED:
            # It has noticed, and reads no more: its rank may be taken again, by the same process too.
            self._core.skip_unread(leave.rank, member.holder)
            self._core.members[leave.rank] = Membership.LEFT
            logger.info("channel %r: %s, evicted before, closed", self._name, member.describe())
            self._depart(member)
            self._changed()
            self._admit_contending()
        elif state is Membership.JOINED:
            self._core.skip_unread(leave.rank, member.holder)
            self._core.unseat(leave.rank, Membership.LEFT)
            logger.debug("channel %r: %s left", self._name, member.describe())
            if not self._core.seated:
                logger.info("channel %r: no reader is left; messages go nowhere until one attaches", self._name)
            self._depart(member)
            # It waits for the empty seat, to be sure that its leave arrived before it closes its socket.
            self._wire.wake()
            self._changed()
            self._admit_contending()

    def _disconnect(self, event: Disconnect) -> None:
        self._stop_contending(event.incarnation)
        for member in self.by_rank.values():
            if member.incarnation == event.incarnation and self._core.members[member.rank] is Membership.JOINED:
                if member.pidfd is None or member.is_dead():
                    self._died(member)
                else:
                    # Most likely it is dying: the kernel closes a process's sockets a moment before its pidfd tells.
                    self._suspects[member] = time.monotonic()
                return

    def _give_up_suspects(self) -> None:
        """Lose the readers whose connection ended a while ago and whose process still lives."""
        now = time.monotonic()
        for member, since in list(self._suspects.items()):
            if now - since < _DYING_SECONDS:
                continue
            del self._suspects[member]
            if self.by_rank.get(member.rank) is member and self._core.members[member.rank] is Membership.JOINED:
                self.lose(member, f"{member.describe()} dropped its connection without leaving, but its process lives")
                self._depart(member)
                self._changed()
                self._admit_contending()

    def _died(self, member: Member) -> None:
        """A process is proven dead: everything it held is free."""
        signal = exit_signal(member.pidfd) if member.pidfd is not None else None
        self._close_descriptors(member)
        self._suspects.pop(member, None)
        member.holder.dead = True
        if self.by_rank.get(member.rank) is member:
            state = self._core.members[member.rank]
            if state is Membership.JOINED:
                how = f"was killed by signal {signal}" if signal else "died without closing"
                self.lose(member, f"{member.describe()} {how}", signal)
            elif state is Membership.EVICTED:
                self._core.members[member.rank] = Membership.LOST
        if member in self._departed:
            self._departed.remove(member)
        self._core.arena.forget(member.holder, 0)
        self._changed()
        self._admit_contending()

    def lose(self, member: Member, what: str, signal: int | None = None) -> None:
        """Take the seat from a reader that is gone without leaving."""
        messages, nbytes = self._core.lag(member.rank)
        self._core.unseat(member.rank, Membership.LOST)
        self.lost[member.rank] = (what, member, signal)
        logger.warning("channel %r: %s; it was %d messages (%d bytes) behind", self._name, what, messages, nbytes)

    def _depart(self, member: Member) -> None:
        """A process gave up its rank alive: watch it for as long as it holds spans."""
        self._close_rope(member)
        if not self._core.arena.held_by(member.holder):
            self._close_descriptors(member)
        else:
            self._departed.append(member)

    def evict(self, rank: int) -> Member:
        """Take the seat from a reader that lives. What it may still read is not reused until it is dead."""
        member = self.by_rank[rank]
        self._core.unseat(rank, Membership.EVICTED)
        self._close_rope(member)
        member.on_evicted()
        self._wire.wake()
        self._changed()
        return member

    @property
    def pressing(self) -> bool:
        """Whether somebody's fate is to be decided by time."""
        return bool(self._suspects)

    def tick(self) -> None:
        """Decide what time decides, and tidy up."""
        self._give_up_suspects()
        self._tidy_up()

    def _tidy_up(self) -> None:
        if self._departed:
            for member in [m for m in self._departed if not self._core.arena.held_by(m.holder)]:
                self._departed.remove(member)
                self._close_descriptors(member)

    def describe_behind(self, rank: int) -> str:
        """One reader that holds the sender up, for logs: who, in what state, how far behind, what it holds."""
        member = self.by_rank[rank]
        messages, nbytes = self._core.lag(rank)
        spans = self._core.arena.held_by(member.holder)
        slots = ", ".join(str(span.slot) for span in spans[:_SLOTS_SHOWN]) + (" ..." if len(spans) > _SLOTS_SHOWN else "")
        return (
            f"{member.describe()}, {member.process_state()}, is {messages} messages ({nbytes} bytes) behind and holds "
            f"{len(spans)} spans of the arena" + (f" (at slots {slots})" if spans else "")
        )

    def holdings(self) -> list[tuple[str, list[Span]]]:
        """Everybody who was given spans, and those he has not released: also who left, or lost his rank to another."""
        members = {*self.by_rank.values(), *self._departed}
        return [(member.describe(), self._core.arena.held_by(member.holder)) for member in members]

    def seated(self) -> list[int]:
        """The incarnations of those local readers who have a seat."""
        members = [self.by_rank[rank] for rank in self._core.seated]
        return [member.incarnation for member in members if member.local]

    def slowest(self) -> int | None:
        """The rank that is furthest behind, None without readers."""
        return max(self._core.seated, key=lambda rank: self._core.lag(rank)[1], default=None)

    def _close_rope(self, member: Member) -> None:
        if member.rope is not None:
            member.rope.close()
            member.rope = None

    def _close_descriptors(self, member: Member) -> None:
        self._close_rope(member)
        if member.pidfd is not None:
            self._unwatch(member.pidfd)
            with contextlib.suppress(OSError):
                os.close(member.pidfd)
            member.pidfd = None

    def close(self) -> None:
        for incarnation in list(self._contending):
            self._stop_contending(incarnation)
        for member in {*self.by_rank.values(), *self._departed}:
            self._close_descriptors(member)
        # They belong to the sender that owns us: kept, they would keep it until the collector finds the cycle.
        self._watch = self._changed = self._unwatch = _ignore


def _ignore(*_: object) -> None:
    """What is called for of a closed channel."""
