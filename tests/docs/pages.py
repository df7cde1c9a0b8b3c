"""The code blocks of README and docs/, and how each of them is to be run.

* ``python`` with ``title="NAME.py"`` is a file, which a ``console`` block of the page runs or another file imports.
* ``python`` after ``<!-- docs: in CONTEXT -->`` is a part of a program: it takes the place of the line ``# block`` in
  ``contexts/CONTEXT.py``. Several blocks make up one program with ``<!-- docs: in CONTEXT, 1 -->`` and so on.
* ``python`` after ``<!-- docs: not run: REASON -->`` only has to compile.
* Any other ``python`` block is a program.
* ``console`` has lines that begin with ``$`` and what they print; ``sh`` is a script.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTEXTS = Path(__file__).parent / "contexts"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"<!-- docs: (.*?) -->\s*\Z")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: Where it is.
        line: Of its fence.
        language: What the fence says; may be empty.
        title: Name of the file that it is, or None.
        marker: What the comment before it says; may be empty.
        text: What is in it.
    """

    page: Path
    line: int
    language: str
    title: str | None
    marker: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass
class Program:
    """Something to run.

    Attributes:
        where: Of the block that asks for it.
        name: Of the file to run.
        files: All files that have to be there.
        prints: What it has to print, in any order; ``...`` stands for anything. None if that is not said.
    """

    where: str
    name: str
    files: dict[str, str] = field(default_factory=dict)
    prints: list[str] | None = None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        language, _, options = fence[3].strip().partition(" ")
        title, marker = _TITLE.search(options), _MARKER.search(text[: fence.start()])
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, fence.start()) + 1,
                language=language,
                title=title[1] if title else None,
                marker=marker[1] if marker else "",
                text=textwrap.dedent(fence[4]),
            )
        )
    return found


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text())


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a ``console`` block, each with the lines it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = found[-1][0][:-1] + line, []
        elif found:
            found[-1][1].append(line)
        else:
            raise ValueError(f"{block.where}: begins with what no command prints")
    return found


def programs(page: Path) -> list[Program]:
    """Everything of a page that can be run."""
    found: list[Program] = []
    files: dict[str, str] = {}
    parts: dict[str, Program] = {}
    for block in blocks(page):
        if block.language == "console":
            for command, printed in commands(block):
                program, _, name = command.partition(" ")
                if program == "python" and name in files:
                    found.append(Program(block.where, name, dict(files), printed))
        if block.language != "python" or block.marker.startswith("not run: "):
            continue
        if block.title is not None:
            files[block.title] = block.text
        elif block.marker.startswith("in "):
            context, _, number = block.marker.removeprefix("in ").partition(", ")
            if not number:
                source = (CONTEXTS / f"{context}.py").read_text()
                found.append(Program(block.where, "program.py", {"program.py": _filled(source, "block", block)}))
                continue
            if context not in parts:
                source = (CONTEXTS / f"{context}.py").read_text()
                parts[context] = Program(block.where, "program.py", {"program.py": source})
                found.append(parts[context])
            part = parts[context]
            part.files["program.py"] = _filled(part.files["program.py"], f"block {number}", block)
        elif not block.marker:
            found.append(Program(block.where, "program.py", {"program.py": block.text}))
        else:
            raise ValueError(f"{block.where}: what does {block.marker!r} mean?")
    return found


def _filled(source: str, place: str, block: Block) -> str:
    """A context with a block in its place."""
    found = re.search(rf"^( *)# {place}$", source, re.MULTILINE)
    if found is None:
        raise ValueError(f"{block.where}: its context has no place for it")
    return source[: found.start()] + textwrap.indent(block.text, found[1]) + source[found.end() :]


def unused_files(page: Path) -> set[str]:
    """Names of files of a page that nothing runs and nothing imports."""
    titles = {block.title for block in blocks(page) if block.title and block.language == "python"}
    run = {program.name for program in programs(page)}
    sources = "\n".join(block.text for block in blocks(page) if block.language == "python")
    imported = {name for name in titles if re.search(rf"^(?:from|import) {name.removesuffix('.py')}\b", sources, re.M)}
    return titles - run - imported
