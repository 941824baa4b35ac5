"""Checkpoints without models and ranks: listed, read, verified, compared, and exported as safetensors files."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint.contents import flip, place_of, write
from compare import assert_equal
from fullshard import CheckpointError
from fullshard.checkpoint.format.index import INDEX_FILE
from fullshard.checkpoint.safetensors.export import export_checkpoint as export
from fullshard.checkpoint.tools import offline
from fullshard.checkpoint.tools.offline import open_checkpoint


def entries(seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        "model.w": torch.randn(50, 30, generator=random),
        "model.half": torch.randn(7, generator=random).bfloat16(),
        "model.count": torch.tensor(3),
        "model.empty": torch.empty(0, 4),
        "optimizer.state.w.exp_avg": torch.randn(50, 30, generator=random),
        "extra.note": ["x", 1],
    }


def save(path: Path, saved: dict[str, Any], writer: str = "fullshard", **options: Any) -> Path:
    if writer == "fullshard":
        write(path, saved, **options)
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(params=["fullshard", "torch"])
def writer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 250 elements: every large tensor of these tests takes several."""
    monkeypatch.setattr(offline, "_PART", 250)


def test_what_is_there(tmp_path: Path, writer: str) -> None:
    """Names, shapes, dtypes and contents of tensors and values, whole and in parts; nothing is damaged."""
    saved = entries()
    save(tmp_path, saved, writer)
    with open_checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names) == sorted(key for key in saved if key != "extra.note")
        for name in checkpoint.names:
            assert checkpoint.shape(name) == saved[name].shape
            assert checkpoint.dtype(name) == saved[name].dtype
            assert_equal(checkpoint.read(name), saved[name], name)
        assert checkpoint.read("extra.note") == ["x", 1]
        parts = list(checkpoint.shards("model.w"))
        assert max(part.local.numel() for part in parts) <= 250
        assert_equal(torch.cat([part.local.flatten() for part in parts]), saved["model.w"].flatten(), "all parts")
        with pytest.raises(KeyError, match=r"no tensor 'model\.x'"):
            checkpoint.read("model.x")
        assert checkpoint.verify() == []


def test_verify_finds_everything(tmp_path: Path) -> None:
    """All problems are listed, not the first one only, each with file and key; a header's for all that it describes."""
    save(tmp_path, entries())
    (file,) = tmp_path.glob("data-*")
    for start in (place_of(tmp_path, "model.w"), place_of(tmp_path, "extra.note") + 100):
        flip(file, start)
    problems = open_checkpoint(tmp_path).verify()
    assert [problem.partition(":")[0] for problem in problems] == [str(file)] * 2
    assert "model.w:" in problems[0] and "extra.note:" in problems[1]
    flip(file, 9)
    (problem,) = open_checkpoint(tmp_path).verify()
    assert "checksum mismatch in the header" in problem and str(file) in problem
    file.unlink()
    (problem,) = open_checkpoint(tmp_path).verify()
    assert "no such file" in problem


def test_verify_torchs_format(tmp_path: Path) -> None:
    """There it is torch's own checksums that are compared."""
    saved = entries()
    save(tmp_path, saved, "torch")
    (file,) = tmp_path.glob("*.distcp")
    flip(file, file.read_bytes().index(saved["model.w"].numpy().tobytes()) + 5)
    (problem,) = open_checkpoint(tmp_path).verify()
    assert "model.w" in problem and "CRC" in problem


# -------------------------------------------------------------------- export


def test_export_to_one_file(tmp_path: Path, writer: str) -> None:
    """The tensors with the prefix, without it, as safetensors reads them; the folder is made."""
    saved = entries()
    save(tmp_path / "c", saved, writer)
    out = tmp_path / "new" / "x.safetensors"
    assert export(tmp_path / "c", out) == [out]
    found = load_file(out)
    assert sorted(found) == ["count", "empty", "half", "w"]
    for name, tensor in found.items():
        assert_equal(tensor, saved[f"model.{name}"], name)
    assert [file.name for file in out.parent.iterdir()] == [out.name]


def test_export_converts(tmp_path: Path) -> None:
    """Floating-point tensors get the dtype, others keep theirs; tied names are in the metadata; another prefix."""
    save(tmp_path / "c", entries(), aliases={"model.tied": "model.w"})
    export(tmp_path / "c", tmp_path / "x.safetensors", dtype=torch.bfloat16)
    found = load_file(tmp_path / "x.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.int64}
    assert_equal(found["w"], entries()["model.w"].bfloat16(), "w")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert json.loads(file.metadata()["aliases"]) == {"tied": "w"}
    export(tmp_path / "c", tmp_path / "y.safetensors", prefix="optimizer.state.")
    assert list(load_file(tmp_path / "y.safetensors")) == ["w.exp_avg"]


def test_export_to_the_hugging_face_layout(tmp_path: Path, writer: str) -> None:
    """Numbered files of at most the size, and an index; a later export replaces them."""
    saved = entries()
    save(tmp_path / "c", saved, writer)
    out = tmp_path / "out"
    files = export(tmp_path / "c", out, max_shard_bytes=6000)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert [file.name for file in files] == names
    places = json.loads(files[-1].read_text())["weight_map"]
    for name, file in places.items():
        assert_equal(load_file(out / file)[name], saved[f"model.{name}"], name)
    assert len(places) == 4
    assert export(tmp_path / "c", out) == [*out.iterdir()] == [out / "model.safetensors"]


@pytest.mark.parametrize(
    ("out", "left"),
    [
        ("out/x.safetensors", [".x.safetensors"]),
        ("out", [".model-00001-of-00002.safetensors", ".model.safetensors"]),
    ],
)
def test_an_export_that_fails(tmp_path: Path, out: str, left: list[str]) -> None:
    """What was there before stays, without temporary files of this export, or of one that was killed."""
    save(tmp_path / "c", entries())
    folder, target = tmp_path / "out", tmp_path / out
    (done,) = export(tmp_path / "c", target)
    before = done.read_bytes()
    for name in [f"{name}.0123456789abcdef.tmp" for name in left] + [".mine.tmp"]:
        (folder / name).write_text("")
    (file,) = (tmp_path / "c").glob("data-*")
    flip(file, place_of(tmp_path / "c", "model.w"))
    with pytest.raises(CheckpointError, match=r"model\.w: checksum mismatch"):
        export(tmp_path / "c", target)
    assert done.read_bytes() == before
    assert sorted(each.name for each in folder.iterdir()) == sorted([".mine.tmp", done.name])


def test_export_of_wrong_input(tmp_path: Path) -> None:
    """Wrong prefixes name those that are there; test_commands.py has dtypes, sizes and URLs."""
    save(tmp_path / "c", entries())
    with pytest.raises(CheckpointError, match=r"'model\.', 'optimizer\.'"):
        export(tmp_path / "c", tmp_path / "x.safetensors", prefix="modle.")
    with pytest.raises(ValueError, match="positive"):
        export(tmp_path / "c", tmp_path / "x", max_shard_bytes=0)
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(tmp_path / "c", tmp_path / "c" / INDEX_FILE / "x.safetensors")


PEAK = """
import resource, sys, torch
from fullshard.checkpoint.safetensors.export import export_checkpoint as export
from fullshard.checkpoint.tools import offline
path, out = sys.argv[1:]
offline._PART = 1 << 18
checkpoint = offline.open_checkpoint(path)
checkpoint.read("small")

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = peak()
assert checkpoint.verify() == []
print(peak() - before)
export(path, out, prefix="")
print(peak() - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A tensor of 80 MB is verified and exported in a fraction of that."""
    save(tmp_path / "c", {"w": torch.zeros(20_000_000), "small": torch.zeros(3)})
    command = [sys.executable, "-c", PEAK, str(tmp_path / "c"), str(tmp_path / "x.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    verified, exported = map(int, done.stdout.split())
    assert verified < 20 and exported < 30, "MiB"
    (tmp_path / "x.safetensors").unlink()
