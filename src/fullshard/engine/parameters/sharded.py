"""The sharded and the unsharded tensor of one parameter, its gradient, and the modules that hold it.

[Note: Sharded and unsharded parameters]
For each managed parameter there are three tensors:
- ``sharded``: an ``nn.Parameter`` that is a ``DTensor`` with ``Shard(0)`` (0-D: ``Replicate()``). The module holds it
  at rest; optimizers and state dicts see it. Its local tensor is
- ``local``: this rank's rows, a view of the bucket's shard buffer;
- ``unsharded``: an ``nn.Parameter`` on the bucket's unsharded buffer: plain, or the DTensor that tensor parallelism
  made. The module holds it while it computes, and it is the leaf whose ``.grad`` autograd fills. It is created once,
  so compiled code and saved tensors keep it. A gradient that is reduced at once stays in its dtype until it is packed.
  Where several accumulate (of microbatches, of tied modules) its ``grad_dtype`` is the reduce dtype, so that autograd
  casts each gradient and accumulates in that dtype.

[Note: Write-back]
Users replace registered parameters: ``load_state_dict(assign=True)`` assigns new objects, ``to_empty`` and ``to`` to
another dtype swap the contents of the old ones. Before an idle unit is unsharded, its registered parameters are
compared (by identity) with those that the unit knows, and the values of replaced ones are written into the shard
buffer, or into a new one if dtype or device changed. A parameter object that was moved (``model.to("cpu")``) has its
shard where it was moved to, and an assigned one is brought to where the shard was.

[Note: Assigned data]
``p.data = value`` replaces only what torch keeps of a DTensor in C++: its sizes and a storage without memory. The local
tensor stays, and ``value`` is lost. So before a forward the address of that storage is compared, and the assignment
raises. ``p.data`` itself, and what is a view of it, share the storage: ``p.data = p.data`` changes nothing. An
unsharded parameter is plain, and takes the memory of the value: no all-gather would fill it any more. Then the bucket's
memory has fewer references than when it was made.

[Note: Who owns a gradient]
A gradient that autograd accumulates may share its memory with any other tensor: the gradients of ``a`` and ``b`` in
``a.view(1, -1) + b.view(1, -1)`` are one tensor, and so are those of a parameter and an activation that it is added to.
This cannot be detected: neither tensor need be a view of the other, and a second reference may not show in a reference
count. So only memory that the engine itself has allocated is ever written. Autograd's gradients are taken off the
unsharded parameter as soon as they are accumulated, or autograd would add the next one in place (as it does outside of
fullshard, where the second ``backward()`` of that sum is wrong). The sum of two gradients is a new tensor.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fullshard.engine import hooks
from fullshard.engine.parameters.held import HeldParts
from fullshard.engine.parameters.placement import ParameterPlacement, dtensor, dtensor_parameter, with_dtype
from fullshard.errors import FullshardError
from fullshard.layout import ParameterShape
from fullshard.layout.per_parameter import LAYOUTS_KEPT, contiguous_stride, is_dense

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Owner",
    "ShardedParameter",
    "accumulate_gradient",
    "clear_gradient",
    "has_gradient_hooks",
    "keep_gradient_dtype",
    "managed_by",
    "managed_or_unsharded",
    "mark",
    "mark_unsharded",
    "value_of",
]

_MANAGED_BY = "_fullshard_parameter"  # attribute of parameter objects
_UNSHARDED_OF = "_fullshard_unsharded_of"  # attribute of unsharded ones


class Owner(NamedTuple):
    """A module attribute that holds the parameter; tied parameters have several."""

    module: weakref.ref[nn.Module]  # weak: the module owns the unit, which owns this
    parameters: dict[str, nn.Parameter | None]  # the module's own ``_parameters``
    name: str
    plain: bool  # the module has no __setattr__ of its own: assigning to ``parameters`` is enough

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Owner:
        """Make the owner for ``module.name``."""
        # RNNs, for one, keep a second list of their weights, which only their own __setattr__ updates.
        plain = type(module).__setattr__ is nn.Module.__setattr__
        return cls(weakref.ref(module), module._parameters, name, plain)

    def held(self) -> nn.Parameter | None:
        """Return the parameter that is registered now."""
        return self.parameters.get(self.name)

    def set(self, parameter: nn.Parameter) -> None:
        """Register ``parameter``."""
        if self.plain:
            self.parameters[self.name] = parameter
        else:
            module = self.module()
            if module is not None:
                setattr(module, self.name, parameter)


class ShardedParameter(HeldParts):
    """State of one managed parameter, itself no ``nn.Parameter``, see [Note: Sharded and unsharded parameters]."""

    superseded: ClassVar[int] = 0  # objects in whose place others were made: optimizers may hold the old ones
    fqn: str  # the first FQN, below the module that fully_shard was called on (from the first forward: the root)
    fqns: tuple[str, ...]  # all FQNs
    owners: list[Owner]
    pending_owners: tuple[Owner, ...]  # tied modules outside the unit, until an ancestor's fully_shard call adds them
    sharded: nn.Parameter
    local: torch.Tensor
    outer: torch.UntypedStorage | None = None  # that a DTensor itself refers to, see [Note: Assigned data]
    unsharded: nn.Parameter
    followed: bool  # its flag requires_grad, as the sharded one had it when they were last compared
    reduce_dtype: torch.dtype  # of its gradients
    spec: DTensorSpec  # of the sharded parameter
    placement: ParameterPlacement
    shape: ParameterShape  # of the unsharded parameter, without its own tensor parallelism
    owned: bool  # a unit has the parameter
    offloaded: bool  # its shard is in CPU memory, wherever it is computed with
    param_dtype: torch.dtype | None  # in which the user has it computed with; None: as the policy of the unit says
    reduced_by: torch.dtype | None  # its ``grad_dtype``, if that says in which dtype gradients are reduced
    away: torch.device | None = None  # where the user has moved the shard: it cannot be computed with from there
    on_gradient: Callable[[], None] | None  # called when autograd has accumulated a gradient
    attributes: dict[str, Any]  # that users have set on the parameter object
    unreduced_grad: torch.Tensor | None  # the gradient of ``unsharded`` that is still to be reduced
    owns_unreduced_grad: bool  # the engine has allocated its memory, see [Note: Who owns a gradient]

    def __init__(
        self,
        sharded: nn.Parameter,
        owners: list[Owner],
        fqns: tuple[str, ...],
        placement: ParameterPlacement,
        shape: ParameterShape,
    ) -> None:
        self.sharded, self.owners, self.fqns, self.placement, self.shape = sharded, owners, fqns, placement, shape
        self.fqn = fqns[0]
        self.pending_owners, self.on_gradient, self.owned, self.offloaded = (), None, False, False
        self.param_dtype = self.reduced_by = None
        self.unreduced_grad, self.owns_unreduced_grad = None, False
        self.remember_attributes()
        mark(self.sharded, self)

    @classmethod
    def of(cls, parameter: nn.Parameter, owner: Owner, fqn: str, placement: ParameterPlacement) -> Self:
        """Make the state of a parameter that no unit manages yet."""
        value = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        shape = _unsharded_shape(fqn, tuple(value.shape), tuple(value.stride()), placement.shard_dim)
        return cls(parameter, [owner], (fqn,), placement, shape)

    def is_in_place(self) -> bool:
        """Return True if the sharded parameter has its part of the shard buffer for its local tensor."""
        return value_of(self.sharded) is self.local

    def place(self, local: torch.Tensor) -> None:
        """Make ``sharded`` the DTensor whose local tensor is ``local``.

        The parameter object that the module holds stays the same if it is such a DTensor already.
        """
        self._place(local, self.placement.sharded_spec(local.dtype))

    def _place(self, local: torch.Tensor, spec: DTensorSpec) -> None:
        old = self.sharded
        self.spec, self.local = spec, local
        known = isinstance(old, DTensor) and old.placements == spec.placements and old.dtype == local.dtype
        if known and old.device == local.device:
            old._local_tensor = local  # type: ignore[attr-defined]
            old._spec = spec  # type: ignore[attr-defined]
        else:
            self.sharded = dtensor_parameter(local, spec, requires_grad=old.requires_grad)
            keep_gradient_dtype(self.sharded, old)
            mark(old, self)  # an optimizer may have been given what users have assigned
            ShardedParameter.superseded += 1
        if known and old.device != local.device:
            gradient, old.grad = old.grad, None
            moved = gradient is not None and gradient.device == old.device  # along with the parameter
            with contextlib.suppress(RuntimeError):  # something else refers to it: it stays where it is
                torch.utils.swap_tensors(old, self.sharded)  # type: ignore[no-untyped-call]
                self.sharded = old  # which optimizers may have
            self.sharded.grad = gradient.to(local.device) if moved and gradient is not None else gradient
        self.outer = self.sharded.untyped_storage()
        self.sharded.__dict__.update(self.attributes)
        mark(self.sharded, self)

    def check_data(self) -> None:
        """Raise FullshardError if a value was assigned to the DTensor's ``.data``, see [Note: Assigned data]."""
        outer = self.outer
        if outer is not None and torch._C._storage_address(self.sharded) != outer._cdata:  # type: ignore[attr-defined]
            raise self.lost_data()

    def lost_data(self) -> FullshardError:
        """Make the error for a value that was assigned to ``.data``."""
        return FullshardError(
            f"{self.fqn}: a tensor was assigned to .data of this parameter, which does not reach its shard; write the "
            "value in place, param.data.copy_(value), with the value as a DTensor of its placements where the "
            "parameter is one, and not while the parameters are unsharded"
        )

    def set_unsharded(self, tensor: torch.Tensor, reduce_dtype: torch.dtype) -> None:
        """Make the unsharded parameter on the memory of ``tensor`` (its local tensor, if it is a DTensor)."""
        value = self.placement.unsharded(tensor)
        self.followed = self.sharded.requires_grad
        unsharded = self.unsharded = nn.Parameter(value, requires_grad=self.followed)
        self.reduce_dtype = reduce_dtype if unsharded.dtype.is_floating_point else unsharded.dtype
        if len(self.owners) > 1:
            self.accumulate_in_reduce_dtype()
        unsharded.__dict__.update(self.attributes)
        if self.placement.types is not None:
            self.placement.types.annotate(unsharded)
        mark_unsharded(unsharded, self)
        self._collect_gradients()

    def follow_requires_grad(self) -> None:
        """Have the unsharded parameter require a gradient as the sharded one does."""
        self.followed = self.requires_grad
        self.unsharded.requires_grad = self.followed  # functorch refuses requires_grad_()
        self._collect_gradients()

    def take_requires_grad(self) -> None:
        """Have the sharded parameter require a gradient as the unsharded one, whose flag a user has changed."""
        self.followed = self.unsharded.requires_grad
        self.sharded.requires_grad = self.followed

    def agree_on_requires_grad(self) -> None:
        """Have both require a gradient as users have set it on either; on the unsharded one, if on both."""
        followed = self.followed
        if self.unsharded.requires_grad is not followed:
            self.take_requires_grad()
        elif self.requires_grad is not followed:
            self.follow_requires_grad()

    def _collect_gradients(self) -> None:
        hooks.after_accumulation(self.unsharded, _Collector(self))

    @property
    def requires_grad(self) -> bool:
        """True if the parameter requires a gradient."""
        return self.sharded.requires_grad

    @property
    def is_trained(self) -> bool:
        """True if the parameter requires a gradient, or did in its unit's last forward: flags may change in between."""
        return self.requires_grad or (self.has_unsharded and self.unsharded.requires_grad)

    @property
    def optimized(self) -> nn.Parameter:
        """The parameter object that optimizers are given."""
        return self.sharded

    # ---------------------------------------------------------------- what ranks hold of it, see [Note: Tensor shards]

    @property
    def is_hidden(self) -> bool:
        """True if optimizers are given another parameter object, of which this one's shard is a part."""
        return self.optimized is not self.sharded

    @property
    def local_gradient(self) -> torch.Tensor | None:
        """Local tensor of the sharded gradient."""
        return None if self.sharded.grad is None else value_of(self.sharded.grad)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of sharded gradients: the parameter's, unless its ``grad_dtype`` says otherwise."""
        return self.sharded.grad_dtype or self.local.dtype

    def clear_gradient(self, *, set_to_none: bool) -> None:
        """Clear the sharded gradient as ``zero_grad`` does."""
        clear_gradient(self.sharded, set_to_none=set_to_none)

    def set_gradient(self, local: torch.Tensor | None) -> None:
        """Replace the sharded gradient by a copy of this rank's rows ``local``, on whatever device they are."""
        if local is not None:
            local = self._like_sharded(local.to(self.local.device, self.gradient_dtype, copy=True))
        self.sharded.grad = local

    def accumulate(self, local: torch.Tensor) -> None:
        """Accumulate this rank's rows ``local`` into the sharded gradient, and run the user's hooks."""
        accumulate_gradient(self.sharded, self._like_sharded(local.to(self.gradient_dtype)))

    def _like_sharded(self, gradient: torch.Tensor) -> DTensor:
        spec = self.spec if gradient.dtype is self.local.dtype else with_dtype(self.spec, gradient.dtype)
        return dtensor(gradient, spec)

    def collect_gradient(self, *, notify: bool = False) -> None:
        """Move ``.grad`` of the unsharded parameter, from autograd or from user code, to ``unreduced_grad``.

        Args:
            notify: Autograd has just accumulated it: call ``on_gradient``, and leave a copy for hooks of users.
        """
        unsharded: nn.Parameter | None = getattr(self, "unsharded", None)
        if unsharded is None or (gradient := unsharded.grad) is None:
            return
        unsharded.grad = None
        if notify:
            if self.on_gradient is not None:
                self.on_gradient()
            if len(unsharded._post_accumulate_grad_hooks) > 1:
                unsharded.grad = _copy_of(gradient)  # to which autograd may add
                return
        if gradient.requires_grad:  # create_graph=True
            gradient = gradient.detach()
        earlier = self.unreduced_grad
        if earlier is None:
            self.unreduced_grad = gradient
            return
        with torch.no_grad():
            if self.owns_unreduced_grad and not earlier.is_sparse:
                earlier.add_(gradient)
            else:
                total = gradient + earlier if earlier.is_sparse else earlier + gradient  # dense + sparse only
                self.unreduced_grad, self.owns_unreduced_grad = total, True

    def take_gradient(self) -> torch.Tensor | None:
        """Return and clear the unsharded gradient (its local tensor, if it is a DTensor); None if there is none."""
        self.collect_gradient()
        gradient, self.unreduced_grad, self.owns_unreduced_grad = self.unreduced_grad, None, False
        if gradient is None:
            return None
        unsharded = self.unsharded
        if unsharded.grad_dtype is not unsharded.dtype and len(self.owners) == 1:
            unsharded.grad_dtype = unsharded.dtype
        return gradient if self.placement.own is None else self.placement.local_gradient(gradient, self.reduce_dtype)

    def writable_unreduced_gradient(self) -> torch.Tensor | None:
        """Return the unreduced gradient in memory that may be written to; None if there is none."""
        self.collect_gradient()
        if self.unreduced_grad is not None and not self.owns_unreduced_grad:
            self.unreduced_grad, self.owns_unreduced_grad = _copy_of(self.unreduced_grad), True
        return self.unreduced_grad

    def accumulate_in_reduce_dtype(self) -> None:
        """Accumulate gradients in the reduce dtype from now on."""
        self.collect_gradient()
        if not self.has_unsharded or self.unsharded.dtype is self.reduce_dtype:
            return
        self.unsharded.grad_dtype = self.reduce_dtype
        if self.unreduced_grad is not None and self.unreduced_grad.dtype is not self.reduce_dtype:
            self.unreduced_grad, self.owns_unreduced_grad = self.unreduced_grad.to(self.reduce_dtype), True

    def remember_attributes(self) -> None:
        """Save the attributes that users have set on the parameter object: ``to()`` drops them, ``place`` restores."""
        known: Collection[str] = ()
        if not isinstance(self.sharded, DTensor) and type(self.sharded) is not nn.Parameter:
            known = vars(self.sharded.detach())  # attributes that belong to a tensor subclass
        self.attributes = {
            key: value for key, value in vars(self.sharded).items() if not key.startswith("_") and key not in known
        }

    def add_owner(self, owner: Owner, fqn: str) -> None:
        """Add a module attribute that holds this parameter too (an empty FQN is set at the first forward)."""
        if owner not in self.owners:
            self.owners.append(owner)
            if fqn:
                self.fqns = (*self.fqns, fqn)
            self.accumulate_in_reduce_dtype()

    def is_registered(self) -> bool:
        """Return True if the modules still hold the sharded parameter and it still lies in the shard buffer.

        Loads with ``assign=True``, ``to_empty`` and changes of dtype replace it, see [Note: Write-back].
        """
        sharded = self.sharded
        for owner in self.owners:
            if owner.parameters.get(owner.name) is not sharded:
                return False
        return sharded._local_tensor is self.local  # type: ignore[attr-defined]

    def is_assigned(self) -> bool:
        """Return True if a module holds another parameter object than the one that is managed."""
        return any(owner.held() is not self.sharded for owner in self.owners)

    def accept_replacement(self) -> nn.Parameter:
        """Manage the parameter that the user has put into the module; its value is written back afterwards.

        Raises:
            ValueError: If it has another shape, or is a DTensor with other placements.
            FullshardError: If it is no ``nn.Parameter``.
        """
        found = next((held for held in map(Owner.held, self.owners) if held is not self.sharded), self.sharded)
        if found is None:
            raise ValueError(f"{self.describe()} was removed from its module after fully_shard; register it again")
        if not isinstance(found, nn.Parameter):
            raise FullshardError(
                f"{self.describe()} was replaced by a {type(found).__name__}, expected an nn.Parameter "
                "(torch.func.functional_call does this); a sharded module always computes with the parameters that "
                "fully_shard manages: call it without replacements, or load the values with load_state_dict"
            )
        if found.shape != self.placement.shape:
            raise ValueError(
                f"{self.describe()} was replaced by a parameter of shape {tuple(found.shape)}, expected "
                f"{tuple(self.placement.shape)}; assign a DTensor with the placements of the old parameter, or an "
                "unsharded tensor of its shape"
            )
        own = None if self.placement.own is None else self.placement.own.placements
        known = {self.spec.placements, own}
        placements = found.placements if isinstance(found, DTensor) else None
        if placements not in known:
            raise ValueError(
                f"{self.describe()} was replaced by a "
                + ("plain tensor" if placements is None else f"DTensor with placements {placements}")
                + f", expected a DTensor with {self.spec.placements}; redistribute it first"
            )
        if found is not self.sharded:
            if self.sharded.grad_dtype is not self.sharded.dtype and found.grad_dtype is found.dtype:
                found.grad_dtype = self.sharded.grad_dtype
            self.sharded = found
            self.remember_attributes()
        return found

    @property
    def at_rest(self) -> torch.device:
        """The device of its shard, unless that has no values yet."""
        return self.away or (torch.device("cpu") if self.offloaded else self.placement.mesh.device)

    def follow(self, device: torch.device) -> None:
        """Have the shard rest on ``device``, to which the user has moved it."""
        self.away = None
        if device.type != "meta" and device != self.at_rest:
            self.away = device

    @property
    def has_unsharded(self) -> bool:
        """True if the unsharded parameter has been made."""
        return hasattr(self, "unsharded")

    def drop_unsharded(self) -> None:
        """Forget the unsharded parameter, which may lie on a shard buffer that there is no more."""
        vars(self).pop("unsharded", None)

    def drop_unreduced_gradient(self) -> None:
        """Drop the unreduced gradient."""
        self.unreduced_grad, self.owns_unreduced_grad = None, False
        if self.has_unsharded:
            self.unsharded.grad = None  # from a backward that raised before its hook ran

    def memoize(self, memo: dict[int, Any]) -> None:
        """Put a copy of the sharded parameter, without its gradient, into a deepcopy's memo."""
        old = self.sharded
        memo[id(old)] = nn.Parameter(dtensor(self.local.clone(), self.spec), requires_grad=old.requires_grad)

    def copy_for(self, memo: dict[int, Any]) -> Self:
        """Make the parameter of a deep copy whose modules and parameters are in ``memo``."""
        owners = [Owner.of(memo[id(owner.module())], owner.name) for owner in self.owners]
        copied = type(self)(memo[id(self.sharded)], owners, self.fqns, self.placement, self.shape)
        copied.away, copied.param_dtype = self.away, self.param_dtype
        return copied

    def describe(self) -> str:
        """Return FQN, global shape and dtype, for errors."""
        return f"{self.fqn} (shape {tuple(self.placement.shape)}, {self.sharded.dtype})"


@functools.lru_cache(maxsize=16 * LAYOUTS_KEPT)
def _unsharded_shape(
    fqn: str, shape: tuple[int, ...], stride: tuple[int, ...], shard_dim: int | None
) -> ParameterShape:
    """Return the shape of the unsharded parameter: dense, whatever the strides of the original one."""
    if not is_dense(shape, stride):
        stride = contiguous_stride(shape)
    return ParameterShape(fqn, shape, stride, replicated=shard_dim is None, cut=shard_dim or 0)


def _copy_of(gradient: torch.Tensor) -> torch.Tensor:
    """Clone a gradient. ``DTensor.clone`` would reduce ``Partial`` placements."""
    if isinstance(gradient, DTensor):
        return dtensor(gradient._local_tensor.clone(), gradient._spec)
    return gradient.clone()


def value_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, else the tensor itself, detached."""
    if isinstance(parameter, DTensor):
        return parameter._local_tensor
    return parameter.detach()


def accumulate_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Accumulate ``gradient`` as autograd does: tensor hooks, ``.grad``, post-accumulate hooks."""
    hooks = parameter._backward_hooks
    if hooks:
        for hook in list(hooks.values()):  # hooks may remove themselves
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
    present = parameter.grad
    if present is None and gradient.device == parameter.device:
        parameter.grad = gradient
    elif present is None:  # autograd compares devices only where a gradient is assigned
        parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype)
        parameter.grad.data = gradient
    elif isinstance(present, DTensor) and isinstance(gradient, DTensor) and present.placements == gradient.placements:
        present._local_tensor.add_(gradient._local_tensor)  # ten times as fast as DTensor.add_
    else:
        assert present is not None
        present.add_(gradient)  # the user may have set another kind of tensor
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks:
        for hook in list(hooks.values()):
            hook(parameter)
    # torch.distributed.optim's _apply_optimizer_in_backward sets this attribute; the node that it hooks does not run
    # here.
    optimizers = getattr(parameter, "_in_backward_optimizers", None)
    if optimizers:
        for optimizer in optimizers:
            optimizer.step()
        parameter.grad = None


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if ``accumulate_gradient`` calls functions of users."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
    return any(getattr(parameter, name, None) for name in hooks)


def clear_gradient(parameter: nn.Parameter, *, set_to_none: bool) -> None:
    """Clear the gradient of one parameter as ``zero_grad`` does."""
    if set_to_none or parameter.grad is None:
        parameter.grad = None
    else:
        parameter.grad.detach_().zero_()


def keep_gradient_dtype(parameter: nn.Parameter, old: nn.Parameter) -> None:
    """Have gradients of the dtype that users have set on the parameter object that this one takes the place of."""
    if old.grad_dtype is not old.dtype:
        parameter.grad_dtype = old.grad_dtype


def mark(parameter: nn.Parameter, managed: ShardedParameter) -> None:
    """Have ``managed_by`` find ``managed`` for this parameter object."""
    parameter.__dict__[_MANAGED_BY] = _Mark(managed)


def managed_by(parameter: torch.Tensor) -> ShardedParameter | None:
    """Return the state of a parameter that is, or was before it was sharded, managed by a unit; else None."""
    mark = getattr(parameter, _MANAGED_BY, None)
    return mark() if isinstance(mark, _Mark) else None


def managed_or_unsharded(parameter: torch.Tensor) -> ShardedParameter | None:
    """Return the state of a parameter that is or was managed, or is the unsharded one of a managed parameter."""
    managed = managed_by(parameter)
    mark = getattr(parameter, _UNSHARDED_OF, None) if managed is None else None
    return mark() if isinstance(mark, _Mark) else managed


def mark_unsharded(parameter: nn.Parameter, managed: ShardedParameter) -> None:
    """Have ``managed_or_unsharded`` find ``managed`` for this object, which modules hold while they compute."""
    parameter.__dict__[_UNSHARDED_OF] = _Mark(managed)


class _Mark(weakref.ref[ShardedParameter]):
    """Refers from a parameter object to its state. Copied or pickled, it becomes an empty, harmless dictionary."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        return OrderedDict, ()


class _Collector(weakref.ref[ShardedParameter]):
    """Hook that collects the gradient of an unsharded parameter, whose state holds it and so the hook."""

    __slots__ = ()

    def __call__(self, _: torch.Tensor | None = None) -> None:
        parameter = super().__call__()
        if parameter is not None:
            parameter.collect_gradient(notify=True)
