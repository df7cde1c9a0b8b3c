"""Every interleaving of small concurrent programs over a simulated shared memory.

A *program* is a function of a :class:`Cpu`. It builds the production objects (RingWriter, ReceiverCore, ...) over
``cpu.words``, ``cpu.control``, ``cpu.order`` and ``cpu.fence`` and calls them; nothing of them is copied here. Whenever the
code touches shared memory the program is suspended, and :func:`explore` tries everything that may happen next.

How a program is suspended: what it does depends only on what its loads returned. So it is simply run again from the
start with the results recorded so far, up to the first operation without one, which unwinds it with an exception.

The memory:

* A store goes into the buffer of its process, and from there to memory in a step of its own (*drain*), which is when the
  others can see it. A load sees the process's own buffer first.
* ``Memory.TSO`` (x86-64): buffers drain in order, loads are done in order, ``order`` does nothing.
* ``Memory.WEAK`` (aarch64 and weaker): buffers drain in any order, but for stores to one word. A load may return any value
  the word has had since the process's last ``order`` or ``fence`` (it may have been done that early), but never an older
  one than the process saw before. A load of bytes (``tobytes``) may also be done late, after loads and stores that follow
  it. ``order`` is a barrier for all of that, except that a store before it may still pass a load after it.
  A load of a word is never done after a store that follows it: in the code here such a store depends on what was loaded,
  and CPUs keep that. So the exploration has no opinion on the two orders that stand between such loads and stores, in
  RingWriter._refresh and Arena._reap; they are for the letter of the C memory model.
* ``fence``: waits until the own buffer is empty; no load after it is done before it.

Issuing a store, which nobody else can see, is not a step: only its drain is. States reached twice are expanded once. As
programs are finite the states form a graph without cycles, so the number of schedules is the number of paths through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from aioarena._core.layout import CLOSED, HEAD, PUBLISHED, SENDER_PARKED, Layout

# Byte offset of the simulated arena in the one address space; the control segment lies below.
ARENA = 1 << 20

_LOAD, _STORE, _READ, _ORDER, _FENCE, _SLEEP, _WAKE, _FORGET, _END, _FAIL = (
    "load", "store", "read", "order", "fence", "sleep", "wake", "forget", "end", "fail"
)  # fmt: skip
_BARRIER = ("barrier",)


class Memory(Enum):
    """How stores become visible and loads are ordered."""

    TSO = "tso"
    WEAK = "weak"


class Violation(AssertionError):
    """Some schedule breaks a promise; the text shows it."""


class Token(NamedTuple):
    """Bytes that were loaded, to be looked up with :meth:`Outcome.bytes_of` once all is over."""

    index: int
    nbytes: int


class _Suspended(BaseException):
    """Unwinds a program at an operation whose result is not known yet."""


class Cpu:
    """What a program may use of its machine.

    Attributes:
        words: All shared words, as the production code takes them.
        control: All shared bytes, as the production code takes them.
    """

    def __init__(self, results: tuple[Any, ...], image: dict[int, int]) -> None:
        self._results = results
        self._position = 0
        self._image = image
        self._setting_up = False
        self._tokens = 0
        self.pending: tuple[Any, ...] = ()
        self.words = _Words(self, 0)
        self.control = _Bytes(self, 0)

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """What happens in here happened before everything else; setups run in the order of the programs."""
        self._setting_up = True
        yield
        self._setting_up = False

    def span(self, slot: int) -> _Bytes:
        """The first 8 bytes of a slot of the arena."""
        return _Bytes(self, ARENA + 8 * slot, ARENA + 8 * slot + 8)

    def order(self) -> None:
        self._do(_ORDER)

    def fence(self) -> None:
        self._do(_FENCE)

    def sleep(self) -> None:
        """Sleep until somebody wakes this process."""
        self._do(_SLEEP)

    def wake(self, name: str) -> None:
        """Wake a process, or let its next sleep end at once."""
        self._do(_WAKE, name)

    def forget_wakes(self) -> None:
        """Wake-ups that came so far found nobody waiting, and are lost."""
        self._do(_FORGET)

    def load(self, word: int) -> int:
        return self._image.get(word, 0) if self._setting_up else self._do(_LOAD, word)

    def store(self, word: int, value: int) -> None:
        if self._setting_up:
            self._image[word] = value
        else:
            self._do(_STORE, word, value)

    def read(self, word: int, nbytes: int) -> Token:
        token = Token(self._tokens, nbytes)
        self._tokens += 1
        self._do(_READ, word, token)
        return token

    def _do(self, *operation: Any) -> Any:
        if self._setting_up:
            return None
        if self._position == len(self._results):
            self.pending = operation
            raise _Suspended
        self._position += 1
        return self._results[self._position - 1]


class _Words:
    """Shared words from a place on: what ``memoryview.cast("Q")`` is in use."""

    def __init__(self, cpu: Cpu, first: int) -> None:
        self._cpu = cpu
        self._first = first

    def __getitem__(self, index: int) -> int:
        return self._cpu.load(self._first + index)

    def __setitem__(self, index: int, value: int) -> None:
        assert 0 <= value < 1 << 64
        self._cpu.store(self._first + index, value)


class _Bytes:
    """Shared bytes from a place on: what a ``memoryview`` is in use, in whole words."""

    def __init__(self, cpu: Cpu, start: int, stop: int | None = None) -> None:
        assert start % 8 == 0
        self._cpu = cpu
        self._start = start
        self._stop = stop

    def __getitem__(self, part: slice) -> _Bytes:
        stop = None if part.stop is None else self._start + part.stop
        return _Bytes(self._cpu, self._start + (part.start or 0), stop)

    def __setitem__(self, part: slice, data: bytes) -> None:
        assert len(data) == part.stop - part.start and len(data) % 8 == 0
        for offset in range(0, len(data), 8):
            word = (self._start + part.start + offset) // 8
            self._cpu.store(word, int.from_bytes(data[offset : offset + 8], "little"))

    def cast(self, kind: str) -> _Words:
        assert kind == "Q"
        return _Words(self._cpu, self._start // 8)

    def tobytes(self) -> Token:
        assert self._stop is not None
        return self._cpu.read(self._start // 8, self._stop - self._start)


Program = Callable[[Cpu], Any]


@dataclass
class Outcome:
    """How one schedule ended.

    Attributes:
        returned: What each program returned, by name.
    """

    returned: dict[str, Any]
    _read: dict[tuple[int, int, int], int]  # (process, token, word of the token) -> value
    _names: list[str]

    def bytes_of(self, name: str, token: Token) -> bytes:
        """What a program's load of bytes gave."""
        process = self._names.index(name)
        words = [self._read[process, token.index, offset] for offset in range(-(-token.nbytes // 8))]
        return b"".join(word.to_bytes(8, "little") for word in words)[: token.nbytes]


@dataclass
class Exploration:
    """What was explored.

    Attributes:
        complete: Whether every schedule was; False if there were too many states.
        states: Distinct states.
        schedules: Distinct schedules, from start to end.
    """

    complete: bool
    states: int
    schedules: int


class _Process(NamedTuple):
    """State of one process.

    Attributes:
        node: Where its program is: index into the explorer's list of recorded runs.
        buffer: Stores that are not visible yet, reads that are not done yet and barriers, oldest first.
        floor: (word, oldest version a load may return), where that is not 0.
        read: (token, word of the token, value) of reads that are done.
    """

    node: int
    buffer: tuple[tuple[Any, ...], ...] = ()
    floor: tuple[tuple[int, int], ...] = ()
    read: tuple[tuple[int, int, int], ...] = ()


class _State(NamedTuple):
    """State of everything.

    Attributes:
        memory: (word, versions) of the words written so far: the value of now last, before it older ones still seen.
        processes: One per program.
        woken: Which of them have a wake-up to find.
    """

    memory: tuple[tuple[int, tuple[int, ...]], ...]
    processes: tuple[_Process, ...]
    woken: tuple[bool, ...]


class _Explorer:
    def __init__(self, programs: dict[str, Program], memory: Memory, name: Callable[[int], str]) -> None:
        self.names = list(programs)
        self.programs = list(programs.values())
        self.weak = memory is Memory.WEAK
        self.name = name
        self.image: dict[int, int] = {}
        # Runs of programs: results so far, and the operation that comes next.
        self.runs: list[tuple[int, tuple[Any, ...], tuple[Any, ...]]] = []
        self._children: dict[tuple[int, Any], int] = {}
        self._images: list[dict[int, int]] = []
        roots = []
        for index in range(len(programs)):
            # Each program's setup finds what those before it have set up.
            self._images.append(dict(self.image))
            roots.append(self._run(index, (), self.image))
        self.start = _State(
            tuple(sorted((word, (value,)) for word, value in self.image.items())),
            tuple(self._settle(_Process(root), {}) for root in roots),
            (False,) * len(programs),
        )

    # Programs -------------------------------------------------------------------------------------------------------

    def _run(self, index: int, results: tuple[Any, ...], image: dict[int, int]) -> int:
        cpu = Cpu(results, image)
        try:
            operation: tuple[Any, ...] = (_END, self.programs[index](cpu))
        except _Suspended:
            operation = cpu.pending
        except Exception as error:
            operation = (_FAIL, error)
        self.runs.append((index, results, operation))
        return len(self.runs) - 1

    def _child(self, node: int, result: Any) -> int:
        """The run that goes on with the result of the pending operation."""
        key = (node, result)
        if key not in self._children:
            index, results, _ = self.runs[node]
            self._children[key] = self._run(index, (*results, result), dict(self._images[index]))
        return self._children[key]

    def _settle(self, process: _Process, memory: dict[int, tuple[int, ...]]) -> _Process:
        """Do what no other process can see, up to the next operation that is a step."""
        node, buffer, floor, read = process
        while True:
            kind, *rest = self.runs[node][2]
            if kind == _STORE:
                buffer = (*buffer, (_STORE, *rest))
            elif kind == _READ and self.weak:
                word, token = rest
                self._assert_not_own(word, token, buffer)
                oldest = dict(floor)
                for offset in range(-(-token.nbytes // 8)):
                    buffer = (*buffer, (_READ, word + offset, token.index, offset, oldest.get(word + offset, 0)))
            elif kind == _ORDER and not self.weak:
                pass
            else:
                break
            node = self._child(node, None)
        while buffer and buffer[0] == _BARRIER:
            buffer = buffer[1:]
        if kind == _END:
            floor = ()
        return _Process(node, buffer, floor, read)

    @staticmethod
    def _assert_not_own(word: int, token: Token, buffer: tuple[tuple[Any, ...], ...]) -> None:
        last = word + (token.nbytes - 1) // 8
        own = [entry for entry in buffer if entry[0] == _STORE and word <= entry[1] <= last]
        assert not own, "reads of bytes that the process itself has just stored are not simulated"

    # Steps ----------------------------------------------------------------------------------------------------------

    def steps(self, state: _State) -> Iterator[tuple[str, _State]]:
        """Everything that may happen next: (description, state after it)."""
        memory = dict(state.memory)
        for index, process in enumerate(state.processes):
            for what, changed, new_memory, woken in self._steps_of(index, process, memory, state.woken):
                settled = self._settle(changed, new_memory)
                processes = (*state.processes[:index], settled, *state.processes[index + 1 :])
                yield f"{self.names[index]}: {what}", self._state(new_memory, processes, woken)

    def _steps_of(
        self, index: int, process: _Process, memory: dict[int, tuple[int, ...]], woken: tuple[bool, ...]
    ) -> Iterator[tuple[str, _Process, dict[int, tuple[int, ...]], tuple[bool, ...]]]:
        yield from ((*drained, woken) for drained in self._drains(process, memory))
        node, buffer, floor, read = process
        kind, *rest = self.runs[node][2]
        if kind == _LOAD:
            (word,) = rest
            for value, new_floor in self._loads(word, process, memory):
                what = f"load {self.name(word)} -> {_number(value)}"
                yield what, _Process(self._child(node, value), buffer, new_floor, read), memory, woken
        elif kind == _READ:  # only under TSO, where it is done at once
            word, token = rest
            self._assert_not_own(word, token, buffer)
            done = [(token.index, offset, memory.get(word + offset, (0,))[-1]) for offset in range(-(-token.nbytes // 8))]
            yield f"read {self.name(word)}", _Process(self._child(node, None), buffer, floor, (*read, *done)), memory, woken
        elif kind == _ORDER:
            if not any(entry[0] == _READ for entry in buffer):
                barred = (*buffer, _BARRIER) if buffer else ()
                yield "order", _Process(self._child(node, None), barred, _now(memory), read), memory, woken
        elif kind == _FENCE:
            if not buffer:
                now = _now(memory) if self.weak else ()
                yield "fence", _Process(self._child(node, None), (), now, read), memory, woken
        elif kind == _SLEEP:
            if woken[index]:
                yield "wakes up", process._replace(node=self._child(node, None)), memory, _put(woken, index, False)
        elif kind == _WAKE:
            other = self.names.index(rest[0])
            what = f"wakes {rest[0]}"
            yield what, process._replace(node=self._child(node, None)), memory, _put(woken, other, True)
        elif kind == _FORGET:
            what = "is about to park"
            yield what, process._replace(node=self._child(node, None)), memory, _put(woken, index, False)

    def _loads(
        self, word: int, process: _Process, memory: dict[int, tuple[int, ...]]
    ) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """What a load may return, and the floor after it."""
        for entry in reversed(process.buffer):
            if entry[0] == _STORE and entry[1] == word:
                yield entry[2], process.floor
                return
        versions = memory.get(word, (0,))
        floor = dict(process.floor)
        for version in range(floor.get(word, 0), len(versions)):
            yield versions[version], _floor({**floor, word: version})

    def _drains(
        self, process: _Process, memory: dict[int, tuple[int, ...]]
    ) -> Iterator[tuple[str, _Process, dict[int, tuple[int, ...]]]]:
        """What may leave the buffer: (description, process, memory)."""
        seen = set()
        for position, entry in enumerate(process.buffer):
            if entry == _BARRIER:
                return
            word = entry[1]
            if word in seen:
                continue
            seen.add(word)
            rest = (*process.buffer[:position], *process.buffer[position + 1 :])
            versions = memory.get(word, (0,))
            if entry[0] == _STORE:
                what = f"{self.name(word)} = {_number(entry[2])} becomes visible"
                if self.weak:
                    floor = _floor({**dict(process.floor), word: len(versions)})
                    yield what, process._replace(buffer=rest, floor=floor), {**memory, word: (*versions, entry[2])}
                else:
                    yield what, process._replace(buffer=rest), {**memory, word: (entry[2],)}
                    return  # in order
            else:
                _, _, token, offset, oldest = entry
                for version in range(oldest, len(versions)):
                    value = versions[version]
                    read = (*process.read, (token, offset, value))
                    what = f"read of {self.name(word)} done -> {_number(value)}"
                    yield what, process._replace(buffer=rest, read=read), memory

    def _state(
        self, memory: dict[int, tuple[int, ...]], processes: tuple[_Process, ...], woken: tuple[bool, ...]
    ) -> _State:
        """A state in the one form that equal states have: without versions that nobody can see any more."""
        excess = {}
        if self.weak and any(len(versions) > 1 for versions in memory.values()):
            oldest = {word: len(versions) - 1 for word, versions in memory.items()}
            for process in processes:
                if self.runs[process.node][2][0] != _END:
                    floor = dict(process.floor)
                    for word in oldest:
                        oldest[word] = min(oldest[word], floor.get(word, 0))
                for entry in process.buffer:
                    if entry[0] == _READ and entry[1] in oldest:
                        oldest[entry[1]] = min(oldest[entry[1]], entry[4])
            excess = {word: count for word, count in oldest.items() if count}
        if excess:
            memory = {word: versions[excess.get(word, 0) :] for word, versions in memory.items()}
            processes = tuple(
                process._replace(
                    floor=_floor({word: version - excess.get(word, 0) for word, version in process.floor}),
                    buffer=tuple(
                        (*entry[:4], entry[4] - excess.get(entry[1], 0)) if entry[0] == _READ else entry
                        for entry in process.buffer
                    ),
                )
                for process in processes
            )
        return _State(tuple(sorted(memory.items())), processes, woken)

    # Ends -----------------------------------------------------------------------------------------------------------

    def failure(self, state: _State, check: Callable[[Outcome], None] | None, stuck: bool) -> str | None:
        """What is wrong with a state; ``stuck`` if nothing can happen in it any more."""
        for index, process in enumerate(state.processes):
            kind, *rest = self.runs[process.node][2]
            if kind == _FAIL:
                return f"{self.names[index]} raised {type(rest[0]).__name__}: {rest[0]}"
            if stuck and kind != _END:
                return f"{self.names[index]} waits for ever in {kind}"
        if stuck and check is not None:
            returned = {name: self.runs[p.node][2][1] for name, p in zip(self.names, state.processes, strict=True)}
            read = {
                (index, token, offset): value
                for index, process in enumerate(state.processes)
                for token, offset, value in process.read
            }
            outcome = Outcome(returned, read, self.names)
            try:
                check(outcome)
            except AssertionError as error:
                return f"{str(error) or 'the check failed'}; programs returned {returned}"
        return None


def explore(
    programs: dict[str, Program],
    memory: Memory,
    *,
    check: Callable[[Outcome], None] | None = None,
    name: Callable[[int], str] = str,
    most_states: int = 400_000,
) -> Exploration:
    """Try every schedule of some programs.

    Args:
        programs: Programs by name.
        memory: How the simulated memory behaves.
        check: Called with how each schedule ended; asserts what must hold.
        name: Names words, for the text of a violation.
        most_states: Give up beyond so many states.

    Raises:
        Violation: In some schedule a program raised, the check failed, or a program waits for ever.
    """
    explorer = _Explorer(programs, memory, name)
    # Schedules that go on from a state, once all of them were tried; 0 while they are being tried.
    schedules: dict[_State, int] = {}
    path: list[str] = []
    stack: list[tuple[_State, Iterator[tuple[str, _State]]]] = []

    def enter(state: _State) -> None:
        schedules[state] = 0
        steps = list(explorer.steps(state))
        failure = explorer.failure(state, check, stuck=not steps)
        if failure is not None:
            lines = "\n".join(f"  {number:3}. {step}" for number, step in enumerate(path, 1))
            raise Violation(f"{failure}\nunder {memory.name} memory, after:\n{lines}")
        if not steps:
            schedules[state] = 1
        stack.append((state, iter(steps)))

    enter(explorer.start)
    while stack:
        state, steps = stack[-1]
        for what, following in steps:
            if following not in schedules:
                if len(schedules) == most_states:
                    return Exploration(False, len(schedules), 0)
                path.append(what)
                enter(following)
                break
            schedules[state] += schedules[following]
        else:
            stack.pop()
            if stack:
                path.pop()
                schedules[stack[-1][0]] += schedules[state]
    return Exploration(True, len(schedules), schedules[explorer.start])


def names_of(layout: Layout) -> Callable[[int], str]:
    """Names of the words of a channel, for the text of a violation."""
    known = {HEAD: "head", PUBLISHED: "published", SENDER_PARKED: "sender parked", CLOSED: "closed"}
    for rank in range(layout.readers):
        known[layout.parked + rank] = f"parked[{rank}]"
        for field in ("seat", "seat_head", "seat_number", "tail", "received"):
            known[getattr(layout, field)(rank)] = f"{field}[{rank}]"
        for slot in range(layout.slots):
            known[layout.done + slot * layout.readers + rank] = f"done[{slot}][{rank}]"

    def name(word: int) -> str:
        if word in known:
            return known[word]
        if word * 8 >= ARENA:
            return f"arena+{word * 8 - ARENA}"
        if word * 8 >= layout.ring_offset:
            return f"ring+{word * 8 - layout.ring_offset}"
        return f"word {word}"

    return name


def _now(memory: dict[int, tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """The floor of a process that sees memory as it is."""
    return _floor({word: len(versions) - 1 for word, versions in memory.items()})


def _floor(floor: dict[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((word, version) for word, version in floor.items() if version))


def _put(flags: tuple[bool, ...], index: int, flag: bool) -> tuple[bool, ...]:
    return (*flags[:index], flag, *flags[index + 1 :])


def _number(value: int) -> str:
    return str(value) if value < 1 << 32 else hex(value)
