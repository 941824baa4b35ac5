"""``fully_shard``, and ``replicate``, which keeps all parameters on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm.mesh import ShardMesh, shard_mesh
from fullshard.composable.fsdp_module import FSDPModule, ReplicateModule
from fullshard.composable.module_class import set_class, sharded_class
from fullshard.composable.state_dicts import watch_state_dicts
from fullshard.engine.ownership import Subtree, unit_of
from fullshard.engine.settings import UnitPolicy, UnitSettings
from fullshard.frontend.arguments import (
    GranularityChoice,
    Place,
    PlacementFunction,
    check_instance,
    check_parameters,
    check_reshard,
    ignored_parameters,
    placer,
    root_modules,
    shard_mesh_for,
    sharding_format,
    warn_if_unpinned,
)
from fullshard.frontend.sharded_module import make_unit
from fullshard.policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fullshard.wrap import Policy, PolicyFunction, WrapPlan, plan_for
from fullshard.wrap.plan import ShardingPlan, WrapTargets

__all__ = ["check_plan", "fully_shard", "replicate", "shard_as_planned"]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFunction | None = ...,
    mp_policy: MixedPrecisionPolicy | None = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    layout: str | None = ...,
    granularity: GranularityChoice = ...,
    first_rank: int = ...,
    policy: Policy | PolicyFunction | WrapPlan | WrapTargets | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFunction | None = ...,
    mp_policy: MixedPrecisionPolicy | None = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    layout: str | None = ...,
    granularity: GranularityChoice = ...,
    first_rank: int = ...,
    policy: None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy | None = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    layout: str | None = None,
    granularity: GranularityChoice = "element",
    first_rank: int = 0,
    policy: Policy | PolicyFunction | WrapPlan | WrapTargets | ShardingPlan | None = None,
) -> Any:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    The parameters that are not in a nested unit become one unit: they are all-gathered just before the module's forward
    and backward and freed after them, and their gradients are averaged over the ranks. Call it bottom-up: on every
    block, then on the whole model. Afterwards ``module.parameters()`` are ``DTensor`` shards (``Shard(0)``, split as
    ``torch.chunk`` does; 0-D parameters are ``Replicate()``); build the optimizer from these.

    The first call has two process-wide effects. On CPU, glibc malloc keeps freed memory:
    ``fullshard.keep_freed_memory`` undoes it, ``FULLSHARD_KEEP_FREED_MEMORY=0`` in the environment disables it. And
    all optimizers get hooks: optimizers of sharded parameters then step local tensors (``FULLSHARD_LOCAL_OPTIMIZERS=0``
    disables that, see ``fullshard.optim.localize``), and parameters that are unsharded during a step are marked as out
    of date. ``FULLSHARD_WATCH_OPTIMIZERS=0`` disables both. Then call ``reshard()`` after a step on modules that stay
    unsharded (``set_reshard_after_backward(False)``); otherwise their forwards use the parameters from before the step.

    Args:
        module: Any module but a ``ModuleList`` or ``ModuleDict``; its class becomes ``FSDP<Class>``, a subclass of both
            ``FSDPModule`` and the original class. One without a ``forward`` unshards in the methods that are registered
            with ``register_fsdp_forward_method``. Or a list of modules, whose parameters become one unit.
        mesh: The ranks. 1-D: shard over them. 2-D: replicate over the first axis and shard over the second (HSDP).
            None: all ranks in one dimension; this initializes the default process group if necessary.
        reshard_after_forward: True: free the unsharded parameters after forward and all-gather them again for backward
            (less memory). False: keep them in between (less communication). An int that divides the size of the shard
            axis: after forward, keep a shard over subgroups of that many consecutive ranks, from which backward
            all-gathers. None: True, except for the root and for the two units whose forwards end last, which stay
            unsharded until backward. True also frees these.
        shard_placement_fn: Called with each parameter. It returns ``Shard(dim)`` to shard that dim, evenly or not, a
            ``ShardPlacementResult`` to shard over another mesh (experts), or None for ``Shard(0)`` on ``mesh``.
        mp_policy: Dtypes of computation, reduction and outputs. None: those of the parameters.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state, or a fraction of them, in
            CPU memory. None: no offloading.
        ignored_params: Parameters that are not sharded, moved or reduced.
        dp_mesh_dims: Data-parallel axes of ``mesh``, if the parameters are already DTensors on all of ``mesh``, or
            plain tensors that are annotated with spmd_types on it.
        layout: "per_parameter": each parameter is cut over the ranks by itself. "ragged": all parameters of the unit
            lie in one buffer that is cut into equal slices, so that one collective without copies all-gathers them.
            DTensors, tensor subclasses with all-gather hooks, and parameters for which ``shard_placement_fn`` chooses
            another dim, are still cut one by one. It is there after ``import fullshard.ragged``. None: what
            ``FULLSHARD_LAYOUT`` in the environment says, else "per_parameter".
        granularity: Where the ragged layout may cut a parameter: "element" (anywhere), "row" (between indices of dim
            0), an int (between blocks of so many rows), "parameter" (nowhere), or a function that returns one of these
            for an FQN and a parameter.
        first_rank: If no parameter of the unit may be cut (granularity "parameter"), the rank that gets the first ones,
            modulo the ranks of the shard axis. Consecutive numbers for equal blocks spread whole matrices, and with
            them the work of ``fullshard.optim.Muon``, over the ranks. Equal on all ranks.
        policy: Wrap policy that selects modules inside ``module`` to shard first, with the same arguments or with
            arguments that the policy returns; see ``fullshard.wrap``. Or a plan, or a dict of arguments by module. Or
            what ``fullshard.plan`` returns, which also says what the arguments above are. Only for one module, not for
            a list.

    Returns:
        The same ``module``, which is now also an ``FSDPModule``. For a list, the list of modules.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``module`` is already sharded, or a ``ModuleList`` or ``ModuleDict`` without ``forward``, or if
            the mesh or a placement does not fit the module or one of its parameters.
        TiedParameterError: If a parameter is tied between a module of this call and a module sharded by
            ``FullyShardedDataParallel``.
        FullshardError: If a nested unit whose tied parameters this unit takes over is in the middle of a step, or has
            unreduced gradients.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard

        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ```
    """
    api = "fully_shard"
    modules = root_modules(api, module)
    if policy is not None:
        ignored_params = ignored_parameters(api, ignored_params)  # a generator can be read once
        arguments: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": reshard_after_forward,
            "shard_placement_fn": shard_placement_fn,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "ignored_params": ignored_params,
            "dp_mesh_dims": dp_mesh_dims,
            "layout": layout,
            "granularity": granularity,
            "first_rank": first_rank,
        }
        if isinstance(policy, ShardingPlan):
            usual = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy(), "ignored_params": []}
            usual |= {"granularity": "element", "first_rank": 0}
            changed = (name for name, value in arguments.items() if value is not None and value != usual.get(name))
            return shard_as_planned(api, module, policy, changed)
        _shard_inside(api, module, policy, arguments)
    form = sharding_format(api, layout, granularity, first_rank)
    ranks = shard_mesh_for(api, mesh, dp_mesh_dims)
    reshard = check_reshard(api, reshard_after_forward, ranks.world_size)
    place = placer(api, ranks, shard_placement_fn)
    policy_of_unit = _policy(api, mp_policy, offload_policy)._replace(form=form)
    _shard(api, modules, ranks, place, policy_of_unit, reshard, ignored_params, FSDPModule)
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        ranks.subgroup(reshard)  # makes the process group now, since all ranks call fully_shard
    return module


def replicate(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Keep all parameters of ``module`` on every rank and average their gradients, overlapped with backward.

    Like DDP, on the engine of ``fully_shard``, with the same units, policies and methods. Parameters become DTensors
    with ``Replicate()``.

    Args:
        module: Any module but a ``ModuleList`` or ``ModuleDict``; its class becomes ``Replicate<Class>``, a subclass of
            both ``ReplicateModule`` and the original class.
        mesh: 1-D mesh of the ranks. None: all ranks.
        mp_policy: Dtypes of computation, reduction and outputs. None: those of the parameters.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters, gradients and optimizer state in CPU memory. None: no
            offloading.
        ignored_params: Parameters that are not moved or reduced.
        dp_mesh_dims: Data-parallel axes of ``mesh``, replicate axes only, if the parameters are already DTensors on all
            of ``mesh``.

    Returns:
        The same ``module``, which is now also a ``ReplicateModule``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``module`` is already sharded, is a ``ModuleList`` or ``ModuleDict``, or contains modules that
            ``fully_shard`` was called on, if the mesh has more than one dimension without ``dp_mesh_dims``, or if
            ``dp_mesh_dims`` names a shard axis.
        TiedParameterError: If a parameter is tied between a module of this call and a module sharded by
            ``FullyShardedDataParallel``.
        FullshardError: If a nested unit whose tied parameters this unit takes over is in the middle of a step, or has
            unreduced gradients.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import replicate

        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        replicate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        ```
    """
    api = "replicate"
    check_instance(api, module, nn.Module)
    modules = root_modules(api, module)
    for name, below in module.named_modules():
        if unit_of(below) is not None and not isinstance(below, ReplicateModule):
            by = "fully_shard" if isinstance(below, FSDPModule) else type(below).__name__
            raise ValueError(f"{api}: module {name!r} is already sharded by {by}; expected only replicated modules")
    check_instance(f"{api}: dp_mesh_dims", dp_mesh_dims, (DataParallelMeshDims, type(None)))
    if dp_mesh_dims is not None and dp_mesh_dims.shard_names:
        raise ValueError(f"{api}: dp_mesh_dims: expected replicate axes only, found shard={dp_mesh_dims.shard!r}")
    if dp_mesh_dims is None and isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(f"{api}: mesh: expected 1 dimension, found {mesh.ndim} in {mesh}")
    ranks = shard_mesh_for(api, mesh, dp_mesh_dims)
    if ranks.replicate is None:
        ranks = shard_mesh(ranks.device_mesh, None, ranks.device_mesh)
    policy = _policy(api, mp_policy, offload_policy)
    _shard(api, modules, ranks, placer(api, ranks), policy, False, ignored_params, ReplicateModule)
    return module


def shard_as_planned(api: str, module: object, plan: ShardingPlan, given: Iterable[str]) -> Any:
    """Shard a model as a plan says, which says what all arguments are.

    Args:
        api: Name of the function that was called.
        module: The model.
        plan: The plan.
        given: Names of other arguments that were passed.

    Raises:
        ValueError: If there are other arguments, or several modules.
    """
    found = ", ".join(given)
    if found or not isinstance(module, nn.Module):
        raise ValueError(
            f"{api}: expected one module and no other arguments beside a plan of fullshard.plan, found "
            f"{found or 'a list of modules'}; plan again with these choices"
        )
    return plan.shard(module)


def _shard_inside(
    api: str,
    module: nn.Module | Sequence[nn.Module],
    policy: Policy | PolicyFunction | WrapPlan | WrapTargets,
    arguments: dict[str, Any],
) -> None:
    """Shard the modules that ``policy`` selects, after checking the arguments of all of them."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{api}: policy: expected one module, found a list of modules; call {api} once per module")
    plan = plan_for(
        policy,
        module,
        ignored_params=arguments["ignored_params"],
        root_kwargs=arguments,
    )
    check_plan(api, plan, arguments)
    plan.apply(lambda inner, chosen, _: fully_shard(inner, **chosen))


def check_plan(api: str, plan: WrapPlan, arguments: dict[str, Any]) -> None:
    """Check the modules of a plan and their arguments, all before the first is sharded.

    Args:
        api: Name of the function that was called.
        plan: The plan.
        arguments: Arguments of the root, which have all names.

    Raises:
        TypeError, ValueError: If a module cannot be a unit, or an argument is invalid.
    """
    for entry in plan.entries:
        unknown = sorted(set(entry.kwargs) - set(arguments))
        if unknown:
            raise ValueError(
                f"{api}: policy: found unknown arguments {unknown} for module {entry.name!r}, expected a subset of "
                f"{sorted(arguments)}"
            )
        root_modules(api, entry.modules)
        ranks = shard_mesh_for(api, entry.kwargs["mesh"], entry.kwargs["dp_mesh_dims"])
        check_reshard(api, entry.kwargs["reshard_after_forward"], ranks.world_size)
        _policy(api, entry.kwargs["mp_policy"], entry.kwargs["offload_policy"])
        chosen = entry.kwargs
        sharding_format(api, chosen.get("layout"), chosen.get("granularity", "element"), chosen.get("first_rank", 0))


def _policy(api: str, precision: MixedPrecisionPolicy | None, offload: OffloadPolicy | None) -> UnitPolicy:
    check_instance(f"{api}: mp_policy", precision, (MixedPrecisionPolicy, type(None)))
    check_instance(f"{api}: offload_policy", offload, (OffloadPolicy, type(None)))
    warn_if_unpinned(isinstance(offload, CPUOffloadPolicy) and offload.pin_memory)
    return UnitPolicy(precision or MixedPrecisionPolicy(), offload or OffloadPolicy())


def _shard(
    api: str,
    modules: list[nn.Module],
    ranks: ShardMesh,
    place: Place,
    policy: UnitPolicy,
    reshard: bool | int | None,
    ignored_params: Iterable[nn.Parameter] | None,
    base: type[FSDPModule],
) -> None:
    ignored, subtree = ignored_parameters(api, ignored_params), Subtree.of(modules)
    check_parameters(api, subtree, ignored)
    make_unit(subtree, ranks, place, policy, UnitSettings(reshard_after_forward=reshard), ignored)
    for module in modules:
        # torch's composable DDP ignores modules with this entry.
        module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
        set_class(module, sharded_class(type(module), base=base))
    unit = unit_of(modules[0])
    assert unit is not None, "it has just been made"
    watch_state_dicts(unit)
