"""The plugin for vLLM, over a stand-in for vLLM's module: when it takes the queue's place, and how its queue behaves."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import pickle
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aioarena.exceptions import ReaderLostError, SenderLostError
from aioarena.integrations import vllm as plugin
from tests.conftest import PATIENCE
from tests.fronts.threads import calls_wait
from tests.integrations import stand_in

Queue = Any


@pytest.fixture
def shm_broadcast(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    monkeypatch.setenv(plugin.VARIABLE, "1")
    yield stand_in.install(monkeypatch)
    sys.modules.pop("aioarena.integrations._vllm_queue", None)


@pytest.fixture(autouse=True)
def _log_of_our_own() -> Iterator[None]:
    """The plugin adopts vLLM's handlers; other tests read this logger."""
    logger = logging.getLogger("aioarena")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.manager._clear_cache()  # type: ignore[attr-defined]


# Taking its place -----------------------------------------------------------------------------------------------------


def test_vllm_finds_it() -> None:
    found = [point for point in importlib.metadata.entry_points(group="vllm.general_plugins") if point.name == "aioarena"]
    assert [point.load() for point in found] == [plugin.register]


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_without_the_variable_nothing_changes(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Not even vLLM's module is imported."""
    stand_in.install(monkeypatch)
    monkeypatch.delitem(sys.modules, stand_in.NAME)
    if value is None:
        monkeypatch.delenv(plugin.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(plugin.VARIABLE, value)
    plugin.register()
    assert stand_in.NAME not in sys.modules


def test_it_takes_the_place_wherever_the_queue_is_known(
    shm_broadcast: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = shm_broadcast.MessageQueue
    executor = types.ModuleType("vllm.v1.executor.multiproc_executor")
    executor.MessageQueue = stock  # type: ignore[attr-defined]
    stranger = types.ModuleType("elsewhere")
    stranger.MessageQueue = stock  # type: ignore[attr-defined]
    for module in (executor, stranger):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    ours = shm_broadcast.MessageQueue
    assert ours is not stock
    assert issubclass(ours, stock)
    assert executor.MessageQueue is ours
    assert stranger.MessageQueue is stock
    plugin.register()  # vLLM may call it again
    assert shm_broadcast.MessageQueue is ours


def _without_dequeue(queue: Any) -> None:
    del queue.dequeue


def _another_parameter(queue: Any) -> None:
    def enqueue(self: Any, obj: Any, timeout: float | None = None, priority: int = 0) -> None: ...

    queue.enqueue = enqueue


def _something_new(queue: Any) -> None:
    queue.enqueue_batch = lambda self, objects: None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without_dequeue, "its MessageQueue has no dequeue()"),
        (_another_parameter, "MessageQueue.enqueue takes (obj, timeout, priority) instead of (obj, timeout)"),
        (_something_new, "its MessageQueue has enqueue_batch"),
    ],
)
def test_an_unknown_queue_stays_in_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Any, says: str
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "1")
    queue = stand_in.make_queue()
    change(queue)
    module = stand_in.install(monkeypatch, queue)
    plugin.register()
    assert module.MessageQueue is queue
    assert says in caplog.text
    assert "vLLM's own message queue stays in place" in caplog.text


def test_what_it_says_appears_where_vllm_logs(shm_broadcast: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    vllm = logging.getLogger("vllm")
    monkeypatch.setattr(vllm, "handlers", [Handler()])
    monkeypatch.setattr(vllm, "level", logging.INFO)
    plugin.register()
    assert lines == ["channels between vLLM's processes on this host are aioarena's"]


# The queue ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue_class(shm_broadcast: types.ModuleType, no_leaks: None) -> Iterator[Any]:
    plugin.register()
    yield shm_broadcast.MessageQueue
    gc.collect()


def connect(queue_class: Any, readers: int, ranks: list[int] | None = None, **options: Any) -> tuple[Queue, list[Queue]]:
    """A writer and its readers, ready."""
    writer = queue_class(readers, readers, ranks, **options)
    handle = pickle.loads(pickle.dumps(writer.export_handle()))
    queues = [queue_class.create_from_handle(handle, rank) for rank in ranks or range(readers)]
    threads = [threading.Thread(target=queue.wait_until_ready) for queue in (writer, *queues)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return writer, queues


def shut_down(*queues: Queue) -> None:
    for queue in queues:
        queue.shutdown()


def in_thread(function: Any, *arguments: Any, **options: Any) -> tuple[threading.Thread, list[Any]]:
    """A call in a thread of its own; its result, or its error, is put into the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function(*arguments, **options))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("arena", [False, True])
def test_messages_reach_all_readers(queue_class: Any, arena: bool) -> None:
    writer, readers = connect(queue_class, 2, enable_shm_tensor_arena=arena)
    tensor = torch.arange(300_000)
    try:
        writer.enqueue(("execute_model", (tensor,), {}, 0))
        writer.enqueue("next", timeout=PATIENCE)
        for reader in readers:
            method, (received,), _, _ = reader.dequeue(indefinite=True)
            assert method == "execute_model"
            assert torch.equal(received, tensor)
            assert reader.dequeue(timeout=PATIENCE) == "next"
            del received
        spans = writer._sender.statistics().arena_bytes
        assert spans == (tensor.nbytes if arena else 0)
    finally:
        shut_down(*readers, writer)


def test_ranks_of_a_process_group(queue_class: Any) -> None:
    """The writer has a rank of its own, so those of the readers have a gap."""
    writer, readers = connect(queue_class, 2, [0, 2])
    try:
        assert [reader.local_reader_rank for reader in readers] == [0, 1]
        assert writer.broadcast_object("to all") == "to all"
        assert [reader.broadcast_object() for reader in readers] == ["to all", "to all"]
    finally:
        shut_down(*readers, writer)


def test_only_writers_write_and_only_readers_read(queue_class: Any) -> None:
    writer, (reader,) = connect(queue_class, 1)
    try:
        with pytest.raises(AssertionError, match="Only writers can enqueue"):
            reader.enqueue(1)
        with pytest.raises(RuntimeError, match="Only readers can dequeue"):
            writer.dequeue()
    finally:
        shut_down(reader, writer)


def test_a_time_out_loses_nothing(queue_class: Any) -> None:
    writer, (reader,) = connect(queue_class, 1)
    try:
        for indefinite in (False, True):
            with pytest.raises(TimeoutError, match="was waiting for a message"):
                reader.dequeue(timeout=0.01, indefinite=indefinite)
        writer.enqueue("here")
        assert reader.dequeue(timeout=0.0) == "here"
    finally:
        shut_down(reader, writer)


def test_who_waits_long_says_for_whom(
    queue_class: Any, shm_broadcast: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    writer, (reader,) = connect(queue_class, 1)
    shm_broadcast.VLLM_RINGBUFFER_WARNING_INTERVAL = 0.005  # type: ignore[attr-defined]
    try:
        with caplog.at_level(logging.INFO, "aioarena"), pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.05)
        assert "was waiting for a message from the sender (pid" in caplog.text
        caplog.clear()
        with caplog.at_level(logging.INFO, "aioarena"), pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.05, indefinite=True)
        assert not caplog.text
    finally:
        shut_down(reader, writer)


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_shutting_down_ends_a_wait(queue_class: Any, timeout: float | None) -> None:
    """With the error that vLLM's own loop expects; from another thread, as its monitor of the parent does."""
    writer, (reader,) = connect(queue_class, 1)
    thread, outcome = in_thread(reader.dequeue, timeout=timeout, indefinite=timeout is None)
    reader.shutdown()
    thread.join(PATIENCE)
    assert isinstance(outcome[0], RuntimeError)
    assert str(outcome[0]) == "cancelled"
    writer.shutdown()
    with pytest.raises(RuntimeError, match="cancelled"):
        writer.enqueue(1)
    shut_down(reader, writer)  # again


def test_shutting_down_in_a_signal_handler_ends_the_wait_it_interrupts(queue_class: Any) -> None:
    writer, (reader,) = connect(queue_class, 1)

    def strike() -> None:
        calls_wait(reader._receiver)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGUSR1, lambda number, frame: reader.shutdown())
    try:
        thread, _ = in_thread(strike)
        with pytest.raises(RuntimeError, match="cancelled"):
            reader.dequeue()
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.join(PATIENCE)
    shut_down(reader, writer)


async def test_it_works_where_an_event_loop_runs(queue_class: Any) -> None:
    """As in a notebook. It holds the loop up, which vLLM's own queue does, too."""
    loop = asyncio.get_running_loop()
    writer = queue_class(1, 1)
    reader = queue_class.create_from_handle(writer.export_handle(), 0)
    thread, _ = in_thread(writer.wait_until_ready)
    reader.wait_until_ready()
    thread.join(PATIENCE)
    writer.enqueue("here")
    assert reader.dequeue() == "here"
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.01)
    shut_down(reader, writer)
    assert asyncio.get_running_loop() is loop


def test_the_end_of_the_writer_waits_for_the_monitor(queue_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM ends the other workers before it shuts its queues down: an error in between would stop it doing so."""
    writer, (reader,) = connect(queue_class, 1)
    thread, outcome = in_thread(reader.dequeue)
    writer.shutdown()
    while "received all of it" not in caplog.text:
        assert thread.is_alive()
    assert not outcome
    reader.shutdown()
    thread.join(PATIENCE)
    assert str(outcome[0]) == "cancelled"


def test_without_a_monitor_the_end_of_the_writer_is_an_error(queue_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from aioarena.integrations import _vllm_queue

    monkeypatch.setattr(_vllm_queue, "_MONITOR_SECONDS", 0.01)
    writer, (reader,) = connect(queue_class, 1)
    writer.shutdown()
    with pytest.raises(Exception, match="received all of it") as caught:
        reader.dequeue()
    assert not isinstance(caught.value, SenderLostError)
    reader.shutdown()


def test_a_lost_reader_does_not_stop_the_writer(queue_class: Any) -> None:
    """vLLM notices by itself, and sends on meanwhile."""
    writer, readers = connect(queue_class, 2)
    readers[0].shutdown()
    try:
        writer.enqueue("to who is left")
        assert readers[1].dequeue() == "to who is left"
    except ReaderLostError:
        pytest.fail("the writer was stopped")
    finally:
        shut_down(*readers, writer)


@pytest.mark.parametrize(("n_reader", "n_local_reader"), [(2, 1), (1, 0), (0, 0)])
def test_queues_to_other_hosts_are_those_of_vllm(
    queue_class: Any, caplog: pytest.LogCaptureFixture, n_reader: int, n_local_reader: int
) -> None:
    with caplog.at_level(logging.INFO, "aioarena"):
        queue = queue_class(n_reader, n_local_reader, connect_ip="10.0.0.1")
    assert type(queue) is queue_class.__mro__[1]
    assert queue.made == (n_reader, n_local_reader, "10.0.0.1")
    handle = stand_in.Handle(remote_subscribe_addr="tcp://10.0.0.1:1")
    reader = queue_class.create_from_handle(handle, -1)
    assert type(reader) is queue_class.__mro__[1]
    assert reader.made == (handle, -1)
