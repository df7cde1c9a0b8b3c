"""Fixtures of the tests across hosts: the hosts, and workers that live on them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.multiprocess.conftest import farm, nursery, tmpdir_for_sockets
from tests.multiprocess.harness import TEST_TIMEOUT
from tests.network.hosts import Network, NotPermitted

__all__ = ["farm", "network", "nursery", "tmpdir_for_sockets"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT))


@pytest.fixture
def network(tmpdir_for_sockets: Path) -> Iterator[Network]:
    """``network.hosts(2)``; whatever happens, they are gone afterwards. Put workers there by ``farm.worker(host=...)``."""
    try:
        network = Network(tmpdir_for_sockets)
    except NotPermitted as error:
        pytest.skip(f"no hosts: {error}")
    with network:
        yield network


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that goes beyond what is permitted here, as wires with a delay may, is skipped, too."""
    try:
        return (yield)
    except NotPermitted as error:
        pytest.skip(f"not permitted: {error}")
