"""``CPUOffloadPolicy`` beside an accelerator: what is where, how it gets there, and when it has landed."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from on_device import built, fake_mesh, host_never_waits, keep_busy, on_device, peak_above
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from front_ends import FLAT, ORIGINAL, FrontEnd
from fullshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FullshardError,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from fullshard.engine.ownership import nested_units
from fullshard.memory import allows_cpu_gradients
from models import held_bytes
from pairwise import each_value
from ranks import Rank
from ranks.device import EMULATED

WIDTH, LAYERS = 64, 3
BF16_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CLOSE: dict[str, float] = {"rtol": 1e-3, "atol": 1e-5}
POLICIES = pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16_FP32], ids=["fp32", "bf16-fp32"])


def build(device: torch.device | str = "cpu", width: int = WIDTH) -> nn.Sequential:
    return built(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))), device=device)


def offloaded(model: nn.Sequential, mesh: DeviceMesh, *, pin: bool = True, **settings: Any) -> nn.Sequential:
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin), **settings)
    return model


def batch(step: int, device: torch.device | str = "cpu", width: int = WIDTH) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step), device="cpu").to(device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """All of a sharded tensor in host memory, as a plain tensor on the device."""
    if not isinstance(tensor, DTensor):
        return tensor.to(device)
    on_device = DTensor.from_local(
        tensor.to_local().to(device), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
    return on_device.full_tensor()


# ---------------------------------------------------------------- what is where


@on_device(2)
@each_value(policy=[MixedPrecisionPolicy(), BF16_FP32], pin=[True, False])
def test_shards_gradients_and_states_are_in_host_memory(rank: Rank, policy: MixedPrecisionPolicy, pin: bool) -> None:
    """Shards and gradients are in host memory, pinned if asked for, and so is optimizer state; nothing is gathered.

    Also of a model built on meta and materialized on the CPU.
    """
    model = build("meta" if pin else "cpu")
    offloaded(model, rank.mesh, pin=pin, mp_policy=policy).to_empty(device="cpu")
    values = build().state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local(parameter).copy_(values[name].chunk(2)[rank.rank])
    expected = build(rank.device)(batch(0, rank.device))
    torch.testing.assert_close(model(batch(0)).float(), expected, rtol=2e-2, atol=2e-2)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        model(batch(step)).float().sum().backward()
        optimizer.step()
        for bucket in itertools.chain.from_iterable(unit.buckets for unit in nested_units(model)):
            assert bucket.shard_buffer.device.type == "cpu" and bucket.shard_buffer.is_pinned() == pin
            assert held_bytes(bucket) == 0
        for parameter in model.parameters():
            gradient = local(parameter.grad)
            assert local(parameter).device.type == gradient.device.type == "cpu"
            assert local(parameter).is_pinned() == gradient.is_pinned() == pin
            assert gradient.dtype is torch.float32
        state = [value for values in optimizer.state.values() for value in values.values()]
        assert {local(value).device.type for value in state} == {"cpu"}


@on_device(2)
@pytest.mark.parametrize("front_end", [FLAT, ORIGINAL], ids=str)
def test_gradients_alone_go_to_the_host(rank: Rank, front_end: FrontEnd) -> None:
    """With offload_grads shards stay on the device and gradients add up in host memory; full gradients still work.

    Where torch does not let parameters have such gradients, as on accelerators out of its tree, that is said.
    """
    if not allows_cpu_gradients(rank.device):
        with pytest.raises(ValueError, match="offload_grads=True requires offload_params=True"):
            front_end.wrap(build(rank.device), rank, cpu_offload=CPUOffload(offload_grads=True))
        return
    reference = build(rank.device)
    model = front_end.wrap(build(rank.device), rank, cpu_offload=CPUOffload(offload_grads=True))
    for step in range(2):
        for one in (model, reference):
            one(batch(step, rank.device)).square().mean().backward()
    assert {p.device.type for p in model.parameters()} == {rank.device.type}
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.to(rank.device), theirs.grad, **CLOSE)


@on_device(1, fresh=True)
def test_peak_device_memory(rank: Rank) -> None:
    """Beside what is gathered the device holds little: two layers forward, and their gradients backward."""
    width = 512
    with fake_mesh(rank, 4) as mesh:
        model = offloaded(build(width=width), mesh)
        x = batch(0, rank.device, width)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        step()
        step()
        above, left = peak_above(rank.device, step)
    layer = (width * width + width) * 4
    # Two gathered, one shard on its way each (a quarter), two layers' gradients, rows of two on their way back.
    assert above < 5.5 * layer
    assert left == 0


@on_device(1, fresh=True)
def test_a_fraction_of_the_state(rank: Rank) -> None:
    """The device keeps the rest, in bytes: one of two equal layers of each unit is offloaded."""
    width, held = 256, []
    layer = (2 * width * width + 2 * width) * 4 // 4  # bytes of a unit's shards on one of 4 ranks
    with fake_mesh(rank, 4) as mesh:
        for fraction in (0.0, 0.5, 1.0):
            model = nn.Sequential(*(nn.Sequential(*build(width=width)[:2]) for _ in range(3)))
            gc.collect()  # what is left of the model before
            before = torch.get_device_module(rank.device).memory_allocated()
            for module in (*model, model):
                fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(fraction=fraction))
            optimizer = torch.optim.AdamW(model.parameters())
            model(batch(0, rank.device, width)).sum().backward()
            optimizer.step()
            model.reshard()
            held.append(torch.get_device_module(rank.device).memory_allocated() - before)
            del model, module, optimizer
    # Shards, gradients and two tensors of state. The allocator rounds biases up to 512 bytes, and may use a free block
    # of up to twice the size for one of them.
    assert held[0] - held[1] == pytest.approx(0.5 * 4 * 3 * layer, rel=0.1)
    assert held[0] > 4 * 3 * layer and held[2] <= 4096


# ---------------------------------------------------------------- how it gets there


class Crossings(TorchDispatchMode):
    """Bytes of each copy from host to device and back."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device: list[int] = []
        self.to_host: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("copy_", "_to_copy"):
            source = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)][-1]
            if source.device.type == "cpu" != result.device.type:
                self.to_device.append(source.nbytes)
            elif source.device.type != "cpu" == result.device.type:
                self.to_host.append(source.nbytes)
        return result


@on_device(2)
@POLICIES
def test_one_copy_each_way(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """A gather copies a unit's shard to the device once, in fp32, and a reduction its gradients back once."""
    model = offloaded(build(), rank.mesh, mp_policy=policy, reshard_after_forward=True)
    for step in range(2):
        model(batch(step)).float().sum().backward()
        model.zero_grad()
    x = batch(2, rank.device)
    with Crossings() as seen:
        model(x).float().sum().backward()
    one = sum(bucket.shard_buffer.nbytes for unit in nested_units(model) for bucket in unit.buckets) // LAYERS
    to_device, to_host = ([nbytes for nbytes in each if nbytes >= one // 2] for each in (seen.to_device, seen.to_host))
    assert len(to_device) == 2 * LAYERS  # forward, and again backward
    assert len(to_host) == LAYERS
    assert all(abs(nbytes - one) <= 4096 for nbytes in (*to_device, *to_host))


@on_device(1, 2)
def test_pinned_copies_do_not_block_the_host(rank: Rank) -> None:
    """The host runs ahead through the forward of a training step: nothing in it waits for a copy."""
    if rank.device.type != EMULATED and rank.world_size > torch.accelerator.device_count():
        pytest.skip("gloo's collectives of device tensors block the host")
    model = offloaded(build(), rank.mesh)
    x = batch(0, rank.device)
    for _ in range(2):
        model(x).sum().backward()
    with host_never_waits(rank.device):
        loss = model(x).sum()
    loss.backward()


# ---------------------------------------------------------------- when it has landed


@on_device(1, 2)
@POLICIES
def test_gradients_add_up_beside_a_late_device(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """(S)ynced and u(N)synced microbatches add up in ``.grad``, in place, beside a device that lags behind."""
    model = offloaded(build(), rank.mesh, mp_policy=policy)
    dtype = policy.param_dtype or torch.float32
    expected = [torch.ones(parameter.shape) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter.detach())
    pointers = [local(parameter.grad).data_ptr() for parameter in model.parameters()]
    seen: list[float] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(local(p.grad).abs().sum())))
    for step, letter in enumerate("NSSNS"):
        plain = build(rank.device).to(dtype)
        plain(batch(step, rank.device).to(dtype)).float().square().mean().backward()
        for total, parameter in zip(expected, plain.parameters(), strict=True):
            total += parameter.grad.float()
        model.set_requires_gradient_sync(letter == "S")
        keep_busy(rank.device, 0.02)
        model(batch(step)).float().square().mean().backward()
        if letter == "S":  # readable at once, in hooks of parameters as well: the host has waited for the copy
            assert all(local(parameter.grad).isfinite().all() for parameter in model.parameters())
            assert seen.pop() == float(local(model[0].weight.grad).abs().sum()) and not seen
    assert [local(parameter.grad).data_ptr() for parameter in model.parameters()] == pointers
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if policy.param_dtype else CLOSE
    for total, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad, rank.device), total, **tolerance)


@on_device(1, 2)
def test_host_writes_reach_the_next_forward(rank: Rank) -> None:
    """A write to the weights on the host is seen by the next gather, and does not reach the one before."""
    model, reference = offloaded(build(), rank.mesh), build(rank.device)
    for step in range(5):
        keep_busy(rank.device, 0.05)  # the copies of this forward come late
        output = model(batch(step))
        expected = reference(batch(step, rank.device))
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
        output.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).mul_(0.9)
            for parameter in reference.parameters():
                parameter.mul_(0.9)


# ---------------------------------------------------------------- what users do to it


@on_device(2)
def test_moved_modules_are_refused(rank: Rank) -> None:
    """Moving a module to the device is refused with the parameter's name; moved back, it has the weights it had."""
    model = offloaded(build(), rank.mesh)
    model(batch(0)).sum().backward()
    model.zero_grad()
    with pytest.raises(FullshardError, match=rf"weight.*moved to {rank.device}.*CPUOffloadPolicy"):
        model.to(rank.device)
    model.cpu()
    expected = build(rank.device)(batch(1, rank.device))
    torch.testing.assert_close(model(batch(1)), expected, rtol=1e-3, atol=1e-4)


@on_device(2)
def test_states_on_the_device_load_by_copying(rank: Rank) -> None:
    """A state dict on the device is copied into host memory; assigned, it is refused with the parameter's name."""
    model = offloaded(build(), rank.mesh)
    state = {
        name: DTensor.from_local(local(value).to(rank.device) * 2, rank.mesh, value.placements)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state)
    doubled = build(rank.device)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(model(batch(0)), doubled(batch(0, rank.device)), rtol=1e-3, atol=1e-3)
    model.load_state_dict({name: nn.Parameter(value) for name, value in state.items()}, assign=True)
    with pytest.raises(FullshardError, match=rf"0\.weight.*moved to {rank.device}"):
        model(batch(0))
