"""What each way to accumulate gradients sends and holds, in bytes, and that all of them add up to the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from compare import assert_models_equal
from fullshard import MixedPrecisionPolicy, fully_shard, replicate
from fullshard.comm import record
from models import Stack, assert_at_rest, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
BF16, F32 = torch.bfloat16, torch.float32
WIDTH, COUNT = 128, 3
NUMEL = WIDTH * WIDTH + WIDTH  # of one layer; every rank's rows of it are a multiple of 64 bytes
PRESENCE = 4  # fp32 numbers beside each rank's rows: one per parameter, padded to 16 bytes


def flat_or_hybrid(rank: Rank) -> list[DeviceMesh]:
    """The flat mesh, and the square one of four ranks."""
    hybrid = [rank.make_mesh(2, 2, names=("replicate", "shard"))] if rank.world_size == 4 else []
    return [rank.mesh, *hybrid]


def layers(mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """Layers of which each is a unit, and a root without parameters."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)))
    return sharded(model, mesh, **settings)


def sharded(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    for child in getattr(model, "blocks", model):
        fully_shard(child, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def microbatch(model: nn.Module, rank: Rank, step: int) -> None:
    model(batch(rank.rank, step, 2, WIDTH)).float().square().mean().backward()


def set_mode(model: nn.Module, mode: str, last: bool) -> None:
    model.set_requires_gradient_sync(last or mode != "no sync")
    model.set_requires_all_reduce(last or mode != "reduce-scatter only")


# -------------------------------------------------------------------- bytes


@on_ranks(4)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(BF16, F32)], ids=["bf16-fp32"])
@pytest.mark.parametrize("mode", ["no sync", "sharded", "reduce-scatter only"])
def test_bytes_of_each_mode(rank: Rank, mode: str, policy: MixedPrecisionPolicy) -> None:
    """K microbatches gather 2 K times in all modes; they reduce once, or K times, and all-reduce once, or K times."""
    microbatches = 4
    for mesh in flat_or_hybrid(rank):
        replicas, shards = (1, mesh.size()) if mesh.ndim == 1 else mesh.shape
        model = layers(mesh, mp_policy=policy, reshard_after_forward=True)
        with record() as seen:
            for step in range(microbatches):
                set_mode(model, mode, step == microbatches - 1)
                microbatch(model, rank, step)
        sent = {
            kind: sum(c.nbytes for c in seen if c.kind == kind)
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
        }
        itemsize = (policy.param_dtype or F32).itemsize
        reduces = 1 if mode == "no sync" else microbatches
        all_reduces = microbatches if mode == "sharded" else 1
        rows = NUMEL // shards + PRESENCE
        assert sent["all_gather"] == COUNT * 2 * microbatches * NUMEL * itemsize * (shards - 1) // shards
        assert sent["reduce_scatter"] == COUNT * reduces * 4 * rows * (shards - 1)
        assert sent["all_reduce"] == COUNT * all_reduces * 2 * 4 * rows * (replicas - 1) // replicas


@on_ranks(1, 4)
@pytest.mark.parametrize("mode", ["no sync", "sharded", "reduce-scatter only"])
def test_bytes_held_between_microbatches(rank: Rank, mode: str) -> None:
    """No sync holds full gradients in the reduce dtype; the others this rank's rows, in it or in the shards'."""
    for mesh in flat_or_hybrid(rank):
        replicas, shards = (1, mesh.size()) if mesh.ndim == 1 else mesh.shape
        model = layers(mesh, mp_policy=MixedPrecisionPolicy(BF16, F32))
        for step in range(3):
            set_mode(model, mode, False)
            microbatch(model, rank, step)
            pending = model.get_pending_gradients().values()
            unreduced = sum(entry.unreduced.nbytes for entry in pending if entry.unreduced is not None)
            partial = sum(entry.partial.nbytes for entry in pending if entry.partial is not None)
            landed = sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None)
            rows = COUNT * NUMEL * 4 // shards
            if mode == "no sync":
                assert (unreduced, partial, landed) == (COUNT * NUMEL * 4, 0, 0)
            elif mode == "reduce-scatter only" and replicas > 1:
                assert (unreduced, partial, landed) == (0, rows, 0)
            else:
                assert (unreduced, partial, landed) == (0, 0, rows)
            assert_at_rest(model) if rank.world_size > 1 else None


# -------------------------------------------------------------------- no copies


class Operators(TorchDispatchMode):
    """Names of the operators that run inside, with the elements of their first tensor argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        numel = max((leaf.numel() for leaf in flat if isinstance(leaf, torch.Tensor)), default=0)
        self.seen.append((func.overloadpacket.__name__, numel))
        return func(*args, **(kwargs or {}))


COPIES = {"cat", "stack", "copy_", "_foreach_copy_", "clone", "_to_copy", "contiguous", "empty_strided", "zeros"}


@on_ranks(2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, F32)], ids=["fp32", "bf16-fp32"])
def test_nothing_is_copied_or_sent_without_sync(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """From the second microbatch on gradients are added where autograd left them: no collective, copy or new memory."""
    model = layers(rank.mesh, mp_policy=policy, reshard_after_forward=False)
    model.set_reshard_after_backward(False)  # so that nothing is gathered either
    model.set_requires_gradient_sync(False)
    microbatch(model, rank, 0)
    before = {p: entry.unreduced for p, entry in model.get_pending_gradients().items()}
    pointers = {p: (gradient.data_ptr(), gradient._version) for p, gradient in before.items()}
    for step in (1, 2):
        loss = model(batch(rank.rank, step, 2, WIDTH)).float().square().mean()
        with record() as seen, Operators() as operators:
            loss.backward()
        assert not seen
        weights = [name for name, numel in operators.seen if numel >= WIDTH * WIDTH]
        # The one copy that remains is autograd's: a bf16 weight gradient on its way into fp32.
        casts = COUNT if policy.reduce_dtype else 0
        assert sum(name in COPIES for name in weights) == casts, weights
        assert weights.count("_to_copy") == casts and weights.count("add_") == COUNT
    after = {p: entry.unreduced for p, entry in model.get_pending_gradients().items()}
    assert len(after) == 2 * COUNT
    for parameter, gradient in after.items():
        assert gradient is before[parameter] and gradient.dtype is F32
        assert gradient.data_ptr() == pointers[parameter][0]
        assert gradient._version == pointers[parameter][1] + 2  # one addition in place per microbatch


# -------------------------------------------------------------------- parity


@on_ranks(4)
@each_value(
    mode=["no sync", "sharded", "reduce-scatter only"],
    checkpointed=[None, "inside", "around", "reentrant inside", "reentrant around"],
    frozen=[False, True],
)
def test_modes_beside_frozen_parts_and_recomputation(
    rank: Rank, mode: str, checkpointed: str | None, frozen: bool
) -> None:
    """Microbatches add up in every mode; frozen parameters, a frozen unit among them, get no gradient and no bytes."""
    torch.manual_seed(1)
    model = Stack(3)
    for part in (model.blocks[1], model.blocks[0].up) if frozen else ():
        part.requires_grad_(False)
    reference = copy.deepcopy(model)
    sharded(model, flat_or_hybrid(rank)[-1])
    for module in () if checkpointed is None else [model] if "around" in checkpointed else model.blocks:
        module.checkpointed = "reentrant" in checkpointed
    with record() as seen:
        for step in range(3):
            set_mode(model, mode, step == 2)
            square_loss(step)(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, square_loss(step))
    assert ("blocks.1" in {c.unit for c in seen if c.kind != "all_gather"}) != frozen
    assert_models_equal(model, reference, grads=True, **CLOSE)


class Branches(nn.Module):
    """The second branch takes part in a forward only if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.both = nn.Linear(6, 6), nn.Linear(6, 6), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        return self.branch(x) if self.both else x


@on_ranks(4)
@pytest.mark.parametrize("kind", ["hybrid", "replicate"])
def test_unit_that_the_last_microbatch_does_not_touch(rank: Rank, kind: str) -> None:
    """What a unit owes the replicate axis is paid at the last backward, also while its reduction is under way."""
    torch.manual_seed(6)
    model = Branches()
    reference = copy.deepcopy(model)
    apply: Any = fully_shard if kind == "hybrid" else replicate
    for module in (model.trunk, model.branch, model):
        apply(module, mesh=flat_or_hybrid(rank)[-1] if kind == "hybrid" else rank.mesh)
    for step, last in ((0, False), (1, True)):
        model.both = reference.both = not last
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, 4, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
