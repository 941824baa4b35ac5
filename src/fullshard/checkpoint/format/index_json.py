"""The JSON form of an index, as in ``docs/checkpoints/format.md``. See [Note: Index] for the checks."""

from __future__ import annotations

import base64
import json
import operator
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import xxhash

from fullshard.checkpoint.format.index import FileEntry, Index, TensorEntry
from fullshard.checkpoint.format.region_table import RegionTable, pack_columns, unpack_columns
from fullshard.errors import CheckpointError
from fullshard.messages import clipped

__all__ = ["FORMAT", "VERSION", "checksum", "from_json", "to_json"]

FORMAT = "fullshard checkpoint"
VERSION = 2

_NO_CHECKSUM = "0" * 16
# The first line: format, version, and the checksum of the whole file with zeros in its place.
_FIRST_LINE = re.compile(rb'\{"format": "([^"\n]{1,40})", "version": ([0-9]{1,9}), "checksum": "([0-9a-f]{16})",\n')
_FEW_ROWS, _MOST_SHARDS = 1 << 18, 64  # in all, and of each tensor in each file: compressed rows may fill the memory


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
    return _parsed(content, where)


def _refuse(where: str, found: str) -> NoReturn:
    raise CheckpointError(f"{where} cannot be read: {found}. The file is corrupted: use another checkpoint")


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _block(head: str, lines: Iterable[str], tail: str) -> list[str]:
    """Return one line per entry, with commas in between, so that an index can be searched and compared by lines."""
    body = list(lines)
    return [head, *(f"{line}," for line in body[:-1]), *body[-1:], tail]


def _parsed(content: Any, where: str) -> Index:
    """Make an index of untrusted JSON: it is read here, and checked by ``Index``."""
    at = "files"
    try:
        files = {
            name: FileEntry(operator.index(length), operator.index(header), bytes.fromhex(digest))
            for name, length, header, digest in content["files"]
        }
        names, tensors, values = list(files), dict[str, TensorEntry](), dict[str, str]()
        # The first field of tensors and values is a path in nested dicts, which is empty in all that save() writes.
        for at, (_, dtype, shape) in content["tensors"].items():
            tensors[at] = TensorEntry(dtype, tuple(map(operator.index, shape)))
        for at, (_, number) in content["values"].items():
            values[at] = names[operator.index(number)]
        at = "shards"
        most = max(_FEW_ROWS, _MOST_SHARDS * len(tensors) * len(files))
        dims = max((len(tensor.shape) for tensor in tensors.values()), default=0)
        packed = base64.b64decode(content["shards"], validate=True)
        columns = unpack_columns(packed, 16 * (1 + dims) * most)
        regions = RegionTable.from_columns(columns[1:])
        at = "other fields"
        aliases, about, block = dict(content["aliases"]), dict(content["about"]), operator.index(content["block"])
        return Index(where, tensors, regions, columns[0], values, files, aliases, about, str(content["save"]), block)
    except CheckpointError:
        raise
    except Exception as error:  # JSON of other types than expected may raise anything
        raise CheckpointError(
            f"{where}: {clipped(at)}: found {clipped(error)} ({type(error).__name__}). The file is corrupted: use "
            "another checkpoint"
        ) from error
