"""``shard(model)``: one call shards a model by its structure, prints what it did, and trains as unsharded."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_models_equal
from front_ends import assert_trains_alike, build, token_loss
from fullshard import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    shard,
)
from fullshard.activation_checkpoint import CheckpointWrapper, checkpoint_wrapper
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.wrap import ModuleWrapPolicy, plan_blocks
from models import Block, Frozen, Language, LossOf, Stack, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks


def untied() -> Language:
    """With a head of its own."""
    model = Language(vocabulary=40)
    model.head.weight = nn.Parameter(torch.randn(40, 6))
    return model


def seq2seq_loss(step: int) -> LossOf:
    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        source, target = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        return model(source, target).square().mean()

    return loss_of


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], LossOf]]] = {
    "frozen": (Frozen, square_loss),
    "untied": (untied, token_loss),
    "tied": (Language, token_loss),
    "seq2seq": (lambda: nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True), seq2seq_loss),
}


@on_ranks(2)
@each_value(case=CASES, checkpoint=[True, "function", True, False], reshard=[None, False, True])
def test_models_train_as_unsharded(rank: Rank, case: str, checkpoint: Any, reshard: Any) -> None:
    """With and without recomputation, tied and frozen weights, one list of blocks or two; a plan is made beforehand."""
    make, loss_at = CASES[case]
    model = build(make)
    reference = copy.deepcopy(model)
    plan = plan_blocks(model)
    if checkpoint == "function":
        names = {type(module).__name__ for module in plan.modules if not isinstance(module, tuple)} - {"Embedding"}
        checkpoint = lambda module: type(module).__name__ in names  # noqa: E731
    assert shard(model, mesh=rank.mesh, checkpoint_activations=checkpoint, reshard_after_forward=reshard) is model
    assert isinstance(model, FSDPModule)
    assert_trains_alike(model, reference, rank, loss_at)
    held = {unit.name: sorted(p.fqns[0] for p in unit.parameters) for unit in nested_units(model)}
    assert sorted(held.values()) == sorted(sorted(names[0] for names in each) for each in plan.owners().values())
    wrapped = [isinstance(block, CheckpointWrapper) for block in (*getattr(model, "blocks", ()),)]
    assert wrapped == [bool(checkpoint)] * len(wrapped)


EXPECTED = """\
shard: Language over 2 ranks
unit         class               elements  unsharded  of rank 0  notes
embedding    Embedding                240      480 B      480 B
blocks.0     Block                    162      324 B      324 B
blocks.1     Block                    162      324 B      324 B
norm + head  LayerNorm + Linear       252      504 B      504 B
(root)       Language                   0        0 B        0 B  holds no parameters
total                                 816    1.6 KiB    1.6 KiB  5 units, the largest 504 B
repeated blocks: 2 Block in blocks (40% of the elements)
precision: compute in bfloat16, gradients reduced in float32, outputs in float32
offloading: parameters, gradients and optimizer state in CPU memory
activation checkpointing: 2 modules, blocks.0 blocks.1
"""


@on_ranks(2)
def test_options_and_report(rank: Rank) -> None:
    """Rank 0 prints what the units are and how they compute; the policy's output dtype is that of the model only."""
    model = build(untied)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    blocks = list(model.blocks)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        shard(
            model,
            mesh=rank.mesh,
            mixed_precision=bf16,
            checkpoint_activations=True,
            offload=CPUOffloadPolicy(pin_memory=False),
        )
    assert out.getvalue() == (EXPECTED if rank.rank == 0 else "")
    seen: list[torch.dtype] = []
    blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with record() as collectives:
        loss = token_loss()(model, rank.rank)
    assert seen == [torch.bfloat16] and model(torch.zeros(1, 2, dtype=torch.long)).dtype is torch.float32
    assert [c.unit for c in collectives if c.kind == "all_gather"] == ["embedding", "blocks.0", "blocks.1", "norm"]
    loss.backward()
    with (
        contextlib.redirect_stdout(out),
        pytest.raises(ValueError, match="this Language is already sharded; call shard"),
    ):
        shard(model, mesh=rank.mesh)
    other = build(Stack)
    with contextlib.redirect_stdout(out):
        shard(other, mesh=rank.mesh, mixed_precision="bf16", offload=False, report=False)
    unit = unit_of(other)
    assert unit is not None and unit.policy.precision == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert out.getvalue() == (EXPECTED if rank.rank == 0 else "")
    with contextlib.redirect_stdout(out):
        shard(build(Stack), mesh=rank.mesh, offload=CPUOffloadPolicy(pin_memory=False, fraction=0.5))
    assert ("offloading: at most 50% of parameters, gradients" in out.getvalue()) == (rank.rank == 0)


@on_ranks(2)
def test_plans_and_parts_that_are_done(rank: Rank) -> None:
    """A changed plan, or a policy, says what the units are; sharded and checkpointed blocks stay as they are."""
    model = build(untied)
    units = plan_blocks(model).modules
    del units[model.embedding]
    units[model.blocks[0]] = {"reshard_after_forward": False}
    shard(model, mesh=rank.mesh, plan=units)
    assert unit_of(model.embedding) is None and unit_of(model.norm) is unit_of(model.head)
    first = unit_of(model.blocks[0])
    assert first is not None and first.settings.reshard_after_forward is False

    model = build(Stack)
    reference = copy.deepcopy(model)
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    fully_shard(model.blocks[0].up, mesh=rank.mesh)
    shard(model, mesh=rank.mesh, plan=ModuleWrapPolicy({Block}), checkpoint_activations=True)
    assert all(isinstance(block, CheckpointWrapper) for block in model.blocks) and unit_of(model.blocks[0]) is not None
    assert not any(isinstance(block._checkpoint_wrapped_module, CheckpointWrapper) for block in model.blocks)
    assert_trains_alike(model, reference, rank)

    with torch.device("meta"):
        meta = Stack()
    shard(meta, mesh=rank.mesh)
    meta.to_empty(device=rank.device)
    meta.load_state_dict({name: p.detach() for name, p in meta.named_parameters()})
    square_loss()(meta, rank.rank).backward()


@on_ranks(2)
def test_wrong_arguments_change_nothing(rank: Rank) -> None:
    """Wrong values are refused before anything is wrapped or sharded."""
    model, plain, other = build(Stack), build(Stack), build(untied)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "mixed_precision: expected one of", {"mixed_precision": "bfloat16"}),
        (
            TypeError,
            "mixed_precision: expected str or MixedPrecisionPolicy or None, found dtype",
            {"mixed_precision": torch.half},
        ),
        (TypeError, "offload: expected bool or OffloadPolicy, found int", {"offload": 1}),
        (TypeError, "expected True, False, a share or a function", {"checkpoint_activations": "blocks"}),
        (TypeError, "found the class Linear", {"checkpoint_activations": nn.Linear}),
        (ValueError, "returned True for no module", {"checkpoint_activations": lambda module: False}),
        (ValueError, "reshard_after_forward: expected a divisor of the 2 ranks", {"reshard_after_forward": 3}),
        (ValueError, "report: expected True or False", {"report": "rank 0"}),
        (
            ValueError,
            "expected a plan of this Stack",
            {"plan": plan_blocks(build(Stack)), "checkpoint_activations": True},
        ),
        (TypeError, "expected a Policy", {"plan": "blocks", "checkpoint_activations": True}),
        (ValueError, "unknown arguments", {"plan": {model.first: {"reshard": True}}, "checkpoint_activations": True}),
    ]
    for error, message, arguments in wrong:
        with pytest.raises(error, match=message):
            shard(model, mesh=rank.mesh, **arguments)
    with pytest.raises(TypeError, match="shard: expected Module, found list"):
        shard([model], mesh=rank.mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no repeated blocks found in this Linear"):
        shard(nn.Linear(4, 4), mesh=rank.mesh, checkpoint_activations=True)
    with pytest.raises(ValueError, match=r"units of one module each, found 'norm \+ head'"):
        FullyShardedDataParallel(other, device_mesh=rank.mesh, auto_wrap_policy=plan_blocks(other))
    assert not nested_units(model) and [type(b) for b in model.blocks] == [Block] * 3
    assert_models_equal(model, plain)
