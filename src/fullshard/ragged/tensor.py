"""``RaggedDTensor``: a DTensor whose shards are slices of any length, with the placement ``RaggedShard``.

[Note: Ragged DTensors]
``Shard(0)`` fixes how many rows each rank has, and torch's sharding propagation knows no other placement: it refuses
most operations on one, and computes some (``view``, ``t``, ``softmax``) as if local and global shapes were the same.
So the tensor is a subclass that dispatches itself:
- operations on every element run on local tensors; operands of the global shape are cut alike;
- random ones draw all elements on every rank, and keep this rank's: with equal seeds, what one process would draw;
- reductions to one number add an all-gather of one number a rank;
- ``full_tensor`` and ``redistribute`` gather; everything else raises ``NotImplementedError``.
Shape, placements and mesh are global as those of any DTensor; distributed checkpoint sees the shards as chunks.

What lost: plain local tensors with metadata, as the wrapper has them. torch's ``clip_grad_norm_``, or
``get_model_state_dict``, would take a shard for the parameter without a word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from fullshard.engine import hooks
from fullshard.engine.parameters.placement import dtensor, register_placement, with_dtype
from fullshard.engine.parameters.tensor_shards import IrregularDTensor, View, gather_ranges, regions_of_slice
from fullshard.layout import Region
from fullshard.ragged.placement import RaggedShard, hashed, part_here, ragged_placement, view_here

__all__ = ["RaggedDTensor", "make_ragged", "part_of"]


class RaggedDTensor(IrregularDTensor):
    """A DTensor with ``RaggedShard`` on one mesh axis, and replicated on others. See [Note: Ragged DTensors]."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, see [Note: Ragged DTensors]."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_foreach_norm":
            return _foreach_norm(*args, **kwargs)
        if name in _ON_LISTS:
            return _run_on_lists(func, args, kwargs)
        written = [value for value in _written(func, args, kwargs) if isinstance(value, torch.Tensor)]
        if not all(isinstance(value, RaggedDTensor) for value in written):  # such as a replicated gradient
            return func(*map(_whole, args), **{key: _whole(value) for key, value in kwargs.items()})
        first = next(value for value in tree_leaves((written, args, kwargs)) if isinstance(value, RaggedDTensor))
        if name in _RUNS:
            return _RUNS[name](func, first, args, kwargs)
        if _keeps_shape(name, first, args):
            return make_ragged(first._local_tensor.view_as(first._local_tensor), first._spec)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if name in _LOCAL or (torch.Tag.pointwise in func.tags and not random):
            return _run_locally(func, first, args, kwargs)
        raise NotImplementedError(
            f"{func}: not available for a parameter that is sharded with layout='ragged' (shape {tuple(first.shape)}), "
            "whose ranks hold parts of different sizes. Use full_tensor() for all of its values, to_local() for this "
            "rank's, or the per-parameter layout"
        )

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> DTensor:
        """Make the tensor from its parts, as ``torch.compile`` does."""
        unflatten: Any = DTensor.__tensor_unflatten__
        made = unflatten(inner_tensors, flatten_spec, outer_size, outer_stride)
        ragged: Any = DTensor.__new__(
            RaggedDTensor, made._local_tensor, hashed(made._spec), requires_grad=made.requires_grad
        )
        return cast("DTensor", ragged)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        mesh, placements = self._spec.mesh, self._spec.placements
        return f"RaggedDTensor(local_tensor={self._local_tensor}, device_mesh={mesh}, placements={placements})"

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's part.

        Args:
            grad_placements: Placements of its gradient; None: those of this tensor, and no others exist.
        """
        local, spec = self._local_tensor, self._spec
        if not (torch.is_grad_enabled() and self.requires_grad):
            return local
        shown = hooks.differentiable(self, lambda _: local.view_as(local), lambda gradient: make_ragged(gradient, spec))
        return cast("torch.Tensor", shown)

    def unsharded(self) -> DTensor:
        """Return the DTensor with ``Replicate()`` instead of ``RaggedShard``. A collective."""
        spec = self._spec
        if not (torch.is_grad_enabled() and self.requires_grad):
            return _gathered(self)
        whole = hooks.differentiable(
            self,
            lambda _: _gathered(self),
            lambda gradient: make_ragged(part_of(gradient, spec), spec),
        )
        return cast("DTensor", whole)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Return the DTensor with other placements: by an all-gather, unless they are the same. A collective.

        Args:
            device_mesh: None: the same mesh.
            placements: One for each mesh axis, none of them another ``RaggedShard``.
            options: As of ``DTensor.redistribute``.
        """
        if placements is None:
            raise RuntimeError("redistribute: expected placements, found None")
        if tuple(placements) == self._spec.placements and (device_mesh is None or device_mesh == self._spec.mesh):
            return self
        if any(type(placement) is RaggedShard for placement in placements):
            raise NotImplementedError(
                f"redistribute: expected Shard or Replicate, found {tuple(placements)} for a tensor with "
                f"{self._spec.placements}; gather with full_tensor(), and copy_() it into a parameter of that layout"
            )
        return self.unsharded().redistribute(device_mesh, placements, **options)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its graph. Assigned, one of the same placements gives its local tensor."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, RaggedDTensor) and value._spec == self._spec:
            self._local_tensor = value._local_tensor.detach()
        else:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    # ---------------------------------------------------------------- what ranks hold of it, see [Note: Tensor shards]

    def view_at(self, coordinate: Sequence[int]) -> View:
        """Return the shard of the rank at ``coordinate`` of the mesh."""
        axis, placement = ragged_placement(self._spec)
        return placement.view(coordinate[axis])

    def regions(self) -> list[tuple[Region, torch.Tensor]]:
        """Return the regions of the tensor that this rank holds, and its memory of each."""
        if not self.numel():  # it has to be in a checkpoint all the same: every rank holds all of it
            return [(Region.whole(self.shape), self._local_tensor.detach().new_empty(self.shape))]
        axis, placement = ragged_placement(self._spec)
        own, shard = placement.slot.parameter, placement.slot.shard(self._spec.mesh.get_local_rank(axis))
        local = self._local_tensor.detach()
        if not is_traceable_wrapper_subclass(local):
            return list(regions_of_slice(own.shape, own.stride, shard, local))
        if not placement.by_rows:
            raise NotImplementedError(
                f"distributed checkpoint: expected whole rows of a {type(local).__name__}, which cannot be cut, found "
                f"elements {shard.start} to {shard.start + shard.numel} of shape {tuple(self.shape)}; shard with "
                "granularity='row', or a number of rows"
            )
        begin = shard.start // max(1, math.prod(own.shape[1:]))  # of quantized state
        rows = Region((begin, *[0] * (local.dim() - 1)), tuple(local.shape))
        return [(rows, local)] if shard.numel else []

    def __create_chunk_list__(self) -> list[Any]:
        """Return the chunks that this rank holds, for distributed checkpoint."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r, _ in self.regions()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        """Return the items of the tensor that this rank writes, for distributed checkpoint."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the memory of one chunk of this rank, for distributed checkpoint."""
        for region, part in self.regions():
            if index.offset is None or tuple(index.offset) == region.offsets:
                return part
        raise ValueError(f"{index.fqn}: this rank has no chunk at {index.offset}")


register_placement(RaggedShard, RaggedDTensor)

# Operations on every element that torch does not mark as such, and those that only look at or copy a tensor.
_LOCAL = {
    "_pin_memory",
    "_to_copy",
    "alias",
    "clone",
    "copy_",
    "detach",
    "empty_like",
    "fill_",
    "full_like",
    "is_pinned",
    "is_same_size",
    "lift_fresh",
    "masked_fill",
    "masked_fill_",
    "ones_like",
    "pin_memory",
    "zero_",
    "zeros_like",
}
_FUNCTIONS = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1 floor "
    "frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh "
    "sqrt sub tan tanh trunc zero"
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_ON_LISTS = {f"_foreach_{name}{end}" for name in _FUNCTIONS.split() for end in ("", "_")}
_ON_LISTS |= {"_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_", _UNSCALE}


def _keeps_shape(name: str, tensor: RaggedDTensor, args: tuple[Any, ...]) -> bool:
    """Return True for a view of the same shape, strides and elements."""
    if name not in ("view", "_unsafe_view", "expand", "as_strided") or args[0] is not tensor or len(args) > 3:
        return False
    return tuple(args[1]) == tuple(tensor.shape) and (len(args) < 3 or tuple(args[2]) == tuple(tensor.stride()))


def make_ragged(local: torch.Tensor, spec: DTensorSpec) -> RaggedDTensor:
    """Make the ragged DTensor of ``spec``, in the dtype of ``local``."""
    return cast("RaggedDTensor", dtensor(local, hashed(with_dtype(spec, local.dtype))))


def part_of(value: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Copy this rank's part of a tensor of the global shape: a DTensor, or a plain one that all ranks have."""
    if isinstance(value, DTensor):
        value = value.redistribute(spec.mesh, [Replicate()] * spec.mesh.ndim)._local_tensor
    return part_here(value.detach(), spec).clone()


def _gathered(tensor: RaggedDTensor) -> DTensor:
    """Gather a tensor over its ragged axis, from the ranks that hold elements of it."""
    spec, local = tensor._spec, tensor._local_tensor
    axis, placement = ragged_placement(spec)
    own = placement.slot.parameter
    device = "meta" if local.is_meta else spec.mesh.device_type
    whole = torch.empty_strided(own.shape, own.stride, dtype=local.dtype, device=device)
    if not local.is_meta:
        ranges = (placement.slot.shard(rank)[:2] for rank in range(spec.mesh.size(axis)))
        gather_ranges(whole, ranges, local, spec.mesh.get_group(axis))
    placements = tuple(Replicate() if i == axis else p for i, p in enumerate(spec.placements))
    return dtensor(whole, DTensorSpec(spec.mesh, placements, tensor_meta=with_dtype(spec, local.dtype).tensor_meta))


# ---------------------------------------------------------------- operations


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    bound = _bound(func, args, kwargs)
    writes = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [bound[name] for name in writes if name in bound]


def _placed_alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Return True if the same ranks hold the same elements of two tensors."""
    return one is other or (one.placements == other.placements and one.mesh == other.mesh)


def _whole(value: Any) -> Any:
    """Gather a ragged DTensor for an operation on a tensor of another placement; return any other value as it is."""
    return value.unsharded() if isinstance(value, RaggedDTensor) else value


def _operand(value: Any, like: RaggedDTensor) -> Any:
    """Return the part of an argument of an elementwise operation that belongs to the local tensor of ``like``.

    Raises:
        NotImplementedError: If it is a tensor that would be broadcast, but for a single number.
    """
    if not isinstance(value, torch.Tensor):
        return value
    spec = like._spec
    if isinstance(value, DTensor) and _placed_alike(value._spec, spec):
        # One that is no RaggedDTensor was made by DTensor.from_local of a part, or by torch, of the whole tensor.
        local = value._local_tensor
        if type(value) is RaggedDTensor or tuple(local.shape) == view_here(spec).shape:
            return local
        return part_here(local, spec).clone()
    if not value.dim() and like.dim():
        return value.full_tensor() if isinstance(value, DTensor) else value
    if tuple(value.shape) == tuple(like.shape):
        return part_of(value, spec)
    raise NotImplementedError(
        f"expected tensors of one shape, or numbers, in an operation on a parameter that is sharded with "
        f"layout='ragged', found shapes {tuple(like.shape)} and {tuple(value.shape)}; use full_tensor()"
    )


def _check_written(value: Any, like: RaggedDTensor) -> None:
    """Raise NotImplementedError if a tensor that is written to is not sharded as ``like``: writes would be lost."""
    if type(value) is not RaggedDTensor or not _placed_alike(value._spec, like._spec):
        placed = value.placements if isinstance(value, DTensor) else "no placements"
        raise NotImplementedError(
            f"expected a RaggedDTensor with {like._spec.placements}, as the parameter (shape {tuple(like.shape)}) has, "
            f"found a {type(value).__name__} with {placed} that is written to, such as state of an optimizer; load "
            "state with fullshard.load, or copy_() it into state that the optimizer has made"
        )


def _run_locally(func: Any, first: RaggedDTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on local tensors that computes every element from those at its place."""
    for written in _written(func, args, kwargs):
        _check_written(written, first)
    args, kwargs = tree_map(lambda value: _operand(value, first), args), dict(kwargs)
    kwargs.pop("memory_format", None)  # of the local tensor it would mean something else
    kwargs = tree_map(lambda value: _operand(value, first), kwargs)
    local = first._local_tensor

    def wrap(value: Any) -> Any:
        if value is local:  # operations in place return what they were given
            return first
        return make_ragged(value, first._spec) if isinstance(value, torch.Tensor) else value

    return tree_map(wrap, func(*args, **kwargs))


def _drawn(func: Any, first: RaggedDTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the numbers of all elements, as one process would, and keep those of this rank."""
    if any(isinstance(value, torch.Tensor) and value is not first for value in (*args, *kwargs.values())):
        raise NotImplementedError(f"{func}: expected numbers as its arguments, found a tensor; use full_tensor()")
    local, own = first._local_tensor, ragged_placement(first._spec)[1].slot.parameter
    whole = torch.empty_strided(own.shape, own.stride, dtype=local.dtype, device=local.device)
    drawn = func(*(whole if value is first else value for value in args), **kwargs)
    part = part_here(drawn, first._spec)
    if func._schema.is_mutable:
        local.copy_(part)
        return first
    return make_ragged(part.clone(), first._spec)


def _new(func: Any, first: RaggedDTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Make a tensor of some shape: sharded as ``first`` if it has that shape, else replicated."""
    _, size, *rest = args
    local = first._local_tensor
    if tuple(size) == tuple(first.shape):
        return make_ragged(func(local, local.shape, *rest, **kwargs), first._spec)
    return _everywhere(func(local, size, *rest, **kwargs), first)


def _equal(func: Any, first: RaggedDTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare two tensors on all ranks."""
    if args[0].shape != args[1].shape:
        return False
    same = func(*(_operand(value, first) for value in args))
    return bool(_of_all_ranks(torch.tensor(same), first).all())


def _reduced(func: Any, first: RaggedDTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Reduce all elements to one number: what each rank makes of its part, reduced once more on all ranks."""
    name, bound = func.overloadpacket.__name__, _bound(func, args, kwargs)
    if bound.get("dim") not in (None, [], ()) or bound.get("keepdim") or "other" in bound or "out" in bound:
        raise NotImplementedError(
            f"{func}: expected a reduction of all elements of a parameter that is sharded with layout='ragged' to one "
            "number; gather it with full_tensor() first"
        )
    if name in ("linalg_vector_norm", "norm"):
        order = bound.get("ord", bound.get("p"))
        norms = _foreach_norm([first], 2.0 if order is None else order, bound.get("dtype"))
        return cast("DTensor", norms[0])
    local, dtype = first._local_tensor, bound.get("dtype") or first.dtype
    narrow = dtype in (torch.bfloat16, torch.float16)
    if name in ("sum", "mean"):
        local = local.to(torch.float32 if narrow else dtype)
    reduce = getattr(torch, "sum" if name == "mean" else name)
    axis, placement = ragged_placement(first._spec)
    holding = [rank for rank in range(first._spec.mesh.size(axis)) if placement.slot.shard(rank).numel]
    found = reduce(_of_all_ranks(reduce(local if local.numel() else local.new_zeros(1)), first)[holding])
    if name == "mean":
        found = found / first.numel()
    return _everywhere(found.to(dtype) if narrow and found.is_floating_point() else found, first)


def _of_all_ranks(value: torch.Tensor, like: RaggedDTensor) -> torch.Tensor:
    """Stack what each rank of the shard axis has computed from its part of ``like``, on all ranks."""
    mesh, placements = like._spec.mesh, like._spec.placements
    stacked = [Replicate() if placement.is_replicate() else Shard(0) for placement in placements]
    rows = DTensor.from_local(value.unsqueeze(0).to(mesh.device_type), mesh, stacked, run_check=False).full_tensor()
    return rows.to(value.device)


def _norms(tensors: Sequence[RaggedDTensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each tensor over all of its elements."""
    found: list[torch.Tensor] = []
    for same in _by_mesh(tensors):
        values = torch.stack([_local_norm(tensor._local_tensor, order) for tensor in same])
        # A norm of order 0 is a count, of which the sum is the norm of order 1.
        found += torch.linalg.vector_norm(_of_all_ranks(values, same[0]), order or 1, dim=0).unbind()
    return found


def _local_norm(local: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norm of a part, in fp32 or fp64; of a part without elements, the value that changes no other norm."""
    dtype = torch.float64 if local.dtype.itemsize > 4 else torch.float32
    if not local.numel():
        return torch.full((), math.inf if order < 0 else 0.0, dtype=dtype, device=local.device)
    found: torch.Tensor = torch.linalg.vector_norm(local.abs() if local.is_complex() else local, order, dtype=dtype)
    return found


def _by_mesh(tensors: Sequence[RaggedDTensor]) -> Iterator[list[RaggedDTensor]]:
    """Yield the tensors in order, neighbors on one mesh and of like precision together."""
    for _, together in itertools.groupby(tensors, lambda tensor: (tensor._spec.mesh, tensor.dtype.itemsize > 4)):
        yield list(together)


def _foreach_norm(tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Return the norms of a list of tensors, which need not all be ragged."""
    ragged = [tensor for tensor in tensors if isinstance(tensor, RaggedDTensor)]
    norms = iter(_norms(ragged, float(ord)))
    return [
        _everywhere(next(norms).to(dtype or tensor.dtype.to_real()), tensor)
        if isinstance(tensor, RaggedDTensor)
        else torch.linalg.vector_norm(tensor, ord, dtype=dtype)
        for tensor in tensors
    ]


def _everywhere(value: torch.Tensor, like: RaggedDTensor) -> DTensor:
    """Return what all ranks have, such as a number, as a DTensor on the mesh of ``like``."""
    mesh = like._spec.mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _run_on_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on every element of the tensors of some lists: on ragged ones, and then on the others."""
    owners, written = args[0], _written(func, args, kwargs)
    by_type: dict[type, list[int]] = {RaggedDTensor: []}
    for index, owner in enumerate(owners):
        by_type.setdefault(RaggedDTensor if isinstance(owner, RaggedDTensor) else type(owner), []).append(index)
    ragged = by_type[RaggedDTensor]
    for entries in (each for each in written if isinstance(each, (list, tuple)) and len(each) == len(owners)):
        for index in ragged:
            _check_written(entries[index], owners[index])

    def chosen(value: Any, indices: Sequence[int]) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(owners):
            number = isinstance(value, DTensor) and indices is ragged
            return value.full_tensor() if number else value
        return [_local_at(owners[index], value[index]) for index in indices]

    results: dict[int, Any] = {}
    for indices in filter(None, by_type.values()):
        given = [chosen(value, indices) for value in args]
        found = func(*given, **{key: chosen(value, indices) for key, value in kwargs.items()})
        if isinstance(found, (list, tuple)):
            results.update(zip(indices, found, strict=False))
    if func.overloadpacket.__name__ == _UNSCALE:
        for same in _by_mesh([owners[index] for index in ragged]):
            args[1].copy_(_of_all_ranks(args[1], same[0]).amax(dim=0))
    if func._schema.is_mutable:
        return owners if func._schema.returns else None
    return [
        make_ragged(results[index], owner._spec) if isinstance(owner, RaggedDTensor) else results[index]
        for index, owner in enumerate(owners)
    ]


def _local_at(owner: Any, value: Any) -> Any:
    """Return the local tensor at one place of a list; a step count, or another number, as it is."""
    if isinstance(owner, RaggedDTensor):
        return _operand(value, owner)
    if isinstance(value, RaggedDTensor):
        raise NotImplementedError(
            f"expected lists of parameters sharded alike, found a {type(owner).__name__} beside a RaggedDTensor"
            f" of shape {tuple(value.shape)}"
        )
    return value


# How operations are run that are neither on every element nor on lists. Random ones read no values of the tensor: those
# would be needed of all elements.
_RUN_BY = {
    _drawn: (
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "rand_like",
        "randn_like",
        "randint_like",
    ),
    _equal: ("equal",),
    _new: ("new_empty", "new_full", "new_ones", "new_zeros"),
    _reduced: ("sum", "mean", "linalg_vector_norm", "norm", "max", "min", "amax", "amin", "any", "all"),
}
_RUNS: dict[str, Callable[..., Any]] = {name: run for run, names in _RUN_BY.items() for name in names}
