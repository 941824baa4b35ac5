"""``CPUOffloadPolicy`` on an accelerator; without one on the CPU itself, and beside a device that is not quite the CPU.

``cpu:0`` is the CPU's memory under another name: tensors asked for on it are ordinary ones, but it does not compare
equal to ``cpu``. A mesh that computes there takes every turn of a mesh that computes on an accelerator: shards are
copied to the device in one piece, gradients back to the host, and land once the host has waited.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from compare import assert_equal, assert_models_equal
from fullshard import CPUOffloadPolicy, FullshardError, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fullshard.comm import mesh as mesh_module
from fullshard.comm import record
from fullshard.engine import unit as unit_module
from fullshard.engine.ownership import unit_of
from models import Branch, LossOf, Stack, assert_at_rest, batch, reference_backward, square_loss
from ranks import Rank, on_ranks
from ranks.device import device_type

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
DEVICES = ["cpu", "beside"] if device_type() == "cpu" else ["accelerator"]
ANOTHER = DEVICES[-1]  # than the host
BF16_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@contextlib.contextmanager
def computing_beside_the_cpu(device: str = ANOTHER) -> Iterator[None]:
    """Have meshes made meanwhile compute there, if ``device`` is "beside"."""
    if device != "beside":
        yield
        return
    usual = mesh_module._compute_device
    mesh_module._compute_device = lambda device_type: torch.device("cpu", 0)
    try:
        yield
    finally:
        mesh_module._compute_device = usual


def mesh_on(rank: Rank, device: str, *shape: int) -> DeviceMesh:
    """A mesh of its own for each device, because units of one mesh share where they compute."""
    names = (f"{device}_replicate", f"{device}_shard")[2 - max(len(shape), 1) :]
    return rank.make_mesh(*(shape or (rank.world_size,)), names=names)


def offloaded(
    rank: Rank, device: str, model: nn.Module, *shape: int, pin: bool = True, **settings: Any
) -> tuple[nn.Module, nn.Module]:
    """``model`` in units by child (or block) with its shards offloaded, and an unsharded copy."""
    reference = copy.deepcopy(model)
    policy = CPUOffloadPolicy(pin_memory=pin)
    mesh = mesh_on(rank, device, *shape)
    with computing_beside_the_cpu(device):
        for child in (*getattr(model, "blocks", model.children()), model):
            fully_shard(child, mesh=mesh, offload_policy=policy, **settings)
    unit = unit_of(model)
    assert unit is not None and (unit.mesh.device != torch.device("cpu")) == (device != "cpu")
    return model, reference


class Uneven(nn.Module):
    """Uneven, tiny, 0-D, transposed and empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.second(x) + x @ self.transposed + self.empty.sum()


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(2)


def each_step(
    model: nn.Module, reference: nn.Module, rank: Rank, steps: int, loss_at: Any = square_loss, **tolerance: float
) -> None:
    """Adam steps whose gradients and weights have to agree."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, reference)]
    for step in range(steps):
        loss_at(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_at(step))
        assert_models_equal(model, reference, grads=True, **(tolerance or CLOSE))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, **(tolerance or CLOSE))


# -------------------------------------------------------------------- parity


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["stack", "uneven"])
@pytest.mark.parametrize("device", DEVICES)
def test_parity(rank: Rank, device: str, kind: str) -> None:
    """Adam steps on offloaded shards equal the reference, pinned or not; afterwards the device holds nothing."""
    for pin in (True, False):
        torch.manual_seed(1)
        model, reference = offloaded(rank, device, stack() if kind == "stack" else Uneven(), pin=pin)
        each_step(model, reference, rank, 3)
        if rank.world_size > 1 or device != "cpu":
            assert_at_rest(model)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_parity_on_two_axes(rank: Rank, device: str, shape: tuple[int, int]) -> None:
    """The same on 2-D meshes, with reduce-scatter only before the last microbatch."""
    model, reference = offloaded(rank, device, stack(), *shape)
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, 4, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("policy", [BF16_FP32, MixedPrecisionPolicy(None, torch.float64)], ids=["bf16", "fp64-reduce"])
def test_mixed_precision(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """Casting on the way to the device and back gives the bits that it gives without offloading."""
    results = []
    for device, kind in ((DEVICES[0], OffloadPolicy()), *((device, CPUOffloadPolicy()) for device in DEVICES)):
        model = stack()
        mesh = mesh_on(rank, device)
        with computing_beside_the_cpu(device):
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=kind)
        with record() as seen:
            for step in range(2):
                model.set_requires_gradient_sync(step == 1)
                model(batch(rank.rank, step, 4, 6)).float().square().mean().backward()
        assert {c.dtype for c in seen if c.kind == "all_gather"} <= {policy.param_dtype or torch.float32}
        assert {c.dtype for c in seen if c.kind == "reduce_scatter"} <= {policy.reduce_dtype}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        results.append([p.grad.to_local().cpu() for p in model.parameters()])
    for device, found in zip(DEVICES, results[1:], strict=True):
        assert_equal(found, results[0], f"offloaded, {device}")


@on_ranks(2)
@pytest.mark.parametrize("setting", [False, True, None], ids=str)
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["keep", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("device", DEVICES)
def test_with_checkpointing(rank: Rank, device: str, checkpointed: bool | None, setting: bool | None) -> None:
    """Recomputation and every ``reshard_after_forward`` work on offloaded units."""
    model, reference = offloaded(rank, device, stack(), reshard_after_forward=setting)
    model.checkpointed = checkpointed
    each_step(model, reference, rank, 2)


@on_ranks(4)
def test_gathers_from_neighbours(rank: Rank) -> None:
    """What is kept for subgroup between forward and backward stays on the device."""
    model, reference = offloaded(rank, ANOTHER, stack(), reshard_after_forward=2)
    each_step(model, reference, rank, 2)
    assert_at_rest(model)


@on_ranks(1, 2)
@pytest.mark.parametrize("device", DEVICES)
def test_some_parameters_without_gradients(rank: Rank, device: str) -> None:
    """Frozen and unused parameters have no gradient on the host either; one that one rank uses has on all."""
    model, reference = offloaded(rank, device, nn.Sequential(nn.Linear(6, 6), Branch()))
    for module in (model, reference):
        module[0].bias.requires_grad_(False)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        module[1].rank = number
        return square_loss()(module, number)

    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)
    assert model[1].never.weight.grad is None and model[0].bias.grad is None
    assert_models_equal(model, reference, grads=True, **CLOSE)


# -------------------------------------------------------------------- gradients


@on_ranks(1, 2)
@pytest.mark.parametrize("pattern", ["SSS", "NNS", "SNS", "NSSNS"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_added(rank: Rank, device: str, pattern: str) -> None:
    """Whatever is in ``.grad`` is added to, in place, never overwritten; also what the user put there."""
    model, reference = offloaded(rank, device, stack())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ours.grad, theirs.grad = torch.ones_like(ours.detach()), torch.ones_like(theirs)
    held = [parameter.grad for parameter in model.parameters()]
    pointers = [gradient.to_local().data_ptr() for gradient in held]
    for step, letter in enumerate(pattern):
        model.set_requires_gradient_sync(letter == "S")
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), held, strict=True))
    assert [gradient.to_local().data_ptr() for gradient in held] == pointers
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_have_memory_of_their_own(rank: Rank, device: str) -> None:
    """A gradient kept by the user is not written to by later steps."""
    model, _ = offloaded(rank, device, stack())
    square_loss(0)(model, rank.rank).backward()
    kept = [parameter.grad.to_local() for parameter in model.parameters()]
    values = [gradient.clone() for gradient in kept]
    for step in (1, 2):
        model.zero_grad()
        square_loss(step)(model, rank.rank).backward()
    assert_equal(kept, values, "gradients of the first step")


@on_ranks(1, 2)
@pytest.mark.parametrize("device", DEVICES)
def test_optimizer_in_a_hook(rank: Rank, device: str) -> None:
    """A hook on a parameter runs when its gradient has landed, and may step and drop it."""
    model, reference = offloaded(rank, device, stack())
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(3):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES)
def test_last_backward_at_the_end(rank: Rank, device: str) -> None:
    """Pipelines that wait at the end only: by then all microbatches have landed, however often they were reduced."""
    model, reference = offloaded(rank, device, stack())
    for step in range(3):
        model.set_is_last_backward(step == 2)
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, 2, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    model.zero_grad()
    reference.zero_grad()
    model.set_requires_gradient_sync(False)
    square_loss(3)(model, rank.rank).backward()
    model.synchronize_gradients()
    reference_backward(reference, 2, square_loss(3))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2)
@pytest.mark.parametrize("device", DEVICES)
def test_all_reduce_hook_before_landing(rank: Rank, device: str) -> None:
    """The user's hook sees gradients on the device, before they go to the host."""
    model, reference = offloaded(rank, device, nn.Sequential(nn.Linear(6, 6)))
    model[0].set_all_reduce_hook(lambda rows: rows.mul_(3))
    square_loss()(model, rank.rank).backward()
    loss_of: LossOf = lambda module, number: 3 * square_loss()(module, number)  # noqa: E731
    reference_backward(reference, rank.world_size, loss_of)
    assert_models_equal(model, reference, grads=True, **CLOSE)


# -------------------------------------------------------------------- copies


class Copies(TorchDispatchMode):
    """Addresses of the storages that ``copy_`` reads and writes, and how many elements; one entry per kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("copy_", "_to_copy", "_foreach_copy_"):
            leaves = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            addresses = [t.untyped_storage().data_ptr() for t in leaves]
            self.seen.append((addresses[-1], addresses[0], leaves[0].numel()))
        return func(*args, **(kwargs or {}))


@on_ranks(1, 2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16_FP32], ids=["fp32", "bf16-fp32"])
def test_one_copy_each_way(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """A gather reads a bucket's shard buffer once, whole; a reduction writes each gradient to host memory once."""
    layer = nn.Sequential(nn.Linear(128, 128))
    model, _ = offloaded(rank, ANOTHER, layer, mp_policy=policy, reshard_after_forward=True)
    bucket = unit_of(model[0]).buckets[0]
    shard, numel = bucket.shard_buffer.untyped_storage().data_ptr(), bucket.layout.shard_numel
    for step in range(2):
        model.zero_grad()
        with Copies() as forward:
            loss = model(batch(rank.rank, step, 2, 128)).float().sum()
        with Copies() as backward:
            loss.backward()
        for copies in (forward, backward):
            assert [count for source, _, count in copies.seen if source == shard] == [numel]
        gradients = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()}
        # By address, so that what was there before, at an address that is now a gradient's, does not count.
        landed = {target: count for _, target, count in backward.seen if target in gradients}
        # One flat piece for the whole bucket; without a shard axis one for each large parameter, one for the others.
        whole = [bucket.plans[0].shards_numel]
        if rank.world_size == 1:
            whole = [parameter.numel() for parameter in model.parameters()]
        assert sorted(landed.values()) == sorted(whole)


# -------------------------------------------------------------------- what is where


@pytest.mark.cpu_only("tests/devices has it for accelerators")
@on_ranks(1, 2)
@pytest.mark.parametrize("pin", [True, False])
def test_everything_is_in_host_memory(rank: Rank, pin: bool) -> None:
    """Shards, gradients, optimizer state and state dict are on the CPU; without an accelerator nothing is pinned."""
    model, reference = offloaded(rank, ANOTHER, stack(), pin=pin)
    optimizer = torch.optim.Adam(model.parameters())
    square_loss()(model, rank.rank).backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state, *model.state_dict().values()]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert local.device.type == "cpu" and not local.is_pinned()
    assert list(model.state_dict()) == list(reference.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", ["load", "assign", "to", "to_empty", "in place"])
def test_weights_that_change(rank: Rank, device: str, change: str) -> None:
    """Loads, moves and writes between steps reach the device with the next gather."""
    model, reference = offloaded(rank, device, stack())
    square_loss()(model, rank.rank).backward()
    for module in (model, reference):
        module.zero_grad()
    if change == "to":
        model.to(torch.float64)
        reference.to(torch.float64)
    elif change == "in place":
        with torch.no_grad():
            for module in (model, reference):
                for parameter in module.parameters():
                    parameter.mul_(0.5)
    else:
        state = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
        if change == "to_empty":
            model.to_empty(device="cpu")
        model.load_state_dict(state, assign=change == "assign")
        reference.load_state_dict({name: value * 0.5 for name, value in reference.state_dict().items()})

    def loss_at(step: int) -> LossOf:
        return lambda m, number: (
            m(batch(number, step, 4, 6).to(next(iter(reference.parameters())).dtype)).square().mean()
        )

    each_step(model, reference, rank, 2, loss_at)


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES)
def test_from_the_meta_device(rank: Rank, device: str) -> None:
    """A model built on meta gets its (pinned) host memory when it is materialised."""
    values = stack().state_dict()
    with torch.device("meta"):
        empty = Stack(2)
    model, _ = offloaded(rank, device, empty)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = torch.chunk(values[name], 2)
            parameter.to_local().copy_(rows[rank.rank])
    each_step(model, stack(), rank, 2)


@on_ranks(1, 2)
def test_parameters_on_the_wrong_device(rank: Rank) -> None:
    """A parameter that was moved to the device is refused on every rank, by name, with what to do; then it trains."""
    model, reference = offloaded(rank, ANOTHER, stack())
    each_step(model, reference, rank, 1)
    weight = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(weight.detach().clone())
    usual = unit_module.value_of
    # There is no other device here: have the unit see what it would see of a parameter that model.cuda() has moved.
    unit_module.value_of = lambda parameter: SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    try:
        with pytest.raises(FullshardError, match=r"blocks\.1\.up\.weight.*moved to cuda:0.*CPUOffloadPolicy"):
            square_loss()(model, rank.rank)
    finally:
        unit_module.value_of = usual
    for module in (model, reference):
        module.zero_grad()
    each_step(model, reference, rank, 2)


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES)
def test_after_exceptions(rank: Rank, device: str) -> None:
    """A forward that raises leaves nothing on the device, and the next steps are right."""
    model, reference = offloaded(rank, device, stack())
    each_step(model, reference, rank, 1)
    with pytest.raises(IndexError):
        model(batch(0, 0, 4, 6), run=[0, 7])
    assert_at_rest(model)
    each_step(model, reference, rank, 2)


@on_ranks(2)
def test_some_units_offload(rank: Rank) -> None:
    """Units with and without the policy mix, and a deep copy keeps it."""
    model = stack()
    reference = copy.deepcopy(model)
    mesh = mesh_on(rank, ANOTHER)
    policies = itertools.cycle([CPUOffloadPolicy(), OffloadPolicy()])
    with computing_beside_the_cpu():
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, offload_policy=next(policies))
    assert [unit_of(m).policy.offloads for m in (*model.blocks, model)] == [True, False, True]
    each_step(model, reference, rank, 2)
    copied = copy.deepcopy(model)
    assert [unit_of(m).policy.offloads for m in (*copied.blocks, copied)] == [True, False, True]
    each_step(copied, copy.deepcopy(reference), rank, 2)
