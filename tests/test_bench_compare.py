"""`bench compare`: every alternative delivers what was sent, a broken one is an error, numbers are what they say."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from aioarena._bench import _chart, _ends, _scenarios, _summary, compare
from aioarena._bench._alternatives import Arena
from aioarena._bench._result import Result, Section
from aioarena._bench._sides import Report
from aioarena._bench._text import Progress, table
from aioarena._bench._workers import Team

ROOT = Path(__file__).parents[1]
PATIENCE = float(os.environ.get("AIOARENA_TEST_PATIENCE", "1"))
OURS = {
    "aioarena": "aioarena",
    "pipe": "aioarena, pipe",
    "spin": "aioarena, spin",
    "arena-off": "aioarena, arena off",
}
ONLY_FOR = {
    "aioarena, pipe": {"small", "burst", "idle"},
    "aioarena, spin": {"small", "burst"},
    "floor": {"tensor", "tensors"},
    "floor, one thread": {"tensor", "tensors"},
}
OTHERS = {"zmq": "zmq.asyncio", "queue": "torch queue", "floor": "floor", "floor-alone": "floor, one thread"}


def python(*arguments: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    command, patience = [sys.executable, *arguments], 110 * PATIENCE
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=patience, check=False)


# The whole --------------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.slow
def test_all_that_was_sent_is_received(tmp_path: Path) -> None:
    svg = tmp_path / "compare.svg"
    chosen = ["--alternatives", *OURS, *OTHERS, "--readers", "1", "2"]
    done = python("-m", "aioarena", "bench", "compare", "--quick", "--json", "--svg", str(svg), *chosen)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    records = {
        (record["scenario"], record["alternative"], record["readers"]): record
        for section in document["sections"][:-1]
        for record in section["records"]
    }
    expected = {
        (scenario, name, readers)
        for scenario in _scenarios.SCENARIOS
        for name in [*OURS.values(), *OTHERS.values()]
        for readers in (1, 2)
        if scenario in ONLY_FOR.get(name, _scenarios.SCENARIOS)
    }
    assert set(records) == expected
    for (_, _, readers), record in records.items():
        assert "failure" not in record, record
        assert record["sent"] > 0
        assert record["received"] == [record["sent"]] * readers
        for entry in record["rounds"]:
            for report in entry["readers"]:
                assert (report["count"], report["digest"]) == (entry["sender"]["count"], entry["sender"]["digest"])
    assert ElementTree.fromstring(svg.read_text()).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.multiprocess
def test_iceoryx2_delivers_where_it_is_installed() -> None:
    pytest.importorskip("iceoryx2")
    chosen = ["--alternatives", "iceoryx2", "--scenarios", "burst", "tensors", "--readers", "2", "--json"]
    done = python("-m", "aioarena", "bench", "compare", "--quick", *chosen)
    assert done.returncode == 0, done.stderr
    for section in json.loads(done.stdout)["sections"][:-1]:
        for record in section["records"]:
            assert record["received"] == [record["sent"]] * 2


# What is used of vLLM's queue, and what it does as far as its readers can tell.
_VLLM = """
import pickle, tempfile
import zmq


class MessageQueue:
    def __init__(self, n_reader, n_local_reader, local_reader_ranks=None, max_chunk_bytes=1 << 24, max_chunks=10):
        assert n_reader == n_local_reader
        self.n_reader = n_reader
        self.address = f"ipc://{tempfile.mkdtemp(dir=r'DIRECTORY')}/queue"
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.bind(self.address)

    def export_handle(self):
        return self.address

    @staticmethod
    def create_from_handle(handle, rank):
        self = MessageQueue.__new__(MessageQueue)
        self.n_reader = None
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(handle)
        return self

    def wait_until_ready(self):
        if self.n_reader is None:
            assert self.socket.recv() == b"READY"
        else:
            for _ in range(self.n_reader):
                self.socket.recv()
            self.socket.send(b"READY")

    def enqueue(self, obj, timeout=None):
        self.socket.send(pickle.dumps(obj))

    def dequeue(self, timeout=None):
        if not self.socket.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError
        return pickle.loads(self.socket.recv())
"""


@pytest.mark.multiprocess
def test_vllm_is_used_as_its_queue_wants_to_be(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "distributed" / "device_communicators"
    package.mkdir(parents=True)
    for directory in (package, *package.parents[:2]):
        (directory / "__init__.py").touch()
    (package / "shm_broadcast.py").write_text(_VLLM.replace("DIRECTORY", str(tmp_path)))
    chosen = [
        "--alternatives",
        "vllm",
        "vllm-blocking",
        "vllm-arena",
        "--scenarios",
        "small",
        "tensors",
        "--readers",
        "2",
        "--json",
    ]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = python("-m", "aioarena", "bench", "compare", "--quick", *chosen, path=path)
    assert done.returncode == 0, done.stderr
    for section in json.loads(done.stdout)["sections"][:-1]:
        *queues, arena = section["records"]
        for queue in queues:  # without a thread for small messages only
            assert queue.get("received") == [queue["sent"]] * 2, queue
            assert queue["sent"] > 0
        assert (arena["failure"], arena["why"]) == ("not possible", "this vllm has no enable_shm_tensor_arena")


# What is broken ---------------------------------------------------------------------------------------------------


class _Broken(_ends.ReadEnd):
    """Does something to every tenth message."""

    def __init__(self, end: _ends.ReadEnd) -> None:
        self._end = end
        self._count = 0

    async def recv(self) -> _ends.Message:
        self._count += 1
        if self._count % 10 == 5:
            return await self.spoil()
        return await self._end.recv()

    async def spoil(self) -> Any:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._end.aclose()


class _Losing(_Broken):
    async def spoil(self) -> Any:
        await self._end.recv()
        return await self._end.recv()


class _Changing(_Broken):
    """Changes what no digest looks at."""

    async def spoil(self) -> Any:
        message = await self._end.recv()
        return {**message, "positions": []}


class _Raising(_Broken):
    async def spoil(self) -> Any:
        raise RuntimeError("out of order")


class _Endless(_Broken):
    async def spoil(self) -> Any:
        while True:
            await self._end.recv()


def broken(end: str, name: str, *, ours: bool = True) -> type[Arena]:
    """An alternative whose reader of rank 1 is broken. It pickles as a name of this module."""

    async def reader(cls: type[Arena], setting: _ends.Setting, handle: Any, rank: int) -> _ends.ReadEnd:
        whole = await Arena.reader(setting, handle, rank)
        made: _ends.ReadEnd = globals()[end](whole) if rank else whole
        return made

    return type(name, (Arena,), {"reader": classmethod(reader), "ours": ours, "__module__": __name__})


Losing = broken("_Losing", "Losing")
Changing = broken("_Changing", "Changing")
Raising = broken("_Raising", "Raising")
RaisingOther = broken("_Raising", "RaisingOther", ours=False)
Endless = broken("_Endless", "Endless")


def compare_with(*names: str, limit: int = 60) -> subprocess.CompletedProcess[str]:
    """The command, with alternatives of the above instead of ours."""
    keys = ["aioarena", "arena-off"][: len(names)]
    chosen = ["--alternatives", *keys, "--readers", "2", "--scenarios", "small", "--limit", str(limit)]
    replaced = "".join(f"compare.ALTERNATIVES[{key!r}] = broken.{name}; " for key, name in zip(keys, names, strict=True))
    return python(
        "-c",
        "import sys; from tests import test_bench_compare as broken; from aioarena import cli; "
        f"from aioarena._bench import compare; {replaced}"
        f"sys.exit(cli.main({['bench', 'compare', '--quick', *chosen]!r}))",
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Losing", "reader 1 got message 305 instead of 304"),
        ("Changing", "the step of message 304 is not as it was sent"),
        ("Raising", "out of order"),
    ],
)
def test_broken_alternative_is_an_error(name: str, why: str) -> None:
    done = compare_with(name)
    assert done.returncode == 1
    assert why in done.stderr
    assert done.stdout == ""


@pytest.mark.multiprocess
def test_other_failures_are_notes() -> None:
    done = compare_with("RaisingOther", "Endless", limit=8)
    assert done.returncode == 0, done.stderr
    assert "failed: RuntimeError: out of order" in done.stdout
    assert "did not finish: not within 8 s" in done.stdout


class _Saying:
    """A worker of a pair that answers with what it was given."""

    def __init__(self, rank: int, *answers: object) -> None:
        self.rank = rank
        self._answers = list(answers)

    def tell(self, message: object) -> None:
        pass

    async def answer(self) -> object:
        return self._answers.pop(0)


@pytest.mark.parametrize(
    "received",
    [Report(count=1, digest=5), Report(count=2, digest=6), Report(count=2, digest=5, violation="got another message")],
    ids=["fewer", "other digest", "out of order"],
)
async def test_reports_that_differ_are_an_error(received: Report) -> None:
    pair = compare.Pair(Arena, _scenarios.SCENARIOS["small"], 2, 1.0)
    pair.received = [0, 0]
    pair._team = team = Team(3, print)  # not entered: its workers are what we say
    sent = Report(count=2, digest=5)
    rounds: list[list[Any]] = [[[sent], ["listening", sent], ["listening", last]] for last in (sent, received)]
    team.workers[:] = [_Saying(rank, *answers) for rank, answers in enumerate(rounds[0])]  # type: ignore[list-item]
    await pair.round(2)
    assert (pair.sent, pair.received) == (2, [2, 2])
    team.workers[:] = [_Saying(rank, *answers) for rank, answers in enumerate(rounds[1])]  # type: ignore[list-item]
    with pytest.raises(compare.InvariantError, match="reader 1"):
        await pair.round(2)


async def test_what_is_not_installed_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm-arena", "iceoryx2"):
        monkeypatch.setattr(compare.ALTERNATIVES[name], "missing", classmethod(lambda cls: "it is not installed"))
    options = compare.CompareOptions(alternatives=("aioarena", "vllm", "vllm-arena", "iceoryx2"))
    assert compare._chosen(options)[0] == [Arena]
    svg = tmp_path / "compare.svg"
    options = compare.CompareOptions(alternatives=("vllm", "vllm-arena"), svg=svg)
    result = await compare.measure(options, Progress(io.StringIO()))
    assert "vllm, tensor arena: left out, it is not installed" in result.text()
    assert json.loads(result.json())["sections"][-1]["records"][0]["about"] == "left out, it is not installed."
    ElementTree.fromstring(svg.read_text())


# Messages ---------------------------------------------------------------------------------------------------------


def test_small_message_has_197_bytes_in_every_round() -> None:
    source = _scenarios.Source(_scenarios.SCENARIOS["small"])
    for number in (compare._FIRST_NUMBER, 65535):
        message = {**source.message(number), "temperature": 12345.678}
        assert sum(len(frame) for frame in _ends.dumps(message)) == 197


@pytest.mark.parametrize("name", ["small", "tensor", "tensors", "objects"])
def test_message_survives_pickling_and_its_changes_are_seen(name: str) -> None:
    scenario = _scenarios.SCENARIOS[name].quick()
    source = _scenarios.Source(scenario)
    message = source.message(300)
    digest = _scenarios.digest(message)
    received = _ends.loads([bytearray(frame) for frame in _ends.dumps(message)])
    assert _scenarios.digest(received) == digest
    assert _scenarios.difference(received, scenario, 300) is None
    assert _scenarios.difference(received, scenario, 301) == "the step"
    assert sum(memoryview(frame).nbytes for frame in _ends.dumps(message)) <= scenario.nbytes
    for index, tensor in enumerate(received.get("tensors", ())):
        tensor[-1, -1] += 1
        assert (
            _scenarios.difference(received, scenario, 300)
            == f"tensor {index} after row {(scenario.rows - 1) // 1024 * 1024}"
        )
        tensor[-1, -1] -= 1
    assert _scenarios.digest(source.message(301)) != digest


def test_digest_tells_messages_shapes_and_dtypes_apart() -> None:
    scenario = _scenarios.SCENARIOS["tensors"].quick()
    message = _scenarios.Source(scenario).message(300)
    digests = {_scenarios.digest(message)}
    first, *others = message["tensors"]
    touched = first.clone()
    touched[0, 0] += 1
    for changed in (first.t(), first.view(torch.float32), first[:-1], touched):
        digests.add(_scenarios.digest({**message, "tensors": [changed.contiguous(), *others]}))
    digests.add(_scenarios.digest({**message, "tensors": [*others, first]}))
    assert len(digests) == 6


# Numbers ----------------------------------------------------------------------------------------------------------


def test_percentiles_are_samples() -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert [_summary.percentile(samples, percent) for percent in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert _summary.percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        _summary.percentile([], 50)


def test_ratios_are_shown_where_there_is_something_to_compare() -> None:
    assert _summary.ratio(3.0, 2.0) == "1.50"
    assert _summary.ratio(3000.0, 2.0) == "1,500"
    assert _summary.ratio(3.0, 0.0) == _summary.ratio(None, 2.0) == _summary.ratio(3.0, None) == "-"


def test_slow_samples_are_those_over_three_medians() -> None:
    assert _summary.slow([1.0, 1.0, 1.0, 2.0, 3.0]) == 0
    assert _summary.slow([1.0, 1.0, 1.0, 1.0, 3.0, 3.1, 50.0]) == 2


def test_scale_is_logarithmic_and_shows_the_least() -> None:
    scale = _chart.Scale([0.01, 0.1, 1.0])
    assert list(scale.powers) == [-3, -2, -1, 0]
    assert [scale(value) for value in (0.001, 0.01, 0.1, 1.0)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert _chart.Scale([0.005])(0.005) == 1


def test_chart_has_what_failed_and_escapes_names() -> None:
    records: list[dict[str, Any]] = [
        {"scenario": "small", "alternative": "a <b> & c", "readers": 1, "value": 0.001},
        {"scenario": "small", "alternative": "a <b> & c", "readers": 2, "failure": "did not finish"},
        {"scenario": "small", "alternative": "nothing", "readers": 1, "value": 0.0},
    ]
    drawn = ElementTree.fromstring(_chart.draw(Result("compare", [Section("Title", [], records=records)])))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <b> & c", "did not finish", "1.0 ms", "1 reader", "2 readers"} <= set(texts)


def test_empty_rows_of_tables_are_blank_lines() -> None:
    assert table(["a", "b"], [["x", "1"], [], ["y", "22"]]) == "a   b\n-----\nx   1\n\ny  22"
