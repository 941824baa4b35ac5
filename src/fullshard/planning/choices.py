"""``Choices``: how a model is sharded, as values that can be searched, explained and applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.composable.fsdp_module import FSDPModule
from fullshard.composable.shard import shard
from fullshard.wrap import plan_blocks

__all__ = ["Choices"]

GIB = 2**30


@dataclass(frozen=True)
class Choices:
    """Choices for sharding a model and computing its step.

    Attributes:
        replicas: Ranks of the replicate axis (HSDP); 1: sharded over all ranks.
        mixed_precision: ``"bf16"`` or ``"fp16"``, with reductions in fp32; None: the parameters' dtype.
        checkpoint_activations: Share of the repeated blocks that are recomputed in backward, from 0 to 1, evenly
            spread; True: all.
        reshard_after_forward: As for ``fully_shard``.
        blocks_per_unit: Consecutive blocks that are all-gathered and freed together.
        prefetch_bytes: As for ``set_prefetch_bytes``; None: one unit.
        offload_optimizer: Whether the optimizer's state is in CPU memory, by ``fullshard.optim.offload``.
        microbatches: Parts of a rank's batch, whose gradients are added up.
    """

    replicas: int = 1
    mixed_precision: str | None = None
    checkpoint_activations: bool | float = False
    reshard_after_forward: bool | int | None = None
    blocks_per_unit: int = 1
    prefetch_bytes: int | None = None
    offload_optimizer: bool = False
    microbatches: int = 1

    def __post_init__(self) -> None:
        counts = {"replicas": self.replicas, "blocks_per_unit": self.blocks_per_unit, "microbatches": self.microbatches}
        wrong = {name: value for name, value in counts.items() if not isinstance(value, int) or value < 1}
        if wrong or not 0 <= self.checkpoint_activations <= 1:
            raise ValueError(
                "plan: expected replicas, blocks_per_unit and microbatches of at least 1 and a checkpoint_activations "
                f"from 0 to 1, found {wrong or self.checkpoint_activations}"
            )

    def shard(self, model: nn.Module, ranks: int, device: str) -> FSDPModule:
        """Shard a model over all ranks of the job, in place.

        Args:
            model: Unsharded.
            ranks: Of the job.
            device: Type of the mesh.

        Returns:
            The model.
        """
        sharded = shard(
            model,
            mesh=self.mesh(ranks, device),
            mixed_precision=self.mixed_precision,  # type: ignore[arg-type]
            checkpoint_activations=self.checkpoint_activations,
            reshard_after_forward=self.reshard_after_forward,
            plan=plan_blocks(model, blocks_per_unit=self.blocks_per_unit),
            report=False,
        )
        if self.prefetch_bytes is not None:
            sharded.set_prefetch_bytes(self.prefetch_bytes)
        return sharded

    def mesh(self, ranks: int, device: str) -> DeviceMesh:
        """Return the mesh: replicas times shards, or shards only."""
        if ranks % self.replicas:
            raise ValueError(
                f"plan: expected ranks that are a multiple of replicas, found {ranks} ranks and {self.replicas}"
            )
        if self.replicas == 1:
            return init_device_mesh(device, (ranks,))
        return init_device_mesh(device, (self.replicas, ranks // self.replicas), mesh_dim_names=("replicate", "shard"))

    def code(self, ranks: int) -> str:
        """Return the lines of Python that shard a model so, and train it."""
        return "\n".join(self._code(ranks))

    def _code(self, ranks: int) -> Iterator[str]:
        arguments = ["model"]
        if self.replicas > 1:
            shape = f"({self.replicas}, {ranks // self.replicas})"
            yield f'mesh = init_device_mesh(device.type, {shape}, mesh_dim_names=("replicate", "shard"))'
            arguments.append("mesh=mesh")
        if self.mixed_precision is not None:
            arguments.append(f'mixed_precision="{self.mixed_precision}"')
        if self.checkpoint_activations:
            arguments.append(f"checkpoint_activations={self.checkpoint_activations}")
        if self.reshard_after_forward is not None:
            arguments.append(f"reshard_after_forward={self.reshard_after_forward}")
        if self.blocks_per_unit > 1:
            arguments.append(f"plan=fullshard.wrap.plan_blocks(model, blocks_per_unit={self.blocks_per_unit})")
        yield f"model = fullshard.shard({', '.join(arguments)})"
        if self.prefetch_bytes is not None:
            yield f"model.set_prefetch_bytes({self.prefetch_bytes})"
        if self.offload_optimizer:
            yield "optimizer = fullshard.optim.offload(optimizer)"

    def names(self, ranks: int) -> Iterator[tuple[str, str]]:
        """Yield each choice by name, with words for its value."""
        mesh = f"HSDP, {self.replicas} x {ranks // self.replicas}" if self.replicas > 1 else "sharded over all ranks"
        share = float(self.checkpoint_activations)
        kept: dict[bool | int | None, str] = {
            None: "blocks resharded after forward",
            True: "all resharded after forward",
        }
        yield "replicas", f"{mesh} (replicas={self.replicas})"
        yield "mixed_precision", f"{self.mixed_precision or 'no mixed'} precision"
        yield "checkpoint_activations", f"{share:.0%} of the blocks recomputed" if share else "no recomputation"
        kept_or_not = kept.get(self.reshard_after_forward, "units kept until backward")
        yield "reshard_after_forward", f"{kept_or_not} (reshard_after_forward={self.reshard_after_forward})"
        yield "blocks_per_unit", f"{self.blocks_per_unit} block{'s' * (self.blocks_per_unit > 1)} per unit"
        ahead = "one unit" if self.prefetch_bytes is None else f"{self.prefetch_bytes / GIB:.2f} GiB"
        yield "prefetch_bytes", f"{ahead} prefetched"
        yield "offload_optimizer", "optimizer state in CPU memory" if self.offload_optimizer else "state on the device"
        yield "microbatches", f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
