"""What only a CUDA device can show. Run wherever one is at hand; skipped elsewhere."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import fully_shard
from fullshard.engine.ownership import unit_of
from fullshard.transport import record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, BLOCKS = 1024, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.fixture
def fake_mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of 8 on a group whose collectives do nothing: memory and host behaviour are real, values are not."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cuda", (8,))
    dist.destroy_process_group()


def test_one_rank_trains_like_the_plain_model(nccl_mesh: DeviceMesh) -> None:
    """On one rank parameters move to the device, nothing is communicated, and ten steps are those of the model."""
    model = build()
    reference = copy.deepcopy(model).cuda()
    shard(model, nccl_mesh)
    ours = torch.optim.Adam(model.parameters(), lr=1e-3)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-3)
    for step in range(10):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        with record() as seen:
            loss = model(x).square().mean()  # the root moves inputs to the device
            loss.backward()
        expected = reference(x.cuda()).square().mean()
        expected.backward()
        assert not seen
        torch.testing.assert_close(loss, expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def test_full_buffers_alive_at_once(fake_mesh: DeviceMesh) -> None:
    """A forward holds two blocks' full parameters above its shards and activations, never all."""
    model = shard(build(), fake_mesh)
    x = torch.randn(4, WIDTH, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        model(x)
    block_bytes = sum(p.numel() for p in Block().parameters()) * 4
    above = torch.cuda.max_memory_allocated() - start
    assert above < 2.5 * block_bytes
    assert torch.cuda.memory_allocated() <= start + 2**20


def test_peak_memory_does_not_depend_on_timing(fake_mesh: DeviceMesh) -> None:
    """A device that lags behind the host changes nothing in the peak: no record_stream, no events queried."""
    model = shard(build(), fake_mesh)
    x = torch.randn(4, WIDTH, device="cuda")
    peaks = []
    for delay in (0, 20_000_000, 0):
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda._sleep(delay)
            model(x).sum().backward()
            model.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(peaks)) == 1


def test_steps_end_with_nothing_gathered(fake_mesh: DeviceMesh) -> None:
    """After a step, also of a unit run on its own first, every full buffer and message has given its memory back."""
    model = shard(build(), fake_mesh)
    x = torch.randn(4, WIDTH, device="cuda")
    model[0](x).sum().backward()
    for _ in range(3):
        model(x).sum().backward()
    torch.cuda.synchronize()
    assert all(not bucket.full_bytes for block in model for bucket in unit_of(block).buckets)


def test_nccl_group_call_moves_match_single_calls() -> None:
    """One rank's NCCL group call with several moves gives what each collective alone gives."""
    script = """
    import torch, torch.distributed as dist
    from fullshard.transport import Move, NcclTransport
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    transport = NcclTransport(dist.group.WORLD)
    pieces = [torch.randn(n, device="cuda") for n in (16, 4096, 300000)]
    moves = [Move(p, torch.zeros_like(p)) for p in pieces]
    for work in transport.gather(moves, "unit"): work.wait()
    assert all(torch.equal(m.piece, m.region) for m in moves)
    moves = [Move(torch.zeros_like(p), p) for p in pieces]
    for work in transport.reduce(moves, "unit"): work.wait()
    assert all(torch.equal(m.piece, m.region) for m in moves)
    dist.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
