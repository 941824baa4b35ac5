"""The arguments of the constructor: what each means, and what is wrong with it."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable
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
from models import tiny_units
from ranks import Rank, on_ranks

S = ShardingStrategy
NAMES = ("replicate", "shard")
WHOLE = [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]
HYBRID = [S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2]
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


@on_ranks(2, 4)
@pytest.mark.parametrize(("given", "use_orig_params"), [("nothing", True), ("group", False), ("mesh", True)])
@pytest.mark.parametrize("strategy", WHOLE, ids=lambda s: s.name)
def test_one_dimension(rank: Rank, strategy: ShardingStrategy, given: str, use_orig_params: bool) -> None:
    """Each strategy trains like the unsharded model, on all ranks, a process group or a mesh."""
    model = built(Net)
    reference = copy.deepcopy(model)
    where: dict[str, Any] = {"group": {"process_group": rank.group}, "mesh": {"device_mesh": rank.mesh}}
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


@on_ranks(2, 4)
@pytest.mark.parametrize(("given", "use_orig_params"), [("mesh", True), ("unnamed mesh", False), ("groups", False)])
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_two_dimensions(rank: Rank, strategy: ShardingStrategy, given: str, use_orig_params: bool) -> None:
    """Hybrid strategies train like the unsharded model on every mesh, those with one rank in a dimension included."""
    for shape in [(rank.world_size, 1), (1, rank.world_size)] + [(2, 2)] * (rank.world_size == 4):
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
@pytest.mark.parametrize(("machine", "shards"), [("2", 2), ("4", 4), ("1", 1), (None, 4)])
def test_hybrid_over_machines(rank: Rank, machine: str | None, shards: int) -> None:
    """Without groups, hybrid strategies shard over the ranks of a machine, as torchrun tells."""
    model = built(Net)
    reference = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if machine is not None:
            patch.setenv("LOCAL_WORLD_SIZE", machine)
        wrapped = FullyShardedDataParallel(model, sharding_strategy=S.HYBRID_SHARD, auto_wrap_policy=BLOCKS)
    assert wrapped.world_size == shards
    assert_trains_alike(wrapped, reference, rank)


@on_ranks(4)
def test_machines_of_different_size(rank: Rank) -> None:
    """Where machines cannot be told apart, the error says what to pass."""
    model = built(Net)
    before = Snapshot.of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(ValueError, match="device_mesh"):
            FullyShardedDataParallel(model, sharding_strategy=S.HYBRID_SHARD)
    assert os.environ.get("LOCAL_WORLD_SIZE") != "3"
    before.assert_unchanged(model)


@on_ranks(4)
def test_part_of_the_world(rank: Rank) -> None:
    """A group of some ranks: they alone average and shard; others may train something else meanwhile."""
    group = groups_of(rank, [0, 1], [2, 3])
    peers = dist.get_process_group_ranks(group)
    model = built(Net, seed=peers[0])
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(model, group, auto_wrap_policy=BLOCKS, use_orig_params=True)
    assert wrapped.world_size == 2 and wrapped.process_group.size() == 2
    assert_trains_alike(wrapped, reference, rank, peers=peers)


@on_ranks(4)
def test_different_groups_inside(rank: Rank) -> None:
    """Units may have groups and strategies of their own, as experts do."""
    half = groups_of(rank, [0, 1], [2, 3])
    model = built(Net)
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], half, S.SHARD_GRAD_OP)
    outer = FullyShardedDataParallel(model, rank.group)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.2)
    mean_square(outer, batch(rank.rank, 0)).backward()
    reference = built(Net)
    for peer in range(4):
        (mean_square(reference, batch(peer, 0)) / 4).backward()
    within = built(Net)
    for peer in dist.get_process_group_ranks(half):
        (mean_square(within, batch(peer, 0)) / 2).backward()
    optimizer.step()
    state = outer.state_dict()
    for name, parameter in reference.named_parameters():
        source = dict(within.named_parameters())[name] if name.startswith("blocks.0") else parameter
        torch.testing.assert_close(state[name], parameter.detach() - 0.2 * source.grad, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_collectives_of_strategies(rank: Rank) -> None:
    """What travels: NO_SHARD never gathers, SHARD_GRAD_OP not in backward, hybrid strategies all-reduce as well."""
    kinds: dict[str, list[dict[str, int]]] = {}
    for strategy in S:
        mesh = rank.make_mesh(2, 2, names=NAMES) if strategy.hybrid else rank.mesh
        with tiny_units():
            wrapped = FullyShardedDataParallel(
                built(Net), sharding_strategy=strategy, auto_wrap_policy=BLOCKS, device_mesh=mesh
            )
        mean_square(wrapped, batch(rank.rank, 0)).backward()
        with record() as forward:
            loss = mean_square(wrapped, batch(rank.rank, 1))
        with record() as backward:
            loss.backward()
        kinds[strategy.name] = [
            {kind: len({c.unit for c in seen if c.kind == kind}) for kind in {c.kind for c in seen}}
            for seen in (forward, backward)
        ]
    gather = next(kind for kind in kinds["FULL_SHARD"][0])
    assert kinds["NO_SHARD"][0] == {} and gather not in kinds["NO_SHARD"][1]
    assert kinds["FULL_SHARD"][0] == {gather: 3} == kinds["HYBRID_SHARD"][0] == kinds["SHARD_GRAD_OP"][0]
    assert kinds["FULL_SHARD"][1][gather] == kinds["HYBRID_SHARD"][1][gather] == 1  # kept: the root, and what ran last
    assert gather not in kinds["SHARD_GRAD_OP"][1] and gather not in kinds["_HYBRID_SHARD_ZERO2"][1]
    assert len(kinds["HYBRID_SHARD"][1]) == len(kinds["FULL_SHARD"][1]) + 1


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
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize(
    "offload", [CPUOffload(True), CPUOffload(offload_grads=True), CPUOffload(True, True), CPUOffload()], ids=str
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
@pytest.mark.parametrize("said", [True, False])
def test_device_id(rank: Rank, said: bool) -> None:
    """The device to compute on, the CPU too, may be said, or left to be found out."""
    model = built(Net)
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(model, device_id=rank.device if said else None, auto_wrap_policy=BLOCKS)
    assert wrapped.compute_device == rank.device
    assert all(unit.compute_device == rank.device for unit in FullyShardedDataParallel.fsdp_modules(wrapped))
    assert_trains_alike(wrapped, reference, rank, steps=1)


@on_ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_gradients_from_before(rank: Rank, use_orig_params: bool) -> None:
    """Gradients of the unsharded module are gone on all ranks: they are no mean, and not in pieces."""
    model = built(Net)
    mean_square(model, batch(rank.rank, 0)).backward()
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    assert [p.grad for p in wrapped.parameters()] == [None] * len(list(wrapped.parameters()))


@on_ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_made_without_gradients(rank: Rank, mode: Any) -> None:
    """A wrapper that is made inside ``no_grad`` or ``inference_mode`` trains afterwards as any other."""
    for use_orig_params in (False, True):
        model = built(Net)
        reference = copy.deepcopy(model)
        with mode():
            wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
        assert_trains_alike(wrapped, reference, rank)


@on_ranks(2)
def test_attributes_for_programs(rank: Rank) -> None:
    """What programs read from an instance says what was asked for."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = built(Net)
    wrapped = FullyShardedDataParallel(model, mixed_precision=precision)
    assert wrapped.mixed_precision == precision and wrapped.sharding_strategy is S.FULL_SHARD
    assert (wrapped.rank, wrapped.world_size, wrapped.module) == (rank.rank, 2, model)
    assert FullyShardedDataParallel(built(Net)).mixed_precision == MixedPrecision()


# -------------------------------------------------------------------- what is wrong

WRONG: dict[str, tuple[Callable[[Rank], dict[str, Any]], type[Exception], str]] = {
    "both": (lambda r: {"process_group": r.group, "device_mesh": r.mesh}, ValueError, "process_group or device_mesh"),
    "group": (lambda r: {"process_group": "gloo"}, TypeError, "process_group"),
    "groups": (lambda r: {"process_group": (r.group, r.group)}, TypeError, "process_group"),
    "hybrid group": (
        lambda r: {"process_group": r.group, "sharding_strategy": S.HYBRID_SHARD},
        ValueError,
        "process_group.*None or a tuple",
    ),
    "hybrid three": (
        lambda r: {"process_group": (r.group,) * 3, "sharding_strategy": S._HYBRID_SHARD_ZERO2},
        ValueError,
        "process_group.*None or a tuple",
    ),
    "hybrid list": (
        lambda r: {"process_group": (r.group, None), "sharding_strategy": S.HYBRID_SHARD},
        ValueError,
        "process_group.*None or a tuple",
    ),
    "hybrid mesh": (
        lambda r: {"device_mesh": r.mesh, "sharding_strategy": S.HYBRID_SHARD},
        ValueError,
        "HYBRID_SHARD.*2.*found 1",
    ),
    "mesh": (lambda r: {"device_mesh": r.make_mesh(1, r.world_size)}, ValueError, "FULL_SHARD.*1.*found 2"),
    "mesh of 3": (
        lambda r: {"device_mesh": r.make_mesh(1, 1, r.world_size), "sharding_strategy": S.HYBRID_SHARD},
        ValueError,
        "2.*found 3",
    ),
    "no mesh": (lambda r: {"device_mesh": (2,)}, TypeError, "device_mesh.*tuple"),
    "strategy": (lambda r: {"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy.*str"),
    "offload": (lambda r: {"cpu_offload": True}, TypeError, "cpu_offload.*CPUOffload.*bool"),
    "offload policy": (lambda r: {"cpu_offload": CPUOffloadPolicy()}, TypeError, "cpu_offload.*CPUOffloadPolicy"),
    "prefetch": (lambda r: {"backward_prefetch": True}, TypeError, "backward_prefetch.*bool"),
    "precision": (lambda r: {"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision.*dtype"),
    "precision policy": (
        lambda r: {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)},
        TypeError,
        "mixed_precision.*MixedPrecisionPolicy",
    ),
    "init": (lambda r: {"param_init_fn": torch.zeros(3, device="cpu")}, ValueError, "param_init_fn"),
    "device": (lambda r: {"device_id": "cpu"}, TypeError, "device_id.*str"),
    "meta device": (lambda r: {"device_id": torch.device("meta")}, ValueError, "device_id.*meta"),
    "sync": (lambda r: {"sync_module_states": 1}, ValueError, "sync_module_states.*True or False"),
    "ahead": (lambda r: {"forward_prefetch": None}, ValueError, "forward_prefetch.*True or False"),
    "limit": (lambda r: {"limit_all_gathers": 2}, ValueError, "limit_all_gathers.*True or False"),
    "orig": (lambda r: {"use_orig_params": "yes"}, ValueError, "use_orig_params.*True or False"),
    "policy": (lambda r: {"auto_wrap_policy": {Block}}, TypeError, "auto_wrap_policy"),
    "policy class": (lambda r: {"auto_wrap_policy": ModuleWrapPolicy}, TypeError, "auto_wrap_policy"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(rank: Rank, name: str) -> None:
    """Each wrong argument raises the same error on all ranks, says which it is, and leaves the module alone."""
    arguments, kind, match = WRONG[name]
    model = built(Net)
    before = Snapshot.of(model)
    for more in ({}, {"auto_wrap_policy": BLOCKS}):
        with pytest.raises(kind, match=match) as caught:
            FullyShardedDataParallel(model, **{**more, **arguments(rank)})
        before.assert_unchanged(model)
        messages: list[Any] = [None] * rank.world_size
        dist.all_gather_object(messages, (type(caught.value).__name__, str(caught.value).split(" at 0x")[0]))
        assert messages[0] == messages[1]
    FullyShardedDataParallel(model)  # works still


@pytest.mark.cpu_only("says what is wrong on a machine without accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what is wrong on a machine without accelerator")
@on_ranks(2)
@pytest.mark.parametrize("device", ["cuda:0", "cuda", "xpu:1"])
def test_device_that_is_not_here(rank: Rank, device: str) -> None:
    """A device of a kind that the machine does not have is a wrong argument; a mere index means the CPU there."""
    model = built(Net)
    before = Snapshot.of(model)
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
    ("arguments", "kind", "match"),
    [
        ({"param_dtype": "bfloat16"}, TypeError, "param_dtype.*bfloat16"),
        ({"reduce_dtype": torch.int8}, ValueError, "reduce_dtype.*int8"),
        ({"buffer_dtype": 16}, TypeError, "buffer_dtype"),
        ({"keep_low_precision_grads": 1}, TypeError, "keep_low_precision_grads"),
        ({"cast_forward_inputs": None}, TypeError, "cast_forward_inputs"),
        ({"cast_root_forward_inputs": "no"}, TypeError, "cast_root_forward_inputs"),
        ({"_module_classes_to_ignore": nn.BatchNorm1d}, TypeError, "_module_classes_to_ignore"),
        ({"_module_classes_to_ignore": ["BatchNorm1d"]}, TypeError, "_module_classes_to_ignore"),
    ],
)
def test_wrong_precision(arguments: dict[str, Any], kind: type[Exception], match: str) -> None:
    """Fields of MixedPrecision are checked when it is made."""
    with pytest.raises(kind, match=match):
        MixedPrecision(**arguments)


def test_wrong_offload() -> None:
    """So are those of CPUOffload."""
    for field in ("offload_params", "offload_grads"):
        with pytest.raises(TypeError, match=field):
            CPUOffload(**{field: "cpu"})  # type: ignore[arg-type]


@on_ranks(2)
def test_containers_warn(rank: Rank) -> None:
    """A module list or dict has no forward: a warning says so. What is inside can be wrapped and trains."""
    for container in (nn.ModuleList([Block(), Block()]), nn.ModuleDict({"a": Block()})):
        with pytest.warns(UserWarning, match=f"{type(container).__name__} has no forward"):
            FullyShardedDataParallel(container)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullyShardedDataParallel(built(Net), sharding_strategy=S.NO_SHARD, auto_wrap_policy=BLOCKS)


@on_ranks(1)
@pytest.mark.parametrize("strategy", list(S), ids=lambda s: s.name)
def test_one_rank(rank: Rank, strategy: ShardingStrategy) -> None:
    """A world of one: every strategy trains, without a warning and without a collective."""
    model = built(Net)
    reference = copy.deepcopy(model)
    mesh: DeviceMesh = rank.make_mesh(1, 1, names=NAMES) if strategy.hybrid else rank.mesh
    with warnings.catch_warnings(), record() as seen:
        warnings.simplefilter("error")
        wrapped = FullyShardedDataParallel(model, sharding_strategy=strategy, auto_wrap_policy=BLOCKS, device_mesh=mesh)
        assert wrapped.sharding_strategy is strategy
        assert_trains_alike(wrapped, reference, rank, microbatches=2)
    assert seen == [] and units_of(wrapped) == ["", "blocks.0", "blocks.1"]
