"""`python -m aioarena demo`: a real picture goes to real worker processes, with the arena and without it.

The sender does what an inference engine does: small steps, and now and then one that carries the preprocessed picture.
The workers do what tensor-parallel workers do: receive, read all of it, compute on their share, answer. Times are of
CLOCK_MONOTONIC, which all processes of a machine share, so a worker's stamp minus the sender's is a latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

import aioarena
from aioarena import _picture
from aioarena._bench._stall import StallMeter
from aioarena._bench._text import Progress, show_bytes, show_machine, show_seconds, show_size, table
from aioarena._bench._workers import Team, run
from aioarena._types import DEFAULT_SLOT_BYTES, DEFAULT_SLOTS

# Small steps between two that carry the picture.
_SMALL_STEPS = 4

# Words of a block of which the digest takes one sum.
_DIGEST_BLOCK = 8192

# Columns of the weight that every worker has, and the most patches it multiplies with it: some milliseconds of work,
# also on a CPU that is slow with bf16.
_FEATURES = 64
_MOST_PATCHES = 2048

# Up to so many readers, the account has a line for each.
_READERS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line said."""

    image: Path | None = None
    readers: int = 4
    size: int = 4096
    pictures: int = 6
    loop: str = "asyncio"


def digest(tensor: torch.Tensor) -> int:
    """A checksum at the speed of memory: the sum of each 64 KiB as integers, then the CRC of the sums.

    Any changed byte changes its sum, and any two blocks that trade places change the CRC.
    """
    words = tensor.flatten().view(torch.uint8).view(torch.int64)
    whole = len(words) // _DIGEST_BLOCK * _DIGEST_BLOCK
    sums = [words[:whole].view(-1, _DIGEST_BLOCK).sum(1), words[whole:].sum().view(1)]
    return zlib.crc32(torch.cat(sums).numpy().tobytes())


# Workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer to one step. Moments are of ``time.monotonic()``.

    Attributes:
        received: When ``recv`` had returned: the tensor can be used.
        read: When every byte of it had been read for the digest.
        computed: When the worker was done with its share.
        agrees: Whether the digest was the sender's.
        cpu: CPU seconds of the worker since it attached.
    """

    received: float
    read: float
    computed: float
    agrees: bool
    cpu: float


def _work(rank: int, pipe: Connection[Any, Any], loop: str) -> None:
    """A worker: attaches to one channel after the other."""
    pipe.send("ready")  # imports are done
    while True:
        handle = pipe.recv()
        run(_follow(handle, rank, pipe), loop)


async def _follow(handle: aioarena.Handle, rank: int, pipe: Connection[Any, Any]) -> None:
    columns = 3 * _picture.TEMPORAL * _picture.PATCH**2
    weight = torch.randn(columns, _FEATURES, generator=torch.Generator().manual_seed(rank))
    cpu = time.process_time()
    async with aioarena.Receiver(handle, rank) as channel:
        with contextlib.suppress(aioarena.SenderLostError):  # then the pipe has ended too
            async for step in channel:
                received = read = time.monotonic()
                agrees = True
                if "pixel_values" in step:
                    patches = step["pixel_values"]
                    agrees = digest(patches) == step["digest"]
                    read = time.monotonic()
                    share = patches.tensor_split(handle.readers)[rank][:_MOST_PATCHES]
                    torch.relu(share.float() @ weight)
                    # Dropped before the next step is awaited, so that the sender can use the memory again.
                    del patches, share
                del step
                pipe.send(Answer(received, read, time.monotonic(), agrees, time.process_time() - cpu))


# The sender ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as it went. Seconds count from the call of ``send``.

    Attributes:
        picture: Whether it carried the picture.
        sent: Until ``send`` returned.
        usable: Until each worker had it.
        read: Until each worker had read all of it.
        send_stall: Longest delay of the sender's loop while it sent.
        stall: The same, until all workers had answered.
        failures: Ranks whose digest was another.
    """

    picture: bool
    sent: float
    usable: list[float]
    read: list[float]
    send_stall: float
    stall: float
    failures: list[int]


@dataclass(frozen=True, slots=True)
class Round:
    """All steps over one channel.

    Attributes:
        steps: In order.
        statistics: Of the sender, after the last step.
        cpu: CPU seconds of the sender, then of each worker.
    """

    steps: list[Step]
    statistics: aioarena.SenderStatistics
    cpu: list[float]

    @property
    def pictures(self) -> list[Step]:
        return [step for step in self.steps if step.picture]

    @property
    def small(self) -> list[Step]:
        return [step for step in self.steps if not step.picture]


def _steps(pixel_values: torch.Tensor, grid: tuple[int, int, int], pictures: int) -> list[dict[str, Any]]:
    """The messages of a round: each picture between small steps. The digest is of the tensor as it is sent."""
    expected = digest(pixel_values)
    steps: list[dict[str, Any]] = []
    for _ in range(pictures):
        for small in range(_SMALL_STEPS + 1):
            step = {"step": len(steps), "request": 17, "token_ids": list(range(1000, 1032)), "position": 32 * len(steps)}
            if small == _SMALL_STEPS // 2:
                step |= {"pixel_values": pixel_values, "grid_thw": grid, "digest": expected}
            steps.append(step)
    return steps


async def _send_all(
    steps: Sequence[dict[str, Any]],
    team: Team,
    arena: aioarena.ArenaConfig | None,
    say: Callable[[str], None],
) -> Round:
    """Send the steps over one channel, each after the answers to the one before, as an engine does."""
    went = []
    async with aioarena.Sender(len(team.workers), name="demo", arena=arena, linger=1.0) as channel:
        team.tell(channel.handle)
        await channel.wait_ready()
        cpu = time.process_time()
        answers: list[Answer] = []
        for step in steps:
            async with StallMeter() as stalls:
                began = time.monotonic()
                await channel.send(step)
                sent = time.monotonic()
                answers = await team.answers()
            went.append(
                Step(
                    picture="pixel_values" in step,
                    sent=sent - began,
                    usable=[answer.received - began for answer in answers],
                    read=[answer.read - began for answer in answers],
                    send_stall=stalls.worst(began, sent),
                    stall=stalls.worst(),
                    failures=[rank for rank, answer in enumerate(answers) if not answer.agrees],
                )
            )
            say(f"step {len(went)} of {len(steps)}")
        return Round(went, channel.statistics(), [time.process_time() - cpu, *[answer.cpu for answer in answers]])


async def _idle_stall() -> float:
    """How late a loop without work is on this machine: what no library can be better than."""
    async with StallMeter() as stalls:
        await asyncio.sleep(0.3)
    return stalls.worst()


def _arena_for(nbytes: int) -> aioarena.ArenaConfig:
    """The default arena, or a larger one if the picture does not fit into half of it."""
    return aioarena.ArenaConfig(slots=max(DEFAULT_SLOTS, 2 * -(-nbytes // DEFAULT_SLOT_BYTES)))


class _Stop(Exception):
    """Ends the preprocessing thread."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    source: str
    pixel_values: torch.Tensor
    grid: tuple[int, int, int]


async def _prepare(options: DemoOptions, progress: Progress) -> _Prepared:
    """Picture to patches, in a thread; a cancellation ends the thread soon."""
    stopped = threading.Event()
    loop = asyncio.get_running_loop()

    def tell_as(what: str) -> _picture.Tell:
        def tell(done: float) -> None:
            if stopped.is_set():
                raise _Stop
            loop.call_soon_threadsafe(progress.say, what, f"{done:.0%}")

        return tell

    def work() -> _Prepared:
        size = max(_picture.GRAIN, options.size // _picture.GRAIN * _picture.GRAIN)
        if options.image is None:
            pixels = _picture.make(size, tell_as("making a picture"))
            source = f"made here (waves from three sources), {size} x {size}"
        else:
            pixels = _picture.load(options.image, tell_as(f"reading {options.image}"))
            height, width = pixels.shape[:2]
            source = f"{options.image}, {width} x {height}"
            fitted = _picture.fitting(width, height, size)
            if fitted != (width, height):
                tell_as("resizing")(0)
                pixels = _picture.resize(pixels, *fitted)
                source += f", resized to {fitted[0]} x {fitted[1]}"
        patches = _picture.to_patches(pixels, tell_as("cutting it into patches"))
        return _Prepared(source, patches, (1, pixels.shape[0] // _picture.PATCH, pixels.shape[1] // _picture.PATCH))

    try:
        return await asyncio.to_thread(work)
    finally:
        stopped.set()


async def _demo(options: DemoOptions, progress: Progress, team: Team) -> int:
    progress.say(f"starting {options.readers} workers")
    prepared = await _prepare(options, progress)
    progress.say("waiting for the workers to import torch")
    await team.answers()
    # One core is for the copies, as in the workers; and torch's own threads would spin while the steps are timed.
    torch.set_num_threads(1)
    idle = await _idle_stall()
    steps = _steps(prepared.pixel_values, prepared.grid, options.pictures)
    arena = _arena_for(prepared.pixel_values.nbytes)
    rounds = []
    for what, config in (("with the arena", arena), ("without the arena", None)):
        say = f"sending {what}"
        progress.say(say)
        rounds.append(await _send_all(steps, team, config, lambda detail, say=say: progress.say(say, detail)))  # type: ignore[misc]
    progress.clear()
    print("\n".join(_account(options, prepared, arena, rounds[0], rounds[1], idle)))
    return 1 if any(step.failures for done in rounds for step in done.steps) else 0


def demo(options: DemoOptions) -> int:
    """Run it; the exit code is 1 if a worker read something else than was sent."""
    if options.image is not None and not options.image.exists():
        raise _picture.PictureError(f"{options.image} does not exist")  # before any process is started
    progress = Progress()
    try:
        with Team(options.readers, _work, options.loop) as team:
            return int(run(_demo(options, progress, team), options.loop))
    finally:
        progress.clear()


# The account ---------------------------------------------------------------------------------------------------------


def _paragraph(label: str, text: str) -> str:
    """A label and wrapped text beside it."""
    indent = " " * 12
    return textwrap.fill(text, 110, initial_indent=f"{label:<12}", subsequent_indent=indent, break_on_hyphens=False)


def _account(
    options: DemoOptions, prepared: _Prepared, arena: aioarena.ArenaConfig, on: Round, off: Round, idle: float
) -> list[str]:
    nbytes, patch = prepared.pixel_values.nbytes, _picture.PATCH
    shape = " x ".join(map(str, prepared.pixel_values.shape))
    lines = [
        f"One sender and {options.readers} readers, each a process of its own, on {options.loop}.",
        show_machine(),
        "",
        _paragraph("Picture", prepared.source),
        _paragraph(
            "Tensor",
            f"pixel_values, {shape} bf16, {show_bytes(nbytes)}: patches of {patch} x {patch}, twice in time, "
            "normalised with CLIP's mean and deviation, on the CPU",
        ),
        _paragraph(
            "Steps",
            f"{len(on.steps)} each way: {len(on.pictures)} carry the tensor, {len(on.small)} are about 200 bytes. "
            "The next is sent when all readers have answered. A reader checks a digest over every byte and multiplies "
            "its share of the patches with a weight.",
        ),
        _paragraph(
            "Arena",
            f"{arena.slots} slots of {show_size(arena.slot_bytes)}, {show_size(arena.capacity)}; "
            "a slot takes memory when it is first written",
        ),
        "",
        table(["", "arena on", "arena off", "off / on"], _rows(on, off, nbytes)),
        "",
        *_words(on, off, nbytes, idle),
    ]
    failures = [(name, step) for name, done in (("on", on), ("off", off)) for step in done.steps if step.failures]
    if failures:
        lines.append("")
        lines += [
            f"FAILED: with the arena {name}, readers {step.failures} read other bytes than were sent"
            for name, step in failures
        ]
    return lines


def _copies(done: Round, nbytes: int) -> tuple[int, str]:
    """How often the bytes of one picture were copied in all processes together, and which way they took."""
    pictures, readers = len(done.pictures), len(done.statistics.readers)
    if done.statistics.arena_bytes >= pictures * nbytes:
        return 1, "arena"
    if done.statistics.frame_bytes >= pictures * nbytes:
        # Into memory of the frame; then into the socket and out of it, for each reader.
        return 1 + 2 * readers, "frame"
    # Out of the tensor, into the ring; out of the ring by each reader.
    return 2 + readers, "ring"


def _rows(on: Round, off: Round, nbytes: int) -> list[list[str]]:
    rows: list[list[str]] = []

    def add(name: str, value: Callable[[Round], float], show: Callable[[float], str] = show_seconds) -> None:
        first, second = value(on), value(off)
        ratio = f"{second / first:.1f}" if first > 0 else ""
        rows.append([name, show(first), show(second), ratio])

    def add_pictures(title: str, of: Callable[[Round], list[Step]]) -> None:
        readers = len(on.statistics.readers)
        rows.append([title, "", "", ""])
        add("  send returned after", lambda done: median(step.sent for step in of(done)))
        if readers <= _READERS_SHOWN:
            for rank in range(readers):
                add(f"  usable at reader {rank} after", lambda done, rank=rank: median(s.usable[rank] for s in of(done)))  # type: ignore[misc]
        else:
            add("  usable at the first reader after", lambda done: median(min(step.usable) for step in of(done)))
            add("  usable at the last reader after", lambda done: median(max(step.usable) for step in of(done)))
        add("  all bytes read at the last after", lambda done: median(max(step.read) for step in of(done)))

    add_pictures("First picture", lambda done: done.pictures[:1])
    if len(on.pictures) > 1:
        add_pictures(f"Later pictures (median of {len(on.pictures) - 1})", lambda done: done.pictures[1:])
    rows.append([f"Small steps (median of {len(on.small)})", "", "", ""])
    add("  send returned after", lambda done: median(step.sent for step in done.small))
    add("  at the last reader after", lambda done: median(max(step.usable) for step in done.small))
    rows.append(["The whole run", "", "", ""])
    add("  copies of a picture's bytes", lambda done: _copies(done, nbytes)[0], lambda count: f"{count:.0f}")
    add("  bytes copied for a picture", lambda done: _copies(done, nbytes)[0] * nbytes, show_bytes)
    add("  CPU time, sender", lambda done: done.cpu[0])
    add("  CPU time, all readers", lambda done: sum(done.cpu[1:]))
    add("  longest loop stall in a send", lambda done: max(step.send_stall for step in done.steps))
    add("  longest loop stall at any time", lambda done: max(step.stall for step in done.steps))
    rows.append(["  most slots in use", str(on.statistics.slots_peak), "none", ""])
    checked = [
        f"{sum(len(step.usable) - len(step.failures) for step in done.pictures)} of "
        f"{sum(len(step.usable) for step in done.pictures)}"
        for done in (on, off)
    ]
    rows.append(["  digests that agree", *checked, ""])
    return rows


def _words(on: Round, off: Round, nbytes: int, idle: float) -> list[str]:
    """What happened, in sentences that hold whatever the numbers are."""
    size, readers = show_bytes(nbytes), len(on.statistics.readers)
    lines = ["What happened"]
    if _copies(on, nbytes)[1] == "arena":
        slots = on.statistics.slots_peak
        lines.append(
            _paragraph(
                "Arena on",
                f"The sender copied {size} once, into shared memory, in threads beside its event loop. The {readers} "
                "readers got tensors that look at that same memory: the bytes did not move again. When all had dropped "
                f"them, the next picture could take the same slots: never more than {slots} were in use. The first "
                "picture also had to touch their pages for the first time.",
            )
        )
    else:
        lines.append(
            _paragraph(
                "Arena on",
                f"{size} are below the arena's min_bytes, so they went through the ring like the small steps. "
                "A larger --size shows the arena at work.",
            )
        )
    if _copies(off, nbytes)[1] == "frame":
        lines.append(
            _paragraph(
                "Arena off",
                f"The sender copied {size} into a buffer and queued it for its socket, which is when send returned. "
                f"Then they were written into a Unix socket and read out of it once for each of the {readers} readers.",
            )
        )
    lines.append(
        _paragraph(
            "Stalls",
            "A task in the sender's loop wanted to run every millisecond; a stall is how late it ran at worst. "
            "Readers that compute compete with it for the CPUs. Before the first step, with nothing to do, the loop "
            f"was up to {show_seconds(idle)} late.",
        )
    )
    return lines
