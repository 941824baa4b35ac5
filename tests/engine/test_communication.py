"""What users may change about communication: hooks, divisors, and how much is in flight."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.placement_types import Shard
from torch.testing import assert_close as torch_assert_close
from user_collectives import CLOSE, ODD_DIM, Gather, Scatter, build, check_training, loss_of, shard, units

from compare import assert_equal, assert_models_equal
from fullshard import FSDPMeshInfo, MixedPrecisionPolicy, ShardPlacementResult, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import Branch, batch, lane_log, reference_backward, tiny_units
from ranks import Rank, on_ranks

# ---------------------------------------------------------------- the all-reduce hook


@on_ranks(4)
def test_hook_that_replicates_by_hand(rank: Rank) -> None:
    """Sharding over one axis with a hook that averages over the other equals HSDP, bitwise."""
    mesh = rank.make_mesh(2, 2, names=("r", "s"))
    native, by_hand = shard(build(), mesh), shard(build(), mesh["s"])
    group, called = mesh["r"].get_group(), []

    def average(rows: torch.Tensor) -> None:
        called.append(rows.numel())
        dist.all_reduce(rows, group=group)
        rows.mul_(0.5)

    for unit in units(by_hand):
        unit.set_all_reduce_hook(average)
    for step in range(2):
        for model in (native, by_hand):
            loss_of(6, step)(model, rank.rank).backward()
    assert len(called) == 2 * 4
    for (fqn, ours), theirs in zip(by_hand.named_parameters(), native.parameters(), strict=True):
        assert_equal(ours.grad.full_tensor(), theirs.grad.full_tensor(), fqn)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)], ids=str)
def test_hook_sees_the_mean_and_its_changes_count(rank: Rank, shape: tuple[int, ...]) -> None:
    """Whatever the mesh: once per unit and backward, flat, after all reductions; what it writes becomes ``.grad``."""
    mesh = rank.mesh if len(shape) == 1 else rank.make_mesh(*shape, names=("r", "s"))
    reference = build()
    model = shard(copy.deepcopy(reference), mesh)
    seen: list[torch.Tensor] = []

    def triple(rows: torch.Tensor) -> None:
        assert rows.ndim == 1 and rows.dtype is torch.float32 and not torch.is_grad_enabled()
        seen.append(rows.clone())
        rows.mul_(3)

    for unit in units(model):
        unit.set_all_reduce_hook(triple)
    loss_of()(model, rank.rank).backward()
    reference_backward(reference, 4, loss_of())
    for parameter in reference.parameters():
        parameter.grad.mul_(3)
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert len(seen) == 4


@on_ranks(2, 4)
def test_hook_sees_no_garbage(rank: Rank) -> None:
    """Padding is zeros: a hook may ask whether all it sees is finite, or take its norm."""
    polluted = [torch.full((n,), torch.nan) for n in range(1, 600)]  # what fresh memory will contain
    model = shard(build(ODD_DIM), rank.mesh)
    seen: list[torch.Tensor] = []
    for unit in units(model):
        unit.set_all_reduce_hook(lambda rows: seen.append(rows.clone()))
    polluted.clear()
    loss_of(ODD_DIM)(model, rank.rank).backward()
    largest = max(float(p.grad.full_tensor().abs().max()) for p in model.parameters())
    for rows in seen:
        assert float(rows.abs().max()) <= max(1.0, largest), "more than gradients and presence numbers"


@on_ranks(4)
def test_hook_waits_for_the_all_reduce(rank: Rank) -> None:
    """On a 2-D mesh a backward without all-reduce does not call it; in a reduce dtype it sees that dtype."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    reference = build()
    model = shard(copy.deepcopy(reference), rank.make_mesh(2, 2, names=("r", "s")), mp_policy=policy)
    dtypes: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda rows: dtypes.append(rows.dtype))
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        loss_of(6, step)(model, rank.rank).backward()
        reference_backward(reference, 4, loss_of(6, step))
    assert dtypes == [torch.float64]
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_hook_that_skips_a_step(rank: Rank) -> None:
    """A hook that zeroes everything leaves gradients of zeros on every rank, also of what some ranks did not use."""
    model = fully_shard(Branch(), mesh=rank.mesh)
    model.rank = rank.rank
    model.set_all_reduce_hook(lambda rows: rows.zero_())
    model(batch(rank.rank, 0, 4, 6)).sum().backward()
    for name in ("even.weight", "odd.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None and not gradient.to_local().any(), name
    assert model.never.weight.grad is None


# ---------------------------------------------------------------- division


@on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("factor", [1, 2.5, 4.0])
@pytest.mark.parametrize("force", [False, True])
def test_gradient_divide_factor(rank: Rank, shape: tuple[int, ...], factor: float, force: bool) -> None:
    """The sum over all ranks is divided by the factor, whatever the mesh, averaging back end or not."""
    mesh = rank.mesh if len(shape) == 1 else rank.make_mesh(*shape, names=("r", "s"))
    reference = build()
    model = shard(copy.deepcopy(reference), mesh)
    for unit in units(model):
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(force)
    loss_of()(model, rank.rank).backward()
    reference_backward(reference, 4, loss_of())
    for parameter in reference.parameters():
        parameter.grad *= 4 / factor
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2, 4)
def test_factor_of_the_root_alone(rank: Rank) -> None:
    """It counts for the unit that it was set on; the others keep their means. Also on a single rank."""
    reference = build()
    model = shard(copy.deepcopy(reference), rank.make_mesh(1, rank.world_size, names=("r", "s")))
    model.set_gradient_divide_factor(8)
    loss_of()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of())
    for fqn, parameter in reference.named_parameters():
        if not fqn.startswith("blocks"):
            parameter.grad *= rank.world_size / 8
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("factor", [None, 3.0, 64.0])
def test_factor_in_half_precision(rank: Rank, factor: float | None) -> None:
    """fp16 sums beyond its range come out right: they are divided before and after."""
    model = fully_shard(nn.Linear(1, 4, bias=False).half(), mesh=rank.mesh)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    # Gloo's sums are rounded once they are divided; the halves that NCCL adds up have to fit as well.
    value = 60000.0 if factor != 3.0 and rank.device.type == "cpu" else 30000.0
    (model(torch.ones(1, 1, dtype=torch.float16)) * value).sum().backward()
    expected = value * rank.world_size / (rank.world_size if factor is None else factor)
    torch_assert_close(model.weight.grad.full_tensor().float(), torch.full((4, 1), expected), rtol=2e-3, atol=0)


@on_ranks(2)
def test_older_name_of_the_factor(rank: Rank) -> None:
    """``set_reduce_scatter_divide_factor`` does the same."""
    model = fully_shard(nn.Linear(1, 1, bias=False), mesh=rank.mesh)
    model.set_reduce_scatter_divide_factor(8.0)
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.full_tensor().item() == 2 / 8


# ---------------------------------------------------------------- what is reduced when


@on_ranks(2, 4)
def test_zeros_for_parameters_without_gradients(rank: Rank) -> None:
    """``set_reduce_scatter_unused_params``: zeros instead of None for what no rank used, until it is switched off."""
    reference = Branch()
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)

    def loss(module: nn.Module, number: int) -> torch.Tensor:
        module.rank = number
        return module(batch(number, 0, 4, 6)).square().mean()

    for enable in (True, False):
        model.zero_grad()
        reference.zero_grad()
        model.set_reduce_scatter_unused_params(enable)
        loss(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss)
        for parameter in reference.never.parameters() if enable else ():
            parameter.grad = torch.zeros_like(parameter)
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_reductions_in_flight(rank: Rank, limit: int, expected: int) -> None:
    """At most as many reductions as allowed are in flight, oldest waited for first; gradients are the same."""
    with tiny_units():
        reference = build()
        model = shard(copy.deepcopy(reference), rank.mesh)
        model.blocks[1].set_reduce_scatter_max_input_buffers(limit)  # the largest value counts
        with lane_log() as log:
            check_training(model, reference, rank, steps=1)
    reductions = [(what, unit) for what, kind, unit in log if kind == "reduce_scatter"]
    in_flight, most = 0, 0
    for what, _ in reductions:
        in_flight += 1 if what == "issue" else -1
        most = max(most, in_flight)
    assert most == expected, log
    for kind in ("issue", "wait"):
        assert [unit for what, unit in reductions if what == kind] == ["blocks.2", "blocks.1", "blocks.0", ""]


@on_ranks(2)
def test_limit_of_some_units(rank: Rank) -> None:
    """With ``recurse=False`` the setting is that unit's; lowering it again counts."""
    model = shard(build(), rank.mesh)
    model.set_reduce_scatter_max_input_buffers(3, recurse=False)
    assert [unit.settings.reduction.max_in_flight for unit in nested_units(model)] == [3, 1, 1, 1]
    model.set_reduce_scatter_max_input_buffers(2)
    assert [unit.settings.reduction.max_in_flight for unit in nested_units(model)] == [2] * 4


@on_ranks(2, 4)
def test_same_bits_whatever_is_in_flight(rank: Rank) -> None:
    """The limit, and a separate group, change no value and no message."""
    results, messages = [], []
    for limit, separate in ((1, False), (2, True), (5, True)):
        model = shard(build(), rank.mesh)
        model.set_reduce_scatter_max_input_buffers(limit)
        model.set_separate_reduce_scatter_group(separate)
        with record() as seen:
            for step in range(2):
                loss_of(6, step)(model, rank.rank).backward()
        results.append({fqn: p.grad.to_local() for fqn, p in model.named_parameters()})
        messages.append([(c.kind, c.unit, c.nbytes) for c in seen])
    assert_equal(results[1:], results[:1] * 2, "gradients")
    assert messages[0] == messages[1] == messages[2]


@on_ranks(2)
def test_memory_of_the_process_group(rank: Rank) -> None:
    """Gloo has no memory of its own to offer: ordinary memory is used, and values are the same; it can be undone."""
    reference = build()
    model = shard(copy.deepcopy(reference), rank.mesh)
    for enable in (True, True, False):
        for unit in units(model):
            unit.set_allocate_memory_from_process_group_for_comm(enable)
        check_training(model, reference, rank, steps=1)


class CountedEvent:
    """What an event has to have; counts how often it was waited for."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@on_ranks(1, 2)
def test_post_optim_event(rank: Rank) -> None:
    """The next forward's first gather waits for the event, once; the forward after it does not."""
    reference = build()
    model = shard(copy.deepcopy(reference), rank.mesh, reshard_after_forward=True)
    check_training(model, reference, rank, steps=1)
    event: Any = CountedEvent()
    if rank.device.type != "cpu":
        event = torch.Event(rank.device)
        event.record()
    model.set_post_optim_event(event)
    with torch.no_grad():
        for _ in range(3):
            loss_of()(model, rank.rank)
    if rank.device.type == "cpu":  # elsewhere a gather that does not wait is a race
        assert event.waits <= 2 and event.waits >= (rank.world_size > 1)
    check_training(model, reference, rank, steps=1)


# ---------------------------------------------------------------- refusals


class Case(NamedTuple):
    """A call that has to be refused, and the words of the refusal."""

    call: Callable[[Rank, Any], Any]  # of the rank and a sharded model
    error: type[Exception]
    words: str


def on_several_meshes(rank: Rank) -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    own = FSDPMeshInfo(rank.make_mesh(1, rank.world_size, names=("x", "y")), 0)
    return fully_shard(
        model,
        mesh=rank.mesh,
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), own) if p.ndim == 1 else None,
    )


def with_gather(model: Any) -> Any:
    model.set_custom_all_gather(Gather())
    return model


CASES: dict[str, Case] = {
    "gather: function": Case(
        lambda r, m: m.set_custom_all_gather(lambda *_: None),
        TypeError,
        "set_custom_all_gather: expected an object with __call__ and allocate, found function",
    ),
    "gather: number": Case(lambda r, m: m.set_custom_all_gather(1), TypeError, "set_custom_all_gather: .*found int"),
    "scatter: string": Case(
        lambda r, m: m.set_custom_reduce_scatter("nccl"), TypeError, "set_custom_reduce_scatter: .*found str"
    ),
    "gather: several meshes": Case(
        lambda r, m: on_several_meshes(r).set_custom_all_gather(Gather()),
        ValueError,
        "set_custom_all_gather: expected a unit on one mesh",
    ),
    "scatter: several meshes": Case(
        lambda r, m: on_several_meshes(r).set_custom_reduce_scatter(Scatter()),
        ValueError,
        "set_custom_reduce_scatter: expected a unit on one mesh",
    ),
    "hook: several meshes": Case(
        lambda r, m: on_several_meshes(r).set_all_reduce_hook(print),
        ValueError,
        "set_all_reduce_hook: expected a unit on one mesh",
    ),
    "hook: number": Case(
        lambda r, m: m.set_all_reduce_hook(3), TypeError, "set_all_reduce_hook: expected a function, found int"
    ),
    "hook: stream on a 2-D mesh": Case(
        lambda r, m: shard(build(), r.make_mesh(r.world_size, 1, names=("r", "s"))).set_all_reduce_hook(
            print, stream=object()
        ),
        ValueError,
        "set_all_reduce_hook: expected no stream on a mesh with a replicate axis",
    ),
    **{
        f"factor: {value!r}": Case(
            lambda r, m, value=value: m.set_gradient_divide_factor(value),
            ValueError,
            "set_gradient_divide_factor: expected a positive number, found",
        )
        for value in (0, -1.0, float("nan"), True, "2", None)
    },
    "force_sum": Case(
        lambda r, m: m.set_force_sum_reduction_for_comms(1),
        ValueError,
        "set_force_sum_reduction_for_comms: expected True or False, found 1",
    ),
    "unused": Case(
        lambda r, m: m.set_reduce_scatter_unused_params(None),
        ValueError,
        "reduce_scatter_unused_params: expected True or False, found None",
    ),
    "in flight: 0": Case(
        lambda r, m: m.set_reduce_scatter_max_input_buffers(0), ValueError, "expected at least 1, found 0"
    ),
    "in flight: bool": Case(
        lambda r, m: m.set_reduce_scatter_max_input_buffers(True), TypeError, "expected an int, found True"
    ),
    "in flight: float": Case(
        lambda r, m: m.set_reduce_scatter_max_input_buffers(2.0), TypeError, "expected an int, found 2.0"
    ),
    "separate group": Case(
        lambda r, m: m.set_separate_reduce_scatter_group("yes"),
        ValueError,
        "set_separate_reduce_scatter_group: expected True or False, found 'yes'",
    ),
    "process group memory: number": Case(
        lambda r, m: m.set_allocate_memory_from_process_group_for_comm(1),
        ValueError,
        "set_allocate_memory_from_process_group_for_comm: expected True or False, found 1",
    ),
    "process group memory after custom": Case(
        lambda r, m: with_gather(m).set_allocate_memory_from_process_group_for_comm(True),
        ValueError,
        "set_allocate_memory_from_process_group_for_comm: unit .* has a custom collective",
    ),
    "symmetric memory after custom": Case(
        lambda r, m: with_gather(m).set_symm_mem_for_comm(),
        ValueError,
        "set_symm_mem_for_comm: unit .* has a custom collective",
    ),
    "symmetric memory on gloo": Case(
        lambda r, m: m.set_symm_mem_for_comm(), ValueError, "symmetric memory needs a CUDA device and .* NCCL"
    ),
    "symmetric memory: other": Case(
        lambda r, m: m.set_symm_mem_for_comm("NVSHMEM"), ValueError, "must be \"NCCL\", got 'NVSHMEM'"
    ),
    "event: None": Case(
        lambda r, m: m.set_post_optim_event(None),
        TypeError,
        "set_post_optim_event: expected a torch.Event, found NoneType",
    ),
    "event: number": Case(
        lambda r, m: m.set_post_optim_event(1.0), TypeError, "set_post_optim_event: expected a torch.Event, found float"
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_wrong_argument_is_refused(rank: Rank, name: str) -> None:
    """Every rank raises, saying what was expected and found, and the model trains on."""
    reference = build(depth=1)
    model = shard(copy.deepcopy(reference), rank.mesh)
    with pytest.raises(CASES[name].error) as raised:
        CASES[name].call(rank, model)
    assert re.search(CASES[name].words, str(raised.value), re.DOTALL), str(raised.value)
    check_training(model, reference, rank, steps=1)
