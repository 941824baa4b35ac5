"""Serialize values that are not tensors (parameter groups, RNG states, numbers, text) so that reading runs no code.

They are written with ``torch.save``, so that torch's own readers can read them, and read by ``read_saved``, which knows
numbers, text, dense tensors, plain numpy arrays and containers of them. Values that it would reject are rejected at
save time, so that every checkpoint can be read. See [Note: Reading a pickle without running it].
"""

from __future__ import annotations

import io
import math
import re
import struct
import sys
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch

from fullshard.checkpoint.format.index import ITEM_SIZES
from fullshard.checkpoint.format.pickles import PickledObject, RestrictedUnpickler, checked_key, shown
from fullshard.errors import CheckpointError
from fullshard.messages import clipped

__all__ = ["first_line", "from_bytes", "read_saved", "to_bytes"]

_MOST_DEPTH = 200
_MOST_PARTS = 10**7  # unless the pickle has more
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "BFloat16Storage": torch.bfloat16,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_NUMPY_DTYPE = re.compile(r"[biufc][0-9]{1,2}|[SU][0-9]{1,9}|[mM]8")
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray, np.ndarray),
    *(torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size),
}


def to_bytes(key: str, value: Any) -> bytes:
    """Serialize a value.

    Args:
        key: Its name in the checkpoint, for the error.
        value: Numbers, strings, bytes, None, tensors, numpy arrays and numbers, and containers of them.

    Raises:
        TypeError: If ``from_bytes`` could not read it back.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        written = stream.getvalue()
        read_saved(written)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        raise TypeError(
            f"{key}: a value of type {type(value).__qualname__} cannot be saved, because it could not be read "
            f"back safely ({first_line(error)}); save its state_dict(), or numbers, strings, tensors and "
            "lists, tuples and dictionaries of them"
        ) from error
    return written


def from_bytes(key: str, data: bytes) -> Any:
    """Deserialize a value of ``to_bytes``, with its tensors on the CPU. Runs no code from the bytes.

    Args:
        key: Its name in the checkpoint, for the error.
        data: The bytes.

    Raises:
        CheckpointError: If they are corrupted, or name anything that is not allowed.
    """
    try:
        return read_saved(data)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        raise CheckpointError(
            f"{key}: the checkpoint's value cannot be read ({first_line(error)}); no code in it was run. It was not "
            "written by fullshard, or has been changed since: use another checkpoint"
        ) from error


def first_line(error: Exception) -> str:
    """Return an error about a file in short words."""
    if isinstance(error, UnpicklingError):
        return clipped(str(error))
    return clipped(f"{type(error).__name__}: {error}".splitlines()[0])


def read_saved(data: bytes) -> Any:
    """Return what ``torch.save`` has written, with tensors on the CPU. Runs no code from it.

    Raises:
        Exception: Any, if it is damaged, or has something that is not allowed.
    """
    records = _records(data)
    order = bytes(records.get("byteorder", b""))
    if order not in (b"", sys.byteorder.encode()):
        raise UnpicklingError(f"it was written on a machine with the byte order {shown(order.decode('latin1'))}")
    program = bytes(records["data.pkl"])

    def storage(pid: Any) -> _SavedStorage:
        what, dtype, key, _, numel = pid
        if what != "storage" or type(key) is not str or type(numel) is not int or not isinstance(dtype, torch.dtype):
            raise UnpicklingError("refers to external data that is no storage")
        record = records[f"data/{key}"]
        if len(record) != numel * dtype.itemsize:
            raise UnpicklingError(f"a storage of {numel} elements of {dtype} in {len(record)} bytes")
        if key not in storages:
            storages[key] = torch.frombuffer(bytearray(record), dtype=torch.uint8) if record else torch.empty(0).byte()
        return _SavedStorage(storages[key], dtype)

    storages: dict[str, torch.Tensor] = {}
    value = RestrictedUnpickler(program, _names(), storage=storage, restore=_restore).load()
    if _measure(value, {}, 0)[0] > max(_MOST_PARTS, len(program)):
        raise UnpicklingError(f"it stands for more than {_MOST_PARTS} parts")
    return value


def _records(data: bytes) -> Mapping[str, memoryview]:
    """Return the records of an archive of ``torch.save`` by their names, after comparing their sizes and CRCs.

    torch's own reader compares neither, and compressed records, which torch never writes, grow when read.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size for entry in entries):
        raise UnpicklingError("compressed records")
    if sum(entry.file_size for entry in entries) > len(data):
        raise UnpicklingError("records that overlap")
    records: dict[str, memoryview] = {}
    for entry in entries:
        head = data[max(entry.header_offset, 0) :][:30]
        magic, name, more = struct.unpack("<4s22xHH", head)
        record = memoryview(data)[entry.header_offset + 30 + name + more :][: entry.file_size]
        if magic != b"PK\3\4" or len(record) != entry.file_size:
            raise UnpicklingError(f"a record of {len(record)} bytes, expected {entry.file_size}")
        if entry.CRC and zlib.crc32(record) != entry.CRC:  # 0: torch.serialization.set_crc32_options(False)
            raise UnpicklingError(f"CRC mismatch in record {shown(entry.filename)}")
        records[entry.filename.partition("/")[2]] = record
    return records


# ---------------------------------------------------------------- stand-ins of the names in a pickle


class _SavedStorage(NamedTuple):
    """The bytes of a storage, and the dtype of its elements."""

    data: torch.Tensor
    dtype: torch.dtype


class _Dtype(PickledObject):
    """A numpy dtype: its name, and its state with the order of bytes."""


def _names() -> dict[tuple[str, str], Any]:
    """Return what stands for each name that a value may refer to, new for every file."""
    names: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): lambda: OrderedDict(),
        ("collections", "Counter"): _counter,
        ("_codecs", "encode"): _encode,
        ("torch", "Size"): lambda sizes=(): torch.Size(_integers(sizes)),
        ("torch", "device"): _device,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): lambda *args: _tensor(*args[:6], *args[7:], dtype=args[6]),
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch.storage", "UntypedStorage"): torch.uint8,
        ("numpy", "dtype"): _Dtype,
        ("numpy", "ndarray"): None,
    }
    names |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
    names |= {("torch", name): getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2 and 1: files may come from either
        names |= {(module, "_reconstruct"): lambda *_: np.empty(0, np.uint8), (module, "scalar"): _scalar}
    for module in ("builtins", "__builtin__"):
        names |= {(module, "set"): _set, (module, "complex"): _complex}
        names |= {
            (module, "bytes"): lambda: b"",
            (module, "bytearray"): lambda data=b"": bytearray(_exact(data, bytes)),
        }
    return names


def _exact(found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise UnpicklingError(f"found a {type(found).__name__}, expected {kind.__name__}")
    return found


def _integers(found: Any) -> tuple[int, ...]:
    """Return a tuple of integers that are not negative."""
    numbers = tuple(found) if isinstance(found, tuple) else _exact(found, tuple)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise UnpicklingError("found something else than integers, none below 0")
    return numbers


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise UnpicklingError("bytes in another encoding than latin1")
    return bytes(_exact(text, str).encode(encoding))


def _set(items: Any) -> set[Any]:
    return {checked_key(item) for item in _exact(items, list)}


def _counter(counts: Any) -> Counter[Any]:
    return Counter(_exact(counts, dict))


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(_exact(real, float), _exact(imaginary, float))


def _device(kind: Any, index: Any = None) -> torch.device:
    return torch.device(_exact(kind, str), *([] if index is None else [_exact(index, int)]))


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    more: Any = None,
    *,
    dtype: Any = None,
) -> torch.Tensor:
    """Return a dense tensor that lies in a storage and has no more elements."""
    flat: torch.Tensor = _exact(storage, _SavedStorage).data.view(
        _exact(storage.dtype if dtype is None else dtype, torch.dtype)
    )
    (offset,), size, stride = _integers((offset,)), _integers(size), _integers(stride)
    numel, last = math.prod(size), offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if numel > len(flat) or (numel and last >= len(flat)):
        raise UnpicklingError(f"a tensor of {numel} elements, the last one at {last}, in a storage of {len(flat)}")
    if more:
        raise UnpicklingError("a tensor that is conjugated or negated lazily, which only torch's own reader supports")
    tensor = flat.as_strided(size, stride, offset) if numel else flat.new_empty(size)
    return tensor.requires_grad_(requires_grad is True)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(_exact(data, torch.Tensor).detach(), requires_grad=requires_grad is True)


def _numpy_dtype(found: Any) -> np.dtype[Any]:
    """Return a dtype of plain elements: objects and structures have states that numpy takes for memory addresses."""
    name, state = _exact(_exact(found, _Dtype).args[0], str), _exact(found.state, tuple)
    plain = type(state[1]) is str and state[1] in "<>|=" and state[2:5] == (None, None, None)
    if not plain or not _NUMPY_DTYPE.fullmatch(name):
        raise UnpicklingError(f"numpy arrays of dtype {shown(name)}, expected numbers, text or times")
    if name[0] in "mM":
        unit, count = state[8][1][:2]
        name += f"[{_exact(count, int)}{_exact(unit, bytes).decode()}]"
    dtype: np.dtype[Any] = np.dtype(state[1] + name)
    return dtype


def _check_elements(dtype: np.dtype[Any], count: int, data: Any) -> None:
    if len(_exact(data, bytes)) != count * dtype.itemsize:
        raise UnpicklingError(f"{len(data)} bytes for {count} elements of {dtype}")
    if dtype.kind == "U":  # numpy prints no others
        data.decode("utf-32-le" if dtype.newbyteorder("<") == dtype else "utf-32-be", "surrogatepass")


def _scalar(dtype: Any, data: Any) -> Any:
    kind = _numpy_dtype(dtype)
    _check_elements(kind, 1, data)
    return np.ndarray((), kind, bytes(data))[()]


def _restore(target: Any, state: Any) -> None:
    """Restore a numpy array, or the versions of modules that state dicts of torch have."""
    if type(target) is OrderedDict and type(state) is dict and list(state) == ["_metadata"]:
        target._metadata = state["_metadata"]  # type: ignore[attr-defined]
        return
    _, shape, dtype, fortran, data = _exact(state, tuple)
    kind, shape = _numpy_dtype(dtype), _integers(shape)
    _check_elements(kind, math.prod(shape), data)
    _exact(target, np.ndarray).__setstate__((1, shape, kind, fortran is True, data))


def _measure(value: Any, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Return the number of parts that a value has when printed, and how deep it is.

    Raises:
        UnpicklingError: If it is too deep, contains itself, or has parts that are not data.
    """
    if type(value) in _LEAVES or isinstance(value, np.generic):
        return 1, 0
    if id(value) not in known:
        if depth > _MOST_DEPTH:
            raise UnpicklingError(f"it is nested more than {_MOST_DEPTH} deep")
        if type(value) in (dict, OrderedDict, Counter):
            parts = [*value, *value.values(), *getattr(value, "__dict__", {}).values()]
        elif type(value) in (list, tuple, set):
            parts = list(value)
        else:
            raise UnpicklingError(f"found a {type(value).__name__}, which is not data")
        measured = [_measure(part, known, depth + 1) for part in parts]
        known[id(value)] = 1 + sum(count for count, _ in measured), 1 + max((deep for _, deep in measured), default=0)
    if depth + known[id(value)][1] > _MOST_DEPTH:
        raise UnpicklingError(f"it is nested more than {_MOST_DEPTH} deep")
    return known[id(value)]
