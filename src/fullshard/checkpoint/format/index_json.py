"""The JSON form of an index, as in ``docs/checkpoint_format.md``. See [Note: Index] for the checks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import xxhash

from fullshard.checkpoint.format.index import ITEM_SIZES, FileEntry, Index, ShardEntry, TensorEntry, ValueEntry
from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = ["FORMAT", "VERSION", "WrittenIndex", "checksum", "from_json", "shard_text", "to_json", "value_text"]

FORMAT = "fullshard checkpoint"
VERSION = 1

_NO_CHECKSUM = "0" * 16
# The first line: format, version, and the checksum of the whole file with zeros in its place.
_FIRST_LINE = re.compile(rb'\{"format": "([^"\n]{1,40})", "version": ([0-9]{1,9}), "checksum": "([0-9a-f]{16})",\n')
_WHOLE = frozenset((int,))
_SHOWN = 40  # characters of a value in an error


def checksum(data: Any) -> bytes:
    """Return the XXH3 checksum (64 bits, big-endian, as ``xxhsum -H3`` prints it) of bytes or a memoryview."""
    return xxhash.xxh3_64_digest(data)


Stored = tuple[int, int, bytes]
"""Location of an entry: number of the file, first byte, checksums."""


@dataclass(frozen=True)
class WrittenIndex(Index):
    """An index to be written whose entries are JSON text already, because each rank described its own file.

    The entries were checked when the write plan was made; see [Note: Write plan].

    Args:
        lines: JSON of tensors, by key.
        value_lines: JSON of values, by key.
    """

    lines: Mapping[str, str] = field(default_factory=dict)
    value_lines: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_files()
        for key in self.value_lines:
            if key in self.lines:
                raise self._wrong(key, "a tensor and a value under one key")
        self._check_aliases(self.lines, self.value_lines)


def shard_text(region: Region, stored: Stored) -> str:
    """Return the JSON line of a shard."""
    file, start, checksums = stored
    return _text([list(region.offsets), list(region.sizes), file, start, checksums.hex()])


def value_text(stored: Stored, length: int) -> str:
    """Return the JSON line of a value of ``length`` bytes."""
    file, start, checksums = stored
    return _text([[], file, start, length, checksums.hex()])


def to_json(index: Index) -> bytes:
    """Serialize an index as the file ``fullshard.json``.

    Raises:
        ValueError: If ``about`` has something that JSON cannot represent.
    """
    names = list(index.files)
    numbers = {name: number for number, name in enumerate(names)}
    lines = [f'{{"format": "{FORMAT}", "version": {VERSION}, "checksum": "{_NO_CHECKSUM}",']
    lines.append(f'"save": {_text(index.save)}, "block": {index.block},')
    lines.append(f'"about": {_text(dict(index.about))},')
    files = ([name, file.length, file.header, file.checksum.hex()] for name, file in index.files.items())
    lines += _block('"files": [', map(_text, files), "],")
    lines += _block('"aliases": {', (f"{_text(key)}: {_text(first)}" for key, first in index.aliases.items()), "},")
    if isinstance(index, WrittenIndex):
        values, tensors = index.value_lines, index.lines
    else:
        values = {key: _text(_value(value, numbers)) for key, value in index.values.items()}
        tensors = {key: _text(_tensor(tensor, numbers)) for key, tensor in index.tensors.items()}
    lines += _block('"values": {', (f"{_text(key)}: {text}" for key, text in values.items()), "},")
    lines += _block('"tensors": {', (f"{_text(key)}: {text}" for key, text in tensors.items()), "}")
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
    if int(first[2]) > VERSION:
        raise CheckpointError(
            f"{where} has format version {int(first[2])}; this fullshard reads versions up to {VERSION}: install a "
            "newer fullshard"
        )
    zeroed = data[: first.start(3)] + _NO_CHECKSUM.encode() + data[first.end(3) :]
    if checksum(zeroed).hex().encode() != first[3]:
        _refuse(where, "checksum mismatch")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"not JSON ({error})")
    return _IndexParser(where).index(content)


def _refuse(where: str, found: str) -> NoReturn:
    raise CheckpointError(f"{where} cannot be read: {found}. The file is corrupted: use another checkpoint")


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _block(head: str, lines: Iterable[str], tail: str) -> list[str]:
    """Return one line per entry, with commas in between, so that an index can be searched and compared by lines."""
    body = list(lines)
    return [head, *(f"{line}," for line in body[:-1]), *body[-1:], tail]


def _value(value: ValueEntry, numbers: Mapping[str, int]) -> list[Any]:
    return [list(value.path), numbers[value.file], value.start, value.length, value.checksums.hex()]


def _tensor(tensor: TensorEntry, numbers: Mapping[str, int]) -> list[Any]:
    shards = [
        [list(shard.region.offsets), list(shard.region.sizes), numbers[shard.file], shard.start, shard.checksums.hex()]
        for shard in tensor.shards
    ]
    return [list(tensor.path), tensor.dtype, list(tensor.shape), shards]


class _IndexParser:
    """Turns untrusted JSON into an index: types are checked here, contents by the index itself."""

    where: str
    files: list[str]

    def __init__(self, where: str) -> None:
        self.where, self.files = where, []

    def index(self, content: Any) -> Index:
        fields = self._dict("the index", content)
        files: dict[str, FileEntry] = {}
        for entry in self._list("files", fields.get("files")):
            name, length, header, digest = self._parts("files", entry, 4)
            files[self._str("files", name)] = FileEntry(
                self._int("files", length), self._int("files", header), self._hex("files", digest)
            )
        self.files = list(files)
        tensors = {key: self._tensor(key, entry) for key, entry in self._dict("tensors", fields.get("tensors")).items()}
        values = {key: self._value(key, entry) for key, entry in self._dict("values", fields.get("values")).items()}
        aliases = self._dict("aliases", fields.get("aliases"))
        return Index(
            where=self.where,
            tensors=tensors,
            values=values,
            files=files,
            aliases={key: self._str(key, first) for key, first in aliases.items()},
            about=self._dict("about", fields.get("about")),
            save=self._str("save", fields.get("save")),
            block=self._int("block", fields.get("block")),
        )

    def _tensor(self, key: str, entry: Any) -> TensorEntry:
        path, dtype, shape, shards = self._parts(key, entry, 4)
        sizes = self._ints(key, shape)
        name = self._str(key, dtype)
        found = tuple(self._piece(key, shard, name) for shard in self._list(key, shards))
        return TensorEntry(name, sizes, found, self._path(key, path))

    def _piece(self, key: str, entry: Any, dtype: str) -> ShardEntry:
        offsets, sizes, file, start, digests = self._parts(key, entry, 5)
        try:
            region = Region(self._ints(key, offsets), self._ints(key, sizes))
        except ValueError as error:
            self._wrong(key, str(error))
        length = region.numel * ITEM_SIZES.get(dtype, 0)  # an unknown dtype is rejected by the index
        return ShardEntry(region, self._file(key, file), self._int(key, start), length, self._hex(key, digests))

    def _value(self, key: str, entry: Any) -> ValueEntry:
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
