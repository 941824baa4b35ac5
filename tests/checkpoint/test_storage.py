"""What is written, where, and read again: every dtype, layout and placement; and kills and full disks lose nothing."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpoint.contents import flip, index_of, read, write
from compare import assert_equal as assert_equal_named
from fullshard import CheckpointError
from fullshard.checkpoint.format import files, host, writer
from fullshard.checkpoint.format.data_file import CHECKSUMS
from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.host import HostBlocks
from fullshard.checkpoint.format.index import BLOCK, CHECKSUM, INDEX_FILE, ITEM_SIZES
from fullshard.checkpoint.format.reader import CheckpointReader
from fullshard.checkpoint.format.values import from_bytes, to_bytes
from fullshard.engine.parameters.tensor_shards import TensorShard
from fullshard.layout import Region
from ranks import Rank, on_ranks


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_equal_named(found, expected, "what was loaded")


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=dtype).view(shape)


def test_every_dtype_in_safetensors_files(tmp_path: Path) -> None:
    """Bits of every dtype, shapes with and without dims and elements, and values come back; safetensors reads them."""
    torch.manual_seed(0)
    entries: dict[str, Any] = {}
    for name in ITEM_SIZES:
        bits = torch.randint(0, 2 if name == "bool" else 256, (5, 3, ITEM_SIZES[name]), dtype=torch.uint8)
        entries[name] = bits.view(getattr(torch, name))
    entries |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "value": [1, (2.5, "x")], "none": None}
    write(tmp_path, entries, aliases={"tied": "float32"})
    targets = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else "?" for key, v in entries.items()}
    read(tmp_path, targets)
    for key, expected in entries.items():
        if isinstance(expected, torch.Tensor):
            assert torch.equal(targets[key].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), key
        else:
            assert targets[key] == expected
    assert torch.equal(
        read(tmp_path, {"tied": torch.zeros(5, 3, 1)})["tied"].view(torch.int32), entries["float32"].view(torch.int32)
    )
    (name,) = [file.name for file in tmp_path.iterdir() if file.name != INDEX_FILE]
    assert name == index_of(tmp_path)["files"][0][0]
    with safe_open(tmp_path / name, "pt") as file:
        assert set(file.keys()) == entries.keys() - {"empty"} | {CHECKSUMS}
        for key in ("bfloat16", "int64", "float64"):
            assert torch.equal(file.get_tensor(key).view(torch.uint8), entries[key].view(torch.uint8))
        assert file.get_tensor("complex128").dtype is torch.uint8  # safetensors has no such dtype


def test_layouts_of_memory(tmp_path: Path) -> None:
    """Transposed, strided, expanded, conjugated and negated tensors are saved as what they mean, and so loaded."""
    base, compl = torch.randn(6, 8), torch.randn(4, 4, dtype=torch.complex64)
    entries = {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": compl.conj(),
        "negated": compl.conj().imag,
        "parameter": nn.Parameter(base[1:3]),
    }
    write(tmp_path, entries)
    for strided in (False, True):
        targets = {key: torch.zeros_like(value) for key, value in entries.items()}
        if strided:
            targets = {key: torch.zeros(*v.shape, 2, dtype=v.dtype)[..., 0] for key, v in entries.items()}
        read(tmp_path, targets)
        for key, expected in entries.items():
            assert_equal(targets[key], expected.detach().resolve_conj().resolve_neg())


@pytest.mark.parametrize("block", [64, 256, 1 << 22])
def test_blocks_of_any_layout(block: int) -> None:
    """Blocks of a transposed tensor are its elements row by row, whatever their size."""
    for tensor in (torch.randn(7, 11).t(), torch.randn(3, 5, 7).permute(2, 0, 1), torch.randn(4)[::2]):
        found = b"".join(bytes(part) for part in HostBlocks(block).of(tensor))
        assert found == tensor.contiguous().numpy().tobytes()


def test_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous CPU memory is written from where it is, and read to where it goes: no buffer is made for it."""
    made: list[Any] = []
    usual = host.host_buffer
    reader = "fullshard.checkpoint.format.reader.host_buffer"
    monkeypatch.setattr(reader, lambda numel, *args, **how: (made.append(numel), usual(numel, *args, **how))[1])
    monkeypatch.setattr(host, "host_buffer", lambda *args, **how: made.append(args))
    write(tmp_path, {"w": numbered(6, 1 << 20)})
    assert_equal(read(tmp_path, {"w": torch.zeros(6, 1 << 20)})["w"], numbered(6, 1 << 20))
    assert made == [0]


def test_parts_of_large_shards(tmp_path: Path) -> None:
    """Rows and columns of a shard of many blocks, in any dtype: only blocks that have some of them are read."""
    weight = numbered(3000, 1500)  # 18 MB: five blocks
    write(tmp_path, {"w": weight})

    def read_part(offsets: tuple[int, int], target: torch.Tensor) -> None:
        reader = CheckpointReader.open(tmp_path)
        shard = TensorShard(Region(offsets, tuple(target.shape)), target)
        reader.fill(reader.check({"w": [shard]}))

    for rows, columns in [
        (slice(1000, 1001), slice(1500)),
        (slice(3000), slice(7, 9)),
        (slice(2999, 3000), slice(1499, 1500)),
        (slice(5, 2500), slice(3, 1400)),
    ]:
        part = weight[rows, columns]
        for dtype in (torch.float32, torch.bfloat16):
            target = torch.zeros_like(part, dtype=dtype)
            read_part((rows.start or 0, columns.start or 0), target)
            assert_equal(target, part.to(dtype))
    flip(tmp_path / index_of(tmp_path)["files"][0][0], -1 - 5 * CHECKSUM)  # in the last block, before the checksums
    target = torch.zeros(10, 1500)
    read_part((0, 0), target)
    assert_equal(target, weight[:10])
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        read_part((2990, 0), target)


@on_ranks(2)
def test_any_placement_is_loaded_into_any_other(rank: Rank, tmp_path: Path) -> None:
    """Row shards, column shards, replicas and plain tensors, uneven and with empty shards, each loaded as each."""
    placements = [(Shard(0),), (Shard(1),), (Replicate(),), None]
    wholes = {"w": numbered(7, 5), "small": numbered(1, 3), "long": numbered(BLOCK // 16 + 100, 8)}

    def placed(tensor: torch.Tensor, how: Any) -> torch.Tensor:
        return tensor.clone() if how is None else distribute_tensor(tensor, rank.mesh, how, src_data_rank=None)

    for number, how in enumerate(placements):
        path = tmp_path / str(number)
        write(path, {"w": placed(wholes["w"], how)})
        write(path, {key: placed(whole, how) for key, whole in wholes.items()}, about={"step": 1})  # replaces the first
        for other in placements:
            targets = {key: placed(torch.zeros_like(whole), other) for key, whole in wholes.items()}
            read(path, targets)
            for key, target in targets.items():
                full = target.full_tensor() if isinstance(target, DTensor) else target
                assert_equal(full, wholes[key])
    dist.barrier()
    for number in range(len(placements)):  # what ranks hold in common is written once, and only the last save is there
        index = index_of(tmp_path / str(number))
        assert index["about"] == {"step": 1}
        there = {file.name: file.stat().st_size for file in (tmp_path / str(number)).iterdir()}
        assert there.keys() == {INDEX_FILE, *(name for name, *_ in index["files"])}
        total = sum(whole.nbytes for whole in wholes.values())
        assert total < sum(size for name, size in there.items() if name != INDEX_FILE) < total + 10_000
    dist.barrier()


def test_values() -> None:
    """States of all usual random generators survive; the error for what needs a pickle to run names the key."""
    values = [random.getstate(), np.random.get_state(), np.random.default_rng(3).bit_generator.state]
    values += [torch.get_rng_state(), np.float64(2), {1: (None, b"x", {3})}, float("nan")]
    for value in values:
        assert repr(from_bytes("k", to_bytes("k", value))) == repr(value)
    for bad, found in [(lambda: 0, "function"), (object(), "object"), ({"a": nn.Linear(2, 2)}, "dict")]:
        with pytest.raises(TypeError, match=rf"extra\.k: a value of type {found} cannot be saved"):
            to_bytes("extra.k", bad)


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    """Sparse, quantized and meta tensors, and aliases of nothing, are refused; nothing is left of the save."""
    quantized = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    for bad in (torch.zeros(3, 3).to_sparse(), torch.zeros(2, device="meta"), quantized):
        with pytest.raises((CheckpointError, NotImplementedError), match=r"no values|cannot be stored|sparse"):
            write(tmp_path, {"odd": bad})
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="alias of 'x'"):
        write(tmp_path, {"a": numbered(4)}, aliases={"b": "x"})


def test_urls(tmp_path: Path) -> None:
    """Through fsspec: made, loaded, replaced, and left-overs removed, as on a local path."""
    pytest.importorskip("fsspec")
    path = "memory://fullshard-test/some/folder"
    for step in range(2):
        weight = numbered(3, 1 << 20) + step  # three blocks
        write(path, {"w": weight, "n": step})
        for kept in (1 << 30, 5 << 20, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fullshard.checkpoint.format.reader._KEPT", kept)
                found = read(path, {"w": torch.zeros(weight.shape), "n": None})
            assert_equal(found["w"], weight)
            assert found["n"] == step
    names = files.Folder(path).names()
    assert len(names) == 2 and INDEX_FILE in names


def test_urls_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol that fsspec does not know, and no fsspec, are errors that name the URL and what to install."""
    pytest.importorskip("fsspec")
    with pytest.raises(CheckpointError, match="nosuch://x/y"):
        files.Folder("nosuch://x/y")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint._fsspec_filesystem", raising=False)
    with pytest.raises(CheckpointError, match=r"memory://x .*pip install fsspec"):
        files.Folder("memory://x")


def test_left_overs_are_removed(tmp_path: Path) -> None:
    """The next save removes what a killed one left; files of other names stay, even if they look alike."""
    left = ["data-00aa11bb22cc-0.safetensors", "data-00aa11bb22cc-13.safetensors", f"{INDEX_FILE}.00aa11bb22cc.tmp"]
    others = ["data-x-0.safetensors", "model.safetensors", "data-00aa11bb22cc-0.safetensors.txt", ".metadata"]
    for name in left + others:
        (tmp_path / name).write_text("x")
    write(tmp_path, {"a": numbered(2)})
    there = {file.name for file in tmp_path.iterdir()}
    assert there >= set(others) and not there & set(left)
    assert_equal(read(tmp_path, {"a": torch.zeros(2)})["a"], numbered(2))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that cannot be written names the file and the reason, and removes what it wrote."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    write(tmp_path, {"a": numbered(2)})
    name = "data-0123456789ab-0.safetensors"
    monkeypatch.setattr(writer, "data_file", lambda save, rank: name)
    monkeypatch.setattr(writer, "_ORPHAN_S", float("inf"))  # the device may be old
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be written: No space left"):
        write(tmp_path, {"a": numbered(1 << 20)})
    assert len(list(tmp_path.iterdir())) == 2
    assert_equal(read(tmp_path, {"a": torch.zeros(2)})["a"], numbered(2))


def raising(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@on_ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_nothing(rank: Rank, tmp_path: Path) -> None:
    """Whichever step fails on whichever rank: all ranks remove what they wrote, and the checkpoint stays."""
    contents = {"a": distribute_tensor(numbered(4), rank.mesh, [Shard(0)])}
    write(tmp_path, contents)
    dist.barrier()
    before = {file.name for file in tmp_path.iterdir()}
    steps: list[tuple[Any, str, int]] = [(writer, "write_entries", 0), (writer, "write_entries", 1)]
    steps += [(writer, "to_json", 0), (Folder, "sync", 1), (Folder, "replace", 0)]
    for where, what, failing in steps:
        with pytest.MonkeyPatch.context() as patch:
            if rank.rank == failing:
                patch.setattr(where, what, raising)
            with pytest.raises(CheckpointError, match="No space left"):
                write(tmp_path, contents)
        dist.barrier()
        there = {file.name for file in tmp_path.iterdir()}
        if what == "replace":  # which may have happened: the next save removes what this one has written
            assert len(there - before) == 2
        else:
            assert there == before, what
        dist.barrier()
    write(tmp_path, contents)
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == len(before)


def test_a_save_that_fails_after_it_was_committed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the new index names is not removed, although the save raises."""
    write(tmp_path, {"a": numbered(2)})
    sync, index = Folder.sync, (tmp_path / INDEX_FILE).read_bytes()
    monkeypatch.setattr(
        Folder, "sync", lambda f: sync(f) if (tmp_path / INDEX_FILE).read_bytes() == index else raising()
    )
    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path, {"a": numbered(3)})
    assert_equal(read(tmp_path, {"a": torch.zeros(3)})["a"], numbered(3))


def test_a_save_begins_by_removing_what_was_killed_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails itself; what is young may be of a save that runs, and what the index names is the checkpoint."""
    write(tmp_path, {"a": numbered(2)})
    kept = {file.name for file in tmp_path.iterdir()} | {"other.safetensors", "data-11aa11bb22cc-0.safetensors"}
    old = {"data-00aa11bb22cc-0.safetensors", f"{INDEX_FILE}.00aa11bb22cc.tmp"}
    for name in kept | old:
        (tmp_path / name).touch()
        if not name.startswith("data-11"):
            os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(writer, "write_entries", raising)
    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path, {"a": numbered(2)})
    assert {file.name for file in tmp_path.iterdir()} == kept


KILLED = '''
import os, sys
import torch
from checkpoint.contents import read, write
from fullshard.checkpoint.format import files
torch.set_num_threads(1)
path, usual, left = sys.argv[1], files.FileSystem, -1

def entries(step):
    return {"a": torch.full((5, 1000), float(step)), "b": torch.full((5,), float(step)), "n": step}

def counted(function):
    def call(*args, **kwargs):
        tick()
        result = function(*args, **kwargs)
        tick()
        return result
    return call

def tick():
    """Count an operation; the one that is chosen is the last that the process lives to see."""
    global left
    if left == 0:
        os._exit(77)
    left -= 1

class Stream:
    """A file of which a write may stop halfway."""
    def __init__(self, context):
        self.context = context
    def __enter__(self):
        self.stream = counted(self.context.__enter__)()
        return self
    def __exit__(self, *error):
        return counted(self.context.__exit__)(*error)
    def write(self, data):
        if left == 1:
            self.stream.write(memoryview(data)[: len(data) // 2])
            self.stream.flush()
        return counted(self.stream.write)(data)
    def __getattr__(self, name):
        return getattr(self.stream, name)

class Files(usual):
    create_stream = lambda self, path, mode: Stream(usual.create_stream(self, path, mode))
    rename, rm_file, mkdir = (counted(getattr(usual, name)) for name in ("rename", "rm_file", "mkdir"))

os.fsync = lambda descriptor: None  # the process dies, not the machine
write(path, entries(1))
steps = old = 0
while True:
    child = os.fork()
    if child == 0:
        files.FileSystem, os.fsync, left = Files, counted(os.fsync), steps
        write(path, entries(2))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 77), status
    found = read(path, {"a": torch.zeros(5, 1000), "b": torch.zeros(5), "n": None})
    step = found["n"]
    assert step in (1, 2)
    assert all(torch.equal(found[key], value) for key, value in entries(step).items() if key != "n"), steps
    if status == 0:
        assert step == 2
        break
    old += step == 1
    steps += 1
    write(path, entries(1))
    assert len(os.listdir(path)) == 2, os.listdir(path)
print(steps, old)
'''


def test_killed_at_every_step(tmp_path: Path) -> None:
    """A process that ends before, after or in the middle of any file operation leaves the old checkpoint or the new."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, old = map(int, done.stdout.split())
    assert killed > 30 and 0 < old < killed


def test_everything_reaches_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, then names of data files, then the index, are synced before the step that relies on them."""
    done: list[str] = []
    sync, rename, remove = os.fsync, files.FileSystem.rename, files.FileSystem.rm_file
    folder = os.stat(tmp_path).st_ino

    def log_sync(descriptor: int) -> None:
        sync(descriptor)
        done.append("folder" if os.fstat(descriptor).st_ino == folder else "file")

    write(tmp_path, {"a": numbered(2)})
    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(files.FileSystem, "rename", lambda *args: (done.append("rename"), rename(*args))[1])
    monkeypatch.setattr(files.FileSystem, "rm_file", lambda *args: (done.append("remove"), remove(*args))[1])
    write(tmp_path, {"a": numbered(2)})
    assert done == ["file", "folder", "file", "rename", "folder", "remove"]
