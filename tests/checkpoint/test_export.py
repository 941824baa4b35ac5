"""Export to safetensors files: every kind of model, several files, one copy of everything, and failures on one rank."""

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

from checkpoint.kinds import KINDS, Model, build, reference
from compare import assert_equal
from fullshard import FullshardError, PhaseError, UnmaterializedParameterError, fully_shard, unsharded
from fullshard.checkpoint.format import files
from fullshard.checkpoint.safetensors import shard_io
from fullshard.checkpoint.safetensors.export import OutputFiles, export_safetensors
from fullshard.checkpoint.safetensors.files import INDEX_NAME, SINGLE_NAME
from fullshard.checkpoint.safetensors.importing import load_safetensors
from fullshard.errors import CheckpointError
from ranks import Rank, on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Where to export to: not there yet."""
    return str(tmp_path / "weights" / "here")


def assert_exported(folder: str, expected: dict[str, torch.Tensor], files: int = 1) -> None:
    """The safetensors package finds these tensors, tied ones once, and nothing else is in the folder."""
    dist.barrier()
    names = [SINGLE_NAME] if files == 1 else [f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)]
    assert sorted(os.listdir(folder)) == sorted(names if files == 1 else [*names, INDEX_NAME])
    found, places = {}, {}
    for name in names:
        tensors = load_file(Path(folder, name))
        found |= tensors
        places |= dict.fromkeys(tensors, name)
    assert set(found) == set(expected) - {"head.weight"}
    for fqn, value in found.items():
        assert_equal(value, expected[fqn].cpu(), fqn)
    if files > 1:
        index = json.loads(Path(folder, INDEX_NAME).read_text())
        assert index["weight_map"] == places
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
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


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_writes_what_the_plain_model_has(rank: Rank, kind: str, folder: str) -> None:
    """The safetensors package reads the plain model's values; bytes are written by exactly one rank each."""
    expected, model = reference(), build(rank, kind)
    with pytest.MonkeyPatch.context() as patch:
        written = note_writes(patch)
        export_safetensors(model, folder)
    assert_exported(folder, expected)
    everyone: list[list[tuple[int, int]]] = [[]] * rank.world_size
    dist.all_gather_object(everyone, written)
    count = Counter(byte for own in everyone for first, size in own for byte in range(first, first + size))
    assert set(count.values()) == {1}
    assert len(count) == sum(value.nbytes for fqn, value in expected.items() if fqn != "head.weight")


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["columns", "flat"])
def test_many_converted_files_with_an_index(rank: Rank, kind: str, folder: str) -> None:
    """Small files, each with at least one tensor, an index that the package agrees with, and texts in each of them.

    Floating-point tensors are in another dtype, rounded once, through a block smaller than a row. Tied parameters are
    written under their first name, and the metadata has the others.
    """
    model = build(rank, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_io.ShardFileIO.__init__, "__defaults__", (8,))
        export_safetensors(model, folder, dtype=torch.bfloat16, max_shard_bytes=300, metadata={"step": "7"})
    files = set(json.loads(Path(folder, INDEX_NAME).read_text())["weight_map"].values())
    expected = {k: v.bfloat16() if v.is_floating_point() else v for k, v in reference().items()}
    assert_exported(folder, expected, files=len(files))
    assert len(files) > 3
    for file in files:
        with safe_open(str(Path(folder, file)), "pt") as opened:
            texts = opened.metadata()
            assert texts == {"format": "pt", "step": "7", "aliases": '{"head.weight": "embed.weight"}'}
            sizes = [opened.get_tensor(key).nbytes for key in opened.keys()]  # noqa: SIM118
            assert len(sizes) == 1 or sum(sizes) <= 300


@on_ranks(4)
def test_replicated_tensors_are_written_by_all_ranks_in_turn(rank: Rank, folder: str) -> None:
    """They are spread over the ranks by size."""
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(16)))
    with pytest.MonkeyPatch.context() as patch:
        written = note_writes(patch)
        export_safetensors(model, folder)
    assert sum(size for _, size in written) == 4 * 400


@on_ranks(2)
def test_an_export_replaces_the_one_before(rank: Rank, folder: str) -> None:
    """One file, many, fewer, and one again: each time the folder has the last export only, and other files stay."""
    model, expected = build(rank, "fully_shard"), reference()
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


@on_ranks(2)
@pytest.mark.parametrize(
    ("odd", "error", "says"),
    [
        (1, OSError(errno.ENOSPC, "No space left"), "model.safetensors cannot be written: .*No space left"),
        (0, MemoryError("none left"), "none left"),
        (1, None, "does not see the folder .*full_tensors"),
    ],
    ids=["disk", "memory", "folder"],
)
def test_failure_of_one_rank_fails_all(rank: Rank, odd: int, error: Exception | None, says: str, folder: str) -> None:
    """The error is the same on all ranks and names rank and file; nothing of the export is left, and all goes on."""
    model = build(rank, "fully_shard")
    export_safetensors(model, folder)
    before = Path(folder, SINGLE_NAME).stat().st_mtime_ns

    def fail(*_: object) -> int:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == odd and error is not None:
            patch.setattr(os, "pwrite", fail)
        elif rank.rank == odd:
            patch.setattr(files, "_LOOKS", 1)
            patch.setattr(OutputFiles, "token_file", property(lambda files: files.folder / "elsewhere"))
        with pytest.raises(FullshardError, match=f"rank {odd}: .*{says}") as caught:
            export_safetensors(model, folder)
    messages: list[str] = [""] * rank.world_size
    dist.all_gather_object(messages, str(caught.value))
    assert set(messages) == {messages[0]}
    dist.barrier()  # the rank that writes tidies up after the others have raised
    assert os.listdir(folder) == [SINGLE_NAME]
    assert Path(folder, SINGLE_NAME).stat().st_mtime_ns == before
    dist.barrier()
    export_safetensors(model, folder)
    assert_exported(folder, reference())


class KilledError(BaseException):
    """Stands for a kill, after which nothing is tidied up."""


def killed_while_publishing(folder: str, stop: int, limit: int) -> bool:
    """Export, and be killed before change number ``stop`` of names in the folder; False if there are not so many."""
    done = [0]
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
            export_safetensors(Model(2), folder, max_shard_bytes=limit)
        except KilledError:
            return True
    return False


@pytest.mark.parametrize(("before", "after"), [(300, 900), (300, 10**6), (10**6, 300)])
def test_readers_never_find_a_mixture(before: int, after: int, folder: str) -> None:
    """Whenever an export that replaces another is killed, what is read is all old, all new, or nothing."""
    old, new = reference(1), reference(2)
    for stop in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        export_safetensors(Model(1), folder, max_shard_bytes=before)
        killed = killed_while_publishing(folder, stop, after)
        model = Model(3)
        try:
            load_safetensors(model, folder)
        except CheckpointError as error:
            assert killed and "expected model.safetensors" in str(error)  # noqa: PT017
            continue
        found = model.state_dict()
        expected = old if torch.equal(found["low"], old["low"]) else new
        for name, value in expected.items():
            assert_equal(found[name], value, name)
        if not killed:
            assert expected is new and stop > 0
            return
    pytest.fail("there is no end to it")


@on_ranks(4)
@pytest.mark.parametrize("kind", ["hybrid", "flat"])
def test_groups_that_lack_parts_of_the_model_are_refused(rank: Rank, kind: str, folder: str) -> None:
    """Zeros in place of what other ranks hold would look like weights: tensors, numbers and cause are named instead.

    Ranks that shard one copy of a replicated model export it.
    """
    model = build(rank, kind)
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    own, other = pairs[rank.rank // 2], pairs[2 + rank.rank % 2]
    with pytest.raises(CheckpointError, match=r"weight: .* lack \d+ of the \d+ elements.*process_group"):
        export_safetensors(model, f"{folder}-{rank.rank % 2}", process_group=other)
    if kind == "hybrid":
        folder = f"{folder}-{rank.rank // 2}"
        export_safetensors(model, folder, process_group=own)
    else:
        export_safetensors(model, folder)
    assert_exported(folder, reference())


@on_ranks(2)
def test_ranks_with_different_models_are_refused(rank: Rank, folder: str) -> None:
    """Pipeline stages, for example, have to be exported each by its own ranks."""
    with pytest.raises(CheckpointError, match="rank 1 differs from rank 0 in the model's tensors"):
        export_safetensors(nn.Linear(2, 2 + rank.rank), folder)
    groups = [dist.new_group([0]), dist.new_group([1])]
    export_safetensors(nn.Linear(2, 2 + rank.rank), f"{folder}{rank.rank}", process_group=groups[rank.rank])
    assert load_file(Path(f"{folder}{rank.rank}", SINGLE_NAME))["weight"].shape == (2 + rank.rank, 2)


@on_ranks(2)
def test_what_cannot_be_exported_is_refused_before_anything_is_made(rank: Rank, folder: str) -> None:
    """Wrong arguments, a file in the folder's place, models on the meta device or in a step, dtypes without a name."""
    model = build(rank, "fully_shard")
    with torch.device("meta"):
        meta = fully_shard(Model(), mesh=rank.mesh)
    buffers = [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()]
    odd, sparse = (nn.Linear(2, 2) for _ in buffers)
    for module, buffer in zip((odd, sparse), buffers, strict=True):
        module.register_buffer("buffer", buffer)
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (model, {"dtype": torch.int64}, ValueError, "dtype: expected"),
        (model, {"max_shard_bytes": 0}, ValueError, "max_shard_bytes: expected"),
        (model, {"metadata": {"aliases": "x"}}, ValueError, "metadata: expected"),
        (model, {"metadata": {1: "a"}}, ValueError, "metadata: expected"),
        (model, {"folder": "s3://bucket/weights"}, ValueError, "expected a local path, found the URL"),
        (model, {"folder": f"{__file__}/x"}, CheckpointError, "rank 0: .*x cannot be written"),
        (meta, {}, UnmaterializedParameterError, "meta device"),
        (odd, {}, ValueError, r"buffer \(torch.complex128\)"),
        (sparse, {}, (ValueError, FullshardError), "sparse"),
    ]
    for module, options, error, message in refused:
        with pytest.raises(error, match=message):
            export_safetensors(module, **{"folder": folder, **options})
    with unsharded(model), pytest.raises(PhaseError):
        export_safetensors(model, folder)
    assert not os.path.exists(folder)
