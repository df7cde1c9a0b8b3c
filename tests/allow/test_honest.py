"""What a sender that means well sends arrives under ``allow=`` as it does without."""

from __future__ import annotations

import collections
import datetime
import enum
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import _codec
from aioarena._allow import AllowList
from aioarena._codec import Encoder, as_plan
from aioarena._envelope import Envelope, take_postmark
from tests.allow import messages
from tests.allow.messages import ByFunction, Failure, Flags, Frozen, Kind, Outer, Pair, Step, Table, WithState

MODULE = "tests.allow.messages"


def encoded(obj: object) -> tuple[bytes, list[memoryview]]:
    """What travels: the pickled bytes, and the buffers in memory of their own."""
    first, *others = as_plan(Encoder().encode(obj)).sources
    return bytes(first.tobytes()), [memoryview(bytearray(source.tobytes())) for source in others]


def received(obj: object, *allow: Any) -> Any:
    return AllowList(allow).decode(*encoded(obj))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride(), one.requires_grad) == (
            other.dtype,
            other.shape,
            other.stride(),
            other.requires_grad,
        )
        assert one.detach().numpy(force=True).tobytes() == other.detach().numpy(force=True).tobytes()
        assert vars(one) == vars(other)
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype == other.dtype and one.dtype.fields == other.dtype.fields
        assert one.shape == other.shape and one.tobytes() == other.tobytes()
        if isinstance(one, np.ndarray):
            assert one.flags.writeable == other.flags.writeable
    else:
        assert one == other


def with_attributes() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.origin = "here"  # type: ignore[attr-defined]
    return tensor


PLAIN = {
    "constants": [None, True, False, ..., NotImplemented],
    "integers": [0, 1, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**64, -(10**700), 10**700],
    "floats": [0.0, -1.5, 1e300, float("inf"), 1 + 2j],
    "texts": ["", "a", "ä" * 300, "\ud800", "x" * 70_000],
    "bytes": [b"", b"a", b"b" * 300, bytearray(b"c" * 3), bytearray()],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), (((),),))],
    "containers": [[], [1], list(range(3000)), {}, {"a": 1}, {i: str(i) for i in range(3000)}, {(1, (2, "x")): 3}],
    "sets": [set(), {1, 2}, frozenset({(1, 2), frozenset({3})}), set(range(3000))],
    "same twice": [[shared := [1]], shared, {"again": shared}],
    "ranges": [range(3), range(10, 0, -2), slice(1, None), slice(None, 3, 2)],
    "classes": [int, list, bool, object],
    "dates": [
        datetime.date(2026, 1, 2),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
        datetime.time(1, 2),
        datetime.timedelta(days=-1, microseconds=5),
        datetime.timezone(datetime.timedelta(hours=2), "there"),
    ],
    "collections": [
        collections.OrderedDict(a=1, b=2),
        collections.defaultdict(list, {"a": [1]}),
        collections.deque([1, 2, 3], 5),
        collections.deque(),
        collections.Counter("abracadabra"),
    ],
    "torch": [torch.float32, torch.bfloat16, torch.Size([1, 2]), torch.device("cpu"), torch.device("cuda", 1)],
    "dtypes": [
        np.dtype(kind) for kind in ["f4", ">f4", "?", "i1", "u8", "c16", "S5", "U7", "V3", "M8[ns]", "m8[25s]", "g", "q"]
    ]
    + [np.dtype([("a", "f4"), ("b", ">i8", (2, 3))]), np.dtype([("a", "i1"), ("b", [("c", "i8")])], align=True)],
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_data(kind: str) -> None:
    assert_same(received(PLAIN[kind]), PLAIN[kind])


@pytest.mark.parametrize("dtype", _codec._DTYPES.values(), ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.frombuffer(bytearray(range(96)), dtype=dtype)
    back = received(tensor)
    assert back.dtype == dtype
    assert back.view(torch.uint8).tolist() == list(range(96))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.ones(1).expand(5, 5),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, dtype=torch.float8_e4m3fn).requires_grad_(),
        with_attributes(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_tensors(tensor: torch.Tensor) -> None:
    back = received([tensor])[0]
    if tensor.dtype == torch.float8_e4m3fn:
        assert back.requires_grad and back.detach().view(torch.uint8).equal(tensor.detach().view(torch.uint8))
        return
    assert_same(back, _codec.decode(*encoded([tensor]))[0])


def readonly() -> np.ndarray[Any, Any]:
    array = np.arange(5)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(20, dtype=">i4").reshape(4, 5)[::2, ::-2],
        np.zeros((0, 3), "U5"),
        np.array(["a", "bcd"]),
        np.array("2026-01-02", "M8[D]"),
        np.zeros(3, [("a", "f4"), ("b", "i8", 2)]),
        readonly(),
        np.float32(1.5),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2026-01-02T03:04"),
        np.ones(2, [("a", "f4"), ("b", "i8")])[1],
    ],
    ids=lambda array: f"{array.dtype}{array.shape}"[:30],
)
def test_arrays_and_scalars(array: Any) -> None:
    assert_same(received(array), _codec.decode(*encoded(array)))


def test_exceptions() -> None:
    """Builtin ones, with their notes."""
    error = FileNotFoundError(2, "not there", "file")
    error.add_note("a note")
    back = received(error)
    assert type(back) is FileNotFoundError
    assert (back.args, back.filename, back.__notes__) == (error.args, "file", ["a note"])


def test_what_travels_with_a_message() -> None:
    """A trace's context, or when it was sent: data, whoever it comes from."""
    assert received(Envelope({"step": torch.ones(3)}, {"traceparent": "00-1-2-01"}))["step"].sum() == 3
    postmark = take_postmark()
    assert postmark is not None and postmark.age is not None
    assert postmark.carrier == {"traceparent": "00-1-2-01"}


def test_an_object_in_itself() -> None:
    loop: list[Any] = []
    loop.append((loop, {"again": loop}))
    back = received(loop)
    assert back[0][0] is back and back[0][1]["again"] is back


USERS = [
    Step(1, Kind.PREFILL, [1, 2]),
    Frozen("a", (1, 2)),
    Pair([1], None),
    Outer.Inner(3),
    WithState(4),
    Kind.DECODE,
    Flags.A | Flags.B,
]


@pytest.mark.parametrize("obj", USERS, ids=repr)
@pytest.mark.parametrize("by", ["module", "class"])
def test_allowed_classes(obj: object, by: str) -> None:
    """All of a module, or each."""
    allow = [MODULE] if by == "module" else [type(obj), Kind]
    assert received({"obj": obj, "again": [obj]}, *allow) == {"obj": obj, "again": [obj]}


def test_subclasses_of_containers() -> None:
    table = Table(a=1)
    table.note = "attribute"  # type: ignore[attr-defined]
    back = received(table, MODULE)
    assert type(back) is Table and back == {"a": 1} and back.note == "attribute"


def test_exceptions_of_an_allowed_module() -> None:
    error = Failure("text", 2)
    error.more = [1]  # type: ignore[attr-defined]
    back = received(error, MODULE)
    assert type(back) is Failure and back.args == ("text", 2) and back.more == [1]


def test_functions_are_allowed_by_themselves() -> None:
    assert received([ByFunction()], messages.rebuild) == [("rebuilt", 7)]
    assert received(messages.rebuild, messages.rebuild) is messages.rebuild


def test_members_of_enums_by_name() -> None:
    """As some versions of Python write them."""
    pickled = b"\x80\x05\x8c\x08builtins\x8c\x07getattr\x93\x8c\x14tests.allow.messages\x8c\x04Kind\x93\x8c\x06DECODE\x86R."
    assert pickle.loads(pickled) is Kind.DECODE
    assert AllowList([MODULE]).decode(pickled) is Kind.DECODE


@pytest.mark.parametrize(
    ("allow", "error", "words"),
    [
        ("tests.allow.messages", TypeError, "a list of module names"),
        (7, TypeError, "a list of module names"),
        ([7], TypeError, "names of modules, classes and functions, not 7"),
        (["no.such.module"], ValueError, "'no.such.module', which is no module"),
        (["tests.allow.messages.Step"], ValueError, "allow a class by itself"),
        ([type("Local", (), {})], ValueError, "pickle cannot find"),
        ([lambda: None], ValueError, "pickle cannot find"),
        ([enum.Enum("Made", "A", module="nowhere")], ValueError, "pickle cannot find"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_lists(allow: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        AllowList(allow)
