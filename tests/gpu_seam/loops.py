"""Tests of coroutines, on both event loops, failing for what a loop would merely log."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run_on(kind: str, test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_FACTORIES[kind]) as runner:
        runner.run(_strictly(test))


async def _strictly(test: Coroutine[Any, Any, None]) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    await test
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks are left: {left}"
    assert not logged, f"the loop logged: {logged}"


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine, once with asyncio's loop and once with uvloop's."""

    @functools.wraps(test)
    def run(loop_kind: str, **fixtures: Any) -> None:
        run_on(loop_kind, test(**fixtures))

    parameters = list(inspect.signature(test).parameters.values())
    kind = inspect.Parameter("loop_kind", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([kind, *parameters])  # type: ignore[attr-defined]
    del run.__wrapped__
    return pytest.mark.parametrize("loop_kind", list(_FACTORIES))(run)


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Let the loop run until something has come about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


async def a_while(seconds: float = 0.05) -> None:
    """Long enough for something to happen that must not: ten times the longest pause between polls."""
    await asyncio.sleep(seconds)
