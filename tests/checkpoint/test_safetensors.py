"""Safetensors files: headers as the package writes and reads them, hostile ones refused, and shards at their places."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compare import assert_equal
from fullshard.checkpoint.safetensors.files import (
    INDEX_NAME,
    SINGLE_NAME,
    FileTensor,
    find_weights,
    index_text,
    plan_files,
    read_header,
)
from fullshard.checkpoint.safetensors.shard_io import ShardFileIO
from fullshard.engine.parameters.tensor_shards import TensorShard
from fullshard.errors import CheckpointError
from fullshard.layout import Region

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes that make sense in any dtype."""
    numel = int(np.prod(shape, dtype=np.int64))
    return (torch.arange(numel) % 2).to(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def packed(header: Any, data: bytes = b"") -> bytes:
    """A file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# -------------------------------------------------------------------- headers


@hypothesis.given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    limit=st.integers(1, 200),
)
@hypothesis.settings(max_examples=50)
def test_planned_files_are_what_the_package_reads(
    tensors: dict[str, tuple[torch.dtype, list[int]]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files with planned headers and tensors at planned places are read by the package, and by us, as planned."""
    folder = tmp_path_factory.mktemp("planned")
    contents = {name: some(dtype, *shape) for name, (dtype, shape) in tensors.items()}
    kinds = {name: FileTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in contents.items()}
    plans = plan_files(kinds, limit, {"format": "pt"})
    assert [name for plan in plans for name in kinds if name in plan.tensors] == list(kinds)
    for plan in plans:
        data = bytearray(plan.size)
        data[: len(plan.header)] = plan.header
        for name, place in plan.tensors.items():
            assert place.start % max(1, place.dtype.itemsize) == 0
            data[place.start : place.start + place.nbytes] = bytes_of(contents[name])
        (folder / plan.name).write_bytes(data)
        nbytes = sum(place.nbytes for place in plan.tensors.values())
        assert nbytes <= limit or sum(place.nbytes > 0 for place in plan.tensors.values()) == 1
        read = load_file(folder / plan.name)
        assert set(read) == set(plan.tensors)
        assert all(bytes_of(read[name]) == bytes_of(contents[name]) for name in read)
    if len(plans) > 1:
        (folder / INDEX_NAME).write_text(index_text(plans, {}))
    found = find_weights(folder)
    assert {name: tensor._replace(start=0) for name, (_, tensor) in found.tensors.items()} == kinds
    assert found.metadata == {"format": "pt"}


def test_files_are_named_as_usual() -> None:
    """One file has the short name, several are numbered; what the format has no name for is refused."""
    kinds = {name: FileTensor(torch.float32, (10,)) for name in "abc"}
    assert [plan.name for plan in plan_files(kinds, 1000, {})] == [plan.name for plan in plan_files({}, 1, {})]
    plans = plan_files(kinds, 80, {})
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [(plan.name, list(plan.tensors)) for plan in plans] == list(zip(names, (["a", "b"], ["c"]), strict=True))
    index = json.loads(index_text(plans, {"by": "us"}))
    assert index["metadata"] == {"by": "us", "total_size": 120} and index["weight_map"]["c"] == names[1]
    with pytest.raises(ValueError, match=r"a \(torch.complex128\)"):
        plan_files({"a": FileTensor(torch.complex128, (1,))}, 10, {})
    with pytest.raises(ValueError, match="__metadata__"):
        plan_files({"__metadata__": FileTensor(torch.float32, (1,))}, 10, {})


# -------------------------------------------------------------------- hostile files


DAMAGED: dict[str, bytes] = {  # the package checks them; test_no_damage_raises_anything_else draws more
    "empty": b"",
    "no header": bytes(8),
    "length beyond the file": struct.pack("<Q", 2**63) + b"{}",
    "gap": packed({"a": entry(offsets=(4, 12))}, bytes(12)),
    "huge file": packed({"a": entry(shape=(2**40,), offsets=(0, 2**42))}, bytes(8)),
    "dtype that torch lacks": packed({"a": entry(dtype="F4", shape=(16,))}, bytes(8)),
    "too long": packed({"a": entry()}, bytes(9)),
    "too short": packed({"a": entry()}, bytes(7)),
    "deep": packed(b"[" * 100_000, bytes(16)),
    # Of two entries of one name the last counts, and all bytes have to be some tensor's.
    "name twice": packed(
        f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry(offsets=(8, 16)))}}}'.encode(), bytes(16)
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_refused(kind: str, tmp_path: Path) -> None:
    """Each with the file's name; also what takes a parser's time, stack or memory."""
    (tmp_path / "a.safetensors").write_bytes(DAMAGED[kind])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: (not a safetensors|tensor 'a' has the dtype 'F4')"):
        read_header(tmp_path / "a.safetensors")


@hypothesis.given(data=st.data())
def test_no_damage_raises_anything_else(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file with any bytes changed either reads as one of the right length, or is refused."""
    path = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    whole = bytearray(packed({"a": entry(), "__metadata__": {"x": "y"}}, bytes(8)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert sum(tensor.nbytes for _, tensor in header.tensors.values()) == 8


def write_index(folder: Path, places: Any) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"a": "../a.safetensors"}, "'../a.safetensors'"),
        ({"a": "/etc/passwd"}, "'/etc/passwd'"),
        ({"a": ".."}, r"'\.\.'"),
        ({"a": ""}, "''"),
        ({"a": "a\0b"}, "name of a file"),
        ({"a": "b\\c"}, "name of a file"),
        ({"a": 3}, "expected an object of strings"),
        ([], "expected an object of strings"),
        ({"a": "absent.safetensors"}, "absent.safetensors: cannot be read"),
        ({"b": "a.safetensors"}, "b in a.safetensors"),
        ({"a": "inner"}, "regular file"),
        ({"a": "pipe"}, "regular file"),
    ],
    ids=str,
)
def test_wrong_indexes_are_refused(places: Any, says: str, tmp_path: Path) -> None:
    """Nothing outside of the folder is looked at, names have to be where the index says, and no pipe is waited for."""
    (tmp_path / "a.safetensors").write_bytes(packed({"a": entry()}, bytes(8)))
    (tmp_path / "inner").mkdir()
    os.mkfifo(tmp_path / "pipe")
    write_index(tmp_path, places)
    with pytest.raises(CheckpointError, match=says):
        find_weights(tmp_path)


def test_what_is_read_of_a_folder(tmp_path: Path) -> None:
    """The single file first (maybe a link), then the index, then the only file; else an error that lists what is there.

    A numbered file without an index is what a killed export or download leaves.
    """
    with pytest.raises(CheckpointError, match="found nothing"):
        find_weights(tmp_path)
    with pytest.raises(CheckpointError, match="absent: cannot be read"):
        find_weights(tmp_path / "absent")
    for name, found in (("x-00001-of-00011", None), ("x-00001-of-00001", "x-00001-of-00001")):
        (tmp_path / f"{name}.safetensors").write_bytes(packed({name: entry()}, bytes(8)))
        if found is None:
            with pytest.raises(CheckpointError, match=f"found {name}"):
                find_weights(tmp_path)
        else:
            assert list(find_weights(tmp_path).tensors) == [found]
        (tmp_path / f"{name}.safetensors").unlink()
    for name in ("x", "y"):
        (tmp_path / f"{name}.safetensors").write_bytes(packed({name: entry()}, bytes(8)))
    with pytest.raises(CheckpointError, match=r"found x.safetensors, y.safetensors"):
        find_weights(tmp_path)
    write_index(tmp_path, {"x": "x.safetensors", "y": "y.safetensors"})
    assert list(find_weights(tmp_path).tensors) == list(find_weights(tmp_path / INDEX_NAME).tensors) == ["x", "y"]
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(packed({"z": entry()}, bytes(8)))
    os.symlink("blobs/1", tmp_path / SINGLE_NAME)  # as caches keep weights
    assert list(find_weights(tmp_path).tensors) == ["z"]


# -------------------------------------------------------------------- shards


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    """A shape, and a region in it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return shape, Region(offsets, sizes)


def indices(shape: tuple[int, ...], region: Region) -> list[int]:
    """Places of a region's elements in the whole tensor, row by row."""
    whole = torch.arange(int(np.prod(shape, dtype=np.int64))).view(shape)
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return list(whole.reshape(-1).tolist())


@hypothesis.given(
    drawn=regions(),
    block=st.integers(8, 200),
    memory=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    file=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_shards_are_written_and_read_at_their_places(
    drawn: tuple[tuple[int, ...], Region],
    block: int,
    memory: torch.dtype,
    file: torch.dtype,
    transposed: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Any region, in any dtype, through any block, of contiguous memory or not: nothing beside it is touched."""
    shape, region = drawn
    numel = int(np.prod(shape, dtype=np.int64))
    values = torch.arange(float(numel)).to(memory).view(shape)
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        values = values.narrow(dim, offset, size)
    local = values.clone(memory_format=torch.contiguous_format)
    if transposed and local.dim() > 1:
        local = local.transpose(0, -1).contiguous().transpose(0, -1)
    path, place = tmp_path_factory.mktemp("shards") / "file", FileTensor(file, shape, start=3)
    path.write_bytes(b"\xff" * (3 + place.nbytes + 2))
    mover = ShardFileIO(block)
    descriptor = os.open(path, os.O_RDWR)
    try:
        mover.write(descriptor, place, TensorShard(region, local))
        expected = torch.full((place.nbytes,), 255, dtype=torch.uint8).view(file)
        expected[indices(shape, region)] = local.reshape(-1).to(file)
        data = path.read_bytes()
        assert data[:3] == b"\xff" * 3 and data[-2:] == b"\xff" * 2
        assert data[3:-2] == bytes_of(expected)
        back = torch.full_like(local, -1)
        mover.read(descriptor, place, TensorShard(region, back))
        assert_equal(back, local.to(file).to(memory), "what was read")
    finally:
        os.close(descriptor)


def test_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    """Should it be cut off after its header was read."""
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    descriptor = os.open(path, os.O_RDONLY)
    place = FileTensor(torch.float32, (4,))
    try:
        with pytest.raises(CheckpointError, match="end of file at byte 10, 6 bytes missing"):
            ShardFileIO().read(descriptor, place, TensorShard(Region.whole((4,)), torch.empty(4)))
    finally:
        os.close(descriptor)
