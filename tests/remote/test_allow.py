"""A reader on another host that does not trust its sender."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from aioarena import NotAllowedError
from tests.fronts.support import filled
from tests.remote.test_channel import expect, message, opened


class Attack:
    """Would make a file at each reader."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",), {"tensor": filled(1, self.nbytes)}


async def test_a_pickle_that_would_run_code(tmp_path: Path) -> None:
    """Small or large, it is refused where it is not trusted; all else arrives there as it does elsewhere."""
    marker = tmp_path / "marker"
    async with opened(receiver={"allow": []}) as channel:
        for nbytes in (100, 1 << 19, 5 << 20):
            await channel.sender.send(Attack(marker, nbytes))
            with pytest.raises(NotAllowedError) as caught:
                await channel.remote.recv()
            assert caught.value.what == f"{os.system.__module__}.system"
            assert not marker.exists()
        for number in range(12):
            await channel.sender.send(message(number))
        await expect(channel.remote, 0, 12)
        assert channel.remote.statistics().decode_errors == 3
