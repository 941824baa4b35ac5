"""Steps on a modelled network, run with the host's own work and tensors on a CPU, and planned from figures alone.

A cell is one of ``bench/overlap``: eight units that compute for a given time, one rank of many, a network. Its plan
knows these seconds and the network, and nothing of the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench import report
from bench.overlap.cells import HOST, STREAMS, Cell, even_units, measure, network_of
from bench.overlap.systems import SYSTEMS, modelled_model
from bench.statistics import spread
from fullshard import fully_shard
from fullshard.planning.cluster import Cluster, Link
from fullshard.planning.dry_run import Step, dry_run
from fullshard.planning.simulation.network import Network

OURS = SYSTEMS[0]
RANKS, RATIOS = (8, 64, 1024), (0.3, 1.0, 3.0)
TARGET = 0.03
ROUNDS = 5


def modelled_cells() -> list[Cell]:
    """Nine with streams, as on an accelerator, and nine whose host computes itself."""
    chosen = itertools.product((STREAMS, HOST), RANKS, RATIOS)
    return [Cell("even", even_units(), device, ranks, ratio) for device, ranks, ratio in chosen]


def cluster_like(cell: Cell, network: Network) -> Cluster:
    """A cell's network as a cluster on which nothing else takes time: one node, so that there is one link."""
    link = Link(network.bandwidth, network.latency, network.hop_latency)
    at_once = float("inf")
    return Cluster(
        "modelled",
        "accelerator" if cell.device == STREAMS else "cpu",
        memory=at_once,
        flops={"float32": at_once},
        bandwidth=at_once,
        node=cell.ranks,
        inner=link,
        backend=network.like,
        op_seconds=0.0,
        kernel_seconds=0.0,
    )


def _sharded(cell: Cell) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The units of a cell on the meta device; what they take is added on the device of the dry run."""
    group: Any = dist.group.WORLD
    with torch.device("meta"):
        model = modelled_model(cell.units, group.fabric.device)
    mesh = init_device_mesh("meta", (cell.ranks,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    return sharded, torch.optim.SGD(
        sharded.parameters(), lr=0.0
    )  # a run's step has no optimizer; here it takes no time


def planned(cell: Cell) -> Step:
    """The plan of a cell."""
    network, _ = network_of(cell)
    inputs = torch.zeros(4, device="meta", requires_grad=True)
    cluster = cluster_like(cell, network)
    return dry_run(partial(_sharded, cell), lambda model: model(inputs).sum(), cluster=cluster, ranks=cell.ranks)


def compare(cells: Sequence[Cell], rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Seconds of a step of every cell, run and planned."""
    for cell in cells:
        plan = planned(cell)
        ran = measure(cell, [OURS], rounds).steps[OURS.name]
        print(
            f"{cell.device}, {cell.ranks} ranks, link/computation {cell.ratio:g}: {1e3 * spread(ran).median:.2f} ms, "
            f"planned {1e3 * plan.seconds:.2f}",
            flush=True,
        )
        key = {"device": cell.device, "ranks": cell.ranks, "link_over_computation": cell.ratio}
        yield {**key, "run_seconds": ran, "plan_seconds": plan.seconds}


def error_of(cell: Mapping[str, Any]) -> float:
    """How far the plan is above the median of the runs, as a share of that."""
    return float(cell["plan_seconds"] / spread(cell["run_seconds"]).median - 1)


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    header = ["ranks", "link / computation", "run, ms", "plan, ms", "error"]
    rows = []
    for cell in cells:
        times = [1e3 * spread(cell["run_seconds"]).median, 1e3 * cell["plan_seconds"]]
        cells_of_row = [f"{cell['ranks']:,}", f"{cell['link_over_computation']:g}", *(f"{each:.2f}" for each in times)]
        rows.append([*cells_of_row, f"{100 * error_of(cell):+.2f} %"])
    return report.markdown_table(header, rows)


def paragraphs(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page says."""
    streams, host = ([cell for cell in cells if cell["device"] == device] for device in (STREAMS, HOST))
    found = []
    if streams:
        worst = max(abs(error_of(cell)) for cell in streams)
        hidden = 1e3 * max(spread(cell["run_seconds"]).median - cell["plan_seconds"] for cell in streams)
        found += [
            "Step on a modelled network, with streams as on an accelerator: `python -m bench overlap` runs the engine "
            "on tensors, with the host's own time; the plan knows the seconds of the units' computation, the bandwidth "
            "and the latency. Eight equal units, 10 ms forward and 20 ms backward each; link time / computation at 8 "
            "ranks.",
            _table(streams),
            f"The plan is off by {100 * worst:.2f} % at most in {len(streams)} cells (target: {100 * TARGET:.0f} %)"
            f"{'' if worst <= TARGET else ' (missed)'}. Run and plan share the model of the network. So this checks "
            "that the engine communicates and waits in the same order on the meta device as on tensors, and that all "
            f"but {hidden:.1f} ms of the host's time, which this plan leaves out, is hidden. It does not check the "
            "model of the network.",
        ]
    if host:
        worst = max(abs(error_of(cell)) for cell in host)
        missed = sum(abs(error_of(cell)) > TARGET for cell in host)
        beyond = 1e3 * spread([spread(cell["run_seconds"]).median - cell["plan_seconds"] for cell in host]).median
        found += [
            "The same as on CPU ranks, where the host itself computes and its own work adds to the step:",
            _table(host),
            f"Here the plan is off by {100 * worst:.2f} % at most, and by more than {100 * TARGET:.0f} % in {missed} "
            f"of {len(host)} cells. A run takes {beyond:.1f} ms more in the median: the processor time of everything "
            "beside the modelled computation, such as hooks, autograd and allocation. The plan's figures do not have "
            "it.",
        ]
    return found
