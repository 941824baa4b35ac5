"""The JSON form of an index, as in ``docs/checkpoint_format.md``. See [Note: Index] for the checks."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import xxhash

from fullshard.checkpoint.format.index import (
    ITEM_SIZES,
    FileEntry,
    Index,
    ShardEntry,
    Shards,
    TensorEntry,
    Value,
    ValueEntry,
    split_by_tensor,
)
from fullshard.checkpoint.format.region_table import Numbers, RegionTable, pack_columns, shape_columns, unpack_columns
from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = ["FORMAT", "VERSION", "checksum", "from_json", "to_json"]

FORMAT = "fullshard checkpoint"
VERSION = 2

_NO_CHECKSUM = "0" * 16
# The first line: format, version, and the checksum of the whole file with zeros in its place.
_FIRST_LINE = re.compile(rb'\{"format": "([^"\n]{1,40})", "version": ([0-9]{1,9}), "checksum": "([0-9a-f]{16})",\n')
_WHOLE = frozenset((int,))
_SHOWN = 40  # characters of a value in an error


def checksum(data: Any) -> bytes:
    """Return the XXH3 checksum (64 bits, big-endian, as ``xxhsum -H3`` prints it) of bytes or a memoryview."""
    return xxhash.xxh3_64_digest(data)


def to_json(index: Index) -> bytes:
    """Serialize an index as the file ``fullshard.json``.

    Raises:
        ValueError: If ``about`` has something that JSON cannot represent.
    """
    lines = [f'{{"format": "{FORMAT}", "version": {VERSION}, "checksum": "{_NO_CHECKSUM}",']
    lines.append(f'"save": {_text(index.save)}, "block": {index.block},')
    lines.append(f'"about": {_text(dict(index.about))},')
    files = ([name, file.length, file.header, file.checksum.hex()] for name, file in index.files.items())
    lines += _block('"files": [', map(_text, files), "],")
    lines += _block('"aliases": {', (f"{_text(key)}: {_text(first)}" for key, first in index.aliases.items()), "},")
    numbers = {name: number for number, name in enumerate(index.files)}
    values = {key: [list(value.path), numbers[value.file]] for key, value in index.values.items()}
    lines += _block('"values": {', (f"{_text(key)}: {_text(value)}" for key, value in values.items()), "},")
    tensors = {key: [list(tensor.path), tensor.dtype, list(tensor.shape)] for key, tensor in index.tensors.items()}
    lines += _block('"tensors": {', (f"{_text(key)}: {_text(tensor)}" for key, tensor in tensors.items()), "},")
    lines.append(f'"shards": {_text(_packed_shards(index.tensors.values(), numbers))}')
    data = ("\n".join([*lines, "}"]) + "\n").encode()
    return data.replace(_NO_CHECKSUM.encode(), checksum(data).hex().encode(), 1)


def from_json(data: bytes, where: str) -> Index:
    """Parse and check an index from untrusted bytes.

    Args:
        data: Contents of the file.
        where: Its path, for errors.

    Raises:
        CheckpointError: If it is no index, or inconsistent.
    """
    first = _FIRST_LINE.match(data)
    if first is None or first[1].decode(errors="replace") != FORMAT:
        _refuse(where, "not an index of a fullshard checkpoint")
    version = int(first[2])
    if version > VERSION:
        raise CheckpointError(
            f"{where} has format version {version}; this fullshard reads versions up to {VERSION}: install a "
            "newer fullshard"
        )
    zeroed = data[: first.start(3)] + _NO_CHECKSUM.encode() + data[first.end(3) :]
    if checksum(zeroed).hex().encode() != first[3]:
        _refuse(where, "checksum mismatch")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"not JSON ({error})")
    return _IndexParser(where).index(content, version)


def _refuse(where: str, found: str) -> NoReturn:
    raise CheckpointError(f"{where} cannot be read: {found}. The file is corrupted: use another checkpoint")


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _block(head: str, lines: Iterable[str], tail: str) -> list[str]:
    """Return one line per entry, with commas in between, so that an index can be searched and compared by lines."""
    body = list(lines)
    return [head, *(f"{line}," for line in body[:-1]), *body[-1:], tail]


def _packed_shards(tensors: Iterable[TensorEntry], numbers: Mapping[str, int]) -> str:
    """Return the columns of all shards as text: file, tensor, offsets of each dim, sizes of each dim."""
    found = [tensor.shards for tensor in tensors]
    table = RegionTable.concatenated([shards.regions for shards in found if len(shards)])
    files = [np.array([numbers[name] for name in shards.names], dtype=np.int64)[shards.files] for shards in found]
    tensor = np.repeat(np.arange(len(found)), [len(shards) for shards in found])
    columns = [np.concatenate([*files, np.zeros(0, dtype=np.int64)]), *table.renumbered(tensor).columns]
    return base64.b64encode(pack_columns(columns)).decode()


class _IndexParser:
    """Turns untrusted JSON into an index: types are checked here, contents by the index itself."""

    where: str
    files: list[str]

    def __init__(self, where: str) -> None:
        self.where, self.files = where, []

    def index(self, content: Any, version: int) -> Index:
        fields = self._dict("the index", content)
        files: dict[str, FileEntry] = {}
        for entry in self._list("files", fields.get("files")):
            name, length, header, digest = self._parts("files", entry, 4)
            files[self._str("files", name)] = FileEntry(
                self._int("files", length), self._int("files", header), self._hex("files", digest)
            )
        self.files = list(files)
        tensors, values = self._dict("tensors", fields.get("tensors")), self._dict("values", fields.get("values"))
        aliases = self._dict("aliases", fields.get("aliases"))
        return Index(
            where=self.where,
            tensors=self._tensors(tensors, fields.get("shards")) if version > 1 else self._tensors_1(tensors),
            values={
                key: self._value(key, entry) if version > 1 else self._value_1(key, entry)
                for key, entry in values.items()
            },
            files=files,
            aliases={key: self._str(key, first) for key, first in aliases.items()},
            about=self._dict("about", fields.get("about")),
            save=self._str("save", fields.get("save")),
            block=self._int("block", fields.get("block")),
        )

    def _tensors(self, found: dict[str, Any], shards: Any) -> dict[str, TensorEntry]:
        rows = {}
        for key, entry in found.items():
            path, dtype, shape = self._parts(key, entry, 3)
            rows[key] = self._path(key, path), self._str(key, dtype), self._shape(key, shape)
        shapes = [shape for _, _, shape in rows.values()]
        try:
            columns = unpack_columns(base64.b64decode(self._str("shards", shards), validate=True))
            files, table = columns[0], RegionTable.from_columns(columns[1:])
            wrong = self._disorder(files, table, shapes)
        except ValueError as error:
            self._wrong("shards", str(error))
        if wrong:
            self._wrong("shards", wrong)
        of_each = split_by_tensor(shapes, table, files, self.files)
        return {
            key: TensorEntry(dtype, shape, shards, path)
            for (key, (path, dtype, shape)), shards in zip(rows.items(), of_each, strict=True)
        }

    def _disorder(self, files: Numbers, table: RegionTable, shapes: list[tuple[int, ...]]) -> str:
        """Return what is wrong with the order of shards, by which they are found, or with the numbers of files."""
        if ((files < 0) | (files >= len(self.files))).any():
            return f"file numbers that are not among {len(self.files)} files"
        if ((table.tensor < 0) | (table.tensor >= len(shapes))).any():
            return f"tensor numbers that are not among {len(shapes)} tensors"
        dims = max(map(len, shapes), default=0)
        if table.dims > dims:
            return f"shards of {table.dims} dims in tensors of at most {dims}"
        first = table.padded(dims).first(shape_columns(shapes))
        same = table.tensor[1:] == table.tensor[:-1]
        ordered = (table.tensor[1:] > table.tensor[:-1]) | (same & (first[1:] > first[:-1]))
        return "" if ordered.all() else "shards that are not in order, or overlap"

    def _value(self, key: str, entry: Any) -> Value:
        path, file = self._parts(key, entry, 2)
        return Value(self._file(key, file), self._path(key, path))

    def _shape(self, key: str, found: Any) -> tuple[int, ...]:
        shape = self._ints(key, found)
        if len(shape) > 64 or any(not 0 <= size < 1 << 62 for size in shape):
            self._wrong(key, f"shape {shape}")
        return shape

    # ---------------------------------------------------------------- format 1

    def _tensors_1(self, found: dict[str, Any]) -> dict[str, TensorEntry]:
        return {key: self._tensor_1(key, entry) for key, entry in found.items()}

    def _tensor_1(self, key: str, entry: Any) -> TensorEntry:
        path, dtype, shape, shards = self._parts(key, entry, 4)
        sizes = self._shape(key, shape)
        name = self._str(key, dtype)
        found = [self._shard_1(key, shard, name) for shard in self._list(key, shards)]
        try:
            return TensorEntry(name, sizes, Shards.of(sizes, found), self._path(key, path))
        except ValueError as error:
            self._wrong(key, str(error))

    def _shard_1(self, key: str, entry: Any, dtype: str) -> ShardEntry:
        offsets, sizes, file, start, digests = self._parts(key, entry, 5)
        try:
            region = Region(self._ints(key, offsets), self._ints(key, sizes))
        except ValueError as error:
            self._wrong(key, str(error))
        length = region.numel * ITEM_SIZES.get(dtype, 0)  # an unknown dtype is rejected by the index
        return ShardEntry(region, self._file(key, file), self._int(key, start), length, self._hex(key, digests))

    def _value_1(self, key: str, entry: Any) -> ValueEntry:
        path, file, start, length, digests = self._parts(key, entry, 5)
        numbers = self._int(key, start), self._int(key, length)
        return ValueEntry(self._file(key, file), *numbers, self._hex(key, digests), self._path(key, path))

    def _file(self, key: str, number: Any) -> str:
        index = self._int(key, number)
        if not 0 <= index < len(self.files):
            self._wrong(key, f"file number {index} of {len(self.files)}")
        return self.files[index]

    def _path(self, key: str, found: Any) -> tuple[str | int, ...]:
        path = self._list(key, found)
        return tuple(step if isinstance(step, str) else self._int(key, step) for step in path)

    def _ints(self, key: str, found: Any) -> tuple[int, ...]:
        if type(found) is list and _WHOLE.issuperset(map(type, found)):  # fast path: there are many
            return tuple(found)
        return tuple(self._int(key, number) for number in self._list(key, found))

    def _parts(self, key: str, found: Any, count: int) -> list[Any]:
        parts = self._list(key, found)
        if len(parts) != count:
            self._wrong(key, f"{len(parts)} fields, not {count}")
        return parts

    def _hex(self, key: str, found: Any) -> bytes:
        try:
            return bytes.fromhex(self._str(key, found))
        except ValueError:
            self._wrong(key, f"{found[:_SHOWN]!r} as a checksum")

    def _int(self, key: str, found: Any) -> int:
        if type(found) is not int:  # excludes bool
            self._wrong(key, f"{str(found)[:_SHOWN]!r} where an integer was expected")
        return found

    def _str(self, key: str, found: Any) -> str:
        if not isinstance(found, str):
            self._wrong(key, f"{str(found)[:_SHOWN]!r} where a string was expected")
        return found

    def _list(self, key: str, found: Any) -> list[Any]:
        if not isinstance(found, list):
            self._wrong(key, f"{str(found)[:_SHOWN]!r} where a list was expected")
        return found

    def _dict(self, key: str, found: Any) -> dict[str, Any]:
        if not isinstance(found, dict):
            self._wrong(key, f"{str(found)[:_SHOWN]!r} where an object was expected")
        return found

    def _wrong(self, key: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key}: found {found}. The file is corrupted: use another checkpoint")
