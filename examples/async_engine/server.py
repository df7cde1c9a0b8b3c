"""A server over an asynchronous engine, with workers that share the model and get pictures through shared memory.

Run it:     pip install '.[examples]' && python examples/async_engine/server.py --workers 2 --port 8000
Try it:     curl -N http://127.0.0.1:8000/generate -d '{"prompt": "Once upon", "max_tokens": 8}'
Expect:     a line of JSON for each token, as it is made, and one that says why there are no more. The model has random
            weights, so the text makes no sense.

POST /generate takes ``prompt``, a string, ``max_tokens`` and optionally ``image``: ``{"height": h, "width": w, "data":
d}``, where ``d`` is the base64 of 3 * h * w float32 (little-endian, channels first) and h and w are multiples of 32. GET
/health says how the engine is. Both answer 503 once a worker has died.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import uvicorn
from engine import Engine, EngineDeadError

LARGEST_BODY = 256 << 20

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Gone(Exception):
    """The client has closed its connection."""


class App:
    """The ASGI application.

    Args:
        workers: How many processes share the model.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._engine: Engine | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            match scope["method"], scope["path"]:
                case "GET", "/health":
                    await self._health(send)
                case "POST", "/generate":
                    await self._generate(receive, send)
                case _:
                    await answer(send, 404, {"error": "there is GET /health and POST /generate"})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        try:
            async with Engine(self._workers) as self._engine:
                await send({"type": "lifespan.startup.complete"})
                await receive()  # lifespan.shutdown
        except Exception as error:
            if self._engine is not None:
                await send({"type": "lifespan.shutdown.failed", "message": str(error)})
            else:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    async def _health(self, send: Send) -> None:
        assert self._engine is not None
        status = self._engine.status
        await answer(send, 200 if status["status"] == "ok" else 503, status)

    async def _generate(self, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
            # In a thread: others get their tokens between the steps of decoding a large picture.
            arguments = await asyncio.to_thread(parse, body)
            del body
        except Gone:
            return
        except ValueError as error:
            await answer(send, 400, {"error": str(error)})
            return
        streaming = asyncio.create_task(self._stream(arguments, send))
        del arguments
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait([streaming, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A client that goes away cancels its request, and so does a server that stops.
            ending = [task for task in (streaming, gone) if not task.done()]
            for task in ending:
                task.cancel()
            if ending:
                await asyncio.wait(ending)
        if not streaming.cancelled():
            streaming.result()

    async def _stream(self, arguments: dict[str, Any], send: Send) -> None:
        assert self._engine is not None
        generating = self._engine.generate(f"{uuid.uuid4()}", **arguments)
        most = arguments["max_tokens"]
        arguments.clear()
        count = 0
        async with contextlib.aclosing(generating):
            try:
                async for token in generating:
                    if not count:
                        await send(head(200, "application/x-ndjson"))
                    count += 1
                    await send(line({"token": token, "text": chr(token)}))
            except ValueError as error:
                await answer(send, 400, {"error": str(error)})
                return
            except EngineDeadError as error:
                if count:
                    await send(line({"error": str(error)}, more=False))
                else:
                    await answer(send, 503, {"error": str(error)})
                return
        if not count:
            await send(head(200, "application/x-ndjson"))
        await send(line({"finished": "length" if count == most else "end"}, more=False))


def parse(body: bytes) -> dict[str, Any]:
    """The arguments of a request.

    Raises:
        ValueError: The body is not what it should be.
    """
    try:
        request = json.loads(body)
        picture = request.get("image")
        image = None
        if picture is not None:
            pixels = torch.frombuffer(bytearray(base64.b64decode(picture["data"], validate=True)), dtype=torch.float32)
            image = pixels.reshape(3, picture["height"], picture["width"])
        return {
            "prompt": list(request["prompt"].encode()),  # a token is a byte
            "image": image,
            "max_tokens": int(request.get("max_tokens", 16)),
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"this is not a request: {type(error).__name__}: {error}") from error


async def read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body += message.get("body", b"")
        if len(body) > LARGEST_BODY:
            raise ValueError(f"a request may have {LARGEST_BODY} bytes")
        if not message.get("more_body", False):
            return bytes(body)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def head(status: int, kind: str) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def line(content: object, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": json.dumps(content).encode() + b"\n", "more_body": more}


async def answer(send: Send, status: int, content: object) -> None:
    await send(head(status, "application/json"))
    await send(line(content, more=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes that share the model: 1, 2 or 4")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    options = parser.parse_args()
    # uvicorn stops in good order and then raises the signal that stopped it again; by then there is nothing left to do.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(
        App(options.workers),
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        lifespan="on",
        access_log=False,
        timeout_graceful_shutdown=5,
    )


if __name__ == "__main__":
    main()
