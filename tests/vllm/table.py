"""Measures vLLM's AsyncLLM over its own message queue and over aioarena: idle CPU of the workers, time to first token.

    python tests/vllm/table.py [RUNS]

Each run starts an engine for each way, one after the other, and waits until an idle one sleeps as deep as it will.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("engine.py")
WAYS = {
    "vLLM's queue": (False, []),
    "vLLM's queue, its arena": (False, ["--arena"]),
    "aioarena, arena off": (True, []),
    "aioarena": (True, ["--arena"]),
}


def run(model: Path, ours: bool, options: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "AIOARENA_VLLM": "1" if ours else "0"}
    done = subprocess.run(
        [sys.executable, ENGINE, model, "--idle", "20", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
            return report
    sys.exit(done.stdout + done.stderr)


def first(report: dict[str, Any], kind: str) -> float:
    return statistics.median(request["first"] for request in report["requests"] if request["name"].startswith(kind))


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(runs):
            for way, (ours, options) in WAYS.items():
                found[way].append(run(Path(directory) / "model", ours, options))
    print("| | first token, 20 words | first token, 37 MB of embeddings | idle CPU of a worker |")
    print("| --- | --- | --- | --- |")
    for way, reports in found.items():
        small, large = (statistics.median(first(report, kind) for report in reports) for kind in ("small", "large"))
        idle = statistics.median(max(report["idle"]) for report in reports)
        print(f"| {way} | {small * 1000:.0f} ms | {large:.2f} s | {idle:.1%} |")


if __name__ == "__main__":
    main()
