"""Layout of safetensors files, and of several files with a Hugging Face index: read and planned.

The safetensors package reads and checks headers. The bytes of shards are read and written by :mod:`shard_io`, straight
into and from existing memory: ``safe_open(...).get_slice`` maps the file, so that a file that is cut off, or an error
of the disk, would end the process with SIGBUS where now every rank raises an error; and nothing of the package writes
parts of tensors.

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
from safetensors import SafetensorError, safe_open

from fullshard.errors import CheckpointError

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "FilePlan",
    "FileTensor",
    "Header",
    "TensorKind",
    "WeightFiles",
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


# -------------------------------------------------------------------- reading


def read_header(path: Path) -> Header:
    """Read and check the header of a file, and that the file has the length that it implies. Tensors are not read.

    Raises:
        CheckpointError: If it cannot be read, is truncated or too long, or its header is invalid.
    """
    try:
        with _open(path) as file:
            start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.offset_keys()}
            kinds = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in found.items()}
            metadata = file.metadata() or {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a safetensors file, or truncated, still being written or corrupted: {error}"
        ) from error
    tensors = {}
    for name, (dtype, shape) in kinds.items():  # in the order of the file, which has no gaps
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} has the dtype {dtype!r}, which is not supported")
        tensors[name] = FileTensor(TensorKind(_DTYPES[dtype], shape), start)
        start += tensors[name].kind.nbytes
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
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid JSON: {error}") from error
    places = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file_name, str) for file_name in places.values()):
        raise CheckpointError(f"{path}: expected strings by name as weight_map")
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
