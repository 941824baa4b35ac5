"""The modelled network on an accelerator, where messages are kernels on streams."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.simulators.spinning import StreamDevice
from on_device import on_device

from fullshard import fully_shard
from fullshard.comm import NcclTransport, make_transport
from fullshard.planning.simulation.group import Fabric
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks
from ranks import Rank

MESSAGE_SECONDS = 0.02


@contextlib.contextmanager
def fabric_of_8(rank: Rank) -> Iterator[Fabric]:
    """Rank 0 of 8; a gather of 1 MiB takes 20 ms, where kernels take time."""
    dist.destroy_process_group()  # the pool's
    with modelled_ranks(8, Network(2**20 * 7 / 8 / MESSAGE_SECONDS), device=StreamDevice(rank.device)) as fabric:
        yield fabric


def gather(device: torch.device) -> tuple[torch.Tensor, dist.Work]:
    own = torch.arange(2**15, dtype=torch.float32, device=device)
    output = torch.empty(8 * own.numel(), device=device)
    return output, dist.group.WORLD._allgather_base(output, own)


@on_device(1, fresh=True)
def test_messages_overlap_with_computation_and_follow_one_another(rank: Rank) -> None:
    """Two messages on a link take twice as long as one, computation beside them ends before; the host goes on."""
    if rank.device.type != "cuda":
        pytest.skip("kernels take no time on this device")
    with fabric_of_8(rank) as fabric:
        begin, computed, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        begin.record()
        works = [gather(rank.device)[1], gather(rank.device)[1]]
        fabric.device.compute(MESSAGE_SECONDS)
        computed.record()
        for work in works:
            work.wait()
        end.record()
        assert not end.query() and not works[0].is_completed()
        end.synchronize()
        # Ratios, not times: others may be on the device. One after another, hardly anything would follow computation.
        assert begin.elapsed_time(end) > 1.6 * 1e3 * MESSAGE_SECONDS
        assert computed.elapsed_time(end) > 0.2 * begin.elapsed_time(end)


@on_device(1, fresh=True)
def test_messages_and_gradients_have_their_values(rank: Rank) -> None:
    """The stream that waits gets there after a message, with its contents; so does a step of ``fully_shard``.

    With a communicator for reductions, its gradients are those of the plain model.
    """
    with fabric_of_8(rank):
        output, work = gather(rank.device)
        work.wait()
        assert torch.equal(output.view(8, -1), torch.arange(2**15).float().expand(8, -1))
        torch.accelerator.synchronize()
        assert work.is_completed()
        mesh = init_device_mesh(rank.device.type, (8,))
        assert isinstance(make_transport(mesh.get_group(), rank.device), NcclTransport)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        x = torch.ones(2, 64)
        model(x).sum().backward()
        expected = [parameter.grad[:8].clone() for parameter in model.parameters()]
        model.zero_grad()
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        model(x).sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.to_local(), gradient)
