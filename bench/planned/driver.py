"""What plans predict beside what runs do: memory and time of CPU ranks, of modelled networks, and of published GPUs.

``runs``: every configuration is run with each allocation recorded, on two gloo ranks or as rank 0 of a fake group of
64, and planned; both are built by the same function. The other parts have files of their own.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import Contestant
from bench.environment import REPOSITORY
from bench.planned import hosts, modelled, published, timed
from bench.planned.cases import FAKE_RANKS, GLOO_RANKS, Case, memory_cases, plan_of
from bench.statistics import spread
from bench.teams import Launch, Teams
from fullshard.planning.cluster import cluster_of
from fullshard.planning.dry_run import Step

PAGE = REPOSITORY / "docs" / "performance" / "planned.md"
TARGET, MOMENTS = 0.05, 38
WORKER = "bench.planned.worker"
RUNS, TIMED, HOSTS, NETWORK, MEMORY, TIME = "runs", "timed", "hosts", "network", "memory", "time"
PARTS = (RUNS, TIMED, HOSTS, NETWORK, MEMORY, TIME)


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Forty configurations and twelve timed ones, some five minutes each; hosts with slow links (as root), a quarter of
    an hour; eighteen modelled networks, half a minute; published memory, some five minutes; published time,
    some twenty.
    """

    what: tuple[str, ...] = option(PARTS, choices=PARTS)
    width: tuple[int, ...] = (512, 1024)
    document: Path = PAGE


def planned(case: Case) -> Step:
    """The plan of a case, on CPU ranks."""
    backend = "gloo" if case.ranks == GLOO_RANKS else "collective"
    cluster = dataclasses.replace(cluster_of("cpu"), backend=backend)
    return plan_of(case, cluster, steps=3)


def compare(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Peak, its place, and bytes at rest of every case, run and planned."""
    with tempfile.TemporaryDirectory() as folder, Teams(Path(folder)) as teams:
        teams.start(Launch.of(Contestant("gloo", "gloo"), WORKER, Path(folder), ranks=GLOO_RANKS))
        teams.start(Launch.alone(Contestant("fake", "fake"), WORKER, ranks=FAKE_RANKS))
        for case in cases:
            begun = time.monotonic()
            step = planned(case)
            took = time.monotonic() - begun
            answers = teams.ask("gloo" if case.ranks == GLOO_RANKS else "fake", "run", case=dataclasses.asdict(case))
            run = {"error": "its ranks have ended"} if answers is None else answers[0]
            found = {"peak": step.peak.nbytes, "place": list(step.peak.where), "resting": step.resting}
            print(f"{case.name}: {run.get('peak', 0) / 2**20:.2f} MiB, planned {found['peak'] / 2**20:.2f}", flush=True)
            yield {"case": case.name, "run": run, "plan": found, "plan_seconds": took}


def _row(cell: Mapping[str, Any]) -> list[str]:
    run, plan = cell["run"], cell["plan"]
    if "error" in run:
        return [cell["case"], f"cannot run: {run['error']}", "-", "-", "-", "-"]
    places = [" of ".join(filter(None, each["place"])) for each in (run, plan)]
    sizes = [f"{each['peak'] / 2**20:.2f}" for each in (run, plan)]
    return [cell["case"], *sizes, f"{100 * (plan['peak'] / run['peak'] - 1):+.2f} %", *places]


def paragraphs(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page says of memory."""
    ran = [cell for cell in cells if "error" not in cell["run"]]
    errors = [abs(cell["plan"]["peak"] / cell["run"]["peak"] - 1) for cell in ran]
    right = sum(list(cell["plan"]["place"]) == list(cell["run"]["place"]) for cell in ran)
    header = ["GPT of width", "run, MiB", "plan, MiB", "error", "its moment", "planned moment"]
    worst, took = max(errors, default=0.0), [cell["plan_seconds"] for cell in cells]
    met = "" if worst <= TARGET and right >= MOMENTS else " (missed)"
    return [
        "Peak memory of the third step on CPU ranks: counted allocation by allocation in a run, and planned.",
        report.markdown_table(header, [_row(cell) for cell in cells]),
        f"Of {len(ran)} configurations, the plan is off by {100 * spread(errors).median:.2f} % in the median and by "
        f"{100 * worst:.2f} % at most (target: {100 * TARGET:.0f} %), and names the moment in {right} (target: "
        f"{MOMENTS} of 40){met}. A plan took {spread(took).median:.1f} s in the median.",
    ]


def run(options: Options) -> None:
    """Run and plan all configurations, and plan those of published tables."""
    torch.set_num_threads(1)
    rows = published.published_rows()
    parts: dict[str, tuple[Callable[[], Iterable[dict[str, Any]]], Callable[[list[dict[str, Any]]], list[str]]]] = {
        RUNS: (lambda: compare([case for case in memory_cases() if case.width in options.width]), paragraphs),
        TIMED: (timed.compare_times, timed.paragraphs),
        HOSTS: (hosts.compare_hosts, hosts.paragraphs),
        NETWORK: (lambda: modelled.compare(modelled.modelled_cells()), modelled.paragraphs),
        MEMORY: (lambda: published.memory_cells(rows), published.memory_paragraphs),
        TIME: (lambda: published.time_cells(rows), published.time_paragraphs),
    }
    for what in options.what:
        measure, say = parts[what]
        cells = list(measure())
        name = "planned" if what == RUNS else f"planned_{what}"
        report.publish(options, name, {"settings": options.settings, "cells": cells}, say(cells))
