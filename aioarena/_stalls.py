"""Which reader holds a send up, and for how long: warnings, statistics and eviction.

Time counts per reader, from the moment a send first needed room that the reader withholds until the reader moves. So it
counts on across calls that time out and are tried again, and nobody is blamed for another's rest.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from aioarena._asyncio import TICK
from aioarena._core.sender import Membership, SenderCore
from aioarena._membership import Members

logger = logging.getLogger("aioarena")

# Where looks are further apart than this while a clock runs, our own process did not run, and what it did not see is
# nobody's fault.
_ASLEEP = 3 * TICK


@dataclass(slots=True)
class _Clock:
    since: float
    due: float  # of the next warning
    tail: int = 0  # where the reader was at ``since``

    def rings(self, now: float) -> bool:
        """Whether to speak of it now; the next time is after twice as long."""
        if now < self.due:
            return False
        self.due = now + (now - self.since)
        return True


class Stalls:
    """The clocks of one sender. Times are ``time.monotonic()`` seconds.

    Args:
        name: Of the channel, for logs.
        core: Knows who is how far.
        members: Describes readers and evicts them.
        stall_after: Seconds until the first warning.
        evict_after: Seconds until a reader is evicted, or None.
    """

    def __init__(
        self, name: str, core: SenderCore, members: Members, stall_after: float, evict_after: float | None
    ) -> None:
        self._name = name
        self._core = core
        self._members = members
        self._stall_after = stall_after
        self._evict_after = evict_after
        self._blocking: dict[int, _Clock] = {}  # by rank
        self._needed: int | None = None  # the tail that a send waits for all readers to reach
        self._absent: _Clock | None = None
        self._waiting_for_seats = 0
        self._looked = time.monotonic()  # when this was called last

    # What sends say ---------------------------------------------------------------------------------------------------

    def need(self, tail: int) -> None:
        """A send needs all readers to be at this tail, and has to wait for some."""
        now = self._now()
        self._needed = tail
        self._look(now)

    def need_no_more(self) -> None:
        """No send waits. The clocks run on, in case it only gave up."""
        self._needed = None

    def wait_for_seats(self) -> None:
        """A call waits until all readers have attached."""
        now = self._now()
        self._waiting_for_seats += 1
        self._look_for_seats(now)

    def wait_no_more(self) -> None:
        """That call is over."""
        self._waiting_for_seats -= 1

    # What time does ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a clock runs, so that :meth:`tick` has to be called about every second."""
        return self._needed is not None or bool(self._blocking) or self._waiting_for_seats > 0

    def tick(self) -> None:
        """Warn and evict."""
        now = self._now()
        if self._needed is not None:
            self._look(now)
        else:
            self._blocking = {rank: clock for rank, clock in self._blocking.items() if self._holds(rank, clock)}
        if self._waiting_for_seats:
            self._look_for_seats(now)

    def _now(self) -> float:
        """The time, after taking off the clocks what our own process slept."""
        now = time.monotonic()
        asleep = now - self._looked
        self._looked = now
        # Where no clock ran, ticks were rare anyway.
        if asleep > _ASLEEP and self.running:
            for clock in [*self._blocking.values(), *([self._absent] if self._absent else [])]:
                clock.since += asleep
                clock.due += asleep
        return now

    def _look(self, now: float) -> None:
        needed, core = self._needed, self._core
        assert needed is not None
        for rank in [rank for rank in self._blocking if core.members[rank] is not Membership.JOINED]:
            del self._blocking[rank]
        for rank in list(core.seated):
            tail = core.ring.tail(rank)
            clock = self._blocking.get(rank)
            if tail >= needed:
                self._blocking.pop(rank, None)
            elif clock is None or clock.tail != tail:
                self._blocking[rank] = _Clock(now, now + self._stall_after, tail)
            else:
                self._judge(rank, clock, now)

    def _judge(self, rank: int, clock: _Clock, now: float) -> None:
        if clock.rings(now):
            who = self._members.describe_behind(rank)
            logger.warning("channel %r: a send has waited %.0f s: %s", self._name, now - clock.since, who)
        if self._evict_after is not None and now - clock.since >= self._evict_after:
            logger.warning(
                "channel %r: evicted after %.0f s: %s. The others go on; what it may still read is not reused until its "
                "process is dead.",
                self._name,
                now - clock.since,
                self._members.describe_behind(rank),
            )
            del self._blocking[rank]
            self._members.evict(rank)

    def _look_for_seats(self, now: float) -> None:
        if not self._core.awaited:
            self._absent = None
        elif self._absent is None:
            self._absent = _Clock(now, now + self._stall_after)
        elif self._absent.rings(now):
            logger.warning(
                "channel %r: a send has waited %.0f s: %s", self._name, now - self._absent.since, self.describe_absent()
            )

    def _holds(self, rank: int, clock: _Clock) -> bool:
        """Whether a reader is still where it was when its clock started."""
        return self._core.members[rank] is Membership.JOINED and self._core.ring.tail(rank) == clock.tail

    # What it says -----------------------------------------------------------------------------------------------------

    def waited_for(self, rank: int) -> float:
        """Seconds since a send first needed room that this reader still withholds; 0 if it moved since."""
        clock = self._blocking.get(rank)
        return time.monotonic() - clock.since if clock is not None and self._holds(rank, clock) else 0.0

    def describe_absent(self) -> str:
        """Whom the first message waits for."""
        ranks = [rank for rank, member in enumerate(self._core.members) if member is Membership.AWAITED]
        return f"channel {self._name!r} is waiting for readers {ranks} to attach"
