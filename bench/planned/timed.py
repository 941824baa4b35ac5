"""Steps on CPU ranks: measured, and planned after a calibration of the machine."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

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
