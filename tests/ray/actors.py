"""Actors that hold one end of a channel. Imported by Ray's workers."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import ray
import torch

import aioarena
from aioarena import blocking

RESTARTED = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": 0}


@ray.remote(**RESTARTED)
class AsyncReader:
    """Receives on the loop of an async actor, beside other calls."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.arena_bytes = 0

    async def read(self, handle: aioarena.Handle, rank: int, **options: Any) -> tuple[list[int], str]:
        """What it received, and what ended it."""
        self.numbers.clear()
        try:
            async with aioarena.Receiver(handle, rank, **options) as chan:
                async for number, tensor in chan:
                    assert bool((tensor == number).all())
                    self.arena_bytes = chan.statistics().arena_bytes
                    self.numbers.append(number)
        except aioarena.ArenaError as error:
            return self.numbers, type(error).__name__
        return self.numbers, "EndOfChannel"

    async def so_far(self, count: int) -> tuple[list[int], int]:
        """What it received, as soon as that is so many."""
        while len(self.numbers) < count:
            await asyncio.sleep(0.005)
        return list(self.numbers), self.arena_bytes

    async def pid(self) -> int:
        return os.getpid()


@ray.remote(**RESTARTED)
class PlainReader:
    """Receives in the one thread of a plain actor."""

    def read(self, handle: aioarena.Handle, rank: int) -> tuple[list[int], str]:
        assert threading.current_thread() is threading.main_thread()
        numbers: list[int] = []
        try:
            with blocking.Receiver(handle, rank) as chan:
                for number, tensor in chan:
                    assert bool((tensor == number).all())
                    numbers.append(number)
        except aioarena.ArenaError as error:
            return numbers, type(error).__name__
        return numbers, "EndOfChannel"


@ray.remote(num_cpus=0)
class Broadcaster:
    """The sender, as an async actor."""

    async def open(self, readers: int) -> aioarena.Handle:
        self.chan = aioarena.Sender(readers)
        await self.chan.start()
        return self.chan.handle

    async def send(self, number: int) -> None:
        await self.chan.send((number, torch.full((1 << 16,), number)))

    async def close(self) -> None:
        await self.chan.aclose()

    async def pid(self) -> int:
        return os.getpid()
