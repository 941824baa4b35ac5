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
from fullshard.checkpoint.safetensors.export import OutputFiles
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


def save(path: Path, saved: dict[str, Any], form: str = "fullshard", **options: Any) -> Path:
    if form == "fullshard":
        write(path, saved, **options)
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(params=["fullshard", "torch"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 250 elements: every large tensor of these tests takes several."""
    monkeypatch.setattr(offline, "_PART", 250)


def test_what_is_there(tmp_path: Path, form: str) -> None:
    """Names, shapes, dtypes and contents of tensors and values, whole and in parts; nothing is damaged."""
    saved = entries()
    save(tmp_path, saved, form)
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
    """All problems are listed, not the first one only, each with file and key."""
    save(tmp_path, entries())
    assert open_checkpoint(tmp_path).verify() == []
    (file,) = tmp_path.glob("data-*")
    for start in (place_of(tmp_path, "model.w"), place_of(tmp_path, "extra.note") + 100):
        flip(file, start)
    problems = open_checkpoint(tmp_path).verify()
    for word in ("model.w:", "extra.note:"):
        assert any(word in problem for problem in problems), word
    assert len(problems) == 2 and all(str(file) in problem for problem in problems)
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
    assert open_checkpoint(tmp_path).verify() == []
    (file,) = tmp_path.glob("*.distcp")
    flip(file, file.read_bytes().index(saved["model.w"].numpy().tobytes()) + 5)
    (problem,) = open_checkpoint(tmp_path).verify()
    assert "model.w" in problem and "CRC" in problem


# -------------------------------------------------------------------- export


def test_export_to_one_file(tmp_path: Path, form: str) -> None:
    """The tensors with the prefix, without it, as safetensors reads them; the folder is made."""
    saved = entries()
    save(tmp_path / "c", saved, form)
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


def test_export_to_the_hugging_face_layout(tmp_path: Path, form: str) -> None:
    """Numbered files of at most the size, an index; replaced by a later export without anything left over."""
    saved = entries()
    save(tmp_path / "c", saved, form)
    out = tmp_path / "out"
    files = export(tmp_path / "c", out, max_shard_bytes=6000)
    assert [file.name for file in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    places = json.loads(files[-1].read_text())["weight_map"]
    for name, file in places.items():
        assert_equal(load_file(out / file)[name], saved[f"model.{name}"], name)
    assert len(places) == 4
    assert export(tmp_path / "c", out) == [out / "model.safetensors"]
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
    export(tmp_path / "c", out, max_shard_bytes=100)
    names = sorted(file.name for file in out.iterdir())
    assert names[-1] == "model.safetensors.index.json" and "model.safetensors" not in names
    assert names[:-1] == [f"model-{i:05}-of-{len(names) - 1:05}.safetensors" for i in range(1, len(names))]


def test_export_of_what_is_damaged(tmp_path: Path) -> None:
    """It fails, leaves what was there before, and no temporary file."""
    save(tmp_path / "c", entries())
    out = tmp_path / "x.safetensors"
    export(tmp_path / "c", out)
    before = out.read_bytes()
    (file,) = (tmp_path / "c").glob("data-*")
    flip(file, place_of(tmp_path / "c", "model.w"))
    with pytest.raises(CheckpointError, match=r"model\.w: checksum mismatch"):
        export(tmp_path / "c", out)
    assert out.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "x.safetensors"]


@pytest.mark.parametrize("out", ["x.safetensors", "folder"])
def test_export_removes_what_a_kill_has_left(tmp_path: Path, out: str) -> None:
    """Hidden files of an export to the same place; others stay."""
    save(tmp_path / "c", entries())
    folder = tmp_path / "out" if out == "x.safetensors" else tmp_path / "out" / out
    target = folder / out if out == "x.safetensors" else folder
    left = [".x.safetensors"] if out == "x.safetensors" else [".model-00001-of-00002.safetensors", ".model.safetensors"]
    folder.mkdir(parents=True)
    for name in [f"{name}.0123456789abcdef.tmp" for name in left] + [".mine.tmp"]:
        (folder / name).write_text("")

    class KilledError(BaseException):
        """In place of a kill, after which nothing is tidied up."""

    def be_killed(*_: object) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputFiles, "publish", be_killed)
        patch.setattr(OutputFiles, "clean_up", lambda _: None)
        with pytest.raises(KilledError):
            export(tmp_path / "c", target)
    assert len(list(folder.iterdir())) == 2  # what this one has left, and .mine.tmp
    (done,) = export(tmp_path / "c", target)
    assert sorted(each.name for each in folder.iterdir()) == [".mine.tmp", done.name]


def test_export_of_wrong_input(tmp_path: Path) -> None:
    """Wrong prefixes name those that are there; dtypes and sizes are checked first."""
    save(tmp_path / "c", entries())
    with pytest.raises(CheckpointError, match=r"'model\.', 'optimizer\.'"):
        export(tmp_path / "c", tmp_path / "x.safetensors", prefix="modle.")
    with pytest.raises(ValueError, match="floating-point"):
        export(tmp_path / "c", tmp_path / "x.safetensors", dtype=torch.int8)
    with pytest.raises(ValueError, match="URL 's3://bucket/x"):
        export(tmp_path / "c", "s3://bucket/x.safetensors")
    with pytest.raises(ValueError, match="positive"):
        export(tmp_path / "c", tmp_path / "x", max_shard_bytes=0)
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}/x\.safetensors cannot be written|cannot be written"):
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


def test_a_damaged_header_is_reported_for_all_that_it_describes(tmp_path: Path) -> None:
    """Also for the values of the file."""
    save(tmp_path, {**entries(), "extra.other": 2})
    (file,) = tmp_path.glob("data-*")
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with open_checkpoint(tmp_path) as checkpoint:
        problems = list(checkpoint.verify())
    assert problems and all("checksum mismatch in the header" in problem for problem in problems)
