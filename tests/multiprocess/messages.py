"""Numbered messages for every path, and the check that one arrived as it was sent."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch

import aioarena

# Small, so that a few messages go round it: 1 MiB of slots, and a ring whose records hold 16 KiB at most.
ARENA = aioarena.ArenaConfig(slots=16, slot_bytes=64 << 10, min_bytes=8 << 10)
RING_BYTES = 128 << 10
CHANNEL: dict[str, Any] = {"arena": ARENA, "ring_bytes": RING_BYTES}

KINDS = ("small", "inline", "arena", "frame", "packed", "pickled", "mixed")


def random_tensor(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8).copy())


def payload(kind: str, number: int) -> Any:
    """What a message of a kind carries; with the sizes above, each kind takes the path it is named for."""
    match kind:
        case "small":
            return {"step": number, "requests": [number] * 20}
        case "inline":
            return random_tensor(3000, number)
        case "arena":
            return random_tensor(100_000, number)
        case "frame":
            return random_tensor(ARENA.capacity + 4096, number)
        case "packed":
            return [random_tensor(1000, number + i) for i in range(40)]
        case "pickled":
            return random.Random(number).randbytes(40_000).hex()
        case "mixed":
            return [payload(one, number) for one in ("small", "inline", "arena")] + [np.arange(20_000) + number]
    raise ValueError(kind)


def digest(part: Any) -> str:
    if isinstance(part, torch.Tensor):
        part = part.numpy()
    if isinstance(part, np.ndarray):
        return hashlib.blake2b(part.tobytes()).hexdigest()
    if isinstance(part, list):
        return str([digest(one) for one in part])
    return hashlib.blake2b(pickle.dumps(part)).hexdigest()


def message(kind: str, number: int) -> dict[str, Any]:
    part = payload(kind, number)
    return {"number": number, "kind": kind, "part": part, "digest": digest(part)}


def verify(received: dict[str, Any]) -> int:
    """The number of a message, which is as it was when it was sent."""
    found = digest(received["part"])
    assert found == received["digest"], f"message {received['number']} ({received['kind']}) arrived changed"
    return received["number"]


def numbered(count: int, first: int = 0, kinds: tuple[str, ...] = KINDS) -> list[tuple[str, int]]:
    """Kinds and numbers of a run of messages that takes the paths by turns."""
    return [(kinds[number % len(kinds)], number) for number in range(first, first + count)]
