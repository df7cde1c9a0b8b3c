"""The operations guide has every line that the library logs, and none that it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks

GUIDE = ROOT / "docs" / "operations.md"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGERS = {"logger", "_logger"}
# A placeholder of a template: anything, also nothing.
_PLACEHOLDER = re.compile(r"%(?:\.\d+)?[a-z]")


@dataclass(frozen=True)
class Line:
    """A line that may be logged.

    Attributes:
        where: File and line.
        levels: At which it may be.
        template: What the code says.
        pattern: What matches it.
    """

    where: str
    levels: frozenset[str]
    template: str
    pattern: str

    def matches(self, text: str) -> bool:
        return re.fullmatch(self.pattern, text, re.DOTALL) is not None


def lines_of(path: Path) -> Iterator[Line]:
    """What one file logs."""
    tree = ast.parse(path.read_text())
    name = str(path.relative_to(ROOT))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _lines_of_function(function, name)


def _lines_of_function(function: ast.AST, path: str) -> Iterator[Line]:
    # `log = logger.warning if ... else logger.debug` has one line at two levels.
    aliases = {
        target.id: levels
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and (levels := _levels_in(node.value)) and not isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        where = f"{path}:{node.lineno}"
        levels = aliases.get(node.func.id) if isinstance(node.func, ast.Name) else _level_of(node.func)
        if levels:
            template = ast.literal_eval(node.args[0])
            yield Line(where, frozenset(levels), template, ".*".join(map(re.escape, _PLACEHOLDER.split(template))))
        elif ast.unparse(node.func) == "warnings.warn":
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
            pattern = "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)
            yield Line(where, frozenset({ast.unparse(node.args[1])}), ast.unparse(node.args[0]), pattern)


def _level_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in LOGGERS:
        return {"ERROR" if node.attr == "exception" else node.attr.upper()} if node.attr in LEVELS else set()
    return set()


def _levels_in(node: ast.AST) -> set[str]:
    return {level for inner in ast.walk(node) for level in _level_of(inner)}


SOURCES = sorted((ROOT / "aioarena").rglob("*.py"))
LINES = sorted({line for path in SOURCES for line in lines_of(path)}, key=lambda line: line.where)


def guided() -> list[tuple[str, str]]:
    """Level and text of the lines in the guide. What does not begin with a level goes on with the line before."""
    found: list[tuple[str, str]] = []
    for block in blocks(GUIDE):
        for line in block.text.splitlines() if block.language == "text" else ():
            level, _, text = line.partition(" ")
            if level.isupper() or level == "ResourceWarning":
                found.append((level, text))
            else:
                found[-1] = found[-1][0], f"{found[-1][1]}\n{line}"
    return found


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.where)
def test_guide_has_the_line(line: Line) -> None:
    """With its level, and what to do."""
    found = [level for level, text in guided() if line.matches(text) and level in line.levels]
    assert found, f"docs/operations.md does not explain {sorted(line.levels)} {line.template!r} of {line.where}"


@pytest.mark.parametrize(("level", "text"), guided(), ids=range(len(guided())))
def test_line_of_the_guide_is_logged(level: str, text: str) -> None:
    """By one place, or by places that say the same."""
    assert len({line.pattern for line in LINES if line.matches(text) and level in line.levels}) == 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_loggers_are_seen(path: Path) -> None:
    """Whatever logs does so in a way that the tests above find."""
    text = path.read_text()
    names = set(re.findall(r"(\S+) = logging\.getLogger\(\"aioarena\"\)", text))
    assert names <= LOGGERS
    assert text.count("logging.getLogger(") == len(names) + text.count('logging.getLogger("vllm")')
    used = re.findall(r"\b_?logger\.(?:log|" + "|".join(LEVELS) + r")\b", text)
    assert len(used) == sum(len(line.levels) for line in lines_of(path) if line.levels & {each.upper() for each in LEVELS})
    assert not re.search(r"\blogging\.(?:log|" + "|".join(LEVELS) + r")\(", text)


def test_there_are_lines() -> None:
    assert len(LINES) > 25
