"""Ends have a type of message for type checkers, and lose nothing by it at run time."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import aioarena
from aioarena import blocking

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Other packages are Any here: looking into torch takes mypy ten seconds.
CONFIG = """
[mypy]
strict = true
python_version = 3.11
[mypy-torch.*,numpy.*,zmq.*]
follow_imports = skip
[mypy-aioarena.*]
follow_imports = silent
"""


@dataclass
class Step:
    number: int


def checked(source: Path, workplace: Path) -> dict[int, list[str]]:
    """What mypy says of each line: types that are revealed, codes of errors."""
    config = workplace / "mypy.ini"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", workplace / "cache", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert not done.stderr
    said: dict[int, list[str]] = {}
    for line in done.stdout.splitlines()[:-1]:
        found = re.fullmatch(r'\S+?:(\d+): (?:note: Revealed type is "(.*)"|error: .*\[([a-z-]+)\])', line)
        assert found is not None, line
        # Without the modules that the names are in.
        what = found[3] or re.sub(r"[\w.]+\.", "", found[2])
        said.setdefault(int(found[1]), []).append(what)
    return said


def expected(source: Path) -> dict[int, list[str]]:
    lines = enumerate(source.read_text().splitlines(), 1)
    return {number: [line.partition("  # ")[2]] for number, line in lines if "  # " in line}


def test_mypy_sees_the_type_of_messages(tmp_path: Path) -> None:
    """Strictly, what is sent and what is received; bare ends are ends of Any."""
    source = HERE / "ends.py"
    assert checked(source, tmp_path) == expected(source)


def test_every_method_that_takes_or_gives_messages_is_in_the_sample() -> None:
    sample = (HERE / "ends.py").read_text()
    for name in ("sender", "receiver", "blocking"):
        tree = ast.parse((ROOT / "aioarena" / f"{name}.py").read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not function.name.startswith("_"):
                signature = ast.unparse(function.args) + ast.unparse(function.returns or ast.Constant(None))
                assert not re.search(r"\b(Sent|Received)\b", signature) or f".{function.name}(" in sample


def test_py_typed_is_in_the_package() -> None:
    """Without it, type checkers take all of the above for Any."""
    assert (Path(aioarena.__file__).parent / "py.typed").exists()


async def test_parametrised_ends_work() -> None:
    sending = aioarena.Sender[Step](readers=1, arena=None)
    async with sending as sender, aioarena.Receiver[Step](sender.handle, rank=0) as receiver:
        assert type(sender) is aioarena.Sender
        assert type(receiver) is aioarena.Receiver
        await sender.send(Step(7))
        assert await receiver.recv() == Step(7)


def test_parametrised_blocking_ends_work() -> None:
    with blocking.Sender[Step](1, arena=None) as sender, blocking.Receiver[Step](sender.handle, 0) as receiver:
        assert type(sender) is blocking.Sender
        assert type(receiver) is blocking.Receiver
        sender.send(Step(7))
        assert receiver.recv() == Step(7)


def test_running_needs_no_more_than_typing() -> None:
    """typing_extensions comes with torch, and may come no more one day."""
    code = "import sys; sys.modules['typing_extensions'] = None; import aioarena._generic as g; print(g.Sent, g.Received)"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; {code}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("-Sent +Received\n", "")


@pytest.mark.parametrize("end", [aioarena.Sender, aioarena.Receiver, blocking.Sender, blocking.Receiver])
def test_ends_have_no_more_than_one_type(end: type) -> None:
    with pytest.raises(TypeError):
        end[int, str]  # type: ignore[index]
