"""A channel among the ranks of a torch.distributed group: one call gives each of them its end.

The group carries the handle and who could attach, nothing else. Its collective calls block, so they run in a thread.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from aioarena._types import Handle
from aioarena.exceptions import GroupError
from aioarena.receiver import Receiver
from aioarena.sender import Sender


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank has no end; in words, because not every error pickles."""

    rank: int
    what: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands.

    Attributes:
        group: The group, or None for the default one.
        src: Rank in the group of the sender.
        rank: Of this process, in the group.
        size: Of the group.
    """

    group: Any
    src: int
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any, src: int) -> Place:
        """Raises ValueError or RuntimeError if there is no such group or rank, or this process is not in it."""
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized: call init_process_group first")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("this process is not in the group")
        if not 0 <= src < size:
            raise ValueError(f"src must be from 0 to {size - 1}, not {src}: it is a rank of the group")
        if size < 2:
            raise ValueError("a group of one process has nobody to send to")
        return cls(group, src, rank, size)

    @property
    def reader(self) -> int:
        """Rank on the channel of this process, which is not the sender: those of the group, without the sender's."""
        return self.rank - (self.rank > self.src)


def share_handle(place: Place, handle: Handle | None, error: BaseException | None) -> Handle | Exception:
    """Collective: the sender's handle at every rank, or what is wrong with it here. If there is none, all raise."""
    mine: Any = None
    if place.rank == place.src:
        mine = handle if error is None else _Failure(place.rank, repr(error))
    shared = [pickle.dumps(mine)]  # by ourselves: torch's pickler need not know of our classes
    dist.broadcast_object_list(shared, src=_global_rank(place), group=place.group)
    try:
        received = pickle.loads(shared[0])
    except Exception as problem:  # of another build of the library, most likely; the others have to be told
        return problem
    if isinstance(received, _Failure):
        raise GroupError(f"rank {received.rank}, which was to send, could not make the channel: {received.what}") from error
    assert isinstance(received, Handle)
    return received


def agree(place: Place, error: BaseException | None) -> None:
    """Collective: return once every rank has its end, or raise at all of them if one has not."""
    mine = None if error is None else _Failure(place.rank, f"{type(error).__name__}: {error}")
    outcomes: list[Any] = [None] * place.size
    dist.all_gather_object(outcomes, mine, group=place.group)
    failures = [outcome for outcome in outcomes if outcome is not None]
    if failures:
        ranks = ", ".join(str(failure.rank) for failure in failures)
        raise GroupError(
            f"the group has no channel, since rank {ranks} could not attach: {failures[0].what}. All ranks have to be "
            "processes of one user on one host"
        ) from error


def _global_rank(place: Place) -> int:
    return place.src if place.group is None else dist.get_global_rank(place.group, place.src)


async def connect(
    group: Any,
    src: int,
    make_sender: Callable[[int], Any],
    make_receiver: Callable[[Handle, int], Any],
    start: Callable[[Any], Awaitable[None]],
    close: Callable[[Any], Awaitable[None]],
) -> Any:
    """Give every rank its end, started: at all ranks, or at none.

    Args:
        group: The group.
        src: Rank of the sender in it.
        make_sender: Makes the sender for a number of readers.
        make_receiver: Makes the receiver for a handle and a rank.
        start: Starts an end.
        close: Closes it again.
    """
    place = Place.of(group, src)
    end: Any = None
    error: BaseException | None = None
    try:
        if place.rank == src:
            try:
                end = make_sender(place.size - 1)
                await start(end)
            except Exception as problem:
                error = problem
        handle = await asyncio.to_thread(
            share_handle, place, end.handle if error is None and end is not None else None, error
        )
        try:
            if place.rank != src:
                if isinstance(handle, Exception):
                    raise handle
                end = make_receiver(handle, place.reader)
                await start(end)
        except Exception as problem:
            # Kept until all know: whoever raised now would leave the others waiting for it.
            error = problem
        await asyncio.to_thread(agree, place, error)
    except BaseException:
        if end is not None:
            await close(end)
        raise
    return end


async def from_process_group(
    group: Any = None,
    src: int = 0,
    *,
    sender: dict[str, Any] | None = None,
    receiver: dict[str, Any] | None = None,
) -> Sender | Receiver:
    """Give every rank of a process group its end of a channel, started: a Sender at ``src``, a Receiver at all others.

    Collective: all ranks of the group have to call it, with the same ``src``. Either all of them get an end or all raise.
    All have to be processes of one user on one host; the group is only used here, and need not outlive the call. As with
    any collective operation, cancelling it at one rank leaves the others waiting for that one.

    Args:
        group: A ``torch.distributed`` process group with a backend that can pass objects, e.g. gloo; None for the default.
        src: Rank in the group of the sender. The readers have the ranks 0 to ``size - 2`` on the channel, in the order of
            their ranks in the group.
        sender: Options of the Sender, e.g. ``{"arena": None}``.
        receiver: Options of the Receivers.

    Returns:
        This rank's end, to be closed by the caller, readers first.

    Raises:
        GroupError: A rank could not make the channel or attach to it; the message says which, and why.
        ValueError: ``src`` is no rank of the group, or the group is too small, or this process is not in it.
        RuntimeError: ``torch.distributed`` is not initialized.
    """
    end: Sender | Receiver = await connect(
        group,
        src,
        lambda readers: Sender(readers, **(sender or {})),
        lambda handle, rank: Receiver(handle, rank, **(receiver or {})),
        lambda end: end.start(),
        lambda end: end.aclose(),
    )
    return end
