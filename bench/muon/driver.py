"""Muon on sharded matrices: owners compute, against every rank gathering everything.

One step of the optimizer alone, on the matrices of a GPT with gradients that are there already:

``fullshard``            each matrix orthogonalized by one rank, exchanges overlapped in rounds
``fullshard-one-round``  the same without overlap: everything travels, is computed, and travels back
``gather``               every rank gathers every matrix (bf16) and orthogonalizes all of them, one after another
``torch-dtensor``        ``torch.optim.Muon`` on the DTensors, which gathers as its operators need it
``plain``                ``torch.optim.Muon`` on whole matrices on every rank: the computation of ``gather`` alone

Contestants live in the same two gloo processes and take turns; ratios are paired per round. Their parameters have to
have the same bits in the end (``torch-dtensor`` sums in another order: almost). Then the bytes of a step, from
optimizers on fake process groups of several sizes with the matrices of a 7-billion-parameter model on the meta
device, beside the bounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import fake_group, system_alone
from bench.muon.worker import CONTESTANTS, FULLSHARD, GATHER, ONE_ROUND, Matrices, shapes_of
from bench.statistics import Spread, paired_spread, spread
from bench.teams import Launch, Team
from bench.turns import take_turns
from fullshard import fully_shard
from fullshard.optim.muon.matrix_optimizer import ROUND_BYTES
from fullshard.optim.muon.muon import Muon

EXACT = (FULLSHARD, ONE_ROUND, GATHER)  # whose parameters have the bits of the plain ones
GROUP_SIZES = (2, 8, 64)
# A 7B Llama: 32 blocks of four attention matrices and three of the MLP.
LARGE = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
LARGE_BLOCKS = 32


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Matrices of a small GPT on two gloo processes."""

    width: int = option(512, least=8)
    blocks: int = 4
    ranks: int = 2
    rounds: int = 9
    threads: int = 1
    round_bytes: int = option(2 * 1024 * 1024, "Bytes per owner of a round, of the contestant with rounds.")


def compete(options: Options) -> dict[str, Any]:
    """Seconds per contestant and round, differences, and who could not run."""
    told = {name: getattr(options, name) for name in ("ranks", "threads", "width", "blocks", "round_bytes")}
    with tempfile.TemporaryDirectory() as folder:
        team = Team(Launch.of(system_alone("muon"), "bench.muon.worker", Path(folder), **told), Path(folder))

        def slowest(name: str) -> float:
            return max(team.ask("step", name=name))

        try:
            team.started()
            made = {name: team.ask("make", name=name)[0] for name in CONTESTANTS}
            failures = {name: answer["failed"] for name, answer in made.items() if answer}
            able = [name for name in CONTESTANTS if name not in failures]
            seconds = take_turns({name: partial(slowest, name) for name in able}, options.rounds)
            differences = {name: team.ask("difference", name=name)[0] for name in able}
        finally:
            team.end()
    return {"seconds": seconds, "differences": differences, "failures": failures}


def check(result: Mapping[str, Any]) -> None:
    """Refuse to report times of contestants that computed something else.

    Raises:
        RuntimeError: Says which.
    """
    wrong = {name: result["differences"][name] for name in EXACT if result["differences"].get(name) != 0}
    if wrong:
        raise RuntimeError(f"parameters differ from the plain contestant's: {wrong}")


def step_table(seconds: Mapping[str, Sequence[float]], differences: Mapping[str, float]) -> str:
    """Times, and ratios to gathering everything."""
    rows = []
    for name, times in seconds.items():
        ratio = f"{paired_spread(times, seconds[GATHER]):.2f}" if GATHER in seconds else "-"
        rows.append([name, f"{1e3 * spread(times).median:.0f}", ratio, f"{differences[name]:.1g}"])
    return report.markdown_table(["contestant", "step, ms", "/ gather", "largest difference from plain"], rows)


def traffic_of(ranks: int) -> dict[str, float]:
    """GB that the busiest rank and a mean one send per step of the large model, the bounds, and the balance of work."""
    with fake_group(ranks):
        with torch.device("meta"):
            model = Matrices([torch.empty(shape) for shape in LARGE * LARGE_BLOCKS])
        fully_shard(model)
        optimizer = Muon(list(model.parameters()))
        sent = [optimizer.traffic(rank).total for rank in range(ranks)]
        loads = [0.0] * ranks
        for exchanged in optimizer.plan().rounds:
            for matrix, owner in zip(exchanged.matrices, exchanged.owner_ranks, strict=True):
                loads[owner] += optimizer.work(matrix.shape, optimizer.param_groups[0])
        rounds = len(optimizer.plan().rounds)
    elements = sum(rows * columns for rows, columns in LARGE) * LARGE_BLOCKS
    return {
        "busiest": max(sent) / 1e9,
        "mean": sum(sent) / ranks / 1e9,
        "bound": 2 * 2 * elements * (ranks - 1) / ranks**2 / 1e9,
        "gather": 2 * elements * (ranks - 1) / ranks / 1e9,
        "balance": max(loads) * ranks / sum(loads),
        "rounds": rounds,
    }


def traffic_table(found: Mapping[int, Mapping[str, float]]) -> str:
    """One row per group size."""
    header = ["ranks", "mean, GB", "busiest, GB", "bound, GB", "mean / bound", "gather, GB", "work / mean", "rounds"]
    rows = [
        [
            str(ranks),
            f"{each['mean']:.3f}",
            f"{each['busiest']:.3f}",
            f"{each['bound']:.3f}",
            f"{each['mean'] / each['bound']:.4f}",
            f"{each['gather']:.2f}",
            f"{each['balance']:.3f}",
            f"{each['rounds']:.0f}",
        ]
        for ranks, each in found.items()
    ]
    return report.markdown_table(header, rows)


def run(options: Options) -> None:
    """Compare a step of Muon with owners to one in which every rank gathers everything."""
    result = compete(options)
    check(result)
    traffic = {size: traffic_of(size) for size in GROUP_SIZES}
    seconds, matrices = result["seconds"], len(shapes_of(options.width, options.blocks))
    paragraphs = [
        f"{matrices} matrices of a GPT of width {options.width} on {options.ranks} gloo ranks, {options.threads} "
        f"thread each, rounds of {options.round_bytes / 2**20:g} MiB per owner; {options.rounds} rounds of turns. "
        "Ratios: median (quartiles).",
        step_table(seconds, result["differences"]),
        *report.could_not_run(result["failures"]),
        "Bytes that a rank sends per step, bf16, from the plans of optimizers on fake groups, the matrices of a 7B "
        f"Llama (6.5 billion elements), rounds of {ROUND_BYTES / 2**20:g} MiB per owner. Bound: 2 b P (N-1)/N^2; "
        "beyond it travels one number per matrix and message. Work: of the rank with most, over the mean.",
        traffic_table(traffic),
    ]
    ratios: dict[str, float | Spread] = {
        name: paired_spread(times, seconds[GATHER]) for name, times in seconds.items() if GATHER in seconds
    }
    title = f"A step of Muon on {matrices} matrices, {options.ranks} gloo ranks (whiskers: quartiles)"
    panels = [report.Panel("time / gathering everything", ratios, 1.0)]
    report.publish(
        options,
        "muon",
        {"settings": options.settings, **result, "traffic": {str(size): found for size, found in traffic.items()}},
        paragraphs,
        draw=lambda path: report.plot_bars(path, title, panels),
        image_text="A step of Muon",
    )
