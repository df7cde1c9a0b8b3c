"""Runs programs of the documentation, each in a process of its own that has torch already."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import sys
import warnings
from pathlib import Path

from tests.docs.pages import Program
from tests.multiprocess.harness import PATIENCE

# What the library says of a busy machine, which the pages do not show.
_SLOW = re.compile(r"a send has waited|is waiting for the sender")


def run(program: Program, directory: Path) -> None:
    """Run a program to its end: it fails, warns or prints anything else than it should, and this raises AssertionError."""
    for name, text in program.files.items():
        (directory / name).write_text(text)
    # Started with torch: as a python of its own each would need a second for that alone.
    process = multiprocessing.get_context("forkserver").Process(target=_main, args=(program.name, str(directory)))
    process.start()
    process.join(3 * PATIENCE)  # it may start some of its own
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
    printed = (directory / "stdout").read_text()
    complaints = (directory / "stderr").read_text()
    assert process.exitcode == 0, f"{program.where}: exit code {process.exitcode}\n{complaints}"
    said = [line for line in complaints.splitlines() if not _SLOW.search(line)]
    if program.prints is None:
        assert not said, f"{program.where}:\n{complaints}"
    else:
        # What a terminal shows: warnings in the log, too.
        seen = [*printed.splitlines(), *said]
        assert _alike(seen, program.prints), f"{program.where}: it prints\n{printed}{complaints}"


def _main(name: str, directory: str) -> None:
    os.setpgid(0, 0)
    os.chdir(directory)
    for fd, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    sys.path.insert(0, directory)
    sys.argv = [name]
    # For processes that it starts, too.
    os.environ["PYTHONWARNINGS"] = "error"
    # It makes two writes of a line, and those of other processes come between.
    os.environ.pop("PYTHONUNBUFFERED", None)
    warnings.simplefilter("error")
    # By its whole path, as multiprocessing looks for it from another directory.
    runpy.run_path(os.path.join(directory, name), run_name="__main__")


def _alike(printed: list[str], expected: list[str]) -> bool:
    """Whether these are those lines, in any order, since processes print when they come to it."""
    left = list(printed)
    # Those with dots last: they would take what others name.
    for line in sorted(expected, key=lambda line: "..." in line):
        pattern = ".*".join(map(re.escape, line.split("...")))
        found = next((candidate for candidate in left if re.fullmatch(pattern, candidate)), None)
        if found is None:
            return False
        left.remove(found)
    return not left
