"""Traces and the watchdog: whether they name what is so, and what they cost.

1. A rank is delayed in the backward of one unit, or as it issues that unit's reduction, and a trace has to name rank,
   unit and phase; and in turns with these it has to name nothing when nobody is delayed.
2. Steps with and without a trace in turns, and how much of the time of the traced steps its segments account for.
3. What the watchdog notes in a step, counted, times what each note costs, and what its thread takes.
4. On the modelled network the exposed time by a trace, beside that of the simulation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.contestants import Contestant
from bench.diagnosis.modelled import compare
from bench.diagnosis.worker import DELAYED_UNIT, IN_BACKWARD, IN_REDUCTION
from bench.environment import REPOSITORY
from bench.report import column
from bench.statistics import paired_spread, spread
from bench.teams import Launch, Teams
from bench.turns import take_turns

PAGE = REPOSITORY / "docs" / "performance" / "diagnosis.md"
DELAY = 0.05  # seconds
LATE_RANK = 1
NOBODY = "nobody"
SHOWN_RANKS = 64  # of the modelled network
SMALL = {"width": 256, "blocks": 8, "tokens": 512}
LARGE = {"width": 512, "blocks": 6, "tokens": 256}
TARGETS = {"trace": 0.01, "watchdog": 0.005, "exposed": 0.02, "parts": 0.03}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All of it, on two ranks: some eight minutes."""

    rounds: int = 20
    steps_per_round: int = 8
    ranks: tuple[int, ...] = (8, 64, 1024)
    document: Path = PAGE


class _Team:
    """Two ranks that do what they are asked together."""

    def __init__(self, teams: Teams, name: str, folder: Path, shape: Mapping[str, int]) -> None:
        self._teams, self._name = teams, name
        teams.start(Launch.of(Contestant(name, name), "bench.diagnosis.worker", folder, ranks=2, shape=dict(shape)))

    def ask(self, do: str, **request: object) -> list[Any]:
        """Every rank's answer."""
        answers = self._teams.ask(self._name, do, **request)
        if answers is None:
            raise RuntimeError(f"{do}: {self._teams.failures[self._name]}")
        return answers


def named(answers: Sequence[Sequence[Sequence[Any]]], late: bool) -> dict[str, bool]:
    """Of one run: whether all ranks' tables name the delay, and whether any names something else."""
    right = [sum(tuple(each[1:]) == (LATE_RANK, "backward", DELAYED_UNIT) for each in answer) for answer in answers]
    others = [len(answer) - (count if late else 0) for answer, count in zip(answers, right, strict=True)]
    return {"named": late and all(right), "others": any(others)}


def late_runs(options: Options) -> dict[str, dict[str, int]]:
    """How often the delay was named, by where it was."""
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder, Teams(Path(folder)) as teams:
        team = _Team(teams, "late", Path(folder), SMALL)

        def run(where: str) -> dict[str, bool]:
            request = {"where": IN_BACKWARD if where == NOBODY else where, "rank": LATE_RANK}
            seconds = 0.0 if where == NOBODY else DELAY
            return named(team.ask("late", steps=options.steps_per_round, seconds=seconds, **request), seconds > 0)

        places = (IN_BACKWARD, IN_REDUCTION, NOBODY)
        runs = take_turns({where: lambda where=where: run(where) for where in places}, options.rounds)
    for where, of in runs.items():
        found[where] = {"runs": len(of), **{key: sum(each[key] for each in of) for key in ("named", "others")}}
    return found


def costs(options: Options) -> dict[str, Any]:
    """What a trace and the watchdog cost."""
    with tempfile.TemporaryDirectory() as folder, Teams(Path(folder)) as teams:
        team = _Team(teams, "cost", Path(folder), LARGE)
        asked = {"count": options.steps_per_round}
        turns = take_turns(
            {name: lambda traced=traced: team.ask("steps", traced=traced, **asked)
             for name, traced in (("off", False), ("on", True))}, options.rounds)  # fmt: skip
        watched = team.ask("watched", steps=options.steps_per_round)[0]
    seconds = {name: [max(answer["seconds"] for answer in each) for each in of] for name, of in turns.items()}
    return {
        "step_seconds": {name: spread(of).median / options.steps_per_round for name, of in seconds.items()},
        "trace_ratio": paired_spread(seconds["on"], seconds["off"]).as_json(),
        "parts": spread([answer["parts"] for each in turns["on"] for answer in each]).as_json(),
        "watchdog": watched,
        "watchdog_share": watched["noted"] / watched["step"] + watched["thread_per_second"],
    }


def paragraphs(result: Mapping[str, Any]) -> list[str]:
    """What the page says."""
    late, cost, cells = result["late"], result["costs"], result["cells"]
    runs = ("runs", "named", "others")
    heads = ("runs", "named", "something else named")
    table = report.table(
        "rank 1 is late", late, [column(head, key, spec=".0f") for head, key in zip(heads, runs, strict=True)]
    )
    rows = [
        [
            f"{cell['device']}, {cell['system']}",
            f"{cell['ranks']}",
            f"{cell['link_over_computation']:g}",
            *(f"{1e3 * cell[key]:.2f}" for key in ("step_seconds", "exposed_seconds", "traced_seconds")),
            f"{cell['traced_seconds'] / cell['exposed_seconds']:.4f}",
        ]
        for cell in cells
        if cell["ranks"] == min((each["ranks"] for each in cells), key=lambda ranks: abs(ranks - SHOWN_RANKS))
    ]
    header = ["", "ranks", "link / computation", "step, ms", "exposed, ms", "by the trace, ms", "ratio"]
    ratio, parts = report.spread_of(cost["trace_ratio"]), report.spread_of(cost["parts"])
    watched, share = cost["watchdog"], cost["watchdog_share"]
    worst = max(abs(cell["traced_seconds"] / cell["exposed_seconds"] - 1) for cell in cells)
    figures = {
        "a trace adds to a step": (ratio.median - 1, TARGETS["trace"]),
        "the watchdog's share of a step": (share, TARGETS["watchdog"]),
        "segments of a trace differ from the wall time by": (abs(parts.median - 1), TARGETS["parts"]),
        "exposed time differs from the simulation by at most": (worst, TARGETS["exposed"]),
    }
    return [
        f"Two gloo ranks, a GPT of width {SMALL['width']} with {SMALL['blocks']} blocks, traces of "
        f"{result['settings']['steps_per_round']} steps. Rank {LATE_RANK} sleeps for {1e3 * DELAY:.0f} ms in each "
        f"step: in the backward of `{DELAYED_UNIT}`, while the reduction before it is under way, or as it issues the "
        "reduction of that unit. A run counts as named if all ranks' tables name rank, unit and phase. Something else "
        "is another rank or unit, of at least 5 ms.",
        table,
        f"At width {LARGE['width']}, {LARGE['blocks']} blocks: a traced step takes {ratio:.3f} of one that is not, in "
        f"turns. The segments of a trace add up to {parts:.4f} of the wall time of its steps.",
        f"The watchdog records {watched['notes']:.0f} events in a step, which takes {1e6 * watched['noted']:.0f} us of "
        f"{1e3 * watched['step']:.0f} ms, and its thread {1e3 * watched['thread_per_second']:.2f} ms of each second.",
        "Exposed communication on the [modelled network](../design/modelled_network.md), on host clocks and on streams "
        "as of an accelerator: step time less computation by the simulation, and the waits in a trace of that step. "
        f"Of {len(cells)} cells, {len(rows)} of which are shown, the worst differs by {100 * worst:.2f} %.",
        report.markdown_table(header, rows),
        *report.against_targets(
            f"{what} {100 * value:.2f}% of at most {100 * limit:g}%{'' if value <= limit else ' (missed)'}"
            for what, (value, limit) in figures.items()
        ),
    ]


def run(options: Options) -> None:
    """Delay a rank, trace, count, and set beside the simulation."""
    torch.set_num_threads(1)
    cells = [cell for ranks in options.ranks for cell in compare(ranks)]
    print(f"{len(cells)} cells of the modelled network", flush=True)
    late = late_runs(options)
    print(late, flush=True)
    figures = {"settings": options.settings, "late": late, "costs": costs(options), "cells": cells}
    report.publish(options, "diagnosis", figures, paragraphs(figures))
