"""Units on streams of the user's, and who waits for whom when memory is freed."""

from __future__ import annotations

import pytest
import torch
from on_device import built, on_device
from torch import nn

from fullshard import CPUOffload, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.memory import DeviceCommStream, input_on
from ranks import Rank

WIDTH = 512
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # full parameters are buffers of their own, also on one rank


class Forked(nn.Module):
    """A branch runs on a stream of its own, beside computation that allocates memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.branch, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.side = torch.Stream(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        current = torch.accelerator.current_stream(x.device)
        self.side.wait_stream(current)
        with self.side:
            branch = self.branch(x)
        x.record_stream(self.side)
        for _ in range(3):
            beside = torch.cat([x] * 64).relu()  # as large as the branch's parameters
        current.wait_stream(self.side)
        branch.record_stream(current)
        return self.last(branch + beside[: x.shape[0]])


@on_device(1, 2)
def test_a_unit_on_another_stream(rank: Rank) -> None:
    """Its parameters are freed when that stream has read them, not when the stream of their all-gather comes by."""
    model, reference = (built(Forked, rank.device, device=rank.device) for _ in range(2))
    reference.bfloat16()
    for child in (*model.children(), model):
        fully_shard(child, mesh=rank.mesh, mp_policy=BF16)
    x = torch.randn(8, WIDTH)
    for _ in range(4):
        with torch.no_grad():
            found, expected = model(x), reference(x.bfloat16())
        torch.testing.assert_close(found.bfloat16(), expected)
    for _ in range(2):
        model(x).square().mean().backward()
        assert all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())
        model.zero_grad()


@on_device(1, 2)
def test_gathered_on_one_stream_and_freed_on_another(rank: Rank) -> None:
    """``unshard`` on one stream, use and ``reshard`` on another: memory that is still read there is not used again."""
    layer = fully_shard(nn.Linear(WIDTH, WIDTH).to(rank.device), mesh=rank.mesh, mp_policy=BF16)
    torch.manual_seed(0)
    with torch.no_grad():
        layer(torch.randn(2, WIDTH))
    handle = layer.unshard(async_op=True)
    other = torch.Stream(rank.device)
    with other:
        handle.wait()
        value = layer.weight.float()
        layer.reshard()
    filled = [torch.ones(WIDTH * WIDTH + WIDTH, dtype=torch.bfloat16) for _ in range(8)]
    torch.accelerator.current_stream().wait_stream(other)
    torch.testing.assert_close(value, layer.weight.full_tensor().bfloat16().float())
    assert all((one == 1).all() for one in filled)


@on_device(1)
def test_a_launch_that_raises_can_be_waited_for(rank: Rank) -> None:
    """The host waits for what was begun before the error as well."""
    comm_stream = DeviceCommStream(rank.device)
    host, target = torch.zeros(1000, device="cpu", pin_memory=True), torch.empty(1000)

    def launch() -> list[object]:
        target.copy_(host, non_blocking=True)
        raise RuntimeError("after the copy")

    with pytest.raises(RuntimeError, match="after the copy"):
        comm_stream.issue(launch, lambda: None)
    comm_stream.synchronize()
    host.fill_(1)
    assert not target.any()


@on_device(1)
def test_sparse_inputs(rank: Rank) -> None:
    """A sparse tensor in pinned memory arrives on the device as any other input does."""
    if rank.device.type != "cuda":
        pytest.skip("the emulated device knows no sparse tensors")
    pinned = torch.eye(4, device="cpu").to_sparse().pin_memory()
    assert torch.equal(input_on(rank.device, pinned).to_dense(), torch.eye(4))


@on_device(1, 2)
@pytest.mark.parametrize("forwards", [0, 1])
def test_shards_that_were_copied_outside_of_forwards(rank: Rank, forwards: int) -> None:
    """After full copies of offloaded shards the user may write to those, also if no forward has run yet."""
    layer = nn.Linear(WIDTH, WIDTH).to(rank.device)
    expected = layer.weight.detach().sum()
    model = FullyShardedDataParallel(
        layer, device_mesh=rank.mesh, cpu_offload=CPUOffload(offload_params=True), use_orig_params=True
    )
    parameters = list(model.parameters())
    for _ in range(forwards):
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        total = model.module.weight.detach().sum()
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    torch.testing.assert_close(total, expected)
