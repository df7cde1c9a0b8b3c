"""`bench remote`: what it counts, over loopback and between network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioarena._bench import remote

ROOT = Path(__file__).parents[1]
NBYTES = 4 << 20


def _bench(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "aioarena", "bench", "remote", "--quick", "--json", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=100 * float(os.environ.get("AIOARENA_TEST_PATIENCE", "1")),
        check=False,
    )
    if done.returncode == 1 and "--namespaces" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _check(document: dict[str, Any]) -> list[dict[str, Any]]:
    (section,) = document["sections"]
    records: list[dict[str, Any]] = section["records"]
    assert [record["streams"] for record in records] == [4, 2, 1]
    for record in records:
        assert all(len(record[key]) == 2 for key in ("wire", "seconds", "cpu_seconds"))
        assert all(nbytes >= record["streams"] * NBYTES for nbytes in record["wire"])
        assert all(seconds > 0 for seconds in record["seconds"] + record["cpu_seconds"])
    assert all(2 * NBYTES < nbytes < 2.1 * NBYTES for nbytes in records[1]["received_bytes"])
    return records


@pytest.mark.multiprocess
def test_over_loopback() -> None:
    """What other programs send over it is counted, too: there is no upper bound."""
    _check(_bench())


@pytest.mark.multiprocess
def test_between_namespaces_nothing_else_is_counted() -> None:
    """A stream has the bytes of the tensor and a few more; the machine's own network is as it was."""
    devices = sorted(os.listdir("/sys/class/net"))
    for record in _check(_bench("--namespaces")):
        assert all(nbytes < 1.05 * record["streams"] * NBYTES for nbytes in record["wire"])
    assert sorted(os.listdir("/sys/class/net")) == devices


def test_namespaces_without_their_tool_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.shutil, "which", lambda name: None)
    with pytest.raises(remote.NoNamespaces, match="needs the command ip, from the package iproute2"):
        remote._ip("link")
