"""Wrong arguments: refused on every rank alike, with what was expected and what was found."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fullshard import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    FSDPModule,
    FullshardError,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
    unsharded,
)
from fullshard.engine.ownership import nested_units
from ranks import Rank, on_ranks


class Case(NamedTuple):
    """A call that has to be refused, and the words of the refusal."""

    call: Callable[[Rank, nn.Module, nn.Module], Any]  # of the rank, a plain and a sharded module
    words: str  # regular expression


def shard(rank: Rank, module: Any = None, **options: Any) -> Any:
    options.setdefault("mesh", rank.mesh)
    return fully_shard(nn.Linear(2, 2) if module is None else module, **options)


def placed(rank: Rank, plain: nn.Module, choice: Any) -> Any:
    return shard(rank, plain, shard_placement_fn=lambda parameter: choice)


def with_dtensor(rank: Rank, mesh: Any = None, placement: Any = None) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    mesh = rank.mesh if mesh is None else mesh
    placements = [Replicate()] * mesh.ndim if placement is None else [placement] * mesh.ndim
    module[0].weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, placements))
    return module


def named(rank: Rank) -> Any:
    return rank.make_mesh(1, rank.world_size, names=("a", "b"))


def enter(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


class NoCollective:
    """Can be called but brings no memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


CASES: dict[str, Case] = {
    # fully_shard: the module
    "module: None": Case(lambda r, p, s: fully_shard(None, mesh=r.mesh), "nn.Module or a list of them, found NoneType"),
    "module: class": Case(lambda r, p, s: shard(r, nn.Linear), "expected an nn.Module or a list of them, found type"),
    "module: tensor": Case(lambda r, p, s: shard(r, torch.ones(2)), "nn.Module or a list of them, found Tensor"),
    "module: set": Case(lambda r, p, s: shard(r, {p}), "expected an nn.Module or a list of them, found set"),
    "module: generator": Case(lambda r, p, s: shard(r, (m for m in p)), "a list of them, found generator"),
    "module: empty list": Case(lambda r, p, s: shard(r, []), "expected at least one module, found an empty list"),
    "module: list with a name": Case(lambda r, p, s: shard(r, [p, "0"]), "expected modules, found a str at index 1"),
    "module: list with None": Case(
        lambda r, p, s: shard(r, [None, p]), "expected modules, found a NoneType at index 0"
    ),
    "module: list in a list": Case(lambda r, p, s: shard(r, [p, [p[0]]]), "expected modules, found a list at index 1"),
    "module: list with a unit": Case(lambda r, p, s: shard(r, [p, s]), "this Sequential is sharded already"),
    "module: list with a ModuleList": Case(lambda r, p, s: shard(r, [p, nn.ModuleList()]), "ModuleList has no forward"),
    "module: twice": Case(lambda r, p, s: shard(r, s), r"this Sequential is sharded already, by an earlier call"),
    "module: ModuleList": Case(
        lambda r, p, s: shard(r, nn.ModuleList([p])), "ModuleList has no forward.*each of its modules"
    ),
    "module: ModuleDict": Case(
        lambda r, p, s: shard(r, nn.ModuleDict({"a": p})), "ModuleDict has no forward.*each of its modules"
    ),
    "module: no forward": Case(
        lambda r, p, s: shard(r, nn.Module()), "Module has no forward.*the module that contains it"
    ),
    "module: lazy": Case(
        lambda r, p, s: shard(r, nn.LazyLinear(3)), r"weight is uninitialized \(lazy\); run a forward first"
    ),
    "module: DTensor on the data-parallel mesh": Case(
        lambda r, p, s: shard(r, with_dtensor(r)), r"0\.weight: expected the DTensor's mesh.*to be different named axes"
    ),
    # fully_shard: the mesh
    "mesh: group": Case(
        lambda r, p, s: shard(r, mesh=r.group), "mesh: expected DeviceMesh or None, found ProcessGroup"
    ),
    "mesh: number": Case(lambda r, p, s: shard(r, mesh=2), "mesh: expected DeviceMesh or None, found int"),
    "mesh: 3-D": Case(
        lambda r, p, s: shard(r, p, mesh=r.make_mesh(1, 1, r.world_size, names=("a", "b", "c"))),
        r"mesh: expected 1 dimension, or 2 \(replicate, shard\), found 3",
    ),
    "dp_mesh_dims: text": Case(
        lambda r, p, s: shard(r, p, dp_mesh_dims="b"), "dp_mesh_dims: expected DataParallelMeshDims or None, found str"
    ),
    "dp_mesh_dims: no such axis": Case(
        lambda r, p, s: shard(r, p, mesh=named(r), dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        r"dp_mesh_dims names \['dp'\], but the axes of the mesh are \['a', 'b'\]",
    ),
    "dp_mesh_dims: mesh without names": Case(
        lambda r, p, s: shard(r, p, dp_mesh_dims=DataParallelMeshDims(shard="dp")), r"the axes of the mesh are \[\]"
    ),
    "dp_mesh_dims: plain tensor": Case(
        lambda r, p, s: shard(r, p, mesh=named(r), dp_mesh_dims=DataParallelMeshDims(shard="b")),
        r"have to be DTensors on the mesh; 0\.weight is a plain tensor",
    ),
    "dp_mesh_dims: sharded already": Case(
        lambda r, p, s: shard(
            r, with_dtensor(r, named(r), Shard(0)), mesh=named(r), dp_mesh_dims=DataParallelMeshDims(shard="b")
        ),
        r"0\.weight: expected Replicate\(\) on the data-parallel axis 'b', found S",
    ),
    "dp_mesh_dims: another mesh": Case(
        lambda r, p, s: shard(r, with_dtensor(r), mesh=named(r), dp_mesh_dims=DataParallelMeshDims(shard="b")),
        r"0\.weight: expected a DTensor on the mesh passed to fully_shard",
    ),
    "DataParallelMeshDims: nothing": Case(lambda r, p, s: DataParallelMeshDims(), "replicate or both, found neither"),
    "DataParallelMeshDims: no axes": Case(lambda r, p, s: DataParallelMeshDims(shard=()), "or both, found neither"),
    "DataParallelMeshDims: twice": Case(
        lambda r, p, s: DataParallelMeshDims(shard=("a", "b"), replicate="a"), "expected every axis once, found"
    ),
    # fully_shard: policies
    "reshard_after_forward: no divisor": Case(
        lambda r, p, s: shard(r, reshard_after_forward=3),
        r"expected a divisor of the \d ranks of the shard axis, found 3",
    ),
    "reshard_after_forward: too many": Case(
        lambda r, p, s: shard(r, reshard_after_forward=2 * r.world_size), "expected a divisor of the .* found [24]"
    ),
    "reshard_after_forward: zero": Case(lambda r, p, s: shard(r, reshard_after_forward=0), "a divisor of .*, found 0"),
    "reshard_after_forward: negative": Case(
        lambda r, p, s: shard(r, reshard_after_forward=-1), "expected a divisor of the .*, found -1"
    ),
    "reshard_after_forward: float": Case(
        lambda r, p, s: shard(r, reshard_after_forward=1.0),
        "reshard_after_forward: expected True, False, None or a number of ranks, found 1.0 of type float",
    ),
    "reshard_after_forward: text": Case(
        lambda r, p, s: shard(r, reshard_after_forward="yes"), "None or a number of ranks, found 'yes' of type str"
    ),
    "mp_policy: dtype": Case(
        lambda r, p, s: shard(r, p, mp_policy=torch.bfloat16),
        "mp_policy: expected MixedPrecisionPolicy or None, found dtype",
    ),
    "offload_policy: class": Case(
        lambda r, p, s: shard(r, p, offload_policy=CPUOffloadPolicy),
        "offload_policy: expected OffloadPolicy or None, found type",
    ),
    "MixedPrecisionPolicy: name": Case(
        lambda r, p, s: MixedPrecisionPolicy(param_dtype="bf16"),
        "param_dtype: expected a torch.dtype or None, found 'bf16'",
    ),
    "MixedPrecisionPolicy: integers": Case(
        lambda r, p, s: MixedPrecisionPolicy(reduce_dtype=torch.int32), "reduce_dtype: expected a floating-point dtype"
    ),
    "MixedPrecisionPolicy: complex": Case(
        lambda r, p, s: MixedPrecisionPolicy(output_dtype=torch.complex64),
        "output_dtype: expected a floating-point dtype",
    ),
    "MixedPrecisionPolicy: cast": Case(
        lambda r, p, s: MixedPrecisionPolicy(cast_forward_inputs=1),
        "cast_forward_inputs: expected True or False, found 1",
    ),
    # fully_shard: placements
    "shard_placement_fn: placement": Case(
        lambda r, p, s: shard(r, p, shard_placement_fn=Shard(1)), "shard_placement_fn: expected a function, found Shard"
    ),
    "shard_placement_fn: number": Case(
        lambda r, p, s: placed(r, p, 1),
        r"returned 1 for 0\.weight; expected Shard\(dim\), ShardPlacementResult or None",
    ),
    "shard_placement_fn: Replicate": Case(
        lambda r, p, s: placed(r, p, Replicate()), r"returned Replicate\(\) for 0\.weight; expected Shard\(dim\)"
    ),
    "shard_placement_fn: no such dim": Case(
        lambda r, p, s: placed(r, p, Shard(2)),
        r"returned Shard\(2\) for 0\.weight, which has 2 dims \(shape \(2, 2\)\)",
    ),
    "shard_placement_fn: no such dim of the second": Case(
        lambda r, p, s: placed(r, p, Shard(1)), r"returned Shard\(1\) for 0\.bias, which has 1 dims \(shape \(2,\)\)"
    ),
    "shard_placement_fn: no such dim from the end": Case(
        lambda r, p, s: placed(r, p, Shard(-3)), r"returned Shard\(-3\) for 0\.weight, which has 2 dims"
    ),
    "ShardPlacementResult: no mesh": Case(
        lambda r, p, s: placed(r, p, ShardPlacementResult(Shard(0), None)), "mesh_info of type NoneType for 0.weight"
    ),
    "ShardPlacementResult: no axis": Case(
        lambda r, p, s: placed(r, p, ShardPlacementResult(Shard(0), FSDPMeshInfo(r.mesh))), "mesh_info names no axis of"
    ),
    "ShardPlacementResult: no axes": Case(
        lambda r, p, s: placed(r, p, ShardPlacementResult(None, HSDPMeshInfo(r.mesh))), "mesh_info names no axis of"
    ),
    "ShardPlacementResult: placement": Case(
        lambda r, p, s: placed(r, p, ShardPlacementResult(0, r.mesh)), r"returned 0 for 0\.weight; expected Shard"
    ),
    "ignored_params: module": Case(
        lambda r, p, s: shard(r, p, ignored_params=[p[0]]), r"ignored_params: expected parameters, found a Linear"
    ),
    "ignored_params: names": Case(
        lambda r, p, s: shard(r, p, ignored_params=["0.weight"]), "ignored_params: expected parameters, found a str"
    ),
    "ignored_params: one parameter": Case(
        lambda r, p, s: shard(r, p, ignored_params=p[0].weight), "ignored_params: expected .*, found .*Parameter"
    ),
    "ignored_params: number": Case(
        lambda r, p, s: shard(r, p, ignored_params=5), "ignored_params: expected .*, found .*int"
    ),
    # methods
    "unshard": Case(lambda r, p, s: s.unshard(1), "async_op: expected True or False, found 1 of type int"),
    "unshard: None": Case(lambda r, p, s: s.unshard(async_op=None), "async_op: expected True or False, found None"),
    "set_requires_gradient_sync": Case(
        lambda r, p, s: s.set_requires_gradient_sync("no"),
        "requires_gradient_sync: expected True or False, found 'no' of type str",
    ),
    "set_requires_gradient_sync: recurse": Case(
        lambda r, p, s: s.set_requires_gradient_sync(True, recurse=0), "recurse: expected True or False, found 0"
    ),
    "set_reshard_after_forward": Case(
        lambda r, p, s: s.set_reshard_after_forward(None), "reshard_after_forward: expected True or False, found None"
    ),
    "set_reshard_after_forward: recurse": Case(
        lambda r, p, s: s.set_reshard_after_forward(True, recurse="all"), "recurse: expected True or False, found 'all'"
    ),
    "set_reshard_after_backward": Case(
        lambda r, p, s: s.set_reshard_after_backward(0), "reshard_after_backward: expected True or False, found 0"
    ),
    "set_reshard_after_backward: recurse": Case(
        lambda r, p, s: s.set_reshard_after_backward(True, recurse=None), "recurse: expected True or False, found None"
    ),
    "set_is_last_backward": Case(
        lambda r, p, s: s.set_is_last_backward(2), "is_last_backward: expected True or False, found 2"
    ),
    "forward prefetch: plain module": Case(
        lambda r, p, s: s.set_modules_to_forward_prefetch([s[0], p]),
        "set_modules_to_forward_prefetch: expected modules that fully_shard was called on, found Sequential at index 1",
    ),
    "backward prefetch: plain module": Case(
        lambda r, p, s: s.set_modules_to_backward_prefetch([p]),
        "set_modules_to_backward_prefetch: expected modules that .*, found Sequential at index 0",
    ),
    "forward prefetch: name": Case(
        lambda r, p, s: s.set_modules_to_forward_prefetch(["0"]),
        "set_modules_to_forward_prefetch: expected modules.*found str",
    ),
    "forward prefetch: one module": Case(
        lambda r, p, s: s.set_modules_to_forward_prefetch(s[0]), "set_modules_to_forward_prefetch: expected .*, found"
    ),
    "backward prefetch: None": Case(
        lambda r, p, s: s.set_modules_to_backward_prefetch(None), "set_modules_to_backward_prefetch: expected .*, found"
    ),
    "prefetch: set of names": Case(
        lambda r, p, s: s.set_modules_to_backward_prefetch({"0"}), "set_modules_to_backward_prefetch: .*, found str"
    ),
    "set_requires_all_reduce": Case(
        lambda r, p, s: s.set_requires_all_reduce(None), "requires_all_reduce: expected True or False, found None"
    ),
    "set_requires_all_reduce: recurse": Case(
        lambda r, p, s: s.set_requires_all_reduce(True, recurse=1), "recurse: expected True or False, found 1"
    ),
    "set_reshard_after_forward: number": Case(
        lambda r, p, s: s.set_reshard_after_forward(r.world_size), "expected True or False, found [12] of type int"
    ),
    "set_gradient_divide_factor: zero": Case(
        lambda r, p, s: s.set_gradient_divide_factor(0), "factor: expected a positive number, found 0"
    ),
    "set_gradient_divide_factor: negative": Case(
        lambda r, p, s: s.set_gradient_divide_factor(-2.0), "factor: expected a positive number, found -2.0"
    ),
    "set_gradient_divide_factor: not a number": Case(
        lambda r, p, s: s.set_gradient_divide_factor(float("nan")), "factor: expected a positive number, found nan"
    ),
    "set_gradient_divide_factor: infinite": Case(
        lambda r, p, s: s.set_gradient_divide_factor(float("inf")), "factor: expected a positive .*, found inf"
    ),
    "set_gradient_divide_factor: bool": Case(
        lambda r, p, s: s.set_gradient_divide_factor(True), "factor: expected a positive number, found True"
    ),
    "set_gradient_divide_factor: text": Case(
        lambda r, p, s: s.set_gradient_divide_factor("2"), "factor: expected a positive number, found '2'"
    ),
    "set_reduce_scatter_divide_factor": Case(
        lambda r, p, s: s.set_reduce_scatter_divide_factor(None), "factor: expected a positive number, found None"
    ),
    "set_force_sum_reduction_for_comms": Case(
        lambda r, p, s: s.set_force_sum_reduction_for_comms(1), "expected True or False, found 1 of type int"
    ),
    "set_reduce_scatter_unused_params": Case(
        lambda r, p, s: s.set_reduce_scatter_unused_params("all"), "expected True or False, found 'all'"
    ),
    "set_reduce_scatter_unused_params: recurse": Case(
        lambda r, p, s: s.set_reduce_scatter_unused_params(True, recurse=2), "recurse: expected True or False, found 2"
    ),
    "set_reduce_scatter_max_input_buffers: zero": Case(
        lambda r, p, s: s.set_reduce_scatter_max_input_buffers(0), "buffers: expected at least 1, found 0"
    ),
    "set_reduce_scatter_max_input_buffers: bool": Case(
        lambda r, p, s: s.set_reduce_scatter_max_input_buffers(True), "buffers: expected an int, found True"
    ),
    "set_reduce_scatter_max_input_buffers: float": Case(
        lambda r, p, s: s.set_reduce_scatter_max_input_buffers(2.0), "buffers: expected an int, found 2.0"
    ),
    "set_reduce_scatter_max_input_buffers: recurse": Case(
        lambda r, p, s: s.set_reduce_scatter_max_input_buffers(2, recurse=None), "recurse: expected True or False"
    ),
    "set_all_reduce_hook": Case(
        lambda r, p, s: s.set_all_reduce_hook("hook"), "set_all_reduce_hook: expected a function, found str"
    ),
    "set_all_reduce_hook: None": Case(
        lambda r, p, s: s.set_all_reduce_hook(None), "set_all_reduce_hook: expected a function, found NoneType"
    ),
    "set_all_reduce_hook: stream on two axes": Case(
        lambda r, p, s: shard(r, mesh=named(r)).set_all_reduce_hook(print, stream=torch.Stream("cpu")),
        "expected no stream on a mesh with a replicate axis, found one",
    ),
    "set_unshard_in_backward": Case(
        lambda r, p, s: s.set_unshard_in_backward(None), "unshard_in_backward: expected True or False, found None"
    ),
    "set_post_optim_event: None": Case(
        lambda r, p, s: s.set_post_optim_event(None), "set_post_optim_event: expected a torch.Event, found NoneType"
    ),
    "set_post_optim_event: optimizer": Case(
        lambda r, p, s: s.set_post_optim_event(torch.optim.SGD(s.parameters())), "expected a torch.Event, found SGD"
    ),
    "set_custom_all_gather": Case(
        lambda r, p, s: s.set_custom_all_gather(print), "expected an object with __call__ and allocate, found builtin"
    ),
    "set_custom_reduce_scatter": Case(
        lambda r, p, s: s.set_custom_reduce_scatter(NoCollective()), "__call__ and allocate, found NoCollective"
    ),
    "set_allocate_memory_from_process_group_for_comm": Case(
        lambda r, p, s: s.set_allocate_memory_from_process_group_for_comm("yes"), "expected True or False, found 'yes'"
    ),
    "set_separate_reduce_scatter_group": Case(
        lambda r, p, s: s.set_separate_reduce_scatter_group(2), "separate_reduce.*: expected True or False, found 2"
    ),
    "set_separate_reduce_scatter_group: recurse": Case(
        lambda r, p, s: s.set_separate_reduce_scatter_group(True, recurse=2), "recurse: expected True or False, found 2"
    ),
    # functions
    "share_comm_ctx: module": Case(
        lambda r, p, s: share_comm_ctx(s), "share_comm_ctx: expected a list of modules, found FSDPSequential"
    ),
    "share_comm_ctx: plain module": Case(
        lambda r, p, s: share_comm_ctx([s, p]), "modules that fully_shard was called on, found Sequential at index 1"
    ),
    "share_comm_ctx: None": Case(lambda r, p, s: share_comm_ctx(None), "expected a list of modules, found NoneType"),
    "unsharded: list": Case(lambda r, p, s: enter(unsharded([s])), "unsharded: expected an nn.Module, found list"),
    "unsharded: None": Case(lambda r, p, s: enter(unsharded(None)), "unsharded: expected an nn.Module, found NoneType"),
    "replicate: list": Case(lambda r, p, s: replicate([p], mesh=r.mesh), "replicate: expected Module, found list"),
    "replicate: sharded": Case(
        lambda r, p, s: replicate(s, mesh=r.mesh), "replicate.*sharded already|sharded by fully_shard already"
    ),
    "replicate: sharded below": Case(
        lambda r, p, s: replicate(nn.Sequential(p, nn.Sequential(s)), mesh=r.mesh),
        r"replicate: '1\.0' is sharded by fully_shard already; expected only replicated modules",
    ),
    "replicate: mesh": Case(lambda r, p, s: replicate(p, mesh=4), "replicate: mesh: expected DeviceMesh or None"),
    "replicate: 2-D": Case(
        lambda r, p, s: replicate(p, mesh=named(r)), "replicate: mesh: expected 1 dimension, found 2 in"
    ),
    "replicate: shard axis": Case(
        lambda r, p, s: replicate(p, mesh=named(r), dp_mesh_dims=DataParallelMeshDims(shard="b", replicate="a")),
        "replicate: dp_mesh_dims: expected replicate axes only, found shard='b'",
    ),
    "replicate: mp_policy": Case(
        lambda r, p, s: replicate(p, mesh=r.mesh, mp_policy="bf16"),
        "replicate: mp_policy: expected MixedPrecisionPolicy",
    ),
    "replicate: ignored_params": Case(
        lambda r, p, s: replicate(p, mesh=r.mesh, ignored_params=p), "replicate: ignored_params: expected .*, found"
    ),
    "register_fsdp_forward_method: missing": Case(
        lambda r, p, s: register_fsdp_forward_method(s, "generate"),
        "expected the name of a method of Sequential, found 'generate'",
    ),
    "register_fsdp_forward_method: attribute": Case(
        lambda r, p, s: register_fsdp_forward_method(s, "__doc__"), "expected the name of a method of Sequential, found"
    ),
    "register_fsdp_forward_method: function": Case(
        lambda r, p, s: register_fsdp_forward_method(s, len), "expected the name of a method of Sequential, found"
    ),
    "register_fsdp_forward_method: no module": Case(
        lambda r, p, s: register_fsdp_forward_method("model", "forward"), "expected .*nn.Module.*, found"
    ),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_wrong_argument_is_refused(rank: Rank, name: str) -> None:
    """Every rank raises ValueError or TypeError saying what was expected and found, and changes nothing."""
    plain = nn.Sequential(nn.Linear(2, 2))
    sharded = shard(rank, nn.Sequential(shard(rank), shard(rank)))
    before = settings_of(sharded)
    with pytest.raises((ValueError, TypeError)) as raised:
        CASES[name].call(rank, plain, sharded)
    assert re.search(CASES[name].words, str(raised.value), re.DOTALL), str(raised.value)
    assert not isinstance(plain, FSDPModule) and type(plain[0].weight) is nn.Parameter
    assert settings_of(sharded) == before
    for model in (sharded, shard(rank, plain)):
        model(torch.ones(3, 2)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def settings_of(model: nn.Module) -> list[Any]:
    return [copy.deepcopy(unit.settings) for unit in nested_units(model)]


@pytest.mark.cpu_only("what is refused without NCCL")
@on_ranks(2)
def test_memory_of_the_back_end(rank: Rank) -> None:
    """Symmetric memory is refused without NCCL, and memory of the group beside custom collectives; else it trains."""
    model = shard(rank, nn.Sequential(shard(rank), shard(rank)))
    with pytest.raises(ValueError, match="NCCL"):
        model[0].set_symm_mem_for_comm()
    with pytest.raises(ValueError, match='backend must be "NCCL"'):
        model[0].set_symm_mem_for_comm("gloo")
    model[0].set_allocate_memory_from_process_group_for_comm(True)  # gloo has none: ordinary memory
    model[1].set_custom_all_gather(Collector())
    with pytest.raises(ValueError, match="has a custom collective, which allocates its buffers"):
        model[1].set_allocate_memory_from_process_group_for_comm(True)
    model[1].set_custom_all_gather(None)
    model(torch.ones(3, 2)).sum().backward()
    with pytest.raises(FullshardError, match="unit '0' is in the middle of its forward"):
        call_inside(model, lambda: model[0].set_allocate_memory_from_process_group_for_comm(False))
    model[0].set_allocate_memory_from_process_group_for_comm(False)
    model(torch.ones(3, 2)).sum().backward()


def call_inside(model: nn.Module, call: Callable[[], object]) -> None:
    handle = model[0].register_forward_pre_hook(lambda *_: call())
    try:
        model(torch.ones(3, 2))
    finally:
        handle.remove()


@on_ranks(2)
def test_collectives_of_ones_own_on_several_meshes(rank: Rank) -> None:
    """A unit whose parameters lie on several meshes takes neither custom collectives nor an all-reduce hook."""
    alone = rank.make_mesh(rank.world_size, 1, names=("a", "b"))["b"]
    model = nn.Linear(2, 2)
    place = {2: None, 1: ShardPlacementResult(Shard(0), alone)}
    shard(rank, model, shard_placement_fn=lambda parameter: place[parameter.ndim])
    for setter in (model.set_custom_all_gather, model.set_custom_reduce_scatter, model.set_all_reduce_hook):
        with pytest.raises(ValueError, match="expected a unit on one mesh; shard_placement_fn has placed"):
            setter(Collector())
    model(torch.ones(3, 2)).sum().backward()


class Collector(NoCollective):
    """Can be called and brings memory."""

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(0)


@on_ranks(1, 2)
def test_reset_iter_state_is_for_the_root(rank: Rank) -> None:
    """Calling it on another unit raises an error that names the unit and the root."""
    model = shard(rank, nn.Sequential(shard(rank)))
    model(torch.ones(1, 2))
    with pytest.raises(FullshardError, match=r"unit '0'; call it on the root module, a FSDPSequential"):
        model[0].reset_iter_state()
    model.reset_iter_state()


@on_ranks(2)
def test_refused_module_can_be_sharded_afterwards(rank: Rank) -> None:
    """A refusal leaves the module untouched, so that the remedied call works."""
    module = nn.Linear(2, 2)
    for options in ({"mesh": 3}, {"reshard_after_forward": 3}, {"ignored_params": ["weight"]}):
        with pytest.raises((ValueError, TypeError)):
            shard(rank, module, **options)
    assert type(module) is nn.Linear and type(module.weight) is nn.Parameter
    assert isinstance(shard(rank, module), FSDPModule)


@on_ranks(1)
def test_ignored_parameters_may_come_as_any_iterable(rank: Rank) -> None:
    """A list, a tuple, a set, a generator and None are all fine."""
    for kind in (list, tuple, set, iter):
        module = nn.Linear(2, 2)
        shard(rank, module, ignored_params=kind([module.bias]))
        assert type(module.bias) is nn.Parameter and type(module.weight) is not nn.Parameter
    shard(rank, nn.Linear(2, 2), ignored_params=None)
