"""The core stays what it is: no loop, no thread, no socket, no clock, no torch."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import aioarena._core

CORE = Path(aioarena._core.__file__).parent
MODULES = sorted(CORE.glob("*.py"))
# As aioarena/_core/__init__.py lists them; each may import those before it.
DOWNWARDS = ["layout", "words", "ring", "spans", "arena", "record", "sender", "receiver", "ahead"]

# Parts of the standard library that wait, start something, or tell the time.
REFUSED = {
    "asyncio", "concurrent", "datetime", "mmap", "multiprocessing", "os", "queue", "sched", "select", "selectors",
    "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "time",
}  # fmt: skip
ALLOWED = {"words": {"threading"}}


def imported(source: str) -> list[str]:
    """Full names of the modules that a source imports, anywhere in it, relative ones with their dots."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from aioarena._core import words` imports a module too.
            deeper = module == "aioarena._core"
            names += [f"{module}.{alias.name}" for alias in node.names] if deeper else [module]
    return names


def forbidden(module: str, source: str) -> list[str]:
    """What a module of the core imports and should not."""
    above = DOWNWARDS[DOWNWARDS.index(module) :] if module in DOWNWARDS else DOWNWARDS
    found = []
    for name in imported(source):
        top = name.partition(".")[0]
        if name == "aioarena.exceptions":
            continue
        if name.startswith("aioarena._core."):
            if name.split(".")[2] not in above and name.count(".") == 2:
                continue
        elif top in sys.stdlib_module_names and (top not in REFUSED or top in ALLOWED.get(module, ())):
            continue
        found.append(name)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_core_imports_only_what_computes(path: Path) -> None:
    """The standard library without what waits, the exceptions, and modules of the core further down."""
    assert forbidden(path.stem, path.read_text()) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_core_does_not_await(path: Path) -> None:
    """There is not one coroutine in it."""
    waits = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, waits)]


def test_exceptions_import_nothing_of_ours() -> None:
    """Everything may import them, so they import the standard library only."""
    source = (CORE.parent / "exceptions.py").read_text()
    assert {name.partition(".")[0] for name in imported(source)} <= sys.stdlib_module_names


def test_all_modules_of_the_core_are_in_the_list() -> None:
    """A new module gets its place in the order."""
    assert {path.stem for path in MODULES} == {*DOWNWARDS, "__init__"}
    assert [line.split()[0] for line in (aioarena._core.__doc__ or "").splitlines() if ".py  " in line] == [
        f"{module}.py" for module in DOWNWARDS
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ring", "import torch"),
        ("ring", "import numpy as np"),
        ("ring", "from zmq.asyncio import Context"),
        ("ring", "import asyncio"),
        ("ring", "def f():\n    from asyncio import sleep"),
        ("ring", "import threading"),
        ("words", "import time"),
        ("ring", "from aioarena import Sender"),
        ("ring", "from aioarena._platform.memory import Segment"),
        ("ring", "from aioarena._core import sender"),
        ("ring", "from aioarena._core.arena import Arena"),
        ("ring", "from . import layout"),
        ("ring", "from ..sender import Sender"),
    ],
)
def test_what_does_not_belong_is_found(module: str, source: str) -> None:
    """The check itself: each of these is refused."""
    assert forbidden(module, source) == imported(source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("words", "import threading"),
        ("ring", "from collections.abc import Callable"),
        ("ring", "from aioarena._core import words as shared"),
        ("sender", "from aioarena._core.ring import RingWriter"),
        ("ring", "from aioarena.exceptions import InternalError"),
    ],
)
def test_what_belongs_is_not(module: str, source: str) -> None:
    """The check itself: none of these is refused."""
    assert forbidden(module, source) == []
