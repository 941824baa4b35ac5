"""State dicts of optimizers of wrapped models: by the names that parameters had before wrapping."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.arguments import check_instance
from fullshard.checkpoint.optimizer_entries import optimized_groups
from fullshard.state_dict_types import OptimStateKeyType, StateDictType
from fullshard.wrapper_optim_forms import Form, Parameters, load_local, save_local, saved_state, state_to_load
from fullshard.wrapper_state import WrapperState

__all__ = ["WrapperOptim"]

State = dict[str, Any]
Input = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class WrapperOptim:
    """What of an optimizer is saved and loaded: see the module docstring.

    A dictionary of this form goes both ways between all kinds of models, wrapped in whatever way, on any number of
    ranks: ``{"state": {FQN: {name: value}}, "param_groups": [{"params": [FQN, ...], ...}]}``. ``fully_shard`` units may
    be among the wrappers. No step is run for it, ever.

    Programs for fairscale: ``gather_full_optim_state_dict(optim)`` is ``full_optim_state_dict(model, optim)``, with
    ``rank0_only=False`` if every rank is to have it, and ``state_dict_on_rank_0_only`` is ``rank0_only``;
    ``get_shard_from_optim_state_dict(state)`` is ``shard_full_optim_state_dict(state, model, optim=optim)``.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """The state of ``optim``, in the form that :meth:`set_state_dict_type` has set. All ranks call it.

        Gathered tensor by tensor, so that memory is needed for the result and one tensor more.

        Args:
            model: Whose parameters it optimizes.
            optim: Any. All ranks must hold state for the same parameters, also where their part of one is empty.
            optim_state_dict: Its state dict, if that was changed; without ``param_groups`` if these are not wanted.
            group: Whose first rank ``rank0_only`` means. None: the ranks that the model is spread over.

        Returns:
            FULL: whole tensors, with memory of their own; with ``rank0_only`` empty on other ranks. SHARDED: DTensors
            that are cut over rows; those of ``fully_shard`` units are live; before the first step what that would begin
            with, to load into. LOCAL: the live state, by the names of what is registered. Tied parameters have their
            first name.

        Raises:
            ValueError: If the optimizer has parameters that are not the model's.
            FullshardError: On all ranks that share parameters, if they hold different state.
            PhaseError: In the middle of a step.
        """
        form = Form.of(WrapperState.get_state_dict_type(model))
        if form.type is StateDictType.LOCAL_STATE_DICT:
            return save_local(model, optim, optim_state_dict)
        return saved_state(model, optim, optim_state_dict, form, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """What :meth:`optim_state_dict` has returned, as a state dict that ``optim`` can load. All ranks call it.

        Parameters are matched by name; that they were wrapped, ordered or grouped otherwise does not matter.

        Args:
            model: Whose parameters it optimizes.
            optim: The one to load into; its state need not exist yet, and does not change.
            optim_state_dict: Whole tensors, DTensors, or torch's ``ShardedTensor``. With ``rank0_only`` only the first
                rank's counts, which then has no ``ShardedTensor``, and is sent to the others tensor by tensor; they
                pass anything.
            is_named_optimizer: Whether the result is to be keyed by names instead of numbers.
            load_directly: Have ``optim`` load it, too.
            group: The ranks that get it with ``rank0_only``. None: those that the model is spread over.

        Raises:
            ValueError: If parameters are missing or unexpected, a shape is wrong, or parameters of one group were saved
                with different options.
            FullshardError: If a flat parameter's parts were saved with different numbers of steps.
        """
        form = Form.of(WrapperState.get_state_dict_type(model))
        if form.type is StateDictType.LOCAL_STATE_DICT:
            result = load_local(model, optim, optim_state_dict, named=is_named_optimizer)
        else:
            result = state_to_load(
                model,
                optim,
                optim_state_dict,
                named=is_named_optimizer,
                first_only=form.first_only,
                group=group,
            )
        if load_directly:
            optim.load_state_dict(result)
        return result

    # ---------------------------------------------------------------- older names

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Input = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """As :meth:`optim_state_dict` in the form FULL, in CPU memory. ``optim_input`` is not needed."""
        return saved_state(model, optim, None, Form(StateDictType.FULL_STATE_DICT, first_only=rank0_only), group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> State:
        """As :meth:`optim_state_dict` in the form SHARDED, in CPU memory."""
        return saved_state(model, optim, None, Form(StateDictType.SHARDED_STATE_DICT), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: State,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """This rank's part of what :meth:`full_optim_state_dict` returned, for the optimizer to load.

        Args:
            full_optim_state_dict: On every rank.
            model: Whose parameters are optimized.
            optim_input: What the optimizer is built from, if it is not there yet. None: ``model.parameters()``.
            optim: The optimizer.
        """
        optimizer = _optimizer(model, optim_input, optim)
        return state_to_load(model, optimizer, full_optim_state_dict, named=False, first_only=False, group=None)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: State, model: nn.Module, optim: torch.optim.Optimizer
    ) -> State:
        """As :meth:`shard_full_optim_state_dict`, of :meth:`sharded_optim_state_dict`'s result. All ranks call it."""
        return state_to_load(model, optim, sharded_optim_state_dict, named=False, first_only=False, group=None)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: State | None,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """As :meth:`shard_full_optim_state_dict`, of what only the first rank has. All ranks of ``group`` call it."""
        optimizer = _optimizer(model, optim_input, optim)
        return state_to_load(model, optimizer, full_optim_state_dict, named=False, first_only=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """A state dict keyed by the names of parameters instead of their numbers in the optimizer, or the reverse.

        That is for optimizers of models without flat parameters, mostly plain ones. Tensors are not copied.

        Args:
            optim_state_dict: Keyed by either.
            optim_state_key_type: What the result is to be keyed by.
            model: Whose parameters are optimized.
            optim_input: What the optimizer is built from. None: ``model.parameters()``.
            optim: The optimizer, instead of ``optim_input``.

        Raises:
            ValueError: If keys are of both kinds, or unknown.
        """
        check_instance("rekey_optim_state_dict: optim_state_key_type", optim_state_key_type, OptimStateKeyType)
        named = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        keys = [*optim_state_dict["state"]]
        keys += [key for group in optim_state_dict.get("param_groups", []) for key in group["params"]]
        kinds = {type(key) for key in keys}
        if not kinds <= {str} and not kinds <= {int}:
            raise ValueError(
                "rekey_optim_state_dict: expected names of parameters or their numbers as keys, not both, found "
                f"{keys[:8]}"
            )
        if not kinds or kinds == {str if named else int}:
            return optim_state_dict
        names = _names(model, _optimizer(model, optim_input, optim))
        if named:
            return _rekeyed(optim_state_dict, dict(enumerate(found[0] for found in names)))
        result = _rekeyed(optim_state_dict, {name: n for n, found in enumerate(names) for name in found})
        for group in result.get("param_groups", []):
            group["params"].sort()  # an optimizer counts its parameters in order
        result.get("param_groups", []).sort(key=lambda group: group["params"][:1])
        return result


def _optimizer(model: nn.Module, given: Input, optimizer: torch.optim.Optimizer | None) -> Any:
    if optimizer is not None:
        return optimizer
    return Parameters(model.parameters() if given is None else given)


def _names(model: nn.Module, optimizer: Any) -> list[tuple[str, ...]]:
    """All names of each parameter of an optimizer, in its order."""
    members = [member for group in optimized_groups(model, optimizer.param_groups) for member in group]
    flat = [member for member in members if member.flat]
    if flat:
        raise ValueError(
            f"rekey_optim_state_dict: {', '.join(flat[0].fqns)} are one flat parameter, so their state cannot be keyed "
            "by numbers; use optim_state_dict and optim_state_dict_to_load"
        )
    return [member.parts[0].fqns for member in members]


def _rekeyed(state_dict: Mapping[str, Any], keys: Mapping[Any, Any]) -> State:
    groups = state_dict.get("param_groups", [])
    used = [*state_dict["state"], *(key for group in groups for key in group["params"])]
    unknown = [key for key in used if key not in keys]
    if unknown:
        raise ValueError(
            f"rekey_optim_state_dict: expected the parameters of this optimizer, {list(keys)[:8]} ..., found "
            f"{unknown[:8]} as well; pass the model and optimizer that the state dict belongs to"
        )
    result: State = {"state": {keys[key]: value for key, value in state_dict["state"].items()}}
    if "param_groups" in state_dict:
        result["param_groups"] = [
            {
                **copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
                "params": [keys[k] for k in group["params"]],
            }
            for group in groups
        ]
    return result
