"""The text of a run: which files, which of them are held out, and which bytes form a batch.

Tokens are bytes. Nothing here needs torch or a process group, so that wrong input is found before any worker
starts.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class TextFile:
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
        files, notes = _read_paths([Path(item) for item in data])
    else:
        root = Path(sysconfig.get_path("stdlib"))
        source = f"source code of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
        files, notes = _read_folder(root, suffix=".py")
        if not files:
            raise ConfigError(f"no Python source files under {root}: pass a file or folder of text to train on")
    total = sum(len(file.content) for file in files)
    needed = 4 * (sequence + 1)
    if total < needed:
        raise ConfigError(
            f"{source} has {total} bytes of text; at least {needed} are needed with --sequence {sequence}: "
            f"pass more text, or lower --sequence"
        )
    return _split(source, files, notes, seed=seed, least=sequence + 1)


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


def _read_paths(paths: Sequence[Path]) -> tuple[list[TextFile], list[str]]:
    """Read files as they are, and search folders; every file once."""
    files: dict[Path, TextFile] = {}
    notes: list[str] = []
    for path in paths:
        if path.is_dir():
            found, skipped = _read_folder(path)
            notes += skipped
            if not found:
                raise ConfigError(f"no text in the folder {path}: it has no readable, non-empty text file")
        else:
            try:
                found = [TextFile(path, path.read_bytes())]
            except OSError as error:
                raise ConfigError(
                    f"cannot read {path}: {error.strerror or error}: check path and permissions"
                ) from error
            if not found[0].content:
                raise ConfigError(f"{path} is empty: pass a file or folder with text")
        files.update({file.path.resolve(): file for file in found})
    return list(files.values()), notes


def _read_folder(root: Path, suffix: str = "") -> tuple[list[TextFile], list[str]]:
    """Read all text files under `root` in sorted order; return a note on those that cannot be read."""
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
    notes = [f"skipped unreadable files: {len(unreadable)}; the first is {unreadable[0]}"] if unreadable else []
    return files, notes


def _walk(root: Path, suffix: str) -> Iterator[Path]:
    """Yield regular files under `root`, sorted, except hidden files, caches and installed packages."""
    for folder, folders, names in os.walk(root):
        skip = SITE_FOLDERS | {"__pycache__"}
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _split(source: str, files: list[TextFile], notes: list[str], *, seed: int, least: int) -> Corpus:
    """Hold out whole files, or the tail of the largest file if no choice of whole files is sensible.

    Before they are shuffled, files are sorted by a digest of their content, so that the split depends on the
    text and the seed, not on where it lies. Of files with equal content one is kept: none may be on both
    sides.
    """
    distinct = {hashlib.sha256(file.content).digest(): file for file in reversed(files)}
    ordered = [distinct[digest] for digest in sorted(distinct)]
    ordered = [ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))]
    held = _choose(ordered, least)
    notes = list(notes)
    if held:
        train = [file for i, file in enumerate(ordered) if i not in held]
        validation = [ordered[i] for i in held]
    else:
        largest = max(ordered, key=lambda file: len(file.content))
        cut = len(largest.content) - max(least, len(largest.content) // 10)
        train = [TextFile(f.path, f.content[:cut]) if f is largest else f for f in ordered]
        validation = [TextFile(largest.path, largest.content[cut:])]
        notes.append(
            f"too few files to hold out whole ones: the last {len(largest.content) - cut} bytes of "
            f"{largest.path.name} are held out"
        )
    digest = hashlib.sha256()
    for part in (train, validation):
        for file in part:
            digest.update(len(file.content).to_bytes(8, "little") + file.content)
        digest.update(b"|")
    return Corpus(
        source=source,
        train=_join(train),
        validation=_join(validation),
        train_files=tuple(file.path for file in train),
        validation_files=tuple(file.path for file in validation),
        sha256=digest.hexdigest(),
        notes=tuple(notes),
    )


def _choose(files: list[TextFile], least: int) -> list[int]:
    """Return the indices of the files to hold out; empty if no whole files fit."""
    sizes = [len(file.content) for file in files]
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


def _join(files: list[TextFile]) -> Bytes:
    return np.frombuffer(b"".join(file.content for file in files), dtype=np.uint8)
