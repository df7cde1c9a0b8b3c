"""The reference has everything that is public."""

from __future__ import annotations

import re
from pathlib import Path

import aioarena
from aioarena import exceptions
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


def documented(page: Path) -> set[str]:
    return set(re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE))


def test_every_public_name_is_documented() -> None:
    """Those of the package by name, exceptions and other modules as a whole."""
    names = {name for page in REFERENCE.glob("*.md") for name in documented(page)}
    assert {f"aioarena.{name}" for name in set(aioarena.__all__) - set(exceptions.__all__)} <= names
    assert {"aioarena.exceptions", "aioarena.blocking", "aioarena.engine"} <= names


def test_every_integration_is_documented() -> None:
    modules = (ROOT / "aioarena" / "integrations").glob("[!_]*.py")
    assert {f"aioarena.integrations.{path.stem}" for path in modules} == documented(REFERENCE / "integrations.md")
