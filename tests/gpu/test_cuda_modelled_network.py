"""The modelled network on a CUDA device, where messages are kernels. Run wherever one is at hand; skipped elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.modelled_network import Fabric, Network, modelled_ranks
from bench.modelled_time import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MESSAGE_SECONDS = 0.02


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """Rank 0 of 8; a gather of 1 MiB takes 20 ms."""
    torch.cuda.init()
    with modelled_ranks(8, Network(2**20 * 7 / 8 / MESSAGE_SECONDS), device=CudaDevice()) as fabric:
        yield fabric


def _milliseconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return begin.elapsed_time(end)


def _gather() -> tuple[torch.Tensor, dist.Work]:
    own = torch.arange(2**15, dtype=torch.float32, device="cuda")
    output = torch.empty(8 * own.numel(), device="cuda")
    return output, dist.group.WORLD._allgather_base(output, own)


def test_a_message_is_a_kernel_that_who_waits_sees(fabric: Fabric) -> None:
    """The stream that waits gets there after the message, with its contents; the host is not held up."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    output, work = _gather()
    assert not work.is_completed()
    work.wait()
    end.record()
    assert not end.query()
    assert _milliseconds(begin, end) >= 0.8e3 * MESSAGE_SECONDS
    assert torch.equal(output.view(8, -1), torch.arange(2**15, device="cuda").float().expand(8, -1))


def test_messages_overlap_with_computation_and_follow_one_another(fabric: Fabric) -> None:
    """Two messages on a link take twice as long as one, computation beside them nothing more."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    works = [_gather()[1], _gather()[1]]
    fabric.device.compute(1.5 * MESSAGE_SECONDS)
    for work in works:
        work.wait()
    end.record()
    # At least the two messages, and less than they and the computation one after another: ratios, not times.
    assert 1.6 < _milliseconds(begin, end) / (1e3 * MESSAGE_SECONDS) < 3.2


def test_fullshard_and_its_reduce_communicator(fabric: Fabric) -> None:
    """A step on it has the gradients of the plain model."""
    from fullshard import fully_shard
    from fullshard.transport import NcclTransport, make_transport

    mesh = init_device_mesh("cuda", (8,))
    assert isinstance(make_transport(mesh.get_group(), torch.device("cuda")), NcclTransport)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    x = torch.ones(2, 64, device="cuda")
    model(x).sum().backward()
    expected = [parameter.grad[:8].clone() for parameter in model.parameters()]
    model.zero_grad()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), gradient)
