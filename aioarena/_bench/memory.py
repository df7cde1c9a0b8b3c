"""`bench memory`: what the first message into untouched pages costs, and what lent memory saves.

*pages*: the same large tensor, sent again and again. The first message has to find and clear pages, at the sender for
writing and at each reader for mapping; with ``ArenaConfig(prefault=...)`` a thread has done so before.

*lent*: a tensor that was copied into the arena beside one that was made there (``Sender.empty``), and beside a small
message. Both until every reader has the tensor and has looked at its first and last element.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

import aioarena
from aioarena._bench._result import Result, Section
from aioarena._bench._text import Progress, show_seconds, show_size
from aioarena._bench._workers import Team, run

_LARGE = 200 << 20
_QUICK = 20 << 20
_LATER = 10  # messages after the first


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What the command line said.

    Attributes:
        readers: How many.
        runs: How often everything is measured.
        quick: A tenth of the bytes, to see that it works.
    """

    readers: int = 2
    runs: int = 5
    quick: bool = False


class WrongBytes(aioarena.ArenaError):
    """A reader saw something else than was sent."""


# Readers ----------------------------------------------------------------------------------------------------------


def _read(rank: int, pipe: Connection[Any, Any]) -> None:
    run(_answer(rank, pipe))


async def _answer(rank: int, pipe: Connection[Any, Any]) -> None:
    while True:
        async with aioarena.Receiver(pipe.recv(), rank) as channel:
            async for message in channel:
                seen = int(message[0]) + int(message[-1]) if isinstance(message, torch.Tensor) else message
                del message
                pipe.send((seen, time.monotonic()))


# The sender ----------------------------------------------------------------------------------------------------------


async def _send(channel: aioarena.Sender, team: Team, message: Any, expected: int) -> float:
    """Seconds until the last reader has it."""
    began = time.monotonic()
    await channel.send(message)
    answers = await team.answers()
    if any(seen != expected for seen, _ in answers):
        raise WrongBytes(f"readers saw {[seen for seen, _ in answers]}, expected {expected} of each")
    last: float = max(when for _, when in answers)
    return last - began


async def _pages(team: Team, nbytes: int, prefault: bool) -> list[float]:
    slots = 2 * -(-nbytes // (64 << 10))
    arena = aioarena.ArenaConfig(slots=slots, prefault=nbytes if prefault else 0)
    async with aioarena.Sender(len(team.workers), arena=arena) as channel:
        team.tell(channel.handle)
        await channel.wait_ready()
        while channel.statistics().prefaulted_bytes < arena.prefault:  # noqa: ASYNC110 - nothing says when it is done
            await asyncio.sleep(0.01)
        await channel.send(0)
        await team.answers()
        await asyncio.sleep(0.5 if prefault else 0)  # the readers map what is there; they do not say when they are done
        tensor = torch.full((nbytes,), 3, dtype=torch.uint8)
        return [await _send(channel, team, tensor, 6) for _ in range(1 + _LATER)]


async def _lent(team: Team, nbytes: int) -> dict[str, list[float]]:
    slots = 3 * -(-nbytes // (64 << 10))
    async with aioarena.Sender(len(team.workers), arena=aioarena.ArenaConfig(slots=slots)) as channel:
        team.tell(channel.handle)
        await channel.wait_ready()
        copied = torch.full((nbytes,), 3, dtype=torch.uint8)
        lent = (await channel.empty(nbytes, torch.uint8)).fill_(5)
        found: dict[str, list[float]] = {"small": [], "lent": [], "copied": []}
        for number in range(1 + _LATER):
            for name, message, expected in (("small", 7, 7), ("lent", lent, 10), ("copied", copied, 6)):
                seconds = await _send(channel, team, message, expected)
                if number:  # the first one warms up
                    found[name].append(seconds)
        return found


async def measure(options: MemoryOptions, progress: Progress) -> Result:
    nbytes = _QUICK if options.quick else _LARGE
    result = Result("memory", settings={"readers": options.readers, "runs": options.runs, "nbytes": nbytes})
    pages = Section(
        f"A tensor of {show_size(nbytes)} to {options.readers} readers, into untouched pages and again. Until every reader "
        f"has it;\nmedians of {options.runs} runs.",
        ["prefault", "first message", "later ones", "first / later"],
    )
    lent = Section(
        "The same tensor copied into the arena, and made there, beside a small message; medians.",
        ["message", "until every reader has it", "of a small one"],
    )
    result.sections = [pages, lent]
    first: dict[bool, list[float]] = {False: [], True: []}
    later: dict[bool, list[float]] = {False: [], True: []}
    kinds: dict[str, list[float]] = {"small": [], "lent": [], "copied": []}
    with Team(options.readers, _read) as team:
        for number in range(options.runs):
            progress.say("measuring", f"run {number + 1} of {options.runs}")
            for prefault in (False, True):  # by turns, so that a slow moment of the machine meets both
                seconds = await _pages(team, nbytes, prefault)
                first[prefault].append(seconds[0])
                later[prefault].append(median(seconds[1:]))
            for kind, samples in (await _lent(team, nbytes)).items():
                kinds[kind].append(median(samples))
    for prefault in (False, True):
        one, rest = median(first[prefault]), median(later[prefault])
        pages.rows.append(["yes" if prefault else "no", show_seconds(one), show_seconds(rest), f"{one / rest:.1f}"])
        pages.records.append({"prefault": prefault, "first": first[prefault], "later": later[prefault]})
    small = median(kinds["small"])
    for kind, samples in kinds.items():
        lent.rows.append([kind, show_seconds(median(samples)), f"{median(samples) / small:.1f}"])
        lent.records.append({"message": kind, "seconds": samples})
    return result
