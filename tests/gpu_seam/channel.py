"""One sender and its readers in this process, with a small arena."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

import aioarena

NBYTES = 64 << 10
SLOTS = 4


@asynccontextmanager
async def channel(readers: int = 1, slots: int = SLOTS, **options: Any) -> AsyncIterator[tuple[Any, ...]]:
    """A sender, and a receiver for each rank that closes with it."""
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(make_sender(readers, slots))
        receivers = [
            await stack.enter_async_context(aioarena.Receiver(sender.handle, rank, **options)) for rank in range(readers)
        ]
        yield sender, *receivers


def make_sender(readers: int = 1, slots: int = SLOTS) -> aioarena.Sender:
    arena = aioarena.ArenaConfig(slots=slots, slot_bytes=NBYTES, min_bytes=4096)
    return aioarena.Sender(readers, arena=arena, ring_bytes=1 << 20)


def tensor(value: int = 1) -> torch.Tensor:
    """Fills exactly one slot."""
    return torch.full((NBYTES,), value, dtype=torch.uint8)


async def pass_on(sender: aioarena.Sender, receiver: aioarena.Receiver, value: int = 1) -> torch.Tensor:
    """Send a tensor to the only reader and receive it, as a view of the arena."""
    await sender.send(tensor(value))
    received: torch.Tensor = await receiver.recv()
    assert in_arena(receiver, received), "there was no free slot for it"
    return received


def in_arena(receiver: aioarena.Receiver, received: torch.Tensor) -> bool:
    assert receiver._ledger is not None
    return bool(receiver._ledger.find(received.data_ptr()))


def frames(sender: aioarena.Sender) -> int:
    """How many buffers found no free span."""
    return sender.statistics().fallbacks["arena_full"]
