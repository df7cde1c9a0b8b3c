"""A channel among the ranks of a torch.distributed group: real processes, gloo."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aioarena
from aioarena import (
    GroupError,
    HandleError,
    Receiver,
    Sender,
    WrongContextError,
    _process_groups,
    blocking,
    from_process_group,
)
from aioarena import receiver as receiver_module
from tests.conftest import PATIENCE

pytestmark = pytest.mark.multiprocess

WORLD = 4
DIES = "dies"
SMALL: dict[str, Any] = {"arena": aioarena.ArenaConfig(slots=16, min_bytes=1000)}


# What each rank does ----------------------------------------------------------------------------------------------------


async def exchange(end: Sender | Receiver) -> Any:
    """The sender sends a step and a tensor; what a reader got of them."""
    async with asyncio.timeout(PATIENCE):
        if isinstance(end, Sender):
            await end.send("step")
            await end.send(torch.arange(5000))
            await end.aclose()
            return "sent"
        got = [message async for message in end]
        rank = end.rank
        await end.aclose()
        return rank, got[0], int(got[1].sum())


def exchange_blocking(end: blocking.Sender | blocking.Receiver) -> Any:
    if isinstance(end, blocking.Sender):
        end.send("step", PATIENCE)
        end.send(torch.arange(5000), PATIENCE)
        end.close()
        return "sent"
    got = list(end)
    rank = end.rank
    end.close()
    return rank, got[0], int(got[1].sum())


def default_group(rank: int) -> Any:
    async def main() -> Any:
        return await exchange(await from_process_group(sender=SMALL))

    return asyncio.run(main())


def another_source(rank: int) -> Any:
    async def main() -> Any:
        return await exchange(await from_process_group(None, 2, sender=SMALL, receiver={"private": True}))

    return asyncio.run(main())


def subgroup(rank: int) -> Any:
    """Ranks of the group are not those of the world."""
    group = dist.new_group([1, 3])  # collective for all

    async def main() -> Any:
        return await exchange(await from_process_group(group, 1, sender=SMALL))

    return asyncio.run(main()) if rank in (1, 3) else None


def blocking_ends(rank: int) -> Any:
    return exchange_blocking(blocking.from_process_group(sender={"arena": None}))


def mixed_ends(rank: int) -> Any:
    if rank % 2:
        return exchange_blocking(blocking.from_process_group(src=1))

    async def main() -> Any:
        return await exchange(await from_process_group(src=1))

    return asyncio.run(main())


def said(what: str) -> None:
    """Let the other ranks go on that :func:`wait_for` this."""
    dist.distributed_c10d._get_default_store().set(what, b"1")


def wait_for(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([what])


def says(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def one_cannot_attach(rank: int) -> Any:
    """As on another host: what the handle names is not there."""
    if rank == 2:

        async def start(self: Receiver) -> None:
            raise HandleError("the memory of the channel is not to be found from here")

        original, Receiver.start = Receiver.start, start  # type: ignore[method-assign]
    try:
        return asyncio.run(from_process_group(sender=SMALL))
    except GroupError as error:
        return says(error)
    finally:
        if rank == 2:
            Receiver.start = original  # type: ignore[method-assign]


def source_cannot_send(rank: int) -> Any:
    try:
        return blocking.from_process_group(sender={"ring_bytes": 1})
    except GroupError as error:
        return says(error)


def another_version(rank: int) -> Any:
    """A rank with another build of the library cannot even read the handle."""
    if rank == 3:
        import aioarena._types as types

        types.VERSION, version = 1, types.VERSION
    try:
        return asyncio.run(from_process_group(sender=SMALL))
    except GroupError as error:
        return says(error)
    finally:
        if rank == 3:
            types.VERSION = version


def another_build(rank: int) -> Any:
    """Whatever goes wrong with the handle at one rank."""
    if rank == 3:
        import aioarena._types as types

        def load(*_: object) -> Any:
            raise AttributeError("no such attribute")

        load.__qualname__, load.__module__ = "_load_handle", types.__name__
        original, types._load_handle = types._load_handle, load
    try:
        return asyncio.run(from_process_group(sender=SMALL))
    except GroupError as error:
        return says(error)
    finally:
        if rank == 3:
            types._load_handle = original


def out_of_reach(rank: int) -> Any:
    """As with another TMPDIR: the sender is never reached. At one rank each with asyncio and without."""
    original, patience = receiver_module.ReceiverWire, _process_groups.ATTACH_SECONDS
    connect = from_process_group
    if rank in (1, 2):
        receiver_module.ReceiverWire = lambda address, *args: original(address + "x", *args)  # type: ignore[misc, assignment]
        _process_groups.ATTACH_SECONDS = 0.1
    try:
        if rank == 1:
            return blocking.from_process_group(sender=SMALL)
        return asyncio.run(connect(sender=SMALL))
    except GroupError as error:
        return says(error)
    finally:
        receiver_module.ReceiverWire = original  # type: ignore[misc]
        _process_groups.ATTACH_SECONDS = patience


def cancelled_before_the_others_come(rank: int) -> Any:
    """Cancelled at rank 1, in whose process nothing waits for the others then."""

    async def cancel() -> None:
        task = asyncio.create_task(from_process_group(sender=SMALL))
        while not _process_groups._last:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    if rank == 1:
        asyncio.run(cancel())
        said("cancelled")
        return None
    wait_for("cancelled")
    try:
        return asyncio.run(from_process_group(sender=SMALL))
    except GroupError as error:
        return says(error)


def cancelled_while_it_attaches(rank: int) -> Any:
    original = Receiver.start

    async def cancel() -> None:
        attaching = asyncio.Event()

        async def start(self: Receiver) -> None:
            attaching.set()
            await asyncio.get_running_loop().create_future()

        Receiver.start = start  # type: ignore[method-assign]
        task = asyncio.create_task(from_process_group(sender=SMALL))
        await attaching.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    try:
        return asyncio.run(cancel() if rank == 2 else from_process_group(sender=SMALL))
    except GroupError as error:
        return says(error)
    finally:
        Receiver.start = original  # type: ignore[method-assign]


def interrupted(rank: int) -> Any:
    """Ctrl-C at the sender, which waits for the others."""
    if rank:
        wait_for("interrupted")
        try:
            return blocking.from_process_group()
        except GroupError as error:
            return says(error)

    original = _process_groups.wait_in_thread

    async def interrupted_wait(future: Any) -> Any:
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        return await original(future)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    _process_groups.wait_in_thread = interrupted_wait
    try:
        return blocking.from_process_group()
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        _process_groups.wait_in_thread = original
        signal.signal(signal.SIGINT, handler)
        said("interrupted")


def several_at_a_time(rank: int) -> Any:
    """One channel from each rank."""

    async def main() -> Any:
        ends = await asyncio.gather(*(from_process_group(src=src, sender=SMALL) for src in range(WORLD)))
        return await asyncio.gather(*map(exchange, ends))

    return asyncio.run(main())


def loop_of_the_thread(rank: int) -> Any:
    """A blocking call does not touch what the thread has set as its event loop."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        exchange_blocking(blocking.from_process_group(sender=SMALL))
        return asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def one_dies(rank: int) -> Any:
    if rank == 3:
        return DIES
    try:
        return asyncio.run(from_process_group(sender=SMALL))
    except GroupError as error:
        return says(error)


def no_such_source(rank: int) -> Any:
    try:
        return asyncio.run(from_process_group(src=WORLD))
    except ValueError as error:
        return says(error)


def not_in_the_group(rank: int) -> Any:
    group = dist.new_group([0, 1])
    if rank < 2:
        return None
    try:
        return asyncio.run(from_process_group(group))
    except ValueError as error:
        return says(error)


TASKS: list[Callable[[int], Any]] = [
    default_group,
    another_source,
    subgroup,
    blocking_ends,
    mixed_ends,
    one_cannot_attach,
    source_cannot_send,
    another_version,
    another_build,
    no_such_source,
    not_in_the_group,
    out_of_reach,
    cancelled_before_the_others_come,
    cancelled_while_it_attaches,
    interrupted,
    several_at_a_time,
    loop_of_the_thread,
    default_group,  # after all that, it still works
    one_dies,
]


def run_rank(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        for task in TASKS:
            outcome = task(rank)
            pipe.send(outcome)
            if outcome == DIES:
                os._exit(0)
    except BaseException:
        pipe.send(traceback.format_exc())
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[Any]]]:
    """For each task what it returned at each rank. All in one group of processes, since starting one takes seconds."""
    store = tmp_path_factory.mktemp("group") / "store"
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(WORLD):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=run_rank, args=(rank, str(store), theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        found = []
        for _ in TASKS:
            row = []
            for pipe in pipes:
                assert pipe.poll(4 * PATIENCE), f"a rank hangs after {found}"
                row.append(pipe.recv())
            found.append(row)
        yield found
    finally:
        for process in processes:
            process.join(PATIENCE)
            process.kill()
        for pipe in pipes:
            pipe.close()


SUM = sum(range(5000))


def of(outcomes: list[list[Any]], task: Callable[[int], Any], last: bool = False) -> list[Any]:
    indices = [index for index, each in enumerate(TASKS) if each is task]
    return outcomes[indices[-1 if last else 0]]


@pytest.mark.parametrize("last", [False, True])
def test_every_rank_has_its_end(outcomes: list[list[Any]], last: bool) -> None:
    assert of(outcomes, default_group, last) == ["sent", *((rank, "step", SUM) for rank in range(3))]


def test_readers_are_numbered_around_the_sender(outcomes: list[list[Any]]) -> None:
    assert of(outcomes, another_source) == [(0, "step", SUM), (1, "step", SUM), "sent", (2, "step", SUM)]


def test_a_subgroup(outcomes: list[list[Any]]) -> None:
    assert of(outcomes, subgroup) == [None, (0, "step", SUM), None, "sent"]


def test_blocking_ends(outcomes: list[list[Any]]) -> None:
    assert of(outcomes, blocking_ends) == ["sent", *((rank, "step", SUM) for rank in range(3))]
    assert of(outcomes, mixed_ends) == [(0, "step", SUM), "sent", (1, "step", SUM), (2, "step", SUM)]


def test_one_that_cannot_attach_is_told_to_all(outcomes: list[list[Any]]) -> None:
    for kind, text in of(outcomes, one_cannot_attach):
        assert kind == "GroupError"
        assert "rank 2 could not attach: HandleError: the memory of the channel is not to be found from here" in text


def test_a_source_that_cannot_send_is_told_to_all(outcomes: list[list[Any]]) -> None:
    for kind, text in of(outcomes, source_cannot_send):
        assert kind == "GroupError"
        assert "rank 0, which was to send" in text
        assert "ring_bytes must be at least" in text


def test_another_version_is_told_to_all(outcomes: list[list[Any]]) -> None:
    for kind, text in of(outcomes, another_version):
        assert kind == "GroupError"
        assert "rank 3 could not attach: HandleError: the handle has layout version" in text


def test_another_build_is_told_to_all(outcomes: list[list[Any]]) -> None:
    for kind, text in of(outcomes, another_build):
        assert kind == "GroupError"
        assert "rank 3 could not attach: AttributeError: no such attribute" in text


def test_a_rank_out_of_reach_is_told_to_all(outcomes: list[list[Any]]) -> None:
    for kind, text in of(outcomes, out_of_reach):
        assert kind == "GroupError"
        assert "rank 1, 2 could not attach: TimedOutError: reader 0 of channel" in text
        assert "timed out after 0.1 s: reader 0 of channel" in text
        assert "is waiting for the sender (pid" in text


def test_a_call_that_is_cancelled_is_told_to_the_others(outcomes: list[list[Any]]) -> None:
    for task, rank in ((cancelled_before_the_others_come, 1), (cancelled_while_it_attaches, 2)):
        row = of(outcomes, task)
        assert row.pop(rank) is None
        for kind, text in row:
            assert kind == "GroupError"
            assert f"rank {rank} could not attach: CancelledError" in text


def test_an_interrupt_ends_a_blocking_call(outcomes: list[list[Any]]) -> None:
    first, *others = of(outcomes, interrupted)
    assert first == "interrupted"
    for kind, text in others:
        assert kind == "GroupError"
        assert text == "rank 0, which was to send, could not make the channel: KeyboardInterrupt"


def test_several_calls_at_a_time(outcomes: list[list[Any]]) -> None:
    for rank, results in enumerate(of(outcomes, several_at_a_time)):
        assert results == ["sent" if src == rank else (rank - (rank > src), "step", SUM) for src in range(WORLD)]


def test_a_blocking_call_leaves_the_loop_of_its_thread(outcomes: list[list[Any]]) -> None:
    assert of(outcomes, loop_of_the_thread) == [True] * 4


def test_a_rank_that_dies_is_told_to_all(outcomes: list[list[Any]]) -> None:
    *others, _ = of(outcomes, one_dies)
    for rank, (kind, text) in enumerate(others):
        assert kind == "GroupError"
        assert f"a collective call of it failed at rank {rank}: " in text


def test_a_collective_call_has_the_device_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with device 0, and ranks that share one hang."""
    current = threading.local()
    current.device = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    assert _process_groups.in_thread(lambda: current.device).result(PATIENCE).result() == 3


def test_an_error_that_cannot_say_why_is_told_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert _process_groups._words(Mute()) == "Mute: (it fails to say why)"


async def test_the_blocking_call_is_refused_beside_a_loop() -> None:
    with pytest.raises(WrongContextError, match=r"await aioarena\.from_process_group"):
        blocking.from_process_group()


def test_wrong_arguments(outcomes: list[list[Any]]) -> None:
    assert of(outcomes, no_such_source) == [("ValueError", "src must be from 0 to 3, not 4: it is a rank of the group")] * 4
    assert of(outcomes, not_in_the_group)[2:] == [("ValueError", "this process is not in the group")] * 2


async def test_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        await from_process_group()
