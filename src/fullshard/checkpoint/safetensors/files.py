"""Layout of safetensors files, and of several files with a Hugging Face index: read and planned.

The safetensors package reads and checks headers. The bytes of shards are read and written by ``shard_io``, straight
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fullshard.checkpoint.format.data_file import header_of
from fullshard.errors import CheckpointError
from fullshard.messages import clipped, shortened

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "FilePlan",
    "FileTensor",
    "WeightFiles",
    "find_weights",
    "index_text",
    "local_path",
    "plan_files",
    "read_header",
    "read_index",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 1 << 28
_LENGTH_BYTES = 8
_PART = re.compile(r"-\d+-of-(?!0*1\.)\d+\.safetensors$")

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


class FileTensor(NamedTuple):
    """Dtype and shape of a tensor, and the offset of its first byte in a file (0 before the file is planned)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """Layout of a file to write: its name, its first bytes, the place of each tensor, and its size in bytes."""

    name: str
    header: bytes
    tensors: dict[str, FileTensor]
    size: int


@dataclass(frozen=True)
class WeightFiles:
    """Tensors found in one file, or in several with an index, as file and place by name; and the merged metadata."""

    tensors: dict[str, tuple[Path, FileTensor]]
    metadata: dict[str, str]


def local_path(what: str, path: str | os.PathLike[str]) -> Path:
    """Return a path of the local file system, where parts of files can be written and read.

    Raises:
        ValueError: If it is a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{what}: expected a local path, found the URL {os.fspath(path)!r}; copy the files separately")
    return Path(path)


# -------------------------------------------------------------------- reading


def read_header(path: Path) -> WeightFiles:
    """Read and check the header of a file, and that the file has the length that it implies. Tensors are not read.

    Raises:
        CheckpointError: If it cannot be read, is truncated or too long, or its header is invalid.
    """
    start = _LENGTH_BYTES + int.from_bytes(_read(path, _LENGTH_BYTES), "little")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.offset_keys()}
            kinds = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in found.items()}
            metadata = file.metadata() or {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a safetensors file, or truncated, still being written or corrupted: {clipped(error)}"
        ) from error
    tensors = {}
    for name, (dtype, shape) in kinds.items():  # in the order of the file, which has no gaps
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {clipped(repr(name))} has the dtype {clipped(repr(dtype))}, which is not supported"
            )
        place = FileTensor(_DTYPES[dtype], shape, start)
        tensors[name] = path, place
        start += place.nbytes
    return WeightFiles(tensors, metadata)


def find_weights(path: Path) -> WeightFiles:
    """Find the tensors of a file, an index, or a folder with either; headers are read and checked, tensors are not.

    In a folder, ``model.safetensors`` comes first, then ``model.safetensors.index.json``, then the only
    ``.safetensors`` file.

    Raises:
        CheckpointError: If there are no such files, or one is invalid.
    """
    found = _weight_file(path)
    if found.suffix != ".json":
        return read_header(found)
    places = read_index(found)
    files = {name: read_header(found.parent / name) for name in sorted(set(places.values()))}
    absent = [f"{name} in {file}" for name, file in places.items() if name not in files[file].tensors]
    if absent:
        raise CheckpointError(f"{found}: these tensors are missing in the files of the index: {shortened(absent)}")
    metadata = {key: value for file in files.values() for key, value in file.metadata.items()}
    return WeightFiles({name: files[file].tensors[name] for name, file in places.items()}, metadata)


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
    text = _read(path, MAX_INDEX_BYTES + 1)
    if len(text) > MAX_INDEX_BYTES:
        raise CheckpointError(f"{path}: expected an index of at most {MAX_INDEX_BYTES} bytes, found more")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid JSON: {error}") from error
    places = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file_name, str) for file_name in places.values()):
        raise CheckpointError(f"{path}: expected an object of strings as weight_map")
    for name, file_name in places.items():
        # A plain name: an untrusted index must not select files outside of its folder.
        if file_name in ("", ".", "..") or "\0" in file_name or set(file_name) & {"/", "\\"}:
            raise CheckpointError(
                f"{path}: expected the name of a file in the same folder for tensor "
                f"{clipped(repr(name))}, found {clipped(repr(file_name))}"
            )
    return places


def _read(path: Path, nbytes: int) -> bytes:
    """Read the first bytes of a regular file: opening a pipe would wait for a writer."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: expected a regular file")
        with path.open("rb") as file:
            return file.read(nbytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


# -------------------------------------------------------------------- writing


def plan_files(tensors: Mapping[str, FileTensor], max_bytes: int, metadata: Mapping[str, str]) -> list[FilePlan]:
    """Distribute tensors, in their order, over files of at most ``max_bytes`` of contents (but at least one tensor).

    Args:
        tensors: Dtypes and shapes by name.
        max_bytes: Limit of contents per file.
        metadata: Strings for the header of every file.

    Raises:
        ValueError: If the format does not support a dtype, or a tensor has the name of the metadata.
    """
    unknown = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in _NAMES]
    if unknown:
        raise ValueError(f"safetensors does not support the dtypes of these tensors: {shortened(unknown)}")
    if METADATA in tensors:
        raise ValueError(f"the name {METADATA!r} is reserved in safetensors files; rename the tensor")
    groups: list[dict[str, FileTensor]] = [{}]
    taken = 0
    for name, tensor in tensors.items():
        if groups[-1] and taken + tensor.nbytes > max_bytes:
            groups.append({})
            taken = 0
        groups[-1][name] = tensor
        taken += tensor.nbytes
    count = len(groups)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [_plan_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _plan_file(file_name: str, group: Mapping[str, FileTensor], metadata: Mapping[str, str]) -> FilePlan:
    # Large elements first, as the package does: then every tensor begins at a multiple of its element size.
    ordered = sorted(group.items(), key=lambda item: -item[1].dtype.itemsize)
    entries = ((name, _NAMES[tensor.dtype], tensor.shape, tensor.nbytes) for name, tensor in ordered)
    header = header_of(entries, metadata, alignment=8)
    if len(header) - _LENGTH_BYTES > MAX_HEADER_BYTES:
        raise ValueError(
            f"{file_name}: its header would have {len(header) - _LENGTH_BYTES} bytes, the limit is {MAX_HEADER_BYTES}; "
            "export with a smaller max_shard_bytes, or less metadata"
        )
    placed, end = {}, len(header)
    for name, tensor in ordered:
        placed[name], end = tensor._replace(start=end), end + tensor.nbytes
    return FilePlan(file_name, header, placed, end)


def index_text(plans: Sequence[FilePlan], metadata: Mapping[str, str]) -> str:
    """Return the JSON index of several files, with these strings beside the total size."""
    places = {name: plan.name for plan in plans for name in plan.tensors}
    total = sum(tensor.nbytes for plan in plans for tensor in plan.tensors.values())
    about = {**metadata, "total_size": total}
    return json.dumps({"metadata": about, "weight_map": places}, indent=2, sort_keys=True) + "\n"
