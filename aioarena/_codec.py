"""Objects to pickled bytes and buffers, and back. The one place that knows torch's and numpy's types.

Pickle protocol 5 takes large memory out of band: numpy arrays and ``PickleBuffer`` do so by themselves, CPU tensors
through the reducer here, whatever their size, because the size of a tensor must not change what it means. Nothing is
copied while planning: a :class:`Plan` holds the sources, and they are copied to where they travel later.

A tensor that owns or covers a dense piece of memory (contiguous, transposed, channels-last, expanded, overlapping
windows) is taken as that piece and rebuilt with its strides; one with gaps is gathered, in one copy, into contiguous
memory. What is not plain strided CPU memory takes torch's own reduction, see :meth:`Encoder._reduce_tensor`.
"""

from __future__ import annotations

import copyreg
import ctypes
import dataclasses
import math
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from aioarena._copying import STEP_BYTES, Portion
from aioarena._envelope import Envelope
from aioarena.exceptions import BusyError, EncodeError, text_of

_PROTOCOL = 5
_PATH_SHOWN = 60  # characters at either end of a path
_MAX_PATH_STEPS = 2000  # objects tried when looking for the culprit of a pickling error; a guess that bounds its time


class Source(Protocol):
    """Memory of the caller that will travel as one buffer.

    Attributes:
        nbytes: Bytes it takes where it travels.
    """

    nbytes: int

    def tobytes(self) -> bytes | memoryview:
        """The bytes, for the ring."""

    def portions(self, destination: int) -> list[Portion]:
        """What to copy to fill the memory at address ``destination``."""


_memmove = ctypes.CDLL(None).memmove  # CDLL, so that the GIL is released while it copies
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


class MemorySource:
    """A contiguous piece of memory, with the object that keeps it alive.

    Attributes:
        address: Where it begins.
        nbytes: Its size.
    """

    __slots__ = ("_owner", "address", "nbytes")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    @classmethod
    def of(cls, buffer: memoryview | bytes) -> MemorySource:
        array = np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)
        return cls(array.ctypes.data, array.nbytes, array)

    def tobytes(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)

    def portions(self, destination: int) -> list[Portion]:
        def copy(start: int, stop: int) -> None:
            _memmove(destination + start, self.address + start, stop - start)

        return [Portion(self.nbytes, 1, copy)]


class ChunksSource:
    """Pickled bytes as the pickler wrote them, in several chunks."""

    __slots__ = ("_chunks", "nbytes")

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks
        self.nbytes = sum(map(len, chunks))

    def tobytes(self) -> bytes:
        return b"".join(self._chunks)

    def portions(self, destination: int) -> list[Portion]:
        portions = []
        for part in self._chunks:
            portions += MemorySource.of(part).portions(destination)
            destination += len(part)
        return portions


class GatherSource:
    """A strided array that is copied element by element into C order."""

    __slots__ = ("_array", "_owner", "address", "nbytes")

    def __init__(self, array: np.ndarray[Any, Any], owner: object) -> None:
        self._array = array
        self.address = int(array.ctypes.data)
        self._owner = owner
        self.nbytes = array.nbytes

    def tobytes(self) -> bytes:
        return self._array.tobytes()

    def portions(self, destination: int) -> list[Portion]:
        source = self._array
        if not source.size:
            return []
        memory = (ctypes.c_ubyte * self.nbytes).from_address(destination)
        target: np.ndarray[Any, Any] = np.ndarray(source.shape, source.dtype, memoryview(memory))
        wanted = -(-self.nbytes // STEP_BYTES)
        # The first axis that is long enough keeps the parts compact; a batch of one image needs another than the first.
        axis = next((i for i, n in enumerate(source.shape) if n >= wanted), int(np.argmax(source.shape)))

        def copy(start: int, stop: int) -> None:
            where = (slice(None),) * axis + (slice(start, stop),)
            np.copyto(target[where], source[where])

        return [Portion(source.shape[axis], self.nbytes // source.shape[axis], copy)]


class Plan:
    """A pickled object: what has to travel, nothing copied yet.

    Attributes:
        sources: The pickled bytes, then each out-of-band buffer in pickle's order.
        undivertible: How many tensors took torch's own reduction.
    """

    __slots__ = ("sources", "undivertible")

    def __init__(self, sources: list[Source], undivertible: int) -> None:
        self.sources = sources
        self.undivertible = undivertible

    @property
    def sizes(self) -> list[int]:
        return [source.nbytes for source in self.sources]

    def clear(self) -> None:
        """Let go of the caller's memory."""
        self.sources.clear()


def as_plan(message: bytes | Plan) -> Plan:
    """A plan for what :meth:`Encoder.encode` gave, whichever it was."""
    return Plan([ChunksSource([message])], 0) if isinstance(message, bytes) else message


class _Sink:
    """The file a pickler writes to: its chunks, uncopied."""

    __slots__ = ("write",)

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write


class Encoder:
    """Turns objects into pickled bytes and buffers. One thread at a time.

    The pickler is kept between messages, which saves half of the time of a small one.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._sources: list[Source] = []
        self._placeholders: dict[int, tuple[pickle.PickleBuffer, Source]] = {}
        self._undivertible = 0
        self._busy = False
        self._pickler = pickle.Pickler(_Sink(self._chunks.append), _PROTOCOL, buffer_callback=self._take_buffer)
        self._registered: dict[Any, Any] = {}
        self._refresh_table()

    def _refresh_table(self) -> None:
        # A copy, because a plain dict is what the C pickler looks up fastest; refreshed when somebody registers a type.
        self._registered = dict(copyreg.dispatch_table)
        self._pickler.dispatch_table = {
            **self._registered,
            torch.Tensor: self._reduce_tensor,
            np.ndarray: self._reduce_array,
            **_DTYPE_REDUCERS,
        }

    def encode(self, obj: object) -> bytes | Plan:
        """Pickle an object.

        Returns:
            The pickled bytes when they are all there is and came in one piece; else a plan.

        Raises:
            EncodeError: The object does not pickle; the original error is its cause.
            BusyError: Called from inside an object's own pickling.
        """
        if self._busy:
            raise BusyError(
                "send called while this channel is pickling another object (from its __reduce__ or __getstate__); "
                "send before or after, not inside"
            )
        if copyreg.dispatch_table != self._registered:
            self._refresh_table()
        chunks, sources = self._chunks, self._sources
        self._busy = True
        try:
            self._pickler.dump(obj)
            if len(chunks) == 1 and not sources and not self._undivertible:
                return chunks[0]
            return Plan([ChunksSource(chunks.copy()), *sources], self._undivertible)
        except Exception as error:
            # Still busy while looking for the culprit: that calls the same __reduce__ methods, and one may send.
            raise EncodeError(f"cannot pickle {_describe(obj)}: {text_of(error)}") from error
        finally:
            # The memo would keep every object of the message alive, and with it the caller's tensors.
            self._pickler.clear_memo()
            chunks.clear()
            if sources or self._placeholders or self._undivertible:
                sources.clear()
                self._placeholders.clear()
                self._undivertible = 0
            self._busy = False

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        known = self._placeholders.pop(id(buffer), None)
        self._sources.append(known[1] if known else MemorySource.of(buffer.raw()))
        return False  # out of band

    def _placeholder(self, source: Source) -> pickle.PickleBuffer:
        # loads only takes the next buffer, whatever the pickled one was: so an empty one stands for the source.
        # Over a bytearray, because for a read-only buffer pickle would make the received one read-only.
        buffer = pickle.PickleBuffer(bytearray())
        self._placeholders[id(buffer)] = (buffer, source)
        return buffer

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        """Reduce a plain tensor to a buffer, dtype, shape and strides.

        Left to torch's own reduction, so that they arrive exactly as pickle alone delivers them: other devices and
        layouts, quantized and nested tensors, those requiring grad, conjugate and negative views, named tensors.
        """
        if (
            not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.requires_grad
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
            or tensor.is_nested
            or _has_names(tensor)
        ):
            return self._reduce_undivertible(tensor)
        dtype = tensor.dtype
        name = _NAMES.get(dtype)
        if name is None:
            raise TypeError(f"a tensor of dtype {dtype} cannot be pickled by torch {torch.__version__}; view it as uint8")
        shape, stride = tuple(tensor.shape), tensor.stride()
        itemsize = tensor.element_size()
        numel = tensor.numel()
        # Elements between the first and the last, gaps included.
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if numel else 0
        # One of each that an expanded dimension repeats: what there really is.
        bare = tuple(1 if s == 0 and n else n for n, s in zip(shape, stride, strict=True))
        source: Source
        if extent <= math.prod(bare):
            source = MemorySource(tensor.data_ptr(), extent * itemsize, tensor)
        else:
            once = tensor.as_strided(bare, stride).view(_INTEGER_OF_SIZE[itemsize])
            source = GatherSource(once.numpy(), tensor)
            stride = tuple(s and c for s, c in zip(stride, _contiguous_stride(bare), strict=True))
        arguments = (self._placeholder(source), name, shape, stride)
        if tensor.__dict__:
            # Sixth item: torch.Tensor has a __setstate__ of another meaning, so attributes are set by hand.
            return _rebuild_tensor, arguments, tensor.__dict__, None, None, _set_attributes
        return _rebuild_tensor, arguments

    def _reduce_undivertible(self, tensor: torch.Tensor) -> Any:
        self._undivertible += 1
        plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
        if plain and not _has_names(tensor) and not tensor.__dict__:
            if tensor.dtype not in _PICKLED_BY_TORCH:
                # torch writes these dtypes but cannot read them back (float8, uint16 ..., complex32).
                bare = tensor.detach().resolve_conj().resolve_neg()
                return _rebuild_requiring_grad, (bare, tensor.requires_grad)
            if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
                # torch would ship the whole storage behind a small view.
                with torch.no_grad():
                    tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        times = array.dtype.kind in "mM"  # which numpy leaves in the pickled bytes
        if array.dtype.hasobject or (array.flags.forc and not times) or array.size == 0:
            return array.__reduce_ex__(_PROTOCOL)
        # Of records, copied field by field, the padding would stay what was in that memory before.
        whole = array.view((np.void, array.itemsize)) if array.dtype.names else array
        buffer = self._placeholder(GatherSource(whole, array))
        return _rebuild_array, (buffer, array.dtype, array.shape)


def decode(
    pickled: bytes | memoryview, buffers: Sequence[memoryview] | None = None, *, _loads: Callable[..., Any] = pickle.loads
) -> Any:
    """Unpickle an object over its buffers; tensors and arrays alias them."""
    return _loads(pickled) if buffers is None else _loads(pickled, buffers=buffers)


# Rebuilding: these names are part of the wire format --------------------------------------------------------------


def _rebuild_tensor(buffer: memoryview, dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    dtype = _DTYPES[dtype_name]
    if 0 in shape:
        return torch.empty_strided(shape, stride, dtype=dtype)
    # frombuffer keeps the memoryview, and that what it looks at, until the last user of the storage is gone.
    tensor = torch.frombuffer(buffer, dtype=dtype)
    if len(shape) != 1 or stride[0] != 1 or tensor.shape[0] != shape[0]:
        # In place, so that the result is no view of anything, just like a tensor that pickle alone delivers.
        tensor.set_(tensor.untyped_storage(), 0, shape, stride)
    return tensor


def _rebuild_requiring_grad(bare: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return bare.requires_grad_(requires_grad)


def _rebuild_array(buffer: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.frombuffer(buffer, dtype).reshape(shape)


def _rebuild_dtype(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        return np.dtype(description)
    if len(description) == 2:
        return np.dtype((_rebuild_dtype(description[0]), description[1]))
    names, formats, offsets, itemsize, aligned = description
    formats = [_rebuild_dtype(part) for part in formats]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}, align=aligned)


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for length in reversed(shape):
        stride.append(step)
        step *= length
    return tuple(reversed(stride))


# Dtypes -----------------------------------------------------------------------------------------------------------


def _reduce_dtype(dtype: np.dtype[Any]) -> Any:
    """Reduce a numpy dtype to text and numbers.

    Numpy's own reduction restores what is inside a dtype, flags included, so a receiver that trusts nobody could not
    have it. Dtypes that this cannot describe take it all the same: of objects, of other packages, with metadata.
    """
    description = _describe_dtype(dtype)
    if description is None or (not isinstance(description, str) and not _is_described(dtype, description)):
        return dtype.__reduce__()
    return _rebuild_dtype, (description,)


def _describe_dtype(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject or dtype.metadata is not None or dtype.isbuiltin == 2:
        return None
    if dtype.subdtype is not None:
        base = _describe_dtype(dtype.subdtype[0])
        return None if base is None else (base, dtype.subdtype[1])
    if dtype.names is None:
        return dtype.str
    assert dtype.fields is not None
    fields = [dtype.fields[name] for name in dtype.names]
    formats = tuple(_describe_dtype(field[0]) for field in fields)
    if None in formats:
        return None
    return dtype.names, formats, tuple(field[1] for field in fields), dtype.itemsize, dtype.isalignedstruct


def _is_described(dtype: np.dtype[Any], description: Any) -> bool:
    try:
        rebuilt = _rebuild_dtype(description)
    except (TypeError, ValueError):
        return False
    return rebuilt == dtype and rebuilt.__reduce__()[2] == dtype.__reduce__()[2]


# By class, as a pickler looks them up.
_DTYPE_REDUCERS = {type(np.dtype(code)): _reduce_dtype for code in np.typecodes["All"] if code != "O"}


_INTEGER_OF_SIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,  # no 16-byte integer; a copy does not look at the values
}


def _has_names(tensor: torch.Tensor) -> bool:
    # Named tensors are gone from newer torch releases.
    return hasattr(tensor, "has_names") and bool(tensor.has_names())


def _all_dtypes() -> dict[str, torch.dtype]:
    found = {}
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            found[str(value).removeprefix("torch.")] = value
    return found


def _plain(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype are plain bytes that frombuffer can wrap.

    Not so: quantized dtypes, which mean nothing without their scales, and integers of less than a byte, which have no
    tensors of their own yet.
    """
    name = str(dtype).removeprefix("torch.")
    if re.fullmatch(r"q.*|bit|u?int[1-7]|quint.*", name):
        return False
    try:
        torch.frombuffer(bytearray(16), dtype=dtype)
    except (RuntimeError, TypeError, ValueError):
        return False
    return dtype.itemsize in _INTEGER_OF_SIZE


def _torch_pickles(dtype: torch.dtype) -> bool:
    """Whether torch's own reduction brings this dtype back."""
    try:
        pickle.loads(pickle.dumps(torch.frombuffer(bytearray(16), dtype=dtype), _PROTOCOL))
    except Exception:  # whatever it is, it does not come back
        return False
    return True


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "ComplexHalf is experimental", and the like
    _DTYPES = {name: dtype for name, dtype in _all_dtypes().items() if _plain(dtype)}
    _PICKLED_BY_TORCH = {dtype for dtype in _DTYPES.values() if _torch_pickles(dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# Finding the culprit ----------------------------------------------------------------------------------------------


def _describe(obj: object) -> str:
    """Name what does not pickle inside an object: its type and the path to it."""
    try:
        return _find(obj)
    except Exception:  # of a __repr__ or a property: looking must not hide what was found
        return f"an object of type {type(obj).__qualname__}"


def _find(obj: object) -> str:
    if isinstance(obj, Envelope):
        obj = obj.message  # what the user has passed
    path, culprit = "", obj
    budget = [_MAX_PATH_STEPS]
    seen = {id(obj)}  # an object may contain itself
    while True:
        for step, child in _children(culprit):
            if budget[0] <= 0:
                break
            budget[0] -= 1
            if id(child) not in seen and not _pickles(child):
                path, culprit = path + step, child
                seen.add(id(child))
                break
        else:
            break
        if budget[0] <= 0:
            break
    kind = type(culprit).__qualname__
    if len(path) > 2 * _PATH_SHOWN:
        path = f"{path[:_PATH_SHOWN]} ... {path[-_PATH_SHOWN:]}"
    return f"an object of type {kind} at message{path}" if path else f"an object of type {kind}"


def _pickles(obj: object) -> bool:
    try:
        pickle.dumps(obj, _PROTOCOL, buffer_callback=lambda _: False)
    except Exception:
        return False
    return True


def _children(obj: object) -> list[tuple[str, object]]:
    if isinstance(obj, dict):
        return [(f"[{key!r}]", value) for key, value in list(obj.items())[:_MAX_PATH_STEPS]]
    if isinstance(obj, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(obj[:_MAX_PATH_STEPS])]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [(f".{f.name}", getattr(obj, f.name, None)) for f in dataclasses.fields(obj)]
    if isinstance(obj, type) or callable(obj) or not hasattr(obj, "__dict__"):
        return []
    return [(f".{name}", value) for name, value in list(vars(obj).items())[:_MAX_PATH_STEPS]]
