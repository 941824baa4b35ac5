"""What the golden traces are recorded of: one entry per trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import golden_models as models
import golden_steps as steps
import torch
from golden_models import Loss, Shard, by_parts, replicated, wrapped
from golden_steps import Run
from torch import nn

from fullshard import BackwardPrefetch as Prefetch
from fullshard import (
    CommQuantization,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from fullshard.comm_hooks import DefaultState, reduce_scatter_hook
from models import Branch, Language, Mlp, Stack

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.float16)
WRAPPER_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_low_precision_grads=True)
INT8 = CommQuantization(all_gather="int8", reduce="int8", block=16, min_bytes=100)
INT8_REPLICAS = CommQuantization(reduce="int8", block=16, min_bytes=100)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
BY_PARTS = by_parts()
TINY = 64 * 1024  # what is smaller than this travels with a neighbor: all units of these models


def nothing(run: Run) -> None:
    """Settings stay as they are."""


@dataclass(frozen=True)
class Configuration:
    """Three steps of training.

    Args:
        name: Of the file with its trace.
        shard: The front end, and what becomes a unit.
        world: Number of ranks.
        model: Makes the model.
        loss: Of one forward.
        step: What is done in a step.
        prepare: Settings of the sharded model, or its optimizer.
        tiny: Units up to this size in bytes travel with a neighbor.
    """

    name: str
    shard: Shard = BY_PARTS
    world: int = 2
    model: Callable[[], nn.Module] = Stack
    loss: Loss = models.square
    step: Callable[[Run, int], None] = steps.train
    prepare: Callable[[Run], Any] = nothing
    tiny: int = 0


# ---------------------------------------------------------------- settings


def list_prefetches(run: Run) -> None:
    """Two units ahead, as lists say."""
    blocks = list(run.model.blocks)
    run.model.set_modules_to_forward_prefetch(blocks[:2])
    run.model.set_modules_to_backward_prefetch(blocks[:0:-1])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch(blocks[1::-1])


def own_collectives(run: Run) -> None:
    for module in (run.model, *run.model.blocks):
        module.set_custom_all_gather(models.OwnGather())
        module.set_custom_reduce_scatter(models.OwnScatter())


def hook_gradients(run: Run) -> None:
    """A function that sees reduced gradients of one block."""
    run.model.blocks[1].set_all_reduce_hook(lambda rows: run.trace.event("hook", f"blocks.1 [{rows.numel()}]"))


def communication_hook(run: Run) -> None:
    state = DefaultState(run.rank.group)

    def reduce(state: DefaultState, gradient: torch.Tensor, piece: torch.Tensor) -> None:
        run.trace.event("hook", f"[{gradient.numel()}]")
        reduce_scatter_hook(state, gradient, piece)

    run.model.register_comm_hook(state, reduce)


def setting(name: str, *values: Any, **named: Any) -> Callable[[Run], None]:
    """Call ``set_NAME`` of the root."""
    return lambda run: getattr(run.model, f"set_{name}")(*values, **named)


C = Configuration
flat, original = partial(wrapped, use_orig_params=False), partial(wrapped, use_orig_params=True)

FRONT_ENDS_AND_MESHES = [
    C("shard-1", world=1),
    C("shard-2"),
    C("shard-4-uneven", world=4, model=lambda: Mlp(6, 5, 3)),
    C("shard-large-parameters", model=lambda: Mlp(6, 200, 100)),
    C("hsdp-1x1", by_parts(1, 1), world=1),
    C("hsdp-1x2", by_parts(1, 2)),
    C("hsdp-2x1", by_parts(2, 1)),
    C("hsdp-2x2", by_parts(2, 2), world=4),
    C("hsdp-4x1", by_parts(4, 1), world=4),
    C("replicate-1", replicated(), world=1),
    C("replicate-2", replicated()),
    C("wrapper-flat", flat()),
    C("wrapper-flat-1", flat(), world=1),
    C("wrapper-original", original()),
    C("wrapper-shard-grad-op", original(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
    C("wrapper-no-shard", flat(sharding_strategy=ShardingStrategy.NO_SHARD)),
    C("wrapper-hybrid", original(2, 2, sharding_strategy=ShardingStrategy.HYBRID_SHARD), world=4),
]

PRECISION_AND_OFFLOAD = [
    C("shard-bf16", by_parts(mp_policy=BF16)),
    C("shard-fp16-reduce", by_parts(mp_policy=FP16_REDUCE)),
    C("shard-1-bf16", by_parts(mp_policy=BF16), world=1),
    C("hsdp-bf16-accumulation", by_parts(2, 2, mp_policy=BF16), world=4, step=steps.accumulate),
    C("replicate-bf16", replicated(mp_policy=BF16)),
    C("wrapper-original-bf16", original(mixed_precision=WRAPPER_BF16)),
    C("wrapper-flat-bf16", flat(mixed_precision=WRAPPER_BF16)),
    C("shard-offload", by_parts(offload_policy=OFFLOAD)),
    C("hsdp-offload-bf16", by_parts(2, 2, mp_policy=BF16, offload_policy=OFFLOAD), world=4),
    C("wrapper-flat-offload", flat(cpu_offload=CPUOffload(offload_params=True))),
]

ACCUMULATION = [
    C("shard-accumulation", step=steps.accumulate),
    C("shard-bf16-accumulation-keep", by_parts(mp_policy=BF16, reshard_after_forward=False), step=steps.accumulate),
    C("shard-pipeline", step=steps.pipeline),
    C("shard-synchronize", step=steps.leave_and_synchronize),
    C("hsdp-accumulation-over-shards", by_parts(2, 2), world=4, step=steps.accumulate_over_shards),
    C("replicate-accumulation", replicated(), step=steps.accumulate),
    C("wrapper-flat-no-sync", flat(), step=steps.no_sync),
    C("wrapper-original-no-sync", original(), step=steps.no_sync),
]

UNITS_AND_PARAMETERS = [
    C("root-only", models.root_only),
    C("nested-units", models.nested),
    C("unit-of-several", models.several),
    C("tiny-all", tiny=TINY),
    C("tiny-norms", model=models.norms, tiny=1024),
    C("wrapper-flat-tiny", flat(), tiny=TINY),
    C("tied", model=Language, loss=models.cross_entropy),
    C("wrapper-flat-tied", flat(), model=Language, loss=models.cross_entropy),
    C("frozen-block", model=models.frozen_block),
    C("frozen-biases", model=models.frozen_biases),
    C("wrapper-original-frozen-block", original(), model=models.frozen_block),
    C("missing-gradients", models.root_only, model=Branch, loss=models.by_rank),
    C(
        "missing-gradients-zeros",
        models.root_only,
        model=Branch,
        loss=models.by_rank,
        prepare=setting("reduce_scatter_unused_params", True),
    ),
    C("extension-frozen", model=models.adapters),
    C("extension-trainable", model=models.rounded),
    C("called-twice", loss=models.running(0, 1, 0, 2)),
    C("wrapper-flat-called-twice", flat(), loss=models.running(0, 1, 0, 2)),
    C("block-left-out", loss=models.running(0, 2)),
    C("other-order", loss=models.running(2, 0, 1)),
]

RESHARDING_AND_PREFETCH = [
    C("reshard-true", by_parts(reshard_after_forward=True)),
    C("reshard-false", by_parts(reshard_after_forward=False)),
    C("reshard-to-2-of-4", by_parts(reshard_after_forward=2), world=4),
    C("keep-after-backward", prepare=setting("reshard_after_backward", False)),
    C(
        "no-gather-in-backward",
        model=models.embedding,
        loss=models.cross_entropy,
        prepare=lambda run: run.model[0].set_unshard_in_backward(False),
    ),
    C("prefetch-none", prepare=setting("prefetch_bytes", 0)),
    C("prefetch-large", prepare=setting("prefetch_bytes", 1 << 20)),
    C("prefetch-listed", prepare=list_prefetches),
    C("wrapper-prefetch-after", original(backward_prefetch=Prefetch.BACKWARD_POST)),
    C("wrapper-prefetch-none", original(backward_prefetch=None)),
    C("two-reductions-in-flight", prepare=setting("reduce_scatter_max_input_buffers", 2)),
]

CHECKPOINTING = [
    C("checkpoint-reentrant", model=models.checkpointed(True)),
    C("checkpoint-not-reentrant", model=models.checkpointed(False)),
    C("checkpoint-inside-reentrant", model=models.checkpointed(True, inside=True)),
    C("checkpoint-reentrant-accumulation", model=models.checkpointed(True), step=steps.accumulate),
    C("wrapper-flat-checkpoint", flat(), model=models.checkpointed(False)),
]

COMMUNICATION = [
    C("quantized-int8", prepare=setting("comm_quantization", shard=INT8)),
    C(
        "quantized-int8-hsdp",
        by_parts(2, 2),
        world=4,
        prepare=setting("comm_quantization", shard=INT8, replicate=INT8_REPLICAS),
    ),
    C("own-collectives", prepare=own_collectives),
    C("all-reduce-hook", prepare=hook_gradients),
    C("wrapper-communication-hook", flat(), prepare=communication_hook),
]

STEPS = [
    C("evaluate-first", step=steps.evaluate_first),
    C("evaluate-first-keep", by_parts(reshard_after_forward=False), step=steps.evaluate_first),
    C("generate-first", step=steps.generate_first),
    C("wrapper-flat-summon", flat(), step=steps.summon_first()),
    C("shard-summon-rank0", step=steps.summon_first(rank0_only=True, writeback=False)),
    C("unshard-by-hand", step=steps.unshard_by_hand),
    C("clip", step=steps.clip),
    C("wrapper-flat-clip", flat(), step=steps.clip),
    C("double-backward", step=steps.gradient_of_inputs),
    C("failed-forward", step=steps.fail_first("forward")),
    C("failed-backward", step=steps.fail_first("backward")),
    C("wrapper-flat-failed-forward", flat(), step=steps.fail_first("forward")),
]

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        *FRONT_ENDS_AND_MESHES,
        *PRECISION_AND_OFFLOAD,
        *ACCUMULATION,
        *UNITS_AND_PARAMETERS,
        *RESHARDING_AND_PREFETCH,
        *CHECKPOINTING,
        *COMMUNICATION,
        *STEPS,
    )
}
