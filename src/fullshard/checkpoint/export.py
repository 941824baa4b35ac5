"""``fullshard.export_safetensors``: full weights as safetensors files, every rank writing what it holds.

[Note: Export without gathering]
Where every byte of every file belongs follows from names, shapes and dtypes, which all ranks know. So one rank makes
the files, headers first and at full length, under temporary names, and then all ranks write their pieces into them at
the same time; weights do not travel between ranks. What several ranks hold is written by one of them. At the end the
files get their names, the index last. That needs a folder that all ranks see; elsewhere the group's first rank writes
all, tensor by tensor, as :func:`fullshard.full_tensors` gathers them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.entry import Entry, entered
from fullshard.checkpoint.file_pieces import PieceMover
from fullshard.checkpoint.host import plain
from fullshard.checkpoint.model_state import ModelState, model_state
from fullshard.checkpoint.pieces import Piece, Pieces
from fullshard.checkpoint.safetensors_files import (
    INDEX_NAME,
    SINGLE_NAME,
    FilePlan,
    TensorKind,
    index_text,
    local_path,
    plan_files,
    read_index,
    shortened,
)
from fullshard.checkpoint.stream import full_tensors
from fullshard.errors import CheckpointError, UnmaterializedParameterError

__all__ = ["ALIASES", "TEMPORARY", "export_safetensors"]

ALIASES = "aliases"  # in the metadata: further names of tied parameters, each with the one that is in the files
_LOOKS, _LOOK_S = 5, 0.2  # how often to look for the folder: a network file system may show it late
_AGREED_BYTES = 16 * 1024 * 1024  # of what ranks tell each other at a time
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
TEMPORARY = re.compile(r"\.model[-.\w]*\.[0-9a-f]{16}\.tmp")


def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    sync: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the full weights of ``model`` in the Hugging Face layout. All ranks call it.

    ``model.safetensors``, or with more than ``max_shard_bytes`` files ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``. Parameters and persistent buffers, with their names as before wrapping; a tied
    parameter is written once, its further names are in the metadata under "aliases", where
    :func:`fullshard.load_safetensors` finds them. Extra state of modules is left out.

    Every rank writes its own shards into the files, and a few megabytes of memory are all that is needed for it. If
    the ranks do not see the same ``folder``, the group's first one writes alone, which takes longer and needs room for
    a group of full tensors, as :func:`full_tensors`.

    Args:
        model: Of either front end, DistributedDataParallel or plain; between steps.
        folder: Made if need be. Weights that are there in this layout are replaced; while that happens, readers find
            the old ones, the new ones, or none, never a mixture.
        dtype: Convert floating-point tensors to it. None: as they are.
        max_shard_bytes: Of tensors in one file; a larger tensor has a file of its own.
        metadata: Further texts for the headers of the files.
        sync: Wait until the files are on the disk, so that they survive a power failure.
        process_group: The ranks that hold the model. None: all.

    Raises:
        ValueError: If an argument is wrong, or a tensor cannot be written in this format.
        CheckpointError: On all ranks, if one of them cannot write; it names the rank and the file. Or if the ranks of
            ``process_group`` do not hold all of the model between them. What was written is removed.
        PhaseError: If a unit is in the middle of a step.
        FullshardError: On the ranks that wait, if others do not export.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"export_safetensors: dtype: expected a floating-point dtype, found {dtype}")
    if max_shard_bytes <= 0:
        raise ValueError(f"export_safetensors: max_shard_bytes: expected a positive number, found {max_shard_bytes}")
    texts = dict(metadata or {})
    wrong = [key for key, text in texts.items() if not isinstance(key, str) or not isinstance(text, str)]
    if wrong or ALIASES in texts:
        raise ValueError(f"export_safetensors: metadata: expected texts by names other than {ALIASES!r}, found {texts}")
    path = local_path("export_safetensors: folder", folder)
    with entered(f"export_safetensors {path}", process_group) as entry:
        state = entry.together("planning", lambda: _checked(model))
        kinds = {name: _kind(pieces, dtype) for name, pieces in state.tensors.items()}
        plans = entry.together("planning", lambda: plan_files(kinds, max_shard_bytes, _header_texts(texts, state)))
        _compare(entry, kinds)
        token = entry.from_first("making the folder", lambda: _make_folder(path))
        files = _Files(path, plans, token, sync)
        try:
            shared = not entry.any("looking for the folder", lambda: not files.is_folder_seen())
            _on_first(entry, "making files", files.make)
            if shared:
                own, partial = _shares(state, process_group)
                entry.together("dividing", lambda: _refuse(partial, state))
                entry.together("writing", lambda: files.write(own))
            else:
                error = files.write_stream(full_tensors(model, dtype=dtype), writes=entry.rank == 0)
                entry.together("writing", lambda: _raise(error))
            _on_first(entry, "naming files", lambda: files.publish(texts))
        finally:
            if entry.rank == 0:
                files.clean_up()


def _on_first(entry: Entry, step: str, function: Callable[[], None]) -> None:
    entry.together(step, function if entry.rank == 0 else lambda: None)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


# -------------------------------------------------------------------- what is written


def _checked(model: nn.Module) -> ModelState:
    """The state of a model, if all of it can be written."""
    state = model_state(model)
    for name, pieces in state.tensors.items():
        if pieces.device.type == "meta":
            raise UnmaterializedParameterError(f"{name} is on the meta device: there is nothing to write yet")
        for piece in pieces.pieces:
            try:
                plain(piece.local)
            except TypeError as error:
                raise ValueError(f"{name} cannot be written to a safetensors file: {error}") from error
    return state


def _kind(pieces: Pieces, dtype: torch.dtype | None) -> TensorKind:
    casts = dtype is not None and pieces.dtype.is_floating_point
    return TensorKind(dtype if casts and dtype is not None else pieces.dtype, tuple(pieces.shape))


def _header_texts(texts: Mapping[str, str], state: ModelState) -> dict[str, str]:
    aliases = {ALIASES: json.dumps(state.aliases)} if state.aliases else {}
    return {"format": "pt", **texts, **aliases}  # the format is what some readers insist on


def _compare(entry: Entry, kinds: Mapping[str, TensorKind]) -> None:
    """Raise if ranks do not hold parts of the same tensors: pipeline stages, for example."""
    listed = repr([(name, str(kind.dtype), kind.shape) for name, kind in kinds.items()])
    digest = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
    expected = entry.from_first("comparing", lambda: digest)

    def compare() -> None:
        if digest != expected:
            raise CheckpointError(
                f"this rank's model has other tensors than the first rank's (here {len(kinds)}, the first of which is "
                f"{next(iter(kinds), None)!r}); pass the process_group of the ranks that hold one model"
            )

    entry.together("comparing", compare)


Share = list[tuple[str, Piece]]


def _shares(state: ModelState, group: dist.ProcessGroup | None) -> tuple[Share, dict[str, int]]:
    """The pieces that this rank writes: all that it holds, but what several ranks hold only one of them. A collective.

    Ranks that hold the same boxes of a tensor are taken to hold the same values; the one that has least to write so far
    writes them.

    Returns:
        The pieces; and the tensors that the pieces of all ranks together are not all of, with the elements that they
        are. Those are the same on all ranks.
    """
    pieces = [(name, piece) for name, held in state.tensors.items() for piece in held.pieces if piece.box.numel]
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    size, rank = (1, 0) if alone else (dist.get_world_size(group), dist.get_rank(group))
    own = np.array([_holding(held) for held in state.tensors.values()], dtype=np.int64).reshape(-1, 3)
    loads, mine, partial = np.zeros(size, dtype=np.int64), set(), {}
    names, step = list(state.tensors), max(1, _AGREED_BYTES // (own.itemsize * 3 * size))
    for start in range(0, len(names), step):
        gathered = [own[start : start + step].tobytes()] * size
        if not alone:
            dist.all_gather_object(gathered, gathered[0], group)
        table = np.stack([np.frombuffer(each, dtype=np.int64).reshape(-1, 3) for each in gathered])
        for name, column in zip(names[start : start + step], table.transpose(1, 0, 2), strict=True):
            writers = _writers(column, loads)
            loads[writers] += column[writers, 1]
            if rank in writers:
                mine.add(name)
            numel = int(column[writers, 2].sum())
            if numel != state.tensors[name].shape.numel():
                partial[name] = numel
    return [(name, piece) for name, piece in pieces if name in mine], partial


def _refuse(partial: Mapping[str, int], state: ModelState) -> None:
    """Raise if there are tensors that nobody would write all of: what is left out would be zeros in the files."""
    if partial:
        listed = [
            f"{name} (expected {state.tensors[name].shape.numel()} elements, found {numel})"
            for name, numel in partial.items()
        ]
        raise CheckpointError(
            f"the ranks that export do not hold all of these tensors between them: {shortened(listed)}; call it on all "
            "ranks that the model is sharded over, and pass their process_group, or None for all ranks"
        )


def _holding(pieces: Pieces) -> tuple[int, int, int]:
    """Which part of a tensor is here, as a number that is 0 for nothing, its bytes, and its elements."""
    boxes = [(piece.box.offsets, piece.box.sizes) for piece in pieces.pieces if piece.box.numel]
    digest = hashlib.blake2b(repr(boxes).encode(), digest_size=8).digest()
    numel = sum(piece.box.numel for piece in pieces.pieces)
    return (int.from_bytes(digest, "little", signed=True) | 1 if boxes else 0), pieces.nbytes, numel


def _writers(column: np.ndarray, loads: np.ndarray) -> list[int]:
    """One rank for each different part of a tensor."""
    order = np.lexsort((np.arange(len(loads)), loads, column[:, 0]))
    _, first = np.unique(column[order, 0], return_index=True)
    return [int(rank) for rank in order[first] if column[rank, 0]]


# -------------------------------------------------------------------- files


def _make_folder(path: Path) -> str:
    """Make the folder, and a file in it by which other ranks can see whether it is the same."""
    token = secrets.token_hex(8)
    with _explained(path):
        path.mkdir(parents=True, exist_ok=True)
        _token_file(path, token).touch()
    return token


def _token_file(path: Path, token: str) -> Path:
    return path / f".model.{token}.tmp"


@dataclass(frozen=True)
class _Files:
    """The files of one export.

    Args:
        folder: Where.
        plans: What.
        token: In the temporary names.
        sync: Whether they have to be on the disk before they get their names.
    """

    folder: Path
    plans: Sequence[FilePlan]
    token: str
    sync: bool

    def is_folder_seen(self) -> bool:
        """Whether this rank sees the same folder as the first one."""
        for look in range(_LOOKS):
            if _token_file(self.folder, self.token).exists():
                return True
            time.sleep(_LOOK_S if look + 1 < _LOOKS else 0)
        return False

    def make(self) -> None:
        """Make them all, with their headers and at full length; remove what exports that were killed have left."""
        for left in self.folder.iterdir():
            if TEMPORARY.fullmatch(left.name) and self.token not in left.name:
                left.unlink(missing_ok=True)
        for plan in self.plans:
            with _explained(self._temporary(plan)), self._temporary(plan).open("wb") as file:
                file.write(plan.header)
                file.truncate(plan.size)

    def write(self, share: Share) -> None:
        """Write pieces into their places."""
        plan_of = {name: index for index, plan in enumerate(self.plans) for name in plan.tensors}
        files: dict[int, Share] = {}
        for name, piece in share:
            files.setdefault(plan_of[name], []).append((name, piece))
        mover = PieceMover()
        for index in sorted(files):
            places = self.plans[index].tensors
            with self._opened(self.plans[index], sync=self.sync) as descriptor:
                for name, piece in files[index]:
                    mover.write(descriptor, places[name], piece)

    def write_stream(self, tensors: Iterator[tuple[str, torch.Tensor]], *, writes: bool) -> Exception | None:
        """Write full tensors as they come. A rank that does not write takes part in gathering them, as does one that
        cannot write any more.

        Returns:
            Why not.
        """
        error: Exception | None = None
        mover, plan_of = PieceMover(), {name: plan for plan in self.plans for name in plan.tensors}
        for name, tensor in tensors:
            if not writes or error is not None or name not in plan_of:  # other names of tied ones
                continue
            try:
                with self._opened(plan_of[name], sync=False) as descriptor:
                    mover.write(descriptor, plan_of[name].tensors[name], Pieces.whole(tensor).pieces[0])
            except Exception as raised:  # whatever it is: the other ranks are waiting for this one to gather
                error = raised
        return error

    def publish(self, texts: Mapping[str, str]) -> None:
        """Give them their names, and remove what they replace."""
        with _explained(self.folder):
            index, single = self.folder / INDEX_NAME, self.folder / SINGLE_NAME
            replaced = self._replaced(index)
            if len(self.plans) > 1:
                index.unlink(missing_ok=True)  # from here on, files may be of both: rather none than these
            for plan in self.plans:
                _sync(self._temporary(plan), self.sync)  # what this rank has written, also as a stream
                self._temporary(plan).replace(self.folder / plan.name)
            if len(self.plans) > 1:
                made = _token_file(self.folder, self.token)
                made.write_text(index_text(self.plans, texts))
                _sync(made, self.sync)
                made.replace(index)
                single.unlink(missing_ok=True)  # last: while it is there, readers take it
            else:
                index.unlink(missing_ok=True)
            for name in replaced:
                (self.folder / name).unlink(missing_ok=True)
            _sync(self.folder, self.sync)

    def clean_up(self) -> None:
        """Remove what has no name yet."""
        for path in (_token_file(self.folder, self.token), *map(self._temporary, self.plans)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _temporary(self, plan: FilePlan) -> Path:
        return self.folder / f".{plan.name}.{self.token}.tmp"

    @contextlib.contextmanager
    def _opened(self, plan: FilePlan, *, sync: bool) -> Iterator[int]:
        path = self._temporary(plan)
        with _explained(self.folder / plan.name):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                yield descriptor
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _replaced(self, index: Path) -> set[str]:
        """The files of an earlier export that this one does not write anew."""
        try:
            names = set(read_index(index).values())
        except CheckpointError:  # there is none
            return set()
        return {name for name in names if _NUMBERED.fullmatch(name)} - {plan.name for plan in self.plans}


def _sync(path: Path, sync: bool) -> None:
    if sync:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
