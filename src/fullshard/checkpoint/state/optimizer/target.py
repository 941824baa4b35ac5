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
    holds_tensors,
    leaves_of,
    map_leaves,
    optimized_groups,
    path_name,
)
from fullshard.checkpoint.state.parameters import LocalParameter
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.engine.parameters.sharded import value_of
from fullshard.errors import FullshardError

__all__ = ["OptimizerTarget"]

MOST_NAMES = 20  # in one message

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
        blank: Memory of originals for which nothing was saved.
    """

    member: OptimizedParameter
    options: Mapping[str, Any]
    present: Leaves
    skeletons: dict[Any, Any] = field(default_factory=dict)
    values: Leaves = field(default_factory=dict)
    copies: dict[Path, dict[str, Any]] = field(default_factory=dict)
    blank: list[torch.Tensor] = field(default_factory=list)

    def state(self) -> dict[Any, Any]:
        """Return the state as an optimizer keeps it."""
        state: dict[Any, Any] = map_leaves(self.skeletons, lambda path, _: self.values[path])
        return state


class OptimizerTarget:
    """The saved state of an optimizer, matched by FQN with the parameters of this one: wrapping, ranks, and the order
    and grouping of parameters may have changed since.

    Use it in this order: check :attr:`problems`; fill the tensors and :class:`TensorShards` in :attr:`shared`, and
    check :meth:`conflicts`; fill those in :attr:`tree`; :meth:`install`. No step is run, and the optimizer does not
    change before :meth:`install`, except that its tensors are filled. (:attr:`shared` is a subset of :attr:`tree`.)

    Args:
        model: The model that is optimized; idle.
        optimizer: Any optimizer, new or used.
        saved: By FQN and name, :class:`TensorSpec` for tensors, however nested, and values; tensors are values that are
            there already. As :func:`~fullshard.checkpoint.state.optimizer.state.to_specs` makes it.
        groups: The saved groups: options, and FQNs in ``params``. None: unknown, all groups keep their options.
        strict: Report parameters that only one side has as problems. Otherwise their state stays or is left out.
        reuse: Fill the optimizer's present tensors where they fit. Otherwise all are new.

    Raises:
        ValueError: If the optimizer has parameters that are not in the model.
        PhaseError: In the middle of a step.

    Attributes:
        tree: Targets to fill, in the form of :func:`~fullshard.checkpoint.state.optimizer.state.optimizer_state`,
            under the saved names; values, and tensors that were passed as such, are set already.
        problems: Messages about mismatches; the same on all ranks.
    """

    tree: dict[str, Any]
    problems: list[str]
    _optimizer: torch.optim.Optimizer
    _groups: list[list[OptimizedParameter]]
    _options: list[dict[str, Any]]  # saved options of each group
    _planned: list[_PlannedState]
    _kept: set[int]  # ids of parameters whose state stays as it is
    _others: dict[str, dict[Any, Any]]  # users' own state
    _shapes: StateShapes
    _reuse: bool

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
        self._optimizer, self._reuse = optimizer, reuse
        self._groups = optimized_groups(model, optimizer.param_groups)
        matched = _SavedGroups(groups, saved, self._groups, strict=strict)
        self.problems, self._options = matched.problems, matched.options
        self._planned, self._kept = [], set()
        self.tree = {"state": {}, "param_groups": [] if groups is None else [dict(group) for group in groups]}
        originals = [
            (original, matched.name_of(original)) for group in self._groups for m in group for original in m.originals
        ]
        self._shapes = StateShapes(
            (path, leaf.shape, original.shape)
            for original, name in originals
            for path, leaf in leaves_of(saved.get(name, {})).items()
            if isinstance(leaf, (TensorSpec, torch.Tensor))
        )
        names = dict(originals)
        for number, group in enumerate(self._groups):
            options = {**optimizer.param_groups[number], **self._options[number]}
            for member in group:
                states = {
                    original: saved[names[original]] for original in member.originals if saved.get(names[original])
                }
                if states:
                    self._plan(member, options, states, names)
                elif not any(names[original] in matched.known for original in member.originals):
                    self._kept.add(id(member.parameter))
        self._others = {}
        for name in matched.others:
            value = saved[name] if isinstance(saved[name], Mapping) else {NAMELESS: saved[name]}
            self._others[name] = dict(map_leaves(value, _buffer_for_other))
            self.tree["state"][name] = self._others[name]

    # ---------------------------------------------------------------- planning

    def _plan(
        self,
        member: OptimizedParameter,
        options: Mapping[str, Any],
        states: Mapping[LocalParameter, Mapping[str, Any]],
        names: Mapping[LocalParameter, str],
    ) -> None:
        present = self._optimizer.state.get(member.parameter) if self._reuse else None
        planned = _PlannedState(member, options, leaves_of(present or {}))
        for state in states.values():
            for name, value in state.items():
                planned.skeletons.setdefault(name, value)
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
            raise ValueError(_mixed_forms_error(path, states))
        described = {original: leaf for original, leaf in found.items() if isinstance(leaf, TensorSpec)}
        sharded = [original for original, leaf in described.items() if self._is_sharded(planned, path, leaf, original)]
        if sharded:
            other = [original for original, leaf in found.items() if original not in sharded and leaf is not None]
            if other or len({described[original].dtype for original in sharded}) > 1:
                raise ValueError(_mixed_forms_error(path, found))
            tensor = planned.values[path] = self._memory(planned, path, described[sharded[0]].dtype)
            planned.blank += [original.local_of(tensor) for original in member.originals if original not in sharded]
            return {original: original.shards_of(tensor) for original in sharded}
        placed = {original: self._shared_place(planned, path, leaf) for original, leaf in found.items()}
        planned.values[path] = placed[next(iter(placed))]
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

    def _memory(self, planned: _PlannedState, path: Path, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a state that is sharded as its parameter."""
        parameter, present = planned.member.parameter, planned.present.get(path)
        if isinstance(present, torch.Tensor) and _same_layout(present, parameter) and present.dtype is dtype:
            return present
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first enables grad
            return torch.zeros_like(parameter.detach(), dtype=dtype)

    def _shared_place(self, planned: _PlannedState, path: Path, leaf: Any) -> Any:
        """Return memory for a replicated state."""
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(_device(planned, path), copy=True)
        if not isinstance(leaf, TensorSpec):
            return copy.deepcopy(leaf)
        present, parameter = planned.present.get(path), planned.member.parameter
        device = _device(planned, path)
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

    # ---------------------------------------------------------------- after filling

    @property
    def shared(self) -> dict[str, dict[str, Any]]:
        """The subset of ``tree["state"]`` that :meth:`conflicts` compares: mostly nothing, and a few numbers."""
        asked = {fqn: {path[0] for path in e.copies} for e in self._planned for fqn in e.member.fqns if e.copies}
        return {
            fqn: {name: value for name, value in self.tree["state"][fqn].items() if name in names}
            for fqn, names in asked.items()
            if fqn in self.tree["state"]
        }

    def conflicts(self) -> list[str]:
        """Return the conflicts within flat parameters, which have one state for all originals, after :attr:`shared` was
        filled.
        """
        return [text for planned in self._planned for text in _conflicts(planned)]

    def install(self) -> None:
        """Install state and group options in the optimizer.

        Raises:
            FullshardError: If there are conflicts. The optimizer has not changed then.
        """
        conflicts = self.conflicts()
        if conflicts:
            raise FullshardError(f"cannot load the optimizer: {'; '.join(conflicts)}")
        optimizer = self._optimizer
        with torch.inference_mode(False), torch.no_grad():
            states = {id(member.parameter): state for member, state in self._new_states(cast=True)}
            for group, options in zip(optimizer.param_groups, self._options, strict=True):
                for name, value in options.items():
                    group[name] = _option(group.get(name), value)
            for members in self._groups:
                for member in members:
                    if id(member.parameter) in states:
                        optimizer.state[member.parameter] = states[id(member.parameter)]
                    elif id(member.parameter) not in self._kept:
                        optimizer.state.pop(member.parameter, None)
            optimizer.state.update(self._other_states())  # type: ignore[arg-type]
        # As torch.optim's load_state_dict does: optimizers update the state of their older versions.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(optimizer)

    def state_dict(self, names: Mapping[int, str] | None = None) -> dict[str, Any]:
        """Return the state dict with which the optimizer would load what :meth:`install` installs.

        Args:
            names: Keys by ids of parameters. None: their indices in the optimizer.

        Raises:
            FullshardError: If there are conflicts.
        """
        conflicts = self.conflicts()
        if conflicts:
            raise FullshardError(f"cannot load the optimizer: {'; '.join(conflicts)}")
        keys: dict[int, Any] = {}
        new_groups = []
        for group, now, options in zip(self._groups, self._optimizer.param_groups, self._options, strict=True):
            for member in group:
                keys[id(member.parameter)] = len(keys) if names is None else names[id(member.parameter)]
            members = [keys[id(member.parameter)] for member in group]
            new_groups.append({**copy.deepcopy(group_options(now)), **copy.deepcopy(options), "params": members})
        state = {keys[id(member.parameter)]: values for member, values in self._new_states(cast=False)}
        for kept in self._kept:
            present = next((values for p, values in self._optimizer.state.items() if id(p) == kept), None)
            if present:
                state[keys[kept]] = present
        return {"state": state | self._other_states(), "param_groups": new_groups}

    def _new_states(self, *, cast: bool) -> Iterator[tuple[OptimizedParameter, dict[Any, Any]]]:
        for planned in self._planned:
            with torch.no_grad():
                for memory in planned.blank:
                    memory.zero_()
            if cast:
                for path, value in planned.values.items():
                    planned.values[path] = self._in_dtype_of(planned.member.parameter, path, value)
            yield planned.member, planned.state()

    def _in_dtype_of(self, parameter: torch.Tensor, path: Path, value: Any) -> Any:
        """Cast a sharded state to its parameter's dtype, as torch's own optimizers do; it may have changed since
        saving.
        """
        ours = isinstance(value, torch.Tensor) and _same_layout(value, parameter) and path[-1] != STEP
        if not ours or not (value.is_floating_point() and parameter.is_floating_point()):
            return value
        return value.to(parameter.dtype) if type(self._optimizer).__module__.startswith("torch.optim") else value

    def _other_states(self) -> dict[str, Any]:
        return {name: state[NAMELESS] if state.keys() == {NAMELESS} else state for name, state in self._others.items()}


def _conflicts(planned: _PlannedState) -> Iterator[str]:
    for path, copies in planned.copies.items():
        first = next(iter(copies.values()))
        other = next((fqn for fqn, value in copies.items() if not _equal(first, value)), None)
        if other is not None:
            yield (
                f"{next(iter(copies))} and {other} share a flat parameter, but were saved with different "
                f"{path_name(path)}, {_brief(first)} and {_brief(copies[other])}; load them into a model with "
                "use_orig_params=True"
            )


def _mixed_forms_error(path: Path, originals: Iterable[LocalParameter]) -> str:
    return (
        f"{path_name(path)} of {', '.join(original.fqn for original in originals)}, which share a flat parameter, was "
        "saved with different dtypes or nesting; load it into a model with use_orig_params=True"
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def _same_layout(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if a state has the placement, local shape and device of its parameter."""
    if isinstance(state, DTensor) != isinstance(parameter, DTensor):
        return False
    if isinstance(state, DTensor) and isinstance(parameter, DTensor) and state.placements != parameter.placements:
        return False
    one, other = value_of(state), value_of(parameter)
    return one.shape == other.shape and one.device == other.device


def _device(planned: _PlannedState, path: Path) -> torch.device:
    """Return the device where torch.optim keeps replicated state: steps on the host, unless kernels count them."""
    options = planned.options
    if path[-1] == STEP and not (options.get("capturable") or options.get("fused")):
        return torch.device("cpu")
    return value_of(planned.member.parameter).device


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
    _names: dict[str, str]  # first FQN of a parameter here -> the FQN that it was saved under

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
        if groups is None:
            self.known = own & state.keys() or set(state)
            self.others = [name for name in state if name not in own]
        else:
            self.known = set(self._group_of)
            self.others = [name for name in state if name not in self.known]
        self._names = {
            original.fqn: next((n for n in original.fqns if n in self.known), original.fqn) for original in originals
        }
        self.problems = list(self._only_one_side(originals, own, state)) if strict and groups is not None else []
        self.options = [self._options(number, group) for number, group in enumerate(members)]

    def name_of(self, original: LocalParameter) -> str:
        """Return the name that a parameter was saved under, or would have been."""
        return self._names[original.fqn]

    def _only_one_side(
        self, originals: Sequence[LocalParameter], own: set[str], state: Mapping[str, Any]
    ) -> Iterator[str]:
        # Frozen parameters have no state: whether they were given to an optimizer says nothing.
        missing = [
            original.fqn
            for original in originals
            if self.name_of(original) not in self.known and original.parameter.requires_grad
        ]
        if missing:
            yield f"the saved optimizer has no parameters {_list(missing)}"
        unexpected = [fqn for fqn in self._group_of if fqn not in own and state.get(fqn)]
        if unexpected:
            yield f"the checkpoint has state for {_list(unexpected)}, which this optimizer does not have"

    def _options(self, number: int, members: Sequence[OptimizedParameter]) -> dict[str, Any]:
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
        for other, others in rest:
            differing = _differing(options, group_options(self._groups[other]))
            if differing:
                self.problems.append(
                    f"group {number} of the optimizer has parameters that were saved in groups with different options "
                    f"({', '.join(differing)}): {_list(names)} and {_list(others)}; group them as in the saved "
                    "optimizer"
                )
        return options


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not _same(one[name], other[name])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
        return alike and bool((one == other).all())
    if holds_tensors(one) or holds_tensors(other):
        pairs = zip(one, other, strict=False) if isinstance(one, (list, tuple)) else ()
        return isinstance(one, (list, tuple)) and len(one) == len(other) and all(_same(a, b) for a, b in pairs)
    return bool(one == other)


def _list(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
