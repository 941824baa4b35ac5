"""Operators by what they do to memory: copies, other kernels, and allocations.

A dispatch mode sees every operator below autograd, also those of backward. Operators on tensors of more than
``LEFT_OUT_BYTES`` are not run: their effect on memory is that their outputs exist, and so blocks of a billion
parameters are counted in their true shapes on a small machine, whose memory is promised and not touched.
Storages that are resized are seen where torch's Python class does it; who does that in C++ is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.nccl_counts import kernels
from bench.nccl_counts.group import ALL_GATHER, Journal
from bench.nccl_counts.kernels import Kernels

LEFT_OUT_BYTES = 1 << 16

_ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
_VIEWS = {"aten::_unsafe_view", "aten::set_", "aten::_reshape_alias", "aten::resize_"}
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


@dataclass(frozen=True)
class Operation:
    """One operator that runs kernels. ``read`` and ``written`` are bytes."""

    name: str  # as ``aten::copy_``
    phase: str  # of the step
    copies: bool
    leaves_gather: bool  # of a copy: it reads what an all-gather has written
    read: int
    written: int
    kernels: Kernels  # of a copy, on CUDA; else 1


class Recorder(TorchDispatchMode):
    """Records as long as it is entered, and ``phase`` is not empty.

    Args:
        journal: Tells what was gathered.
    """

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.phase, self._journal = "", journal
        self.operations: list[Operation] = []
        self.allocations: list[tuple[str, int]] = []  # phase and bytes
        self.reads: list[str] = []
        self._gathered: dict[int, int] = {}  # address -> end, of what all-gathers have written
        self._seen = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method, and the wrappers are calls of functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass(each) for each in tree_leaves((args, kwargs))):
            return NotImplemented  # comes again, with what is inside
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _ALLOCATIONS:
            result = func(*args, **kwargs)
            self._allocated(result)
            return result
        if func.is_view or name in _VIEWS:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        small = all(each.nbytes <= LEFT_OUT_BYTES for each in _tensors((args, kwargs)))
        result = func(*args, **kwargs) if small else _left_out(func, args, kwargs, written)
        made = [] if written or name == "fsdp::all_gather_copy_in" else _tensors(result)
        for each in made:
            self._allocated(each)
        if self.phase:
            self._note(name, args, kwargs, written or made, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, written: list[Tensor], result: Any) -> None:
        if name in _READS:
            self.reads.append(name)
            return
        copy = copied_by(name, args, kwargs, result)
        if copy is None:
            inputs, outputs, launched = _tensors((args, kwargs)), written, Kernels(1)
        else:
            outputs, inputs, launched = copy
        if not any(each.numel() for each in outputs):
            return
        leaves = copy is not None and any(self._was_gathered(each) for each in inputs)
        read, wrote = sum(each.nbytes for each in inputs), sum(each.nbytes for each in outputs)
        self.operations.append(Operation(name, self.phase, copy is not None, leaves, read, wrote, launched))

    def _was_gathered(self, tensor: Tensor) -> bool:
        self._read_journal()
        begin = tensor.data_ptr()
        return any(begin < end and address < begin + tensor.nbytes for address, end in self._gathered.items())

    def _read_journal(self) -> None:
        for each in self._journal.collectives[self._seen :]:
            if each.kind == ALL_GATHER:
                self._gathered[each.address] = each.address + each.nbytes
        self._seen = len(self._journal.collectives)

    def _allocated(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            self.allocated(tensor.data_ptr(), tensor.untyped_storage().nbytes())

    def allocated(self, address: int, nbytes: int) -> None:
        """Note memory that is new, or was freed and is used again."""
        if not nbytes:
            return
        self._read_journal()
        for begin, end in list(self._gathered.items()):
            if address < end and begin < address + nbytes:
                del self._gathered[begin]
        if self.phase:
            self.allocations.append((self.phase, nbytes))


@contextlib.contextmanager
def resizes_noted(recorder: Recorder) -> Iterator[None]:
    """Storages that grow are allocations, as long as the block lasts."""
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, nbytes: int) -> Any:
        grows = nbytes > storage.nbytes()
        result = resize(storage, nbytes)
        if grows and storage.device.type == "cpu":
            recorder.allocated(storage.data_ptr(), nbytes)
        return result

    torch.UntypedStorage.resize_ = noted
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def copied_by(name: str, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor], Kernels] | None:
    """Targets, sources and kernels of an operator that copies; None of another."""
    match name.partition("::")[2]:
        case "copy_":
            return [args[0]], [args[1]], kernels.of_copy(args[0], args[1])
        case "clone" | "_to_copy" | "contiguous":
            return [result], [args[0]], kernels.of_copy(result, args[0])
        case "_foreach_copy_":
            return list(args[0]), list(args[1]), kernels.of_foreach(args[0], args[1])
        case "cat":
            return [result], list(args[0]), Kernels(1)
        case "_chunk_cat" | "chunk_cat":
            (sources, target) = args[0] if args else kwargs["tensors"], kwargs.get("out", result)
            return [target], list(sources), kernels.of_chunk_cat(target, sources)
        case "split_with_sizes_copy":
            targets = list(kwargs["out"]) if "out" in kwargs else list(result)
            source = args[0] if args else kwargs["all_gather_output"]
            return targets, [source], kernels.of_split(targets, source)
        case "all_gather_copy_in":
            targets = list(torch.split(result[0], args[2]))
            return targets, list(args[0]), kernels.of_foreach(targets, args[0])
    return None


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    changed: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            changed += _tensors(value)
    return changed


def _left_out(func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
    """What the operator would return, without its arithmetic."""
    if func._schema.name == "fsdp::all_gather_copy_in":
        return args[1].narrow(0, args[3] * args[4], args[3]), args[1]
    if written:
        returned = func._schema.returns
        return None if not returned else written[0] if len(returned) == 1 and len(written) == 1 else tuple(written)
    device = next(each.device for each in _tensors((args, kwargs)))

    def as_meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    meta_args, meta_kwargs = tree_map_only(Tensor, as_meta, (args, dict(kwargs)))
    meta_kwargs = {name: torch.device("meta") if isinstance(v, torch.device) else v for name, v in meta_kwargs.items()}
    found = func(*meta_args, **meta_kwargs)
    target = kwargs.get("device") or device
    return tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=target), found
    )
