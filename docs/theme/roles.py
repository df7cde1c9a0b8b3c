"""Docstrings name other objects as Sphinx does, ``:meth:`send```; here they become links of the reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

# What announces a literal block; Markdown knows one by its indentation.
_LITERAL = re.compile(r"^::\n", re.MULTILINE)
_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`([\w.]+)`")


class Roles(griffe.Extension):
    """Links for roles, in every docstring of the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _LITERAL.sub("", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(lambda role: _link(obj, role[1]), text)


def _link(obj: griffe.Object, name: str) -> str:
    """A link to what a name means inside an object; if it means nothing there, the build fails on the link."""
    first, dot, rest = name.partition(".")
    scope = obj if isinstance(obj, griffe.Class | griffe.Module) else obj.parent
    while scope is not None and first not in scope.members:
        scope = scope.parent
    if scope is None or first == "aioarena":
        return f"[`{name}`][{name}]"
    found = scope.members[first]
    path = found.target_path if found.is_alias else found.path  # an import means what it imports
    return f"[`{name}`][{path}{dot}{rest}]"
