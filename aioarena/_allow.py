"""Unpickling what comes from a sender that is not trusted: ``Receiver(allow=...)``.

A pickle is a program, and ``pickle.loads`` runs whatever it names. Refusing names in ``Unpickler.find_class`` is not
enough: the standard unpickler also sets attributes of classes (``BUILD`` with slots), restores numpy dtypes whose flags lie
about objects in them and arrays that are freed while others look at them (``__setstate__``), takes objects from the
extension registry without asking, and makes room for as many memo entries as a number of four bytes says. So this is an
unpickler of its own. It knows what the pickler of a Sender writes in protocol 5, and nothing else:

* Names are looked up in a table. What is in it is either data (``int``, ``torch.float32``), or may be called, with
  arguments that a function here has looked at, or was allowed by the user.
* Modules are not imported, except those that the user allowed, by the constructor.
* State is set on instances of the user's classes and on exceptions only, and items on containers of known types.

It bounds no memory and no time.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import enum
import importlib
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from aioarena import _codec
from aioarena._envelope import open_envelope
from aioarena.exceptions import NotAllowedError, text_of

_unpack_float = struct.Struct(">d").unpack
_SHOWN = 100  # characters of a name that is refused
_MAX_DIMENSIONS = 64  # of torch, and of numpy
# Objects in one key of a dict or item of a set, nested tuples included: hashing has no limit of its own, and a few bytes
# of pickle describe a tuple that takes for ever, or all of the C stack.
_MAX_KEY_OBJECTS = 1000


class AllowList:
    """What a message may name.

    Args:
        allow: Names of modules, whose classes are allowed; and classes and functions.

    Raises:
        TypeError, ValueError: An entry makes no sense.
    """

    def __init__(self, allow: Iterable[str | Callable[..., Any]]) -> None:
        if isinstance(allow, str) or not isinstance(allow, Iterable):
            raise TypeError(f"allow must be a list of module names, classes and functions, not {type(allow).__name__}")
        self._modules: set[str] = set()
        self._known: dict[tuple[str, str], object] = dict(_DATA)
        # By id: what is on the stack of a hostile pickle may have any __hash__ and __eq__. The objects live in _known.
        self._checks: dict[int, _Check | None] = {}
        self._users: set[int] = set()
        for name, (function, check) in _CALLABLES.items():
            self._known[name] = function
            self._checks[id(function)] = check
        for entry in allow:
            self._add(entry)

    def _add(self, entry: str | Callable[..., Any]) -> None:
        if isinstance(entry, str):
            try:
                importlib.import_module(entry)
            except ImportError as error:
                raise ValueError(
                    f"allow names {entry!r}, which is no module that can be imported here ({text_of(error)}); allow a "
                    "class by itself, not by its name"
                ) from error
            self._modules.add(entry)
            return
        module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
        if not callable(entry) or not isinstance(module, str) or not isinstance(name, str):
            raise TypeError(f"allow takes names of modules, classes and functions, not {entry!r}")
        if _resolve(module, name) is not entry:
            raise ValueError(f"allow has {entry!r}, which pickle cannot find as {module}.{name}: define it in its module")
        self._admit((module, name), entry)

    def _admit(self, name: tuple[str, str], found: object) -> None:
        self._known[name] = found
        self._checks[id(found)] = None
        if isinstance(found, type):
            self._users.add(id(found))

    def find(self, module: str, name: str) -> object:
        """What a message names."""
        try:
            return self._known[module, name]
        except KeyError:
            pass
        if module in self._modules:
            found = _resolve(module, name)
            # Defined there, not merely imported there: an import must not make the whole of another module callable.
            if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name):
                self._admit((module, name), found)
                return found
        what = f"{module}.{name}"[:_SHOWN].encode("ascii", "backslashreplace").decode()
        raise NotAllowedError(_advice(module, name, what), what=what)

    def call(self, function: Callable[..., Any], args: Any) -> object:
        """What a message calls."""
        if type(args) is not tuple:
            raise ValueError("arguments that are no tuple")
        check: _Check | None = self._checks.get(id(function), _never)
        if check is not None:
            return check(function, args)
        return function(*args)

    def is_users(self, cls: object) -> bool:
        """Whether a class is one that the user allowed."""
        return id(cls) in self._users

    def decode(self, pickled: bytes | memoryview, buffers: Sequence[memoryview] | None = None) -> Any:
        """Unpickle an object over its buffers, as :func:`aioarena._codec.decode` does.

        Raises:
            NotAllowedError: It names what is not allowed.
            Exception: Anything else that is wrong with it.
        """
        # A copy, because memory that others see may change between looking and using.
        return _Machine(self, bytes(pickled), iter(buffers or ())).run()


def _resolve(module: str, name: str) -> Any:
    """What a dotted name means in a module that is imported: classes in classes, no other attributes."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        if found is None or not hasattr(found, "__dict__"):
            return None
        found = vars(found).get(part)
    return found


def _advice(module: str, name: str, what: str) -> str:
    if what in _INSTEAD:
        return f"it names {what}, which allow= never permits: {_INSTEAD[what]}"
    if module.startswith(("torch", "numpy")):
        return (
            f"it names {what}, which allow= does not permit: send plain CPU tensors (strided, no grad; no subclass) and "
            "plain arrays, or their parts"
        )
    return f"it names {what}, which allow= does not list: add the class itself, or its module's name for all classes there"


_INSTEAD = {
    "torch.storage._load_from_bytes": "it unpickles anything; send the tensor detached, dense and unquantized",
    "numpy._core.multiarray._reconstruct": "send an array that is no subclass and has no objects in it",
    "numpy.core.multiarray._reconstruct": "send an array that is no subclass and has no objects in it",
    "numpy.dtype": "its state can lie about memory; send a dtype without objects, metadata or types of other packages",
}


# The machine -----------------------------------------------------------------------------------------------------------


class _Machine:
    """Runs one pickle."""

    __slots__ = ("allowed", "at", "buffers", "data", "marks", "memo", "stack")

    def __init__(self, allowed: AllowList, data: bytes, buffers: Iterator[memoryview]) -> None:
        self.allowed = allowed
        self.data = data
        self.at = 0
        self.buffers = buffers
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        if self.data[:2] != b"\x80\x05":
            raise ValueError("it is no pickle of protocol 5")
        data, memo, at = self.data, self.memo, 2
        while True:
            opcode = data[at]  # IndexError where it is cut off
            at += 1
            # The most frequent ones here, which saves a third of the time.
            if opcode == _MEMOIZE:
                memo.append(self.stack[-1])
            elif opcode == _SHORT_TEXT:
                start, at = at + 1, at + 1 + data[at]
                if at > len(data):
                    raise ValueError("it is cut off")
                self.stack.append(str(data[start:at], "utf-8", "surrogatepass"))
            elif opcode == _RECALL:
                self.stack.append(memo[data[at]])
                at += 1
            elif opcode == _STOP:
                return self.stack.pop()
            else:
                step = _STEPS[opcode]
                if step is None:
                    raise ValueError(f"it has the opcode {opcode:#04x}, which no Sender writes")
                self.at = at
                step(self)
                at = self.at

    def take(self, nbytes: int) -> bytes:
        start = self.at
        self.at = stop = start + nbytes
        taken = self.data[start:stop]
        if len(taken) != nbytes:
            raise ValueError("it is cut off")
        return taken

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items


def _put(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _put_int(nbytes: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        machine.stack.append(int.from_bytes(machine.take(nbytes), "little"))

    return put


def _put_signed(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _put_long(size: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        machine.stack.append(int.from_bytes(machine.take(machine.number(size)), "little", signed=True))

    return put


def _put_float(machine: _Machine) -> None:
    machine.stack.append(_unpack_float(machine.take(8))[0])


def _put_text(size: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        machine.stack.append(str(machine.take(machine.number(size)), "utf-8", "surrogatepass"))

    return put


def _put_bytes(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)))


def _put_bytearray(machine: _Machine) -> None:
    machine.stack.append(bytearray(machine.take(machine.number(8))))


def _put_buffer(machine: _Machine) -> None:
    try:
        machine.stack.append(next(machine.buffers))
    except StopIteration:
        raise ValueError("it has fewer buffers than it names") from None


def _make_readonly(machine: _Machine) -> None:
    machine.stack[-1] = memoryview(machine.stack[-1]).toreadonly()


def _put_new(kind: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(kind())


def _put_tuple_of(length: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < length:
            raise ValueError("its stack is empty")
        stack[-length:] = [tuple(stack[-length:])]

    return put


def _put_tuple(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(tuple(items))


def _put_frozenset(machine: _Machine) -> None:
    items = machine.pop_mark()
    _check_keys(items)
    machine.stack.append(frozenset(items))


def _mark(machine: _Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _recall(machine: _Machine) -> None:
    machine.stack.append(machine.memo[machine.number(4)])


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    _extend(machine, [item])


def _appends(machine: _Machine) -> None:
    _extend(machine, machine.pop_mark())


def _extend(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) not in (list, collections.deque) and not machine.allowed.is_users(type(target)):
        raise ValueError(f"it appends to an object of type {type(target).__qualname__}")
    target.extend(items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine, [key, value])


def _set_items(machine: _Machine) -> None:
    _update(machine, machine.pop_mark())


def _update(machine: _Machine, items: list[Any]) -> None:
    target, keys = machine.stack[-1], items[::2]
    if type(target) not in _MAPPINGS and not machine.allowed.is_users(type(target)):
        raise ValueError(f"it sets items of an object of type {type(target).__qualname__}")
    _check_keys(keys)
    for key, value in zip(keys, items[1::2], strict=True):
        target[key] = value


def _add_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    target = machine.stack[-1]
    if type(target) is not set:
        raise ValueError(f"it adds items to an object of type {type(target).__qualname__}")
    _check_keys(items)
    target.update(items)


def _check_keys(keys: list[Any]) -> None:
    """Refuse keys that would take for ever to hash."""
    for key in keys:
        if type(key) is not str and isinstance(key, tuple | frozenset):
            _check_key(key)


def _check_key(key: Iterable[Any]) -> None:
    count, todo = 0, [key]
    while todo:
        for item in todo.pop():
            count += 1
            if count > _MAX_KEY_OBJECTS:
                raise ValueError(f"it has a key of more than {_MAX_KEY_OBJECTS} objects")
            if isinstance(item, tuple | frozenset):
                todo.append(item)


def _put_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(module) is not str or type(name) is not str:
        raise ValueError("it names an object by something else than text")
    machine.stack.append(machine.allowed.find(module, name))


def _reduce(machine: _Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.allowed.call(machine.stack[-1], args)


def _make(machine: _Machine) -> None:
    args = machine.stack.pop()
    _new(machine, args, {})


def _make_with_names(machine: _Machine) -> None:
    options, args = machine.stack.pop(), machine.stack.pop()
    if type(options) is not dict:
        raise ValueError("arguments by name that are no dict")
    _new(machine, args, options)


def _new(machine: _Machine, args: Any, options: dict[str, Any]) -> None:
    cls = machine.stack[-1]
    if cls is object and args == ():
        machine.stack[-1] = object()
        return
    if not machine.allowed.is_users(cls) or type(args) is not tuple:
        raise ValueError(f"it makes an instance of {_name(cls)} in a way that no Sender writes")
    machine.stack[-1] = cls.__new__(cls, *args, **options)


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    cls = type(target)
    # An instance, never the class itself: that would change it for everybody.
    if not machine.allowed.is_users(cls) and not (isinstance(target, BaseException) and cls.__module__ == "builtins"):
        raise ValueError(f"it sets the state of an object of type {cls.__qualname__}")
    set_state = getattr(target, "__setstate__", None)
    if set_state is not None:
        set_state(state)
        return
    state, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if state:
        vars(target).update({sys.intern(name): value for name, value in state.items()})
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _skip_frame(machine: _Machine) -> None:
    machine.take(8)


def _refuse_extension(machine: _Machine) -> None:
    what = "an object by a number of copyreg's extension registry"
    raise NotAllowedError(f"it names {what}, which allow= never permits: do not register it at the sender", what=what)


_STOP, _MEMOIZE, _RECALL, _SHORT_TEXT = b".\x94h\x8c"
# The opcodes of pickletools that the C pickler writes in protocol 5.
_OPCODES: dict[bytes, Callable[[_Machine], object]] = {
    b"\x95": _skip_frame,
    b"N": _put(None),
    b"\x88": _put(True),
    b"\x89": _put(False),
    b"J": _put_signed,
    b"K": _put_int(1),
    b"M": _put_int(2),
    b"\x8a": _put_long(1),
    b"\x8b": _put_long(4),
    b"G": _put_float,
    b"X": _put_text(4),
    b"\x8d": _put_text(8),
    b"C": _put_bytes(1),
    b"B": _put_bytes(4),
    b"\x8e": _put_bytes(8),
    b"\x96": _put_bytearray,
    b"\x97": _put_buffer,
    b"\x98": _make_readonly,
    b")": _put(()),
    b"\x85": _put_tuple_of(1),
    b"\x86": _put_tuple_of(2),
    b"\x87": _put_tuple_of(3),
    b"t": _put_tuple,
    b"]": _put_new(list),
    b"a": _append,
    b"e": _appends,
    b"}": _put_new(dict),
    b"s": _set_item,
    b"u": _set_items,
    b"\x8f": _put_new(set),
    b"\x90": _add_items,
    b"\x91": _put_frozenset,
    b"(": _mark,
    b"0": _pop,
    b"1": _Machine.pop_mark,
    b"j": _recall,
    b"\x93": _put_global,
    b"R": _reduce,
    b"\x81": _make,
    b"\x92": _make_with_names,
    b"b": _build,
    b"\x82": _refuse_extension,
    b"\x83": _refuse_extension,
    b"\x84": _refuse_extension,
}
_STEPS = [_OPCODES.get(bytes([code])) for code in range(256)]


# What is always allowed ------------------------------------------------------------------------------------------------


def _never(function: object, args: tuple[Any, ...]) -> object:
    raise ValueError(f"it calls {_name(function)}")


def _name(found: object) -> str:
    """A class or function for a message, without asking objects that are neither."""
    return found.__qualname__ if isinstance(found, type) else f"an object of type {type(found).__qualname__}"


def _require(condition: object, function: Any) -> None:
    if not condition:
        raise ValueError(f"it calls {function.__name__} with arguments that no Sender writes")


def _any_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """For what is harmless whatever it is called with."""
    return function(*args)


def _numbers(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _require(all(type(arg) in (int, float, bool, type(None)) for arg in args), function)
    return function(*args)


def _defaultdict(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _require(len(args) <= 1 and all(arg is None or isinstance(arg, type) for arg in args), function)
    return function(*args)


def _empty(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _require(args == (), function)
    return function()


def _deque(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _require(args == () or (len(args) == 2 and args[0] == () and type(args[1]) in (int, type(None))), function)
    return function(*args)


def _counter(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _require(len(args) == 1 and type(args[0]) is dict, function)  # its keys were checked when they were set
    return function(*args)


def _member(function: object, args: tuple[Any, ...]) -> Any:
    """``getattr``, as some Pythons write the members of an enum; and for nothing else."""
    cls, name = args
    if not isinstance(cls, enum.EnumMeta) or type(name) is not str or name not in cls.__members__:
        raise NotAllowedError(
            "it names builtins.getattr, which allow= permits for members of enums only", what="builtins.getattr"
        )
    return cls.__members__[name]


def _size(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _require(len(args) == 1 and _are_lengths(args[0]), function)
    return function(*args)


def _are_lengths(lengths: Any) -> bool:
    return (
        type(lengths) is tuple
        and len(lengths) <= _MAX_DIMENSIONS
        and all(type(length) is int and 0 <= length < 1 << 62 for length in lengths)
    )


def _tensor(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor:
    buffer, dtype_name, shape, stride = args
    _require(type(buffer) is memoryview and not buffer.readonly and type(dtype_name) is str, function)
    _require(_are_lengths(shape) and _are_lengths(stride) and len(shape) == len(stride), function)
    _require(math.prod(shape) < 1 << 62, function)
    if 0 not in shape:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if extent * _codec._DTYPES[dtype_name].itemsize > buffer.nbytes:
            raise ValueError(f"a tensor reaches beyond its buffer of {buffer.nbytes} bytes")
    return _codec._rebuild_tensor(buffer, dtype_name, shape, stride)


def _requiring_grad(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor:
    tensor, requires_grad = args
    _require(type(tensor) is torch.Tensor and type(requires_grad) is bool, function)
    return _codec._rebuild_requiring_grad(tensor, requires_grad)


def _parameter(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor:
    data, requires_grad, hooks = args
    _require(type(data) is torch.Tensor and type(requires_grad) is bool, function)
    _require(type(hooks) is collections.OrderedDict and not hooks, function)
    return torch.nn.Parameter(data, requires_grad)


def _attributes(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    tensor, attributes = args
    _require(isinstance(tensor, torch.Tensor) and type(attributes) is dict, function)
    # An attribute must not take the place of a method.
    _require(all(type(name) is str and not hasattr(torch.Tensor, name) for name in attributes), function)
    _codec._set_attributes(tensor, attributes)


def _envelope(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    message, sent_ns, clock, carrier = args
    _require(type(sent_ns) is int and 0 <= sent_ns < 1 << 63 and type(clock) is str, function)
    _require(type(carrier) is dict and all(type(part) is str for item in carrier.items() for part in item), function)
    return open_envelope(message, sent_ns, clock, carrier)


def _dtype(function: Callable[..., Any], args: tuple[Any, ...]) -> np.dtype[Any]:
    (description,) = args
    _require(_is_description(description, _MAX_DIMENSIONS), function)
    dtype = _codec._rebuild_dtype(description)
    _require(not dtype.hasobject, function)
    return dtype


# As numpy writes them in dtype.str; no "O".
_PLAIN_DTYPE = re.compile(r"[<>=|][biufcSUVMm]\d{1,9}(\[\d*[A-Za-z]{1,2}\])?")


def _is_description(description: Any, depth: int) -> bool:
    """Whether it is what the codec writes for a dtype."""
    if type(description) is str:
        return _PLAIN_DTYPE.fullmatch(description) is not None
    if type(description) is not tuple or depth == 0:
        return False
    if len(description) == 2:
        return _is_description(description[0], depth - 1) and _are_lengths(description[1])
    names, formats, offsets, itemsize, aligned = description
    return (
        type(names) is tuple
        and type(formats) is tuple
        and all(type(name) is str for name in names)
        and all(_is_description(part, depth - 1) for part in formats)
        and type(offsets) is tuple
        and all(type(offset) is int and offset >= 0 for offset in offsets)
        and type(itemsize) is int
        and type(aligned) is bool
    )


def _array(function: Callable[..., Any], args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    buffer, dtype, shape, *order = args
    # A memoryview, which keeps the memory that it looks at from being freed; an array would not.
    _require(type(buffer) is memoryview and isinstance(dtype, np.dtype) and _are_lengths(shape), function)
    _require(order in ([], ["C"], ["F"]) and not dtype.hasobject, function)
    if 0 in shape or not dtype.itemsize:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(shape, order=order[0] if order else "C")


def _scalar(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dtype, data = args
    _require(isinstance(dtype, np.dtype) and type(data) is bytes and not dtype.hasobject, function)
    _require(len(data) == dtype.itemsize, function)
    return np.array(np.ndarray((), dtype, data))[()]


_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)

# May be named, not called.
_PLAIN = (bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, object)
_DATA: dict[tuple[str, str], object] = {
    **{("builtins", kind.__name__): kind for kind in _PLAIN},
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}

_Check = Callable[[Any, tuple[Any, ...]], Any]
# May be called: the object, and what calls it after a look at the arguments.
_CALLABLES: dict[tuple[str, str], tuple[Any, _Check]] = {
    ("builtins", "complex"): (complex, _numbers),
    ("builtins", "range"): (range, _numbers),
    ("builtins", "slice"): (slice, _numbers),
    **{
        ("builtins", name): (kind, _any_arguments)
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    },
    **{
        ("datetime", kind.__name__): (kind, _any_arguments)
        for kind in (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
    },
    ("collections", "OrderedDict"): (collections.OrderedDict, _empty),
    ("collections", "defaultdict"): (collections.defaultdict, _defaultdict),
    ("collections", "deque"): (collections.deque, _deque),
    ("collections", "Counter"): (collections.Counter, _counter),
    ("torch", "device"): (torch.device, _any_arguments),
    ("torch", "Size"): (torch.Size, _size),
    # Functions are not even handed out: their checks stand for them.
    **{
        name: (check, check)
        for name, check in {
            ("builtins", "getattr"): _member,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("aioarena._codec", "_rebuild_tensor"): _tensor,
            ("aioarena._codec", "_rebuild_requiring_grad"): _requiring_grad,
            ("aioarena._codec", "_set_attributes"): _attributes,
            ("aioarena._codec", "_rebuild_dtype"): _dtype,
            ("aioarena._codec", "_rebuild_array"): _array,
            ("aioarena._envelope", "open_envelope"): _envelope,
            # Numpy's own, as its second and as its first major version name them.
            ("numpy._core.numeric", "_frombuffer"): _array,
            ("numpy.core.numeric", "_frombuffer"): _array,
            ("numpy._core.multiarray", "scalar"): _scalar,
            ("numpy.core.multiarray", "scalar"): _scalar,
        }.items()
    },
}
