"""The text of a run: reading, splitting by file, batches, held-out windows, and baselines on them."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
import pytest

from fullshard.train import corpus
from fullshard.train.config import ConfigError
from fullshard.train.corpus import baselines, whole_windows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty distinct text files of 500 bytes, in two folders."""
    for number in range(40):
        path = tmp_path / "text" / str(number % 2) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((f"file {number} " * 100).encode()[:500])
    return tmp_path / "text"


def test_split_is_by_file(folder: Path, tmp_path: Path) -> None:
    """No file is on both sides, and every file is on one. The seed alone decides, not where the text lies."""
    first, again, other = (corpus.read([str(folder)], seed=seed, sequence=16) for seed in (3, 3, 4))
    train, held = set(first.train_files), set(first.validation_files)
    assert not train & held and len(train | held) == 40
    assert (len(first.train), len(first.validation)) == (19_000, 1000)
    assert first.train.tobytes() == b"".join(path.read_bytes() for path in first.train_files)
    assert first.sha256 == again.sha256 and first.validation_files == again.validation_files
    assert first.validation_files != other.validation_files
    moved = folder.rename(tmp_path / "elsewhere")
    assert corpus.read([str(moved)], seed=3, sequence=16).sha256 == first.sha256


def test_folder_leaves_out_copies_and_what_is_no_text(folder: Path) -> None:
    """Hidden, empty and binary files of a folder are not read; a copy cannot leak held-out bytes into training."""
    before = corpus.read([str(folder)], seed=0, sequence=16).sha256
    (folder / ".hidden").write_bytes(b"secret" * 100)
    (folder / "empty.txt").touch()
    (folder / "image.bin").write_bytes(b"\x89PNG\0" * 100)
    (folder / "copy.txt").write_bytes((folder / "0" / "0.txt").read_bytes())
    assert corpus.read([str(folder), str(folder / "0" / "0.txt")], seed=0, sequence=16).sha256 == before


def test_single_file_holds_out_its_tail(tmp_path: Path) -> None:
    """With one file its last tenth is held out, and a note says so."""
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(256)) * 10)
    text = corpus.read([str(path)], seed=0, sequence=16)
    assert text.train.tobytes() + text.validation.tobytes() == path.read_bytes()
    assert len(text.validation) == 256
    assert "one.txt" in text.note and "256" in text.note


def test_standard_library_is_the_default() -> None:
    """Without a path the text is Python's standard library, without installed packages."""
    text = corpus.read([], seed=0, sequence=128)
    paths = text.train_files + text.validation_files
    assert any(path.name == "argparse.py" for path in paths)
    assert all(path.suffix == ".py" for path in paths)
    assert not any("site-packages" in path.parts for path in paths)


def test_batch_is_the_same_on_any_number_of_ranks() -> None:
    """Seed and step alone choose the windows, and targets are shifted by one. The parts of all ranks, one after
    another, are the batch of a single rank; no two of them are equal.
    """
    text = np.arange(200, dtype=np.uint8)
    whole = corpus.sample(text, batch=12, sequence=8, key=(3, 7))
    assert whole.shape == (12, 9) and whole.dtype == np.int64
    assert (whole[:, 1:] == whole[:, :-1] + 1).all()
    for other in ((3, 8), (4, 7)):
        assert (whole != corpus.sample(text, batch=12, sequence=8, key=other)).any()
    for parts in (1, 2, 3, 12):
        sizes = {"batch": 12 // parts, "sequence": 8, "key": (3, 7)}
        cut = [corpus.sample(text, **sizes, part=(rank, parts)) for rank in range(parts)]
        assert (np.concatenate(cut) == whole).all() and len({each.tobytes() for each in cut}) == parts
    assert (corpus.sample(np.arange(9, dtype=np.uint8), batch=3, sequence=8, key=(0,)) == np.arange(9)).all()


def test_unreadable_file_is_named_with_the_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read is an error, also inside a folder."""
    locked = folder / "0" / "0.txt"
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == locked:
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for path in (locked, folder):
        with pytest.raises(ConfigError, match=r"0\.txt: Permission denied: check path and permissions"):
            corpus.read([str(path)], seed=0, sequence=16)


def test_baselines_against_values_computed_by_hand() -> None:
    """Three a and one b, plus one for each of 256 values, give 4/260, 2/260 and 1/260. All of zlib's output counts."""
    train, held_out, equal = (np.frombuffer(text, dtype=np.uint8) for text in (b"aaab", b"abbz", b"a" * 1000))
    expected = -(math.log2(4 / 260) + 2 * math.log2(2 / 260) + math.log2(1 / 260)) / 4
    assert baselines(train, held_out)["order-0 entropy coding"] == pytest.approx(expected, abs=1e-12)
    assert baselines(equal, equal)["zlib level 9"] == 8 * len(zlib.compress(b"a" * 1000, 9)) / 1000


def test_held_out_windows_predict_every_byte_once() -> None:
    """Targets are the bytes after the first, cut to whole windows; a limit above the text takes what there is."""
    text = np.arange(100, dtype=np.uint8)
    assert whole_windows(text, limit=1000, sequence=16).tolist() == list(range(97))
    assert len(whole_windows(text, limit=5, sequence=16)) == 17
