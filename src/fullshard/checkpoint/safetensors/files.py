"""Headers and layout of safetensors files, and of several files with a Hugging Face index: parsed and planned.

The safetensors package reads and writes whole tensors. Here ranks read and write *shards* of tensors at their byte
offsets, straight from and into existing memory, so headers are parsed and written here. A header is untrusted input.

A file is 8 bytes, the length of a JSON text (little-endian); that text, with dtype, shape and byte range of every
tensor; and the tensors' bytes, row by row, one after another without gaps.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.errors import CheckpointError

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "FilePlan",
    "FileTensor",
    "Header",
    "TensorKind",
    "WeightFiles",
    "dtype_name",
    "find_weights",
    "index_text",
    "local_path",
    "plan_files",
    "read_header",
    "read_index",
    "shortened",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 1 << 28
_LENGTH_BYTES = 8
_PART = re.compile(r"-\d+-of-(?!0*1\.)\d+\.safetensors$")
_SHOWN = 10

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorKind(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Location of a tensor in a file.

    Args:
        kind: Dtype and shape.
        start: Offset of the first byte in the file.
    """

    kind: TensorKind
    start: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.kind.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.kind.shape


@dataclass(frozen=True)
class Header:
    """Parsed header of a file.

    Args:
        tensors: Locations by name.
        metadata: Strings by name.
    """

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class FilePlan:
    """Layout of a file to write.

    Args:
        name: Name of the file.
        header: First bytes of the file.
        tensors: Locations by name.
        size: Size of the file in bytes.
    """

    name: str
    header: bytes
    tensors: dict[str, FileTensor]
    size: int


@dataclass(frozen=True)
class WeightFiles:
    """Tensors found in one file, or in several with an index.

    Args:
        tensors: File and location by name.
        metadata: Merged metadata of all files.
    """

    tensors: dict[str, tuple[Path, FileTensor]]
    metadata: dict[str, str]


def local_path(what: str, path: str | os.PathLike[str]) -> Path:
    """Return a path of the local file system, where parts of files can be written and read.

    Raises:
        ValueError: If it is a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{what}: expected a path, found the URL {os.fspath(path)!r}; copy the files from or to it")
    return Path(path)


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in the format; None if the format does not have it."""
    return _NAMES.get(dtype)


# -------------------------------------------------------------------- reading


def read_header(path: Path) -> Header:
    """Read and check the header of a file, and that the file has the length that it implies. Tensors are not read.

    Raises:
        CheckpointError: If it cannot be read, is truncated or too long, or its header is invalid.
    """
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES:
                raise CheckpointError(f"{path}: expected a safetensors file, found {size} bytes; is it truncated?")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointError(
                    f"{path}: its header has a length of {length} bytes, in a file of {size} bytes; this is not a "
                    "safetensors file, or it is truncated"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    entries = _parse(path, text)
    metadata = _texts(path, entries.pop(METADATA, {}), METADATA)
    start = _LENGTH_BYTES + length
    tensors = {name: _tensor(path, name, entry, start) for name, entry in entries.items()}
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].kind.nbytes)):
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {name!r} {what} the previous one; the header is corrupted")
        end += tensor.kind.nbytes
    if end != size:
        raise CheckpointError(
            f"{path}: expected {end} bytes by its header, found {size}; it is truncated, or still being written"
        )
    return Header(tensors, metadata)


def find_weights(path: Path) -> WeightFiles:
    """Find the tensors of a file, an index, or a folder with either; headers are read and checked, tensors are not.

    In a folder, ``model.safetensors`` comes first, then ``model.safetensors.index.json``, then the only
    ``.safetensors`` file.

    Raises:
        CheckpointError: If there are no such files, or one is invalid.
    """
    found = _weight_file(path)
    if found.suffix != ".json":
        header = read_header(found)
        return WeightFiles({name: (found, tensor) for name, tensor in header.tensors.items()}, header.metadata)
    places = read_index(found)
    headers = {file: read_header(found.parent / file) for file in sorted(set(places.values()))}
    absent = [f"{name} in {file}" for name, file in places.items() if name not in headers[file].tensors]
    if absent:
        raise CheckpointError(f"{found}: these tensors are missing in the files of the index: {shortened(absent)}")
    metadata = {key: value for header in headers.values() for key, value in header.metadata.items()}
    tensors = {name: (found.parent / file, headers[file].tensors[name]) for name, file in places.items()}
    return WeightFiles(tensors, metadata)


def _weight_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (SINGLE_NAME, INDEX_NAME):
        if (path / name).exists():
            return path / name
    names = sorted(entry.name for entry in path.iterdir())
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) == 1 and not _PART.search(files[0]):  # one of several files is incomplete
        return path / files[0]
    raise CheckpointError(
        f"{path}: expected {SINGLE_NAME}, {INDEX_NAME} or one .safetensors file; found {shortened(names) or 'nothing'}"
    )


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor by name; all files lie beside the index.

    Raises:
        CheckpointError: If it is no index, or names a file outside of its folder.
    """
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_INDEX_BYTES:
                raise CheckpointError(f"{path}: expected an index of at most {MAX_INDEX_BYTES} bytes, found {size}")
            text = file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    places = _texts(path, _parse(path, text).get("weight_map"), "weight_map")
    for name, file_name in places.items():
        # A plain name: an untrusted index must not select files outside of its folder.
        if file_name in ("", ".", "..") or "\0" in file_name or set(file_name) & {"/", "\\"}:
            raise CheckpointError(
                f"{path}: expected the name of a file in the same folder for tensor {name!r}, found {file_name!r}"
            )
    return places


def _open(path: Path) -> Any:
    # Non-blocking: opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: expected a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """Parse a JSON object and reject duplicate names."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{path}: duplicate name {twice!r}")
        return made

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(parsed).__name__}")
    return parsed


def _texts(path: Path, value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"{path}: expected strings by name as {what}")
    return value


def _tensor(path: Path, name: str, entry: Any, start: int) -> FileTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: tensor {name!r}: expected dtype, shape and data_offsets, found {entry!r:.200}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r} has the dtype {entry['dtype']!r:.50}, which is not supported")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _numbers(shape) or not _numbers(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: tensor {name!r}: expected sizes and two offsets between 0 and 2**63, found "
            f"{shape!r:.100} and {offsets!r:.100}"
        )
    kind = TensorKind(dtype, tuple(shape))
    if offsets[1] - offsets[0] != kind.nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r}: its shape {kind.shape} in {entry['dtype']} takes {kind.nbytes} bytes, but its "
            f"offsets are {offsets}"
        )
    return FileTensor(kind, start + offsets[0])


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value) and len(value) <= 64


# -------------------------------------------------------------------- writing


def plan_files(tensors: Mapping[str, TensorKind], max_bytes: int, metadata: Mapping[str, str]) -> list[FilePlan]:
    """Distribute tensors, in their order, over files of at most ``max_bytes`` of contents (but at least one tensor).

    Args:
        tensors: Dtypes and shapes by name.
        max_bytes: Limit of contents per file.
        metadata: Strings for the header of every file.

    Raises:
        ValueError: If the format does not support a dtype, or a tensor has the name of the metadata.
    """
    unknown = [f"{name} ({kind.dtype})" for name, kind in tensors.items() if kind.dtype not in _NAMES]
    if unknown:
        raise ValueError(f"safetensors does not support the dtypes of these tensors: {shortened(unknown)}")
    if METADATA in tensors:
        raise ValueError(f"a tensor cannot be called {METADATA!r} in a safetensors file")
    groups: list[dict[str, TensorKind]] = [{}]
    taken = 0
    for name, kind in tensors.items():
        if groups[-1] and taken + kind.nbytes > max_bytes:
            groups.append({})
            taken = 0
        groups[-1][name] = kind
        taken += kind.nbytes
    count = len(groups)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [_plan_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _plan_file(file_name: str, group: Mapping[str, TensorKind], metadata: Mapping[str, str]) -> FilePlan:
    # Large elements first, as the package does: then every tensor begins at a multiple of its element size.
    ordered = sorted(group.items(), key=lambda item: -item[1].dtype.itemsize)
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    place = 0
    for name, kind in ordered:
        end = place + kind.nbytes
        entries[name] = {"dtype": _NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{file_name}: its header would have {len(text)} bytes, the limit is {MAX_HEADER_BYTES}; export with "
            "a smaller max_shard_bytes, or less metadata"
        )
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    placed = {name: FileTensor(kind, len(header) + entries[name]["data_offsets"][0]) for name, kind in ordered}
    return FilePlan(file_name, header, placed, len(header) + place)


def index_text(plans: Sequence[FilePlan], metadata: Mapping[str, str]) -> str:
    """Return the JSON index of several files.

    Args:
        plans: Layouts of all files.
        metadata: Strings to add beside the total size.
    """
    places = {name: plan.name for plan in plans for name in plan.tensors}
    total = sum(tensor.kind.nbytes for plan in plans for tensor in plan.tensors.values())
    about = {**metadata, "total_size": total}
    return json.dumps({"metadata": about, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def shortened(items: Iterable[str]) -> str:
    """Return a list of the first items and how many more there are."""
    every = list(items)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
