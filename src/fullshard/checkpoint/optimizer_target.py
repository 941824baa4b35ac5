"""Where the saved state of an optimizer goes: planned as a whole, then filled, then put into the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.checkpoint.optimizer_entries import (
    NAMELESS,
    STEP,
    Described,
    OptimizedParameter,
    Path,
    StateShapes,
    group_options,
    leaves_of,
    mapped,
    optimized_groups,
    path_name,
)
from fullshard.checkpoint.optimizer_groups import SavedGroups
from fullshard.checkpoint.parameters import LocalParameter
from fullshard.checkpoint.pieces import Pieces
from fullshard.engine.parameter import value_of
from fullshard.errors import FullshardError

__all__ = ["OptimizerTarget"]

Leaves = dict[Path, Any]


@dataclass(eq=False)
class _Entries:
    """What one parameter object gets.

    Attributes:
        member: Whose.
        options: Of its group, as they will be.
        present: What its state holds now.
        skeletons: By name, an entry that is nested as the new one is to be.
        values: The new leaves.
        copies: Of leaves that the parts of a flat parameter have each: these, which have to agree, by FQN.
        blank: Memory of parts that nothing was saved for.
    """

    member: OptimizedParameter
    options: Mapping[str, Any]
    present: Leaves
    skeletons: dict[Any, Any] = field(default_factory=dict)
    values: Leaves = field(default_factory=dict)
    copies: dict[Path, dict[str, Any]] = field(default_factory=dict)
    blank: list[torch.Tensor] = field(default_factory=list)

    def state(self) -> dict[Any, Any]:
        """As an optimizer keeps it."""
        state: dict[Any, Any] = mapped(self.skeletons, lambda path, _: self.values[path])
        return state


class OptimizerTarget:
    """What a checkpoint has of an optimizer, matched with what this optimizer optimizes. By names only: wrapping,
    ranks, and the order and grouping of parameters may have changed since.

    Use it in this order: look at :attr:`problems`; fill the tensors and :class:`Pieces` in :attr:`shared`, and look at
    :meth:`conflicts`; fill those in :attr:`tree`; :meth:`install`. No step is run, and nothing of the optimizer changes
    before, save that its memory is filled. (What is in :attr:`shared` is in :attr:`tree`, too.)

    Args:
        model: Whose parameters are optimized; at rest.
        optimizer: Any, new or used.
        saved: By FQN and name, :class:`Described` for tensors, however nested, and values; tensors are values that are
            there already. As :func:`~fullshard.checkpoint.optimizer_state.describe` makes it.
        groups: The saved groups: options, and FQNs in ``params``. None: nobody knows, all stays as it is.
        strict: Whether parameters that only one side has are problems. Otherwise their state stays or is left out.
        reuse: Whether tensors that the optimizer has are filled where they fit. Otherwise all are new.

    Raises:
        ValueError: If the optimizer has parameters that are not the model's.
        PhaseError: In the middle of a step.

    Attributes:
        tree: What to fill, in the form of :func:`~fullshard.checkpoint.optimizer_state.optimizer_state`, under the
            names that were saved; values, and tensors that were passed as such, are there already.
        problems: What does not fit, in words. The same on all ranks.
    """

    tree: dict[str, Any]
    problems: list[str]
    _optimizer: torch.optim.Optimizer
    _groups: list[list[OptimizedParameter]]
    _options: list[dict[str, Any]]  # of each group, as saved
    _entries: list[_Entries]
    _kept: set[int]  # ids of parameters whose state stays as it is
    _others: dict[str, dict[Any, Any]]  # what users had put into the state
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
        matched = SavedGroups(groups, saved, self._groups, strict=strict)
        self.problems, self._options = matched.problems, matched.options
        self._entries, self._kept = [], set()
        self.tree = {"state": {}, "param_groups": [] if groups is None else [dict(group) for group in groups]}
        parts = [(part, matched.name_of(part)) for group in self._groups for m in group for part in m.parts]
        self._shapes = StateShapes(
            (path, leaf.shape, part.shape)
            for part, name in parts
            for path, leaf in leaves_of(saved.get(name, {})).items()
            if isinstance(leaf, (Described, torch.Tensor))
        )
        names = dict(parts)
        for number, group in enumerate(self._groups):
            options = {**optimizer.param_groups[number], **self._options[number]}
            for member in group:
                states = {part: saved[names[part]] for part in member.parts if saved.get(names[part])}
                if states:
                    self._plan(member, options, states, names)
                elif not any(names[part] in matched.known for part in member.parts):
                    self._kept.add(id(member.parameter))
        self._others = {}
        for name in matched.others:
            value = saved[name] if isinstance(saved[name], Mapping) else {NAMELESS: saved[name]}
            self._others[name] = dict(mapped(value, _place_for_other))
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
        entries = _Entries(member, options, leaves_of(present or {}))
        for state in states.values():
            for name, value in state.items():
                entries.skeletons.setdefault(name, value)
        leaves = {part: leaves_of(state) for part, state in states.items()}
        places: dict[LocalParameter, Leaves] = {part: {} for part in states}
        for path in dict.fromkeys(path for found in leaves.values() for path in found):
            found = {part: own[path] for part, own in leaves.items() if path in own}
            try:
                placed = self._place(entries, path, found, states)
            except ValueError as error:
                self.problems.append(str(error))
                continue
            for part, place in placed.items():
                places[part][path] = place
        for part, state in states.items():
            own = places[part]
            self.tree["state"][names[part]] = mapped(state, lambda path, _, own=own: own.get(path))  # type: ignore[misc]
        self._entries.append(entries)

    def _place(
        self,
        entries: _Entries,
        path: Path,
        found: Mapping[LocalParameter, Any],
        states: Mapping[LocalParameter, Mapping[Any, Any]],
    ) -> dict[LocalParameter, Any]:
        """Make room for a leaf of one parameter object; what is to be filled for each of its parts.

        Raises:
            ValueError: If it does not fit.
        """
        member = entries.member
        if any(part not in found and path[0] in states[part] and len(path) > 1 for part in states):
            raise ValueError(_different_forms(path, states))
        described = {part: leaf for part, leaf in found.items() if isinstance(leaf, Described)}
        cut = [part for part, leaf in described.items() if self._is_cut(entries, path, leaf, part)]
        if cut:
            other = [part for part, leaf in found.items() if part not in cut and leaf is not None]
            if other or len({described[part].dtype for part in cut}) > 1:
                raise ValueError(_different_forms(path, found))
            tensor = entries.values[path] = self._memory(entries, path, described[cut[0]].dtype)
            entries.blank += [part.local_of(tensor) for part in member.parts if part not in cut]
            return {part: part.cut(tensor) for part in cut}
        placed = {part: self._shared_place(entries, path, leaf) for part, leaf in found.items()}
        entries.values[path] = placed[next(iter(placed))]
        if len(placed) > 1:
            entries.copies[path] = {part.fqn: value for part, value in placed.items()}
        return {part: Pieces.of(p) if isinstance(p, DTensor) else p for part, p in placed.items()}

    def _is_cut(self, entries: _Entries, path: Path, leaf: Described, part: LocalParameter) -> bool:
        if self._shapes.is_cut(path, leaf.shape, part.shape):
            return True
        present = entries.present.get(path)
        wrong = isinstance(present, DTensor) and present.shape == part.shape != leaf.shape
        if wrong or self._shapes.is_wrong(path, leaf.shape, part.shape):
            raise ValueError(
                f"{part.fqn}: {path_name(path)} was saved with shape {tuple(leaf.shape)}, but the parameter has shape "
                f"{tuple(part.shape)}"
            )
        return False

    def _memory(self, entries: _Entries, path: Path, dtype: torch.dtype) -> torch.Tensor:
        """For a state that is cut as its parameter is."""
        parameter, present = entries.member.parameter, entries.present.get(path)
        if isinstance(present, torch.Tensor) and _alike(present, parameter) and present.dtype is dtype:
            return present
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
            return torch.zeros_like(parameter.detach(), dtype=dtype)

    def _shared_place(self, entries: _Entries, path: Path, leaf: Any) -> Any:
        """For what every rank has all of."""
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(_device(entries, path), copy=True)
        if not isinstance(leaf, Described):
            return copy.deepcopy(leaf)
        present, parameter = entries.present.get(path), entries.member.parameter
        device = _device(entries, path)
        fits = isinstance(present, torch.Tensor) and present.shape == leaf.shape and present.dtype is leaf.dtype
        if fits and not entries.member.flat and present.device == device:  # type: ignore[union-attr]
            return present
        with torch.inference_mode(False), torch.no_grad():
            new = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            if isinstance(parameter, DTensor) and new.dim():
                # What an optimizer computes from DTensors are DTensors, and these do not mix with plain tensors.
                mesh = parameter.device_mesh
                return DTensor.from_local(new, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return new

    # ---------------------------------------------------------------- filled

    @property
    def shared(self) -> dict[str, dict[str, Any]]:
        """The part of ``tree["state"]`` that :meth:`conflicts` looks at: mostly nothing, and a few numbers."""
        asked = {fqn: {path[0] for path in e.copies} for e in self._entries for fqn in e.member.fqns if e.copies}
        return {
            fqn: {name: value for name, value in self.tree["state"][fqn].items() if name in names}
            for fqn, names in asked.items()
            if fqn in self.tree["state"]
        }

    def conflicts(self) -> list[str]:
        """What does not fit, after :attr:`shared` was filled: a flat parameter has one state for all of its parts."""
        return [text for entries in self._entries for text in _conflicts(entries)]

    def install(self) -> None:
        """Put everything into the optimizer: state, and options of groups.

        Raises:
            FullshardError: If there are conflicts. Nothing of the optimizer has changed then.
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
        # As of torch.optim's load_state_dict: optimizers bring what older versions of them have saved up to date.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(optimizer)

    def state_dict(self, names: Mapping[int, str] | None = None) -> dict[str, Any]:
        """What :meth:`install` would put in, as a state dict for the optimizer to load.

        Args:
            names: Of parameters by their ids, to key it by. None: by their numbers in the optimizer.

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
        for entries in self._entries:
            with torch.no_grad():
                for memory in entries.blank:
                    memory.zero_()
            if cast:
                for path, value in entries.values.items():
                    entries.values[path] = self._in_dtype_of(entries.member.parameter, path, value)
            yield entries.member, entries.state()

    def _in_dtype_of(self, parameter: torch.Tensor, path: Path, value: Any) -> Any:
        """torch's own optimizers keep what is cut in the dtype of the parameter, which may have changed."""
        ours = isinstance(value, torch.Tensor) and _alike(value, parameter) and path[-1] != STEP
        if not ours or not (value.is_floating_point() and parameter.is_floating_point()):
            return value
        return value.to(parameter.dtype) if type(self._optimizer).__module__.startswith("torch.optim") else value

    def _other_states(self) -> dict[str, Any]:
        return {name: state[NAMELESS] if state.keys() == {NAMELESS} else state for name, state in self._others.items()}


def _conflicts(entries: _Entries) -> Iterator[str]:
    for path, copies in entries.copies.items():
        first = next(iter(copies.values()))
        other = next((fqn for fqn, value in copies.items() if not _equal(first, value)), None)
        if other is not None:
            yield (
                f"{next(iter(copies))} and {other} are one flat parameter here, but were saved with different "
                f"{path_name(path)}, {_brief(first)} and {_brief(copies[other])}; load them into a model with "
                "use_orig_params=True"
            )


def _different_forms(path: Path, parts: Iterable[LocalParameter]) -> str:
    return (
        f"{path_name(path)} of {', '.join(part.fqn for part in parts)}, which are one flat parameter here, was saved "
        "in different forms; load it into a model with use_orig_params=True"
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def _alike(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state lies as its parameter does."""
    if isinstance(state, DTensor) != isinstance(parameter, DTensor):
        return False
    if isinstance(state, DTensor) and isinstance(parameter, DTensor) and state.placements != parameter.placements:
        return False
    one, other = value_of(state), value_of(parameter)
    return one.shape == other.shape and one.device == other.device


def _device(entries: _Entries, path: Path) -> torch.device:
    """Where torch.optim keeps what is not cut: steps on the host, unless kernels count them."""
    options = entries.options
    if path[-1] == STEP and not (options.get("capturable") or options.get("fused")):
        return torch.device("cpu")
    return value_of(entries.member.parameter).device


def _place_for_other(path: Path, leaf: Any) -> Any:
    if isinstance(leaf, Described):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _option(present: Any, saved: Any) -> Any:
    """A loaded option; one that is a tensor now stays that tensor, which captured graphs and compiled code know."""
    if isinstance(present, torch.Tensor) and isinstance(saved, (torch.Tensor, int, float)):
        if not isinstance(saved, torch.Tensor):
            return present.fill_(saved)
        if present.shape == saved.shape and present.dtype is saved.dtype:
            return present.copy_(saved)
    return saved.detach().clone() if isinstance(saved, torch.Tensor) else copy.deepcopy(saved)
