"""The arguments of the constructor: what each means, and what is wrong with it."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Block, Net, Snapshot, assert_trains_alike, batch, built, mean_square, units_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from pairwise import pairwise
from ranks import Rank, on_ranks

S = ShardingStrategy
NAMES = ("replicate", "shard")
BLOCKS = ModuleWrapPolicy({Block})


def groups_of(rank: Rank, *groups: list[int]) -> dist.ProcessGroup:
    """This rank's of these groups, which all ranks make."""
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if rank.rank in ranks)


def test_signature() -> None:
    """Arguments have the names, order and defaults that programs rely on."""
    parameters = list(inspect.signature(FullyShardedDataParallel).parameters.values())
    assert {p.name: p.default for p in parameters[1:]} == {
        "process_group": None,
        "sharding_strategy": None,
        "cpu_offload": None,
        "auto_wrap_policy": None,
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
        "mixed_precision": None,
        "ignored_modules": None,
        "param_init_fn": None,
        "device_id": None,
        "sync_module_states": False,
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "use_orig_params": False,
        "ignored_states": None,
        "device_mesh": None,
    }
    names = "module process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch mixed_precision"
    assert [p.name for p in parameters][:7] == names.split()
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)


# -------------------------------------------------------------------- strategies and meshes


@on_ranks(2)
@pairwise(
    strategy=[S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD],
    given=["nothing", "group", "mesh"],
    use_orig_params=[True, False],
)
def test_one_dimension(rank: Rank, strategy: ShardingStrategy, given: str, use_orig_params: bool) -> None:
    """Each strategy trains like the unsharded model, on all ranks, a process group or a mesh, without a warning."""
    model = built(Net)
    reference = copy.deepcopy(model)
    where: dict[str, Any] = {"group": {"process_group": rank.group}, "mesh": {"device_mesh": rank.mesh}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=BLOCKS,
            use_orig_params=use_orig_params,
            **where.get(given, {}),
        )
    assert wrapped.sharding_strategy is strategy
    assert wrapped.process_group.size() == rank.world_size
    shards = 1 if strategy is S.NO_SHARD else rank.world_size
    assert sum(p.numel() for p in wrapped.parameters()) < sum(p.numel() for p in reference.parameters()) / shards + 100
    assert_trains_alike(wrapped, reference, rank, microbatches=2, steps=2)


@on_ranks(4)
@pairwise(
    strategy=[S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2],
    given=["mesh", "unnamed mesh", "groups"],
    shape=[(4, 1), (1, 4), (2, 2)],
    use_orig_params=[True, False],
)
def test_two_dimensions(
    rank: Rank, strategy: ShardingStrategy, given: str, shape: tuple[int, int], use_orig_params: bool
) -> None:
    """Hybrid strategies train like the unsharded model on every mesh, those with one rank in a dimension included."""
    model = built(Net)
    reference = copy.deepcopy(model)
    mesh = rank.make_mesh(*shape, names=None if given == "unnamed mesh" else NAMES)
    shard, replicate = mesh.get_group(1), mesh.get_group(0)
    where: Any = {"process_group": (shard, replicate)} if given == "groups" else {"device_mesh": mesh}
    wrapped = FullyShardedDataParallel(
        model, sharding_strategy=strategy, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params, **where
    )
    assert (wrapped.world_size, wrapped.rank) == (shape[1], mesh.get_local_rank(1))
    assert_trains_alike(wrapped, reference, rank, microbatches=2, steps=2)


@on_ranks(4)
def test_groups_that_are_no_rows(rank: Rank) -> None:
    """The tuple is (shard, replicate), whichever ranks are in the groups."""
    shard, replicate = groups_of(rank, [0, 2], [1, 3]), groups_of(rank, [0, 1], [2, 3])
    model = built(Net)
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(
        model, (shard, replicate), S.HYBRID_SHARD, auto_wrap_policy=BLOCKS, use_orig_params=True
    )
    assert wrapped.process_group is shard or dist.get_process_group_ranks(wrapped.process_group) == (
        dist.get_process_group_ranks(shard)
    )
    assert wrapped.rank == rank.rank // 2
    assert_trains_alike(wrapped, reference, rank)


@on_ranks(4)
def test_hybrid_over_machines(rank: Rank) -> None:
    """Without groups, hybrid strategies shard over the ranks of a machine, as torchrun tells.

    Where machines cannot be told apart, the error says what to pass.
    """
    for machine, shards in (("2", 2), ("4", 4), ("1", 1), (None, 4), ("3", None)):
        model = built(Net)
        reference, before = copy.deepcopy(model), Snapshot.of(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LOCAL_WORLD_SIZE", raising=False)
            if machine is not None:
                patch.setenv("LOCAL_WORLD_SIZE", machine)
            if shards is None:
                with pytest.raises(ValueError, match="device_mesh"):
                    FullyShardedDataParallel(model, sharding_strategy=S.HYBRID_SHARD)
                before.assert_unchanged(model)
                continue
            wrapped = FullyShardedDataParallel(model, sharding_strategy=S.HYBRID_SHARD, auto_wrap_policy=BLOCKS)
        assert wrapped.world_size == shards
        assert_trains_alike(wrapped, reference, rank)


# -------------------------------------------------------------------- switches


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_prefetch_and_limits_change_no_result(rank: Rank, use_orig_params: bool) -> None:
    """Whatever is gathered when, the losses are the same to the bit."""
    losses = []
    for options in (
        {},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"backward_prefetch": None},
        {"forward_prefetch": True},
        {"limit_all_gathers": False, "forward_prefetch": True, "backward_prefetch": None},
    ):
        wrapped = FullyShardedDataParallel(
            built(Net), auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params, **options
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
        found = []
        for step in range(3):
            loss = mean_square(wrapped, batch(rank.rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert all(found == losses[0] for found in losses[1:]) and len(set(losses[0])) == 3


@on_ranks(2)
def test_units_need_not_agree(rank: Rank) -> None:
    """Units of one model may differ in every switch, also where torch wants one homogeneous value."""
    model = built(Net)
    reference = copy.deepcopy(model)
    model.blocks[0] = FullyShardedDataParallel(
        model.blocks[0], use_orig_params=True, limit_all_gathers=False, backward_prefetch=None
    )
    model.blocks[1] = FullyShardedDataParallel(
        model.blocks[1], sharding_strategy=S.NO_SHARD, cpu_offload=CPUOffload(offload_params=True)
    )
    outer = FullyShardedDataParallel(model, forward_prefetch=True, sharding_strategy=S.SHARD_GRAD_OP)
    assert_trains_alike(outer, reference, rank, microbatches=2)


@on_ranks(2)
@pytest.mark.parametrize(
    ("offload", "use_orig_params"),
    [(CPUOffload(True), False), (CPUOffload(offload_grads=True), True), (CPUOffload(True, True), True)],
)
def test_cpu_offload(rank: Rank, offload: CPUOffload, use_orig_params: bool) -> None:
    """Offloading changes no result, and gradients of several synced backwards add up."""
    model = built(Net)
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(
        model, cpu_offload=offload, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params
    )
    assert_trains_alike(wrapped, reference, rank, microbatches=2)
    wrapped.zero_grad()
    mean_square(wrapped, batch(rank.rank, 9)).backward()
    once = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
    mean_square(wrapped, batch(rank.rank, 9)).backward()
    twice = [p.grad for p in wrapped.parameters() if p.grad is not None]
    assert once and all(p.device.type == "cpu" for p in wrapped.parameters())
    torch.testing.assert_close(twice, [2 * gradient for gradient in once])


@on_ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_made_without_gradients(rank: Rank, mode: Any) -> None:
    """A wrapper made inside ``no_grad`` or ``inference_mode`` trains afterwards as any other.

    The device to compute on, the CPU too, may be said, or left to be found out. Gradients of the unsharded module are
    gone on all ranks: they are no mean, and not in pieces. What programs read from an instance says what was asked for.
    """
    for use_orig_params in (False, True):
        model = built(Net)
        reference = copy.deepcopy(model)
        mean_square(model, batch(rank.rank, 0)).backward()
        device = rank.device if use_orig_params else None
        with mode():
            wrapped = FullyShardedDataParallel(
                model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params, device_id=device
            )
        assert [p.grad for p in wrapped.parameters()] == [None] * len(list(wrapped.parameters()))
        units = FullyShardedDataParallel.fsdp_modules(wrapped)
        assert len(units) == 3 and all(unit.compute_device == rank.device for unit in units)
        assert (wrapped.rank, wrapped.world_size, wrapped.module) == (rank.rank, 2, model)
        assert_trains_alike(wrapped, reference, rank)
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    wrapped = FullyShardedDataParallel(built(Net), mixed_precision=precision)
    assert wrapped.mixed_precision == precision and wrapped.sharding_strategy is S.FULL_SHARD
    assert FullyShardedDataParallel(built(Net)).mixed_precision == MixedPrecision()


# -------------------------------------------------------------------- what is wrong


def wrong_arguments(rank: Rank) -> list[tuple[dict[str, Any], type[Exception], str]]:
    """Arguments, the error, and what it says."""
    hybrid = {"sharding_strategy": S.HYBRID_SHARD}
    return [
        ({"process_group": rank.group, "device_mesh": rank.mesh}, ValueError, "process_group or device_mesh"),
        ({"process_group": "gloo"}, TypeError, "process_group"),
        ({"process_group": (rank.group, rank.group)}, TypeError, "process_group"),
        ({"process_group": rank.group, **hybrid}, ValueError, "process_group.*None or a tuple"),
        ({"process_group": (rank.group,) * 3, **hybrid}, ValueError, "process_group.*None or a tuple"),
        ({"process_group": (rank.group, None), **hybrid}, ValueError, "process_group.*None or a tuple"),
        ({"device_mesh": rank.mesh, **hybrid}, ValueError, "HYBRID_SHARD.*2.*found 1"),
        ({"device_mesh": rank.make_mesh(1, 2)}, ValueError, "FULL_SHARD.*1.*found 2"),
        ({"device_mesh": rank.make_mesh(1, 1, 2), **hybrid}, ValueError, "2.*found 3"),
        ({"device_mesh": (2,)}, TypeError, "device_mesh.*tuple"),
        ({"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy.*str"),
        ({"cpu_offload": True}, TypeError, "cpu_offload.*CPUOffload.*bool"),
        ({"cpu_offload": CPUOffloadPolicy()}, TypeError, "cpu_offload.*CPUOffloadPolicy"),
        ({"backward_prefetch": True}, TypeError, "backward_prefetch.*bool"),
        ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision.*dtype"),
        ({"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)}, TypeError, "mixed_precision.*MixedPrecisionPolicy"),
        ({"param_init_fn": torch.zeros(3, device="cpu")}, ValueError, "param_init_fn"),
        ({"device_id": "cpu"}, TypeError, "device_id.*str"),
        ({"device_id": torch.device("meta")}, ValueError, "device_id.*meta"),
        ({"sync_module_states": 1}, ValueError, "sync_module_states.*True or False"),
        ({"forward_prefetch": None}, ValueError, "forward_prefetch.*True or False"),
        ({"limit_all_gathers": 2}, ValueError, "limit_all_gathers.*True or False"),
        ({"use_orig_params": "yes"}, ValueError, "use_orig_params.*True or False"),
        ({"auto_wrap_policy": {Block}}, TypeError, "auto_wrap_policy"),
        ({"auto_wrap_policy": ModuleWrapPolicy}, TypeError, "auto_wrap_policy"),
    ]


@on_ranks(2)
def test_wrong_arguments(rank: Rank) -> None:
    """Each wrong argument raises the same error on all ranks, says which it is, and leaves the module alone."""
    model = built(Net)
    before = Snapshot.of(model)
    for arguments, kind, match in wrong_arguments(rank):
        for more in ({}, {"auto_wrap_policy": BLOCKS}):
            with pytest.raises(kind, match=match) as caught:
                FullyShardedDataParallel(model, **{**more, **arguments})
            message = (type(caught.value).__name__, str(caught.value).split(" at 0x")[0])
            before.assert_unchanged(model)
            messages: list[Any] = [None] * rank.world_size
            dist.all_gather_object(messages, message)
            assert messages[0] == messages[1], arguments
    FullyShardedDataParallel(model)  # works still


@pytest.mark.cpu_only("says what is wrong on a machine without accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what is wrong on a machine without accelerator")
@on_ranks(2)
def test_device_that_is_not_here(rank: Rank) -> None:
    """A device of a kind that the machine does not have is a wrong argument; a mere index means the CPU there."""
    model = built(Net)
    before = Snapshot.of(model)
    for device in ("cuda:0", "cuda", "xpu:1"):
        with pytest.raises(ValueError, match=f"device_id.*{device}"):
            FullyShardedDataParallel(model, device_id=torch.device(device), auto_wrap_policy=BLOCKS)
    before.assert_unchanged(model)
    assert FullyShardedDataParallel(model, device_id=0).compute_device.type == "cpu"


@on_ranks(2)
def test_wrong_modules(rank: Rank) -> None:
    """No module, one without shapes, and one that is sharded already."""
    with pytest.raises(TypeError, match=r"module.*expected Module, found list"):
        FullyShardedDataParallel([nn.Linear(2, 2)])  # type: ignore[arg-type]
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"0\.weight is uninitialized"):
        FullyShardedDataParallel(lazy)
    wrapped = FullyShardedDataParallel(built(Net))
    for policy in (None, BLOCKS):
        with pytest.raises(ValueError, match="already"):
            FullyShardedDataParallel(wrapped, auto_wrap_policy=policy)
    mean_square(wrapped, batch(rank.rank, 0)).backward()


@pytest.mark.parametrize(
    ("made", "arguments", "kind", "match"),
    [
        (MixedPrecision, {"param_dtype": "bfloat16"}, TypeError, "param_dtype.*bfloat16"),
        (MixedPrecision, {"reduce_dtype": torch.int8}, ValueError, "reduce_dtype.*int8"),
        (MixedPrecision, {"buffer_dtype": 16}, TypeError, "buffer_dtype"),
        (MixedPrecision, {"keep_low_precision_grads": 1}, TypeError, "keep_low_precision_grads"),
        (MixedPrecision, {"cast_forward_inputs": None}, TypeError, "cast_forward_inputs"),
        (MixedPrecision, {"cast_root_forward_inputs": "no"}, TypeError, "cast_root_forward_inputs"),
        (MixedPrecision, {"_module_classes_to_ignore": nn.BatchNorm1d}, TypeError, "_module_classes_to_ignore"),
        (MixedPrecision, {"_module_classes_to_ignore": ["BatchNorm1d"]}, TypeError, "_module_classes_to_ignore"),
        (CPUOffload, {"offload_params": "cpu"}, TypeError, "offload_params"),
        (CPUOffload, {"offload_grads": "cpu"}, TypeError, "offload_grads"),
    ],
)
def test_wrong_fields(made: Any, arguments: dict[str, Any], kind: type[Exception], match: str) -> None:
    """Fields of MixedPrecision and CPUOffload are checked when it is made."""
    with pytest.raises(kind, match=match):
        made(**arguments)


@on_ranks(1)
def test_one_rank(rank: Rank) -> None:
    """A world of one: every strategy trains, bit by bit, without a warning and without a collective."""
    for strategy in S:
        model = built(Net)
        reference = copy.deepcopy(model)
        mesh: DeviceMesh = rank.make_mesh(1, 1, names=NAMES) if strategy.hybrid else rank.mesh
        with warnings.catch_warnings(), record() as seen:
            warnings.simplefilter("error")
            wrapped = FullyShardedDataParallel(
                model, sharding_strategy=strategy, auto_wrap_policy=BLOCKS, device_mesh=mesh
            )
            assert wrapped.sharding_strategy is strategy
            assert_trains_alike(wrapped, reference, rank, microbatches=2, rtol=0.0, atol=0.0)
        assert seen == [] and units_of(wrapped) == ["", "blocks.0", "blocks.1"]
