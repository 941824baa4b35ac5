"""Serialize values that are not tensors (parameter groups, RNG states, numbers, text) so that reading runs no code.

They are written with ``torch.save``, so that torch's own readers can read them, and read by ``read_saved``, which knows
numbers, text, dense tensors, plain numpy arrays and containers of them. Values that it would reject are rejected at
save time, so that every checkpoint can be read. See [Note: Reading a pickle without running it].
"""

from __future__ import annotations

import io
import math
import re
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from fullshard.checkpoint.format.index import ITEM_SIZES
from fullshard.checkpoint.format.pickles import Pickled, PickledDict, load_inert, shown
from fullshard.errors import CheckpointError
from fullshard.messages import clipped

__all__ = ["DTYPES", "first_line", "from_bytes", "read_saved", "to_bytes"]

DTYPES = {f"torch.{name}": getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}
_NUMPY_DTYPE = re.compile(r"[biufc][0-9]{1,2}|[SU][0-9]{1,9}")  # no objects or structures: they refer to memory
_LEAVES = (type(None), bool, int, float, str, bytes, torch.dtype)


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
            "written by this version of fullshard, or has been changed since: use another checkpoint"
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
    order = records.get("byteorder", b"").decode("latin1")
    if order not in ("", sys.byteorder):
        raise UnpicklingError(f"it was written on a machine with the byte order {shown(order)}")
    restorer = _Restorer(records)
    constants = {**_STORAGES, **DTYPES, "numpy.ndarray": None}
    return restorer.restored(load_inert(bytes(records["data.pkl"]), restorer.calls, constants))


def _records(data: bytes) -> dict[str, bytearray]:
    """Return the records of an archive of ``torch.save`` by their names, after comparing their sizes and CRCs.

    torch's own reader compares neither, and compressed records, which torch never writes, grow when read.
    """
    records: dict[str, bytearray] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                raise UnpicklingError("compressed records")
            if not entry.CRC:  # torch.serialization.set_crc32_options(False): nothing to compare
                entry.CRC = None  # type: ignore[assignment]
            record = records[entry.filename.partition("/")[2]] = bytearray(entry.file_size)
            with archive.open(entry) as stream:
                read = stream.readinto(record)  # type: ignore[attr-defined]
            if read != len(record):
                raise UnpicklingError(f"a record of {read} bytes, expected {len(record)}")
    return records


class _Restorer:
    """Makes data of what ``load_inert`` has read from one file, and checks all of it.

    Args:
        records: The records of the file.
    """

    calls: Mapping[str, Callable[..., Any]]  # what makes the data, by the name that the pickle calls

    def __init__(self, records: Mapping[str, bytearray]) -> None:
        self._records = records
        self._known: dict[int, Any] = {}  # by the ids of inert objects, which may be in many places
        self.calls = {
            "collections.Counter": lambda counts: Counter(_exact(counts, dict)),
            "_codecs.encode": _encode,
            "torch.Size": lambda sizes=(): torch.Size(_exact(sizes, tuple)),
            "torch.device": torch.device,
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_tensor_v3": lambda *args: _tensor(args[0].view(args[6]), *args[1:6], *args[7:]),
            "torch._utils._rebuild_parameter": _parameter,
            "numpy.dtype": _numpy_dtype,
            ".storage": self._storage,
        }
        for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2 and 1: files come from either
            self.calls |= {f"{module}._reconstruct": _array, f"{module}.scalar": _scalar}
        for module in ("builtins", "__builtin__"):
            self.calls |= {
                f"{module}.set": lambda items: set(_exact(items, list)),
                f"{module}.complex": complex,
                f"{module}.bytes": lambda: b"",
                f"{module}.bytearray": lambda data=b"": bytearray(_exact(data, bytes)),
            }

    def restored(self, value: Any) -> Any:
        """Return the data that an inert value stands for.

        Raises:
            Exception: Any, if it stands for none.
        """
        if type(value) in _LEAVES:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = self._made(value)
        return self._known[id(value)]

    def _made(self, value: Any) -> Any:
        if isinstance(value, Pickled):
            state = [] if value.state is None else [self.restored(value.state)]
            return self.calls[type(value).__name__](*map(self.restored, value.args), *state)
        if type(value) in (list, tuple):
            return type(value)(map(self.restored, value))
        if not isinstance(value, PickledDict):
            raise UnpicklingError(f"found a {type(value).__name__}, which is not data")
        pairs = [(self.restored(key), self.restored(part)) for key, part in value.items()]
        if type(value) is PickledDict:
            return dict(pairs)
        made = OrderedDict(pairs)
        if value.state is not None:  # the versions of modules in state dicts of torch
            made._metadata = self.restored(value.state)["_metadata"]  # type: ignore[attr-defined]
        return made

    def _storage(self, kind: Any, dtype: Any, key: Any, _: Any, numel: Any) -> torch.Tensor:
        """Return the elements of a storage, 1-D; all that are made of one share memory."""
        record = self._records[f"data/{_exact(key, str)}"]
        if kind != "storage" or len(record) != numel * _exact(dtype, torch.dtype).itemsize:
            raise UnpicklingError(f"a storage of {shown(numel)} elements of {shown(dtype)} in {len(record)} bytes")
        return torch.frombuffer(record, dtype=dtype) if record else torch.empty(0, dtype=dtype)


def _exact(found: Any, kind: type) -> Any:
    if not isinstance(found, kind):
        raise UnpicklingError(f"found a {type(found).__name__}, expected {kind.__name__}")
    return found


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise UnpicklingError("bytes in another encoding than latin1")
    return bytes(_exact(text, str).encode(encoding))


def _tensor(
    flat: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, more: Any = None
) -> torch.Tensor:
    """Return a dense tensor of a storage, with no more elements than that has; torch compares where they lie."""
    if more:
        raise UnpicklingError("a tensor that is conjugated or negated lazily, which only torch's own reader supports")
    if math.prod(_exact(size, tuple)) > len(_exact(flat, torch.Tensor)):
        raise UnpicklingError(f"a tensor of {math.prod(size)} elements in a storage of {len(flat)}")
    tensor: torch.Tensor = flat.as_strided(size, stride, offset)
    return tensor.requires_grad_(requires_grad is True)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(_exact(data, torch.Tensor).detach(), requires_grad=requires_grad is True)


def _numpy_dtype(name: Any, align: Any, copy: Any, state: Any) -> np.dtype[Any]:
    """Return a dtype of plain elements, of which the state says only the order of bytes."""
    order = _exact(state, tuple)[1]
    plain = type(order) is str and order in "<>|=" and state[2:5] == (None, None, None)
    if not plain or not _NUMPY_DTYPE.fullmatch(_exact(name, str)):
        raise UnpicklingError(f"numpy arrays of dtype {shown(name)}, expected numbers or text")
    dtype: np.dtype[Any] = np.dtype(order + name)
    return dtype


def _array(kind: Any, shape: Any, data: Any, state: Any) -> np.ndarray[Any, Any]:
    """Return a numpy array, whose state says all that it has."""
    _, shape, dtype, fortran, data = _exact(state, tuple)
    content = bytearray(_exact(data, bytes))
    made: np.ndarray[Any, Any] = np.ndarray(
        _exact(shape, tuple), _exact(dtype, np.dtype), content, order="F" if fortran is True else "C"
    )
    made.tolist()  # raises if it has text that is none
    return made


def _scalar(dtype: Any, data: Any) -> Any:
    return np.ndarray((), _exact(dtype, np.dtype), _exact(data, bytes))[()]
