"""Steps on CPU ranks: measured, and planned after a calibration of the machine."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.contestants import Contestant
from bench.planned.cases import TIMED_RANKS, plan_of, timed_cases
from bench.teams import Launch, Teams
from fullshard.planning.calibration import calibrate

WORKER = "bench.planned.worker"
STEPS, ROUNDS = 3, 5
MEDIAN, RANK_CORRELATION, BEST = 0.12, 0.8, 0.05  # targets


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
                    steps = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
                    seconds[case.name].append(statistics.median(steps))
        for case in cases:
            plans = [plan_of(case, cluster, steps=2).seconds for cluster in clusters]
            cell = {"case": case.name, "ranks": ranks, "seconds": seconds[case.name], "planned": plans}
            cell["calibration_seconds"] = took
            print(f"{case.name}: {1e3 * _median(cell, 'seconds'):.0f} ms, planned {1e3 * _median(cell, 'planned'):.0f}")
            yield cell


def _median(cell: Mapping[str, Any], key: str) -> float:
    return float(statistics.median(cell[key]))


def error_of(cell: Mapping[str, Any]) -> float:
    """The median over rounds: the machine's speed changes from one to the next, by as much as twofold."""
    return statistics.median(plan / run - 1 for plan, run in zip(cell["planned"], cell["seconds"], strict=True))


def paragraphs(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page says of time on CPU ranks."""
    rows = []
    for cell in cells:
        low, high = min(cell["seconds"]), max(cell["seconds"])
        rows.append(
            [cell["case"], f"{1e3 * _median(cell, 'seconds'):.0f} ({1e3 * low:.0f} to {1e3 * high:.0f})",
             f"{1e3 * _median(cell, 'planned'):.0f}", f"{100 * error_of(cell):+.1f} %"]
        )  # fmt: skip
    errors = [abs(error_of(cell)) for cell in cells]
    found, plans = ([_median(cell, key) for cell in cells] for key in ("seconds", "planned"))
    together, median = rank_correlation(found, plans), statistics.median(errors)
    worse = dict(_recommended(cells))
    calibrations = {cell["ranks"]: statistics.median(cell["calibration_seconds"]) for cell in cells}
    said = ", ".join(f"{100 * share:.1f} % on {ranks}" for ranks, share in worse.items())
    return [
        "Steps of a GPT of width 512 on 1,024 tokens for each rank, on loopback gloo, one thread a rank: measured "
        "(median over rounds, and range), and planned after a calibration with as many ranks. Each round calibrates, "
        "then runs all; the error is the median of those of the rounds.",
        report.markdown_table(["configuration", "run, ms", "plan, ms", "error"], rows),
        f"The plan is off by {100 * median:.1f} % in the median and {100 * max(errors):.1f} % at most (target: "
        f"{100 * MEDIAN:.0f} % in the median{_missed(median <= MEDIAN)}); correlation of ranks {together:.2f} (target: "
        f"{RANK_CORRELATION}{_missed(together >= RANK_CORRELATION)}). Calibrations took "
        f"{', '.join(f'{took:.0f} s on {ranks}' for ranks, took in calibrations.items())} ranks (target: 60).",
        f"The configuration that the plan finds fastest takes longer than the fastest one by {said} ranks (target: "
        f"{100 * BEST:.0f} %{_missed(all(each <= BEST for each in worse.values()))}).",
    ]


def _missed(met: bool) -> str:
    return "" if met else ", missed"


def _recommended(cells: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, float]]:
    """By how much what the plan finds fastest is slower than the fastest, for each number of ranks."""
    for ranks in dict.fromkeys(cell["ranks"] for cell in cells):
        own = [cell for cell in cells if cell["ranks"] == ranks]
        chosen = min(own, key=lambda cell: _median(cell, "planned"))
        yield ranks, _median(chosen, "seconds") / min(_median(cell, "seconds") for cell in own) - 1


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's: that of the places in order."""
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*places)
