"""Shared by all tests: both event loops, a channel in one process, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
import zmq

from aioarena import ArenaConfig, Receiver, Sender
from aioarena._core.sender import SenderCore

# Torch's threads spin for work, and the tests' tensors are small: on two cores they would only be in the way.
torch.set_num_threads(1)

# A shell that puts us in the background without job control has us ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LOOPS: dict[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}

# Bounds what would otherwise hang; nothing waits this long. Stretch it on a slow machine.
PATIENCE = 20.0 * float(os.environ.get("AIOARENA_TEST_PATIENCE", "1"))
LONGEST_TEST = 4 * PATIENCE

# Large enough that copies leave the loop (more than 512 KiB a buffer), small enough to fill.
ARENA = ArenaConfig(slots=4, slot_bytes=1 << 20, min_bytes=16 << 10)
RING_BYTES = 64 << 10


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Every async test runs on both loops."""
    return LOOPS


@pytest.fixture(params=list(LOOPS))
def new_loop(request: pytest.FixtureRequest) -> LoopFactory:
    """For tests that run loops of their own."""
    return LOOPS[request.param]


# A channel in one process ---------------------------------------------------------------------------------------


@dataclass
class Channel:
    """A sender and its receivers on the running loop."""

    sender: Sender
    receivers: list[Receiver] = field(default_factory=list)

    @property
    def receiver(self) -> Receiver:
        return self.receivers[0]

    @property
    def slots_used(self) -> int:
        """Slots that the sender could not use for the next message."""
        return self.sender.statistics().slots_used

    @property
    def claimed_spans(self) -> int:
        """Spans of sends under way."""
        return self.sender._core.arena.claimed_spans


OpenChannel = Callable[..., contextlib.AbstractAsyncContextManager[Channel]]


@pytest.fixture
def open_channel() -> OpenChannel:
    """``async with open_channel(readers) as channel``; see :func:`_open_channel`."""
    return _open_channel


@contextlib.asynccontextmanager
async def _open_channel(
    readers: int = 1, *, receiver: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Channel]:
    """A started sender with all its receivers, closed in the end: receivers first.

    Args:
        readers: How many.
        receiver: Options of the receivers.
        options: Options of the sender; by default a small arena and the smallest ring.
    """
    async with contextlib.AsyncExitStack() as stack:
        sender = Sender(readers, **{"arena": ARENA, "ring_bytes": RING_BYTES, **options})
        channel = Channel(await stack.enter_async_context(sender))
        for rank in range(readers):
            end = Receiver(sender.handle, rank, **(receiver or {}))
            channel.receivers.append(await stack.enter_async_context(end))
        yield channel


# Nothing is left behind -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _settled_process() -> None:
    """Everything that other libraries create once per process, and keep."""
    # pyzmq's GarbageCollectorThread, with its context and sockets: created by the first zero-copy send.
    context = zmq.Context()
    with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.bind("inproc://warm")
        pull.connect("inproc://warm")
        push.send(bytearray(1 << 20), copy=False)
        pull.recv()
    context.term()
    # libuv's pipe for signals.
    loop = uvloop.new_event_loop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    # What is there by now stays, so the collections of every test need not look at it: 0.2 s with torch loaded.
    gc.collect()
    gc.freeze()


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def _own_files() -> set[str]:
    """Our files in shared directories whose names say that this process made them."""
    directories = [Path(tempfile.gettempdir()) / f"aioarena-{os.getuid()}", Path("/dev/shm")]
    mine = f"-{os.getpid()}-"
    return {
        str(path)
        for directory in directories
        if directory.is_dir()
        for path in directory.iterdir()
        if path.name.startswith("aioarena-") and mine in path.name
    }


def _own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("aioarena")}


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Remember which tests failed, for :func:`no_leaks`."""
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _settled_process: None) -> Iterator[None]:
    """Fail the test if it leaves anything: descriptors, threads, files, tasks, claimed spans, errors the loop logged."""
    cores: list[SenderCore] = []
    make_core = SenderCore.__init__

    def remember_core(self: SenderCore, *args: Any, **kwargs: Any) -> None:
        make_core(self, *args, **kwargs)
        cores.append(self)

    monkeypatch.setattr(SenderCore, "__init__", remember_core)
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_clean_loop")  # with its loop, whose descriptors outlive this fixture
    gc.collect()
    before = _descriptors(), _own_files(), _own_threads()
    yield
    if request.node.stash.get(_failed, False):
        return  # its traceback holds whatever it was using
    claimed = [core.arena.claimed_spans for core in cores]
    cores.clear()
    assert not any(claimed), f"spans that are claimed and belong to no send: {claimed}"
    # Closed ends refer to themselves, so their mappings (each with a descriptor) go with a collection.
    gc.collect()
    after = _descriptors(), _own_files(), _own_threads()
    for what, old, new in zip(("descriptors", "files", "threads"), before, after, strict=True):
        left = sorted(new - old)
        assert not left, f"the test left {what}"


@pytest.fixture
async def _clean_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """No task is left on the loop, and it had nothing to complain about."""
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    known = asyncio.all_tasks()

    def give_up() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel(f"the test takes longer than {LONGEST_TEST} s")

    # uvloop swallows what pytest-timeout raises from its signal.
    deadline = loop.call_later(LONGEST_TEST, give_up)
    yield
    deadline.cancel()
    if request.node.stash.get(_failed, False):
        return
    gc.collect()  # tasks and futures complain of errors that nobody asked for when they are collected
    await asyncio.sleep(0)  # uvloop hands the last complaints over in the next turn
    left = asyncio.all_tasks() - known - {asyncio.current_task()}
    assert not left, f"the test left tasks: {left}"
    assert not complaints, f"errors that the event loop merely logged: {complaints}"
