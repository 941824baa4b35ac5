"""``CPUOffloadPolicy`` on a CUDA device: what is where, how it gets there, and that it trains alike."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import CPUOffloadPolicy, FullshardError, MixedPrecisionPolicy, fully_shard
from fullshard.engine.ownership import nested_units

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, LAYERS = 512, 4
BF16_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def build(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def shard(model: nn.Sequential, mesh: DeviceMesh, *, pin: bool = True, **settings: Any) -> nn.Sequential:
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin), **settings)
    return model


def batch(step: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_bytes(model: nn.Module) -> int:
    """Of all shard buffers."""
    return sum(bucket.shard_buffer.nbytes for unit in nested_units(model) for bucket in unit.buckets)


@pytest.fixture
def fake_mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of 4 on a group whose collectives do nothing: copies and memory are real, values are not."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cuda", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_trains_like_the_plain_model(nccl_mesh: DeviceMesh, start: str, pin: bool) -> None:
    """Ten Adam steps on the CPU, from a model on either device, are those of the model on the device."""
    reference = build().cuda()
    model = shard(copy.deepcopy(reference).to(start), nccl_mesh, pin=pin)
    ours = torch.optim.Adam(model.parameters(), lr=1e-3)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-3)
    for step in range(10):
        loss = model(batch(step)).square().mean()  # the root moves inputs to the device
        expected = reference(batch(step).cuda()).square().mean()
        assert loss.device.type == "cuda"
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-5)
        for one in (loss, expected):
            one.backward()
        for parameter, plain in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(local(parameter.grad), plain.grad.cpu(), rtol=1e-3, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16_FP32], ids=["fp32", "bf16-fp32"])
def test_what_is_where(fake_mesh: DeviceMesh, policy: MixedPrecisionPolicy, pin: bool) -> None:
    """Shards, gradients and optimizer state are in host memory, pinned if asked for; the device keeps nothing."""
    warm_up(policy.param_dtype or torch.float32)
    before = torch.cuda.memory_allocated()
    model = shard(build(), fake_mesh, pin=pin, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        model(batch(step)).float().sum().backward()
        optimizer.step()
        for unit in nested_units(model):
            for bucket in unit.buckets:
                assert bucket.shard_buffer.device.type == "cpu" and bucket.shard_buffer.is_pinned() == pin
                assert bucket.full_bytes == 0
        for parameter in model.parameters():
            gradient = local(parameter.grad)
            assert local(parameter).device.type == gradient.device.type == "cpu"
            assert local(parameter).is_pinned() == gradient.is_pinned() == pin
            assert gradient.dtype is torch.float32
        state = [value for values in optimizer.state.values() for value in values.values()]
        assert {local(value).device.type for value in state} == {"cpu"}
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**18  # numbers that say which gradients there are


def warm_up(dtype: torch.dtype) -> None:
    """Have the libraries allocate what they keep."""
    model = build().to("cuda", dtype)
    model(batch(0).to("cuda", dtype)).float().sum().backward()


def host_copies(model: nn.Module, step: int, trace: Path) -> dict[str, list[int]]:
    """Bytes of the copies between host and device of one step whose inputs are on the device already."""
    x = batch(step).cuda()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        model(x).float().sum().backward()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    copies: dict[str, list[int]] = {"HtoD": [], "DtoH": []}
    for event in json.loads(trace.read_text())["traceEvents"]:
        for direction, sizes in copies.items():
            if str(event.get("name")).startswith(f"Memcpy {direction}"):
                sizes.append(event["args"]["bytes"])
    return copies


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16_FP32], ids=["fp32", "bf16-fp32"])
def test_one_copy_each_way(fake_mesh: DeviceMesh, policy: MixedPrecisionPolicy, tmp_path: Path) -> None:
    """A gather copies a bucket's shard to the device once, in fp32, and a reduction its gradients back once."""
    model = shard(build(), fake_mesh, mp_policy=policy, reshard_after_forward=True)
    for step in range(2):
        model(batch(step)).float().sum().backward()
        model.zero_grad()
    copies = host_copies(model, 2, tmp_path / "trace.json")
    one = shard_bytes(model) // LAYERS
    large = {direction: [size for size in sizes if size >= one // 2] for direction, sizes in copies.items()}
    assert len(large["HtoD"]) == 2 * LAYERS  # forward, and again backward
    assert len(large["DtoH"]) == LAYERS
    assert all(abs(size - one) <= 4096 for sizes in large.values() for size in sizes)


def test_pinned_copies_do_not_block_the_host(fake_mesh: DeviceMesh) -> None:
    """While the device is busy the host runs ahead through a whole forward: nothing in it waits for a copy."""
    model = shard(build(), fake_mesh)
    x = batch(0).cuda()
    for _ in range(2):
        with torch.no_grad():
            model(x)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy.record()
    with torch.no_grad():
        model(x)
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16_FP32], ids=["fp32", "bf16-fp32"])
@pytest.mark.parametrize("pattern", ["SSS", "NNS", "SNS", "NSSNS"])
def test_gradients_are_added(nccl_mesh: DeviceMesh, pattern: str, policy: MixedPrecisionPolicy, pin: bool) -> None:
    """(S)ynced and u(N)synced microbatches add up in ``.grad``, in place, beside a device that lags behind."""
    model = shard(build(), nccl_mesh, mp_policy=policy, pin=pin)
    expected = [torch.ones(parameter.shape) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter.detach())
    pointers = [local(parameter.grad).data_ptr() for parameter in model.parameters()]
    for step, letter in enumerate(pattern):
        plain = build().to("cuda", policy.param_dtype or torch.float32)
        plain(batch(step).to("cuda", policy.param_dtype or torch.float32)).float().square().mean().backward()
        for total, parameter in zip(expected, plain.parameters(), strict=True):
            total += parameter.grad.float().cpu()
        model.set_requires_gradient_sync(letter == "S")
        torch.cuda._sleep(20_000_000)
        model(batch(step)).float().square().mean().backward()
        if letter == "S":  # readable at once: the host has waited for the copy
            assert all(local(parameter.grad).isfinite().all() for parameter in model.parameters())
    assert [local(parameter.grad).data_ptr() for parameter in model.parameters()] == pointers
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if policy.param_dtype else {"rtol": 1e-3, "atol": 1e-5}
    for total, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(local(parameter.grad), total, **tolerance)


def test_gradients_have_landed_when_backward_returns(nccl_mesh: DeviceMesh) -> None:
    """However far the device lags behind, the host reads finished gradients, and hooks of parameters do too."""
    model = shard(build(), nccl_mesh)
    seen: list[float] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(local(p.grad).abs().sum())))
    sums = []
    for delay in (0, 200_000_000):
        model.zero_grad()
        torch.cuda._sleep(delay)
        model(batch(0)).square().mean().backward()
        sums.append([float(local(parameter.grad).abs().sum()) for parameter in model.parameters()])
    assert sums[0] == sums[1] and all(value > 0 for value in sums[0])
    assert seen == [sums[0][0], sums[1][0]]


def test_weights_written_on_the_host_reach_the_next_forward(nccl_mesh: DeviceMesh) -> None:
    """A step of the optimizer on the host is seen by the next gather, and waits for the copies of the last."""
    model, reference = shard(build(), nccl_mesh), build().cuda()
    for step in range(5):
        torch.cuda._sleep(50_000_000)  # the copies of this forward come late
        output = model(batch(step))
        expected = reference(batch(step).cuda())
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
        output.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).mul_(0.9)
            for parameter in reference.parameters():
                parameter.mul_(0.9)


def test_a_module_that_was_moved_to_the_device(nccl_mesh: DeviceMesh) -> None:
    """``model.cuda()`` is refused with the parameter's name; moved back, it runs with the weights that it had."""
    model = shard(build(), nccl_mesh)
    model(batch(0)).sum().backward()
    model.zero_grad()
    with pytest.raises(FullshardError, match=r"weight.*moved to cuda:0.*CPUOffloadPolicy"):
        model.cuda()
    model.cpu()
    expected = build().cuda()(batch(1).cuda())
    torch.testing.assert_close(model(batch(1)), expected, rtol=1e-3, atol=1e-4)


def test_loading_device_tensors(nccl_mesh: DeviceMesh) -> None:
    """A state dict on the device loads by copying; assigned, it is refused with the parameter's name."""
    model = shard(build(), nccl_mesh)
    state = {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    torch.testing.assert_close(model(batch(0)), _doubled()(batch(0).cuda()), rtol=1e-3, atol=1e-3)
    on_device = {name: nn.Parameter(local(value).cuda()) for name, value in state.items()}
    placed = {
        name: DTensor.from_local(value, nccl_mesh, model.state_dict()[name].placements)
        for name, value in on_device.items()
    }
    model.load_state_dict(placed, assign=True)
    with pytest.raises(FullshardError, match=r"0\.weight.*moved to cuda:0"):
        model(batch(0))


def _doubled() -> nn.Module:
    model = build().cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def test_from_the_meta_device(nccl_mesh: DeviceMesh) -> None:
    """A model built on meta and materialised on the CPU gets pinned shards."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    shard(model, nccl_mesh)
    model.to_empty(device="cpu")
    values = build().state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local(parameter).copy_(values[name])
    expected = build().cuda()(batch(0).cuda())
    torch.testing.assert_close(model(batch(0)), expected, rtol=1e-3, atol=1e-4)
    assert all(bucket.shard_buffer.is_pinned() for unit in nested_units(model) for bucket in unit.buckets)


def test_peak_device_memory(fake_mesh: DeviceMesh) -> None:
    """Beside what is gathered the device holds little: two layers forward, and their gradients backward."""
    width = 1024
    model = shard(build(width), fake_mesh)
    x = batch(0, width).cuda()
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    model(x).sum().backward()
    torch.cuda.synchronize()
    layer = (width * width + width) * 4
    # Two gathered, one shard on its way each (a quarter), two layers' gradients, rows of two on their way back.
    assert torch.cuda.max_memory_allocated() - start < 5.5 * layer
    assert torch.cuda.memory_allocated() - start < 2**20
