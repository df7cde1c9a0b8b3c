"""Receivers that do not trust their sender: what is not allowed is an error of one message, and nothing else changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import aioarena
from aioarena import DecodeError, NotAllowedError, blocking
from tests.allow.messages import Step
from tests.conftest import OpenChannel

pytestmark = pytest.mark.usefixtures("no_leaks")


class Attack:
    """Would make a file at the reader."""

    def __init__(self, path: Path, *more: Any) -> None:
        self.path = path
        self.more = more

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",), {"more": self.more}


@pytest.mark.parametrize("private", [False, True])
async def test_a_message_that_is_not_allowed(open_channel: OpenChannel, tmp_path: Path, private: bool) -> None:
    """It counts as received, in whatever way it travelled; its slots are free, and the next one is fine."""
    marker = tmp_path / "marker"
    async with open_channel(receiver={"allow": [], "private": private}) as channel:
        for number, nbytes in enumerate((0, 600_000, 5 << 20)):
            await channel.sender.send({"attack": Attack(marker), "tensor": torch.ones(nbytes // 4)})
            with pytest.raises(NotAllowedError, match=f"message {2 * number + 1} of reader 0") as caught:
                await channel.receiver.recv()
            assert isinstance(caught.value, DecodeError)
            assert caught.value.what in ("os.system", "posix.system")
            assert "counts as received" in str(caught.value)
            del caught
            await channel.sender.send({"tensor": torch.ones(nbytes // 4)})
            assert (await channel.receiver.recv())["tensor"].sum() == nbytes // 4
        assert channel.receiver.statistics().decode_errors == 3
        assert channel.slots_used == 0
    assert not marker.exists()


async def test_other_errors_stay_what_they_are(open_channel: OpenChannel) -> None:
    """An allowed class that fails is no matter of the list."""
    async with open_channel(receiver={"allow": [Step, complex]}) as channel:
        await channel.sender.send(Step(1))
        with pytest.raises(NotAllowedError, match=r"tests\.allow\.messages\.Kind"):
            await channel.receiver.recv()
        await channel.sender.send(Failing())
        with pytest.raises(DecodeError, match="TypeError") as caught:
            await channel.receiver.recv()
        assert type(caught.value) is DecodeError


class Failing:
    def __reduce__(self) -> Any:
        return complex, ("1", "2", "3")


async def test_allowed(open_channel: OpenChannel) -> None:
    """Tensors are views of the arena as ever."""
    async with open_channel(receiver={"allow": ["tests.allow.messages"]}) as channel:
        await channel.sender.send(Step(3, tensors=[torch.ones(1 << 18)]))
        step = await channel.receiver.recv()
        assert type(step) is Step and step.tensors[0].sum() == 1 << 18
        assert channel.receiver.statistics().spans_held == 1


def test_blocking(tmp_path: Path) -> None:
    """The blocking end has the same option."""
    marker = tmp_path / "marker"
    with (
        blocking.Sender(1, arena=None) as sender,
        blocking.Receiver(sender.handle, 0, allow=["tests.allow.messages"]) as reader,
    ):
        sender.send(Attack(marker))
        with pytest.raises(NotAllowedError):
            reader.recv()
        sender.send(Step(1))
        assert reader.recv() == Step(1)
    assert not marker.exists()


def test_wrong_lists() -> None:
    """Are refused before anything is made."""
    handle = aioarena.Sender(1, arena=None).handle
    for receiver in (aioarena.Receiver, blocking.Receiver):
        with pytest.raises(TypeError, match="a list of module names"):
            receiver(handle, 0, allow="os")
