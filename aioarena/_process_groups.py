"""A channel among the ranks of a torch.distributed group: one call gives each of them its end.

The group carries who shares the sender's memory, the handle, and who could attach, nothing else. Its collective calls
block, so they run in a thread.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from aioarena._platform import memory
from aioarena._platform.memory import Segment, SegmentRef
from aioarena._platform.network import endpoint_of
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


class Probe:
    """A little memory of the sender's process: who can attach it can attach the channel, whatever hosts are called.

    Args:
        backing: That of the channel.
    """

    def __init__(self, backing: str) -> None:
        self._nonce = secrets.token_bytes(16)
        self._segment = Segment.memfd("aioarena-probe", 4096) if backing == "memfd" else Segment.shm("control", 4096)
        self._segment.reserve(4096)
        self._segment.mapping.view[: len(self._nonce)] = self._nonce

    @property
    def question(self) -> tuple[SegmentRef, bytes]:
        """To be answered with :meth:`is_shared`."""
        return self._segment.ref, self._nonce

    @staticmethod
    def is_shared(question: tuple[SegmentRef, bytes]) -> bool:
        """Whether this process shares memory with the one that asks."""
        ref, nonce = question
        try:
            return memory.attach(ref).view[: len(nonce)] == nonce
        except Exception:  # of whatever kind: this reader cannot be a local one
            return False

    def close(self) -> None:
        self._segment.close()


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Who shares the sender's memory.

    Attributes:
        local: Ranks of the group that do, without the sender's.
        remote: Ranks that do not.
    """

    local: list[int]
    remote: list[int]

    def reader(self, rank: int) -> int:
        """Rank on the channel of a rank of the group that is not the sender: first the local ones, then the others."""
        return [*self.local, *self.remote].index(rank)


def find_neighbours(place: Place, probe: Probe | None, error: BaseException | None) -> Neighbours:
    """Collective: who shares the sender's memory. If the sender cannot ask, all raise."""
    mine: Any = None
    if place.rank == place.src:
        mine = probe.question if probe is not None else _Failure(place.rank, repr(error))
    question = _broadcast(place, mine)
    answers: list[Any] = [None] * place.size
    dist.all_gather_object(answers, not isinstance(question, _Failure) and Probe.is_shared(question), group=place.group)
    if isinstance(question, _Failure):
        raise _cannot_send(question) from error
    others = [rank for rank in range(place.size) if rank != place.src]
    return Neighbours([rank for rank in others if answers[rank]], [rank for rank in others if not answers[rank]])


def own_endpoint() -> str:
    """An address of this host that the other ranks reach: that towards the master of the group, on a free port.

    Raises:
        GroupError: There is no way to tell.
    """
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        raise GroupError(
            "some ranks do not share memory with the sender, and MASTER_ADDR is not set, which would tell the way to them: "
            'pass sender={"bind": "tcp://ADDRESS:0"} with the address of this host that they reach'
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing, but chooses a route
            return endpoint_of(probe.getsockname()[0], 0)
    except OSError as error:
        raise GroupError(
            f"there is no way to {master} (MASTER_ADDR) to be found: {error.strerror or error}; pass "
            'sender={"bind": "tcp://ADDRESS:0"} with the address of this host that the other ranks reach'
        ) from error


def remote_options(neighbours: Neighbours, sender: dict[str, Any]) -> dict[str, Any]:
    """What the sender needs beside its own options for the ranks that do not share its memory."""
    if "remote_readers" in sender:
        raise TypeError("remote_readers is found out here, and not to be passed")
    if not neighbours.remote:
        return {"bind": None}
    return {"remote_readers": len(neighbours.remote), "bind": sender.get("bind") or own_endpoint()}


def _broadcast(place: Place, mine: Any) -> Any:
    shared = [pickle.dumps(mine)]  # by ourselves: torch's pickler need not know of our classes
    dist.broadcast_object_list(shared, src=_global_rank(place), group=place.group)
    return pickle.loads(shared[0])


def _cannot_send(failure: _Failure) -> GroupError:
    return GroupError(f"rank {failure.rank}, which was to send, could not make the channel: {failure.what}")


def share_handle(place: Place, handle: Handle | None, error: BaseException | None) -> Handle | Exception:
    """Collective: the sender's handle at every rank, or what is wrong with it here. If there is none, all raise."""
    mine: Any = None
    if place.rank == place.src:
        mine = handle if error is None else _Failure(place.rank, repr(error))
    try:
        received = _broadcast(place, mine)
    except Exception as problem:  # of another build of the library, most likely; the others have to be told
        return problem
    if isinstance(received, _Failure):
        raise _cannot_send(received) from error
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
        raise GroupError(f"the group has no channel, since rank {ranks} could not attach: {failures[0].what}") from error


def _global_rank(place: Place) -> int:
    return place.src if place.group is None else dist.get_global_rank(place.group, place.src)


async def connect(
    group: Any,
    src: int,
    sender: Any,
    make_sender: Callable[[int, dict[str, Any]], Any],
    make_receiver: Callable[[Handle, int], Any],
    start: Callable[[Any], Awaitable[None]],
    close: Callable[[Any], Awaitable[None]],
) -> Any:
    """Give every rank its end, started: at all ranks, or at none.

    Args:
        group: The group.
        src: Rank of the sender in it.
        sender: Options of the sender.
        make_sender: Makes the sender for a number of local readers, with its options.
        make_receiver: Makes the receiver for a handle and a rank.
        start: Starts an end.
        close: Closes it again.
    """
    place = Place.of(group, src)
    options: dict[str, Any] = dict(sender or {})
    end: Any = None
    error: BaseException | None = None
    try:
        neighbours = await _look_around(place, options.get("backing", "memfd"))
        if place.rank == src:
            try:
                end = make_sender(len(neighbours.local), {**options, **remote_options(neighbours, options)})
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
                end = make_receiver(handle, neighbours.reader(place.rank))
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


async def _look_around(place: Place, backing: str) -> Neighbours:
    probe: Probe | None = None
    error: Exception | None = None
    if place.rank == place.src:
        try:
            probe = Probe(backing)
        except Exception as problem:
            error = problem
    try:
        return await asyncio.to_thread(find_neighbours, place, probe, error)
    finally:
        if probe is not None:
            probe.close()


async def from_process_group(
    group: Any = None,
    src: int = 0,
    *,
    sender: dict[str, Any] | None = None,
    receiver: dict[str, Any] | None = None,
) -> Sender | Receiver:
    """Give every rank of a process group its end of a channel, started: a Sender at ``src``, a Receiver at all others.

    Collective: all ranks of the group have to call it, with the same ``src``. Either all of them get an end or all raise.
    The group is only used here, and need not outlive the call. As with any collective operation, cancelling it at one rank
    leaves the others waiting for that one.

    Ranks that can attach the sender's memory become local readers, whatever their hosts are called; all others become
    remote readers over TCP. Those connect to the address that the sender's host has towards ``MASTER_ADDR``, or to that in
    ``sender={"bind": "tcp://10.0.0.5:0"}``. The group's own transport carries the handle, with the keys of the channel.

    Args:
        group: A ``torch.distributed`` process group with a backend that can pass objects, e.g. gloo; None for the default.
        src: Rank in the group of the sender. The readers have the ranks 0 to ``size - 2`` on the channel: first the local
            ones, then the remote ones, each in the order of their ranks in the group.
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
        sender,
        lambda readers, options: Sender(readers, **options),
        lambda handle, rank: Receiver(handle, rank, **(receiver or {})),
        lambda end: end.start(),
        lambda end: end.aclose(),
    )
    return end
