"""The index: its JSON form and back, and everything that a damaged or made-up one is refused for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard import CheckpointError
from fullshard.checkpoint.format.index import (
    ITEM_SIZES,
    FileEntry,
    Index,
    ShardEntry,
    TensorEntry,
    ValueEntry,
    data_file,
    first_overlap,
)
from fullshard.checkpoint.format.index_json import checksum, from_json, to_json
from fullshard.layout import Region, regions_of_range

SAVE = "0123456789ab"
FILES = [data_file(SAVE, 0), data_file(SAVE, 1)]
EIGHT = bytes(range(8))


def small() -> Index:
    """A tensor of shape (4, 3) in three shards over two files, a scalar, a value and an alias."""
    regions = [*regions_of_range((4, 3), 0, 6), *regions_of_range((4, 3), 6, 6)]
    shards = [
        ShardEntry(region, FILES[rank], 100, 4 * region.numel, EIGHT)
        for rank, region in zip((0, 1), regions, strict=True)
    ]
    return Index(
        where="folder/fullshard.json",
        tensors={
            "model.w": TensorEntry("float32", (4, 3), tuple(shards), ("model", "w")),
            "step": TensorEntry("int64", (), (ShardEntry(Region((), ()), FILES[0], 124, 8, EIGHT),)),
            "empty": TensorEntry("bool", (0, 3), ()),
        },
        values={"groups": ValueEntry(FILES[1], 124, 5, EIGHT, ("a", 0))},
        files={name: FileEntry(132, 100, EIGHT) for name in FILES},
        aliases={"model.tied": "model.w"},
        about={"step": 3, "text": 'with "quotes" and ü\n'},
        save=SAVE,
    )


def signed(content: Any) -> bytes:
    """A JSON value as a file with the checksum that it should have."""
    body = json.dumps({key: value for key, value in content.items() if key not in ("format", "version", "checksum")})
    head = '{"format": "fullshard checkpoint", "version": 1, "checksum": "%s",\n'
    zeroed = head % ("0" * 16) + body[1:]
    return (head % checksum(zeroed.encode()).hex() + body[1:]).encode()


def content() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(to_json(small()))
    return parsed


def test_json_and_back() -> None:
    """Every field survives."""
    index = small()
    assert from_json(to_json(index), index.where) == index
    assert from_json(signed(content()), index.where) == index


def test_lines() -> None:
    """One line for each tensor, so that an index can be searched and compared by lines; and it is JSON."""
    lines = to_json(small()).decode().splitlines()
    assert [line for line in lines if line.startswith('"model.w":')] == [
        '"model.w": [["model","w"],"float32",[4,3],'
        '[[[0,0],[2,3],0,100,"0001020304050607"],[[2,0],[2,3],1,100,"0001020304050607"]]],'
    ]
    assert content()["about"]["text"] == 'with "quotes" and ü\n'


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(shapes, st.sampled_from(sorted(ITEM_SIZES)), st.data())
def test_any_cut_survives(shape: tuple[int, ...], dtype: str, data: st.DataObject) -> None:
    """A tensor cut into flat ranges at any places is accepted, and is the same after JSON."""
    numel = Region.whole(shape).numel
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, numel - 1)), max_size=3)) & set(range(1, numel)))
    shards, start = [], 10
    for low, high in zip([0, *cuts], [*cuts, numel], strict=True):
        for region in regions_of_range(shape, low, high - low):
            length = region.numel * ITEM_SIZES[dtype]
            shards.append(ShardEntry(region, FILES[0], start, length, EIGHT))
            start += length
    files = {FILES[0]: FileEntry(start, 10, EIGHT)}
    index = Index("i", {"t": TensorEntry(dtype, shape, tuple(shards))}, {}, files)
    assert from_json(to_json(index), "i") == index
    if len(shards) > 1:
        with pytest.raises(CheckpointError, match="i: t: found shards that lack"):
            replace(index, tensors={"t": TensorEntry(dtype, shape, tuple(shards[1:]))})
        with pytest.raises(CheckpointError, match="overlap"):
            replace(index, tensors={"t": TensorEntry(dtype, shape, (*shards[1:], shards[-1]))})


@given(st.data())
def test_overlaps_are_found(data: st.DataObject) -> None:
    """The sweep finds an overlap exactly when comparing all pairs does."""
    dims = data.draw(st.integers(0, 3))
    pair = st.tuples(st.integers(0, 4), st.integers(0, 3))
    regions = [
        Region(tuple(a for a, _ in corner), tuple(b for _, b in corner))
        for corner in data.draw(st.lists(st.tuples(*[pair] * dims), max_size=6))
    ]
    expected = any(a.overlap(b) is not None and a.numel and b.numel for i, a in enumerate(regions) for b in regions[:i])
    found = first_overlap(regions)
    assert (found is not None) == expected
    if found is not None:
        assert found[0].overlap(found[1]) is not None


def edit(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the JSON: the value at ``path`` becomes ``to``."""

    def change(found: Any) -> None:
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = to

    return change


SHARDS = ("tensors", "model.w", 3)

HOSTILE = {
    "file that leads out": (edit("files", 0, 0, to="../../etc/passwd"), "../../etc/passwd"),
    "absolute file": (edit("files", 0, 0, to="/etc/passwd"), "/etc/passwd"),
    "file of another kind": (edit("files", 0, 0, to="data-0123456789ab-0.safetensors/../x"), "not one of a data file"),
    "file name with a line": (edit("files", 0, 0, to=FILES[0] + "\n"), "not one of a data file"),
    "file name that is none": (edit("files", 0, 0, to=7), "where a string was expected"),
    "file number beyond": (edit(*SHARDS, 0, 2, to=2), "model.w: found file number 2 of 2"),
    "negative file number": (edit(*SHARDS, 0, 2, to=-1), "model.w: found file number -1"),
    "negative start": (edit(*SHARDS, 0, 3, to=-4), "model.w: found bytes -4 to 20"),
    "start in the header": (edit(*SHARDS, 0, 3, to=99), "model.w: found bytes 99 to 123"),
    "beyond the file": (edit(*SHARDS, 0, 3, to=109), "model.w: found bytes 109 to 133"),
    "huge start": (edit(*SHARDS, 0, 3, to=10**30), "model.w: found bytes"),
    "start that is a bool": (edit(*SHARDS, 0, 3, to=True), "model.w: found 'True'"),
    "start that is a fraction": (edit(*SHARDS, 0, 3, to=100.0), "model.w: found '100.0'"),
    "negative offset": (edit(*SHARDS, 0, 0, to=[-1, 0]), "model.w: found expected"),
    "shard outside": (edit(*SHARDS, 1, 0, to=[3, 0]), r"model.w: found shard \[3:5, 0:3\]"),
    "overlap": (edit(*SHARDS, 1, 0, to=[1, 0]), "model.w: found shards .* which overlap"),
    "hole": (edit(*SHARDS, to=[[[0, 0], [2, 3], 0, 100, EIGHT.hex()]]), "model.w: found shards that lack 6 of the 12"),
    "too large for the file": (edit("tensors", "model.w", 2, to=[10**9, 3]), "model.w: found shards that lack"),
    "huge shape": (edit("tensors", "model.w", 2, to=[2**62, 3]), "model.w: found shape"),
    "huge product": (edit("tensors", "model.w", 2, to=[2**40, 2**40]), "model.w: found shape"),
    "many dims": (edit("tensors", "model.w", 2, to=[1] * 65), "model.w: found shape"),
    "dims of shards": (edit(*SHARDS, 0, 0, to=[0]), "model.w: found expected as many offsets"),
    "dims of tensors": (edit("tensors", "model.w", 2, to=[12]), "model.w: found shard"),
    "shape that is text": (edit("tensors", "model.w", 2, to="43"), "model.w: found '43'"),
    "dtype": (edit("tensors", "model.w", 1, to="float33"), "model.w: found dtype 'float33'"),
    "larger dtype": (edit("tensors", "model.w", 1, to="float64"), "model.w: found bytes|model.w: found shards"),
    "dtype that is none": (edit("tensors", "model.w", 1, to=None), "model.w: found 'None'"),
    "checksum that is none": (edit(*SHARDS, 0, 4, to="xyz"), "model.w: found 'xyz' as a checksum"),
    "no checksum": (edit(*SHARDS, 0, 4, to=""), "model.w: found 0 bytes of checksums"),
    "too few fields": (edit(*SHARDS, 0, to=[[0, 0], [2, 3]]), "model.w: found 2 fields, not 5"),
    "tensors that are a list": (edit("tensors", to=[]), "tensors: found"),
    "tensor that is null": (edit("tensors", "model.w", to=None), "model.w: found 'None'"),
    "no values": (edit("values", to=None), "values: found"),
    "value beyond the file": (edit("values", "groups", 3, to=9), "groups: found bytes"),
    "negative value": (edit("values", "groups", 3, to=-1), "groups: found bytes"),
    "value and tensor": (edit("values", "model.w", to=[[], 1, 124, 5, EIGHT.hex()]), "model.w: found a tensor and"),
    "alias of nothing": (edit("aliases", "model.tied", to="model.x"), "model.tied: found an alias"),
    "alias of itself": (edit("aliases", "model.w", to="model.w"), "model.w: found an alias"),
    "block": (edit("block", to=0), "block: found"),
    "huge block": (edit("block", to=2**40), "block: found"),
    "block between": (edit("block", to=65), "block: found"),
    "header beyond the file": (edit("files", 0, 2, to=133), "found a header of 133 bytes"),
    "negative length": (edit("files", 0, 1, to=-1), "found a header"),
    "about": (edit("about", to=3), "about: found '3'"),
    "path": (edit("tensors", "model.w", 0, to=[None]), "model.w: found 'None'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_made_up_indexes_are_refused(name: str) -> None:
    """Well-formed, with a good checksum, and wrong: the error names the file and the key."""
    change, message = HOSTILE[name]
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
        (b'{"format": "fullshard checkpoint", "version": 2, "checksum": "0000000000000000",\n}', "install a newer"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    """What is no index, or one of a later version, is said to be that."""
    with pytest.raises(CheckpointError, match=message):
        from_json(data, "i")


def test_deep_nesting_is_refused() -> None:
    """JSON that would overflow the stack is an error like any other."""
    text = '{"format": "fullshard checkpoint", "version": 1, "checksum": "%s",\n"a": ' + "[" * 100_000
    zeroed = (text % ("0" * 16)).encode()
    with pytest.raises(CheckpointError, match="not JSON"):
        from_json((text % checksum(zeroed).hex()).encode(), "i")


def test_every_flipped_bit_is_noticed() -> None:
    """A flip of any bit of the file, also of its first line, is refused."""
    data = bytearray(to_json(small()))
    for position in range(len(data)):
        for bit in (0, 5):
            data[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                from_json(bytes(data), "i")
            data[position] ^= 1 << bit
    assert from_json(bytes(data), "folder/fullshard.json") == small()


def test_every_cut_is_noticed() -> None:
    """So is an index that ends too early."""
    data = to_json(small())
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            from_json(data[:length], "i")
