"""``shard``: one call that shards a model with defaults for transformers, and prints the units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.activation_checkpoint import ActivationWrapper, apply_activation_checkpointing, checkpoint_wrapper
from fullshard.composable.fsdp_module import FSDPModule
from fullshard.composable.fully_shard import check_plan, fully_shard, shard_as_planned
from fullshard.engine.ownership import Subtree
from fullshard.frontend.arguments import (
    check_bool,
    check_instance,
    check_parameters,
    check_reshard,
    root_modules,
    shard_mesh_for,
)
from fullshard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.wrap import Policy, PolicyFunction, WrapPlan, plan_blocks, plan_for
from fullshard.wrap.blocks import plain_module, repeated_blocks
from fullshard.wrap.plan import ShardingPlan, WrapTargets
from fullshard.wrap.tree import ModuleTree, has_forward

__all__ = ["shard"]

_API = "shard"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mixed_precision: Literal["bf16", "fp16"] | MixedPrecisionPolicy | None = None,
    checkpoint_activations: bool | float | Callable[[nn.Module], bool] = False,
    offload: bool | OffloadPolicy = False,
    reshard_after_forward: bool | int | None = None,
    plan: WrapPlan | WrapTargets | Policy | PolicyFunction | ShardingPlan | None = None,
    report: bool = True,
) -> FSDPModule:
    """Shard a model over the ranks in place, with units chosen by its structure, and print them on rank 0.

    It calls ``fully_shard`` on each repeated block (transformer layer), on large modules outside of the blocks, such as
    the embedding, on the last norm and the head together, and on the model: see ``fullshard.wrap.plan_blocks``. A model
    on the meta device stays there: call ``model.to_empty(device=...)`` and initialize it afterwards. Build the
    optimizer after this call. All ranks choose the same units, because the choice depends on the structure only.

    If the model's forward reads the weight of a module that it does not call, such as ``x @ self.embed.weight.T``,
    leave that module in the root unit: remove it from the dict ``plan_blocks(model).modules``, and pass the dict as
    ``plan``. Do the same with units that not all ranks call in the same order, such as experts in a list of another
    name.

    Args:
        model: The model. Modules that are already sharded stay as they are.
        mesh: The ranks. 1-D: shard over them. 2-D: replicate over the first axis and shard over the second (HSDP).
            None: all ranks; this initializes the default process group if necessary, from the variables of torchrun, or
            for a single rank if there are none.
        mixed_precision: ``"bf16"``: compute in bf16 and reduce gradients in fp32; shards keep their dtype.
            ``"fp16"``: the same with fp16, for which training needs a ``ShardedGradScaler``. A
            ``MixedPrecisionPolicy``; its ``output_dtype`` applies to the outputs of the model, not to those of blocks.
            None: the parameters' dtype.
        checkpoint_activations: True: recompute each repeated block in backward, except for blocks that are wrapped in
            activation checkpointing already. A share from 0 to 1: so many of them, evenly spread (0.5: every second
            one). A function: recompute the modules for which it returns True. False: wrap nothing.
        offload: True: keep shards, gradients and optimizer state in CPU memory. Or an ``OffloadPolicy``.
        reshard_after_forward: As for ``fully_shard``. None: True, except for the root and for the two units whose
            forwards end last, which stay unsharded until backward.
        plan: Units to shard instead of the default ones: a plan of ``fullshard.wrap``, a dict of arguments by module,
            or a wrap policy. Their arguments override those of this call. What ``fullshard.plan`` returns says what
            the arguments above are, too.
        report: Print the units, precision and checkpointing on rank 0.

    Returns:
        The same ``model``, which is now also an ``FSDPModule``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``model`` is already sharded, a value is not one of those above, a plan is of another model, or
            no module is to be recomputed although ``checkpoint_activations`` is not False.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import shard

        block = nn.TransformerEncoderLayer(32, nhead=2, dim_feedforward=64, batch_first=True)
        model = nn.TransformerEncoder(block, num_layers=4, enable_nested_tensor=False)
        model = shard(model, mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.randn(2, 5, 32)).float().square().mean().backward()
        optimizer.step()
        ```
    """
    check_instance(_API, model, nn.Module)
    root_modules(_API, model)
    check_bool(f"{_API}: report", report)
    if isinstance(plan, ShardingPlan):
        given = {
            "mesh": mesh,
            "mixed_precision": mixed_precision,
            "checkpoint_activations": checkpoint_activations,
            "offload": offload,
            "reshard_after_forward": reshard_after_forward,
        }
        passed = (name for name, value in given.items() if value is not None and value is not False)
        return shard_as_planned(_API, model, plan, passed)  # type: ignore[no-any-return]
    precision, offload_policy = _precision(mixed_precision), _offloading(offload)
    ranks = shard_mesh_for(_API, mesh, None)
    check_reshard(_API, reshard_after_forward, ranks.world_size)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": replace(precision, output_dtype=None),
        "offload_policy": offload_policy,
        "shard_placement_fn": None,
        "ignored_params": None,
        "dp_mesh_dims": None,
    }
    chosen = plan_blocks(model, root_kwargs=arguments) if plan is None else plan_for(plan, model, root_kwargs=arguments)
    check_plan(_API, chosen, arguments)
    check_parameters(_API, Subtree.of([model]), ())
    selected = _checkpointed(model, checkpoint_activations)
    names = [name for name, module in model.named_modules() if module in selected]
    replicas = f" x {ranks.replicas} replicas" if ranks.replicas > 1 else ""
    lines = [f"{_API}: {type(model).__name__} over {ranks.world_size} rank{'s' * (ranks.world_size > 1)}{replicas}"]
    lines += [chosen.explain(ranks.world_size), *_about(precision, offload_policy, names)]
    wrappers = _checkpoint(model, selected)
    units = {_replaced(target, wrappers): own for target, own in chosen.modules.items()}
    sharded = fully_shard(model, policy=units, **{**arguments, "mp_policy": precision})
    if report and dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    return sharded


def _precision(value: object) -> MixedPrecisionPolicy:
    if value is None:
        return MixedPrecisionPolicy()
    if isinstance(value, str):
        if value not in _DTYPES:
            raise ValueError(
                f"{_API}: mixed_precision: expected one of {sorted(_DTYPES)}, a MixedPrecisionPolicy or None, found "
                f"{value!r}"
            )
        return MixedPrecisionPolicy(param_dtype=_DTYPES[value], reduce_dtype=torch.float32)
    check_instance(f"{_API}: mixed_precision", value, (str, MixedPrecisionPolicy, type(None)))
    assert isinstance(value, MixedPrecisionPolicy)
    return value


def _offloading(value: object) -> OffloadPolicy:
    if isinstance(value, bool):
        return CPUOffloadPolicy() if value else OffloadPolicy()
    check_instance(f"{_API}: offload", value, (bool, OffloadPolicy))
    assert isinstance(value, OffloadPolicy)
    return value


def _checkpointed(model: nn.Module, choice: object) -> set[nn.Module]:
    """Return the modules to recompute in backward."""
    if choice is False:
        return set()
    share = float(choice) if isinstance(choice, (bool, int, float)) else 1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{_API}: checkpoint_activations: expected a share from 0 to 1, found {choice}")
    if not isinstance(choice, (bool, int, float)) and (not callable(choice) or isinstance(choice, type)):
        raise TypeError(
            f"{_API}: checkpoint_activations: expected True, False, a share or a function of a module, found "
            + (f"the class {choice.__name__}" if isinstance(choice, type) else type(choice).__name__)
        )
    if callable(choice):
        selected = {m for m in model.modules() if m is not model and has_forward(m) and choice(m)}
        if not selected:
            raise ValueError(f"{_API}: checkpoint_activations: the function returned True for no module")
        return selected
    found = [block for each in repeated_blocks(ModuleTree(model, sharded=True)) for block in each.blocks]
    found = [block for block in found if plain_module(block)._modules]  # to recompute a single layer saves nothing
    # Rounded, for 0.1 * 10 is to be 1.
    blocks = {block for at, block in enumerate(found) if int(round((at + 1) * share, 9)) > int(round(at * share, 9))}
    if not found:
        raise ValueError(
            f"{_API}: checkpoint_activations: no repeated blocks found in this {type(model).__name__}; pass a function "
            "that returns True for the modules to recompute"
        )
    return {block for block in blocks if not any(isinstance(module, ActivationWrapper) for module in block.modules())}


def _checkpoint(model: nn.Module, selected: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Put wrappers around the selected modules, and return them by module."""
    wrappers: dict[nn.Module, nn.Module] = {}

    def wrap(module: nn.Module) -> nn.Module:
        return wrappers.setdefault(module, checkpoint_wrapper(module))

    if selected:
        apply_activation_checkpointing(model, wrap, selected.__contains__)
    return wrappers


def _replaced(target: Any, wrappers: dict[nn.Module, nn.Module]) -> Any:
    """Return the wrapper of the module, or of each module of a tuple, if it has one."""
    if isinstance(target, tuple):
        return tuple(wrappers.get(module, module) for module in target)
    return wrappers.get(target, target)


def _about(precision: MixedPrecisionPolicy, offload: OffloadPolicy, recomputed: list[str]) -> list[str]:
    """Return the lines of the report on precision, offloading and activation checkpointing."""
    dtypes = {
        "compute": precision.param_dtype,
        "gradients reduced": precision.reduce_dtype,
        "outputs": precision.output_dtype,
    }
    given = [f"{what} in {str(dtype).removeprefix('torch.')}" for what, dtype in dtypes.items() if dtype is not None]
    lines = [f"precision: {', '.join(given) or 'as the parameters'}"]
    if isinstance(offload, CPUOffloadPolicy):
        share = "" if offload.fraction == 1 else f"at most {offload.fraction:.0%} of "
        lines.append(f"offloading: {share}parameters, gradients and optimizer state in CPU memory")
    if recomputed:
        names = recomputed if len(recomputed) < 4 else [recomputed[0], "...", recomputed[-1]]
        lines.append(f"activation checkpointing: {len(recomputed)} modules, {' '.join(names)}")
    return lines
