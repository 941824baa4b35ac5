"""A training step in the steady state: the host waits for nothing, and no stream or event is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accelerator.races import Access, Counts, capture, count, replay
from compare import assert_equal
from front_ends import COMPOSABLE, ORIGINAL, build
from fullshard import CPUOffloadPolicy, OffloadPolicy, fully_shard
from models import Stack
from pairwise import each_value
from ranks import Rank, on_ranks

WARM_UP = 4  # the first steps make buffers and plans
DIM = 24


def _composable(rank: Rank, *, recompute: bool = False, **options: Any) -> nn.Module:
    model = build(Stack, 3, DIM)
    model.checkpointed = False if recompute else None
    return COMPOSABLE.wrap(model, rank, **options)


def _prefetching(rank: Rank) -> nn.Module:
    model = _composable(rank)
    model.set_prefetch_bytes(1 << 20)
    return model


def _wrapped(rank: Rank, **options: Any) -> nn.Module:
    return ORIGINAL.wrap(build(Stack, 3, DIM), rank, **options)


BF16 = torch.bfloat16
MODELS: dict[str, Callable[[Rank], nn.Module]] = {
    "default": _composable,
    "stays unsharded": lambda rank: _composable(rank, reshard_after_forward=False),
    "bf16": lambda rank: _composable(rank, **COMPOSABLE.precision(BF16, torch.float32)),
    "replicas": lambda rank: _composable(rank, strategy="HYBRID_SHARD"),
    "recomputed": lambda rank: _composable(rank, recompute=True),
    "prefetch bytes": _prefetching,
    "wrapper": _wrapped,
    "wrapper, SHARD_GRAD_OP": lambda rank: _wrapped(rank, strategy="SHARD_GRAD_OP"),
    "wrapper, NO_SHARD": lambda rank: _wrapped(rank, strategy="NO_SHARD"),
    "wrapper, bf16": lambda rank: _wrapped(rank, **ORIGINAL.precision(BF16, BF16)),
    "offloaded": lambda rank: _composable(rank, offload_policy=CPUOffloadPolicy()),
}


def _ours(accesses: list[Access]) -> list[Access]:
    # c10d's futures make events of their own; ours are all made in one file.
    return [access for access in accesses if "/fullshard/memory.py" in access.stack.splitlines()[0]]


def _steps(rank: Rank, kind: str) -> Counts:
    model = MODELS[kind](rank)
    foreach = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    x = torch.randn(4, DIM)

    def step() -> None:
        for micro in range(2):
            if hasattr(model, "set_is_last_backward"):
                model.set_requires_gradient_sync(micro == 1)
            model(x).square().mean().backward()
        foreach.step()
        foreach.zero_grad()

    for _ in range(WARM_UP):
        step()
    torch.accelerator.synchronize()
    with count() as counts:
        step()
        step()
    return counts


def _assert_nothing_waits(counts: Counts, *, may_wait: bool = False) -> None:
    found = [*(() if may_wait else counts.host_syncs), *_ours(counts.events_made), *counts.streams_made]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("offloaded", "replicas")])
@on_ranks(2, device_type="emulated")
def test_the_host_waits_for_nothing(rank: Rank, kind: str) -> None:
    """No host synchronization, no new event and no new stream in a step."""
    _assert_nothing_waits(_steps(rank, kind))


@on_ranks(4, device_type="emulated")
def test_the_host_waits_for_no_replica(rank: Rank) -> None:
    """The same where sums over shards are reduced over replicas as well."""
    _assert_nothing_waits(_steps(rank, "replicas"))


@on_ranks(2, device_type="emulated")
def test_missing_gradients_are_asked_for_once(rank: Rank) -> None:
    """A parameter without a gradient on this rank: the host waits once, at the end of backward, to hear of others'."""
    model = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])
    model.forward = lambda x: model[0](x) + (model[1](x) if rank.rank else 0.0)
    fully_shard(model, mesh=rank.mesh)
    x = torch.randn(4, DIM)
    for _ in range(WARM_UP):
        model(x).square().mean().backward()
    torch.accelerator.synchronize()
    with count() as counts:
        model(x).square().mean().backward()
    assert len(counts.host_syncs) == (0 if rank.rank else 1), "\n".join(map(str, counts.host_syncs))
    for each in counts.host_syncs:
        assert "in accumulate_read_by_host" in each.stack, str(each)


@on_ranks(2, device_type="emulated")
def test_with_offload_the_host_waits_at_the_end_of_backward(rank: Rank) -> None:
    """Where gradients land in host memory, that is what is waited for, once per unit's reduction and backward."""
    counts = _steps(rank, "offloaded")
    assert counts.host_syncs
    for each in counts.host_syncs:
        assert "in accumulate_read_by_host" in each.stack, str(each)
    _assert_nothing_waits(counts, may_wait=True)


@contextlib.contextmanager
def _side_stream(rank: Rank) -> Iterator[None]:
    """A stream of its own, as captures need one, which the current one waits for in the end."""
    stream, current = torch.Stream(rank.device), torch.accelerator.current_stream()
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


@on_ranks(2, device_type="emulated")
@pytest.mark.parametrize("what", ["step", "step, kept", "offloaded inference", "inference of a pinned input"])
def test_what_can_be_captured(rank: Rank, what: str) -> None:
    """Forward and backward do nothing that a graph's capture forbids, nor does inference.

    Offloaded units are unsharded in a graph, and pinned inputs copied; afterwards the host can wait for shards.
    """
    trains = what.startswith("step")
    options = {} if trains else {"offload_policy": CPUOffloadPolicy() if "offloaded" in what else OffloadPolicy()}
    model = _composable(rank, reshard_after_forward=False if "kept" in what else None, **options)
    x = torch.randn(4, DIM, device="cpu", pin_memory=True) if "pinned" in what else torch.randn(4, DIM)

    def run() -> None:
        output = model(x)
        if trains:
            output.square().mean().backward()

    with _side_stream(rank), torch.set_grad_enabled(trains):
        for _ in range(WARM_UP):
            run()
            model.zero_grad()
        torch.accelerator.synchronize()
        with capture() as errors:
            run()
    assert not errors, "\n".join(map(str, errors))
    torch.accelerator.synchronize()
    assert len(list(model.parameters())) == len(model.state_dict())


@on_ranks(2, device_type="emulated")
@each_value(reshard=[False, True], how=["reduced by each", "reduced by the last", "finalized"])
def test_a_captured_step_is_replayed(rank: Rank, reshard: bool, how: str) -> None:
    """Replays of forward and backward of four microbatches give the bits of eager steps, at the same addresses."""
    eager, captured = (_composable(rank, reshard_after_forward=reshard) for _ in range(2))
    captured.load_state_dict(eager.state_dict())
    batches = torch.randn(WARM_UP + 4, 4, 4, DIM) + rank.rank
    inputs = torch.empty(4, 4, DIM)
    captured.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (eager, captured)]

    def accumulate(model: nn.Module, microbatches: torch.Tensor) -> None:
        for number, microbatch in enumerate(microbatches):
            model.set_requires_gradient_sync(how == "reduced by each" or (how != "finalized" and number == 3))
            model(microbatch).square().mean().backward()
        if how == "finalized":
            model.set_requires_gradient_sync(True)
            model.finalize_backward()

    for model in (eager, captured):
        model.set_manual_backward_finalization(how == "finalized")
    with _side_stream(rank):
        for step, batch in enumerate(batches):
            accumulate(eager, batch)
            inputs.copy_(batch)
            if step < WARM_UP:
                accumulate(captured, inputs)
            elif step == WARM_UP:
                torch.accelerator.synchronize()
                with capture() as errors:
                    accumulate(captured, inputs)
                assert not errors, "\n".join(map(str, errors))
                places = [parameter.grad.to_local().data_ptr() for parameter in captured.parameters()]
            else:
                replay()
                assert places == [parameter.grad.to_local().data_ptr() for parameter in captured.parameters()]
            for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
                assert_equal(mine.grad.to_local(), theirs.grad.to_local(), f"gradient of step {step}")
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].zero_grad()
            if step < WARM_UP:
                optimizers[1].zero_grad()  # a graph writes gradients where they were
    for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
        assert_equal(mine.to_local(), theirs.to_local(), "parameter")
