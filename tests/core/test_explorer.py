"""The explorer itself: its memory allows what it says, and no more (the litmus tests of memory models)."""

import pytest

from .explorer import Cpu, Memory, Outcome, Program, Violation, explore

X, Y = 1, 2
BOTH = pytest.mark.parametrize("memory", [Memory.TSO, Memory.WEAK])


def outcomes(memory: Memory, **programs: Program) -> set[tuple[object, ...]]:
    """What the programs can return, over all schedules."""
    found = set()
    exploration = explore(programs, memory, check=lambda outcome: found.add(tuple(outcome.returned.values())))
    assert exploration.complete and exploration.schedules >= len(found)
    return found


def store_then_load(mine: int, other: int, fenced: bool) -> Program:
    def program(cpu: Cpu) -> int:
        cpu.words[mine] = 1
        if fenced:
            cpu.fence()
        return cpu.words[other]

    return program


@BOTH
def test_a_store_passes_a_later_load_without_a_fence(memory: Memory) -> None:
    """Store buffering: both processes can miss each other's store, which is what the fences are there for."""
    found = outcomes(memory, one=store_then_load(X, Y, False), two=store_then_load(Y, X, False))
    assert found == {(0, 0), (0, 1), (1, 0), (1, 1)}


@BOTH
def test_a_fence_keeps_a_store_before_a_later_load(memory: Memory) -> None:
    """With a fence on both sides at least one process sees the other's store."""
    found = outcomes(memory, one=store_then_load(X, Y, True), two=store_then_load(Y, X, True))
    assert found == {(0, 1), (1, 0), (1, 1)}


@BOTH
def test_one_fence_of_two_is_not_enough(memory: Memory) -> None:
    """Both sides need their fence."""
    assert (0, 0) in outcomes(memory, one=store_then_load(X, Y, True), two=store_then_load(Y, X, False))


def announce(ordered: bool) -> Program:
    def program(cpu: Cpu) -> None:
        cpu.words[X] = 1
        if ordered:
            cpu.order()
        cpu.words[Y] = 1

    return program


def observe(ordered: bool) -> Program:
    def program(cpu: Cpu) -> tuple[int, int]:
        announced = cpu.words[Y]
        if ordered:
            cpu.order()
        return announced, cpu.words[X]

    return program


@pytest.mark.parametrize(("writer", "reader"), [(True, True), (True, False), (False, True), (False, False)])
def test_order_is_needed_on_both_sides_where_memory_is_weak(writer: bool, reader: bool) -> None:
    """Message passing: the data is sure to be seen after the flag only if both sides order their accesses."""
    stale = (None, (1, 0))
    assert stale not in outcomes(Memory.TSO, writer=announce(writer), reader=observe(reader))
    assert (stale in outcomes(Memory.WEAK, writer=announce(writer), reader=observe(reader))) is not (writer and reader)


@pytest.mark.parametrize("ordered", [True, False])
def test_reading_bytes_ends_before_a_later_store_only_if_ordered(ordered: bool) -> None:
    """Load buffering: a store may overtake a read of bytes unless ``order`` stands between them."""

    def reader(cpu: Cpu) -> object:
        token = cpu.control[8 * X : 8 * X + 8].tobytes()
        if ordered:
            cpu.order()
        cpu.words[Y] = 1
        return token

    def overwriter(cpu: Cpu) -> None:
        if cpu.words[Y]:
            cpu.words[X] = 1

    values = set()

    def check(outcome: Outcome) -> None:
        values.add(outcome.bytes_of("reader", outcome.returned["reader"])[0])

    explore({"reader": reader, "overwriter": overwriter}, Memory.WEAK, check=check)
    assert values == ({0} if ordered else {0, 1})


@BOTH
def test_loads_of_one_word_never_go_back(memory: Memory) -> None:
    """Coherence: who saw a value does not see an older one afterwards."""

    def writer(cpu: Cpu) -> None:
        cpu.words[X] = 1
        cpu.words[X] = 2

    found = outcomes(memory, writer=writer, reader=lambda cpu: (cpu.words[X], cpu.words[X]))
    assert found == {(None, (a, b)) for a in range(3) for b in range(a, 3)}


@BOTH
def test_a_process_sees_its_own_stores_at_once(memory: Memory) -> None:
    """A load looks into the process's own buffer first."""

    def program(cpu: Cpu) -> int:
        cpu.words[X] = 1
        return cpu.words[X]

    assert outcomes(memory, only=program) == {(1,)}


def test_schedules_are_counted() -> None:
    """Two processes of two loads each interleave in 4! / (2! 2!) ways."""

    def program(cpu: Cpu) -> None:
        _ = cpu.words[X], cpu.words[X]

    exploration = explore({"one": program, "two": program}, Memory.TSO)
    assert (exploration.complete, exploration.states, exploration.schedules) == (True, 9, 6)


def test_setups_come_first() -> None:
    """What programs set up is there, in the order of the programs, before any of them runs."""

    def first(cpu: Cpu) -> None:
        with cpu.setup():
            cpu.words[X] = 5

    def second(cpu: Cpu) -> int:
        with cpu.setup():
            cpu.words[Y] = cpu.words[X] + 1
        return cpu.words[Y]

    assert outcomes(Memory.WEAK, first=first, second=second) == {(None, 6)}


def test_a_sleep_that_nobody_ends_is_a_violation() -> None:
    """The text names the process, and shows the schedule that leads there."""

    def sleeper(cpu: Cpu) -> None:
        if cpu.words[X] == 0:
            cpu.sleep()

    with pytest.raises(Violation) as caught:
        explore({"sleeper": sleeper}, Memory.TSO, name={X: "flag"}.__getitem__)
    assert str(caught.value) == (
        "sleeper waits for ever in sleep\nunder TSO memory, after:\n    1. sleeper: load flag -> 0"
    )


def test_a_wake_before_the_sleep_is_found_unless_forgotten() -> None:
    """A wake-up waits for the sleep, but not beyond ``forget_wakes``."""

    def sleeper(cpu: Cpu) -> None:
        cpu.sleep()

    def forgetful(cpu: Cpu) -> None:
        cpu.forget_wakes()
        cpu.sleep()

    assert explore({"sleeper": sleeper, "waker": lambda cpu: cpu.wake("sleeper")}, Memory.TSO).complete
    with pytest.raises(Violation, match="waits for ever"):
        explore({"sleeper": forgetful, "waker": lambda cpu: cpu.wake("sleeper")}, Memory.TSO)


def test_an_error_in_a_program_is_a_violation() -> None:
    """Assertions inside programs count, whatever schedule reaches them."""

    def program(cpu: Cpu) -> None:
        assert cpu.words[X] == 0, "saw it"

    def writer(cpu: Cpu) -> None:
        cpu.words[X] = 1

    with pytest.raises(Violation, match="one raised AssertionError: saw it"):
        explore({"one": program, "two": writer}, Memory.TSO)


def test_too_many_states_are_not_complete() -> None:
    """An exploration that was cut short says so."""
    assert not explore({"one": lambda cpu: [cpu.words[X] for _ in range(9)]}, Memory.TSO, most_states=5).complete
