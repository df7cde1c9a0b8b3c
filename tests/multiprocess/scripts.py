"""What workers do: functions that :class:`~tests.multiprocess.harness.Worker` runs by name.

Each takes the link first. :func:`reader` and :func:`sender` hold one end of a channel and do what they are told, one
command after the other; the rest are scenes of one act.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import gc
import itertools
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import aioarena
from aioarena import cli
from aioarena._core.layout import VERSION
from aioarena._platform import wire as wire_module
from aioarena._platform.process import ProcessIdentity
from aioarena._platform.wire import ReceiverWire
from tests.multiprocess.blocking_ends import (  # noqa: F401 - run by name
    blocking_reader,
    blocking_sender,
    forking_blocking_reader,
    leave_blocking_ends_open,
)
from tests.multiprocess.forking import (  # noqa: F401 - run by name
    fork_before_the_start,
    fork_while_a_thread_attaches,
    forking_reader,
    forking_sender,
)
from tests.multiprocess.harness import Link, channel_maps, descriptors, open_loop, run_coroutine
from tests.multiprocess.messages import message, verify
from tests.multiprocess.namespaces import as_nobody, may_unshare, with_own_pids, with_own_shm  # noqa: F401 - run by name


def describe(error: BaseException) -> dict[str, Any]:
    """An exception, for the pipe."""
    known = ("rank", "pid", "signal", "received", "expected", "found", "needed", "available")
    attributes = {name: getattr(error, name) for name in known if hasattr(error, name)}
    cause = error.__cause__
    return {
        "type": type(error).__name__,
        "text": str(error),
        "cause": describe(cause) if cause is not None else None,
        "notes": getattr(error, "__notes__", []),
        **attributes,
    }


def resources() -> dict[str, Any]:
    """What this process has open, once nothing is left to collect."""
    gc.collect()
    return {"descriptors": descriptors(), "maps": channel_maps()}


# A reader ----------------------------------------------------------------------------------------------------------------


async def reader(
    link: Link, handle: aioarena.Handle, rank: int, *, announce: bool = False, silent: bool = False, **options: Any
) -> Any:
    """Attach, say "joined", then obey. Returns what made it end.

    Args:
        link: To the test.
        handle: The channel's.
        rank: Where to attach.
        announce: Whether to say "asked" once it has asked to be admitted.
        silent: Whether its wake-ups are lost.
        options: Of the Receiver.
    """
    Gate.link = link
    try:
        with _saying_when_it_asks(link) if announce else contextlib.nullcontext():
            chan = aioarena.Receiver(handle, rank, **options)
            await chan.start()
        async with contextlib.aclosing(chan):
            link.put("joined")
            if silent:
                chan._wire.wake = lambda: None  # type: ignore[union-attr, method-assign]
            return await _read_as_told(link, chan)
    except aioarena.ArenaError as error:
        return describe(error)


@contextlib.contextmanager
def _saying_when_it_asks(link: Link) -> Iterator[None]:
    join = ReceiverWire.join

    def join_and_say(wire: ReceiverWire, *said: Any) -> None:
        join(wire, *said)
        link.put("asked")

    ReceiverWire.join = join_and_say  # type: ignore[method-assign]
    try:
        yield
    finally:
        ReceiverWire.join = join  # type: ignore[method-assign]


async def _read_as_told(link: Link, chan: aioarena.Receiver) -> Any:
    held: list[Any] = []
    while True:
        match await link.aget():
            case ("recv", count):  # numbers of the next messages
                link.put([verify(await chan.recv()) for _ in range(count)])
            case "drain":  # everything until an error: numbers, the error, seconds since the last message
                numbers: list[int] = []
                last = time.monotonic()
                while True:
                    try:
                        numbers.append(verify(await chan.recv()))
                        last = time.monotonic()
                    except aioarena.ArenaError as error:
                        link.put(numbers, describe(error), time.monotonic() - last)
                        break
            case ("hold", count):  # the same as recv, keeping the messages
                held += [await chan.recv() for _ in range(count)]
                link.put([verify(one) for one in held])
            case "verify":  # numbers of what is held, unchanged
                link.put([verify(one) for one in held])
            case "drop":
                held.clear()
                link.put("dropped")
            case "count":  # whatever comes, until the end: how many
                Gate.closed = False
                count = 0
                async for received in chan:
                    count += 1
                    if isinstance(received, dict):
                        verify(received)
                    del received  # or its slots are held while the next message is awaited
                link.put(count)
            case "close, and say so":
                chan._wire.leave()  # type: ignore[union-attr]
                link.put("leaving")
                link.get()
            case "nowait":
                try:
                    link.put(verify(chan.recv_nowait()))
                except aioarena.WouldBlock:
                    link.put("nothing")
            case "statistics":
                link.put(chan.statistics())
            case "block":  # the loop stands still until the next thing is said
                link.put("blocked")
                link.get()
                link.put("going on")
            case "fork a sleeper":
                link.put(_fork_a_sleeper(link))
            case "take frames in":  # without running the loop, until the first frame message is here whole
                while chan._wire.frames(1) is None:  # type: ignore[union-attr]
                    chan._wire.drain()  # type: ignore[union-attr]
                    time.sleep(0.001)
                link.put("framed")
                link.get()
                link.put("going on")
            case ("wake", count):  # the sender, who has no reason
                for _ in range(count):
                    chan._wake_sender()
                    await asyncio.sleep(0)
                link.put("woke")
            case "close":
                return "closed"
            case other:
                raise ValueError(other)


def _fork_a_sleeper(link: Link) -> int:
    """A child that inherits everything and lives on: its pid."""
    pid = os.fork()
    if pid == 0:
        link.connection.close()
        signal.pause()
        os._exit(0)
    return pid


class Gate:
    """An object whose unpickling says so in a worker, and goes on only when told."""

    link: Link
    closed = True

    def __getstate__(self) -> dict[str, Any]:
        return {"gate": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if Gate.closed:
            Gate.link.put("unpickling")
            Gate.link.get()


# A sender ----------------------------------------------------------------------------------------------------------------


async def sender(link: Link, readers: int, *, start: bool = True, **options: Any) -> Any:
    """Make a channel, say its handle, then obey."""
    chan = aioarena.Sender(readers, **options)
    link.put(chan.handle)
    if not start:
        link.get()
    async with chan:
        return await _send_as_told(link, chan)


async def _send_as_told(link: Link, chan: aioarena.Sender) -> Any:
    tasks: list[asyncio.Task[None]] = []
    while True:
        match await link.aget():
            case "ready":
                await chan.wait_ready()
                link.put("ready")
            case ("send", messages):
                for kind, number in messages:
                    await chan.send(message(kind, number))
                link.put("sent")
            case ("send and die", messages):
                for kind, number in messages:
                    await chan.send(message(kind, number))
                os.kill(os.getpid(), signal.SIGKILL)
            case ("send object", obj):
                await chan.send(obj)
                link.put("sent")
            case ("send forever", kinds):  # says so once the first is out
                for number in itertools.count():
                    await chan.send(message(kinds[number % len(kinds)], number))
                    if number == 0:
                        link.put("sending")
            case ("send until waiting", kind):  # for room
                tasks.append(asyncio.create_task(_send_forever(chan, kind)))
                while chan.statistics().waits == 0:
                    await asyncio.sleep(0.001)
                link.put("waiting")
            case ("send in rhythm", gap):  # until the next thing is said; how many there were
                link.put("sending")
                until = asyncio.create_task(link.aget())
                for number in itertools.count():
                    await chan.send(message("small", number))
                    await asyncio.sleep(gap)
                    if until.done():
                        link.put(number + 1)
                        break
            case ("send and stick", kind, number):  # a copy that never ends, in the middle
                stuck = _stick_in_the_middle_of_a_copy(chan)
                tasks.append(asyncio.create_task(chan.send(message(kind, number))))
                await asyncio.to_thread(stuck.wait)
                link.put("stuck")
            case "fork a sleeper":
                link.put(_fork_a_sleeper(link))
            case "statistics":
                link.put(chan.statistics())
            case "close":
                return "closed"
            case other:
                raise ValueError(other)


async def _send_forever(chan: aioarena.Sender, kind: str) -> None:
    for number in itertools.count():
        await chan.send(message(kind, number))


def _stick_in_the_middle_of_a_copy(chan: aioarena.Sender) -> Any:
    """Patch this process so that its next large copy stops after the first of its pieces; set once it did."""
    import threading

    from aioarena import _codec, _copying, _filling

    # Pieces of 64 KiB, so that a message of some 100 KB has more than one.
    _copying.STEP_BYTES = 64 << 10
    _filling.ON_LOOP_BYTES = 0
    _copying.ON_LOOP_BYTES = 0
    stuck = threading.Event()
    copy = _codec._memmove
    done = 0

    def copy_one_piece(*args: Any) -> Any:
        nonlocal done
        if done:
            stuck.set()
            threading.Event().wait()
        done += 1
        return copy(*args)

    _codec._memmove = copy_one_piece
    return stuck


# Scenes ------------------------------------------------------------------------------------------------------------------


async def echo(link: Link, handle: aioarena.Handle, **options: Any) -> int:
    """Send everything that comes over one channel back over another, whose handle is said. How many there were."""
    count = 0
    async with aioarena.Sender(1, **options) as back:
        link.put(back.handle)
        async with aioarena.Receiver(handle, 0) as chan:
            async for received in chan:
                await back.send(received)
                count += 1
    return count


async def first_message(link: Link, handle: aioarena.Handle, rank: int) -> int:
    """Attach, receive one message, leave: its number."""
    async with aioarena.Receiver(handle, rank) as chan:
        return verify(await chan.recv())


async def give_up_starting(link: Link, handle: aioarena.Handle) -> Any:
    """Start a reader of a sender that is not there yet, and give up: resources before and after, notes on the error."""
    before = resources()
    # In a task of its own: asyncio keeps the last cancellation, and so its traceback, as long as the task lives.
    notes = await asyncio.create_task(_give_up_starting(handle))
    return before, resources(), notes


async def _give_up_starting(handle: aioarena.Handle) -> list[str]:
    try:
        async with asyncio.timeout(0.1):
            await aioarena.Receiver(handle, 0).start()
    except TimeoutError as error:
        return describe(error)["cause"]["notes"]
    raise AssertionError("it started")


async def ask_for_rank(link: Link, handle: aioarena.Handle, rank: int, version: int | None = None) -> str:
    """Ask the sender for a seat as a reader would that does not check anything itself: the refusal."""
    wire = ReceiverWire(handle.address, handle.nonce, rank, incarnation=12345)
    try:
        wire_module.VERSION = VERSION if version is None else version
        wire.join(ProcessIdentity.current())
        wire_module.VERSION = VERSION
        while wire.refusal is None:
            wire.drain()
            await asyncio.sleep(0.005)
        return wire.refusal
    finally:
        wire.close()


async def forget_a_sender(link: Link, **options: Any) -> str:
    """Send one message, then lose the Sender on a loop that ends, while the process lives on: the warning it gave."""

    async def send() -> None:
        chan = aioarena.Sender(1, **options)
        await chan.start()
        link.put(chan.handle)
        await chan.send(message("small", 0))
        await asyncio.to_thread(link.get)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await asyncio.to_thread(asyncio.run, send())
        gc.collect()
    return str([str(warning.message) for warning in caught])


# Lifetime ----------------------------------------------------------------------------------------------------------------

# What may be kept of a received tensor, each without its first element and with the first as a sum of its own.
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda tensor: tensor[1:],
    "array": lambda tensor: tensor.numpy()[1:],
    "memoryview": lambda tensor: memoryview(tensor.numpy())[1:],
    "parameter": lambda tensor: torch.nn.Parameter(tensor.view(torch.int64)[1:].detach(), requires_grad=False),
}


def outlive(link: Link, handle: aioarena.Handle, way: str, form: str, loop_kind: str) -> int:
    """Keep a form of a received tensor while what it came through goes: what was mapped, open and the sum of it."""
    run_coroutine(asyncio.sleep(0), loop_kind)  # uvloop keeps a pipe of its first loop
    torch.arange(3).sum()
    before = resources()
    kept = run_coroutine(_receive_and_keep(link, handle, way, form), loop_kind)
    gc.collect()
    total = int(np.asarray(kept.detach() if isinstance(kept, torch.Tensor) else kept).sum())
    maps = channel_maps()
    del kept
    link.put(total, maps, resources(), before)
    link.get()
    return total


async def _receive_and_keep(link: Link, handle: aioarena.Handle, way: str, form: str) -> Any:
    chan = aioarena.Receiver(handle, 0)
    await chan.start()
    link.put("joined")
    kept = FORMS[form](await chan.recv())
    link.put("received")
    link.get()
    match way:
        case "closed":
            await chan.aclose()
        case "never closed":
            del chan
            gc.collect()
        case "returned":
            async with contextlib.aclosing(chan):
                return kept
        case "sender closed" | "sender killed" | "sender gone":
            with contextlib.suppress(aioarena.EndOfChannel, aioarena.SenderLostError):
                await chan.recv()
            await chan.aclose()
        case other:
            raise ValueError(other)
    return kept


async def follow(link: Link, files: int) -> str:
    """Read one channel after the other, with no more than so many open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    while (handle := await link.aget()) is not None:
        async with aioarena.Receiver(handle, 0) as chan:
            link.put("joined")
            await link.aget()
            total = 0
            for _ in range(3):
                total += sum(int(tensor.sum()) for tensor in await chan.recv())
            link.put(total)
            try:
                await chan.recv()
            except aioarena.ArenaError as error:
                link.put(type(error).__name__)
        del handle, chan
        await asyncio.sleep(0)  # what it had handed to the loop to be called
        link.put(resources())
    return "done"


async def send_generations(link: Link, count: int, **options: Any) -> str:
    """Send over one channel after the other."""
    for _ in range(count):
        async with aioarena.Sender(1, on_reader_lost="continue", **options) as chan:
            link.put(chan.handle)
            for number, kind in enumerate(["arena", "frame", "mixed"]):
                await chan.send(message(kind, number))
            await link.aget()
        del chan
        await asyncio.sleep(0)  # what it had handed to the loop to be called
        link.put(resources())
    return "done"


async def keep_many(link: Link, handle: aioarena.Handle, files: int) -> Any:
    """Keep a message of many tensors: descriptors before, while and after it is kept, and the sum of all."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    async with aioarena.Receiver(handle, 0) as chan:
        link.put("joined")
        before = descriptors()
        kept = await chan.recv()
        during = descriptors()
        total = sum(int(tensor.sum()) for tensor in kept)
        del kept
        return before, during, total, descriptors()


# The end of a program ----------------------------------------------------------------------------------------------------

_kept: list[Any] = []


class _Cycle:
    def __init__(self, contents: Any) -> None:
        self.itself = self
        self.contents = contents


def _leak(contents: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(contents))


# Where a program may still refer to things when it ends; they are taken down at different times, or never.
PLACES: dict[str, Callable[[Any], object]] = {
    "nowhere": lambda contents: None,
    "module": _kept.append,
    "builtins": lambda contents: setattr(builtins, "kept_by_a_test", contents),
    "cycle": lambda contents: _kept.append(_Cycle(contents)),
    "thread": lambda contents: setattr(threading.local(), "kept", contents),
    "sys": lambda contents: setattr(sys, "kept_by_a_test", contents),
    "leaked": _leak,
}


def leave_a_reader_open(link: Link, handle: aioarena.Handle, place: str, loop_kind: str) -> list[int]:
    """Receive, and leave receiver, messages and loop as they are."""
    loop = open_loop(loop_kind)
    chan = aioarena.Receiver(handle, 0)
    loop.run_until_complete(chan.start())
    link.put("joined")
    received = [loop.run_until_complete(chan.recv()) for _ in range(7)]
    PLACES[place]([loop, chan, received])
    return [verify(one) for one in received]


def leave_a_sender_open(link: Link, place: str, loop_kind: str, **options: Any) -> str:
    """Send, with frames that have not left, and leave sender and loop as they are."""
    loop = open_loop(loop_kind)
    chan = aioarena.Sender(1, **options)
    loop.run_until_complete(chan.start())
    link.put(chan.handle)
    loop.run_until_complete(chan.wait_ready())
    link.get()
    for kind, number in [("small", 0), ("arena", 1), ("frame", 2)]:
        loop.run_until_complete(chan.send(message(kind, number)))
    PLACES[place]([loop, chan])
    return "sent"


def end_with_frames_queued(link: Link, thread: str, **options: Any) -> str:
    """Send frames to a reader that is stopped, and end with them still queued; the loop in this or a daemon thread."""
    ready = threading.Event()

    async def send() -> None:
        chan = aioarena.Sender(1, **options)
        await chan.start()
        link.put(chan.handle)
        await chan.wait_ready()
        frames = [message("frame", number) for number in range(200)]  # before, so that sending outruns the socket
        await asyncio.to_thread(link.get)
        for frame in frames:
            await chan.send(frame)
        _kept.append(chan)
        ready.set()
        if thread == "daemon":
            await asyncio.Event().wait()

    if thread == "daemon":
        threading.Thread(target=asyncio.run, args=(send(),), daemon=True).start()
        assert ready.wait()
    else:
        asyncio.run(send())
    return "sent"


def make_and_forget(link: Link, backing: Any) -> str:
    """Make both ends, start neither."""
    sender = aioarena.Sender(1, backing=backing, arena=None)
    _kept.extend([sender, aioarena.Receiver(sender.handle, 0), aioarena.Sender(1, arena=None)])
    return "made"


def command(link: Link, *arguments: str) -> int:
    """A command of the command line: its exit code."""
    return cli.main(arguments)


def identity(link: Link) -> ProcessIdentity:
    """Who this process is."""
    return ProcessIdentity.current()


async def start_and_close_many(link: Link, count: int) -> int:
    """Open channels in /dev/shm, send over each to a reader of this process, and close them: how many worked."""
    received = 0
    for number in range(count):
        sender = aioarena.Sender(1, backing="shm", arena=None, ring_bytes=1 << 16)
        async with sender as chan, aioarena.Receiver(sender.handle, 0) as reader:
            await chan.send(number)
            received += await reader.recv() == number
    return received
