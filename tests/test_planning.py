"""Plans: memory and time by dry runs of the engine, clusters, the caching allocator, bad input, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.simulators.silent import silent_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

import fullshard
from fullshard import FullshardError
from fullshard.cli import app
from fullshard.planning.caching import MIB, CachingAllocator, reserved_bytes
from fullshard.planning.cluster import PRESETS, Cluster, Link, cluster_of
from fullshard.planning.dry_run import dry_run
from fullshard.planning.ledger import Ledger
from fullshard.planning.plan import Choices
from fullshard.planning.simulation.clocks import SkippingClock
from fullshard.planning.simulation.streams import SimulatedDevice, SimulatedLane
from models import Block

ROOT = Path(__file__).parents[1]
WIDTH = 512


def net(blocks: int = 4) -> nn.Module:
    """Blocks on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(Block(WIDTH) for _ in range(blocks)))


def planned(model: nn.Module | None = None, rows: int = 32, **options: Any) -> Any:
    """A plan of a small model."""
    chosen = {"ranks": 8, "cluster": "h100", **options}
    return fullshard.plan(net() if model is None else model, torch.empty(rows, WIDTH), **chosen)


def test_parts_of_memory() -> None:
    """Parameters and state are shares of the ranks; two units are unsharded; the parts at the peak add up to it."""
    model = net(blocks=12)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    plan = planned(model)
    parts = plan.step.peak.parts
    assert sum(parts.values()) == plan.allocated_bytes
    assert parts["parameters"] == nbytes / 8
    assert 2 * nbytes / 8 <= parts["optimizer state"] < 2 * nbytes / 8 + 4096  # and the number of steps
    assert nbytes / 6 <= parts["unsharded parameters"] <= nbytes / 3
    assert plan.step.resting == pytest.approx(parts["parameters"] + parts["optimizer state"], rel=1e-3)
    assert not any(parameter.grad is not None for parameter in model.parameters())  # the model stays as it is
    assert plan.reserved_bytes >= plan.allocated_bytes and plan.fits
    assert not dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, memory=1000.0)).fits


def test_what_choices_change() -> None:
    """Recomputation saves activations and costs operations; bf16 halves unsharded parameters; replicas hold more."""
    base = planned(rows=4096)
    again = planned(rows=4096, choices={"checkpoint_activations": True})
    assert again.allocated_bytes < base.allocated_bytes
    assert again.step.flops == pytest.approx(7 / 6 * base.step.flops, rel=0.01)  # a block's last layer is not needed
    half = planned(choices=Choices(mixed_precision="bf16"))
    assert half.step.peak.parts["unsharded parameters"] < planned().step.peak.parts["unsharded parameters"]
    hybrid = planned(choices={"replicas": 2})
    assert hybrid.step.resting == pytest.approx(2 * planned().step.resting, rel=0.01)
    assert "mesh = init_device_mesh" in hybrid.table() and "(2, 4)" in hybrid.choices.code(8)
    twice = planned(choices={"microbatches": 2})
    assert twice.step.flops == pytest.approx(planned().step.flops)  # of two halves of the batch


def test_time_follows_the_figures() -> None:
    """A slow network is exposed, a fast one is not; a host that issues slowly takes the time; parts add up."""
    fast = dataclasses.replace(PRESETS["h100"], op_seconds=0.0, inner=Link(1e15))
    assert planned(cluster=fast).exposed_seconds < 1e-5  # packing
    slow = dataclasses.replace(fast, inner=Link(1e6))
    plan = planned(cluster=slow)
    assert plan.exposed_seconds == pytest.approx(plan.step.seconds - plan.step.computation, rel=0.02)
    received = sum(parameter.nbytes for parameter in net().parameters()) * 7 / 8
    assert plan.step.seconds > 2 * received / 1e6  # all-gathers of forward and backward, less kept units; reductions
    host = dataclasses.replace(fast, op_seconds=1e-3)
    assert planned(cluster=host).step.seconds > 0.05
    assert sum(segment.seconds for segment in plan.step.trace.segments[0]) == pytest.approx(plan.step.seconds, rel=0.01)


def test_caching_allocator() -> None:
    """Sizes are rounded, segments are reserved by size, free blocks are split and joined, and kept."""
    for nbytes, reserved in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB, 10), (11 * MIB + 1, 12), (100 * MIB, 100)):
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(nbytes))
        assert allocator.reserved == reserved * MIB, nbytes
    allocator = CachingAllocator()
    first = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB  # one segment, split
    for chunk in (first[1], first[3], first[2], first[0]):
        allocator.free(chunk)
    allocator.allocate(9 * MIB)  # of the joined block
    assert allocator.reserved == 20 * MIB
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 32 * MIB
    size = 30 * MIB
    assert reserved_bytes([(0, size, 0), (0, -size, 0), (1, size, 0)]) == size
    assert reserved_bytes([(0, size, 0), (1, size, 0)]) == 2 * size
    assert reserved_bytes([(0, size, 0), (0, -size, 0), (1, size, 1)]) == 2 * size  # of another stream
    assert reserved_bytes([(0, size, 1), (0, -size, 0), (1, size, 1)]) == size  # it goes back to where it is from


def test_ledger() -> None:
    """Storages are seen once, with their ends and resizes; the peak is where most are alive."""
    ledger = Ledger(lambda: 0, lambda: ("kind", ("phase", "unit")))
    one, two = torch.empty(10, device="meta"), torch.empty(20, device="meta")
    with ledger.resizes():
        ledger.see(one)
        assert ledger.knows(one.view(5, 2)) and not ledger.knows(two)
        ledger.see(two)
        two.untyped_storage().resize_(0)
        del one
        two.untyped_storage().resize_(80)
    assert [change.nbytes for change in ledger.changes] == [40, 80, -80, -40, 80]
    peak = ledger.peak(0)
    assert (peak.nbytes, dict(peak.parts), peak.where) == (120, {"kind": 120}, ("phase", "unit"))
    assert ledger.peak(2).nbytes == 120 and ledger.peak(3).nbytes == 80
    assert ledger.alive() == [(1, 80)]


def test_streams_of_allocations() -> None:
    """An allocation is of the current stream, and so is one of a communication stream that waits for an event."""
    device = SimulatedDevice(SkippingClock(lambda: 0.0))
    lane, seen = SimulatedLane(device), []

    def note() -> None:
        seen.append(device.current.number)

    lane.issue(list, note, allocate=note)
    lane.issue(list, note, allocate=note, after=device.current.record_event())
    assert seen == [0, 1, 1, 1] and SimulatedLane(device)._stream.number == 2


def test_operations_on_dtensors() -> None:
    """They take what this rank has of them."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Choices().shard(net(), 8, "meta")
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module) -> torch.Tensor:
        held[:] = [torch.zeros_like(parameter) for parameter in model.parameters()]
        return model(torch.empty(32, WIDTH, device="meta")).mean()

    held: list[Any] = []
    step = dry_run(build, loss, cluster=PRESETS["h100"], ranks=8)
    whole = sum(parameter.nbytes for parameter in net().parameters())
    assert all(isinstance(each, DTensor) for each in held)
    assert step.resting == pytest.approx(2 * whole / 8, rel=0.01)


def test_clusters(tmp_path: Path) -> None:
    """Presets, files that change one, links within and between nodes, and what is no cluster."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h100"\n[efficiency]\nmatmul = 0.5\n[inner]\nbandwidth = 1e9\n'
        "[outer.4]\nbandwidth = 1e8\nlatency = 1e-3\n"
    )
    cluster = cluster_of(path)
    assert (cluster.name, cluster.efficiency, cluster.node) == ("mine", {"matmul": 0.5}, 8)
    assert cluster.link(8) == Link(1e9)
    assert cluster.link(32) == Link(1e8, 1e-3)
    assert cluster.link(4, stride=8).bandwidth == 1e8 / 8  # one rank of each node
    h100 = PRESETS["h100"]
    assert h100.link(16).latency < h100.link(24).latency < h100.link(32).latency  # interpolated
    assert h100.link(1024).latency == 2 * h100.link(512).latency
    for nodes, speed in {1: 249.85e9, 8: 69.0e9, 64: 11.04e9}.items():  # as measured
        link = h100.link(8 * nodes)
        assert link.latency + 256e6 / link.bandwidth == pytest.approx(20e-6 + 256e6 / speed)
    assert h100.link(8, stride=8).latency == h100.link(64).latency / 8  # a ring of one rank of each node
    assert cluster_of(h100) is h100
    for text, message in {
        "no = [": "does not describe a cluster",
        'base = "nothing"': "base: expected one of h100",
        "unknown = 1": "unknown unknown; known are name",
        'base = "h100"\nmemory = -1': "expected positive memory",
    }.items():
        path.write_text(text)
        with pytest.raises(FullshardError, match=message):
            cluster_of(path)
    with pytest.raises(FullshardError, match=r"expected one of h100, .* or a TOML file, found 'nosuch'"):
        cluster_of("nosuch")


def look_at_a_value(_: nn.Module, arguments: Any) -> None:
    arguments[0].sum().item()


def test_bad_input() -> None:
    """Errors say what was expected and found, and leave no process group behind."""
    with pytest.raises(FullshardError, match="expected a model on the meta device, found 16 parameters and buffers"):
        planned(nn.Sequential(*(Block(WIDTH) for _ in range(4))))
    model = net(1)
    model[0].register_forward_pre_hook(look_at_a_value)
    with pytest.raises(FullshardError, match="the model needs values to run"):
        planned(model)
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="expected ranks that are a multiple of replicas, found 8 and 3"):
        planned(choices={"replicas": 3})
    with silent_ranks(4), pytest.raises(FullshardError, match="expected no process group, found one"):
        planned()


@torch.library.custom_op("planning_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operation without a rule."""
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: 2 * gradient)


def test_operations_without_a_rule_are_named() -> None:
    """They take the time of their bytes."""
    model = net(1)
    model[0].register_forward_hook(lambda module, arguments, output: twice(output))
    assert "planning_test.twice.default take the time of the bytes" in planned(model).table()


class Grouped(nn.Module):
    """Attention whose keys and values have fewer heads, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)[None]
        query = self.query(x).unflatten(-1, (8, -1)).transpose(1, 2)
        keys, values = self.keys(x).unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, 1)
        return nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


def test_fused_kernels() -> None:
    """Attention with grouped keys is one kernel; an RMS norm is on accelerators, and saves its input and a number."""
    with torch.device("meta"):
        model = nn.Sequential(Grouped())
    rows = 4096
    fused, several = (
        planned(model, rows=rows, ranks=1, cluster=cluster).step.peak.parts["activations"]
        for cluster in ("h100", "cpu")
    )
    # input and output of the norm, of the query, of keys and values, of attention and its statistics, in fp32
    expected = 4 * rows * WIDTH * (1 + 1 + 0.5 + 1) + 4 * rows * (8 + 2)
    assert fused == pytest.approx(expected, rel=0.02)
    assert several > expected + 3.9 * rows * WIDTH


def test_optimizers_step_all_tensors_at_once() -> None:
    """On accelerators AdamW has temporary tensors of all shards, as foreach has; on CPUs those of one."""
    numel = sum(parameter.numel() for parameter in net(8).parameters())

    def most(cluster: str) -> int:
        plan = planned(net(8), ranks=1, cluster=cluster)
        step = [change.nbytes for _, change in plan.step.changes if change.where[0] == "optimizer step"]
        return max(itertools.accumulate(step))

    assert most("h100") >= 4 * numel > 2 * most("cpu")


def test_efficiencies_of_kinds() -> None:
    """Each kind of operation takes the time of its own share of what is specified."""
    with torch.device("meta"):
        model = nn.Sequential(Grouped(), nn.GELU())

    def seconds(**shares: float) -> float:
        cluster = dataclasses.replace(PRESETS["h100"], op_seconds=0.0, kernel_seconds=0.0, efficiency=shares)
        return float(planned(model, rows=4096, ranks=1, cluster=cluster).step.computation)

    fast = {"matmul": 1e6, "attention": 1e6, "memory": 1e6, "function": 1e6}
    each = {kind: seconds(**{**fast, kind: 1.0}) for kind in fast}
    assert all(taken > 100 * seconds(**fast) for taken in each.values()), each
    flops = 14 * 8 * 4096 * 4096 * 64  # there and back, not halved for causality
    assert each["attention"] == pytest.approx(flops / 67e12, rel=0.02)


def test_the_command(tmp_path: Path) -> None:
    """A table and files; exit code 1 if it does not fit, 2 for bad input."""
    file = tmp_path / "model.py"
    code = ("from torch import nn", "import torch", "def build():", "    return nn.Linear(64, 64), torch.empty(4, 64)")
    file.write_text("\n".join(code))
    arguments = ["plan", f"{file}:build", "--ranks", "4"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "Memory of a rank at its peak" in done.output, done.output
    stored = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert (
        stored["memory"]["fits"] and stored["ranks"] == 4 and (tmp_path / "out" / "plan.txt").read_text() in done.output
    )
    small = tmp_path / "small.toml"
    small.write_text('base = "h100"\nmemory = 1000.0\n')
    assert CliRunner().invoke(app, [*arguments, "--cluster", str(small)]).exit_code == 1
    wrong = CliRunner().invoke(app, ["plan", "nothing", "--ranks", "4"])
    assert wrong.exit_code == 2 and "expected module:function" in wrong.output


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python runs as it stands, and its cluster is one."""
    page = (ROOT / "docs" / "how_to" / "planning.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/how_to/planning.md", "exec"), {"__name__": "page"})
    assert "Memory of a rank at its peak, in the backward of layers.6" in capsys.readouterr().out
    assert isinstance(PRESETS["h100"], Cluster)
