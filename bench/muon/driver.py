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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import Contestant, fake_group
from bench.muon.worker import CONTESTANTS, FULLSHARD, GATHER, ONE_ROUND, Matrices, shapes_of
from bench.report import column
from bench.statistics import paired_spread, spread
from bench.teams import Launch, Teams
from bench.turns import take_turns
from fullshard import fully_shard
from fullshard.optim.muon.matrix_optimizer import ROUND_BYTES
from fullshard.optim.muon.muon import Muon

TITLE = "A step of Muon"
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


def compete(options: Options) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Seconds per round, ratio and difference by contestant; and who could not run.

    Raises:
        RuntimeError: Contestants computed something else; says which.
    """
    told = {name: getattr(options, name) for name in ("ranks", "threads", "width", "blocks", "round_bytes")}
    with tempfile.TemporaryDirectory() as folder, Teams(Path(folder)) as teams:
        teams.start(Launch.of(Contestant("muon", "muon"), "bench.muon.worker", Path(folder), **told))

        def ask(do: str, name: str) -> list[Any]:
            answers = teams.ask("muon", do, name=name)
            if answers is None:
                raise RuntimeError(f"{do} of {name}: {teams.failures['muon']}")
            return answers

        made = {name: ask("make", name)[0] for name in CONTESTANTS}
        failures = {name: answer["failed"] for name, answer in made.items() if answer}
        able = [name for name in CONTESTANTS if name not in failures]
        # The slowest rank counts.
        seconds = take_turns({name: lambda name=name: max(ask("step", name)) for name in able}, options.rounds)
        differences = {name: ask("difference", name)[0] for name in able}
    wrong = {name: differences[name] for name in EXACT if differences.get(name) != 0}
    if wrong:
        raise RuntimeError(f"parameters differ from the plain contestant's: {wrong}")
    contestants: dict[str, dict[str, Any]] = {
        name: {
            "seconds": times,
            "median_seconds": spread(times).median,
            "ratio_to_gather": paired_spread(times, seconds[GATHER]).as_json(),
            "difference": differences[name],
        }
        for name, times in seconds.items()
    }
    return contestants, failures


def traffic_of(ranks: int) -> dict[str, float]:
    """GB that the busiest rank and a mean one send per step of the large model, the bounds, and the balance of work."""
    with fake_group(ranks):
        with torch.device("meta"):
            model = Matrices([torch.empty(shape) for shape in LARGE * LARGE_BLOCKS])
        fully_shard(model)
        optimizer = Muon(list(model.parameters()))
        sent, loads = [0] * ranks, [0.0] * ranks
        for exchanged in optimizer.plan().rounds:
            for matrix, owner in zip(exchanged.matrices, exchanged.owner_ranks, strict=True):
                loads[owner] += optimizer.work(matrix.shape, optimizer.param_groups[0])
                for rank, shard in enumerate(matrix.shards):
                    elements = matrix.numel - shard.numel if rank == owner else shard.numel
                    sent[rank] += elements * exchanged.dtype.itemsize
        rounds = len(optimizer.plan().rounds)
    elements = sum(rows * columns for rows, columns in LARGE) * LARGE_BLOCKS
    mean, bound = sum(sent) / ranks / 1e9, 2 * 2 * elements * (ranks - 1) / ranks**2 / 1e9
    return {
        "mean": mean,
        "busiest": max(sent) / 1e9,
        "bound": bound,
        "mean_over_bound": mean / bound,
        "gather": 2 * elements * (ranks - 1) / ranks / 1e9,
        "balance": max(loads) * ranks / sum(loads),
        "rounds": rounds,
    }


def tables(contestants: Mapping[str, Any], traffic: Mapping[str, Any]) -> tuple[str, str]:
    """Times with ratios to gathering everything; and bytes, one row per group size."""
    steps = (
        column("step, ms", "median_seconds", spec=".0f", scale=1e3),
        column("/ gather", "ratio_to_gather"),
        column("largest difference from plain", "difference", spec=".1g"),
    )
    gigabytes = (
        *(column(f"{key}, GB", key, spec=".3f") for key in ("mean", "busiest", "bound")),
        column("mean / bound", "mean_over_bound", spec=".4f"),
        column("gather, GB", "gather"),
        column("work / mean", "balance", spec=".3f"),
        column("rounds", "rounds", spec=".0f"),
    )
    return report.table("contestant", contestants, steps), report.table("ranks", traffic, gigabytes)


def panels(contestants: Mapping[str, Any]) -> list[report.Bars]:
    """Times of steps."""
    return report.bars(contestants, {"time / gathering everything": ("ratio_to_gather",)})


def run(options: Options) -> None:
    """Compare a step of Muon with owners to one in which every rank gathers everything."""
    contestants, failures = compete(options)
    traffic = {str(size): traffic_of(size) for size in GROUP_SIZES}
    steps, gigabytes = tables(contestants, traffic)
    matrices = len(shapes_of(options.width, options.blocks))
    paragraphs = [
        f"{matrices} matrices of a GPT of width {options.width} on {options.ranks} gloo ranks, {options.threads} "
        f"thread each, rounds of {options.round_bytes / 2**20:g} MiB per owner; {options.rounds} rounds of turns. "
        "Ratios: median (quartiles).",
        steps,
        *report.could_not_run(failures),
        "Bytes that a rank sends per step, bf16, from the plans of optimizers on fake groups, the matrices of a 7B "
        f"Llama (6.5 billion elements), rounds of {ROUND_BYTES / 2**20:g} MiB per owner. Bound: 2 b P (N-1)/N^2. "
        "In addition, each message has one number per matrix. work / mean: of the rank with the most work.",
        gigabytes,
    ]
    report.publish(
        options,
        "muon",
        {"settings": options.settings, "contestants": contestants, "not_run": failures, "traffic": traffic},
        paragraphs,
        title=TITLE,
        panels=panels(contestants),
    )
