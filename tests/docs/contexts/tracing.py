"""A receiver ``chan`` that traces, with a ``tracer``."""

import asyncio

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import aioarena
from aioarena.integrations import opentelemetry


async def main():
    opentelemetry.install(TracerProvider())
    tracer = trace.get_tracer("worker", tracer_provider=TracerProvider())
    async with aioarena.Sender(1) as sender, aioarena.Receiver(sender.handle, 0) as chan:
        await sender.send("step")
        await sender.aclose()
        # block
        assert step == "step"


asyncio.run(main())
