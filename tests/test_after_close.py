"""What is left of an end that was closed: nothing, and without the help of the garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aioarena


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


async def exchange(name: str) -> torch.Tensor:
    async with aioarena.Sender(1, name=name) as sender, aioarena.Receiver(sender.handle, 0) as reader:
        await sender.send(torch.ones(1 << 18))
        return await reader.recv()


async def test_closed_ends_are_gone_at_once() -> None:
    """Memory and descriptors go with the last reference: no cycle keeps a closed end until a collection."""
    await exchange("warm-up")
    before = descriptors()
    kept = await exchange("closed-ends")
    # What the tensor looks at, and where its release will be noted.
    assert (mappings("closed-ends-arena"), mappings("closed-ends-control")) == (1, 1)
    assert kept.sum() == 1 << 18
    del kept
    assert (mappings("closed-ends-arena"), mappings("closed-ends-control")) == (0, 0)
    assert descriptors() == before


async def test_a_closed_sender_that_is_kept_has_no_arena() -> None:
    """Somebody who keeps a closed sender, for its statistics, does not keep its gigabytes."""
    async with aioarena.Sender(1, name="kept-sender") as sender:
        assert mappings("kept-sender-arena") == 1
    assert mappings("kept-sender-arena") == 0
    assert sender.statistics().messages == 0


async def test_a_look_that_was_due_is_taken_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop would keep the closed end until its next turn."""
    async with aioarena.Sender(1) as sender:
        monkeypatch.setattr(sender, "_has_mail", lambda: True)
        sender._drain_later()
        due = sender._draining
        assert due is not None
    assert due.cancelled()
