"""The text of a run: which files, which of them are held out, which bytes form a batch, and baselines.

Tokens are bytes. Nothing here needs torch or a process group, so that wrong input is reported before any worker starts.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fullshard.train.config import ConfigError

Bytes = npt.NDArray[np.uint8]
HELD_OUT = 0.05  # share of the bytes that validation should get
HELD_OUT_MOST = 0.10  # and the most it may get
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}  # folders


@dataclass(frozen=True)
class Corpus:
    """Text split by file into training and validation bytes.

    Attributes:
        source: where the text comes from, for people.
        train: training bytes, uint8 of shape `(N,)`.
        validation: held-out bytes, uint8 of shape `(M,)`, in an order drawn from the seed.
        train_files: files whose bytes are in `train`.
        validation_files: files whose bytes are in `validation`; disjoint from `train_files` unless `note` says so.
        sha256: digest of all bytes and of the split.
        note: says that a file was cut; empty if none was.
    """

    source: str
    train: Bytes
    validation: Bytes
    train_files: tuple[Path, ...]
    validation_files: tuple[Path, ...]
    sha256: str
    note: str = ""


class TextFile(NamedTuple):
    """Path and content of a file."""

    path: Path
    content: bytes


def read(data: Sequence[str], *, seed: int, sequence: int) -> Corpus:
    """Read and split the text of a run.

    Args:
        data: files and folders; folders are read recursively, without hidden, empty and binary files. Empty:
            the source code of the running Python's standard library.
        seed: decides which files are held out.
        sequence: context length in bytes; both parts must hold more than one sequence.

    Raises:
        ConfigError: the text is missing, unreadable, empty or too small.
    """
    if data:
        source = ", ".join(data)
        files = [file for item in data for file in _read_path(Path(item))]
    else:
        source = f"source code of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
        files = _read_folder(Path(sysconfig.get_path("stdlib")), suffix=".py")
    # Of files with equal content one is kept: none may be on both sides.
    distinct = {hashlib.sha256(file.content).digest(): file for file in reversed(files)}
    total = sum(len(file.content) for file in distinct.values())
    needed = 4 * (sequence + 1)
    if total < needed:
        raise ConfigError(
            f"{source} has {total} bytes of text; at least {needed} are needed with --sequence {sequence}: "
            f"pass more text, or lower --sequence"
        )
    # Sorted by content, so that the split depends on the text and the seed, not on where it lies.
    ordered = [distinct[digest] for digest in sorted(distinct)]
    shuffled = [ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))]
    kept, held, note = _split(shuffled, sequence + 1)
    texts = [b"".join(file.content for file in part) for part in (kept, held)]
    digest = hashlib.sha256(len(texts[0]).to_bytes(8, "little") + texts[0] + texts[1]).hexdigest()
    train, validation = (np.frombuffer(text, dtype=np.uint8) for text in texts)
    train_files, validation_files = (tuple(file.path for file in part) for part in (kept, held))
    return Corpus(source, train, validation, train_files, validation_files, digest, note)


def sample(
    text: Bytes, *, batch: int, sequence: int, key: Sequence[int], part: tuple[int, int] = (0, 1)
) -> npt.NDArray[np.int64]:
    """Draw one rank's `batch` windows of `sequence + 1` bytes: a pure function of its arguments.

    The parts are cut from one draw for all of them, so that a batch of 16 is the same windows in the same order
    whether two ranks have 8 each or four have 4.

    Args:
        text: bytes to draw from, more than `sequence`.
        batch: number of windows in a part.
        sequence: tokens that the model sees.
        key: seed and step, on which the draw depends.
        part: the rank and the number of ranks.
    """
    own, parts = part
    starts = np.random.default_rng(list(key)).integers(0, len(text) - sequence, size=batch * parts)
    return windows(text, starts[own * batch : (own + 1) * batch], sequence)


def windows(text: Bytes, starts: npt.NDArray[np.int64], sequence: int) -> npt.NDArray[np.int64]:
    """Return the windows of `sequence + 1` bytes at `starts`, int64 of shape `(len(starts), sequence + 1)`."""
    pairs: npt.NDArray[np.int64] = text[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
    return pairs


def whole_windows(validation: Bytes, limit: int, sequence: int) -> Bytes:
    """Return the first `limit` of the held-out bytes, cut to whole windows, at least one, and the byte before them.

    Every byte but the first is predicted exactly once, from those before it in its window.
    """
    count = max(1, min(limit, len(validation) - 1) // sequence)
    return validation[: count * sequence + 1]


def baselines(train: Bytes, held_out: Bytes) -> dict[str, float]:
    """Return the bits per byte of `held_out` for simple compressors, by name.

    Order-0 coding is an ideal entropy coder with the frequencies of the bytes in `train`, one added to every count;
    zlib compresses the held-out bytes as one stream, headers included.
    """
    counts = np.bincount(train, minlength=256) + 1
    order0 = -np.log2(counts / counts.sum())
    return {
        "order-0 entropy coding": float(order0[held_out].mean()),
        "zlib level 9": 8 * len(zlib.compress(held_out.tobytes(), 9)) / len(held_out),
    }


def _read_path(path: Path) -> list[TextFile]:
    """Read a file as it is, or the text files of a folder."""
    files = _read_folder(path) if path.is_dir() else [TextFile(path, _content(path))]
    if not files:
        raise ConfigError(f"no text in the folder {path}: it has no non-empty text file")
    if not files[0].content:
        raise ConfigError(f"{path} is empty: pass a file or folder with text")
    return files


def _read_folder(root: Path, suffix: str = "") -> list[TextFile]:
    """Read all text files under `root` in sorted order, except hidden ones, caches and installed packages."""
    files: list[TextFile] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(suffix) and name[0] != "."):
            content = _content(path) if path.is_file() else b""
            if content and b"\0" not in content[:8192]:
                files.append(TextFile(path, content))
    return files


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}: check path and permissions") from error


def _split(files: list[TextFile], least: int) -> tuple[list[TextFile], list[TextFile], str]:
    """Hold out whole files, or, with a note, the tail of the largest file if that would be too little or too much."""
    total, held, size = sum(len(file.content) for file in files), list[TextFile](), 0
    for file in files:
        if size < max(least, HELD_OUT * total) and size + len(file.content) <= HELD_OUT_MOST * total:
            held.append(file)
            size += len(file.content)
    if size >= least:
        return [file for file in files if file not in held], held, ""
    largest = max(files, key=lambda file: len(file.content))
    tail = max(least, len(largest.content) // 10)
    note = f"too few files to hold out whole ones: the last {tail} bytes of {largest.path.name} are held out"
    train = [TextFile(file.path, file.content[:-tail]) if file is largest else file for file in files]
    return train, [TextFile(largest.path, largest.content[-tail:])], note
