"""A reader in a process of its own, with or without tracing: receives all, and prints its spans as JSON."""

from __future__ import annotations

import json
import pickle
import sys

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aioarena import blocking
from aioarena.integrations import opentelemetry


def main() -> None:
    handle, rank, traced = pickle.load(sys.stdin.buffer)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    if traced:
        opentelemetry.install(provider)
    received = []
    with blocking.Receiver(handle, rank) as chan:
        for step in chan:
            received.append(step)
            with provider.get_tracer("worker").start_as_current_span(
                "execute", context=opentelemetry.message_context(chan)
            ):
                pass
    spans = [
        {
            "name": span.name,
            "trace": span.context.trace_id,
            "span": span.context.span_id,
            "parent": span.parent.span_id if span.parent is not None else None,
        }
        for span in exporter.get_finished_spans()
    ]
    print(json.dumps({"received": received, "spans": spans}))


main()
