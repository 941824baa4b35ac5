"""The index of a checkpoint: what is in it, and where. A pure value; ``docs/checkpoint_format.md`` has its JSON form.

[Note: Index]
The index is the only file of a checkpoint that is trusted to say where things are, so it is checked as if somebody
had made it up: that names of files are ones that the writer makes (none leads out of the folder), that every piece
lies in its tensor and in its file, that pieces neither overlap nor leave holes, that numbers are numbers. Whoever holds
an :class:`Index` need not look at these things again. The writer checks its own before the checkpoint counts.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.layout import Box

__all__ = [
    "BLOCK",
    "CHECKSUM",
    "DATA_FILE",
    "ITEM_SIZES",
    "FileEntry",
    "Index",
    "PieceEntry",
    "TensorEntry",
    "ValueEntry",
    "data_file",
]

# Bytes that one checksum is for. A rank that needs a part of a piece reads and checks the blocks that it lies in:
# smaller blocks would make indexes larger (8 bytes each), larger ones would make ranks read what they do not need.
BLOCK = 1 << 22
CHECKSUM = 8  # bytes of one checksum: XXH3, 64 bits
DATA_FILE = re.compile(r"data-[0-9a-f]{12}-[0-9]{1,7}\.safetensors")
_LARGEST = 1 << 62  # of any number of bytes or elements; sums of two still fit 64 bits
_DAMAGED = "the checkpoint is damaged, or was made by something else than fullshard: use another one"

# Bytes of an element of each torch dtype that can be stored. Named here, so that an index can be read without torch.
ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def data_file(save: str, rank: int) -> str:
    """Name of the file that a rank writes in a save."""
    return f"data-{save}-{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A data file.

    Args:
        length: Its bytes.
        header: Bytes before the first tensor's.
        checksum: Of these; empty if the format has none.
    """

    length: int
    header: int = 0
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """Where one box of a tensor is stored.

    Args:
        box: Which part of the tensor.
        file: Name of the data file.
        start: First byte in it.
        length: Bytes: those of the elements row by row, or of torch's own format.
        checksums: One for every ``block`` bytes; empty if the format has none.
    """

    box: Box
    file: str
    start: int
    length: int
    checksums: bytes = b""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: torch dtype by name, shape, and the pieces that make it up. ``path`` leads to it in nested dicts."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]
    path: tuple[str | int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return self.numel * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """Where a value that is no tensor is stored; see :class:`PieceEntry`."""

    file: str
    start: int
    length: int
    checksums: bytes = b""
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Index:
    """What a checkpoint has, by key. See [Note: Index].

    Args:
        where: The file it is (to be) read from, for errors.
        tensors: By key.
        values: What is not a tensor, by key.
        files: Data files by name.
        aliases: Further keys of tied tensors, each with the key that has the data.
        about: What the saver says of itself and the run.
        save: Name of the save; part of the names of its files.
        block: Bytes that a checksum is for.
        raw: Whether pieces are elements row by row in fullshard's own files; else each is what ``torch.save`` wrote.

    Raises:
        CheckpointError: If it contradicts itself.
    """

    where: str
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]
    files: Mapping[str, FileEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    save: str = ""
    block: int = BLOCK
    raw: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.block <= 1 << 28 and self.block % 64 == 0):
            raise self._wrong("block", f"a size of blocks of {self.block}")
        self._check_files()
        for key, tensor in self.tensors.items():
            self._check_tensor(key, tensor)
        for key, value in self.values.items():
            if key in self.tensors:
                raise self._wrong(key, "a tensor and a value under one key")
            self._check_stored(key, value)
        self._check_aliases(self.tensors, self.values)

    def _check_files(self) -> None:
        for name, file in self.files.items():
            if self.raw and not DATA_FILE.fullmatch(name):
                raise self._wrong("files", f"a file {name!r}, which is no name of a data file")
            if not _is_within(0, file.header, file.length):
                raise self._wrong(name, f"a header of {file.header} bytes in a file of {file.length}")

    def _check_aliases(self, tensors: Collection[str], values: Collection[str]) -> None:
        for key, first in self.aliases.items():
            if key in tensors or key in values or first not in tensors:
                raise self._wrong(key, f"an alias of {first!r}; aliases have no data, and name a tensor that has")

    def _wrong(self, key: str, found: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: found {found}; {_DAMAGED}")

    def _check_stored(self, key: str, stored: PieceEntry | ValueEntry) -> None:
        """That bytes lie in their file, and have their checksums."""
        file = self.files.get(stored.file)
        if file is None:
            raise self._wrong(key, f"data in a file {stored.file!r}, of which nothing is known")
        if stored.length < 0 or not _is_within(file.header, stored.start, file.length - stored.length):
            end = stored.start + stored.length
            raise self._wrong(key, f"bytes {stored.start} to {end} of {stored.file}, which has {file.length} bytes")
        checksums = -(-stored.length // self.block)
        if self.raw and len(stored.checksums) != CHECKSUM * checksums:
            raise self._wrong(key, f"{len(stored.checksums)} bytes of checksums, not {checksums} times {CHECKSUM}")

    def _check_tensor(self, key: str, tensor: TensorEntry) -> None:
        """That pieces are in the tensor, cover it, do not overlap, and have the bytes that they should."""
        if tensor.dtype not in ITEM_SIZES:
            raise self._wrong(key, f"dtype {tensor.dtype!r}")
        if len(tensor.shape) > 64 or any(not 0 <= n < _LARGEST for n in tensor.shape) or tensor.nbytes >= _LARGEST:
            raise self._wrong(key, f"shape {tensor.shape}")
        covered = 0
        for piece in tensor.pieces:
            box = piece.box
            if len(box.sizes) != len(tensor.shape) or any(map(operator.gt, box.ends, tensor.shape)):
                raise self._wrong(key, f"piece {box} of a tensor of shape {tensor.shape}")
            if self.raw and piece.length != box.numel * ITEM_SIZES[tensor.dtype]:
                raise self._wrong(key, f"{piece.length} bytes for piece {box} of dtype {tensor.dtype}")
            self._check_stored(key, piece)
            covered += box.numel
        both = first_overlap([piece.box for piece in tensor.pieces])
        if both is not None:
            raise self._wrong(key, f"pieces {both[0]} and {both[1]}, which overlap")
        if covered != tensor.numel:
            missing = tensor.numel - covered
            raise self._wrong(key, f"pieces without {missing} of the {tensor.numel} elements of shape {tensor.shape}")

    def tensor(self, key: str) -> TensorEntry:
        """The tensor under a key or alias.

        Raises:
            KeyError: If there is none.
        """
        return self.tensors[self.aliases.get(key, key)]


def first_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes that have an element in common; None if no two have.

    Sweeps over the dim in which the boxes begin at most places, so that shards compare with few others each.
    """
    left = [box for box in boxes if box.numel]
    if len(left) < 2:
        return None
    if not left[0].sizes:
        return left[0], left[1]
    dims = range(len(left[0].sizes))
    dim = max(dims, key=lambda dim: len({box.offsets[dim] for box in left}))
    left.sort(key=lambda box: box.offsets[dim])
    open_ends: list[tuple[int, int]] = []  # (end in the dim, number) of the boxes that the sweep is in
    for number, box in enumerate(left):
        del open_ends[: bisect_right(open_ends, (box.offsets[dim], len(left)))]
        for _, other in open_ends:
            if box.overlap(left[other]) is not None:
                return left[other], box
        insort(open_ends, (box.ends[dim], number))
    return None


def _is_within(low: int, value: int, high: int) -> bool:
    return 0 <= low <= value <= high < _LARGEST
