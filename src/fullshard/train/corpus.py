"""The text of a run: which files, which of them are held out, which bytes form a batch, and baselines.

Tokens are bytes. Nothing here needs torch or a process group, so that wrong input is found before any worker
starts.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fullshard.train.config import ConfigError

Bytes = npt.NDArray[np.uint8]
HELD_OUT = 0.05  # share of the bytes that validation should get
HELD_OUT_MOST = 0.10  # and the most it may get
SITE_FOLDERS = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    """Text split by file into training and validation bytes.

    Attributes:
        source: what the text is, for people.
        train: training bytes, uint8 of shape `(N,)`.
        validation: held-out bytes, uint8 of shape `(M,)`, in an order drawn from the seed.
        train_files: files whose bytes are in `train`.
        validation_files: files whose bytes are in `validation`; disjoint from `train_files` unless `notes`
            says so.
        sha256: digest of all bytes and of the split.
        notes: what a user should know about how the text was read.
    """

    source: str
    train: Bytes
    validation: Bytes
    train_files: tuple[Path, ...]
    validation_files: tuple[Path, ...]
    sha256: str
    notes: tuple[str, ...] = ()


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
    notes: list[str] = []
    if data:
        source = ", ".join(data)
        files = [file for item in data for file in _read_path(Path(item), notes)]
    else:
        root = Path(sysconfig.get_path("stdlib"))
        source = f"source code of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
        files = _read_folder(root, notes, suffix=".py")
        if not files:
            raise ConfigError(f"no Python source files under {root}: pass a file or folder of text to train on")
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
    parts = _split([ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))], sequence + 1, notes)
    digest = hashlib.sha256()
    for part in parts:
        for file in part:
            digest.update(len(file.content).to_bytes(8, "little") + file.content)
        digest.update(b"|")
    train, validation = (np.frombuffer(b"".join(file.content for file in part), dtype=np.uint8) for part in parts)
    train_files, validation_files = (tuple(file.path for file in part) for part in parts)
    return Corpus(source, train, validation, train_files, validation_files, digest.hexdigest(), tuple(notes))


def sample(
    text: Bytes, *, batch: int, sequence: int, key: Sequence[int], part: tuple[int, int] = (0, 1)
) -> npt.NDArray[np.int64]:
    """Draw one rank's part of a batch: a pure function of its arguments, independent of timing and of other batches.

    The parts are cut from one draw for all of them, so that a batch of 16 is the same windows in the same order
    whether two ranks have 8 each or four have 4.

    Args:
        text: bytes to draw from, shape `(N,)` with `N > sequence`.
        batch: number of windows B in a part.
        sequence: tokens T that the model sees.
        key: what the draw depends on: seed and step.
        part: which part, from 0, and of how many: the rank and the number of ranks.

    Returns:
        int64 of shape `(B, T + 1)`: tokens and, shifted by one, their targets.
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

    Args:
        train: uint8 of any length; order-0 coding is an ideal entropy coder with the frequencies of these bytes, one
            added to every count.
        held_out: uint8, at least one byte; zlib compresses them as one stream, headers included.
    """
    counts = np.bincount(train, minlength=256) + 1
    order0 = -np.log2(counts / counts.sum())
    return {
        "order-0 entropy coding": float(order0[held_out].mean()),
        "zlib level 9": 8 * len(zlib.compress(held_out.tobytes(), 9)) / len(held_out),
    }


def _read_path(path: Path, notes: list[str]) -> list[TextFile]:
    """Read a file as it is, or search a folder."""
    if path.is_dir():
        found = _read_folder(path, notes)
        if not found:
            raise ConfigError(f"no text in the folder {path}: it has no readable, non-empty text file")
        return found
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}: check path and permissions") from error
    if not content:
        raise ConfigError(f"{path} is empty: pass a file or folder with text")
    return [TextFile(path, content)]


def _read_folder(root: Path, notes: list[str], suffix: str = "") -> list[TextFile]:
    """Read all text files under `root` in sorted order; note those that cannot be read."""
    files: list[TextFile] = []
    unreadable: list[Path] = []
    for path in _walk(root, suffix):
        try:
            content = path.read_bytes()
        except OSError:
            unreadable.append(path)
            continue
        if content and b"\0" not in content[:8192]:
            files.append(TextFile(path, content))
    if unreadable:
        notes.append(f"skipped unreadable files: {len(unreadable)}; the first is {unreadable[0]}")
    return files


def _walk(root: Path, suffix: str) -> Iterator[Path]:
    """Yield regular files under `root`, sorted, except hidden files, caches and installed packages."""
    for folder, folders, names in os.walk(root):
        skip = SITE_FOLDERS | {"__pycache__"}
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _split(files: list[TextFile], least: int, notes: list[str]) -> tuple[list[TextFile], list[TextFile]]:
    """Hold out whole files, or the tail of the largest file if no choice of whole files is sensible."""
    held = _choose([len(file.content) for file in files], least)
    if held:
        return [file for i, file in enumerate(files) if i not in held], [files[i] for i in held]
    largest = max(files, key=lambda file: len(file.content))
    cut = len(largest.content) - max(least, len(largest.content) // 10)
    notes.append(
        f"too few files to hold out whole ones: the last {len(largest.content) - cut} bytes of "
        f"{largest.path.name} are held out"
    )
    train = [TextFile(file.path, file.content[:cut]) if file is largest else file for file in files]
    return train, [TextFile(largest.path, largest.content[cut:])]


def _choose(sizes: list[int], least: int) -> list[int]:
    """Return the indices of the files to hold out; empty if no whole files fit."""
    total, held, size = sum(sizes), list[int](), 0
    for index, extra in enumerate(sizes):
        if size >= max(least, HELD_OUT * total):
            break
        if size + extra <= HELD_OUT_MOST * total:
            held.append(index)
            size += extra
    if size >= least:
        return held
    # A handful of files: one whole file of up to a third of the text is still better than a torn one.
    fitting = [index for index, extra in enumerate(sizes) if extra >= least and extra <= total / 3]
    return [min(fitting, key=lambda index: sizes[index])] if fitting else []
