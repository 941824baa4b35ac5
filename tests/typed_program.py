"""A user's program, with types: test_package.py checks it with ``mypy --strict`` against the package, and runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard import (
    BackwardPrefetch,
    CommQuantization,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    UnshardHandle,
    checkpoint,
    clip_grad_norm_,
    comm,
    dropin,
    fully_shard,
    optim,
    replicate,
    shard,
    wrap,
)
from fullshard.errors import CheckpointError, FullshardError
from fullshard.optim import Muon, localize
from fullshard.wrap import ModuleWrapPolicy, WrapPlan

VERSION: str = fullshard.__version__


# Parts that no line here imports.
PARTS = (fullshard.activation_checkpoint.checkpoint_wrapper, fullshard.comm_hooks.bf16_compress_hook, fullshard.policy)


class Block(nn.Module):
    """A unit of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's output to its input."""
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + out


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks and the head."""
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def sharded(mesh: DeviceMesh | None = None) -> FSDPModule:
    """Shard a model per parameter, with mixed precision."""
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    root: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    root.set_requires_all_reduce(True)
    root.set_modules_to_forward_prefetch([model.blocks[0]])
    root.set_prefetch_bytes(None)
    return root


def sharded_in_other_ways(mesh: DeviceMesh) -> tuple[nn.Module, list[FSDPModule], FullyShardedDataParallel]:
    """Policies, several modules as a unit, replication and the wrapper."""
    policy = ModuleWrapPolicy({Block})
    plan: WrapPlan = wrap.plan_for(policy, Model())
    assert str(plan)
    by_policy = fully_shard(Model(), mesh=mesh, policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    by_policy.set_comm_quantization(CommQuantization(all_gather="int8"))
    replicate(Model())
    units = wrap.plan_blocks(whole := Model()).modules
    by_structure: FSDPModule = shard(whole, mesh=mesh, mixed_precision="bf16", plan=units, report=False)
    by_structure.set_requires_gradient_sync(True)
    together: list[FSDPModule] = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], mesh=mesh)
    wrapped = FullyShardedDataParallel(
        Model(),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        use_orig_params=True,
    )
    with FullyShardedDataParallel.summon_full_params(wrapped), wrapped.no_sync():
        pass
    return by_policy, together, wrapped


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Random inputs."""
    for _ in range(steps):
        yield torch.randn(4, 8)


def train(folder: Path, steps: int = 2) -> float:
    """Train, save, and load again."""
    model = sharded()
    optimizer: torch.optim.AdamW = localize(torch.optim.AdamW(model.parameters(), lr=1e-3))
    loss, norm = torch.zeros(()), torch.zeros(())
    with comm.record() as collectives:
        for batch in batches(steps):
            loss = model(batch).float().square().mean()
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert all(isinstance(each, comm.Collective) for each in collectives)
    with fullshard.unsharded(model):
        model(torch.randn(1, 8))
    handle: UnshardHandle | None = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    model.reshard()
    fullshard.save(folder, model, optimizer, step=steps)
    pending = checkpoint.async_save(folder, model, optimizer, step=steps)
    pending.result()
    step: int = fullshard.load(folder, model, optimizer)["step"]
    assert step == steps
    fullshard.export_safetensors(model, folder / "weights.safetensors")
    assert issubclass(CheckpointError, FullshardError)
    return float(loss) + float(norm)


def matrix_optimizer(model: nn.Module) -> optim.MatrixOptimizer:
    """An optimizer of whole matrices."""
    return Muon([parameter for parameter in model.parameters() if parameter.ndim == 2], lr=0.01)


def in_place_of_torch() -> bool:
    """Install and uninstall the drop-in."""
    with fullshard.dropin.install():
        assert dropin.installed()
    dropin.uninstall()
    return not dropin.installed()
