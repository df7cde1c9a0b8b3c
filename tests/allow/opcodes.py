"""Pickles written by hand, as an attacker would."""

from __future__ import annotations

import pickle
from typing import Any


def text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes([len(encoded)]) + encoded


def name(module: str, qualified: str) -> bytes:
    """STACK_GLOBAL."""
    return text(module) + text(qualified) + b"\x93"


def data(value: Any) -> bytes:
    """Something plain, without the header, the frame and the end."""
    pickled = pickle.dumps(value, 5)
    start = 11 if pickled[2:3] == b"\x95" else 2
    return pickled[start:-1]


def call(function: bytes, *args: bytes) -> bytes:
    """REDUCE."""
    return function + b"(" + b"".join(args) + b"tR"


def build(target: bytes, state: bytes) -> bytes:
    """BUILD."""
    return target + state + b"b"


def program(*steps: bytes) -> bytes:
    """With PROTO and STOP."""
    return b"\x80\x05" + b"".join(steps) + b"."
