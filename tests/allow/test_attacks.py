"""Pickles that would run code, read memory or bring the reader down: each is refused, and leaves no mark."""

from __future__ import annotations

import collections
import copyreg
import importlib
import io
import os
import pickle
import random
import subprocess
import sys
import timeit
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import NotAllowedError
from aioarena._allow import AllowList
from aioarena._codec import Encoder, as_plan
from aioarena._envelope import take_postmark
from tests.allow import messages
from tests.allow.messages import Kind, Step
from tests.allow.opcodes import build, call, data, name, program, text

MODULE = "tests.allow.messages"
# What a lax user might allow, so that the list is not what protects.
ALLOW: list[Any] = [MODULE]

TENSOR = name("aioarena._codec", "_rebuild_tensor")
ARRAY = name("aioarena._codec", "_rebuild_array")
DTYPE = name("aioarena._codec", "_rebuild_dtype")
BUFFER = b"\x97"
HONEST = call(TENSOR, BUFFER, text("float32"), data((4,)), data((1,)))
ORDERED = call(name("collections", "OrderedDict"))


def decode(pickled: bytes, *buffers: memoryview) -> Any:
    return AllowList(ALLOW).decode(pickled, list(buffers))


def buffer(nbytes: int = 16) -> memoryview:
    return memoryview(bytearray(nbytes))


class Reduced:
    """Pickles as a call."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that an attack would make."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def _torch_storage(path: str) -> Any:
    file = io.BytesIO()
    torch.save(Reduced(os.system, (f"touch {path}",)), file, _use_new_zipfile_serialization=False)
    return Reduced(torch.storage._load_from_bytes, (file.getvalue(),))


CALLS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda path: Reduced(os.system, (f"touch {path}",)),
    "subprocess": lambda path: Reduced(subprocess.check_call, (["touch", path],)),
    "eval": lambda path: Reduced(eval, (f"open({path!r}, 'w')",)),
    "exec": lambda path: Reduced(exec, (f"open({path!r}, 'w')",)),
    "open": lambda path: Reduced(open, (path, "w")),
    "timeit": lambda path: Reduced(timeit.timeit, (f"open({path!r}, 'w')", "pass", timeit.default_timer, 1)),
    "torch's storages": _torch_storage,
    "pickle in a pickle": lambda path: Reduced(pickle.loads, (pickle.dumps(Reduced(os.system, (f"touch {path}",))),)),
    "our own decode": lambda path: Reduced(
        importlib.import_module("aioarena._codec").decode, (pickle.dumps(Reduced(os.system, (f"touch {path}",))),)
    ),
    "a function of the allowed module's imports": lambda path: Reduced(messages.system, (f"touch {path}",)),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", CALLS)
def test_calls(kind: str, tmp_path: Path, marker: Path) -> None:
    """What works against pickle does not work here."""
    pickle.loads(pickle.dumps(CALLS[kind](str(tmp_path / "proof")), 5))
    assert (tmp_path / "proof").exists(), "this attack is none"
    with pytest.raises(NotAllowedError, match="it names "):
        decode(pickle.dumps(CALLS[kind](str(marker)), 5))


@pytest.mark.parametrize(
    "what",
    [
        "builtins.eval",
        "builtins.exec",
        "builtins.__import__",
        "builtins.type",
        "builtins.setattr",
        "builtins.map",
        "builtins.memoryview",
        "functools.partial",
        "functools.reduce",
        "operator.attrgetter",
        "operator.methodcaller",
        "copyreg._reconstructor",
        "copyreg.__newobj__",
        "_codecs.encode",
        "types.FunctionType",
        "types.CodeType",
        "importlib.import_module",
        "torch.load",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_sparse_tensor",
        "torch._tensor._rebuild_from_type_v2",
        "torch.storage._load_from_bytes",
        "torch.storage.TypedStorage",
        "torch.Tensor",
        "torch.frombuffer",
        "torch.nn.Parameter",
        "torch.nn.parameter.Parameter",
        "numpy.load",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray._reconstruct",
        "numpy.frombuffer",
        "aioarena._codec.decode",
        "aioarena._codec.pickle",
        "aioarena._allow.AllowList",
        "aioarena.Sender",
        "aioarena.exceptions._rebuild",
    ],
)
def test_names(what: str) -> None:
    """The text says what was named, and so does an attribute."""
    module, _, qualified = what.rpartition(".")
    with pytest.raises(NotAllowedError) as caught:
        decode(program(name(module, qualified)))
    assert caught.value.what == what
    assert f"it names {what}, which allow= " in str(caught.value)


@pytest.mark.parametrize(
    "qualified",
    [
        "os",
        "os.system",
        "system",
        "Popen",
        "remove",
        "rebuild",
        "Any",
        "Step.__init__",
        "Step.valid",
        "Step.__init__.__globals__",
        "Step.__class__",
        "Step.__mro__",
        "Step.__dict__",
        "Outer.Inner.__init__",
        "Outer.Missing",
        "Kind.DECODE",
        "__builtins__",
        "__loader__",
        "__spec__.loader",
        "",
        ".",
        "Step.",
    ],
)
def test_only_classes_that_an_allowed_module_defines(qualified: str) -> None:
    """Neither its functions, nor its imports, nor what hangs on a class."""
    with pytest.raises(NotAllowedError):
        decode(program(name(MODULE, qualified)))


def test_classes_that_say_they_are_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a class that has another name, or another module, than it is asked for by."""
    monkeypatch.setattr(messages, "Alias", Step, raising=False)
    monkeypatch.setattr(messages, "Made", types.new_class("Made"), raising=False)
    for qualified in ("Alias", "Made"):
        with pytest.raises(NotAllowedError):
            decode(program(name(MODULE, qualified)))


def test_nothing_is_imported(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing runs code, too."""
    (tmp_path / "runs_on_import.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass A: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("runs_on_import", f"{MODULE}.runs_on_import"):
        with pytest.raises(NotAllowedError):
            decode(program(name(module, "A")))
    assert "runs_on_import" not in sys.modules


def test_submodules_and_parents_are_not_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name allows one module."""
    with pytest.raises(NotAllowedError):
        AllowList(["tests.allow"]).decode(program(name(MODULE, "Step")))
    with pytest.raises(NotAllowedError):
        AllowList(["tests.allow"]).decode(program(name("tests.allow", "messages.Step")))


def test_names_that_are_no_text() -> None:
    for steps in (b"KAKA\x93", data(("os",)) + text("system") + b"\x93"):
        with pytest.raises(ValueError, match="something else than text"):
            decode(program(steps))


def test_long_names_are_cut() -> None:
    with pytest.raises(NotAllowedError) as caught:
        decode(program(name("m\ud800\n" * 50, "n" * 200)))
    assert len(str(caught.value)) < 500


# Opcodes ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def extension() -> Iterator[bytes]:
    """A code of the extension registry for os.system; pickle has it in a cache that find_class does not see."""
    copyreg.add_extension("os", "system", 0x77)
    try:
        assert pickle.loads(b"\x82\x77.") is os.system
        yield b"\x82\x77"
    finally:
        copyreg.remove_extension("os", "system", 0x77)


def test_the_extension_registry(extension: bytes, marker: Path) -> None:
    with pytest.raises(NotAllowedError, match="extension registry"):
        decode(program(call(extension, text(f"touch {marker}"))))
    for code in (b"\x83\x77\0", b"\x84\x77\0\0\0"):
        with pytest.raises(NotAllowedError, match="extension registry"):
            decode(program(code))


@pytest.mark.parametrize(
    "steps",
    [
        b"cos\nsystem\n",
        b"(Vtrue\nios\nsystem\n",
        b"(cbuiltins\nlist\no",
        b"Pname\n",
        b"Nq\0Q",
        b"Nr\xff\xff\xff\x7f",  # room for two thousand million memo entries
        b"N2",
        b"I1\n",
        b"L1L\n",
        b"F1\n",
        b"S'a'\n",
        b"T\1\0\0\0a",
        b"V1\n",
        b"\xff",
        b"\x80\x02N",
    ],
)
def test_opcodes_of_no_sender(steps: bytes) -> None:
    """Old ways of naming things, persistent ids, and memo entries by number."""
    with pytest.raises(ValueError, match="which no Sender writes"):
        decode(program(steps))


@pytest.mark.parametrize(
    "pickled", [b"", b"\x80\x05", b"\x80\x04N.", b"N.", b"\x80\x05.", b"\x80\x05K", b"\x80\x05\x8c\x09a."]
)
def test_broken_pickles(pickled: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        decode(pickled)


@pytest.mark.parametrize(
    "opcode", [b"B\xff\xff\xff\xff", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 7 + b"\x7f", b"\x8b\xff\xff\xff\x7f"]
)
def test_lengths_that_are_not_there(opcode: bytes) -> None:
    with pytest.raises(ValueError, match="cut off"):
        decode(program(opcode))


def test_more_buffers_than_there_are() -> None:
    with pytest.raises(ValueError, match="fewer buffers"):
        decode(program(BUFFER, BUFFER), buffer())


# Calls ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [
        call(name("builtins", "list"), data(range(3))),
        call(name("builtins", "bytearray"), data(10**12)),
        call(name("builtins", "bytes"), data(10**12)),
        call(name("builtins", "dict"), data([(1, 2)])),
        call(name("builtins", "str"), data(b"a"), data("zlib")),
        call(name("collections", "deque"), data(range(10))),
        call(name("collections", "OrderedDict"), data([(1, 2)])),
        call(name("collections", "Counter"), data([1])),
        call(name("collections", "defaultdict"), name("builtins", "getattr")),
        call(name("torch", "Size"), data((-1,))),
        call(name("torch", "Size"), data((1,) * 100)),
        call(name("torch", "float32")),
        call(name("builtins", "slice"), data(((),))),
        call(data("text")),
        call(b"N"),
        name("builtins", "range") + data([3]) + b"R",
        name("builtins", "list") + b")\x81",
        name("builtins", "int") + b"K\1\x85\x81",
        name("builtins", "ValueError") + b")\x81",
        name("builtins", "range") + b")}\x92",
        name(MODULE, "Step") + data([1]) + b"\x81",
        name(MODULE, "Step") + b"K\1\x85" + data([1]) + b"\x92",
        call(name(MODULE, "Step") + b")\x81"),
        call(name("builtins", "getattr") + data(Kind.DECODE.value) + text("real")),
    ],
    ids=repr,
)
def test_calls_that_no_sender_writes(steps: bytes) -> None:
    """What is data is not callable, and what is callable takes what a pickler gives it."""
    with pytest.raises(ValueError):
        decode(program(steps))


def test_getattr() -> None:
    """Is for members of enums."""
    for target, attribute in (
        (name(MODULE, "Step"), "valid"),
        (name(MODULE, "Kind"), "mro"),
        (name(MODULE, "Kind"), "__init__"),
    ):
        with pytest.raises(NotAllowedError) as caught:
            decode(program(call(name("builtins", "getattr"), target, text(attribute))))
        assert caught.value.what == "builtins.getattr"
    assert decode(program(name("builtins", "getattr"))) is not getattr


# State ------------------------------------------------------------------------------------------------------------------


def test_classes_cannot_be_changed() -> None:
    """BUILD with slots sets attributes of whatever it is given, and the class is there for everybody."""
    state = b"N}" + text("valid") + name("builtins", "bool") + b"s\x86"
    pickled = program(build(name(MODULE, "Step"), state))
    before = dict(vars(Step))
    with pytest.raises(ValueError, match="sets the state of an object of type type"):
        decode(pickled)
    assert vars(Step) == before
    try:
        pickle.loads(pickled)
        assert vars(Step) != before, "pickle does not do it either"
    finally:
        Step.valid = before["valid"]  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "target",
    [
        call(DTYPE, text("|V8")),
        call(ARRAY, BUFFER, call(DTYPE, text("<f4")), data((4,))),
        call(TENSOR, BUFFER, text("float32"), data((4,)), data((1,))),
        ARRAY,
        name("builtins", "getattr"),
        name("builtins", "list"),
        name("torch", "float32"),
        b"]",
        b"}",
        call(name("collections", "OrderedDict")),
        call(name("collections", "deque")),
        BUFFER,
    ],
    ids=repr,
)
def test_state_of_other_objects(target: bytes) -> None:
    """Of numpy's and torch's objects above all: their __setstate__ believes what it is told about memory."""
    for state in (
        b"N}" + text("a") + b"Ns\x86",
        data({"a": 1}),
        data((3, "|", None, None, None, 1, 1, 0)),
        data((1, 2, 3, 4)),
    ):
        with pytest.raises(ValueError, match="sets the state"):
            decode(program(build(target, state)), buffer())


@pytest.mark.parametrize(
    "target",
    [
        call(TENSOR, BUFFER, text("float32"), data((4,)), data((1,))),
        call(ARRAY, BUFFER, call(DTYPE, text("<f4")), data((4,))),
        name(MODULE, "Kind"),
        BUFFER,
    ],
    ids=repr,
)
def test_items_of_other_objects(target: bytes) -> None:
    for steps in (b"K\0K\1s", b"(K\0K\1u", b"K\1a", b"(K\1e", b"(K\1\x90"):
        with pytest.raises(ValueError, match="object of type"):
            decode(program(target, steps), buffer())


@pytest.mark.parametrize(
    "wrap", [lambda key: b"}" + key + b"Ns", lambda key: b"\x8f(" + key + b"\x90", lambda key: b"(" + key + b"\x91"]
)
@pytest.mark.parametrize(
    "key",
    [
        b")" + b"\x85" * 1_000_000,  # hashing it takes all of the C stack
        b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(100)),  # and this, for ever
    ],
    ids=["deep", "wide"],
)
def test_keys_that_cannot_be_hashed(wrap: Callable[[bytes], bytes], key: bytes) -> None:
    steps = wrap(key) if key[1:2] == b"\x85" else b"(" + key + b"t0" + wrap(b"hd")
    with pytest.raises(ValueError, match="a key of more than"):
        decode(program(steps))


# Memory -----------------------------------------------------------------------------------------------------------------


def tensor(source: bytes, dtype: str, shape: Any, stride: Any) -> bytes:
    return program(call(TENSOR, source, text(dtype), data(shape), data(stride)))


@pytest.mark.parametrize(
    ("dtype", "shape", "stride"),
    [
        ("float32", (5,), (1,)),
        ("float64", (4,), (1,)),
        ("float32", (2,), (4,)),
        ("float32", (2, 3), (3, 1)),
        ("float32", (4,), (-1,)),
        ("float32", (-4,), (1,)),
        ("float32", (2**61,), (1,)),
        ("float32", (2**40, 2**40), (0, 0)),
        ("float32", (2, 2**62), (0, 0)),
        ("float32", (4,), (1, 1)),
        ("float32", (4,), ()),
        ("float32", (4.0,), (1,)),
        ("float32", (True,), (1,)),
        ("float32", [4], [1]),
        ("float32", (1,) * 65, (1,) * 65),
        ("object", (2,), (1,)),
        ("qint8", (2,), (1,)),
        ("nothing", (2,), (1,)),
    ],
)
def test_tensors_beyond_their_buffer(dtype: str, shape: Any, stride: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        decode(tensor(BUFFER, dtype, shape, stride), buffer())


def test_tensors_over_other_memory() -> None:
    """Bytes of the pickle, which a tensor could write to; what is read-only; and arrays, which do not keep it."""
    array = call(ARRAY, BUFFER, call(DTYPE, text("<f4")), data((4,)))
    for source in (data(bytes(16)), data(bytearray(16)), BUFFER + b"\x98", array, b"N"):
        with pytest.raises(ValueError):
            decode(tensor(source, "float32", (4,), (1,)), buffer())
    assert decode(tensor(BUFFER, "float32", (4,), (1,)), buffer()).shape == (4,)
    with pytest.raises(ValueError):
        decode(program(call(ARRAY, array, call(DTYPE, text("<f4")), data((4,)))), buffer())


@pytest.mark.parametrize(
    "attributes",
    [{"numpy": 1}, {"__class__": 1}, {"_backward_hooks": {}}, {1: 2}, [1]],
    ids=repr,
)
def test_attributes_of_tensors(attributes: Any) -> None:
    """None that takes the place of a method."""
    one = call(TENSOR, BUFFER, text("float32"), data((4,)), data((1,)))
    with pytest.raises(ValueError):
        decode(program(call(name("aioarena._codec", "_set_attributes"), one, data(attributes))), buffer())
    with pytest.raises(ValueError):
        decode(program(call(name("aioarena._codec", "_set_attributes"), name(MODULE, "Step"), data({"a": 1}))))


@pytest.mark.parametrize(
    "around",
    [
        (-1, "", {}),
        (2**63, "", {}),
        (1.5, "", {}),
        (True, "", {}),
        (1, b"", {}),
        (1, "", {"a": 1}),
        (1, "", {b"a": "b"}),
        (1, "", []),
        (1, ""),
        (1, "", {}, 1),
    ],
    ids=repr,
)
def test_envelopes(around: tuple[Any, ...]) -> None:
    """Only what a sender puts around a message: others would be used as such."""
    take_postmark()
    with pytest.raises(ValueError):
        decode(program(call(name("aioarena._envelope", "open_envelope"), text("message"), *map(data, around))))
    assert take_postmark() is None


@pytest.mark.parametrize(
    "description",
    [
        "O",
        "|O8",
        "object",
        "f4,O",
        "f4",
        "<f4,<f4",
        "(2,)<f4",
        ("<f4", (-1,)),
        ("|O8", (1,)),
        (("a",), ("|O8",), (0,), 8, False),
        (("a",), ("<f8",), (0,), 4, False),
        (("a",), ("<f8",), (-8,), 8, False),
        (("a",), ("<f8",), (2**40,), 8, False),
        (("a", "b"), ("<f8",), (0,), 8, False),
        (("a",), ("<f8",), (0,), -8, False),
        7,
        None,
        ((((),),),),
    ],
    ids=repr,
)
def test_dtypes(description: Any) -> None:
    """None with objects in it, whose pointers would be the attacker's, and none that reaches beyond itself."""
    with pytest.raises((ValueError, TypeError)):
        decode(program(call(DTYPE, data(description))))


def test_arrays_and_scalars_beyond_their_memory() -> None:
    eight = call(DTYPE, text("<f8"))
    for steps in (
        call(ARRAY, BUFFER, eight, data((3,))),
        call(ARRAY, BUFFER, eight, data((-1,))),
        call(ARRAY, BUFFER, eight, data((2,)), text("K")),
        call(ARRAY, BUFFER, text("O"), data((2,))),
        call(ARRAY, data(bytes(16)), eight, data((2,))),
        call(name("numpy._core.multiarray", "scalar"), eight, data(bytes(7))),
        call(name("numpy._core.multiarray", "scalar"), eight, data(bytes(9))),
        call(name("numpy._core.multiarray", "scalar"), eight, data([1])),
        call(name("numpy._core.multiarray", "scalar"), text("O"), data(bytes(8))),
    ):
        with pytest.raises((ValueError, TypeError)):
            decode(program(steps), buffer())


@pytest.mark.parametrize(
    "steps",
    [
        call(name("aioarena._codec", "_rebuild_requiring_grad"), name(MODULE, "Step"), b"\x88"),
        call(name("aioarena._codec", "_rebuild_requiring_grad"), HONEST, b"K\1"),
        call(name("torch._utils", "_rebuild_parameter"), name(MODULE, "Step"), b"\x89", ORDERED),
        call(name("torch._utils", "_rebuild_parameter"), HONEST, b"K\1", ORDERED),
        call(name("torch._utils", "_rebuild_parameter"), HONEST, b"\x89", b"N"),
        call(name("torch._utils", "_rebuild_parameter"), HONEST, b"\x89", ORDERED + b"K\1" + name(MODULE, "Step") + b"s"),
    ],
    ids=repr,
)
def test_parameters_and_grad(steps: bytes) -> None:
    """Of tensors only, and without hooks."""
    with pytest.raises(ValueError, match="with arguments that no Sender writes"):
        decode(program(steps), buffer())


def test_memory_that_changes_meanwhile() -> None:
    """What was looked at is what is used."""
    good, bad = name(MODULE, "Step"), name("os", "system")

    def overwriting(at: int) -> bytes:
        overwrite = call(name(MODULE, "overwrite"), data(at), data(bad + b"0" * (len(good) - len(bad))))
        return program(overwrite, b"0", good)

    pickled = overwriting(overwriting(0).rindex(good))
    messages.SCRATCH[:] = pickled
    assert AllowList([MODULE, messages.overwrite]).decode(memoryview(messages.SCRATCH)) is Step
    assert bad in messages.SCRATCH[pickled.rindex(good) :]


def test_numpy_believes_what_a_pickle_says_of_a_dtype() -> None:
    """Why its own reduction is refused: no flag says that there are objects in this dtype, and there are."""
    lie = np.dtype("V8").__reduce__()[1]
    fields = {"a": (np.dtype("O"), 0)}
    dtype = np.dtype(*lie)
    dtype.__setstate__((3, "|", None, ("a",), fields, 8, 8, 0))
    assert not dtype.hasobject and dtype["a"].hasobject
    with pytest.raises(NotAllowedError, match=r"numpy\.dtype, which allow= never permits"):
        decode(pickle.dumps(Reduced(np.dtype, lie, (3, "|", None, ("a",), fields, 8, 8, 0)), 5))


# What torch and numpy reduce in ways that cannot be had -----------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*beta:UserWarning", "ignore:Sparse")
@pytest.mark.parametrize(
    "obj",
    [
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.ones(2).as_subclass(Subclass),
        lambda: np.array(["a", None], object),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: np.dtype("f4", metadata={"a": 1}),
        lambda: np.random.default_rng(0),
    ],
)
def test_refused_by_name(obj: Callable[[], Any]) -> None:
    """What honest senders have, too, is refused with what to do."""
    first, *others = as_plan(Encoder().encode([obj()])).sources
    with pytest.raises(NotAllowedError, match=r"it names (torch|numpy)\.[\w.]+, .*(send|detached)"):
        decode(bytes(first.tobytes()), *(memoryview(bytearray(source.tobytes())) for source in others))


# Anything ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_mutilated_messages(seed: int) -> None:
    """Bytes changed at random: an object or an exception, whatever comes; and the machine itself allows what it allowed."""
    message = {
        "step": Step(1, Kind.PREFILL, [torch.ones(4), np.ones((2, 2)), np.float32(1), torch.nn.Parameter(torch.ones(2))]),
        "plain": [1, 2.5, "text", b"bytes", (1, 2, 3, 4), {1, 2}, frozenset({3}), collections.deque([1], 2), 2**70],
        "dtype": np.dtype([("a", "f4"), ("b", "i8")]),
    }
    first, *others = as_plan(Encoder().encode(message)).sources
    pickled = bytes(first.tobytes())
    buffers = [memoryview(bytearray(source.tobytes())) for source in others]
    chance, allowed = random.Random(seed), AllowList(ALLOW)
    assert allowed.decode(pickled, buffers)["plain"] == message["plain"]
    survived = 0
    for _ in range(1500):
        changed = bytearray(pickled)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(2, len(changed))] = chance.randrange(256)
        try:
            allowed.decode(bytes(changed), buffers)
            survived += 1
        except Exception:
            continue
    assert 0 < survived < 1500
    with pytest.raises(NotAllowedError):
        allowed.decode(program(name("os", "system")))
