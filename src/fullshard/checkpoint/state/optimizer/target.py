"""Load the saved state of an optimizer: plan all of it, fill the tensors, then install it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.checkpoint.state.optimizer.state import (
    NAMELESS,
    STEP,
    OptimizedParameter,
    Path,
    StateShapes,
    TensorSpec,
    group_options,
    leaves_of,
    map_leaves,
    optimized_groups,
    path_name,
)
from fullshard.checkpoint.state.parameters import LocalParameter
from fullshard.engine.parameters.sharded import value_of
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import FullshardError
from fullshard.messages import shortened

__all__ = ["OptimizerTarget"]

Leaves = dict[Path, Any]


@dataclass(eq=False)
class _PlannedState:
    """New state of one parameter object.

    Attributes:
        member: The parameter object.
        options: Options of its group after loading.
        present: Leaves of its present state.
        skeletons: By name, an entry with the nesting of the new one.
        values: New leaves.
        copies: Leaves that each original of a flat parameter has, by FQN; they must be equal.
    """

    member: OptimizedParameter
    options: Mapping[str, Any]
    present: Leaves
    skeletons: dict[Any, Any] = field(default_factory=dict)
    values: Leaves = field(default_factory=dict)
    copies: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def device_of(self, path: Path) -> torch.device:
        """Return the device where torch.optim keeps replicated state: steps on the host, unless kernels count them."""
        if path[-1] == STEP and not (self.options.get("capturable") or self.options.get("fused")):
            return torch.device("cpu")
        return value_of(self.member.parameter).device

    def conflicts(self) -> Iterator[str]:
        """Yield what is not the same for all originals of a flat parameter, which has one state for all of them."""
        for path, copies in self.copies.items():
            (name, first), *rest = copies.items()
            for other, value in rest:
                if (
                    type(value) is not type(first)
                    or _dtype_of(value) is not _dtype_of(first)
                    or not _equal(value, first)
                ):
                    yield (
                        f"{name} and {other} share a flat parameter, but were saved with different {path_name(path)}, "
                        f"{_brief(first)} and {_brief(value)}; load them into a model with use_orig_params=True"
                    )
                    break


class OptimizerTarget:
    """The saved state of an optimizer, matched by FQN with the parameters of this one: wrapping, ranks, and the order
    and grouping of parameters may have changed since.

    Use it in this order: check ``problems``; fill the tensors and ``TensorShards`` in ``shared``, and
    check ``conflicts``; fill those in ``tree``; ``install``. No step is run, and the optimizer does not
    change before ``install``, except that its tensors are filled. (``shared`` is a subset of ``tree``.)

    Args:
        model: The model that is optimized; idle.
        optimizer: Any optimizer, new or used.
        saved: By FQN and name, ``TensorSpec`` for tensors, however nested, and values; tensors are values that are
            there already. As ``to_specs`` makes it.
        groups: The saved groups: options, and FQNs in ``params``. None: unknown, all groups keep their options.
        strict: Report parameters that only one side has as problems. Otherwise their state stays or is left out.
        reuse: Fill the optimizer's present tensors where they fit. Otherwise all are new.

    Raises:
        ValueError: If the optimizer has parameters that are not in the model.
        PhaseError: In the middle of a step.

    Attributes:
        tree: Targets to fill, in the form of ``optimizer_state``,
            under the saved names; values, and tensors that were passed as such, are set already.
        problems: Messages about mismatches; the same on all ranks.
    """

    tree: dict[str, Any]
    problems: list[str]
    _optimizer: torch.optim.Optimizer
    _groups: list[list[OptimizedParameter]]
    _options: list[dict[str, Any]]  # saved options of each group
    _planned: list[_PlannedState]
    _kept: list[nn.Parameter]  # their state stays as it is
    _others: dict[str, dict[Any, Any]]  # users' own state
    _shapes: StateShapes

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]] | None,
        *,
        strict: bool = True,
        reuse: bool = True,
    ) -> None:
        self._optimizer, self._groups = optimizer, optimized_groups(model, optimizer.param_groups)
        matched = _SavedGroups(groups, saved, self._groups, strict=strict)
        self.problems, self._options = matched.problems, matched.options
        self._planned, self._kept = [], []
        self.tree = {"state": {}, "param_groups": [] if groups is None else [dict(group) for group in groups]}
        originals = [original for group in self._groups for member in group for original in member.originals]
        names = {original: matched.name_of(original) for original in originals}
        self._shapes = StateShapes(
            (path, leaf.shape, original.shape)
            for original, name in names.items()
            for path, leaf in leaves_of(saved.get(name, {})).items()
            if isinstance(leaf, (TensorSpec, torch.Tensor))
        )
        for members, group, options in zip(self._groups, optimizer.param_groups, self._options, strict=True):
            for member in members:
                states = {each: saved[names[each]] for each in member.originals if saved.get(names[each])}
                if states:
                    present = optimizer.state.get(member.parameter) if reuse else None
                    planned = _PlannedState(member, {**group, **options}, leaves_of(present or {}))
                    self._plan(planned, states, names)
                elif not any(names[original] in matched.known for original in member.originals):
                    self._kept.append(member.parameter)
        self._others = {}
        for name in matched.others:
            value = saved[name] if isinstance(saved[name], Mapping) else {NAMELESS: saved[name]}
            self.tree["state"][name] = self._others[name] = dict(map_leaves(value, _buffer_for_other))

    # ---------------------------------------------------------------- planning

    def _plan(
        self,
        planned: _PlannedState,
        states: Mapping[LocalParameter, Mapping[Any, Any]],
        names: Mapping[LocalParameter, str],
    ) -> None:
        """Plan the state of one parameter object, from the saved states of the original parameters in it."""
        leaves = {original: leaves_of(state) for original, state in states.items()}
        places: dict[LocalParameter, Leaves] = {original: {} for original in states}
        for path in dict.fromkeys(path for found in leaves.values() for path in found):
            found = {original: own[path] for original, own in leaves.items() if path in own}
            try:
                placed = self._place(planned, path, found, states)
            except ValueError as error:
                self.problems.append(str(error))
                continue
            for original, place in placed.items():
                places[original][path] = place
        for original, state in states.items():
            planned.skeletons = {**state, **planned.skeletons}
            own = places[original]
            self.tree["state"][names[original]] = map_leaves(state, lambda path, _, own=own: own.get(path))  # type: ignore[misc]
        self._planned.append(planned)

    def _place(
        self,
        planned: _PlannedState,
        path: Path,
        found: Mapping[LocalParameter, Any],
        states: Mapping[LocalParameter, Mapping[Any, Any]],
    ) -> dict[LocalParameter, Any]:
        """Allocate the memory for one leaf and return what is to be filled for each original parameter.

        Raises:
            ValueError: If it does not match the parameter.
        """
        member = planned.member
        if any(original not in found and path[0] in states[original] and len(path) > 1 for original in states):
            raise _mixed_forms(path, states)
        sharded = {
            original: leaf.dtype
            for original, leaf in found.items()
            if isinstance(leaf, TensorSpec) and self._is_sharded(planned, path, leaf, original)
        }
        if sharded:
            dtype, *other = set(sharded.values())
            if other or any(leaf is not None for original, leaf in found.items() if original not in sharded):
                raise _mixed_forms(path, found)
            present = planned.present.get(path) if len(sharded) == len(member.originals) else None
            tensor = planned.values[path] = _memory(member.parameter, present, dtype)
            return {original: original.shards_of(tensor) for original in sharded}
        placed = {original: _replicated(planned, path, leaf) for original, leaf in found.items()}
        planned.values[path] = next(iter(placed.values()))
        if len(placed) > 1:
            planned.copies[path] = {original.fqn: value for original, value in placed.items()}
        return {original: TensorShards.of(p) if isinstance(p, DTensor) else p for original, p in placed.items()}

    def _is_sharded(self, planned: _PlannedState, path: Path, leaf: TensorSpec, original: LocalParameter) -> bool:
        if self._shapes.is_sharded(path, leaf.shape, original.shape):
            return True
        present = planned.present.get(path)
        wrong = isinstance(present, DTensor) and present.shape == original.shape != leaf.shape
        if wrong or self._shapes.is_wrong(path, leaf.shape, original.shape):
            raise ValueError(
                f"{original.fqn}: {path_name(path)} was saved with shape {tuple(leaf.shape)}, but the parameter has "
                f"shape {tuple(original.shape)}"
            )
        return False

    # ---------------------------------------------------------------- after filling

    @property
    def shared(self) -> dict[str, dict[str, Any]]:
        """The subset of ``tree["state"]`` that ``conflicts`` compares: mostly nothing, and a few numbers.

        Other entries are None: they may be the optimizer's own tensors, which a conflict must leave as they are.
        """
        asked = {fqn: e.copies for e in self._planned for fqn in e.member.fqns if e.copies}
        return {
            fqn: map_leaves(self.tree["state"][fqn], lambda path, leaf, c=copies: leaf if path in c else None)  # type: ignore[misc]
            for fqn, copies in asked.items()
            if fqn in self.tree["state"]
        }

    def conflicts(self) -> list[str]:
        """Return the conflicts within flat parameters, which have one state for all originals, after ``shared`` was
        filled.
        """
        return [text for planned in self._planned for text in planned.conflicts()]

    def install(self) -> None:
        """Install state and group options in the optimizer.

        Raises:
            FullshardError: If there are conflicts. The optimizer has not changed then.
        """
        new, optimizer = self._new_state(), self._optimizer
        with torch.inference_mode(False), torch.no_grad():
            for group, options in zip(optimizer.param_groups, self._options, strict=True):
                for name, value in options.items():
                    group[name] = _option(group.get(name), value)
            for member in (member for members in self._groups for member in members):
                optimizer.state.pop(member.parameter, None)
            optimizer.state.update(new)
        # As torch.optim's load_state_dict does: optimizers update the state of their older versions.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(optimizer)

    def state_dict(self, names: Mapping[int, str] | None = None) -> dict[str, Any]:
        """Return the state dict with which the optimizer would load what ``install`` installs.

        Args:
            names: Keys by ids of parameters. None: their indices in the optimizer.

        Raises:
            FullshardError: If there are conflicts.
        """
        parameters = [member.parameter for members in self._groups for member in members]
        keys: Mapping[int, Any] = names or {id(parameter): index for index, parameter in enumerate(parameters)}
        groups = [
            copy.deepcopy({**group_options(now), **options})
            | {"params": [keys[id(member.parameter)] for member in members]}
            for members, now, options in zip(self._groups, self._optimizer.param_groups, self._options, strict=True)
        ]
        state = {key if isinstance(key, str) else keys[id(key)]: values for key, values in self._new_state().items()}
        return {"state": state, "param_groups": groups}

    def _new_state(self) -> dict[Any, Any]:
        """Return the new state by parameter object, and under the names of users' own state."""
        conflicts = self.conflicts()
        if conflicts:
            raise FullshardError(f"cannot load the optimizer: {'; '.join(conflicts)}")
        present = {id(parameter): values for parameter, values in self._optimizer.state.items()}
        state: dict[Any, Any] = {each: present[id(each)] for each in self._kept if present.get(id(each))}
        with torch.inference_mode(False), torch.no_grad():
            for planned in self._planned:
                parameter = planned.member.parameter
                values = {path: self._cast(parameter, path, value) for path, value in planned.values.items()}
                state[parameter] = map_leaves(planned.skeletons, lambda path, _, values=values: values[path])  # type: ignore[misc]
        for name, other in self._others.items():
            state[name] = other[NAMELESS] if other.keys() == {NAMELESS} else other
        return state

    def _cast(self, parameter: torch.Tensor, path: Path, value: Any) -> Any:
        """Cast a sharded state to its parameter's dtype, as torch's own optimizers do; it may have changed since
        saving.
        """
        ours = isinstance(value, torch.Tensor) and _same_layout(value, parameter) and path[-1] != STEP
        if not ours or not (value.is_floating_point() and parameter.is_floating_point()):
            return value
        return value.to(parameter.dtype) if type(self._optimizer).__module__.startswith("torch.optim") else value


def _memory(parameter: torch.Tensor, present: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a state that is sharded as its parameter: the present one if it fits."""
    if isinstance(present, torch.Tensor) and _same_layout(present, parameter) and present.dtype is dtype:
        return present
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first enables grad
        return torch.zeros_like(parameter.detach(), dtype=dtype)


def _replicated(planned: _PlannedState, path: Path, leaf: Any) -> Any:
    """Return memory for a replicated state, or the value if it is there already."""
    device = planned.device_of(path)
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to(device, copy=True)
    if not isinstance(leaf, TensorSpec):
        return copy.deepcopy(leaf)
    present, parameter = planned.present.get(path), planned.member.parameter
    fits = isinstance(present, torch.Tensor) and present.shape == leaf.shape and present.dtype is leaf.dtype
    if fits and not planned.member.flat and present.device == device:  # type: ignore[union-attr]
        return present
    with torch.inference_mode(False), torch.no_grad():
        new = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        if isinstance(parameter, DTensor) and new.dim():
            # Optimizers compute DTensors from DTensors, and these do not mix with plain tensors.
            mesh = parameter.device_mesh
            return DTensor.from_local(new, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return new


def _mixed_forms(path: Path, originals: Iterable[LocalParameter]) -> ValueError:
    return ValueError(
        f"{path_name(path)} of {', '.join(original.fqn for original in originals)}, which share a flat parameter, was "
        "saved with different dtypes or nesting; load it into a model with use_orig_params=True"
    )


def _dtype_of(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def _same_layout(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if a state has the placement, local shape and device of its parameter."""
    if getattr(state, "placements", None) != getattr(parameter, "placements", None):
        return False
    one, other = value_of(state), value_of(parameter)
    return one.shape == other.shape and one.device == other.device


def _buffer_for_other(path: Path, leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _option(present: Any, saved: Any) -> Any:
    """Return a loaded option; an option that is a tensor is filled in place, since graphs and compiled code refer to
    it.
    """
    if isinstance(present, torch.Tensor) and isinstance(saved, (torch.Tensor, int, float)):
        if not isinstance(saved, torch.Tensor):
            return present.fill_(saved)
        if present.shape == saved.shape and present.dtype is saved.dtype:
            return present.copy_(saved)
    return saved.detach().clone() if isinstance(saved, torch.Tensor) else copy.deepcopy(saved)


# ---------------------------------------------------------------- groups


class _SavedGroups:
    """Saved options for each group of this optimizer, and parameters that only one side has.

    Args:
        groups: Saved groups, with FQNs; None: not saved.
        state: Saved state, by FQN.
        members: Parameters of each group of this optimizer.
        strict: Report parameters that only one side has as problems.

    Attributes:
        known: FQNs of the saved parameters, with or without state.
        options: Saved options for each group of this optimizer; empty if it keeps its own.
        others: Keys of the saved state that are no parameters.
        problems: Messages about mismatches.
    """

    known: set[str]
    options: list[dict[str, Any]]
    others: list[str]
    problems: list[str]
    _groups: Sequence[Mapping[str, Any]]
    _group_of: dict[str, int]

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]] | None,
        state: Mapping[str, Any],
        members: Sequence[Sequence[OptimizedParameter]],
        *,
        strict: bool,
    ) -> None:
        self._groups = groups or []
        self._group_of = {fqn: number for number, group in enumerate(self._groups) for fqn in group["params"]}
        originals = [original for group in members for member in group for original in member.originals]
        own = {fqn for original in originals for fqn in original.fqns}
        self.known = set(self._group_of) if groups is not None else own & state.keys() or set(state)
        self.others = [name for name in state if name not in (own if groups is None else self.known)]
        self.problems = list(self._only_one_side(originals, own, state)) if strict and groups is not None else []
        self.options = [self._options_of(number, group) for number, group in enumerate(members)]

    def name_of(self, original: LocalParameter) -> str:
        """Return the name that a parameter was saved under, or would have been."""
        return next((name for name in original.fqns if name in self.known), original.fqn)

    def _only_one_side(
        self, originals: Sequence[LocalParameter], own: set[str], state: Mapping[str, Any]
    ) -> Iterator[str]:
        # Frozen parameters have no state: whether they were given to an optimizer says nothing.
        trained = [original for original in originals if original.parameter.requires_grad]
        missing = [original.fqn for original in trained if self.name_of(original) not in self.known]
        if missing:
            yield f"the saved optimizer has no parameters {shortened(missing)}"
        unexpected = [fqn for fqn in self._group_of if fqn not in own and state.get(fqn)]
        if unexpected:
            yield f"the checkpoint has state for {shortened(unexpected)}, which this optimizer does not have"

    def _options_of(self, number: int, members: Sequence[OptimizedParameter]) -> dict[str, Any]:
        """Return the saved options for a group."""
        if not members:  # those of the saved group of that number, if that is empty too
            is_empty = number < len(self._groups) and not self._groups[number]["params"]
            return group_options(self._groups[number]) if is_empty else {}
        sources: dict[int, list[str]] = {}
        for original in (original for member in members for original in member.originals):
            source = self._group_of.get(self.name_of(original))
            if source is not None:
                sources.setdefault(source, []).append(original.fqn)
        if not sources:
            return {}
        (first, names), *rest = sources.items()
        options = group_options(self._groups[first])
        for source, others in rest:
            differing = _differing(options, group_options(self._groups[source]))
            if differing:
                self.problems.append(
                    f"group {number} of the optimizer has parameters that were saved in groups with different options "
                    f"({', '.join(differing)}): {shortened(names)} and {shortened(others)}; group them as in the "
                    "saved optimizer"
                )
        return options


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    both = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in both if not _equal(one[name], other[name])})


def _equal(one: Any, other: Any) -> bool:
    """Return True if two values, or lists or tuples of values, are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
        return alike and bool((one == other).all())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
