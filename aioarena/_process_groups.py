"""A channel among the ranks of a torch.distributed group: one call gives each of them its end.

The group carries who shares the sender's memory, the handle, and who could attach, nothing else. Its collective calls
block, and cannot be interrupted: each runs in a daemon thread of its own, so that a rank whose others never come can be
cancelled, and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from aioarena._asyncio import wake
from aioarena._platform import accelerator, memory
from aioarena._platform.memory import Segment, SegmentRef
from aioarena._platform.network import endpoint_of
from aioarena._types import Handle
from aioarena.exceptions import ArenaError, GroupError, text_of
from aioarena.receiver import Receiver
from aioarena.sender import Sender

T = TypeVar("T")

# Seconds that a reader has to attach. The sender is there by then and admits within milliseconds, so that one who takes
# longer cannot reach it, as from a container with another TMPDIR. A guess, far above what a loaded machine takes.
ATTACH_SECONDS = 60.0


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
        try:
            ref, nonce = question
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
        mine = probe.question if probe is not None else _Failure(place.rank, _words(error))
    try:
        question = _broadcast(place, mine)
    except _Unreadable:
        question = None  # the others wait for an answer all the same, and the handle will say what is wrong
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
    try:
        return pickle.loads(shared[0])
    except Exception as problem:
        raise _Unreadable(problem) from None


class _Unreadable(Exception):
    """What another rank sent cannot be read here; of another build of the library, most likely."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem


def _cannot_send(failure: _Failure) -> GroupError:
    return GroupError(f"rank {failure.rank}, which was to send, could not make the channel: {failure.what}")


def share_handle(place: Place, handle: Handle | None, error: BaseException | None) -> Handle | Exception:
    """Collective: the sender's handle at every rank, or what is wrong with it here. If there is none, all raise."""
    mine: Any = None
    if place.rank == place.src:
        mine = handle if error is None else _Failure(place.rank, _words(error))
    try:
        received = _broadcast(place, mine)
    except _Unreadable as unreadable:
        return unreadable.problem  # the others have to be told
    if isinstance(received, _Failure):
        raise _cannot_send(received) from error
    assert isinstance(received, Handle)
    return received


def agree(place: Place, error: BaseException | None) -> None:
    """Collective: return once every rank has its end, or raise at all of them if one has not."""
    # Strings, which every build of the library can read.
    outcomes: list[Any] = [None] * place.size
    dist.all_gather_object(outcomes, None if error is None else _words(error), group=place.group)
    failures = {rank: what for rank, what in enumerate(outcomes) if what is not None}
    if failures:
        ranks = ", ".join(map(str, failures))
        what = next(iter(failures.values()))
        raise GroupError(f"the group has no channel, since rank {ranks} could not attach: {what}") from error


def _words(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def _global_rank(place: Place) -> int:
    return place.src if place.group is None else dist.get_global_rank(place.group, place.src)


# Threads ------------------------------------------------------------------------------------------------------------


def in_thread(function: Callable[..., T], *args: Any) -> Future[Future[T]]:
    """Run a function in a daemon thread: a future of what became of it, which never fails itself."""
    ended: Future[Future[T]] = Future()
    # The groups of a GPU's library work on the device that is current, which belongs to the thread.
    take_device = accelerator.device_of_thread()

    def run() -> None:
        outcome: Future[T] = Future()
        try:
            take_device()
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)
        ended.set_result(outcome)

    threading.Thread(target=run, name="aioarena-group", daemon=True).start()
    return ended


async def wait_on_loop(future: Future[T]) -> T:
    """Wait for a future that never fails. Cancelling leaves it alone, and so does the end of the loop."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def tell() -> None:
        wake(over)

    def tell_loop(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(tell)

    future.add_done_callback(tell_loop)
    await over
    return future.result()


async def wait_in_thread(future: Future[T]) -> T:
    """The same where no loop runs: holds the calling thread up, until a signal handler raises."""
    return future.result()


class _Turn:
    """A call's place among those of this process on one group: collective calls need the same order at all ranks.

    A call that was cancelled is over when its collective calls are, which nothing can end.

    Attributes:
        before: Done when the call before this one is over; None if there is none.
        begun: How many collective calls were begun, of three.
        told: Whether all ranks know how it ended.
    """

    def __init__(self, group: Any) -> None:
        group = dist.group.WORLD if group is None else group
        self._group = id(group)
        self.before = _last[self._group][1] if self._group in _last else None
        self.begun = 0
        self.told = False
        self._busy: Future[Any] | None = self.before
        self._over: Future[None] = Future()
        _last[self._group] = group, self._over

    def begin(self, work: Future[Future[T]]) -> Future[Future[T]]:
        """A collective call was begun."""
        self.begun += 1
        self._busy = work
        return work

    def give_up(self, place: Place, error: BaseException) -> None:
        """This rank ends with an error of its own: make the collective calls that the others wait for, to tell them."""
        if not self.told and self.begun < 3:
            self._busy = in_thread(_tell, place, error, self.begun, self._busy)

    def end(self) -> None:
        """The call is over, as soon as what it waited for last is."""
        if self._busy is None:
            self._pass_on()
        else:
            self._busy.add_done_callback(self._pass_on)

    def _pass_on(self, _: object = None) -> None:
        if _last[self._group][1] is self._over:
            del _last[self._group]
        self._over.set_result(None)


def _tell(place: Place, error: BaseException, begun: int, busy: Future[Any] | None) -> None:
    before = busy.result() if busy is not None else None
    if before is not None and before.exception() is not None:
        return  # all know that there is no sender
    # Each raises if this is the sender, and all know then.
    if begun < 1:
        find_neighbours(place, None, error)
    if begun < 2:
        share_handle(place, None, error)
    agree(place, error)


# By group: itself, which keeps its id from becoming another one's, and a future that is done when its last call is over.
_last: dict[int, tuple[Any, Future[None]]] = {}


async def connect(
    group: Any,
    src: int,
    sender: Any,
    make_sender: Callable[[int, dict[str, Any]], Any],
    make_receiver: Callable[[Handle, int], Any],
    start: Callable[[Any], Awaitable[None]],
    close: Callable[[Any], Awaitable[None]],
    wait: Callable[[Future[Any]], Awaitable[Any]],
) -> Any:
    """Give every rank its end, started: at all ranks, or at none.

    Args:
        group: The group.
        src: Rank of the sender in it.
        sender: Options of the sender.
        make_sender: Makes the sender for a number of local readers, with its options.
        make_receiver: Makes the receiver for a handle and a rank.
        start: Starts an end, within :data:`ATTACH_SECONDS`.
        close: Closes it again.
        wait: :func:`wait_on_loop` or :func:`wait_in_thread`.
    """
    place = Place.of(group, src)
    turn = _Turn(group)
    end: Any = None
    error: BaseException | None = None

    async def together(collective: Callable[..., T], *args: Any) -> T:
        outcome: Future[T] = await wait(turn.begin(in_thread(collective, place, *args)))
        turn.told = turn.begun == 3 or outcome.exception() is not None
        try:
            return outcome.result()
        except ArenaError:
            raise
        except Exception as problem:
            raise GroupError(
                f"the group has no channel, since a collective call of it failed at rank {place.rank}: {_words(problem)}"
                + (f". Before that, this rank had failed: {_words(error)}" if error is not None else "")
            ) from problem

    try:
        if turn.before is not None:
            await wait(turn.before)
        options: dict[str, Any] = dict(sender or {})
        neighbours = await _look_around(place, options.get("backing", "memfd"), together)
        if place.rank == src:
            try:
                end = make_sender(len(neighbours.local), {**options, **remote_options(neighbours, options)})
                await start(end)
            except Exception as problem:
                error = problem
        handle = await together(share_handle, end.handle if error is None and end is not None else None, error)
        try:
            if place.rank != src:
                if isinstance(handle, Exception):
                    raise handle
                end = make_receiver(handle, neighbours.reader(place.rank))
                await start(end)
        except Exception as problem:
            # Kept until all know: whoever raised now would leave the others waiting for it.
            error = problem
        await together(agree, error)
    except BaseException as problem:
        turn.give_up(place, problem)
        if end is not None:
            await close(end)
        raise
    finally:
        turn.end()
    return end


async def _look_around(place: Place, backing: str, together: Callable[..., Awaitable[Neighbours]]) -> Neighbours:
    probe: Probe | None = None
    error: Exception | None = None
    if place.rank == place.src:
        try:
            probe = Probe(backing)
        except Exception as problem:
            error = problem
    try:
        return await together(find_neighbours, probe, error)
    finally:
        if probe is not None:
            probe.close()


async def _start(end: Sender | Receiver) -> None:
    try:
        async with asyncio.timeout(ATTACH_SECONDS):
            await end.start()
    except TimeoutError as error:
        notes = getattr(error.__cause__, "__notes__", [])
        raise TimeoutError("; ".join([f"not attached after {ATTACH_SECONDS:g} s", *notes])) from None


async def from_process_group(
    group: Any = None,
    src: int = 0,
    *,
    sender: dict[str, Any] | None = None,
    receiver: dict[str, Any] | None = None,
) -> Sender | Receiver:
    """Give every rank of a process group its end of a channel, started: a Sender at ``src``, a Receiver at all others.

    Collective: all ranks of the group have to call it, with the same ``src``. Either all of them get an end or all raise.
    The group is only used here, and need not outlive the call. Cancelled at one rank, it raises at the others when they
    make the call; those that have their ends by then find that one gone. Several calls at a time on one group take place
    one after the other, in the order in which they were made, which has to be the same at all ranks.

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
        GroupError: A rank could not make the channel or attach to it, or died; the message says which, and why.
        ValueError: ``src`` is no rank of the group, or the group is too small, or this process is not in it.
        RuntimeError: ``torch.distributed`` is not initialized.
    """
    end: Sender | Receiver = await connect(
        group,
        src,
        sender,
        lambda readers, options: Sender(readers, **options),
        lambda handle, rank: Receiver(handle, rank, **(receiver or {})),
        _start,
        lambda end: end.aclose(),
        wait_on_loop,
    )
    return end
