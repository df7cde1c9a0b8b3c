"""An engine: requests come and go, one scheduler decides each step, workers execute it."""

import asyncio
import contextlib
import itertools
import tempfile
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import torch
from model import END, PATCH, TOKENS, Shard

from aioarena import WorkerLostError
from aioarena.engine import WorkerGroup

BATCH = 64  # requests in a step, at most; the others wait
LONGEST = 4096  # positions of a prompt, at most: attention takes memory with their square, 0.5 GB for these


class EngineDeadError(Exception):
    """The engine has stopped for good; the cause says why."""


class Request:
    """A request that has not ended.

    Attributes:
        number: What the workers know it by. Not its id, which may come again while they still have to forget this one.
        left: Tokens until it has as many as it wanted.
        latest: The latest token.
        done: Whether the last token has been made.
        closed: Whether nobody is interested any more.
        output: Tokens on their way to whoever asked; then None, or what kept the engine from going on.
    """

    def __init__(self, number: int, prompt: list[int], max_tokens: int) -> None:
        self.number = number
        self.prompt = prompt
        self.left = max_tokens
        self.latest = END
        self.done = False
        self.closed = False
        self.output: asyncio.Queue[int | Exception | None] = asyncio.Queue()

    def take(self, token: int) -> None:
        self.latest = token
        self.left -= 1
        self.done = token == END or self.left == 0
        if token != END:
            self.output.put_nowait(token)
        if self.done:
            self.output.put_nowait(None)


class Engine:
    """Generates text for many requests at a time; an asynchronous context manager.

    Args:
        workers: How many processes share the model: 1, 2 or 4.
    """

    def __init__(self, workers: int = 2) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="async-engine-")
        self._group = WorkerGroup(Shard, workers, f"{self._directory.name}/store", loop="uvloop", grace=5.0)
        self._scheduler: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._ended: list[int] = []  # numbers that the workers have to forget
        self._work = asyncio.Event()  # there is something for the scheduler
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._group.start()
        except BaseException:
            self._directory.cleanup()
            raise
        self._scheduler = asyncio.create_task(self._schedule())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.cancel()
        self._die(EngineDeadError("it was closed"))
        try:
            await asyncio.wait([self._scheduler])
            await self._group.aclose()
        finally:
            self._directory.cleanup()

    @property
    def status(self) -> dict[str, object]:
        """What it is doing, for people and for tests."""
        error = self._error or self._group.loss
        return {
            "status": "ok" if error is None else "dead",
            "error": None if error is None else str(error),
            "requests": len(self._requests),
            "workers": self._group.pids,
        }

    async def generate(
        self, request_id: str, prompt: list[int], image: torch.Tensor | None = None, max_tokens: int = 16
    ) -> AsyncGenerator[int, None]:
        """Generate tokens. Closing or cancelling the generator aborts the request.

        Args:
            request_id: Any string that no other request has at the moment.
            prompt: Tokens; at least one.
            image: What the prompt is about: float32 of shape (3, height, width), both multiples of PATCH.
            max_tokens: How many tokens to generate at most.

        Raises:
            ValueError: An argument makes no sense.
            EngineDeadError: A worker died, or the engine was closed.
        """
        if request_id in self._requests:
            raise ValueError(f"there is a request {request_id!r} already")
        if not prompt or not all(0 <= token < TOKENS for token in prompt):
            raise ValueError(f"a prompt is one or more tokens from 0 to {TOKENS - 1}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        if image is not None and (image.dim() != 3 or image.shape[0] != 3 or not image.numel()):
            raise ValueError(f"an image has the shape (3, height, width), not {tuple(image.shape)}")
        if image is not None and (image.shape[1] % PATCH or image.shape[2] % PATCH):
            raise ValueError(f"height and width of an image must be multiples of {PATCH}, not {tuple(image.shape[1:])}")
        squares = 0 if image is None else image.shape[1] * image.shape[2] // PATCH**2
        if len(prompt) + squares > LONGEST:
            raise ValueError(f"prompt and image may have {LONGEST} positions together, not {len(prompt)} + {squares}")
        self._check()
        request = self._requests[request_id] = Request(next(self._numbers), prompt, max_tokens)
        try:
            if image is not None:
                # By itself and not with the step in which the request begins: the steps of others go on meanwhile.
                looking = self._group.call("look", request.number, image)
                del image
                await looking
            self._check()
            self._waiting.append(request)
            self._work.set()
            while (token := await request.output.get()) is not None:
                if isinstance(token, Exception):
                    raise EngineDeadError(f"the engine has stopped: {token}") from token
                yield token
        except WorkerLostError as error:
            raise EngineDeadError(f"the engine has stopped: {error}") from error
        finally:
            del self._requests[request_id]
            request.closed = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(request)
            # Whether it ended or was aborted. What was asked of the workers before this comes before it there, too.
            self._ended.append(request.number)
            self._work.set()

    def _check(self) -> None:
        error = self._error or self._group.loss
        if error is not None:
            raise EngineDeadError(f"the engine has stopped: {error}") from error

    def _die(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        for request in self._requests.values():
            request.output.put_nowait(self._error)

    async def _schedule(self) -> None:
        running: list[Request] = []
        try:
            while True:
                if not (running or self._waiting or self._ended):
                    self._work.clear()
                    await self._work.wait()
                ended, self._ended = self._ended, []
                begun = [self._waiting.popleft() for _ in range(min(BATCH - len(running), len(self._waiting)))]
                prompts = [(request.number, request.prompt) for request in begun]
                latest = [(request.number, request.latest) for request in running]
                # All workers have the same scores, so one answer is enough.
                tokens = (await self._group.call("step", ended, prompts, latest))[0]
                batch = begun + running
                for request, token in zip(batch, tokens, strict=True):
                    request.take(token)
                running = [request for request in batch if not (request.done or request.closed)]
        except Exception as error:
            # A worker died; or a step failed, and what the workers know of the requests is not to be relied on any more.
            self._die(error)
