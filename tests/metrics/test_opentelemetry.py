"""Traces: a step, its send, and what each reader does with it are one, also across processes."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from aioarena import DecodeError, EncodeError, Receiver, Sender, _observing, blocking
from aioarena.integrations import opentelemetry
from aioarena.integrations.opentelemetry import message_context
from tests.conftest import ARENA, PATIENCE, RING_BYTES, OpenChannel
from tests.fronts.support import filled
from tests.fronts.threads import blocking_channel


class Spans:
    """What was traced, and who traces.

    Attributes:
        tracer: Of the application.
    """

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("engine")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    @property
    def names(self) -> list[str]:
        return [span.name for span in self._exporter.get_finished_spans()]


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    yield found
    found.provider.shutdown()


@pytest.fixture
def traced(spans: Spans) -> Iterator[Spans]:
    tracing = opentelemetry.install(spans.provider)
    yield spans
    tracing.uninstall()


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert span.context is not None and parent.context is not None
    return (
        span.parent is not None
        and span.parent.span_id == parent.context.span_id
        and span.context.trace_id == parent.context.trace_id
    )


async def test_a_step_and_each_reader_are_one_trace(open_channel: OpenChannel, traced: Spans) -> None:
    """The send below the step, the copy below the send, each reader's receive below the send, its work below that."""
    async with open_channel(2, name="steps") as channel:
        with traced.tracer.start_as_current_span("step"):
            await channel.sender.send(filled(1))
        for receiver in channel.receivers:
            await receiver.recv()
            with traced.tracer.start_as_current_span("execute", context=message_context(receiver)):
                pass
        send = traced.one("send steps")
        assert is_child(send, traced.one("step"))
        assert is_child(traced.one("copy"), send)
        receives = traced.named("receive steps")
        assert len(receives) == 2 and all(is_child(receive, send) for receive in receives)
        assert all(is_child(work, receive) for work, receive in zip(traced.named("execute"), receives, strict=True))


async def test_what_the_spans_say(open_channel: OpenChannel, traced: Spans) -> None:
    """In the words of OpenTelemetry's conventions for messaging."""
    async with open_channel(name="steps") as channel:
        await channel.sender.send(filled(1))
        await channel.receiver.to_device(await channel.receiver.recv(), "cpu")
        send, receive = traced.one("send steps"), traced.one("receive steps")
        assert (send.kind, receive.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
        common = {"messaging.system": "aioarena", "messaging.destination.name": "steps"}
        assert send.attributes == {**common, "messaging.operation.type": "send"}
        assert receive.attributes is not None
        told = dict(receive.attributes)
        seconds = told.pop("aioarena.delivery_seconds")
        assert isinstance(seconds, float) and 0 < seconds < PATIENCE
        assert told == {**common, "messaging.operation.type": "receive", "aioarena.rank": 0}
        assert traced.one("copy").attributes == {"aioarena.nbytes": 1 << 20}
        assert traced.one("to_device steps").attributes == {"aioarena.rank": 0}
        for span in (send, receive):
            assert span.start_time is not None and span.end_time is not None and span.start_time <= span.end_time


async def test_each_message_has_its_own_context(open_channel: OpenChannel, traced: Spans) -> None:
    async with open_channel(name="steps") as channel:
        for number in range(3):
            with traced.tracer.start_as_current_span(f"step {number}"):
                channel.sender.send_nowait(number)
        assert [await channel.receiver.recv() for _ in range(3)] == [0, 1, 2]
        for number, (send, receive) in enumerate(
            zip(traced.named("send steps"), traced.named("receive steps"), strict=True)
        ):
            assert is_child(send, traced.one(f"step {number}")) and is_child(receive, send)


@pytest.mark.parametrize("why", ["nothing came", "nobody understands it"])
async def test_a_receive_is_no_part_of_what_the_reader_is_doing(
    open_channel: OpenChannel, traced: Spans, why: str, request: pytest.FixtureRequest
) -> None:
    """It belongs to the step, or to itself."""
    async with open_channel(name="steps") as channel:
        if why == "nothing came":
            _observing._strip(channel.sender)  # as in a process without tracing
        else:
            request.addfinalizer(partial(propagate.set_global_textmap, propagate.get_global_textmap()))
            propagate.set_global_textmap(CompositePropagator([]))
        await channel.sender.send("plain")
        with traced.tracer.start_as_current_span("serving"):
            assert await channel.receiver.recv() == "plain"
        receive = traced.one("receive steps")
        assert receive.parent is None
        with traced.tracer.start_as_current_span("execute", context=message_context(channel.receiver)):
            pass
        assert is_child(traced.one("execute"), receive)


async def test_a_reader_without_tracing_receives_the_object(open_channel: OpenChannel, traced: Spans) -> None:
    async with open_channel(name="steps") as channel:
        _observing._strip(channel.receiver)
        await channel.sender.send({"step": 1})
        assert await channel.receiver.recv() == {"step": 1}
        assert traced.names == ["send steps"]
        assert message_context(channel.receiver) == {}


async def test_what_is_not_sampled_is_not_sampled_at_the_readers(open_channel: OpenChannel, traced: Spans) -> None:
    """The decision travels with the context."""
    silent = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    async with open_channel(name="steps") as channel:
        with silent.get_tracer("engine").start_as_current_span("step"):
            await channel.sender.send(1)
        await channel.receiver.recv()
        assert traced.names == []


async def test_failures_are_on_the_spans(open_channel: OpenChannel, traced: Spans) -> None:
    async with open_channel(name="steps") as channel:
        with pytest.raises(EncodeError):
            await channel.sender.send(lambda: 0)
        assert traced.one("send steps").status.status_code is StatusCode.ERROR
        await channel.sender.send(Bomb())
        with pytest.raises(DecodeError):
            await channel.receiver.recv()
        assert traced.named("receive steps") == []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


async def test_over_the_network(traced: Spans) -> None:
    """The context is part of the message, however that travels."""
    async with (
        Sender(0, remote_readers=1, bind="tcp://127.0.0.1:0", name="steps", arena=ARENA, ring_bytes=RING_BYTES) as sender,
        Receiver(sender.handle, 0) as receiver,
    ):
        for obj in ("small", filled(1)):
            await sender.send(obj)
            await receiver.recv()
    for send, receive in zip(traced.named("send steps"), traced.named("receive steps"), strict=True):
        assert is_child(receive, send)


def test_blocking_ends(traced: Spans) -> None:
    with blocking_channel(name="steps") as (sender, receiver):
        with traced.tracer.start_as_current_span("step"):
            sender.send(1)
            assert trace.get_current_span().get_span_context().span_id  # and not the send's, which is over
        assert receiver.recv() == 1
        assert is_child(traced.one("send steps"), traced.one("step"))
        assert is_child(traced.one("receive steps"), traced.one("send steps"))
        with traced.tracer.start_as_current_span("execute", context=message_context(receiver)):
            pass
        assert is_child(traced.one("execute"), traced.one("receive steps"))


async def test_without_it_nothing_is_traced_and_nothing_travels(open_channel: OpenChannel, spans: Spans) -> None:
    async with open_channel() as channel:
        opentelemetry.install(spans.provider).uninstall()
        assert (type(channel.sender), type(channel.receiver)) == (Sender, Receiver)
        await channel.sender.send("message")
        assert channel.sender.statistics().ring_bytes == len(pickle.dumps("message", 5))
        await channel.receiver.recv()
        assert spans.names == []


def test_it_is_installed_once(traced: Spans) -> None:
    with pytest.raises(ValueError, match="tracing is on in this process"):
        opentelemetry.install(traced.provider)


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "aioarena.integrations.opentelemetry")
    with pytest.raises(ImportError, match=r"pip install 'aioarena\[otel\]'"):
        importlib.import_module("aioarena.integrations.opentelemetry")


@pytest.mark.multiprocess
def test_across_processes(traced: Spans) -> None:
    """One reader with tracing joins the trace; one without receives the same."""
    script = Path(__file__).with_name("traced_reader.py")
    with blocking.Sender(2, name="steps", arena=ARENA, ring_bytes=RING_BYTES) as sender:
        readers = [
            subprocess.Popen(
                [sys.executable, "-m", f"tests.metrics.{script.stem}"],
                cwd=script.parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(2)
        ]
        try:
            for rank, reader in enumerate(readers):
                assert reader.stdin is not None
                pickle.dump((sender.handle, rank, rank == 0), reader.stdin)
                reader.stdin.flush()
            sender.wait_ready(timeout=3 * PATIENCE)
            with traced.tracer.start_as_current_span("step"):
                sender.send(["first"])
            sender.send(["second"])
            sender.close()
            said = [json.loads(reader.communicate(timeout=PATIENCE)[0]) for reader in readers]
        finally:
            for reader in readers:
                reader.kill()
                reader.communicate()
    assert [reader["received"] for reader in said] == [[["first"], ["second"]]] * 2
    sends = [span.context for span in traced.named("send steps")]
    joined, alone = said[0]["spans"], said[1]["spans"]
    receives = [span for span in joined if span["name"] == "receive steps"]
    works = [span for span in joined if span["name"] == "execute"]
    for send, receive, work in zip(sends, receives, works, strict=True):
        assert send is not None
        assert (receive["trace"], receive["parent"]) == (send.trace_id, send.span_id)
        assert (work["trace"], work["parent"]) == (send.trace_id, receive["span"])
    assert [(span["name"], span["parent"]) for span in alone] == [("execute", None)] * 2
