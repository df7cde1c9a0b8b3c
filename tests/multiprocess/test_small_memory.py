"""A small /dev/shm: an error that says what is missing, when the channel is made; never a SIGBUS when it is used."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.multiprocess import namespaces
from tests.multiprocess.harness import Farm
from tests.multiprocess.namespaces import MIB


@pytest.fixture
def may_unshare(farm: Farm) -> None:
    if not farm.worker().call("may_unshare"):
        pytest.skip("needs mount and pid namespaces, which this user may not make here")


def in_shm_of(farm: Farm, nbytes: int, script: Any, *args: Any, **options: Any) -> Any:
    """What a script returns that ran where /dev/shm has so many bytes. The process must end by itself, without a signal."""
    worker = farm.worker()
    result = worker.call("with_own_shm", script, nbytes, *args, **options)
    assert worker.finish() == 0
    return result


pytestmark = pytest.mark.usefixtures("may_unshare")


def assert_explains(error: tuple[str, str, int, int], needed: str, free: str) -> None:
    kind, text, needed_bytes, available = error
    assert kind == "NoSpaceError"
    assert re.search(rf"{needed}.*{free}", text), text
    assert "--shm-size" in text
    assert "smaller" in text
    assert 'backing="memfd"' in text
    assert needed_bytes > available >= 0


def test_a_default_channel_in_one_mebibyte(farm: Farm) -> None:
    """Far too small: refused when it is made, with the numbers and what to do, and no file is left."""
    error, clean = in_shm_of(farm, MIB, namespaces.too_small, None)
    assert_explains(error, "2.0 GiB", "1.0 MiB")
    assert clean


def test_a_channel_in_what_is_left(farm: Farm) -> None:
    """A file system that others have filled, up to 10 MiB: the error names what is needed in all and what is free."""
    from aioarena import ArenaConfig

    arena = ArenaConfig(slots=32, slot_bytes=MIB)
    error, clean = in_shm_of(farm, 64 * MIB, namespaces.too_small, 10 * MIB, arena=arena, ring_bytes=MIB)
    assert_explains(error, "33.0 MiB", "10.0 MiB")
    assert clean


def test_memory_that_is_taken_while_a_channel_is_made(farm: Farm) -> None:
    """What was free when it was looked at may be gone a moment later: the same error, and no file is left."""
    error, clean = in_shm_of(farm, MIB, namespaces.taken_in_between)
    assert_explains(error, "8.0 MiB", "1.0 MiB")
    assert clean


@pytest.mark.parametrize("fill_after", [False, True])
def test_every_slot_written(farm: Farm, fill_after: bool) -> None:
    """Others may fill the file system after the channel is made: what has no memory travels otherwise, nothing is lost."""
    intact, used, full = in_shm_of(farm, 64 * MIB, namespaces.written_to_the_last_slot, fill_after)
    assert intact
    if fill_after:
        assert 1 <= used <= 10
        assert full == 32 - used
    else:
        assert (used, full) == (32, 0)


def test_leftovers_of_the_dead_fill_the_file_system(farm: Farm) -> None:
    """They are removed first, so that a crash does not make the next start fail."""
    gone = farm.worker()
    dead = gone.call("identity")
    gone.kill()
    gone.wait()
    assert in_shm_of(farm, 64 * MIB, namespaces.after_a_death, dead) == (1, [])


def test_memory_that_was_only_reserved_costs_nothing(farm: Farm) -> None:
    """Channels of 256 MiB that nobody has used: /dev/shm has given the ring, the process a few pages."""
    taken, resident = in_shm_of(farm, 300 * MIB, namespaces.reserved_only)
    assert taken < 10 * MIB
    assert resident < MIB
