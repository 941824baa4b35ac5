"""The programs of published tables: models, how they were sharded and recomputed, and what their loop keeps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fullshard
from bench.planned import llama, mpt
from fullshard.planning.cluster import Cluster
from fullshard.planning.dry_run import Step, dry_run

_aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """A training program.

    Args:
        model: Name of a shape in ``llama`` or ``mpt``.
        ranks: Of the job.
        batch: Sequences of a microbatch.
        sequence: Tokens of each.
        recompute: ``"none"``, ``"full"``, ``"layer"`` (every second block), or ``"op"`` (attention and every second
            matrix multiplication are kept).
        compiled: Whether blocks are compiled.
        fused_norm: Whether norms are one kernel.
        keeps_logits: Whether the loop has a name for the logits while backward runs, and the next forward.
        reduce_in_half: Whether gradients are reduced in bf16; else in fp32.
        kept: Whether unsharded parameters are kept until backward.
        microbatches: Of a step.
        peer: Whether torch's FSDP2 shards it, in place of fullshard.
    """

    model: str
    ranks: int
    batch: int
    sequence: int
    recompute: str = "none"
    compiled: bool = False
    fused_norm: bool = False
    keeps_logits: bool = False
    reduce_in_half: bool = False
    kept: bool = False
    microbatches: int = 1
    peer: bool = False

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The sharded model on the meta device, and AdamW with states in fp32."""
        with torch.device("meta"):
            model = self._model()
        blocks = model.get_submodule("layers" if isinstance(model, llama.Llama) else "blocks")
        assert isinstance(blocks, nn.ModuleList)
        library: Any = torch_fsdp if self.peer else fullshard
        policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if self.reduce_in_half else torch.float32)
        options: dict[str, Any] = {
            "mesh": init_device_mesh("meta", (self.ranks,)),
            "mp_policy": policy,
        }
        for index, block in enumerate(blocks):
            blocks[index] = self._recomputed(block, index)
            last = isinstance(model, llama.Llama) and index == len(blocks) - 1  # torchtitan keeps the last block
            library.fully_shard(blocks[index], **options, reshard_after_forward=not (self.kept or last))
        library.fully_shard(model, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def plan(self, cluster: Cluster, *, steps: int = 2, microbatches: int | None = None) -> Step:
        """Run it on the meta device."""
        tokens = torch.zeros(self.batch, self.sequence, dtype=torch.int64, device="meta")
        named: list[Tensor] = []

        def loss(model: nn.Module) -> Tensor:
            logits = model(tokens)
            if self.keeps_logits:
                named[:] = [logits]
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        with _fsdp2_on_meta() if self.peer else contextlib.nullcontext():
            return dry_run(
                self.build,
                loss,
                cluster=cluster,
                ranks=self.ranks,
                microbatches=self.microbatches if microbatches is None else microbatches,
                steps=steps,
            )

    def tokens_per_second(self, cluster: Cluster) -> float:
        """Tokens per second and rank. All microbatches but the first take the same time."""
        first = self.plan(cluster, microbatches=1).seconds
        seconds = first
        if self.microbatches > 1:
            seconds += (self.microbatches - 1) * (self.plan(cluster, microbatches=2).seconds - first)
        return self.microbatches * self.batch * self.sequence / seconds

    def _model(self) -> nn.Module:
        if self.model in mpt.SHAPES:
            return mpt.MPT(mpt.SHAPES[self.model], self.sequence)
        shape = dataclasses.replace(llama.SHAPES[self.model], fused=self.compiled, fused_norm=self.fused_norm)
        return llama.Llama(shape, self.sequence)

    def _recomputed(self, block: nn.Module, index: int) -> nn.Module:
        if self.recompute == "none" or (self.recompute == "layer" and index % 2 == 0):
            return block
        if self.recompute == "op":
            return checkpoint_wrapper(block, context_fn=_every_second, preserve_rng_state=False)
        return checkpoint_wrapper(block, preserve_rng_state=False)


@contextlib.contextmanager
def _fsdp2_on_meta() -> Iterator[None]:
    """Have torch's FSDP2 run on the meta device, on the simulated streams that stand in for those of the CPU."""
    with (
        mock.patch.object(torch, "meta", torch.cpu, create=True),
        mock.patch.object(_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device(mesh.device_type)),
        mock.patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params"),
    ):
        yield


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
