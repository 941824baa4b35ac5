"""Damaged, made-up and hostile checkpoints: a clear error on all ranks, targets unchanged, and nothing is run."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from checkpoint.contents import fill, flip, place_of, read, torch_saved, write
from compare import assert_equal
from fullshard import CheckpointError
from fullshard.checkpoint.format.data_file import CHECKSUMS
from fullshard.checkpoint.format.index import BLOCK, INDEX_FILE, FileEntry
from fullshard.checkpoint.format.index_json import checksum, from_json, to_json
from fullshard.checkpoint.format.reader import CheckpointReader
from fullshard.checkpoint.format.torch_format import METADATA_FILE, decode_shard
from fullshard.engine.parameters.tensor_shards import TensorShards

DAMAGED = 200  # by hand: 10,000


class Bomb:
    """Something whose pickle makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def entries(width: int = BLOCK // 32) -> dict[str, Any]:
    return {"model.w": torch.randn(9, width), "model.b": torch.randn(5), "extra.n": 3}


def save(path: Path) -> None:
    write(path, entries())


def targets(width: int = BLOCK // 32) -> dict[str, Any]:
    return {"model.w": torch.full((9, width), 7.0), "model.b": torch.full((5,), 7.0), "extra.n": None}


def refused(path: Path) -> str:
    """The message with which a checkpoint is refused; checks that it is a CheckpointError and nothing was changed."""
    found = targets()
    with pytest.raises(CheckpointError) as caught:
        read(path, found)
    assert_equal(found, targets(), "targets")
    return str(caught.value)


def data_of(path: Path) -> Path:
    (found,) = path.glob("data-*")
    return found


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off by a byte": (lambda p: os.truncate(data_of(p), data_of(p).stat().st_size - 1), "expected"),
    "cut off to nothing": (lambda p: os.truncate(data_of(p), 0), "has 0 bytes"),
    "longer": (lambda p: data_of(p).write_bytes(data_of(p).read_bytes() + b"x"), "expected"),
    "missing": (lambda p: data_of(p).unlink(), "no such file"),
    "a folder": (lambda p: data_of(p).rename(p / "x") and (p / _name(p)).mkdir(), "expected|directory"),
    "first block": (lambda p: flip(data_of(p), 5000), "model.w: checksum mismatch in bytes"),
    "later block": (lambda p: flip(data_of(p), BLOCK + 10_000), "model.w: checksum mismatch in bytes"),
    "small tensor": (lambda p: flip(data_of(p), place_of(p, "model.b")), "model.b: checksum mismatch"),
    "value": (lambda p: flip(data_of(p), place_of(p, "extra.n")), "extra.n: checksum mismatch"),
    "checksums": (lambda p: flip(data_of(p), data_of(p).stat().st_size - 1), "checksum mismatch in the checksums"),
    "header": (lambda p: flip(data_of(p), 20), "checksum mismatch in the header"),
    "header's length": (lambda p: flip(data_of(p), 0), "checksum mismatch in the header"),
    "index": (lambda p: flip(p / INDEX_FILE, 300), INDEX_FILE),
    "index missing": (lambda p: (p / INDEX_FILE).unlink(), "has no checkpoint: found data-"),
    "all missing": (shutil.rmtree, "has no checkpoint: it is empty or missing"),
}


def _name(path: Path) -> str:
    """Of the data file, by the index."""
    return next(iter(from_json((path / INDEX_FILE).read_bytes(), "").files))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage(tmp_path: Path, name: str) -> None:
    """Anything that is not as it was written is found before any target changes; the error says file and key."""
    save(tmp_path / "c")
    damage, message = DAMAGES[name]
    damage(tmp_path / "c")
    found = refused(tmp_path / "c")
    assert str(tmp_path / "c") in found
    assert re.search(message, found), found


def test_random_damage(tmp_path: Path) -> None:
    """Bytes that are flipped, overwritten, cut, moved or added anywhere: an error, or the values that were saved."""
    chance = random.Random(0)
    torch.manual_seed(0)
    write(tmp_path / "0", entries(40))
    save_torch(tmp_path / "1", 40)
    wanted = [read(tmp_path / name, targets(40)) for name in ("0", "1")]
    for number in range(DAMAGED):
        path = tmp_path / "damaged"
        shutil.copytree(tmp_path / str(number % 2), path)
        for _ in range(chance.choice((1, 1, 3))):
            file = chance.choice(sorted(each for each in path.rglob("*") if each.is_file()))
            data = bytearray(file.read_bytes())
            at, size = chance.randrange(max(len(data), 1)), chance.choice((1, 2, 8, 100, 5000))
            new = (chance.randbytes(size), b"", data[:size] + data[at : at + size], bytes(size), b"[" * 3000, b"9" * 20)
            data[at : at + size] = chance.choice(new)
            file.write_bytes(data)
        found = targets(40)
        try:
            reader = CheckpointReader.open(path)
            if entries().keys() <= {*reader.index.tensors, *reader.index.values}:  # else load says what is missing
                fill(reader, found)
                assert_equal(found, wanted[number % 2], f"damage {number}")
        except CheckpointError:
            assert_equal(found, targets(40), f"refused damage {number}")
        shutil.rmtree(path)


def test_a_file_that_changes_after_it_was_checked(tmp_path: Path) -> None:
    """Between the two reads of a local file, a change is noticed, although not every byte is compared twice."""
    save(tmp_path)
    reader = CheckpointReader.open(tmp_path)
    reads = reader.check({key: TensorShards.of(v).shards for key, v in targets().items() if v is not None})
    flip(data_of(tmp_path), BLOCK + 10_000)
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        reader.fill(reads)


def test_a_hostile_value(tmp_path: Path) -> None:
    """A value whose pickle would run code is refused although all its checksums are right, and not run."""
    mark = tmp_path / "mark"
    write(tmp_path / "c", {**entries(), "extra.n": torch_saved(Bomb(mark))})
    assert "extra.n: the checkpoint's value cannot be read" in refused(tmp_path / "c")
    assert not mark.exists()


def made_up(path: Path, change: Callable[[dict[str, Any]], object], *, table: Callable[[bytes], bytes] = bytes) -> None:
    """Change the header of the data file, as JSON, and its checksums, and the index so that it fits."""
    index = from_json((path / INDEX_FILE).read_bytes(), "")
    ((name, file),) = index.files.items()
    data = (path / name).read_bytes()
    header = json.loads(data[8 : file.header])
    start, end = header[CHECKSUMS]["data_offsets"]
    content, checksums = data[file.header :][:start], table(data[file.header :][start:end])
    change(header)
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text
    (path / name).write_bytes(whole + content + checksums)
    described = FileEntry(len(whole + content + checksums), len(whole), checksum(whole) + checksum(checksums))
    (path / INDEX_FILE).write_bytes(to_json(replace(index, files={name: described})))


def entry(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].update(fields)


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no tensor": (lambda h: h.update({"x": h.pop("model.b")}), "does not begin where|not in this file"),
    "another's name": (
        lambda h: h.update({"model.w": h["model.b"], "model.b": h["model.w"]}),
        "does not begin where|expected shard",
    ),
    "other shape": (entry("model.b", shape=[1, 5]), r"model.b: expected shard \[0:5\] of float32; found F32 of shape"),
    "other dtype": (entry("model.b", dtype="I32"), r"model.b: expected shard \[0:5\] of float32; found I32"),
    "negative offsets": (entry("model.b", data_offsets=[-4, 16]), "does not begin where the previous one ends"),
    "beyond the file": (entry(CHECKSUMS, data_offsets=[0, 1 << 40]), "does not begin where the previous one ends"),
    "endless": (entry("model.b", data_offsets=[0, float("inf")]), "invalid header"),
    "text for offsets": (entry("model.b", data_offsets="none"), "invalid header"),
    "offsets missing": (lambda h: h["model.b"].pop("data_offsets"), "invalid header"),
    "an entry that is null": (lambda h: h.update({"model.b": None}), "invalid header"),
    "no checksums": (lambda h: h.update({"x": h.pop(CHECKSUMS)}), f"the header does not end with {CHECKSUMS}"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_made_up_headers(tmp_path: Path, name: str) -> None:
    """A header with a good checksum that does not describe what the index says is refused with file and entry."""
    save(tmp_path)
    change, message = HEADERS[name]
    made_up(tmp_path, change)
    found = refused(tmp_path)
    assert re.search(message, found) and str(data_of(tmp_path)) in found, found


@pytest.mark.parametrize(
    ("table", "message"),
    [(bytes.swapcase, "checksum mismatch in bytes"), (lambda b: b[:-8], "entries end|bytes of checksums")],
    ids=["wrong", "too few"],
)
def test_made_up_checksums(tmp_path: Path, table: Callable[[bytes], bytes], message: str) -> None:
    """Checksums of data that are wrong or too few are found, whatever the checksum of the checksums says."""
    save(tmp_path)
    made_up(tmp_path, lambda header: None, table=table)
    assert re.search(message, refused(tmp_path))


def test_foreign_texts_are_shown_in_short(tmp_path: Path) -> None:
    """Names of a million characters in an index, in a header or in `.metadata` make short errors."""
    long = "k" * 10**6
    write(tmp_path, {long: torch.ones(3), "extra.n": 1})
    for damage in (
        lambda: flip(data_of(tmp_path), place_of(tmp_path, long)),
        lambda: os.truncate(data_of(tmp_path), 9),
    ):
        damage()
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path, {long: torch.ones(3)})
        assert len(str(caught.value)) < 1000 + len(str(tmp_path))
    index = from_json((tmp_path / INDEX_FILE).read_bytes(), "")
    for field, wrong in (("aliases", {long: long}), ("values", {long: long}), ("files", {long: FileEntry(1)})):
        with pytest.raises(CheckpointError) as caught:
            replace(index, **{field: wrong})
        assert len(str(caught.value)) < 1000


# -------------------------------------------------------------------- torch's own format


def save_torch(path: Path, width: int = BLOCK // 32) -> Metadata:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(entries(width), checkpoint_id=path, no_dist=True)
    return read_torch(path)


def read_torch(path: Path) -> Metadata:
    found: Metadata = pickle.loads((path / METADATA_FILE).read_bytes())
    return found


def write_torch(path: Path, metadata: Any) -> None:
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def place(metadata: Metadata, key: str) -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == key)


def append(file: Path, info: _StorageInfo, data: bytes) -> None:
    """Put data at the end of a file, where the metadata finds it."""
    info.offset, info.length = file.stat().st_size, len(data)
    file.write_bytes(file.read_bytes() + data)


def test_metadata_that_runs_code(tmp_path: Path) -> None:
    """A callable in `.metadata` is refused by name, wherever it stands, and not called."""
    mark = tmp_path / "mark"
    places: list[Callable[[Metadata], object]] = [
        lambda m: setattr(m, "planner_data", Bomb(mark)),
        lambda m: m.state_dict_metadata.update(x=Bomb(mark)),
        lambda m: setattr(m.storage_meta, "checkpoint_id", Bomb(mark)),
    ]
    for number, hide in enumerate(places):
        path = tmp_path / str(number)
        metadata = save_torch(path)
        hide(metadata)
        write_torch(path, metadata)
        assert "refers to posix.mkdir" in refused(path)
    for module, attribute in [
        ("builtins", "eval"),
        ("os", "system"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "pickle"),
        ("fullshard.checkpoint.format.torch_format", "Folder"),
    ]:
        (path / METADATA_FILE).write_bytes(
            b"\x80\x04" + _text(module) + _text(attribute) + b"\x93" + _text("1") + b"\x85R."
        )
        assert f"refers to {module}.{attribute}" in refused(path)
    assert not mark.exists()


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def test_pickles_that_are_none(tmp_path: Path) -> None:
    """Empty, cut-off and random files, 100,000 open lists, an integer of 100,000 digits: short errors with the file."""
    save_torch(tmp_path)
    whole = (tmp_path / METADATA_FILE).read_bytes()
    number = b"\x8b" + (50_000).to_bytes(4, "little") + b"\x7f" * 50_000
    bodies = (b"N.", b"]\x94.", _text("x") + b"Q.", b"]" * 10**5 + b"a" * (10**5 - 1) + b".", number + b".")
    for data in (b"", b"garbage", whole[: len(whole) // 2], *(b"\x80\x04" + body for body in bodies)):
        (tmp_path / METADATA_FILE).write_bytes(data)
        message = refused(tmp_path)
        assert METADATA_FILE in message and len(message) < 500


def test_a_known_name_changes_no_other_file(tmp_path: Path) -> None:
    """Attributes that a pickle sets on what it names, by any opcode, are gone for the next file."""
    save_torch(tmp_path)
    good = (tmp_path / METADATA_FILE).read_bytes()
    for module, name in [
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch", "Size"),
        ("torch", "float32"),
    ]:
        for state in (b"}" + _text("state") + _text("x") + b"s", b"N}" + _text("__setstate__") + b"Ns\x86"):
            attack = b"\x80\x04" + _text(module) + _text(name) + b"\x93" + state + b"b."
            (tmp_path / METADATA_FILE).write_bytes(attack)
            refused(tmp_path)
    (tmp_path / METADATA_FILE).write_bytes(good)
    assert read(tmp_path, targets())["extra.n"] == 3 and callable(Metadata.__init__)


def lie(key: str, **fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: [setattr(place(metadata, key)[1], name, value) for name, value in fields.items()] and None


def no_place(metadata: Metadata) -> None:
    del metadata.storage_data[place(metadata, "model.b")[0]]


def set_size(size: Any) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["model.b"], "size", size)


def set_chunk(**fields: Any) -> Callable[[Metadata], None]:
    chunk = lambda metadata: metadata.state_dict_metadata["model.b"].chunks[0]  # noqa: E731
    return lambda metadata: [setattr(chunk(metadata), name, value) for name, value in fields.items()] and None


LIES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    **{
        f"file {name!r}": (lie("model.b", relative_path=name), "model.b: found file")
        for name in ("../x", "/etc/passwd", "..\\x", "..", "", "c:x", 3)
    },
    "negative": (lie("model.b", offset=-1), "model.b: found bytes -1"),
    "beyond": (lie("model.b", length=1 << 40), "model.b: found bytes"),
    "text": (lie("model.b", length="5"), "model.b: .*TypeError"),
    "extension": (lie("model.b", transform_descriptors=["stream.zstd"]), "only torch's own reader supports"),
    "nowhere": (no_place, "model.b: .*KeyError"),
    "size": (set_size(torch.Size([6])), "model.b: found shards that lack 1 of the 6"),
    "negative size": (set_size((-5,)), "model.b: shape"),
    "size that is none": (set_size("5"), "model.b: .*TypeError"),
    "chunk": (set_chunk(sizes=torch.Size([4])), "model.b: found shards that lack 1 of the 5"),
    "chunk outside": (set_chunk(sizes=torch.Size([50])), "model.b: found shard"),
    "chunk of negative": (set_chunk(sizes=(-5,)), "model.b: expected as many offsets as sizes, none below 0"),
    "no chunks": (lambda m: setattr(m.state_dict_metadata["model.b"], "chunks", None), "model.b: .*TypeError"),
    "other object": (lambda m: m.state_dict_metadata.update({"model.b": 3}), "model.b: .*AttributeError"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "cannot be read .AttributeError"),
    "dtype": (lambda m: setattr(m.state_dict_metadata["model.b"].properties, "dtype", 3), "model.b: dtype 3"),
    "other dtype": (
        lambda m: setattr(m.state_dict_metadata["model.b"].properties, "dtype", torch.int32),
        r"model.b: .*expected a tensor of \(5,\) int32; found \(5,\) float32",
    ),
    "another's bytes": (
        lambda m: lie("model.b", offset=place(m, "extra.n")[1].offset, length=place(m, "extra.n")[1].length)(m),
        r"model.b: .*expected a tensor of \(5,\) float32; found 3",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies(tmp_path: Path, name: str) -> None:
    """Paths out of the folder, and sizes, places and types that do not fit, are refused with file and key."""
    change, message = LIES[name]
    metadata = save_torch(tmp_path)
    change(metadata)
    write_torch(tmp_path, metadata)
    found = refused(tmp_path)
    assert re.search(message, found), found
    assert str(tmp_path) in found


def test_tensors_that_run_code(tmp_path: Path) -> None:
    """A payload that is a pickle with a call in it, for a tensor and for a value: refused, not called."""
    for key in ("model.b", "extra.n"):
        path = tmp_path / key
        metadata = save_torch(path)
        mark = tmp_path / f"mark {key}"
        _, info = place(metadata, key)
        append(path / info.relative_path, info, torch_saved(Bomb(mark)))
        write_torch(path, metadata)
        assert key in refused(path)
        assert not mark.exists()


def test_torchs_files_damaged(tmp_path: Path) -> None:
    """torch's files have checksums in their payloads, which torch itself does not look at."""
    for position in ("start", "middle", "end"):
        path = tmp_path / position
        _, info = place(save_torch(path), "model.b")
        file = path / info.relative_path
        if position == "end":
            os.truncate(file, info.offset + info.length // 2)
        else:
            elements = file.read_bytes().index(read(path, targets())["model.b"].numpy().tobytes())
            flip(file, info.offset if position == "start" else elements + 3)
        message = refused(path)
        assert str(path) in message and "model.b" in message


def test_torchs_files_without_checksums(tmp_path: Path) -> None:
    """Where they are switched off when saving, nothing is compared, and the checkpoint can be loaded."""
    torch.serialization.set_crc32_options(False)
    try:
        save_torch(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    found = read(tmp_path, targets())
    assert found["extra.n"] == 3 and not bool((found["model.w"] == 7.0).any())


def test_torchs_files_that_grow(tmp_path: Path) -> None:
    """Compressed records, which torch does not write and which a few bytes make gigabytes of, are refused."""
    metadata = save_torch(tmp_path)
    _, info = place(metadata, "model.b")
    file, stream = tmp_path / info.relative_path, io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file.read_bytes()[info.offset : info.offset + info.length])) as archive:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in archive.namelist():
                packed.writestr(name, archive.read(name))
    append(file, info, stream.getvalue())
    write_torch(tmp_path, metadata)
    assert "compressed records" in refused(tmp_path)


def test_a_pickle_that_grows(tmp_path: Path) -> None:
    """A few bytes that stand for an endless text when printed are refused in short words."""
    metadata = save_torch(tmp_path)
    nested: Any = ("lol",) * 10
    for _ in range(30):
        nested = (nested,) * 10
    metadata.version = nested
    metadata.state_dict_metadata["model.b"].size = nested
    write_torch(tmp_path, metadata)
    assert len(refused(tmp_path)) < 500
    metadata = save_torch(tmp_path)
    metadata.state_dict_metadata["model.b"].properties.dtype = nested
    write_torch(tmp_path, metadata)
    assert "dtype tuple" in refused(tmp_path)


def test_hostile_pickles() -> None:
    """Attacks on the unpickler, and random pickles, are refused or are plain data of no more bytes than their file.

    In a process of its own, with limited memory, so that a crash fails the test. By hand: 10,000 random ones.
    """
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "checkpoint.hostile_pickles", "100"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_bit_of_torchs_files(tmp_path: Path) -> None:
    """A file of torch.save with any bit flipped is refused, or is what it was, also where a record becomes a folder."""
    wanted = torch.arange(3.0)
    whole = torch_saved(wanted)
    for position in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            with contextlib.suppress(CheckpointError):
                assert torch.equal(decode_shard("k", bytes(data), (3,), "float32"), wanted), (position, bit)


def test_indexes_that_are_no_files(tmp_path: Path) -> None:
    """Pipes, devices and folders in place of any file are refused before they are opened; links to files are read."""
    save(tmp_path / "c")
    save_torch(tmp_path / "t")
    for folder, name in (("c", INDEX_FILE), ("c", _name(tmp_path / "c")), ("t", METADATA_FILE)):
        file = tmp_path / folder / name
        kept = file.rename(tmp_path / name)
        os.mkfifo(tmp_path / f"{name}.pipe")
        for target in (tmp_path / f"{name}.pipe", "/dev/zero", tmp_path):
            file.symlink_to(target)
            assert f"{file} " in refused(tmp_path / folder)
            file.unlink()
        file.symlink_to(kept)
        assert read(tmp_path / folder, targets())["extra.n"] == 3


def test_indexes_that_grow(tmp_path: Path) -> None:
    """A few bytes that would take gigabytes, and files that are too large for an index, take no memory."""
    save(tmp_path)
    index = json.loads((tmp_path / INDEX_FILE).read_bytes())
    rows = zlib.compress(bytes(8 * 3 * (1 << 21)))
    index["shards"] = base64.b64encode(b"\3" + rows).decode()
    lines = json.dumps(index, separators=(",", ":"))[1:].partition('"checksum":')[2].partition(",")[2]
    first = f'{{"format": "fullshard checkpoint", "version": 2, "checksum": "{"0" * 16}",\n'
    data = (first + lines).encode()
    (tmp_path / INDEX_FILE).write_bytes(data.replace(b"0" * 16, checksum(data).hex().encode(), 1))
    tracemalloc.start()
    try:
        assert "larger than 12582912 bytes" in refused(tmp_path)
        os.truncate(tmp_path / INDEX_FILE, 1 << 40)
        assert "expected an index of at most" in refused(tmp_path)
        (tmp_path / INDEX_FILE).unlink()
        (tmp_path / METADATA_FILE).write_bytes(b"\x80\x04Nr\xff\xff\xff\x1f.")
        assert METADATA_FILE in refused(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()
