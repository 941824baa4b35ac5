"""Storage writer and reader under torch.distributed.checkpoint: what is written, where; and kills lose nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpoint.kinds import shared_folder
from compare import assert_equal as assert_equal_named
from fullshard import CheckpointError
from fullshard.checkpoint.format import files, host
from fullshard.checkpoint.format.data_file import CHECKSUMS
from fullshard.checkpoint.format.host import HostBlocks
from fullshard.checkpoint.format.index import BLOCK, CHECKSUM, ITEM_SIZES
from fullshard.checkpoint.format.storage import INDEX_FILE, CheckpointReader, CheckpointWriter
from fullshard.checkpoint.format.values import from_bytes, to_bytes
from ranks import Rank, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_equal_named(found, expected, "what was loaded")


def save(path: str | Path, entries: dict[str, Any], **options: Any) -> None:
    dcp.save(entries, storage_writer=CheckpointWriter(path, **options), no_dist=not dist.is_initialized())


def load(path: str | Path, entries: dict[str, Any], **options: Any) -> dict[str, Any]:
    """``entries`` with what the checkpoint has: tensors in place, values replaced."""
    dcp.load(entries, storage_reader=CheckpointReader(path, **options), no_dist=not dist.is_initialized())
    return entries


def index_of(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((path / INDEX_FILE).read_bytes())
    return parsed


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=dtype).view(shape)


OPTIONS = [{}, {"keep_bytes": 1 << 30}, {"keep_bytes": 100}, {"verify": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_round_trip_of_every_dtype(tmp_path: Path, options: dict[str, Any]) -> None:
    """Bits of every dtype, shapes with and without dims and elements, and values come back."""
    torch.manual_seed(0)
    entries: dict[str, Any] = {}
    for name in ITEM_SIZES:
        dtype = getattr(torch, name)
        shape = (5, 3, ITEM_SIZES[name])
        bits = torch.randint(0, 2 if name == "bool" else 256, shape, dtype=torch.uint8)
        entries[name] = bits.view(dtype)
    entries |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "value": [1, (2.5, "x")], "none": None}
    save(tmp_path, entries)
    targets = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else "?" for key, v in entries.items()}
    load(tmp_path, targets, **options)
    for key, expected in entries.items():
        if isinstance(expected, torch.Tensor):
            assert torch.equal(targets[key].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), key
        else:
            assert targets[key] == expected


def test_data_files_are_safetensors_files(tmp_path: Path) -> None:
    """Anybody can read a data file with safetensors: whole tensors under their names, shards with their place."""
    entries = {"a": numbered(4, 3), "b": numbered(3, dtype=torch.bfloat16), "c": torch.tensor([1 + 2j] * 2).cdouble()}
    save(tmp_path, entries)
    (name,) = [file.name for file in tmp_path.iterdir() if file.name != INDEX_FILE]
    with safe_open(tmp_path / name, "pt") as file:
        assert set(file.keys()) == {"a", "b", "c", CHECKSUMS}
        assert_equal(file.get_tensor("a"), entries["a"])
        assert_equal(file.get_tensor("b"), entries["b"])
        assert_equal(file.get_tensor("c").view(torch.complex128), entries["c"])  # safetensors has no such dtype
    assert name == index_of(tmp_path)["files"][0][0]


def test_layouts_of_memory(tmp_path: Path) -> None:
    """Transposed, strided, expanded, conjugated and negated tensors are saved as what they mean, and so loaded."""
    base = torch.randn(6, 8)
    compl = torch.randn(4, 4, dtype=torch.complex64)
    entries = {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": compl.conj(),
        "negated": compl.conj().imag,
        "parameter": nn.Parameter(base[1:3]),
    }
    save(tmp_path, entries)
    for strided in (False, True):
        targets = {key: torch.zeros_like(value) for key, value in entries.items()}
        if strided:
            targets = {key: torch.zeros(*v.shape, 2, dtype=v.dtype)[..., 0] for key, v in entries.items()}
        load(tmp_path, targets)
        for key, expected in entries.items():
            assert_equal(targets[key], expected.detach().resolve_conj().resolve_neg())


@pytest.mark.parametrize("block", [64, 256, 1 << 22])
def test_blocks_of_any_layout(block: int) -> None:
    """Blocks of a transposed tensor are its elements row by row, whatever their size."""
    for tensor in (torch.randn(7, 11).t(), torch.randn(3, 5, 7).permute(2, 0, 1), torch.randn(4)[::2]):
        found = b"".join(bytes(part) for part in HostBlocks(block).of(tensor))
        assert found == tensor.contiguous().numpy().tobytes()


def test_saving_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous CPU memory is written from where it is: no buffer is made for it."""
    made = []
    monkeypatch.setattr(host, "host_buffer", lambda *args, **kwargs: made.append(args))
    tracemalloc.start()
    save(tmp_path, {"w": torch.zeros(6, 1 << 20)}, sync=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made == []
    assert peak < 4 << 20  # planning; the tensor has 24 MiB


def test_casting_on_load(tmp_path: Path) -> None:
    """A target of another dtype gets converted elements, over many blocks."""
    weight = torch.randn(3, BLOCK // 4)
    save(tmp_path, {"w": weight}, sync=False)
    target = {"w": torch.zeros(weight.shape, dtype=torch.bfloat16)}
    load(tmp_path, target)
    assert_equal(target["w"], weight.bfloat16())


def test_parts_of_large_pieces(tmp_path: Path) -> None:
    """Rows and columns of a shard of many blocks: only blocks that have some of them are read."""
    weight = numbered(3000, 1500)  # 18 MB: five blocks
    save(tmp_path, {"w": weight}, sync=False)
    for region in (np.s_[1000:1001, :], np.s_[:, 7:9], np.s_[2999:, 1499:], np.s_[5:2500, 3:1400]):
        part = weight[region]
        offsets = [s.indices(n)[0] for s, n in zip(region, weight.shape, strict=True)]
        target = torch.zeros_like(part)
        for options in OPTIONS:
            reader = CheckpointReader(tmp_path, **options)
            target.zero_()
            read_part(reader, "w", offsets, target)
            assert_equal(target, part)
    data = bytearray((tmp_path / index_of(tmp_path)["files"][0][0]).read_bytes())
    data[-1 - 5 * CHECKSUM] ^= 1  # in the last block, before the checksums
    (tmp_path / index_of(tmp_path)["files"][0][0]).write_bytes(data)
    target = torch.zeros(10, 1500)
    read_part(CheckpointReader(tmp_path), "w", [0, 0], target)
    assert_equal(target, weight[:10])
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        read_part(CheckpointReader(tmp_path), "w", [2990, 0], target)


class Planned(dcp.DefaultLoadPlanner):
    """Reads one region of a tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.target


def read_part(reader: CheckpointReader, key: str, offsets: list[int], target: torch.Tensor) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    index = MetadataIndex(key, torch.Size([0, 0]))
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0, 0]), index, torch.Size(offsets), target.size())
    plan = reader.prepare_local_plan(LoadPlan([item]))
    reader.read_data(plan, Planned(target)).wait()


@on_ranks(2, 4)
def test_any_cut_is_loaded_into_any_other(rank: Rank) -> None:
    """Row shards, column shards, replicas and plain tensors, uneven and with empty shards, each loaded as each."""
    cuts = [(Shard(0),), (Shard(1),), (Replicate(),), None]
    wholes = {"w": numbered(7, 5), "small": numbered(1, 3)}
    if rank.world_size == 2:  # shards of several blocks
        wholes["long"] = numbered(BLOCK // 16 + 100, 8)

    def cut(tensor: torch.Tensor, how: Any) -> torch.Tensor:
        return tensor.clone() if how is None else distribute_tensor(tensor, rank.mesh, how, src_data_rank=None)

    folder = shared_folder(rank)
    for number, how in enumerate(cuts):
        path = folder / str(number)
        save(path, {key: cut(whole, how) for key, whole in wholes.items()}, sync=False)
        for other in cuts:
            targets = {key: cut(torch.zeros_like(whole), other) for key, whole in wholes.items()}
            load(path, targets)
            for key, target in targets.items():
                full = target.full_tensor() if isinstance(target, DTensor) else target
                assert_equal(full, wholes[key])
    if rank.rank == 0:  # what ranks hold in common is written once
        for number in range(len(cuts)):
            written = sum(file.stat().st_size for file in (folder / str(number)).glob("data-*"))
            total = sum(whole.nbytes for whole in wholes.values())
            assert total < written < total + 10_000
    dist.barrier()


@on_ranks(2)
def test_ranks_write_to_one_save(rank: Rank) -> None:
    """Every rank has a file; all are of the save that the index names, and alone in the folder after a second save."""
    weight = distribute_tensor(torch.randn(8, 3), rank.mesh, [Shard(0)])
    folder = shared_folder(rank)
    for step in range(2):
        save(folder, {"w": weight, "n": step}, about={"step": step})
        dist.barrier()
        index = index_of(folder)
        assert index["about"] == {"step": step}
        expected = {INDEX_FILE} | {f"data-{index['save']}-{r}.safetensors" for r in range(2)}
        assert {file.name for file in folder.iterdir()} == expected
        dist.barrier()


def bad_value(number: int) -> Any:
    return [lambda: 0, object(), {"a": nn.Linear(2, 2)}][number]


@pytest.mark.parametrize("number", range(3))
def test_values_that_could_not_be_read_are_refused_at_once(tmp_path: Path, number: int) -> None:
    """A value that would need a pickle to run fails the save, by name, and leaves the folder as it was."""
    save(tmp_path, {"good": 1})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tmp_path, {"good": 2, "extra.bad": bad_value(number)})
    (failure,) = caught.value.failures.values()
    error = failure[0]
    assert "extra.bad" in str(error) or number == 0  # what cannot even be pickled fails in torch's planner
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_values_by_to_bytes() -> None:
    """States of all usual random generators survive; the error for others names the key."""
    values = [random.getstate(), np.random.get_state(), np.random.default_rng(3).bit_generator.state]
    values += [torch.get_rng_state(), np.float64(2), {1: (None, b"x", {3})}, float("nan")]
    for value in values:
        assert repr(from_bytes("k", to_bytes("k", value))) == repr(value)
    with pytest.raises(TypeError, match=r"extra\.k: a value of type function cannot be saved"):
        to_bytes("extra.k", bad_value(0))
    with pytest.raises(TypeError, match=r"it contains torch\.nn\.modules\.linear\.Linear"):
        to_bytes("extra.k", bad_value(2))


def test_aliases(tmp_path: Path) -> None:
    """A tied tensor is written once and loaded under each of its names, also by torch's own planner."""
    save(tmp_path, {"a": numbered(4)}, aliases={"b": "a"})
    assert_equal(load(tmp_path, {"b": torch.zeros(4)})["b"], numbered(4))
    assert len(index_of(tmp_path)["tensors"]) == 1
    with pytest.raises(dcp.api.CheckpointException, match="alias of 'x'"):
        save(tmp_path, {"a": numbered(4)}, aliases={"b": "x"})


def test_about_has_to_be_json(tmp_path: Path) -> None:
    """Something that JSON has no form for is refused before anything is written."""
    with pytest.raises(ValueError, match="about is not representable"):
        CheckpointWriter(tmp_path, about={"a": torch.zeros(1)})


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    """Sparse, quantized and meta tensors are refused by name; nothing is left of the save."""
    for bad in (torch.zeros(3, 3).to_sparse(), torch.zeros(2, device="meta"), torch.zeros(2).to_sparse_csr):
        if callable(bad):
            bad = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
        with pytest.raises(dcp.api.CheckpointException) as caught:
            save(tmp_path, {"odd": bad})
        assert "TypeError" in str(caught.value) or "NotImplementedError" in str(caught.value)
        assert list(tmp_path.iterdir()) == []


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    """torch's own conversion to a torch.save file works through the reader, nested dictionaries included."""
    nested = {"model": {"a.b": numbered(3, 2)}, "groups": [{"lr": 0.1, "m": torch.ones(2)}], "n": 3}
    save(tmp_path, nested)
    found: dict[str, Any] = {}
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(
        found, storage_reader=CheckpointReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert found.keys() == nested.keys()
    assert_equal(found["model"]["a.b"], numbered(3, 2))
    assert found["groups"][0]["lr"] == 0.1 and found["n"] == 3
    assert_equal(found["groups"][0]["m"], torch.ones(2))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2)
def test_torchs_checkpoints_are_read(rank: Rank, options: dict[str, Any]) -> None:
    """What torch.distributed.checkpoint wrote in its own format, on another number of shards, comes back."""
    whole = numbered(7, 5)
    weight = distribute_tensor(whole, rank.mesh, [Shard(0)])
    nested = {"model": {"w": weight, "s": torch.tensor(2.0)}, "n": {"k": (1, "x")}}
    folder = shared_folder(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(nested, checkpoint_id=folder)
    zeros = distribute_tensor(torch.zeros(7, 5), rank.mesh, [Shard(1)])
    targets: dict[str, Any] = {"model": {"w": zeros, "s": torch.tensor(0.0)}, "n": {"k": None}}
    load(folder, targets, **options)
    assert_equal(targets["model"]["w"].full_tensor(), whole)
    assert targets["model"]["s"] == 2.0
    assert targets["n"] == {"k": (1, "x")}


URLS = ["memory://fullshard-test/some/folder", "file://"]


@pytest.mark.parametrize("url", URLS)
def test_urls(tmp_path: Path, url: str) -> None:
    """Through fsspec: made, loaded, replaced, and left-overs removed, as on a local path."""
    pytest.importorskip("fsspec")
    path = f"{url}{tmp_path}/c" if url == "file://" else url
    for step in range(2):
        weight = numbered(3, 1 << 20) + step  # three blocks
        save(path, {"w": weight, "n": step})
        for options in OPTIONS:
            found = load(path, {"w": torch.zeros(weight.shape), "n": None}, **options)
            assert_equal(found["w"], weight)
            assert found["n"] == step
    names = files.Folder(path).names()
    assert len(names) == 2 and INDEX_FILE in names


def test_urls_of_unknown_kinds() -> None:
    """A protocol that fsspec does not know is an error that names the URL."""
    pytest.importorskip("fsspec")
    for make in (CheckpointWriter, lambda path: CheckpointReader(path).index):
        with pytest.raises(CheckpointError, match="nosuch://x/y"):
            make("nosuch://x/y")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fsspec is not installed, the error says what to install."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint._fsspec_filesystem", raising=False)
    with pytest.raises(CheckpointError, match="pip install fsspec"):
        files.Folder("memory://x")


def test_left_overs_are_removed(tmp_path: Path) -> None:
    """The next save removes what a killed one left; files of other names stay, even if they look alike."""
    left = ["data-00aa11bb22cc-0.safetensors", "data-00aa11bb22cc-13.safetensors", f"{INDEX_FILE}.00aa11bb22cc.tmp"]
    others = [
        "data-x-0.safetensors",
        "model.safetensors",
        "notes.txt",
        "data-00aa11bb22cc-0.safetensors.txt",
        ".metadata",
    ]
    for name in left + others:
        (tmp_path / name).write_text("x")
    save(tmp_path, {"a": numbered(2)})
    there = {file.name for file in tmp_path.iterdir()}
    assert there >= set(others) and not there & set(left)
    assert_equal(load(tmp_path, {"a": torch.zeros(2)})["a"], numbered(2))


def test_a_full_disk(tmp_path: Path) -> None:
    """A save that cannot be written names the file and the reason, and removes what it wrote."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    save(tmp_path, {"a": numbered(2)})
    writer = CheckpointWriter(tmp_path)
    name = f"data-{writer._save}-0.safetensors"
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(dcp.api.CheckpointException, match=rf"{name} cannot be written: No space left"):
        dcp.save({"a": numbered(1 << 20)}, storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.iterdir())) == 2
    assert_equal(load(tmp_path, {"a": torch.zeros(2)})["a"], numbered(2))


KILLED = '''
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
from fullshard.checkpoint.format import files
from fullshard.checkpoint.format.storage import CheckpointReader, CheckpointWriter
torch.set_num_threads(1)
path = sys.argv[1]

def entries(step):
    return {"a": torch.full((5, 1 << 18), float(step)), "b": torch.full((5,), float(step)), "n": step}

def save(step):
    dcp.save(entries(step), storage_writer=CheckpointWriter(path), no_dist=True)

left = -1
def tick():
    """Count an operation; the one that is chosen is the last that the process lives to see."""
    global left
    if left == 0:
        os._exit(77)
    left -= 1

class Stream:
    """A file of which a write may stop halfway."""
    def __init__(self, stream):
        self.stream = stream
    def write(self, data):
        tick()
        if left == 0:
            self.stream.write(memoryview(data)[: len(data) // 2])
            self.stream.flush()
        done = self.stream.write(data)
        tick()
        return done
    def __getattr__(self, name):
        return getattr(self.stream, name)

import contextlib
class Files(files.FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path, mode):
        tick()
        with super().create_stream(path, mode) as stream:
            tick()
            yield Stream(stream)
            tick()
        tick()

def counted(function):
    def call(*args, **kwargs):
        tick()
        result = function(*args, **kwargs)
        tick()
        return result
    return call

for name in ("rename", "rm_file", "mkdir"):  # what changes files
    setattr(Files, name, counted(getattr(files.FileSystem, name)))

save(1)
steps = killed = old = 0
while True:
    child = os.fork()
    if child == 0:
        files.FileSystem = Files
        os.fsync = counted(os.fsync)
        left = steps
        save(2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 77), status
    found = {"a": torch.zeros(5, 1 << 18), "b": torch.zeros(5), "n": None}
    dcp.load(found, storage_reader=CheckpointReader(path), no_dist=True)
    step = found["n"]
    assert all(torch.equal(found[key], value) for key, value in entries(step).items() if key != "n"), steps
    assert step in (1, 2)
    if status == 0:
        assert step == 2
        break
    killed += 1
    old += step == 1
    steps += 1
    save(1)
    assert len(os.listdir(path)) == 2, os.listdir(path)
print(killed, old)
'''


def test_killed_at_every_step(tmp_path: Path) -> None:
    """A process that ends before, after or in the middle of any file operation leaves the old checkpoint or the new."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
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

    save(tmp_path, {"a": numbered(2)}, sync=True)
    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(files.FileSystem, "rename", lambda *args: (done.append("rename"), rename(*args))[1])
    monkeypatch.setattr(files.FileSystem, "rm_file", lambda *args: (done.append("remove"), remove(*args))[1])
    save(tmp_path, {"a": numbered(2)}, sync=True)
    assert done == ["file", "folder", "file", "rename", "folder", "remove"]
    done.clear()
    save(tmp_path, {"a": numbered(2)}, sync=False)
    assert done == ["rename", "remove"]


def test_nothing_is_committed_with_a_hole(tmp_path: Path) -> None:
    """If the ranks together did not write all of a tensor, the save fails and the old checkpoint stays."""

    class Forgetful(CheckpointWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            plan.items.pop()
            return super().write_data(plan, planner)

    save(tmp_path, {"a": numbered(2), "b": numbered(3)})
    with pytest.raises(dcp.api.CheckpointException, match="b: found shards that lack 3 of the 3 elements"):
        dcp.save({"a": numbered(2), "b": numbered(3) + 1}, storage_writer=Forgetful(tmp_path), no_dist=True)
    assert_equal(load(tmp_path, {"b": torch.zeros(3)})["b"], numbered(3))


def test_one_reader_sees_one_save(tmp_path: Path) -> None:
    """A reader reads the index once; a save in between is an error, not a mixture, and seen after a reset."""
    save(tmp_path, {"a": numbered(2)})
    reader = CheckpointReader(tmp_path)
    reader.read_metadata()
    save(tmp_path, {"a": numbered(2) + 1})
    target = {"a": torch.zeros(2)}
    with pytest.raises(dcp.api.CheckpointException, match="no such file"):
        dcp.load(target, storage_reader=reader, no_dist=True)
    reader.reset()
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert_equal(target["a"], numbered(2) + 1)
