"""What a shell needs to complete the command line, made of its parser by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from aioarena._look.channels import LookError

SHELLS = ("bash", "zsh", "tcsh")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for a shell.

    Raises:
        LookError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise LookError(
            f"completion is made by shtab, which is not installed ({error}); pip install 'aioarena[cli]'"
        ) from None
    for action in _actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from _actions(each)
