"""`bench compare`: the channel beside other ways of sending the same messages to the same number of processes.

Each alternative has processes of its own, a sender and its readers, and a channel that is new for each scenario. They take
turns, one round each, so that noise from elsewhere meets all alike; whose turn it is not waits for its pipe. All rounds are
checked: what was sent has arrived, once, in order, with the same contents. A round that fails this is an error, whatever
it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import textwrap
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aioarena._bench import _alternatives, _chart, _foreign, _summary
from aioarena._bench._ends import Alternative, NotPossibleError, Setting
from aioarena._bench._result import Result, Section
from aioarena._bench._scenarios import SCENARIOS, Scenario
from aioarena._bench._sides import Job, NotPossible, Report, Round, work
from aioarena._bench._text import Progress
from aioarena._bench._workers import Team, Worker, WorkerError

ALTERNATIVES: dict[str, type[Alternative]] = {
    "aioarena": _alternatives.Arena,
    "pipe": _alternatives.ArenaPipe,
    "spin": _alternatives.ArenaSpin,
    "arena-off": _alternatives.ArenaOff,
    "zmq": _alternatives.Zmq,
    "queue": _alternatives.Queue,
    "iceoryx2": _foreign.Iceoryx,
    "vllm": _foreign.Vllm,
    "vllm-arena": _foreign.VllmArena,
    "vllm-blocking": _foreign.VllmBlocking,
    "floor": _alternatives.Floor,
    "floor-alone": _alternatives.FloorAlone,
}

# The first message has a number, and a pickle, of as many bytes as most.
_FIRST_NUMBER = 300


class InvariantError(Exception):
    """Messages were lost, repeated, reordered or changed; the message says which, and by what."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What the command line said.

    Attributes:
        readers: Numbers of readers to measure.
        runs: Rounds of each alternative, after one to warm up.
        quick: A few small messages, to see that it works.
        scenarios: Names of those to measure; all if empty.
        alternatives: Keys of those to measure; all if empty.
        limit: Seconds that one alternative may take for one scenario.
        svg: Where to draw the results.
    """

    readers: tuple[int, ...] = (2, 4)
    runs: int = 5
    quick: bool = False
    scenarios: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    limit: float = 60.0
    svg: Path | None = None


@dataclass(slots=True)
class Pair:
    """One alternative in one scenario, with so many readers, and what came of it.

    Attributes:
        first: The first messages of the channel, if they are measured: reports of the sender and of the readers.
        rounds: The same of each round.
        sent: Messages sent in all, those to warm up too.
        received: By each reader.
        failure: Why there are no results, in a word or two, and at length.
    """

    alternative: type[Alternative]
    scenario: Scenario
    readers: int
    limit: float
    first: tuple[Report, list[Report]] | None = None
    rounds: list[tuple[Report, list[Report]]] = field(default_factory=list)
    sent: int = 0
    received: list[int] = field(default_factory=list)
    failure: tuple[str, str] | None = None
    _team: Team | None = None
    _pipes: list[tuple[Connection[Any, Any], Connection[Any, Any]]] = field(default_factory=list)
    _directory: tempfile.TemporaryDirectory[str] | None = None
    _spent: float = 0.0
    _finished: bool = False

    @property
    def what(self) -> str:
        return f"{self.alternative.name}, {self.readers} readers, {self.scenario.name}"

    async def attempt(self, step: Coroutine[Any, Any, None]) -> None:
        """Take a step of the measurement, unless an earlier one has failed. What failed is stopped."""
        if self.failure is not None:
            step.close()
            return
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, self.limit - self._spent)):
                await step
        except TimeoutError:
            self.failure = ("did not finish", f"not within {self.limit:.0f} s")
        except NotPossibleError as error:
            self.failure = ("not possible", str(error))
        except WorkerError as error:
            if self.alternative.ours:
                raise
            self.failure = ("failed", str(error).strip().rsplit("\n", 1)[-1])
        self._spent += time.monotonic() - began
        if self.failure is not None:
            self.stop()

    async def start(self) -> None:
        """Start the processes and connect them."""
        self.received = [0] * self.readers
        self._directory = tempfile.TemporaryDirectory(prefix="aioarena-bench-")
        inherited = self.alternative.inherit(self.readers)
        setting = Setting(self.readers, self.scenario.nbytes, self._directory.name, inherited)
        self._pipes = [multiprocessing.Pipe(duplex=False) for _ in range(self.readers)]
        job = Job(self.alternative, self.scenario, setting, self._pipes)
        self._team = Team(1 + self.readers, work, job, method="forkserver")
        sender, *readers = self._team.__enter__().workers
        handle = await _answer(sender)
        for reader in readers:
            reader.tell(handle)
        await asyncio.gather(*(_answer(worker) for worker in (sender, *readers)))

    async def round(self, count: int, *, full: bool = False) -> tuple[Report, list[Report]]:
        """Send so many messages. Raises InvariantError if they did not arrive as they were sent."""
        assert self._team is not None
        order = Round(_FIRST_NUMBER + self.sent, count, full)
        sender, *readers = self._team.workers
        for reader in readers:
            reader.tell(order)
        for reader in readers:
            await _answer(reader)
        sender.tell(order)
        sent, *received = await asyncio.gather(*(self._checked(worker) for worker in (sender, *readers)))
        for rank, report in enumerate(received):
            if (report.count, report.digest) != (sent.count, sent.digest) or sent.count != count:
                raise InvariantError(f"{self.what}: reader {rank} did not get what was sent: {report}")
            self.received[rank] += report.count
        self.sent += sent.count
        return sent, received

    async def _checked(self, worker: Worker) -> Report:
        report: Report = await _answer(worker)
        if report.violation is not None:  # said at once: others may wait for what will not come
            raise InvariantError(f"{self.what}: reader {worker.rank - 1} {report.violation}")
        return report

    async def warm_up(self) -> None:
        if self.scenario.first:
            self.first = await self.round(self.scenario.first)
        await self.round(1 if self.scenario.tensors else self.scenario.count, full=True)

    async def measure(self) -> None:
        self.rounds.append(await self.round(self.scenario.count))

    async def finish(self) -> None:
        """Close the channel, readers first."""
        assert self._team is not None
        sender, *readers = self._team.workers
        for reader in readers:
            reader.tell(None)
        for reader in readers:
            await _answer(reader)
        sender.tell(None)
        self._finished = True

    def stop(self) -> None:
        """End the processes, also those that hang, and remove what they leave."""
        if self._team is not None:
            error = None if self._finished else WorkerError("not finished")
            self._team.__exit__(type(error) if error else None, error, None)
            self._team = None
            if not self._finished:
                self.alternative.clean_up()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        for pipe in self._pipes:
            for end in pipe:
                end.close()
        self._pipes.clear()


async def _answer(worker: Worker) -> Any:
    answer = await worker.answer()
    if isinstance(answer, NotPossible):
        raise NotPossibleError(answer.why)
    return answer


async def _measure_scenario(pairs: Sequence[Pair], runs: int, progress: Progress) -> None:
    scenario, readers = pairs[0].scenario, pairs[0].readers
    what = f"{scenario.name}, {readers} readers"
    with contextlib.ExitStack() as stack:
        for pair in pairs:
            stack.callback(pair.stop)
            progress.say(what, f"starting {pair.alternative.name}")
            await pair.attempt(pair.start())
        for pair in pairs:
            progress.say(what, f"warming up {pair.alternative.name}")
            await pair.attempt(pair.warm_up())
        for turn in range(runs):
            # Each goes first in its turn, so that none always follows the same one.
            for pair in [*pairs[turn % len(pairs) :], *pairs[: turn % len(pairs)]]:
                progress.say(what, f"run {turn + 1} of {runs}, {pair.alternative.name}")
                await pair.attempt(pair.measure())
        for pair in pairs:
            await pair.attempt(pair.finish())


def _chosen(options: CompareOptions) -> tuple[list[type[Alternative]], Section]:
    """Alternatives that can be measured here, and a table of all that were asked for."""
    chosen = []
    section = Section("How each was used", ["alternative", "version"])
    for key in options.alternatives or ALTERNATIVES:
        alternative = ALTERNATIVES[key]
        version, missing = alternative.version(), alternative.missing()
        if missing is None:
            chosen.append(alternative)
            about = alternative.about
        else:
            about = f"left out, {missing}."
        section.rows.append([alternative.name, version or ("-" if missing else "see above")])
        section.records.append({"alternative": alternative.name, "version": version, "about": about})
        if about:
            section.notes.append(textwrap.fill(f"{alternative.name}: {about}", 118, subsequent_indent="  "))
    section.notes.insert(0, "")
    return chosen, section


async def measure(options: CompareOptions, progress: Progress) -> Result:
    """Measure every scenario, with every number of readers, over every alternative."""
    alternatives, used = _chosen(options)
    # What takes long to start with is imported once, by the process that the others are forked from.
    modules = [module for alternative in alternatives for module in alternative.modules]
    multiprocessing.set_forkserver_preload(list(dict.fromkeys(["aioarena._bench._preload", *modules])))
    names = options.scenarios or tuple(SCENARIOS)
    settings = {"readers": options.readers, "runs": options.runs, "quick": options.quick, "limit": options.limit}
    result = Result("compare", settings=settings)
    for name in names:
        scenario = SCENARIOS[name].quick() if options.quick else SCENARIOS[name]
        measured: list[Pair] = []
        for readers in options.readers:
            pairs = [
                Pair(alternative, scenario, readers, options.limit)
                for alternative in alternatives
                if alternative.scenarios is None or name in alternative.scenarios
            ]
            if pairs:
                # An idle channel is the same in each run.
                await _measure_scenario(pairs, 1 if scenario.way == "idle" else options.runs, progress)
                measured += pairs
        if measured:
            result.sections.append(_summary.section(measured))
    if options.svg is not None:
        options.svg.write_text(_chart.draw(result))
    result.sections.append(used)
    return result
