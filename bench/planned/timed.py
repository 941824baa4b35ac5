"""Steps on CPU ranks: measured, and planned after a calibration of the machine."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.contestants import Contestant
from bench.models import next_token_loss
from bench.planned.cases import TIMED_RANKS, Case, timed_cases
from bench.teams import Launch, Teams
from fullshard.planning.calibration import calibrate
from fullshard.planning.cluster import Cluster
from fullshard.planning.dry_run import Step, dry_run

WORKER = "bench.planned.worker"
STEPS, ROUNDS = 3, 3
MEDIAN, RANK_CORRELATION, BEST = 0.12, 0.8, 0.05  # targets


def predicted(case: Case, cluster: Cluster) -> Step:
    """The plan of a case on a machine."""
    shape = case.shape
    tokens = torch.zeros(shape.tokens // shape.sequence, shape.sequence, dtype=torch.int64, device="meta")

    def loss(model: torch.nn.Module) -> torch.Tensor:
        return next_token_loss(model, (tokens, tokens))

    return dry_run(
        lambda: case.build("meta"), loss, cluster=cluster, ranks=case.ranks, microbatches=case.microbatches, steps=2
    )


def compare_times(rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Seconds of a step of every case. Each round calibrates the machine, and runs all cases of as many ranks."""
    for ranks in TIMED_RANKS:
        cases = timed_cases(ranks)
        clusters, took = [], []
        seconds: dict[str, list[float]] = {case.name: [] for case in cases}
        with tempfile.TemporaryDirectory() as folder, Teams(Path(folder)) as teams:
            teams.start(Launch.of(Contestant("timed", "timed"), WORKER, Path(folder), ranks=ranks))
            for _ in range(rounds):
                begun = time.monotonic()
                clusters.append(calibrate(ranks))
                took.append(time.monotonic() - begun)
                for case in cases:
                    answers = teams.ask("timed", "time", case=dataclasses.asdict(case), steps=STEPS)
                    if answers is None or any("error" in each for each in answers):
                        raise RuntimeError(f"{case.name}: {answers}")
                    seconds[case.name] += map(max, zip(*(each["seconds"] for each in answers), strict=True))
        for case in cases:
            plans = [predicted(case, cluster).seconds for cluster in clusters]
            cell = {"case": case.name, "ranks": ranks, "seconds": seconds[case.name], "planned": plans}
            cell["calibration_seconds"] = took
            found, planned = (1e3 * statistics.median(each) for each in (seconds[case.name], plans))
            print(f"{case.name}: {found:.0f} ms, planned {planned:.0f}", flush=True)
            yield cell


def paragraphs(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page says of time on CPU ranks."""
    rows, errors = [], []
    for cell in cells:
        found, plan = statistics.median(cell["seconds"]), statistics.median(cell["planned"])
        errors.append(abs(plan / found - 1))
        low, high = min(cell["seconds"]), max(cell["seconds"])
        rows.append(
            [cell["case"], f"{1e3 * found:.0f} ({1e3 * low:.0f} to {1e3 * high:.0f})", f"{1e3 * plan:.0f}",
             f"{100 * (plan / found - 1):+.1f} %"]
        )  # fmt: skip
    found, plans = ([statistics.median(cell[key]) for cell in cells] for key in ("seconds", "planned"))
    together, median = rank_correlation(found, plans), statistics.median(errors)
    worse = dict(_recommended(cells))
    took = max(sum(ranks) for ranks in zip(*_calibrations(cells), strict=True))
    marks = {
        "median": "" if median <= MEDIAN else " (missed)",
        "ranks": "" if together >= RANK_CORRELATION else " (missed)",
        "best": "" if all(each <= BEST for each in worse.values()) else " (missed)",
    }
    said = ", ".join(f"{100 * share:.1f} % on {ranks}" for ranks, share in worse.items())
    return [
        "Steps of a GPT of width 512 on 1,024 tokens for each rank, on loopback gloo, one thread a rank: measured "
        "(median and range), and planned after a calibration with as many ranks. Each round calibrates, then runs all.",
        report.markdown_table(["configuration", "run, ms", "plan, ms", "error"], rows),
        f"The plan is off by {100 * median:.1f} % in the median (target: {100 * MEDIAN:.0f} %{marks['median']}); "
        f"correlation of ranks {together:.2f} (target: {RANK_CORRELATION}{marks['ranks']}). Calibrations with "
        f"{', '.join(map(str, TIMED_RANKS))} ranks took {took:.0f} s together (target: 60).",
        f"The configuration that the plan finds fastest takes longer than the fastest one by {said} ranks (target: "
        f"{100 * BEST:.0f} %{marks['best']}).",
    ]


def _recommended(cells: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, float]]:
    """By how much what the plan finds fastest is slower than the fastest, for each number of ranks."""
    for ranks in dict.fromkeys(cell["ranks"] for cell in cells):
        own = [cell for cell in cells if cell["ranks"] == ranks]
        chosen = min(own, key=lambda cell: statistics.median(cell["planned"]))
        yield ranks, statistics.median(chosen["seconds"]) / min(statistics.median(c["seconds"]) for c in own) - 1


def _calibrations(cells: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Seconds of the calibrations, by number of ranks."""
    return list({cell["ranks"]: cell["calibration_seconds"] for cell in cells}.values())


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's: that of the places in order."""
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*places)
