"""``FullyShardedDataParallel`` on a CUDA device: what depends on streams, devices and the caching allocator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardedGradScaler
from fullshard.engine.ownership import nested_units
from fullshard.wrap import ModuleWrapPolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, BLOCKS = 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def wrap(model: nn.Module, mesh: DeviceMesh, **arguments: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model, device_mesh=mesh, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=0, **arguments
    )


@pytest.fixture
def fake_mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of 4 on a group whose collectives do nothing: memory and streams are real, values are not."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cuda", (4,))
    dist.destroy_process_group()


OPTIONS = {
    "plain": {},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "low precision gradients": {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    },
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "offload and bf16": {
        "cpu_offload": CPUOffload(offload_params=True),
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
    },
}


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_trains_like_the_plain_model(nccl_mesh: DeviceMesh, options: dict[str, Any], orig: bool) -> None:
    """Steps of two backwards each give the plain model's losses and weights, and the full state dict has them."""
    model = build()
    reference = copy.deepcopy(model).cuda()
    wrapped = wrap(model, nccl_mesh, use_orig_params=orig, **options)
    low = "mixed_precision" in options
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (wrapped, reference)]
    for step in range(4):
        for part in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + part)).cuda()
            ours, theirs = wrapped(x).float().square().mean(), reference(x).square().mean()
            torch.testing.assert_close(ours, theirs, rtol=3e-2 if low else 1e-5, atol=3e-2 if low else 1e-6)
            ours.backward()
            theirs.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = wrapped.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        tolerance = 3e-2 if low else 1e-5
        torch.testing.assert_close(state[name].cuda(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("orig", [False, True])
def test_gradients_alone_go_to_the_host(nccl_mesh: DeviceMesh, orig: bool) -> None:
    """Shards stay on the device, gradients add up in CPU memory; copies and full gradients still work."""
    reference = build().cuda()
    wrapped = wrap(build(), nccl_mesh, use_orig_params=orig, cpu_offload=CPUOffload(offload_grads=True))
    for step in range(2):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        wrapped(x).square().mean().backward()
        reference(x).square().mean().backward()
    assert {p.device.type for p in wrapped.parameters()} == {"cuda"}
    assert {p.grad.device.type for p in wrapped.parameters() if p.grad is not None} == {"cpu"}
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True, writeback=False):
        for (name, ours), theirs in zip(wrapped.named_parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None, name
            torch.testing.assert_close(ours.grad.cuda(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_full_buffers_alive_at_once(fake_mesh: DeviceMesh) -> None:
    """A forward holds two blocks' full parameters at a time, never all, and nothing at rest."""
    wrapped = wrap(build(), fake_mesh, use_orig_params=True)
    full = [sum(bucket.full_size for bucket in unit.buckets) for unit in nested_units(wrapped)]
    x = torch.randn(8, WIDTH, device="cuda")
    for _ in range(2):
        wrapped(x).square().mean().backward()
        wrapped.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        wrapped(x)
    torch.cuda.synchronize()
    above = torch.cuda.max_memory_allocated() - before
    assert above < 2 * max(full) + 40 * x.nbytes, f"{above} bytes above the shards, a block has {max(full)}"
    assert torch.cuda.memory_allocated() == before
    assert all(bucket.full_bytes == 0 for unit in nested_units(wrapped) for bucket in unit.buckets)


def test_scaling_and_clipping(nccl_mesh: DeviceMesh) -> None:
    """Scaled gradients are unscaled before they are clipped, as those of the plain model."""
    reference = build().cuda()
    wrapped = wrap(build(), nccl_mesh, use_orig_params=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (wrapped, reference)]
    scalers = [ShardedGradScaler(init_scale=1024.0), torch.amp.GradScaler("cuda", init_scale=1024.0)]
    x = torch.randn(8, WIDTH, device="cuda")
    norms = []
    for module, optimizer, scaler in zip((wrapped, reference), optimizers, scalers, strict=True):
        scaler.scale(module(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        if isinstance(module, FullyShardedDataParallel):
            norms.append(module.clip_grad_norm_(0.1))
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(*norms)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(wrapped.state_dict()[name], value, rtol=1e-5, atol=1e-6)
