"""Each example runs as its docstring says, and ends with the line that shows that it worked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

LAST_LINES = {
    "quickstart.py": "done, the readers' exit codes are [0, 0]",
    "worker_group.py": "done: <WorkerGroup 'engine' of 2 closed>",
    "tensor_parallel.py": "step 2: 2 parts make up x @ weight: True",
    "retain_tensors.py": "dropped: 0 slots in use, the reader's exit code is 0",
    "lent_tensors.py": "sent 37748736 bytes from where they were made: True, the readers' exit codes are [0, 0]",
    "blocking.py": "sums: [3000000.0, 3000000.0]",
    "metrics.py": "scraped: 110 messages sent, reader 1 is 40 behind",
    "numpy_only.py": "all arrays arrived as they were sent",
}


# Run by tests/vllm and tests/ray, where there is a vLLM and a Ray.
ELSEWHERE = {"vllm_engine.py", "ray_workers.py"}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(LAST_LINES) | ELSEWHERE


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LAST_LINES)
def test_example_runs_without_warnings_and_ends_as_expected(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == LAST_LINES[name]
    if name == "retain_tensors.py":
        assert [int(line.split(": ")[1].split()[0]) for line in lines[:-1]] == [4, 8, 12, 16, 20]
