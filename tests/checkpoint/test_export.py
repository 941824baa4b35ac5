"""Export to safetensors files: every form of model, several files, one copy of everything, and failures on one rank."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from weight_models import FORMS, Net, build, form, full_state

from compare import assert_equal
from fullshard import FullshardError, PhaseError, UnmaterializedParameterError, fully_shard, unsharded
from fullshard.checkpoint.format import files
from fullshard.checkpoint.safetensors import shard_io
from fullshard.checkpoint.safetensors.export import OutputFiles, export_safetensors
from fullshard.checkpoint.safetensors.files import INDEX_NAME, SINGLE_NAME
from fullshard.checkpoint.safetensors.importing import load_safetensors
from fullshard.errors import CheckpointError
from ranks import Rank, on_ranks

forms = pytest.mark.parametrize("name", FORMS)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Where to export to: not there yet."""
    return str(tmp_path / "weights" / "here")


def loaded(folder: str) -> dict[str, torch.Tensor]:
    """All tensors, as the safetensors package reads them."""
    index = Path(folder, INDEX_NAME)
    names = [SINGLE_NAME]
    if index.exists():
        assert not Path(folder, SINGLE_NAME).exists()
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, torch.Tensor] = {}
    for name in names:
        found |= load_file(Path(folder, name))
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def assert_exported(folder: str, expected: dict[str, torch.Tensor], files: int = 1) -> None:
    """The folder has these tensors, tied ones once, and nothing else."""
    dist.barrier()
    names = sorted(os.listdir(folder))
    if files == 1:
        assert names == [SINGLE_NAME]
    else:
        shards = [f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)]
        assert names == sorted([*shards, INDEX_NAME])
    found = loaded(folder)
    assert set(found) == set(expected) - {"head.weight"}
    for fqn, value in found.items():
        assert_equal(value, expected[fqn].cpu(), fqn)
    dist.barrier()


def note_writes(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First byte and length of everything that this rank writes into files from now on."""
    written: list[tuple[int, int]] = []
    usual = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        written.append((offset, len(data)))
        return usual(descriptor, data, offset)

    patch.setattr(os, "pwrite", pwrite)
    return written


@on_ranks(1, 4)
@forms
def test_every_form_writes_what_the_plain_model_has(rank: Rank, name: str, folder: str) -> None:
    """The safetensors package reads the plain model's values; bytes are written by exactly one rank each."""
    if name == "hybrid" and rank.world_size == 1:
        pytest.skip("two axes need two ranks")
    expected = full_state(build())
    model = form(name, rank, build())
    with pytest.MonkeyPatch.context() as patch:
        written = note_writes(patch)
        export_safetensors(model, folder)
    assert_exported(folder, expected)
    everyone: list[list[tuple[int, int]]] = [[]] * rank.world_size
    dist.all_gather_object(everyone, written)
    count = Counter(byte for own in everyone for first, size in own for byte in range(first, first + size))
    assert set(count.values()) == {1}
    assert len(count) == sum(value.nbytes for fqn, value in expected.items() if fqn != "head.weight")


@on_ranks(2)
@pytest.mark.parametrize("name", ["columns", "wrapper"])
def test_many_converted_files_with_an_index(rank: Rank, name: str, folder: str) -> None:
    """Small files, each with at least one tensor, an index that the package agrees with, and texts in each of them.

    Floating-point tensors are in another dtype, rounded once, through a block smaller than a row. Tied parameters are
    written under their first name, and the metadata has the others.
    """
    model = form(name, rank, build())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_io.ShardFileIO.__init__, "__defaults__", (8,))
        export_safetensors(model, folder, dtype=torch.bfloat16, max_shard_bytes=300, metadata={"step": "7"})
    files = set(json.loads(Path(folder, INDEX_NAME).read_text())["weight_map"].values())
    expected = {k: v.bfloat16() if v.is_floating_point() else v for k, v in full_state(build()).items()}
    assert_exported(folder, expected, files=len(files))
    assert len(files) > 3
    for file in files:
        with safe_open(str(Path(folder, file)), "pt") as opened:
            texts = opened.metadata()
            assert texts == {"format": "pt", "step": "7", "aliases": '{"head.weight": "words.weight"}'}
            sizes = [opened.get_tensor(key).nbytes for key in opened.keys()]  # noqa: SIM118
            assert len(sizes) == 1 or sum(sizes) <= 300


@on_ranks(4)
def test_what_all_ranks_hold_is_written_by_all_in_turn(rank: Rank, folder: str) -> None:
    """Replicated tensors are spread over the ranks by size."""
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(16)))
    with pytest.MonkeyPatch.context() as patch:
        written = note_writes(patch)
        export_safetensors(model, folder)
    assert sum(size for _, size in written) == 4 * 400


@on_ranks(2)
def test_an_export_replaces_the_one_before(rank: Rank, folder: str) -> None:
    """One file, many, fewer, and one again: each time the folder has the last export only, and other files stay."""
    model = form("fully_shard", rank, build())
    expected = full_state(build())
    if rank.rank == 0:
        os.makedirs(folder)
        Path(folder, ".model.safetensors.0123456789abcdef.tmp").touch()  # of an export that was killed
    dist.barrier()
    export_safetensors(model, folder, sync=True)
    assert_exported(folder, expected)
    counts = []
    for limit in (300, 900, 10**6):
        export_safetensors(model, folder, max_shard_bytes=limit)
        counts.append(len([name for name in os.listdir(folder) if name.endswith(".safetensors")]))
        assert_exported(folder, expected, files=counts[-1])
    assert counts[0] > counts[1] > counts[2] == 1
    if rank.rank == 0:
        Path(folder, "config.json").write_text("{}")
    dist.barrier()
    export_safetensors(model, folder)
    assert sorted(os.listdir(folder)) == ["config.json", SINGLE_NAME]
    dist.barrier()


def hide_folder(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    """Let rank 1 not see the folder."""
    if rank.rank == 1:
        patch.setattr(files, "_LOOKS", 1)
        patch.setattr(OutputFiles, "token_file", property(lambda files: files.folder / "elsewhere"))


@on_ranks(2)
def test_ranks_must_share_the_folder(rank: Rank, folder: str) -> None:
    """If one does not see it, nothing is written, and the error says so on all ranks."""
    model = form("fully_shard", rank, build())
    with pytest.MonkeyPatch.context() as patch:
        hide_folder(patch, rank)
        with pytest.raises(CheckpointError, match=r"rank 1: .* does not see the folder .*full_tensors"):
            export_safetensors(model, folder)
    dist.barrier()  # the first rank tidies up after it has told the others
    assert os.listdir(folder) == []


@on_ranks(2)
@pytest.mark.parametrize(
    ("odd", "error", "says"),
    [
        (1, OSError(errno.ENOSPC, "No space left"), "model.safetensors cannot be written: .*No space left"),
        (0, MemoryError("none left"), "none left"),
    ],
)
def test_failure_of_one_rank_fails_all(rank: Rank, odd: int, error: Exception, says: str, folder: str) -> None:
    """The error is the same on all ranks and names rank and file; nothing of the export is left, and all goes on."""
    model = form("fully_shard", rank, build())
    export_safetensors(model, folder)
    before = Path(folder, SINGLE_NAME).stat().st_mtime_ns

    def fail(*_: object) -> int:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == odd:
            patch.setattr(os, "pwrite", fail)
        with pytest.raises(FullshardError, match=f"rank {odd}: .*{says}") as caught:
            export_safetensors(model, folder)
    messages: list[str] = [""] * rank.world_size
    dist.all_gather_object(messages, str(caught.value))
    assert set(messages) == {messages[0]}
    dist.barrier()  # the rank that writes tidies up after it has told the others
    assert os.listdir(folder) == [SINGLE_NAME]
    assert Path(folder, SINGLE_NAME).stat().st_mtime_ns == before
    dist.barrier()
    export_safetensors(model, folder)
    assert_exported(folder, full_state(build()))


def steps_of_publishing(folder: str, stop: int, limit: int) -> bool:
    """Export, and be killed (which an exception has to stand for) before change number ``stop`` of names in the folder.

    Returns:
        Whether there were so many.
    """
    done = [0]

    class KilledError(BaseException):
        pass

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink"):
            usual = getattr(Path, name)

            def counted(path: Path, *args: Any, _usual: Any = usual, **options: Any) -> Any:
                if options.get("missing_ok") and not path.exists():
                    return None
                if done[0] == stop:
                    raise KilledError
                done[0] += 1
                return _usual(path, *args, **options)

            patch.setattr(Path, name, counted)
        patch.setattr(OutputFiles, "clean_up", lambda _: None)
        try:
            export_safetensors(build(2), folder, max_shard_bytes=limit)
        except KilledError:
            return True
    return False


@pytest.mark.parametrize(("before", "after"), [(300, 900), (300, 10**6), (10**6, 300)])
def test_readers_never_find_a_mixture(before: int, after: int, folder: str) -> None:
    """Whenever an export that replaces another is killed, what is read is all old, all new, or nothing."""
    old, new = full_state(build(1)), full_state(build(2))
    for stop in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        export_safetensors(build(1), folder, max_shard_bytes=before)
        killed = steps_of_publishing(folder, stop, after)
        model = build(3)
        try:
            load_safetensors(model, folder)
        except CheckpointError as error:
            assert killed and "expected model.safetensors" in str(error)  # noqa: PT017
            continue
        found = model.state_dict()
        expected = old if torch.equal(found["mix"], old["mix"]) else new
        for name, value in expected.items():
            assert_equal(found[name], value, name)
        if not killed:
            assert expected is new and stop > 0
            return
    pytest.fail("there is no end to it")


@on_ranks(4)
@pytest.mark.parametrize("name", ["hybrid", "wrapper"])
def test_groups_that_lack_parts_of_the_model_are_refused(rank: Rank, name: str, folder: str) -> None:
    """Zeros in place of what other ranks hold would look like weights: tensors, numbers and cause are named instead.

    Ranks that shard one copy of a replicated model export it.
    """
    model = form(name, rank, build())
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    own, other = pairs[rank.rank // 2], pairs[2 + rank.rank % 2]
    with pytest.raises(CheckpointError, match=r"weight: .* lack \d+ of the \d+ elements.*process_group"):
        export_safetensors(model, f"{folder}-{rank.rank % 2}", process_group=other)
    if name == "hybrid":
        folder = f"{folder}-{rank.rank // 2}"
        export_safetensors(model, folder, process_group=own)
    else:
        export_safetensors(model, folder)
    assert_exported(folder, full_state(build()))


@on_ranks(2)
def test_folder_that_cannot_be_made_is_an_error_on_all(rank: Rank, folder: str) -> None:
    """A file in the folder's place."""
    if rank.rank == 0:
        os.makedirs(os.path.dirname(folder))
        Path(folder).touch()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 0: .*here cannot be written"):
        export_safetensors(nn.Linear(2, 2), folder)


@on_ranks(2)
def test_ranks_with_different_models_are_told(rank: Rank, folder: str) -> None:
    """Pipeline stages, for example, have to be exported each by its own ranks."""
    with pytest.raises(CheckpointError, match="rank 1 differs from rank 0 in the model's tensors"):
        export_safetensors(nn.Linear(2, 2 + rank.rank), folder)
    groups = [dist.new_group([0]), dist.new_group([1])]
    export_safetensors(nn.Linear(2, 2 + rank.rank), f"{folder}{rank.rank}", process_group=groups[rank.rank])
    assert loaded(f"{folder}{rank.rank}")["weight"].shape == (2 + rank.rank, 2)


@on_ranks(2)
def test_what_cannot_be_exported_is_refused_before_anything_is_made(rank: Rank, folder: str) -> None:
    """Wrong arguments, models on the meta device and in the middle of a step, and dtypes that the format lacks."""
    model = form("fully_shard", rank, build())
    for options in (
        {"dtype": torch.int64},
        {"max_shard_bytes": 0},
        {"metadata": {"aliases": "x"}},
        {"metadata": {1: "a"}},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
            export_safetensors(model, folder, **options)
    with pytest.raises(ValueError, match="expected a local path, found the URL"):
        export_safetensors(model, "s3://bucket/weights")
    with torch.device("meta"):
        meta = Net()
    with pytest.raises(UnmaterializedParameterError, match="meta device"):
        export_safetensors(fully_shard(meta, mesh=rank.mesh), folder)
    with unsharded(model), pytest.raises(PhaseError):
        export_safetensors(model, folder)
    odd = nn.Linear(2, 2)
    odd.register_buffer("complex", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"complex \(torch.complex128\)"):
        export_safetensors(odd, folder)
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises((ValueError, FullshardError), match="sparse"):
        export_safetensors(sparse, folder)
    assert not os.path.exists(folder)
