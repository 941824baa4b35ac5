"""The arguments of the constructor: what each means, what is wrong with it, and which modules policies make units."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wrapped import (
    BLOCKS,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    Block,
    Net,
    Snapshot,
    Tied,
    backward,
    built,
    check_steps,
    loss_at,
    raised_everywhere,
    units_of,
)

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FlatParameter,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import record
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    Policy,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    wrap,
)
from ranks import Rank, on_ranks

BF16, F32 = torch.bfloat16, torch.float32
NAMES = ("replicate", "shard")


def test_signature() -> None:
    """Arguments have the names, order and defaults of torch's wrapper."""
    theirs = inspect.signature(importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel)

    def facts(signature: inspect.Signature) -> list[Any]:
        parameters = signature.parameters.values()
        return [(p.name, p.kind, getattr(p.default, "name", p.default)) for p in parameters]

    assert facts(inspect.signature(FSDP)) == facts(theirs)


# -------------------------------------------------------------------- groups and meshes


@on_ranks(4)
@pytest.mark.parametrize("given", ["group", "groups", "groups that are no rows", "unnamed mesh"])
def test_where_parameters_are_sharded(rank: Rank, given: str) -> None:
    """On all ranks, a group or a mesh; hybrid strategies on a mesh, or groups (shard, replicate) of whatever ranks."""
    grid = rank.make_mesh(2, 2, names=NAMES)
    hybrid: dict[str, Any] = {"sharding_strategy": HYBRID[0], "use_orig_params": True}
    if given == "groups that are no rows":
        groups = {ranks: dist.new_group(ranks) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))}
        shard, replicate = (group for ranks, group in groups.items() if rank.rank in ranks)
    else:
        shard, replicate = grid.get_group(1), grid.get_group(0)
    arguments, shards, place = {
        "group": ({"process_group": rank.group}, 4, rank.rank),
        "groups": ({"process_group": (shard, replicate), **hybrid}, 2, rank.rank % 2),
        "groups that are no rows": ({"process_group": (shard, replicate), **hybrid}, 2, rank.rank // 2),
        "unnamed mesh": ({"device_mesh": rank.make_mesh(2, 2), **hybrid}, 2, rank.rank % 2),
    }[given]
    model = built()
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = FSDP(model, auto_wrap_policy=BLOCKS, **arguments)
    assert (wrapped.world_size, wrapped.process_group.size(), wrapped.rank) == (shards, shards, place)
    check_steps(rank, wrapped, reference)


@on_ranks(4)
def test_hybrid_over_machines(rank: Rank) -> None:
    """Without groups, hybrid strategies shard over a machine's ranks, if torchrun tells which, or say what to pass."""
    for machine, shards in (("2", 2), ("4", 4), ("1", 1), (None, 4), ("3", None)):
        model = built()
        before = Snapshot.of(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LOCAL_WORLD_SIZE", raising=False)
            if machine is not None:
                patch.setenv("LOCAL_WORLD_SIZE", machine)
            if shards is None:
                with pytest.raises(ValueError, match="device_mesh"):
                    FSDP(model, sharding_strategy=HYBRID[0])
                before.assert_unchanged(model)
            else:
                assert FSDP(model, sharding_strategy=HYBRID[0]).world_size == shards


# -------------------------------------------------------------------- switches


@on_ranks(2)
def test_attributes_of_an_instance(rank: Rank) -> None:
    """Programs read from it what was asked for; gradients of the unsharded module are dropped on all ranks."""
    precision = MixedPrecision(param_dtype=BF16)
    for device in (rank.device, None):
        model = built()
        loss_at()(model, rank.rank).backward()
        wrapped = FSDP(model, auto_wrap_policy=BLOCKS, mixed_precision=precision, device_id=device)
        assert [p.grad for p in wrapped.parameters()] == [None] * 3
        assert all(unit.compute_device == rank.device for unit in FSDP.fsdp_modules(wrapped))
        assert (wrapped.rank, wrapped.world_size, wrapped.module) == (rank.rank, 2, model)
        assert wrapped.mixed_precision == precision and wrapped.sharding_strategy is FULL
    assert FSDP(built()).mixed_precision == MixedPrecision()


# -------------------------------------------------------------------- which modules become units


class Tagged(FSDP):
    """A subclass with an argument of its own."""

    def __init__(self, module: nn.Module, tag: str, **options: Any) -> None:
        super().__init__(module, **options)
        self.tag = tag

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.tag == "outer"
        return super().forward(*args, **kwargs)


@on_ranks(2)
def test_policies(rank: Rank) -> None:
    """What a policy chooses becomes a unit, containers too; what was sharded by hand is left alone."""
    assert units_of(FSDP(built(), auto_wrap_policy=ModuleWrapPolicy(()))) == [""]
    for policy in (
        functools.partial(size_based_auto_wrap_policy, min_num_params=80),  # a block has 100
        lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
    ):
        assert units_of(FSDP(built(), auto_wrap_policy=policy)) == ["", "blocks.0", "blocks.1"]
    model = built(Net, 3)
    reference = copy.deepcopy(model)
    by_hand = model.blocks[1] = FSDP(model.blocks[1], sharding_strategy=GRAD_OP, use_orig_params=True)
    fully_shard(model.blocks[2], mesh=rank.mesh)
    wrapped = Tagged(model, "outer", auto_wrap_policy=always_wrap_policy)
    assert units_of(wrapped) == [
        *("", "first", "blocks", "blocks.0", "blocks.0.up", "blocks.0.down", "blocks.1", "last")
    ]
    assert wrapped.blocks[1] is by_hand and by_hand.sharding_strategy is GRAD_OP
    assert wrapped.blocks[0].up.weight is not None and isinstance(wrapped.blocks, FSDP)
    check_steps(rank, wrapped, reference)


@on_ranks(2)
def test_enable_wrap(rank: Rank) -> None:
    """Modules wrapped with ``wrap`` in the model's own code, with overrides, train as unsharded."""

    def annotated() -> Net:
        model = built()
        for index in range(2):
            model.blocks[index] = wrap(model.blocks[index], sharding_strategy=NO_SHARD)
        model.last = wrap(model.last)
        return model

    reference = annotated()
    assert units_of(reference) == []
    with enable_wrap(wrapper_cls=FSDP, use_orig_params=True):
        model = wrap(annotated())
    assert units_of(model) == ["", "blocks.0", "blocks.1", "last"]
    assert [u.sharding_strategy for u in FSDP.fsdp_modules(model)] == [FULL, NO_SHARD, NO_SHARD, FULL]
    check_steps(rank, model, reference)


@on_ranks(2)
def test_arguments_per_module(rank: Rank) -> None:
    """A dict overrides the root's arguments for a module; what it does not mention comes from the root."""
    model = built()
    first, second = model.blocks
    precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
    full = MixedPrecision(param_dtype=F32, cast_forward_inputs=True)
    chosen: dict[int, Any] = {
        id(first): {"sharding_strategy": NO_SHARD, "use_orig_params": True, "mixed_precision": full},
        id(second): {"cpu_offload": CPUOffload(offload_params=True), "backward_prefetch": None},
        id(model.last): True,
    }
    wrapped = FSDP(
        model,
        sharding_strategy=GRAD_OP,
        mixed_precision=precision,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        auto_wrap_policy=CustomPolicy(lambda module: chosen.get(id(module), False)),
    )
    one, two, last = wrapped.blocks[0], wrapped.blocks[1], wrapped.last
    assert [u.sharding_strategy for u in (wrapped, one, two, last)] == [GRAD_OP, NO_SHARD, GRAD_OP, GRAD_OP]
    assert [u.mixed_precision for u in (wrapped, one, two, last)] == [precision, full, precision, precision]
    assert not any(isinstance(p, FlatParameter) for p in one.parameters()) and first.up.weight.shape == (9, 5)
    assert all(isinstance(p, FlatParameter) for u in (two, last) for p in u.parameters())
    with record() as seen:
        backward(rank, wrapped)
    dtypes = {unit: {c.dtype for c in seen if c.unit == unit} for unit in ("blocks.0", "blocks.1", "last")}
    assert dtypes == {"blocks.0": {F32}, "blocks.1": {BF16}, "last": {BF16}}
    assert len({c.kind for c in seen if c.unit == "blocks.0"}) == 1  # an all-reduce, or a reduction to it


@on_ranks(2)
def test_frozen_beside_trainable(rank: Rank) -> None:
    """Units that mix both warn with a list of the frozen parameters; ignored ones, and units of one kind, do not."""
    model = built()
    for frozen in (model.blocks[0].up.weight, model.blocks[1].up.bias, *model.last.parameters()):
        frozen.requires_grad_(False)
    with pytest.warns(UserWarning, match="frozen") as caught:
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}), ignored_states=[model.blocks[0].up.weight])
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1 and "blocks.1.up.bias" in messages[0]
    assert "last" not in messages[0] and "blocks.0" not in messages[0]


# -------------------------------------------------------------------- what is wrong


def wrong_arguments(rank: Rank) -> list[tuple[dict[str, Any], type[Exception], str]]:
    """Arguments, the error, and what it says."""
    hybrid = {"sharding_strategy": HYBRID[0]}
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
        ({"mixed_precision": BF16}, TypeError, "mixed_precision.*dtype"),
        ({"mixed_precision": MixedPrecisionPolicy(BF16)}, TypeError, "mixed_precision.*MixedPrecisionPolicy"),
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
    model = built()
    before = Snapshot.of(model)
    for arguments, kind, match in wrong_arguments(rank):
        for more in ({}, {"auto_wrap_policy": BLOCKS}):
            with pytest.raises(kind, match=match) as caught:
                FSDP(model, **{**more, **arguments})
            before.assert_unchanged(model)
        raised_everywhere(rank, caught.value)
    FSDP(model)  # works still


@pytest.mark.cpu_only("says what is wrong on a machine without accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what is wrong on a machine without accelerator")
@on_ranks(2)
def test_device_that_is_not_here(rank: Rank) -> None:
    """A device of a kind that the machine does not have is a wrong argument; a mere index means the CPU there."""
    model = built()
    before = Snapshot.of(model)
    for device in ("cuda:0", "cuda", "xpu:1"):
        with pytest.raises(ValueError, match=f"device_id.*{device}"):
            FSDP(model, device_id=torch.device(device), auto_wrap_policy=BLOCKS)
    before.assert_unchanged(model)
    assert FSDP(model, device_id=0).compute_device.type == "cpu"


@on_ranks(2)
def test_wrong_modules(rank: Rank) -> None:
    """No module, one without shapes, and one that is sharded already."""
    with pytest.raises(TypeError, match=r"module.*expected Module, found list"):
        FSDP([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0\.weight is uninitialized"):
        FSDP(nn.Sequential(nn.LazyLinear(3)))
    wrapped = FSDP(built())
    for policy in (None, BLOCKS):
        with pytest.raises(ValueError, match="already"):
            FSDP(wrapped, auto_wrap_policy=policy)
    backward(rank, wrapped)


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


# -------------------------------------------------------------------- plans that cannot be made


class Planned(Policy):
    """A plan of the test: an exception, or arguments by module."""

    def __init__(self, plan: Exception | dict[nn.Module, Any]) -> None:
        self.plan = plan

    def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: Any) -> Any:
        if isinstance(self.plan, Exception):
            raise self.plan
        return self.plan


def divide(module: nn.Module) -> bool:
    return 1 / 0 > 0


# Policies, or the arguments that one chooses for a block; the error, and what it says.
BAD_PLANS: list[tuple[Any, Any, str]] = [
    ({"reshard_after_forward": True}, ValueError, "blocks.1.*reshard_after_forward"),
    ({"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy"),
    ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision"),
    ({"use_orig_params": None}, ValueError, "use_orig_params"),
    ({"sharding_strategy": HYBRID[0], "process_group": "world"}, ValueError, "HYBRID_SHARD"),
    ({"param_init_fn": 3}, ValueError, "param_init_fn"),
    ({"module": 3}, (TypeError, ValueError), "module"),
    ({"auto_wrap_policy": BLOCKS}, ValueError, "auto_wrap_policy"),
    ({"ignored_modules": []}, ValueError, "ignored_modules"),
    (Planned(OSError("no plan")), OSError, "no plan"),
    (Planned({nn.Linear(2, 2): {}}), ValueError, "not a submodule of the root"),
    (CustomPolicy(lambda module: "yes"), ValueError, "True, False or a dict"),  # type: ignore[arg-type,return-value]
    (CustomPolicy(divide), ZeroDivisionError, "zero"),
    (lambda module: True, TypeError, "recurse"),
    (lambda module, recurse, nonwrapped_numel: recurse or divide(module), ZeroDivisionError, "zero"),
]


@on_ranks(2)
def test_plans_that_cannot_be_made(rank: Rank) -> None:
    """Whatever a policy does wrong shows before anything is wrapped; the error is the same on all ranks."""
    model = built(Tied)
    before = Snapshot.of(model)
    for bad, kind, match in BAD_PLANS:
        one = model.blocks[1]
        policy = CustomPolicy(lambda m, one=one, bad=bad: bad if m is one else isinstance(m, Block))
        with pytest.raises(kind, match=match) as caught:
            FSDP(model, auto_wrap_policy=policy if isinstance(bad, dict) else bad)
        raised_everywhere(rank, caught.value)
        before.assert_unchanged(model)


def test_snapshot_sees_changes() -> None:
    """What the tests of failing wraps rely on."""
    model = built()
    Snapshot.of(model).assert_unchanged(model)
    for change in (
        lambda: model.first.weight.data.add_(1),
        lambda: setattr(model.last, "bias", nn.Parameter(model.last.bias.detach().clone())),
        lambda: model.blocks.append(Block()),
        lambda: model.first.requires_grad_(False),
        lambda: model.first.__dict__.update(extra=1),
    ):
        before = Snapshot.of(model)
        change()
        with pytest.raises(AssertionError):
            before.assert_unchanged(model)
