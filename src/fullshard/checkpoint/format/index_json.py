"""The JSON form of an index, as in ``docs/checkpoints/format.md``. See [Note: Index] for the checks."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import xxhash

from fullshard.checkpoint.format.index import FileEntry, Index, TensorEntry
from fullshard.checkpoint.format.region_table import RegionTable, pack_columns, unpack_columns
from fullshard.errors import CheckpointError
from fullshard.messages import clipped

__all__ = ["FORMAT", "VERSION", "checksum", "from_json", "to_json"]

T = TypeVar("T")

FORMAT = "fullshard checkpoint"
VERSION = 2

_NO_CHECKSUM = "0" * 16
# The first line: format, version, and the checksum of the whole file with zeros in its place.
_FIRST_LINE = re.compile(rb'\{"format": "([^"\n]{1,40})", "version": ([0-9]{1,9}), "checksum": "([0-9a-f]{16})",\n')
_FEW_ROWS, _MOST_SHARDS = 1 << 18, 64  # in all, and of each tensor in each file: compressed rows may fill the memory
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
    values = (f"{_text(key)}: {_text([[], numbers[name]])}" for key, name in index.values.items())
    lines += _block('"values": {', values, "},")
    tensors = (f"{_text(key)}: {_text([[], t.dtype, list(t.shape)])}" for key, t in index.tensors.items())
    lines += _block('"tensors": {', tensors, "},")
    shards = pack_columns([index.region_files, *index.regions.columns])
    lines.append(f'"shards": {_text(base64.b64encode(shards).decode())}')
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
    if version != VERSION:
        advice = "install a newer fullshard" if version > VERSION else "no release has written it; save again"
        raise CheckpointError(f"{where} has format version {version}; this fullshard reads version {VERSION}: {advice}")
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


_KINDS = {int: "an integer", str: "a string", list: "a list", dict: "an object"}


@dataclass
class _IndexParser:
    """Turns untrusted JSON into an index: types are checked here, contents by the index itself."""

    where: str
    files: list[str] = field(default_factory=list)

    def index(self, content: Any) -> Index:
        fields = self._as(dict, "the index", content)
        files: dict[str, FileEntry] = {}
        for entry in self._as(list, "files", fields.get("files")):
            name, length, header, digest = self._parts("files", entry, 4)
            files[self._as(str, "files", name)] = FileEntry(
                self._as(int, "files", length), self._as(int, "files", header), self._checksum(digest)
            )
        self.files = list(files)
        # The first field of tensors and values is a path in nested dicts, which is empty in all that save() writes.
        rows = self._rows("tensors", fields, 3)
        tensors = {key: self._tensor(key, dtype, shape) for key, (_, dtype, shape) in rows.items()}
        most = max(_FEW_ROWS, _MOST_SHARDS * len(tensors) * len(files))
        dims = max((len(tensor.shape) for tensor in tensors.values()), default=0)
        try:
            packed = base64.b64decode(self._as(str, "shards", fields.get("shards")), validate=True)
            columns = unpack_columns(packed, 16 * (1 + dims) * most)
            regions = RegionTable.from_columns(columns[1:])
        except ValueError as error:
            self._refuse(f"shards: found {error}")
        return Index(
            where=self.where,
            tensors=tensors,
            regions=regions,
            region_files=columns[0],
            values={key: self._file(key, number) for key, (_, number) in self._rows("values", fields, 2).items()},
            files=files,
            aliases={
                k: self._as(str, k, first) for k, first in self._as(dict, "aliases", fields.get("aliases")).items()
            },
            about=self._as(dict, "about", fields.get("about")),
            save=self._as(str, "save", fields.get("save")),
            block=self._as(int, "block", fields.get("block")),
        )

    def _rows(self, name: str, fields: dict[str, Any], count: int) -> dict[str, list[Any]]:
        return {key: self._parts(key, row, count) for key, row in self._as(dict, name, fields.get(name)).items()}

    def _tensor(self, key: str, dtype: Any, shape: Any) -> TensorEntry:
        sizes = tuple(self._as(int, key, size) for size in self._as(list, key, shape))
        try:
            return TensorEntry(self._as(str, key, dtype), sizes)
        except ValueError as error:
            self._wrong(key, str(error))

    def _file(self, key: str, number: Any) -> str:
        index = self._as(int, key, number)
        if not 0 <= index < len(self.files):
            self._wrong(key, f"file number {index} of {len(self.files)}")
        return self.files[index]

    def _parts(self, key: str, found: Any, count: int) -> list[Any]:
        parts = self._as(list, key, found)
        if len(parts) != count:
            self._wrong(key, f"{len(parts)} fields, not {count}")
        return parts

    def _checksum(self, found: Any) -> bytes:
        try:
            return bytes.fromhex(self._as(str, "files", found))
        except ValueError:
            self._wrong("files", f"{found[:_SHOWN]!r} as a checksum")

    def _as(self, kind: type[T], key: str, found: Any) -> T:
        """Return a value that has to be of a kind; a bool is no integer."""
        if type(found) is not kind:
            self._wrong(key, f"{str(found)[:_SHOWN]!r} where {_KINDS[kind]} was expected")
        return found

    def _wrong(self, key: str, found: str) -> NoReturn:
        self._refuse(f"{clipped(key)}: found {clipped(found)}")

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {problem}. The file is corrupted: use another checkpoint")
