"""vLLM's AsyncLLM with two workers over aioarena, beside the same over its own queue. Takes minutes; see `make_env.sh`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aioarena.integrations.vllm import VARIABLE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: see make_env.sh"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

ENGINE = Path(__file__).with_name("engine.py")
ADOPTED = "channels between vLLM's processes on this host are aioarena's"
# Share of a core that an idle worker may take. Generous: it is below 1 %, and a third of a core with vLLM's own queue.
IDLE_SHARE = 0.05


@dataclass(frozen=True)
class Run:
    """What an engine did: its report, what was logged, and what it left behind."""

    report: dict[str, Any]
    log: str
    processes: list[str]
    files: set[str]

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {request["name"]: request["tokens"] for request in self.report["requests"]}


RunEngine = Callable[..., Run]


def _processes(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(state[3]) == session and state[0] not in "ZX":
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def _files() -> set[str]:
    """Files in shared memory; not those of vLLM's own collectives, which a killed worker leaves with its own queue too."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("vllm_dist_")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "model"


@pytest.fixture(scope="module")
def run_engine(model: Path) -> RunEngine:
    def run(*options: str, ours: bool) -> Run:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        if ours:
            environment[VARIABLE] = "1"
        before = _files()
        # A session of its own, so that whoever is left of it can be found.
        process = subprocess.Popen(
            [sys.executable, ENGINE, model, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        log, _ = process.communicate(timeout=300)
        reports = [line.removeprefix("REPORT ") for line in log.splitlines() if line.startswith("REPORT ")]
        assert reports, log[-10000:]
        # What Python starts to look after shared memory ends a moment after whom it looked after.
        deadline = time.monotonic() + 10
        while (left := _processes(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return Run(json.loads(reports[0]), log, left, _files() - before)

    return run


@pytest.fixture(scope="module")
def stock(run_engine: RunEngine) -> Run:
    return run_engine("--idle", "3", ours=False)


def test_installed_alone_it_changes_nothing(stock: Run) -> None:
    assert ADOPTED not in stock.log
    assert "aioarena" not in stock.log


@pytest.mark.parametrize("arena", [False, True], ids=["arena off", "arena on"])
def test_the_same_tokens_as_with_its_own_queue(run_engine: RunEngine, stock: Run, arena: bool) -> None:
    """Small prompts, prompts of 37 MB of embeddings, and both at once."""
    ours = run_engine("--idle", "3", *(["--arena"] if arena else []), ours=True)
    assert ours.log.count(ADOPTED) == 3  # the engine core and two workers
    assert len(ours.tokens) == 13
    assert ours.tokens == stock.tokens
    assert "WARNING" not in [line.split()[0] for line in ours.log.splitlines() if "aioarena" in line]
    assert not ours.processes
    assert not ours.files
    assert len(ours.report["idle"]) == 2
    assert max(ours.report["idle"]) < IDLE_SHARE


def test_the_example(run_engine: RunEngine, stock: Run, model: Path) -> None:
    """With the model that the stock engine has made, and what a machine without a GPU needs."""
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    example = Path(__file__).parents[2] / "examples" / "vllm_engine.py"
    done = subprocess.run(
        [sys.executable, example, model], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "done, 16 tokens" in done.stdout.splitlines(), done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(ADOPTED) == 3


def test_a_killed_worker_ends_the_engine_as_cleanly(run_engine: RunEngine) -> None:
    """The request fails as it does with vLLM's own queue, all processes are gone, and the log says who died."""
    ours = run_engine("--arena", "--kill", ours=True)
    assert ours.report["error"] == "EngineDeadError"
    assert "was killed by signal 9" in ours.log
    assert "died unexpectedly" in ours.log  # says vLLM's monitor
    assert not ours.processes
    assert not ours.files
