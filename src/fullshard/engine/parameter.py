"""One parameter's two faces, sharded and full, and the modules that hold it.

[Note: Sharded and full]
For each managed parameter there are three tensors:
- ``sharded``: an ``nn.Parameter`` that is a ``DTensor`` with ``Shard(0)`` (0-D: ``Replicate()``). It is what the
  module holds at rest, what optimizers and state dicts see. Its local tensor is
- ``local``: this rank's rows, a view of the bucket's shard buffer;
- ``full``: a plain ``nn.Parameter`` on the bucket's full buffer. It is what the module holds while it computes
  and the leaf whose ``.grad`` autograd fills. It is created once, so compiled code and saved tensors keep it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Replicate, Shard

from fullshard.engine.mesh import ShardMesh
from fullshard.layout import ParameterShape, Route, Slot
from fullshard.layout.per_parameter import contiguous_stride, is_dense

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["Owner", "ShardedParameter", "dtensor", "managed_by", "parameter_shape"]

_MANAGED_BY = "_fullshard_parameter"  # attribute of parameter objects: weak reference to the ShardedParameter


class Owner(NamedTuple):
    """A module attribute that holds the parameter; tied parameters have several."""

    module: weakref.ref[nn.Module]  # weak: the module owns the unit, which owns this
    parameters: dict[str, nn.Parameter | None]  # the module's own ``_parameters``
    name: str
    plain: bool  # whether assigning the dict entry is all that the module does on setattr

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Owner:
        """The owner for ``module.name``."""
        # RNNs, for one, keep a second list of their weights, which only their own __setattr__ updates.
        plain = type(module).__setattr__ is nn.Module.__setattr__
        return cls(weakref.ref(module), module._parameters, name, plain)

    def held(self) -> nn.Parameter | None:
        """What is registered at the moment."""
        return self.parameters.get(self.name)

    def set(self, parameter: nn.Parameter) -> None:
        """Register ``parameter``."""
        if self.plain:
            self.parameters[self.name] = parameter
        else:
            module = self.module()
            if module is not None:
                setattr(module, self.name, parameter)


class ShardedParameter:
    """See [Note: Sharded and full]."""

    fqn: str  # its first name, below the module that fully_shard was called on (from the first forward: the root)
    fqns: list[str]  # all its names
    owners: list[Owner]
    pending_owners: list[Owner]  # ties outside the unit; an ancestor's fully_shard call takes them in
    sharded: nn.Parameter
    local: torch.Tensor
    full: nn.Parameter
    spec: DTensorSpec
    shape: ParameterShape
    unit: weakref.ref[Unit]  # that owns it
    attributes: dict[str, Any]  # that users have set on the parameter object

    def __init__(self, sharded: nn.Parameter, owners: list[Owner], fqns: list[str], shape: ParameterShape) -> None:
        self.sharded, self.owners, self.fqns, self.shape = sharded, owners, fqns, shape
        self.fqn = fqns[0]
        self.pending_owners = []
        self.remember_attributes()
        self._mark()

    def place(self, mesh: ShardMesh, slot: Slot, local: torch.Tensor) -> None:
        """Put this rank's piece at ``local``, a view of the shard buffer, and make ``sharded`` the DTensor on it.

        The parameter object that the module holds stays the same if it is a DTensor already.
        """
        placement = Replicate() if slot.route is Route.REPLICATED else Shard(0)
        old = self.sharded
        meta = TensorMeta(torch.Size(self.shape.shape), self.shape.stride, local.dtype)
        self.spec = DTensorSpec(mesh.device_mesh, (placement,), tensor_meta=meta)
        self.local = local
        if isinstance(old, DTensor) and old.dtype == local.dtype and old.device == local.device:
            old._local_tensor = local
            old._spec = self.spec
        else:
            self.sharded = nn.Parameter(dtensor(local, self.spec), requires_grad=old.requires_grad)
            if isinstance(old, DTensor) and old.grad is not None:
                self.sharded.grad = old.grad
        self.sharded.__dict__.update(self.attributes)
        self._mark()

    def remember_attributes(self) -> None:
        """Note what users have set on the parameter object: ``to()`` swaps it away, :meth:`place` puts it back."""
        self.attributes = {key: value for key, value in vars(self.sharded).items() if not key.startswith("_")}

    def _mark(self) -> None:
        """Let a later ``fully_shard`` call find out that the parameter is managed."""
        setattr(self.sharded, _MANAGED_BY, weakref.ref(self))

    def register(self, parameter: nn.Parameter) -> None:
        """Make all owners hold ``parameter``."""
        for owner in self.owners:
            if owner.plain:
                owner.parameters[owner.name] = parameter
            else:
                owner.set(parameter)

    def add_owner(self, owner: Owner, fqn: str) -> None:
        """One more module attribute turned out to hold this parameter (the name is set at the first forward)."""
        if owner not in self.owners:
            self.owners.append(owner)
            if fqn:
                self.fqns.append(fqn)

    def is_current(self) -> bool:
        """Whether the module still holds our parameter and that still lies in the shard buffer.

        Assigning loads, ``to_empty`` and dtype moves put others in their place, see [Note: Adoption].
        """
        sharded = self.sharded
        for owner in self.owners:
            if owner.parameters.get(owner.name) is not sharded:
                return False
        return sharded._local_tensor is self.local  # type: ignore[attr-defined]

    def adopt_registered(self) -> nn.Parameter:
        """Make the foreign parameter that a module holds ours; its value is taken over afterwards.

        Raises:
            ValueError: If it has another shape, or is a DTensor that is sharded otherwise.
        """
        found = next((held for held in map(Owner.held, self.owners) if held is not self.sharded), self.sharded)
        if found is None:
            raise ValueError(f"{self.describe()} was removed from its module; fully_shard manages it, put it back")
        if tuple(found.shape) != tuple(self.shape.shape):
            raise ValueError(
                f"{self.describe()} was replaced by a parameter of shape {tuple(found.shape)}; assign a DTensor "
                "sharded like the old one, or a full tensor of the old shape"
            )
        if isinstance(found, DTensor) and found.placements != self.spec.placements:
            raise ValueError(
                f"{self.describe()} was replaced by a DTensor with placements {found.placements}, expected "
                f"{self.spec.placements}; redistribute it first"
            )
        if found is not self.sharded:
            self.sharded = found
            self.remember_attributes()
        return found

    def drop_full_gradient(self) -> None:
        """Forget the gradient that was not reduced yet."""
        if "full" in self.__dict__:
            self.full.grad = None

    def memoize(self, memo: dict[int, Any]) -> None:
        """Put a copy of the sharded parameter, gradient included, into a deepcopy's memo."""
        old = self.sharded
        new = nn.Parameter(dtensor(self.local.clone(), self.spec), requires_grad=old.requires_grad)
        if old.grad is not None:
            new.grad = dtensor(old.grad._local_tensor.clone(), self.spec)  # type: ignore[attr-defined]
        memo[id(old)] = new

    def copy_for(self, memo: dict[int, Any]) -> ShardedParameter:
        """This parameter in a deep copy whose modules and parameters are in ``memo``."""
        modules = [(memo[id(owner.module())], owner.name) for owner in self.owners]
        owners = [Owner.of(module, name) for module, name in modules]
        return ShardedParameter(memo[id(self.sharded)], owners, list(self.fqns), self.shape)

    def describe(self) -> str:
        """FQN, global shape and dtype, for errors."""
        return f"{self.fqn} (shape {tuple(self.shape.shape)}, {self.sharded.dtype})"


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor on ``local`` without copies. Bypasses ``DTensor.__init__``, which costs ten times as much."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def parameter_shape(fqn: str, tensor: torch.Tensor) -> ParameterShape:
    """Shape and strides of ``tensor`` as a layout wants them: its own if dense, else contiguous ones."""
    shape = tuple(tensor.shape)
    stride: tuple[Any, ...] = tuple(tensor.stride())
    return ParameterShape(fqn, shape, stride if is_dense(shape, stride) else contiguous_stride(shape))


def managed_by(parameter: torch.Tensor) -> ShardedParameter | None:
    """The sharded parameter that ``parameter`` is, or was before it was sharded; None if not managed."""
    reference = getattr(parameter, _MANAGED_BY, None)
    return None if reference is None else reference()
