"""The programs of published tables: models, how they were sharded and recomputed, and what their loop keeps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.planned.models import LLAMAS, MPT, MPTS, Llama
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.planning.cluster import Cluster
from fullshard.planning.dry_run import Step, dry_run

_aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """A training program. ``recompute`` is ``"none"``, ``"full"``, ``"layer"`` (every second block), or ``"op"``
    (attention and every second matrix multiplication are kept)."""

    model: str  # of LLAMAS or MPTS
    ranks: int
    batch: int  # sequences of a microbatch
    sequence: int  # tokens of each
    recompute: str = "none"
    compiled: bool = False  # its blocks
    fused_norm: bool = False  # a norm is one kernel
    keeps_logits: bool = False  # the loop has a name for the logits while backward runs, and the next forward
    reduce_in_half: bool = False  # gradients in bf16; else in fp32
    kept: bool = False  # unsharded parameters, until backward
    microbatches: int = 1

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The sharded model on the meta device, and AdamW with states in fp32."""
        with torch.device("meta"):
            model = self._model()
        blocks = model.get_submodule("layers" if isinstance(model, Llama) else "blocks")
        assert isinstance(blocks, nn.ModuleList)
        reduced = torch.bfloat16 if self.reduce_in_half else torch.float32
        mesh, policy = init_device_mesh("meta", (self.ranks,)), MixedPrecisionPolicy(torch.bfloat16, reduced)
        for index, block in enumerate(blocks):
            blocks[index] = self._recomputed(block, index)
            last = isinstance(model, Llama) and index == len(blocks) - 1  # torchtitan keeps the last block
            resharded = not (self.kept or last)
            fully_shard(blocks[index], mesh=mesh, mp_policy=policy, reshard_after_forward=resharded)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def plan(self, cluster: Cluster, *, steps: int = 2, microbatches: int | None = None) -> Step:
        tokens = torch.zeros(self.batch, self.sequence, dtype=torch.int64, device="meta")
        named: list[Tensor] = []

        def loss(model: nn.Module) -> Tensor:
            logits = model(tokens)
            if self.keeps_logits:
                named[:] = [logits]
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        count = self.microbatches if microbatches is None else microbatches
        return dry_run(self.build, loss, cluster=cluster, ranks=self.ranks, microbatches=count, steps=steps)

    def tokens_per_second(self, cluster: Cluster) -> float:
        """Tokens per second and rank. All microbatches but the first take the same time."""
        first = self.plan(cluster, microbatches=1).seconds
        seconds = first
        if self.microbatches > 1:
            seconds += (self.microbatches - 1) * (self.plan(cluster, microbatches=2).seconds - first)
        return self.microbatches * self.batch * self.sequence / seconds

    def _model(self) -> nn.Module:
        if self.model in MPTS:
            return MPT(MPTS[self.model], self.sequence)
        shape = dataclasses.replace(LLAMAS[self.model], fused=self.compiled, fused_norm=self.fused_norm)
        return Llama(shape, self.sequence)

    def _recomputed(self, block: nn.Module, index: int) -> nn.Module:
        if self.recompute == "none" or (self.recompute == "layer" and index % 2 == 0):
            return block
        if self.recompute == "op":
            return checkpoint_wrapper(block, context_fn=_every_second, preserve_rng_state=False)
        return checkpoint_wrapper(block, preserve_rng_state=False)


def _every_second() -> Any:
    """Keep results of attention and of every second matrix multiplication of a block, as torchtitan does."""
    seen = {False: 0, True: 0}

    def policy(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = function is _aten._scaled_dot_product_flash_attention_for_cpu.default
        if function is _aten.mm.default:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
