"""Fences, and which of them are in use where."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from types import ModuleType
from typing import Any

import pytest

from aioarena._core import words


def load_copy(monkeypatch: pytest.MonkeyPatch, *, machine: str = "x86_64", libatomic: Any = None) -> ModuleType:
    """The module as it would be on another machine: ``libatomic`` is the error or object that loading gives."""
    asked = []

    def load(name: str) -> Any:
        asked.append(name)
        if isinstance(libatomic, Exception):
            raise libatomic
        return libatomic

    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: machine)
        if libatomic is not None:
            patch.setattr(ctypes, "PyDLL", load)
        spec = importlib.util.spec_from_file_location("words_copy", words.__file__)
        assert spec is not None and spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
    assert asked == ([] if libatomic is None else ["libatomic.so.1"])
    return copy


class FakeLibrary:
    """A libatomic that notes with which memory order it is called."""

    def __init__(self) -> None:
        self.calls: list[int] = []

        def atomic_thread_fence(memory_order: int) -> None:
            self.calls.append(memory_order)

        self.atomic_thread_fence = atomic_thread_fence


def test_fence_is_sequentially_consistent_where_libatomic_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence is atomic_thread_fence with memory_order_seq_cst, which is 5."""
    library = FakeLibrary()
    copy = load_copy(monkeypatch, libatomic=library)
    assert copy.fence_kind() == "libatomic"
    copy.fence()
    assert library.calls == [5]


def test_the_result_of_the_c_function_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a ``void f(int)``."""
    library = FakeLibrary()
    load_copy(monkeypatch, libatomic=library)
    function: Any = library.atomic_thread_fence
    assert function.restype is None


@pytest.mark.parametrize("problem", [OSError("not installed"), AttributeError("too old")])
def test_fence_is_a_lock_where_libatomic_is_missing(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    """Without the library, or the function in it, a lock is taken and released; and it says so."""
    copy = load_copy(monkeypatch, libatomic=problem)
    assert copy.fence_kind() == "lock"
    used = []

    class Lock:
        def acquire(self) -> None:
            used.append("acquire")

        def release(self) -> None:
            used.append("release")

    monkeypatch.setattr(copy.threading, "Lock", Lock)
    copy.fence()
    assert used == ["acquire", "release"]


def test_lock_fence_may_interrupt_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that fences in the middle of a fence finds a lock that nobody holds."""
    held: set[int] = set()
    locks: list[object] = []

    class Lock:
        def acquire(self) -> None:
            assert id(self) not in held, "deadlock"
            held.add(id(self))
            locks.append(self)
            if len(locks) == 1:
                words._lock_fence()

        def release(self) -> None:
            held.remove(id(self))

    monkeypatch.setattr(words.threading, "Lock", Lock)
    words._lock_fence()
    assert len(locks) == 2 and not held


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_order_is_free_on_x86(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Plain moves keep the order there, so that ``order`` fences nothing."""
    library = FakeLibrary()
    copy = load_copy(monkeypatch, machine=machine, libatomic=library)
    copy.order()
    assert library.calls == []


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_order_is_a_fence_on_other_machines(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Where plain moves may be reordered, ``order`` is the whole fence."""
    library = FakeLibrary()
    copy = load_copy(monkeypatch, machine=machine, libatomic=library)
    copy.order()
    assert library.calls == [5]


def test_the_fence_of_this_machine_works() -> None:
    """Whatever kind it is, it can be called, and keeps nothing."""
    assert words.fence_kind() in ("libatomic", "lock")
    assert words.fence() is None  # type: ignore[func-returns-value]
    assert words.order() is None  # type: ignore[func-returns-value]
