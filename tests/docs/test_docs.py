"""Every code block of README and docs/ runs, and every command is one that there is."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from aioarena import cli
from tests.docs.pages import PAGES, ROOT, Block, Program, blocks, commands, programs, prose, unused_files
from tests.docs.running import _alike, run

BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [program for page in PAGES for program in programs(page)]
LANGUAGES = {"", "python", "console", "sh", "bash", "text", "json", "yaml", "toml", "ini"}

# Other projects' programs, whose arguments are theirs to check.
OTHERS = {"cd", "cat", "curl", "docker", "git", "kubectl", "ls", "numactl", "sysctl", "ulimit", "vllm", "echo", "."}


def where(thing: Block | Program) -> str:
    return thing.where


@pytest.mark.multiprocess
@pytest.mark.parametrize("program", PROGRAMS, ids=where)
def test_program_runs_and_prints_what_the_page_says(program: Program, tmp_path: Path) -> None:
    run(program, tmp_path)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=where)
def test_python_compiles(block: Block) -> None:
    """Those that cannot run here, too; they say why."""
    compile(block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert block.marker != "not run: "


def test_blocks_are_of_known_languages() -> None:
    """A typing error in a fence would take its block out of these tests."""
    assert {block.language for block in BLOCKS} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_is_seen(page: Path) -> None:
    assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) == 2 * len(blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_is_run_or_imported(page: Path) -> None:
    assert unused_files(page) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To files that are there; mkdocs looks at those between pages, and at what is behind a #."""
    targets = re.findall(r"\]\(([^)#\s]+)", prose(page))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


# Commands -----------------------------------------------------------------------------------------------------------


def lines_of(block: Block) -> list[str]:
    """The commands of a block."""
    if block.language == "console":
        return [command for command, _ in commands(block)]
    text = block.text.replace("\\\n", "")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def scripts() -> list[Block]:
    """Blocks of commands; those without a language are commands if they begin with one."""
    begins = re.compile(r"(python|pip|pytest|ruff|mypy|mkdocs|aioarena|tests/\S+)(?: |$)", re.MULTILINE)
    return [
        block
        for block in BLOCKS
        if block.language in ("console", "sh", "bash") or (not block.language and begins.match(block.text.lstrip()))
    ]


@pytest.mark.parametrize("block", scripts(), ids=where)
def test_commands_are_what_there_is(block: Block) -> None:
    lines = lines_of(block)
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True, capture_output=True, timeout=20)
    files = {other.title for other in BLOCKS if other.page == block.page and other.title}
    for line in lines:
        for command in re.split(r" && | \| |; ", line):
            problem = complaint(shlex.split(command, comments=True), files)
            assert problem is None, f"{block.where}: {command}: {problem}"


def complaint(words: list[str], files: set[str]) -> str | None:
    """What is wrong with a command."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case [] | [("ruff" | "mypy" | "uv"), *_]:
            return None
        case ["python", "-m", "aioarena", *arguments] | ["aioarena", *arguments]:
            return _refused_by_the_command_line(arguments)
        case ["python", "-m", ("pip" | "venv" | "http.server"), *arguments] | ["pip", *arguments]:
            return _unknown_extra(arguments)
        case ["python", "-m", "pytest", *arguments] | ["pytest", *arguments]:
            return _missing([word for word in arguments if not word.startswith("-")])
        case ["mkdocs", ("build" | "serve"), *_]:
            return None if (ROOT / "mkdocs.yml").exists() else "there is no mkdocs.yml"
        case ["python", name, *_]:
            return None if name in files else _missing([name])
        case [name, *_] if name in OTHERS:
            return None
        case [name, *_]:
            return _missing([name])


def _refused_by_the_command_line(arguments: list[str]) -> str | None:
    try:
        cli._parser().parse_args(arguments)
    except SystemExit as end:
        return "the command line refuses it" if end.code else None
    return None


def _unknown_extra(arguments: list[str]) -> str | None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in arguments:
        for extra in re.findall(r"(?<=[\[,])\w+(?=[\],])", word):
            if extra not in known:
                return f"there is no extra {extra!r}"
    return None


def _missing(names: list[str]) -> str | None:
    gone = [name for name in names if not (ROOT / name).exists()]
    return f"there is no {gone[0]}" if gone else None


# What the tests rely on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "good"),
    [
        ("python -m aioarena ps --json", True),
        ("aioarena bench small --quick", True),
        ("aioarena --help", True),
        ("aioarena sp", False),
        ("python -m pip install '.[test,lint]'", True),
        ("pip install '.[tset]'", False),
        ("pip install 'aioarena[bench]'", True),
        ("pytest tests/core -k ring", False),
        ("pytest tests/core", True),
        ("python examples/quickstart.py", True),
        ("python examples/slowstart.py", False),
        ("python mine.py", True),
        ("A=1 docker run --shm-size 2g image", True),
        ("tests/nothing.sh", False),
    ],
)
def test_complaints(command: str, good: bool) -> None:
    assert (complaint(shlex.split(command), {"mine.py"}) is None) == good


@pytest.mark.parametrize(
    ("printed", "expected", "alike"),
    [
        (["a", "b"], ["b", "a"], True),
        (["a", "b"], ["a"], False),
        (["a"], ["a", "a"], False),
        (["pid 7", "pid x"], ["pid ...", "pid x"], True),
        (["it took 3 ms."], ["it took ... ms."], True),
        (["it took 3 ms"], ["it took ... ms."], False),
    ],
)
def test_printed_lines_are_compared_in_any_order(printed: list[str], expected: list[str], alike: bool) -> None:
    assert _alike(printed, expected) == alike


def test_a_program_that_warns_or_fails_is_found(tmp_path: Path) -> None:
    for text in ("import sys; sys.exit(1)", "import warnings; warnings.warn('old')", "print('else')"):
        with pytest.raises(AssertionError):
            run(Program("here", "program.py", {"program.py": text}, prints=["this"]), tmp_path)
