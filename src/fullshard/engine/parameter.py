"""One parameter's two faces, sharded and full, and the modules that hold it.

[Note: Sharded and full]
For each managed parameter there are three tensors:
- ``sharded``: an ``nn.Parameter`` that is a ``DTensor`` with ``Shard(0)`` (0-D: ``Replicate()``). It is what the
  module holds at rest, what optimizers and state dicts see. Its local tensor is
- ``local``: this rank's rows, a view of the bucket's shard buffer;
- ``full``: an ``nn.Parameter`` on the bucket's full buffer: plain, or the DTensor that tensor parallelism made. It
  is what the module holds while it computes and the leaf whose ``.grad`` autograd fills. It is created once, so
  compiled code and saved tensors keep it. A gradient that is reduced at once stays in its dtype until it is packed.
  Where several are to be added up (of microbatches, of tied modules) its ``grad_dtype`` is the dtype they are reduced
  in, and autograd casts each and adds them up in that.

[Note: Adoption]
Users replace registered parameters: ``load_state_dict(assign=True)`` puts new objects in, ``to_empty`` and ``to`` to
another dtype swap the contents of the old ones. Before each gather of a resting unit they are compared (by
identity) with the ones the unit knows, and foreign ones are taken over: their values are written into the shard buffer,
or into a new one if dtype or device changed.

[Note: Who owns a gradient]
A gradient that autograd accumulates may share its memory with anything: the gradients of ``a`` and ``b`` in
``a.view(1, -1) + b.view(1, -1)`` are one tensor, and so are those of a parameter and an activation that it is added to.
Nothing says so: neither tensor need be a view of the other, and another holder may not show in a reference count.
So only memory that the engine itself has allocated is ever written. Autograd's gradients are taken off the unsharded
parameter as soon as they are accumulated, or autograd would add the next one in place (as it does outside of
fullshard, where the second ``backward()`` of that sum is wrong). The sum of two is a tensor of our own.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fullshard.engine import hooks
from fullshard.engine.placement import ParameterPlacement, dtensor
from fullshard.errors import FullshardError
from fullshard.layout import ParameterShape
from fullshard.layout.per_parameter import contiguous_stride, is_dense

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = [
    "Owner",
    "ShardedParameter",
    "accumulate_gradient",
    "clear_gradient",
    "has_gradient_hooks",
    "managed_by",
    "mark",
    "unmark",
    "value_of",
]

_MANAGED_BY = "_fullshard_parameter"  # attribute of parameter objects


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
    reduce_dtype: torch.dtype  # of its gradients
    spec: DTensorSpec  # of the sharded parameter
    placement: ParameterPlacement
    shape: ParameterShape  # of what the ranks of the shard axis hold together
    unit: weakref.ref[Unit]  # that owns it
    attributes: dict[str, Any]  # that users have set on the parameter object
    unreduced_grad: torch.Tensor | None  # the gradient of ``full`` that is still to be reduced
    owns_unreduced_grad: bool  # whether the engine has allocated it, see [Note: Who owns a gradient]

    def __init__(
        self,
        sharded: nn.Parameter,
        owners: list[Owner],
        fqns: list[str],
        placement: ParameterPlacement,
        shape: ParameterShape,
    ) -> None:
        self.sharded, self.owners, self.fqns, self.placement, self.shape = sharded, owners, fqns, placement, shape
        self.fqn = fqns[0]
        self.pending_owners = []
        self.unreduced_grad, self.owns_unreduced_grad = None, False
        self.remember_attributes()
        self._mark()

    @classmethod
    def of(cls, parameter: nn.Parameter, owner: Owner, fqn: str, placement: ParameterPlacement) -> ShardedParameter:
        """For a parameter that no unit manages yet."""
        value, cut = value_of(parameter), placement.cut
        stride: tuple[Any, ...] = tuple(value.stride())
        if not is_dense(tuple(value.shape), stride):
            stride = contiguous_stride(value.shape)
        shape = ParameterShape(fqn, tuple(value.shape), stride, replicated=cut is None, cut=cut or 0)
        return cls(parameter, [owner], [fqn], placement, shape)

    def place(self, local: torch.Tensor) -> None:
        """Put this rank's piece at ``local`` and make ``sharded`` the DTensor on it.

        The parameter object that the module holds stays the same if it is one already.
        """
        old = self.sharded
        self.spec = self.placement.sharded_spec(local.dtype)
        self.local = local
        if (
            isinstance(old, DTensor)
            and old.placements == self.spec.placements
            and old.dtype == local.dtype
            and old.device == local.device
        ):
            old._local_tensor = local
            old._spec = self.spec
        else:
            self.sharded = nn.Parameter(dtensor(local, self.spec), requires_grad=old.requires_grad)
            self.sharded._local_tensor = local  # type: ignore[attr-defined] # nn.Parameter detaches it
            if isinstance(old, DTensor) and old.grad is not None and old.placements == self.spec.placements:
                moved = old.grad.device == old.device  # along with the parameter
                self.sharded.grad = old.grad.to(local.device) if moved else old.grad
        self.sharded.__dict__.update(self.attributes)
        self._mark()

    def set_full(self, tensor: torch.Tensor, reduce_dtype: torch.dtype) -> None:
        """Make the full parameter, whose memory (this rank's part, if it is a DTensor) is ``tensor``."""
        full = self.full = nn.Parameter(self.placement.full(tensor), requires_grad=self.sharded.requires_grad)
        self.reduce_dtype = reduce_dtype if full.dtype.is_floating_point else full.dtype
        if len(self.owners) > 1:
            self.keep_gradient()
        full.__dict__.update(self.attributes)
        self._collect_gradients()

    def follow_requires_grad(self) -> None:
        """Have the full parameter require a gradient as the sharded one does."""
        self.full.requires_grad_(self.requires_grad)
        self._collect_gradients()

    def _collect_gradients(self) -> None:
        ref = weakref.ref(self)  # the hook lives as long as the full parameter, which this object holds

        def accumulated(_: torch.Tensor) -> None:
            parameter = ref()
            if parameter is not None:
                parameter.collect_gradient(notify=True)

        hooks.after_accumulation(self.full, accumulated)

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self.sharded.requires_grad

    @property
    def local_gradient(self) -> torch.Tensor | None:
        """This rank's part of the sharded gradient."""
        return None if self.sharded.grad is None else value_of(self.sharded.grad)

    @property
    def whole_on_every_rank(self) -> bool:
        """Whether it is not cut, so that all ranks of the shard axis hold the same."""
        return self.shape.replicated

    def clear_gradient(self, *, set_to_none: bool) -> None:
        """As ``zero_grad`` does for the sharded parameter."""
        clear_gradient(self.sharded, set_to_none=set_to_none)

    def set_gradient(self, local: torch.Tensor | None) -> None:
        """Replace the sharded gradient by a copy of this rank's rows ``local``, wherever these are."""
        self.sharded.grad = None if local is None else dtensor(local.to(self.local.device, copy=True), self.spec)

    def accumulate(self, local: torch.Tensor) -> None:
        """Set the sharded gradient to this rank's rows ``local``, or add them, and run the user's hooks."""
        accumulate_gradient(self.sharded, dtensor(local, self.spec))

    def collect_gradient(self, *, notify: bool = False) -> None:
        """Take the gradient off the unsharded parameter: accumulated by autograd, or put there by a function or a hook.

        Args:
            notify: It has just been accumulated. Tell the unit; and leave it there if users have hooks that look at it.
        """
        gradient = self.full.grad if self.has_full else None
        if gradient is None:
            return
        self.full.grad = None
        unit = self.unit() if notify else None
        if unit is not None:
            unit.gradient_arrived()
        if notify and len(self.full._post_accumulate_grad_hooks) > 1:
            self.full.grad = _copy_of(gradient)  # to which autograd may add
            return
        earlier, gradient = self.unreduced_grad, gradient.detach()
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
        """The full gradient (this rank's part of it), which the parameter then no longer has."""
        self.collect_gradient()
        gradient, self.unreduced_grad, self.owns_unreduced_grad = self.unreduced_grad, None, False
        if gradient is None:
            return None
        if self.full.grad_dtype is not self.full.dtype and len(self.owners) == 1:
            self.full.grad_dtype = self.full.dtype
        return gradient if self.placement.own is None else self.placement.local_gradient(gradient)

    def writable_unreduced_gradient(self) -> torch.Tensor | None:
        """The gradient that was not reduced yet, in memory that may be written to."""
        self.collect_gradient()
        if self.unreduced_grad is not None and not self.owns_unreduced_grad:
            self.unreduced_grad, self.owns_unreduced_grad = _copy_of(self.unreduced_grad), True
        return self.unreduced_grad

    def keep_gradient(self) -> None:
        """Add up gradients in the dtype they are reduced in from now on: there will be several."""
        self.collect_gradient()
        if not self.has_full or self.full.dtype is self.reduce_dtype:
            return
        self.full.grad_dtype = self.reduce_dtype
        if self.unreduced_grad is not None and self.unreduced_grad.dtype is not self.reduce_dtype:
            self.unreduced_grad, self.owns_unreduced_grad = self.unreduced_grad.to(self.reduce_dtype), True

    def remember_attributes(self) -> None:
        """Note what users have set on the parameter object: ``to()`` swaps it away, :meth:`place` puts it back."""
        known: Collection[str] = ()
        if not isinstance(self.sharded, DTensor) and type(self.sharded) is not nn.Parameter:
            known = vars(self.sharded.detach())  # what a tensor subclass keeps its own contents in
        self.attributes = {
            key: value for key, value in vars(self.sharded).items() if not key.startswith("_") and key not in known
        }

    def _mark(self) -> None:
        """Let a later ``fully_shard`` call find out that the parameter is managed."""
        mark(self.sharded, self)

    def add_owner(self, owner: Owner, fqn: str) -> None:
        """One more module attribute turned out to hold this parameter (the name is set at the first forward)."""
        if owner not in self.owners:
            self.owners.append(owner)
            if fqn:
                self.fqns.append(fqn)
            self.keep_gradient()

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
        if not isinstance(found, nn.Parameter):
            raise FullshardError(
                f"{self.describe()} was replaced by a {type(found).__name__} that is no nn.Parameter, as "
                "torch.func.functional_call does; a sharded module computes with its own parameters, so call it "
                "without others, or load them"
            )
        if found.shape != self.placement.shape:
            raise ValueError(
                f"{self.describe()} was replaced by a parameter of shape {tuple(found.shape)}; assign a DTensor "
                "sharded like the old one, or a full tensor of the old shape"
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
            self.sharded = found
            self.remember_attributes()
        return found

    @property
    def owned(self) -> bool:
        """Whether a unit has it already."""
        return "unit" in self.__dict__

    @property
    def has_full(self) -> bool:
        """Whether the full parameter has been made."""
        return "full" in self.__dict__

    def drop_unreduced_gradient(self) -> None:
        """Forget the gradient that was not reduced yet."""
        self.unreduced_grad, self.owns_unreduced_grad = None, False
        if self.has_full:
            self.full.grad = None  # from a backward that raised before its hook ran

    def memoize(self, memo: dict[int, Any]) -> None:
        """Put a copy of the sharded parameter into a deepcopy's memo: without a gradient, as ``nn.Parameter``'s."""
        old = self.sharded
        memo[id(old)] = nn.Parameter(dtensor(self.local.clone(), self.spec), requires_grad=old.requires_grad)

    def copy_for(self, memo: dict[int, Any]) -> ShardedParameter:
        """This parameter in a deep copy whose modules and parameters are in ``memo``."""
        modules = [(memo[id(owner.module())], owner.name) for owner in self.owners]
        owners = [Owner.of(module, name) for module, name in modules]
        return ShardedParameter(memo[id(self.sharded)], owners, list(self.fqns), self.placement, self.shape)

    def describe(self) -> str:
        """FQN, global shape and dtype, for errors."""
        return f"{self.fqn} (shape {tuple(self.placement.shape)}, {self.sharded.dtype})"


def _copy_of(gradient: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own. ``DTensor.clone`` would reduce what is pending (``Partial``)."""
    if isinstance(gradient, DTensor):
        return dtensor(gradient._local_tensor.clone(), gradient._spec)
    return gradient.clone()


def value_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds: the local tensor of a DTensor, else the tensor itself; without autograd's history."""
    if isinstance(parameter, DTensor):
        return parameter._local_tensor
    return parameter.detach()


def accumulate_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Do to ``parameter`` what autograd does where a gradient arrives: hooks, ``.grad``, hooks."""
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
        present._local_tensor.add_(gradient._local_tensor)  # what DTensor would do in ten times as long
    else:
        assert present is not None
        present.add_(gradient)  # maybe one that the user has put there
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks:
        for hook in list(hooks.values()):
            hook(parameter)
    # What torch.distributed.optim's _apply_optimizer_in_backward leaves on parameters; the node that it hooks does not
    # run here.
    optimizers = getattr(parameter, "_in_backward_optimizers", None)
    if optimizers:
        for optimizer in optimizers:
            optimizer.step()
        parameter.grad = None


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether :func:`accumulate_gradient` calls functions of users."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
    return any(getattr(parameter, name, None) for name in hooks)


def clear_gradient(parameter: nn.Parameter, *, set_to_none: bool) -> None:
    """As ``zero_grad`` does for one parameter."""
    if set_to_none or parameter.grad is None:
        parameter.grad = None
    else:
        parameter.grad.detach_().zero_()


def mark(parameter: nn.Parameter, managed: ShardedParameter) -> None:
    """Have :func:`managed_by` find ``managed`` for this parameter object."""
    setattr(parameter, _MANAGED_BY, _Mark(managed))


def unmark(parameter: nn.Parameter) -> None:
    """Nobody manages this parameter object any more."""
    parameter.__dict__.pop(_MANAGED_BY, None)


def managed_by(parameter: torch.Tensor) -> ShardedParameter | None:
    """The sharded parameter that ``parameter`` is, or was before it was sharded; None if not managed."""
    mark = getattr(parameter, _MANAGED_BY, None)
    return mark.parameter() if isinstance(mark, _Mark) else None


class _Mark:
    """Says whose a parameter object is. Copies and files of the object get an empty dictionary instead, which every
    reader knows.
    """

    __slots__ = ("parameter",)

    def __init__(self, parameter: ShardedParameter) -> None:
        self.parameter = weakref.ref(parameter)

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        return OrderedDict, ()
