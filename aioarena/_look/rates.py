"""What changed between two looks at a channel."""

from __future__ import annotations

from dataclasses import dataclass

from aioarena._look.channels import ChannelView, ReaderView


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a channel goes.

    Attributes:
        messages: Messages sent a second.
        ring: Bytes a second through the ring, headers of records included.
        arena: Bytes a second through the arena.
        frames: Bytes a second as frames.
        received: Messages received a second, by rank.
    """

    messages: float
    ring: float
    arena: float
    frames: float
    received: tuple[float, ...]

    @property
    def bytes(self) -> float:
        """Bytes a second, all ways."""
        return self.ring + self.arena + self.frames


def rates(before: ChannelView, after: ChannelView, seconds: float) -> Rates:
    """From two looks at one channel that many seconds apart."""

    def per_second(earlier: int, later: int) -> float:
        return max(0, later - earlier) / seconds if seconds > 0 else 0.0

    return Rates(
        messages=per_second(before.messages, after.messages),
        ring=per_second(before.head, after.head),
        arena=per_second(before.arena_sent, after.arena_sent),
        frames=per_second(before.frames_sent, after.frames_sent),
        # A reader that took a rank over counts from 0.
        received=tuple(
            per_second(one.messages, other.messages) for one, other in zip(before.readers, after.readers, strict=True)
        ),
    )


class Stalls:
    """Which readers hold a send up, and since when, as far as looks at a channel show it.

    A stall that comes and goes between two looks is not seen.
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}  # rank -> its tail, and when it was seen there first

    def look(self, view: ChannelView, now: float) -> dict[int, float]:
        """Seconds for which each rank that a send waits for has not moved, for certain."""
        self._since = {reader.rank: self._kept(reader, now) for reader in view.readers if reader.rank in view.held_up_by}
        return {rank: now - since for rank, (_, since) in self._since.items()}

    def _kept(self, reader: ReaderView, now: float) -> tuple[int, float]:
        tail, since = self._since.get(reader.rank, (-1, now))
        return (tail, since) if tail == reader.tail else (reader.tail, now)
