"""The index: its JSON form and back, and everything that a damaged or made-up one is refused for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard import CheckpointError
from fullshard.checkpoint.format.index import (
    ITEM_SIZES,
    FileEntry,
    FilePlace,
    Index,
    Shard,
    TensorEntry,
    data_file,
    table_of,
)
from fullshard.checkpoint.format.index_json import VERSION, checksum, from_json, to_json
from fullshard.checkpoint.format.region_table import RegionTable, pack_columns
from fullshard.layout import Region, regions_of_range

SAVE = "0123456789ab"
FILES = [data_file(SAVE, 0), data_file(SAVE, 1)]
EIGHT = bytes(range(8))
REGIONS = [*regions_of_range((4, 3), 0, 6), *regions_of_range((4, 3), 6, 6)]


def index_of(tensors: dict[str, TensorEntry], shards: Sequence[tuple[str, Region, str]], **fields: Any) -> Index:
    """An index of shards, each with its key and file, in any order."""
    files = fields.pop("files", {FILES[0]: FileEntry(132, 100, 2 * EIGHT)})
    places = {(key, region): FilePlace(file, 0, 0) for key, region, file in shards}
    regions, numbers = table_of(tensors, list(files), places)
    return Index("folder/fullshard.json", tensors, regions, numbers, fields.pop("values", {}), files, **fields)


def small() -> Index:
    """A tensor of shape (4, 3) in two shards over two files, a scalar, an empty tensor, a value and an alias."""
    return index_of(
        {
            "model.w": TensorEntry("float32", (4, 3)),
            "step": TensorEntry("int64", ()),
            "empty": TensorEntry("bool", (0, 3)),
        },
        [("model.w", REGIONS[1], FILES[1]), ("step", Region((), ()), FILES[0]), ("model.w", REGIONS[0], FILES[0])],
        values={"groups": FILES[1]},
        files={name: FileEntry(132, 100, 2 * EIGHT) for name in FILES},
        aliases={"model.tied": "model.w"},
        about={"step": 3, "text": 'with "quotes" and ü\n'},
        save=SAVE,
    )


def signed(content: Any) -> bytes:
    """A JSON value as a file with the checksum that it should have."""
    body = json.dumps({key: value for key, value in content.items() if key not in ("format", "version", "checksum")})
    head = f'{{"format": "fullshard checkpoint", "version": {VERSION}, "checksum": "%s",\n'
    zeroed = head % ("0" * 16) + body[1:]
    return (head % checksum(zeroed.encode()).hex() + body[1:]).encode()


def content() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(to_json(small()))
    return parsed


def packed(*rows: Sequence[int]) -> str:
    """Shards as the index has them: file, tensor, two offsets, two sizes."""
    return base64.b64encode(pack_columns(list(np.array(rows, dtype=np.int64).T))).decode()


def test_json_and_back() -> None:
    """Every field survives, one line for each tensor, so that an index can be searched and compared by lines."""
    data = to_json(small())
    assert to_json(from_json(data, "i")) == to_json(from_json(signed(content()), "i")) == data
    assert content()["shards"] == packed((0, 0, 0, 0, 2, 3), (1, 0, 2, 0, 2, 3), (0, 1, 0, 0, 1, 1))
    assert '"model.w": [[],"float32",[4,3]],' in data.decode().splitlines()
    assert content()["about"]["text"] == 'with "quotes" and ü\n'


def test_shards_are_found_by_region() -> None:
    """From objects as from columns, whatever their order was, also under other names."""
    for index in (small(), from_json(to_json(small()), "i")):
        shards = [Shard(region, file) for region, file in zip(REGIONS, FILES, strict=True)]
        for key in ("model.w", "model.tied"):
            assert list(index.shards(key)) == list(index.shards(key, Region((1, 1), (2, 1)))) == shards
            assert list(index.shards(key, Region((3, 0), (1, 3)))) == shards[1:]
            assert list(index.shards(key, Region((0, 0), (0, 3)))) == []
        assert list(index.shards("step", Region((), ()))) == [Shard(Region((), ()), FILES[0])]
        assert list(index.shards("empty")) == []


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(shapes, st.sampled_from(sorted(ITEM_SIZES)), st.data())
def test_any_flat_shards_survive(shape: tuple[int, ...], dtype: str, data: st.DataObject) -> None:
    """A tensor sharded into flat ranges that end anywhere is accepted, and is the same after JSON."""
    numel = Region.whole(shape).numel
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, numel - 1)), max_size=3)) & set(range(1, numel)))
    shards = [
        ("t", region, FILES[0])
        for low, high in zip([0, *cuts], [*cuts, numel], strict=True)
        for region in regions_of_range(shape, low, high - low)
    ]
    tensors = {"t": TensorEntry(dtype, shape)}
    index = index_of(tensors, shards)
    assert to_json(from_json(to_json(index), "i")) == to_json(index)
    assert list(index.shards("t")) == [Shard(region, file) for _, region, file in shards]
    if len(shards) > 1:
        with pytest.raises(CheckpointError, match="t: found shards that lack"):
            index_of(tensors, shards[1:])
        with pytest.raises(CheckpointError, match="overlap"):
            index_of(tensors, [*shards[1:], ("t", Region.whole(shape), FILES[0])])


@given(st.data())
def test_overlaps_are_found(data: st.DataObject) -> None:
    """A table has an overlap exactly when a pair of its regions has."""
    dims = data.draw(st.integers(0, 3))
    pair = st.tuples(st.integers(0, 4), st.integers(0, 3))
    regions = [
        Region(tuple(a for a, _ in corner), tuple(b for _, b in corner))
        for corner in data.draw(st.lists(st.tuples(*[pair] * dims), max_size=6))
    ]
    expected = any(a.overlap(b) is not None and a.numel and b.numel for i, a in enumerate(regions) for b in regions[:i])
    table, shape = RegionTable.of([(0, region) for region in regions if region.numel], dims), (8,) * dims
    problem = table.find_problem([shape])
    assert ("overlapping" in (problem or (0, ""))[1]) == expected


def edit(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the JSON: the value at ``path`` becomes ``to``."""

    def change(found: Any) -> None:
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = to

    return change


STEP = (0, 1, 0, 0, 1, 1)  # file, tensor, offsets and sizes of its only shard
ONE, TWO = (0, 0, 0, 0, 2, 3), (1, 0, 2, 0, 2, 3)
HOSTILE = {
    "file that leads out": (edit("files", 0, 0, to="../../etc/passwd"), "../../etc/passwd"),
    "file of another kind": (edit("files", 0, 0, to="data-0123456789ab-0.safetensors/../x"), "not one of a data file"),
    "file name that is none": (edit("files", 0, 0, to=7), "files|other fields: found .*TypeError"),
    "checksum that is none": (edit("files", 0, 3, to="xyz"), "files: found .*fromhex"),
    "header beyond the file": (edit("files", 0, 2, to=133), "found a header of 133 bytes"),
    "length that is a text": (edit("files", 0, 1, to="1"), "files: found .*TypeError"),
    "larger shape": (edit("tensors", "model.w", 2, to=[10**9, 3]), "model.w: found shards that lack"),
    "huge product": (edit("tensors", "model.w", 2, to=[2**40, 2**40]), "model.w: found shape"),
    "many dims": (edit("tensors", "model.w", 2, to=[1] * 65), "model.w: found shape"),
    "dims of tensors": (edit("tensors", "model.w", 2, to=[12]), "model.w: found shard|shards: found shards of 2 dims"),
    "dtype": (edit("tensors", "model.w", 1, to="float33"), "model.w: found dtype 'float33'"),
    "too few fields": (
        edit("tensors", "model.w", to=[[], "float32"]),
        "model.w: found not enough values",
    ),
    "tensor that is null": (edit("tensors", "model.w", to=None), "found .*TypeError"),
    "no values": (edit("values", to=None), "found .*AttributeError"),
    "alias of nothing": (edit("aliases", "model.tied", to="model.x"), "model.tied: found an alias"),
    "alias of itself": (edit("aliases", "model.w", to="model.w"), "model.w: found an alias"),
    "block": (edit("block", to=0), "block: found"),
    "block between": (edit("block", to=65), "block: found"),
    "about": (edit("about", to=3), "other fields: found .*TypeError"),
    "no shards": (edit("shards", to=None), "shards: found .*TypeError"),
    "shards that are not compressed": (edit("shards", to="AQIDBA=="), "shards: found columns that cannot be"),
    "shards without columns": (edit("shards", to=""), "shards: found no columns"),
    "cut off": (edit("shards", to=base64.b64encode(base64.b64decode(packed(ONE))[:-5]).decode()), "incomplete"),
    "odd columns": (edit("shards", to=packed(ONE[:-1], TWO[:-1])), "shards: found 4 columns"),
    "file number beyond": (edit("shards", to=packed(ONE, (2, *TWO[1:]), STEP)), "not among 2 files"),
    "tensor number beyond": (edit("shards", to=packed(ONE, TWO, (0, 3, 0, 0, 1, 1))), "not among 3 tensors"),
    "other order": (edit("shards", to=packed(TWO, ONE, STEP)), "not in order"),
    "twice": (edit("shards", to=packed(ONE, ONE, TWO, STEP)), "not in order, or overlap"),
    "hole": (edit("shards", to=packed(ONE, STEP)), "model.w: found shards that lack 6 of the 12"),
    "overlap": (edit("shards", to=packed(ONE, (1, 0, 1, 0, 3, 3), STEP)), "model.w: found overlapping shards"),
    "shard outside": (edit("shards", to=packed(ONE, (1, 0, 2, 0, 3, 3), STEP)), r"model.w: found shard \[2:5, 0:3\]"),
    "negative offset": (edit("shards", to=packed((0, 0, -1, 0, 3, 3), TWO, STEP)), r"model.w: found"),
    "negative size": (edit("shards", to=packed((0, 0, 0, 0, -2, -3), TWO, STEP)), "model.w: found"),
    "huge size": (edit("shards", to=packed(ONE, (1, 0, 2, 0, 2**62, 2**62), STEP)), "model.w: found"),
    "offset in a dim that is not there": (edit("shards", to=packed(ONE, TWO, (0, 1, 1, 0, 1, 1))), "step: found shard"),
    "empty shard": (edit("shards", to=packed(ONE, TWO, STEP, (0, 2, 0, 0, 0, 3))), "empty: found shard"),
    "file of a value": (edit("values", "groups", 1, to=2), "groups: found .*IndexError"),
    "value and tensor": (edit("values", "model.w", to=[[], 1]), "model.w: found a tensor and"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_made_up_indexes_are_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    """Well-formed, with a good checksum, and wrong: the error names the file and the key."""
    made_up = content()
    change(made_up)
    with pytest.raises(CheckpointError, match=message) as caught:
        from_json(signed(made_up), "folder/fullshard.json")
    assert str(caught.value).startswith("folder/fullshard.json: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an index"),
        (b"{}", "not an index"),
        (b'{"format": "other", "version": 1, "checksum": "0000000000000000",\n}', "not an index"),
        (b"\xff\xfe" * 40, "not an index"),
        (signed({"a": 1})[:-1], "checksum"),
        (b'{"format": "fullshard checkpoint", "version": 3, "checksum": "0000000000000000",\n}', "install a newer"),
        (b'{"format": "fullshard checkpoint", "version": 1, "checksum": "0000000000000000",\n}', "no release has"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    """What is no index, or one of another version, is said to be that."""
    with pytest.raises(CheckpointError, match=message):
        from_json(data, "i")


def test_deep_nesting_is_refused() -> None:
    """JSON that would overflow the stack is an error like any other."""
    text = '{"format": "fullshard checkpoint", "version": 2, "checksum": "%s",\n"a": ' + "[" * 100_000
    zeroed = (text % ("0" * 16)).encode()
    with pytest.raises(CheckpointError, match="not JSON"):
        from_json((text % checksum(zeroed).hex()).encode(), "i")


def test_every_flipped_bit_is_noticed() -> None:
    """A flip of any bit of the file, also of its first line, is refused."""
    data = to_json(small())
    for position in range(len(data)):
        for bit in (0, 5):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                from_json(bytes(flipped), "i")


def test_every_cut_is_noticed() -> None:
    """So is an index that ends too early."""
    data = to_json(small())
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            from_json(data[:length], "i")
