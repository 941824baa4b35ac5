"""State dicts of the optimizers of wrapped models, by FQN."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.state.optimizer.state import optimized_groups
from fullshard.checkpoint.state.types import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    StateDictSettings,
    StateDictType,
)
from fullshard.frontend.arguments import check_instance
from fullshard.wrapper.state_dict.model import WrapperState
from fullshard.wrapper.state_dict.optimizer_conversion import (
    load_local,
    save_local,
    saved_state,
    state_to_load,
)

__all__ = ["WrapperOptim"]

State = dict[str, Any]
Input = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class WrapperOptim:
    """Optimizer state dict methods of ``FullyShardedDataParallel``.

    State dicts are portable between all kinds of wrapping and numbers of ranks. Their form is ``{"state": {FQN: {name:
    value}}, "param_groups": [{"params": [FQN, ...], ...}]}``. Modules sharded by ``fully_shard`` may be among the
    wrappers. The optimizer is never stepped.

    Migration from fairscale: ``gather_full_optim_state_dict(optim)`` is ``full_optim_state_dict(model, optim)``, with
    ``rank0_only=False`` if every rank needs the result, and ``state_dict_on_rank_0_only`` is ``rank0_only``.
    ``get_shard_from_optim_state_dict(state)`` is ``shard_full_optim_state_dict(state, model, optim=optim)``.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Return the optimizer state keyed by FQN, of the type set by ``set_state_dict_type``. All ranks call it.

        State is gathered tensor by tensor: peak memory is the result and one more tensor.

        Args:
            model: Model that the optimizer optimizes.
            optim: Any optimizer. All ranks must have state for the same parameters, also where a rank's shard is empty.
            optim_state_dict: State dict of ``optim``, if it was edited; without ``"param_groups"`` to leave these out.
                None: the current state.
            group: Process group whose first rank gets the result with ``rank0_only``. None: the ranks of the model.

        Returns:
            The state dict. Full: full tensors in separate memory; with ``rank0_only``, empty on other ranks. Sharded:
            DTensors with ``Shard(0)``; those of ``fully_shard`` modules share memory with the optimizer; before the
            first step, its initial state, as a target for loading. Local: the optimizer's own tensors, keyed by the
            names of registered parameters. Tied parameters are keyed by their first FQN.

        Raises:
            ValueError: If the optimizer has parameters that are not in the model.
            FullshardError: On all ranks that share parameters, if their state differs.
            PhaseError: In the middle of a step.
        """
        settings = WrapperState.get_state_dict_type(model)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return save_local(model, optim, optim_state_dict)
        return saved_state(model, optim, optim_state_dict, settings, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Convert a result of ``optim_state_dict`` to a state dict that ``optim`` can load. All ranks call it.

        Parameters are matched by FQN. Wrapping, parameter order and parameter groups may differ from those at saving.

        Args:
            model: Model that the optimizer optimizes.
            optim: Optimizer to load into. It need not have state yet, and is not changed.
            optim_state_dict: State with full tensors, DTensors or torch's ``ShardedTensor``. With ``rank0_only``, the
                first rank's state is broadcast tensor by tensor; it must consist of full tensors.
            is_named_optimizer: Key the result by FQNs instead of indices.
            load_directly: Also load the result into ``optim``.
            group: Process group of the broadcast with ``rank0_only``. None: the ranks of the model.

        Returns:
            The state dict for ``optim.load_state_dict``.

        Raises:
            ValueError: If parameters are missing or unexpected, a shape does not match, or the parameters of one group
                were saved with different options.
            FullshardError: If parameters in one flat parameter were saved with different step counts.
        """
        settings = WrapperState.get_state_dict_type(model)
        named, rank0_only = is_named_optimizer, getattr(settings.optim_state_dict_config, "rank0_only", False)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            result = load_local(model, optim, optim_state_dict, named=named)
        else:
            result = state_to_load(model, optim, optim_state_dict, named=named, rank0_only=rank0_only, group=group)
        if load_directly:
            optim.load_state_dict(result)
        return result

    # ---------------------------------------------------------------- older methods

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Input = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Return the full optimizer state in CPU memory, keyed by FQN. All ranks call it.

        Args:
            model: Model that the optimizer optimizes.
            optim: The optimizer.
            optim_input: For compatibility; not used.
            rank0_only: Return the state only on the first rank.
            group: Process group whose first rank gets the result with ``rank0_only``. None: the ranks of the model.

        Returns:
            The state dict; empty on other ranks with ``rank0_only``.

        Raises:
            ValueError: As ``optim_state_dict``.
            FullshardError: As ``optim_state_dict``.
            PhaseError: As ``optim_state_dict``.
        """
        settings = StateDictSettings(optim_state_dict_config=FullOptimStateDictConfig(rank0_only=rank0_only))
        return saved_state(model, optim, None, settings, group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> State:
        """Return the sharded optimizer state in CPU memory, as DTensors keyed by FQN. All ranks call it.

        Args:
            model: Model that the optimizer optimizes.
            optim: The optimizer.
            group: For compatibility; the ranks of the model hold the state.

        Returns:
            The state dict.

        Raises:
            ValueError: As ``optim_state_dict``.
            FullshardError: As ``optim_state_dict``.
            PhaseError: As ``optim_state_dict``.
        """
        return saved_state(model, optim, None, StateDictSettings(StateDictType.SHARDED_STATE_DICT), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: State,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """Convert a result of ``full_optim_state_dict`` to this rank's state dict for the optimizer to load.

        Args:
            full_optim_state_dict: The full state, on every rank.
            model: Model that the optimizer optimizes.
            optim_input: Parameters or groups of the optimizer, if it does not exist yet. None: ``model.parameters()``.
            optim: The optimizer, instead of ``optim_input``.

        Returns:
            The state dict for ``optim.load_state_dict``.

        Raises:
            ValueError: As ``optim_state_dict_to_load``.
            FullshardError: As ``optim_state_dict_to_load``.
        """
        return state_to_load(model, _optimizer(model, optim_input, optim), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: State, model: nn.Module, optim: torch.optim.Optimizer
    ) -> State:
        """Convert a result of ``sharded_optim_state_dict`` for this rank's optimizer. All ranks call it.

        Args:
            sharded_optim_state_dict: The sharded state.
            model: Model that the optimizer optimizes.
            optim: The optimizer.

        Returns:
            The state dict for ``optim.load_state_dict``.

        Raises:
            ValueError: As ``optim_state_dict_to_load``.
            FullshardError: As ``optim_state_dict_to_load``.
        """
        return state_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: State | None,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Convert a full state that only the first rank has to each rank's state dict. All ranks of ``group`` call it.

        Args:
            full_optim_state_dict: The full state on the first rank; not used on other ranks.
            model: Model that the optimizer optimizes.
            optim_input: Parameters or groups of the optimizer, if it does not exist yet. None: ``model.parameters()``.
            optim: The optimizer, instead of ``optim_input``.
            group: Process group of the broadcast. None: the ranks of the model.

        Returns:
            The state dict for ``optim.load_state_dict``.

        Raises:
            ValueError: As ``optim_state_dict_to_load``.
            FullshardError: As ``optim_state_dict_to_load``.
        """
        optimizer = _optimizer(model, optim_input, optim)
        return state_to_load(model, optimizer, full_optim_state_dict, rank0_only=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Input = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """Convert the keys of an optimizer state dict from parameter indices to FQNs, or the reverse.

        For optimizers of models without flat parameters, such as models that are not wrapped. Tensors are not copied.

        Args:
            optim_state_dict: State dict keyed by FQNs or by indices.
            optim_state_key_type: Key type of the result.
            model: Model that the optimizer optimizes.
            optim_input: Parameters or groups of the optimizer. None: ``model.parameters()``.
            optim: The optimizer, instead of ``optim_input``.

        Returns:
            A new state dict.

        Raises:
            TypeError: If ``optim_state_key_type`` is not an ``OptimStateKeyType``.
            ValueError: If keys are of both types or unknown, or parameters share a flat parameter.
        """
        check_instance("rekey_optim_state_dict: optim_state_key_type", optim_state_key_type, OptimStateKeyType)
        named = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        groups = optim_state_dict.get("param_groups", [])
        keys = [*optim_state_dict["state"], *(key for group in groups for key in group["params"])]
        kinds = {type(key) for key in keys}
        if not kinds <= {str} and not kinds <= {int}:
            raise ValueError(
                "rekey_optim_state_dict: expected either names or indices of parameters as keys, found both: "
                f"{keys[:8]}"
            )
        if not kinds or kinds == {str if named else int}:
            return optim_state_dict
        names = _names(model, _optimizer(model, optim_input, optim))
        new_keys: dict[Any, Any] = {name: index for index, found in enumerate(names) for name in found}
        if named:
            new_keys = dict(enumerate(found[0] for found in names))
        unknown = [key for key in keys if key not in new_keys]
        if unknown:
            raise ValueError(
                f"rekey_optim_state_dict: expected the parameters of this optimizer, {list(new_keys)[:8]} ..., also "
                f"found {unknown[:8]}; pass the model and optimizer that the state dict belongs to"
            )
        result: State = {"state": {new_keys[key]: value for key, value in optim_state_dict["state"].items()}}
        if "param_groups" in optim_state_dict:
            rekeyed = [{**group, "params": [new_keys[key] for key in group["params"]]} for group in groups]
            if not named:
                for group in rekeyed:
                    group["params"].sort()  # indices are in the order of the groups
                rekeyed.sort(key=lambda group: group["params"][:1])
            result["param_groups"] = copy.deepcopy(rekeyed)
        return result


def _optimizer(model: nn.Module, given: Input, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the optimizer; if it does not exist yet, an object with the groups that its arguments stand for."""
    if optimizer is not None:
        return optimizer
    entries: list[Any] = list(model.parameters() if given is None else given)
    groups = [dict(group) for group in entries] if entries and isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        own = group["params"]
        group["params"] = [own] if isinstance(own, torch.Tensor) else list(own)
    return SimpleNamespace(param_groups=groups, state={})


def _names(model: nn.Module, optimizer: Any) -> list[tuple[str, ...]]:
    """Return all FQNs of each parameter of an optimizer, in its order."""
    members = [member for group in optimized_groups(model, optimizer.param_groups) for member in group]
    flat = [member for member in members if member.flat]
    if flat:
        raise ValueError(
            f"rekey_optim_state_dict: {', '.join(flat[0].fqns)} share a flat parameter, so their state cannot be keyed "
            "by indices; use optim_state_dict and optim_state_dict_to_load"
        )
    return [member.originals[0].fqns for member in members]
