"""Traces with OpenTelemetry: the context of a send travels with the message, and what each reader does joins its trace.

::

    from aioarena.integrations import opentelemetry
    opentelemetry.install()               # in the sender's process and in the readers'

    with tracer.start_as_current_span("step"):
        await chan.send(step)             # a span "send NAME" of the step, with a span "copy" for large buffers

    async for step in chan:               # a span "receive NAME" below it, at each reader
        with tracer.start_as_current_span("execute", context=opentelemetry.message_context(chan)):
            ...

Needs the extra ``otel``. Messages from and to processes without this are received all the same.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, TracerProvider
except ImportError as error:
    raise ImportError(
        "aioarena.integrations.opentelemetry needs opentelemetry-api: pip install 'aioarena[otel]'", name=error.name
    ) from error

from aioarena import _observing, blocking
from aioarena.receiver import Receiver
from aioarena.sender import Sender

__all__ = ["Tracing", "install", "message_context"]

# Of the message that a receiver received last: its span there, as a context for what is done with it.
_contexts: weakref.WeakKeyDictionary[Receiver, Context] = weakref.WeakKeyDictionary()


class Tracing(_observing.Observer):
    """Makes the spans. Made by :func:`install`."""

    carries = True

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("aioarena", tracer_provider=provider)

    @contextlib.contextmanager
    def sending(self, sender: Sender, carrier: dict[str, str]) -> Iterator[None]:
        with self._tracer.start_as_current_span(
            f"send {sender._name}", kind=SpanKind.PRODUCER, attributes=_attributes("send", sender._name)
        ):
            propagate.inject(carrier)
            yield

    @contextlib.contextmanager
    def copying(self, channel: str, nbytes: int) -> Iterator[None]:
        with self._tracer.start_as_current_span("copy", attributes={"aioarena.nbytes": nbytes}):
            yield

    @contextlib.contextmanager
    def receiving(self, receiver: Receiver, delivery: _observing.Delivery) -> Iterator[None]:
        began = time.time_ns()
        yield
        # Only now, because what it belongs to stands in the message.
        postmark = delivery.postmark
        attributes = {**_attributes("receive", receiver._name), "aioarena.rank": receiver.rank}
        if postmark is not None and postmark.age is not None:
            attributes["aioarena.delivery_seconds"] = postmark.age
        span = self._tracer.start_span(
            f"receive {receiver._name}",
            # An empty context for a message without one: it is no part of what the reader happens to be doing.
            context=propagate.extract(postmark.carrier if postmark is not None else {}, Context()),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            start_time=began,
        )
        span.end()
        _contexts[receiver] = trace.set_span_in_context(span, Context())

    @contextlib.contextmanager
    def moving(self, receiver: Receiver) -> Iterator[None]:
        with self._tracer.start_as_current_span(f"to_device {receiver._name}", attributes={"aioarena.rank": receiver.rank}):
            yield

    def uninstall(self) -> None:
        """Make no more spans, and have no context travel."""
        _observing.forget(self)


def _attributes(operation: str, channel: str) -> dict[str, str | int | float]:
    # As OpenTelemetry's conventions for messaging systems name them.
    return {
        "messaging.system": "aioarena",
        "messaging.operation.type": operation,
        "messaging.destination.name": channel,
    }


def install(tracer_provider: TracerProvider | None = None) -> Tracing:
    """Trace what all ends of this process send and receive, those that are there and those to come.

    Args:
        tracer_provider: Who makes the spans; by default OpenTelemetry's global provider. The context travels in the form
            that OpenTelemetry's global propagator gives it.

    Returns:
        What makes the spans; its ``uninstall`` ends it.

    Raises:
        ValueError: It is on already.
    """
    if _observing.observing(Tracing):
        raise ValueError("tracing is on in this process; uninstall() what install() returned before installing it anew")
    tracing = Tracing(tracer_provider)
    _observing.observe(tracing)
    return tracing


def message_context(receiver: Receiver | blocking.Receiver) -> Context:
    """The context of the message that a receiver received last: spans made with it join the trace of its send.

    Ask before the next message is received. Of a receiver that has received nothing with tracing on, an empty context.
    """
    end = receiver._end if isinstance(receiver, blocking.Receiver) else receiver
    return _contexts.get(end, Context())
