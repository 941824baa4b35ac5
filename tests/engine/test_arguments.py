"""Wrong arguments: refused on every rank alike, with what was expected and what was found."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import fullshard
from fullshard import DataParallelMeshDims, FSDPMeshInfo, FSDPModule, FullshardError, ShardPlacementResult, fully_shard
from fullshard.engine.ownership import nested_units
from ranks import Rank, on_ranks

# What is evaluated, with the names that ``names_for`` gives -> a regular expression for "ErrorType: message".
MODULES = {
    "fully_shard(None, mesh=mesh)": "nn.Module or a list of them, found NoneType",
    "shard(nn.Linear)": "expected an nn.Module or a list of them, found type",
    "shard([])": "expected at least one module, found an empty list",
    "shard([plain, '0'])": "expected modules, found a str at index 1",
    "shard([plain, [plain[0]]])": "expected modules, found a list at index 1",
    "shard([plain, sharded])": "this Sequential is already sharded",
    "shard(sharded)": "this Sequential is already sharded; call fully_shard once per module",
    "shard(nn.ModuleList([plain]))": "ModuleList does not implement forward.*each of its modules",
    "shard(nn.ModuleDict({'a': plain}))": "ModuleDict does not implement forward.*the module that contains it",
    "shard(nn.LazyLinear(3))": r"weight is uninitialized \(lazy\); run a forward first",
    "shard(dtensors())": r"0\.weight: expected the mesh of the DTensor.*with different named axes",
    "shard(replicate(plain[0], mesh=mesh))": "ValueError: fully_shard: this Linear is already sharded",
}
MESHES = {
    "shard(mesh=group)": "mesh: expected DeviceMesh or None, found ProcessGroup",
    "shard(plain, mesh=cube)": r"mesh: expected 1 dimension, or 2 \(replicate, shard\), found 3",
    "shard(plain, dp_mesh_dims='b')": "dp_mesh_dims: expected DataParallelMeshDims or None, found str",
    "shard(plain, mesh=named, dp_mesh_dims=Dims(shard='dp'))": (
        r"dp_mesh_dims: expected axes of the mesh, \['a', 'b'\], found \['dp'\]"
    ),
    "shard(plain, dp_mesh_dims=Dims(shard='dp'))": r"expected axes of the mesh, \[\], found \['dp'\]",
    "shard(plain, mesh=named, dp_mesh_dims=Dims(shard='b'))": (
        r"0\.weight: dp_mesh_dims: expected all parameters to be DTensors on the mesh, or annotated"
        r".* found a plain tensor without placements on the axes \['a'\]"
    ),
    "shard(dtensors(named, Shard(0)), mesh=named, dp_mesh_dims=Dims(shard='b'))": (
        r"0\.weight: expected a DTensor with Replicate\(\) on the data-parallel axis 'b', found S"
    ),
    "shard(dtensors(), mesh=named, dp_mesh_dims=Dims(shard='b'))": (
        r"0\.weight: expected a DTensor on the mesh passed to fully_shard"
    ),
    "Dims()": "replicate or both, found neither",
    "FSDPMeshInfo(mesh, 0, dp_mesh_dims=Dims('b'))": "FSDPMeshInfo: found dp_mesh_dims without spmd_mesh; pass both or",
    "FSDPMeshInfo(mesh, 0, spmd_mesh=named)": "found spmd_mesh without dp_mesh_dims",
    "shard(dtensors(mesh, Shard(0)))": r"0\.weight: expected the mesh of the DTensor, .* with different named axes",
    "Dims(shard=('a', 'b'), replicate='a')": "expected every axis once, found",
}
POLICIES = {
    "shard(reshard_after_forward=3)": r"expected a divisor of the \d ranks of the shard axis, found 3",
    "shard(reshard_after_forward=0)": "a divisor of .*, found 0",
    "shard(reshard_after_forward=1.0)": (
        "reshard_after_forward: expected True, False, None or a number of ranks, found 1.0 of type float"
    ),
    "shard(plain, mp_policy=torch.bfloat16)": "mp_policy: expected MixedPrecisionPolicy or None, found dtype",
    "shard(plain, offload_policy=CPUOffloadPolicy)": "offload_policy: expected OffloadPolicy or None, found type",
    "MixedPrecisionPolicy(param_dtype='bf16')": "param_dtype: expected a torch.dtype or None, found 'bf16'",
    "MixedPrecisionPolicy(reduce_dtype=torch.int32)": "reduce_dtype: expected a floating-point dtype",
    "MixedPrecisionPolicy(output_dtype=torch.complex64)": "output_dtype: expected a floating-point dtype",
    "MixedPrecisionPolicy(cast_forward_inputs=1)": "cast_forward_inputs: expected True or False, found 1",
    "MixedPrecisionPolicy(param_dtype_override_fn=torch.bfloat16)": "TypeError: .*expected a function",
    **{
        f"shard(plain, mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=lambda _: {answer}))": (
            f"{error}: .*param_dtype_override_fn, for 0.weight"
        )
        for answer, error in (("'bf16'", "TypeError"), ("torch.int8", "ValueError"))
    },
    **{
        f"CPUOffloadPolicy(fraction={value})": "ValueError: .*fraction: expected a number from 0 to 1"
        for value in ("-0.1", "1.1", "float('nan')")
    },
    **{f"CPUOffloadPolicy(fraction={value})": "TypeError: .*fraction: expected a number" for value in ("True", "'1'")},
    "CommQuantization(all_gather='int4')": "ValueError: .*all_gather: expected one of",
    "CommQuantization(reduce='fp8')": "ValueError: .*reduce: expected one of",
    "CommQuantization(block=100)": "ValueError: .*multiple of 16",
    "CommQuantization(block=0)": "ValueError: .*multiple of 16",
    "CommQuantization(block=32.0)": "TypeError: .*block: expected an int",
    "CommQuantization(min_bytes=-1)": "ValueError: .*at least 0",
    "CommQuantization(min_bytes=True)": "TypeError: .*min_bytes: expected an int",
    "sharded.set_comm_quantization('int8')": r"TypeError: .*expected a fullshard\.CommQuantization or None, found str",
    "sharded.set_comm_quantization(replicate=CommQuantization(all_gather='int8'))": (
        "ValueError: .*nothing is all-gathered over the replicate axis"
    ),
}
PLACEMENTS = {
    "shard(plain, shard_placement_fn=Shard(1))": "shard_placement_fn: expected a function, found Shard",
    "place(1)": r"returned 1 for 0\.weight; expected Shard\(dim\), ShardPlacementResult or None",
    "place(Replicate())": r"returned Replicate\(\) for 0\.weight; expected Shard\(dim\)",
    "place(Shard(2))": r"returned Shard\(2\) for 0\.weight, which has 2 dims \(shape \(2, 2\)\)",
    "place(ShardPlacementResult(Shard(0), None))": "mesh_info of type NoneType for 0.weight",
    "place(ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh)))": "mesh_info names no axis of",
    "place(Partial())": r"shard_placement_fn returned Partial.* for 0\.weight",
    "place((Shard(0), mesh))": r"shard_placement_fn returned .* for 0\.weight",
    "place(Shard)": r"shard_placement_fn returned .*Shard.* for 0\.weight",
    "place(ShardPlacementResult(Shard(0), 3))": r"mesh_info of type int for 0\.weight; expected FSDPMeshInfo",
    "place(ShardPlacementResult(Shard(0), cube))": "mesh: expected 1 dimension, or 2",
    "place(ShardPlacementResult(Replicate(), mesh))": r"returned Replicate\(\) for 0\.weight",
    "place(ShardPlacementResult(Shard(5), mesh))": r"Shard\(5\) for 0\.weight, which has 2 dims",
    "shard(scalar(), shard_placement_fn=lambda p: Shard(0))": r"Shard\(0\) for scale, which has 0 dims",
    "shard(plain, ignored_params=['0.weight'])": "ignored_params: expected Parameter, found a str",
    "shard(plain, ignored_params=plain[0].weight)": "ignored_params: expected .*, found .*Parameter",
}
METHODS = {
    "sharded.unshard(1)": "async_op: expected True or False, found 1 of type int",
    "sharded.set_requires_gradient_sync('no')": "gradient_sync: expected True or False, found 'no' of type str",
    "sharded.set_requires_gradient_sync(True, recurse=0)": "recurse: expected True or False, found 0",
    "sharded.set_reshard_after_forward(None)": "reshard_after_forward: expected True or False, found None",
    "sharded.set_reshard_after_forward(size)": "expected True or False, found [12] of type int",
    "sharded.set_is_last_backward(2)": "is_last_backward: expected True or False, found 2",
    "sharded.set_modules_to_forward_prefetch([sharded[0], plain])": (
        "set_modules_to_forward_prefetch: expected modules that fully_shard was called on, found Sequential at index 1"
    ),
    "sharded.set_modules_to_backward_prefetch(['0'])": "backward_prefetch: expected modules.*found str",
    "sharded.set_modules_to_forward_prefetch(sharded[0])": "set_modules_to_forward_prefetch: expected .*, found",
    "sharded.set_requires_all_reduce(None)": "requires_all_reduce: expected True or False, found None",
    "sharded.set_post_optim_event(None)": "TypeError: set_post_.*: expected a torch.Event, found NoneType",
    "sharded.set_post_optim_event(torch.optim.SGD(sharded.parameters()))": "expected a torch.Event, found SGD",
}
COMMUNICATION = {
    **{
        f"sharded.set_gradient_divide_factor({value})": (
            "ValueError: set_gradient_divide_factor: expected a positive number, found "
        )
        for value in ("0", "float('nan')", "True", "'2'")
    },
    "sharded.set_reduce_scatter_divide_factor(None)": "factor: expected a positive number, found None",
    "sharded.set_force_sum_reduction_for_comms(1)": "ValueError: .*for_comms: expected True or False, found 1 of type",
    "sharded.set_reduce_scatter_max_input_buffers(0)": "ValueError: .*buffers: expected at least 1, found 0",
    "sharded.set_reduce_scatter_max_input_buffers(True)": "TypeError: .*buffers: expected an int, found True",
    "sharded.set_reduce_scatter_max_input_buffers(2.0)": "TypeError: .*buffers: expected an int, found 2.0",
    "sharded.set_reduce_scatter_max_input_buffers(2, recurse=None)": "recurse: expected True or False",
    "sharded.set_all_reduce_hook(3)": "TypeError: set_all_reduce_hook: expected a function, found int",
    "shard(mesh=named).set_all_reduce_hook(print, stream=torch.Stream('cpu'))": (
        "ValueError: .*expected stream=None on a mesh with a replicate axis, found one"
    ),
    "sharded.set_custom_all_gather(print)": "TypeError: .*an object with __call__ and allocate, found builtin",
    "sharded.set_custom_reduce_scatter(NoMemory())": "TypeError: .*__call__ and allocate, found NoMemory",
    "several_meshes().set_custom_all_gather(Memory())": "set_custom_all_gather: expected all parameters of a unit",
    "several_meshes().set_custom_reduce_scatter(Memory())": "set_custom_reduce_scatter: expected all parameters",
    "several_meshes().set_all_reduce_hook(print)": "ValueError: set_all_reduce_hook: expected all parameters of a unit",
    "sharded.set_allocate_memory_from_process_group_for_comm(1)": (
        "ValueError: set_allocate_memory_from_process_group_for_comm: expected True or False, found 1"
    ),
    "custom().set_allocate_memory_from_process_group_for_comm(True)": (
        "ValueError: .*unit .* has a custom collective, which allocates its own buffers"
    ),
    **{f"{kind}()": "TypeError: .*abstract" for kind in ("Comm", "AllGather", "ReduceScatter")},
    "custom().set_symm_mem_for_comm()": "ValueError: set_symm_mem_for_comm: unit .* has a custom collective",
}
FUNCTIONS = {
    "share_comm_ctx(sharded)": "share_comm_ctx: expected a list of modules, found FSDPSequential",
    "share_comm_ctx([sharded, plain])": "modules that fully_shard was called on, found Sequential at index 1",
    "enter(unsharded([sharded]))": "unsharded: expected an nn.Module, found list",
    "register_fsdp_forward_method(sharded, 'generate')": "the name of a method of Sequential, found 'generate'",
    "register_fsdp_forward_method('model', 'forward')": "expected .*nn.Module.*, found",
}
REPLICATE = {
    "replicate(None, mesh=mesh)": "TypeError: replicate: expected Module, found None",
    "replicate([plain], mesh=mesh)": "TypeError: replicate: expected Module, found list",
    "replicate(nn.ModuleList([plain]), mesh=mesh)": "ValueError: .*does not implement forward.*call replicate on each",
    "replicate(plain, mesh=group)": "TypeError: replicate: mesh: expected DeviceMesh or None",
    "replicate(plain, mesh=named)": "ValueError: replicate: mesh: expected 1 dimension, found 2",
    "replicate(plain, mesh=mesh, offload_policy=True)": (
        "TypeError: replicate: offload_policy: expected OffloadPolicy or None, found bool"
    ),
    "replicate(plain, mesh=mesh, ignored_params=['weight'])": (
        "TypeError: replicate: ignored_params: expected Parameter, found a str"
    ),
    "replicate(plain, mesh=named, dp_mesh_dims=Dims(shard='b', replicate='a'))": (
        "ValueError: replicate: dp_mesh_dims: expected replicate axes only, found shard='b'"
    ),
    "replicate(replicate(nn.Linear(1, 1), mesh=mesh), mesh=mesh)": "ValueError: .* this Linear is already sharded",
    "replicate(sharded, mesh=mesh)": "ValueError: replicate.*already sharded",
    "replicate(nn.Sequential(plain, nn.Sequential(sharded)), mesh=mesh)": (
        r"ValueError: replicate: module '1\.0' is already sharded by fully_shard; expected only replicated modules"
    ),
}
GROUPS = {
    "modules": MODULES,
    "meshes": MESHES,
    "policies": POLICIES,
    "placements": PLACEMENTS,
    "methods": METHODS,
    "communication": COMMUNICATION,
    "functions": FUNCTIONS,
    "replicate": REPLICATE,
}


class NoMemory:
    """Can be called but brings no memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


class Memory(NoMemory):
    """Can be called and brings memory."""

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(0)


def enter(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


def shard(rank: Rank, module: Any = None, **options: Any) -> Any:
    options.setdefault("mesh", rank.mesh)
    return fully_shard(nn.Linear(2, 2) if module is None else module, **options)


def names_for(rank: Rank, plain: nn.Module, sharded: Any) -> dict[str, Any]:
    """What the expressions refer to."""
    named = rank.make_mesh(1, rank.world_size, names=("a", "b"))

    def dtensors(mesh: Any = rank.mesh, placement: Any = None) -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2, bias=False))
        placements = [placement or Replicate()] * mesh.ndim
        module[0].weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, placements))
        return module

    def several_meshes() -> Any:
        other = ShardPlacementResult(Shard(0), FSDPMeshInfo(named, 0))
        return shard(rank, shard_placement_fn=lambda parameter: other if parameter.ndim == 1 else None)

    def custom() -> Any:
        model = shard(rank)
        model.set_custom_all_gather(Memory())
        return model

    def scalar() -> nn.Module:
        module = nn.Linear(2, 2)
        module.scale = nn.Parameter(torch.tensor(1.0))
        return module

    functions = (dtensors, several_meshes, custom, scalar, enter, NoMemory, Memory)
    return {
        **{name: getattr(fullshard, name) for name in fullshard.__all__},
        **{function.__name__: function for function in functions},
        "shard": lambda module=None, **options: shard(rank, module, **options),
        "place": lambda choice: shard(rank, plain, shard_placement_fn=lambda parameter: choice),
        "cube": rank.make_mesh(1, 1, rank.world_size, names=("x", "y", "z")),
        "mesh": rank.mesh,
        "named": named,
        "group": rank.group,
        "size": rank.world_size,
        "Dims": DataParallelMeshDims,
        "Shard": Shard,
        "Replicate": Replicate,
        "Partial": Partial,
        "torch": torch,
        "nn": nn,
        "plain": plain,
        "sharded": sharded,
    }


@on_ranks(2)
@pytest.mark.parametrize("group", GROUPS)
def test_wrong_argument_is_refused(rank: Rank, group: str) -> None:
    """Every rank raises ValueError or TypeError saying what was expected and found, and changes nothing."""
    sharded = shard(rank, nn.Sequential(shard(rank), shard(rank)))
    before = settings_of(sharded)
    for expression, words in GROUPS[group].items():
        plain = nn.Sequential(nn.Linear(2, 2))
        try:
            eval(expression, names_for(rank, plain, sharded))
        except (ValueError, TypeError) as error:
            message = f"{type(error).__name__}: {error}"
            assert re.search(words, message, re.DOTALL), f"{expression}: expected {words!r}, got {message}"
        else:
            pytest.fail(f"{expression} was not refused")
        if "plain[0], mesh" not in expression:
            assert not isinstance(plain, FSDPModule) and type(plain[0].weight) is nn.Parameter, expression
        assert settings_of(sharded) == before, expression
        shard(rank, plain)
    for model in (sharded, plain):
        model(torch.ones(3, 2)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(FullshardError, match=r"found unit '0'; call it on the root, a FSDPSequential"):
        sharded[0].reset_iter_state()
    with pytest.raises(KeyError, match="bias"):  # the user's own exception comes through
        shard(rank, shard_placement_fn=lambda parameter: {}["bias"])


def settings_of(model: nn.Module) -> list[Any]:
    return [copy.deepcopy(unit.settings) for unit in nested_units(model)]


@pytest.mark.cpu_only("what is refused without NCCL")
@on_ranks(2)
def test_memory_of_the_back_end(rank: Rank) -> None:
    """Symmetric memory is refused without NCCL; memory of the group is ordinary memory, not set inside a forward."""
    model = shard(rank, nn.Sequential(shard(rank), shard(rank)))
    with pytest.raises(ValueError, match=r"symmetric memory: expected a CUDA device and .* NCCL"):
        model[0].set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="expected backend=\"NCCL\", found 'NVSHMEM'"):
        model[0].set_symm_mem_for_comm("NVSHMEM")
    model[0].set_allocate_memory_from_process_group_for_comm(True)
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


@on_ranks(1)
def test_ignored_parameters_may_come_as_any_iterable(rank: Rank) -> None:
    """A list, a tuple, a set, a generator and None are all fine."""
    for kind in (list, tuple, set, iter):
        module = nn.Linear(2, 2)
        shard(rank, module, ignored_params=kind([module.bias]))
        assert type(module.bias) is nn.Parameter and type(module.weight) is not nn.Parameter
    shard(rank, nn.Linear(2, 2), ignored_params=None)
