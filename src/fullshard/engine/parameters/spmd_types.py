"""Parameters that are annotated with spmd_types: plain tensors with a type for each axis of a mesh.

The annotation says what a ``DTensor`` would: ``R`` and ``I`` are replicated, ``S(dim)`` is sharded. The gradient of
``R`` is ``P``, still to be summed; those of ``I`` and ``S(dim)`` are as the parameter. So such a parameter is stored as
the DTensor whose local tensor it is, and computed with as the plain tensor with its annotation.

Source: https://github.com/meta-pytorch/spmd_types. The package is not imported here: whoever annotates has done so.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from fullshard.comm.mesh import WholeMesh

__all__ = ["SpmdTypes", "copy_types", "spmd_checker", "unchecked"]


Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def spmd_checker() -> Any | None:
    """Return the package spmd_types if it checks types on this thread now, else None."""
    package = sys.modules.get("spmd_types")
    return package if package is not None and package.is_type_checking() else None


def unchecked(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Have a function run without checks of types, because it computes with tensors that have none."""

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        checker = spmd_checker()
        if checker is None:
            return function(*args, **kwargs)
        with checker.no_typecheck():
            return function(*args, **kwargs)

    return run


def copy_types(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Copy the annotation of ``source`` to ``copy``, which has the same values."""
    package = sys.modules["spmd_types"]
    if package.has_local_type(source):
        package.assert_type_like(copy, source)


class SpmdTypes:
    """The annotation of one parameter.

    Args:
        parameter: The annotated parameter.
        whole: The mesh passed to ``fully_shard``, with all axes, and those of it that are data-parallel.

    Raises:
        ValueError: If the annotation does not say how the parameter lies on all other axes of the mesh, or says more
            than that it is replicated on the data-parallel ones.
    """

    spec: DTensorSpec  # of the DTensor whose local tensor the parameter is
    gradient: tuple[Placement, ...]  # of its gradient ahead of all reductions

    def __init__(self, parameter: torch.Tensor, whole: WholeMesh) -> None:
        package, mesh = sys.modules["spmd_types"], whole.device_mesh
        names = mesh.mesh_dim_names or ()
        axes = {name: package.MeshAxis.of(mesh.get_group(name)) for name in names}
        data = [axes.pop(name) for name in names if name in whole.dims.shard_names + whole.dims.replicate_names]
        data_axis, annotated = _joined(data), dict(package.get_local_type(parameter))
        self._partition_spec = package.get_partition_spec(parameter)
        checked = _checked_axes(annotated, [*data, *axes.values()])
        self._types = {axis: annotated.get(axis, package.R) for axis in checked}
        if self._partition_spec is not None:
            _check_order(self._partition_spec, list(axes.values()))
            annotated |= importlib.import_module("spmd_types.types").partition_spec_to_shard_types(self._partition_spec)
        for axis, kind in annotated.items():
            if data_axis is not None and axis <= data_axis:
                if kind is not package.R:
                    raise ValueError(f"expected spmd_types.R on the data-parallel axis {axis}, found {kind}")
            elif axis not in axes.values():
                raise ValueError(f"annotated with {kind} on {axis}, which is no axis of the mesh {names}")
        types = [package.R if name not in axes else _type_on(name, axes[name], annotated, package) for name in names]
        place = package.spmd_type_to_dtensor_placement
        placements, self.gradient = map(place, types), tuple(place(kind.backward_type()) for kind in types)
        self.spec = DTensor.from_local(parameter.detach(), mesh, tuple(placements), run_check=False)._spec

    @classmethod
    def of(cls, parameter: torch.Tensor, whole: WholeMesh | None) -> SpmdTypes | None:
        """Return the annotation of ``parameter``, None if it has none.

        Args:
            parameter: A parameter as the module has it, before it is sharded.
            whole: The mesh of all axes. None: ``fully_shard`` got the data-parallel axes only.
        """
        package = sys.modules.get("spmd_types")
        if package is None or not package.get_local_type(parameter):
            return None
        if whole is None:
            raise ValueError(
                f"annotated with spmd_types on {list(package.get_local_type(parameter))}; its gradient may have to be "
                "summed over an axis that is not data-parallel: expected fully_shard(mesh=..., dp_mesh_dims=...) with "
                "the mesh of all axes, found the data-parallel ones only"
            )
        return cls(parameter, whole)

    def annotate(self, tensor: torch.Tensor) -> None:
        """Annotate the unsharded parameter, or another tensor that is replicated and sharded as it is."""
        sys.modules["spmd_types"].assert_type(tensor, self._types, partition_spec=self._partition_spec)


def _check_order(spec: Any, axes: list[Any]) -> None:
    """Raise ValueError if several axes shard a dim, but not in the order of the mesh, in which placements do."""
    for entry in sys.modules["spmd_types"].normalize_partition_spec(spec):
        several = [axes.index(axis) for axis in entry if axis in axes] if isinstance(entry, tuple) else []
        if several != sorted(several):
            raise ValueError(f"expected axes that shard one dim in the order of the mesh, {axes}, found {entry}")


def _joined(axes: list[Any]) -> Any | None:
    """Return the axis of all ranks that differ in one of ``axes``; None if they are all of size 1."""
    axes = [axis for axis in axes if axis.size() > 1]
    flatten = importlib.import_module("spmd_types._mesh_axis").flatten_axes
    return flatten(tuple(axes)) if axes else None


def _checked_axes(annotated: dict[Any, Any], stored: list[Any]) -> list[Any]:
    """Return the axes on which types are checked in the module: they may divide the ranks in another way."""
    current = sys.modules["spmd_types"].current_mesh()
    for axes in (list(annotated), list(current or ())):
        if set(annotated) <= set(axes) and _joined(axes) == _joined(stored):
            return axes
    raise ValueError(
        f"annotated with spmd_types on {list(annotated)}, which are not all axes of the mesh {stored}; annotate it on "
        "each, or call fully_shard within spmd_types.set_current_mesh(...) of a mesh of the same ranks"
    )


def _type_on(name: str, axis: Any, annotated: dict[Any, Any], package: Any) -> Any:
    if axis in annotated:
        return annotated[axis]
    if axis.size() == 1:
        return package.R
    raise ValueError(
        f"annotated with spmd_types, but not on the axis {name!r}; expected R, I or S(dim) on every axis of the mesh "
        "that is not data-parallel"
    )
