"""Steps on hosts with a slow link between them: measured, and planned after a calibration across the hosts."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.contestants import FULLSHARD
from bench.hosts import driver
from bench.hosts.network import INTERFACE, hosts_on_this_machine
from bench.planned.cases import Case, plan_of
from fullshard.planning.cluster import Cluster, cluster_of

TARGET, CALIBRATIONS = 0.10, 3
TWO = driver.Options(megabits=(0, 2000, 500, 200), rounds=3, only=(FULLSHARD,))
SMALL = dataclasses.replace(TWO, blocks=4, tokens=256, megabits=(500,))
CELLS = (
    TWO,
    dataclasses.replace(SMALL, per_host=2),
    dataclasses.replace(SMALL, per_host=2, mode=driver.HSDP),
    dataclasses.replace(SMALL, hosts=4),
)


def calibrated(options: driver.Options, megabits: int) -> Cluster:
    """What ``fullshard plan --calibrate`` under torchrun measures on these hosts."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(options.hosts),
        "--nproc-per-node",
        str(options.per_host),
    ]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "calibration"]
    with tempfile.TemporaryDirectory() as folder, hosts_on_this_machine(options.hosts) as network:
        network.set_rate(megabits or None)
        command = [
            sys.executable,
            *torchrun,
            "-m",
            "fullshard",
            "plan",
            "--calibrate",
            str(Path(folder) / "nodes.toml"),
        ]
        nodes = [
            subprocess.Popen([*network.inside(host), *command], env=environment, stdout=subprocess.DEVNULL)
            for host in range(options.hosts)
        ]
        if sum(node.wait() != 0 for node in nodes):
            raise RuntimeError(f"calibration of {options.hosts} hosts at {megabits} Mbit/s has failed")
        return cluster_of(Path(folder) / "nodes.toml")


def compare_hosts() -> Iterator[dict[str, Any]]:
    """Seconds of a step on hosts, between calibrations, and of its plans."""
    for options in CELLS:
        replicas = options.hosts if options.mode == driver.HSDP else 1
        ranks, size = options.hosts * options.per_host, {"blocks": options.blocks, "tokens": options.tokens}
        case = Case(options.width, ranks, replicas=replicas, **size)
        for megabits in options.megabits:
            before = calibrated(options, megabits)
            run = driver.measure(options, megabits)["contestants"][FULLSHARD]["median_step_seconds"]
            clusters = [before, *(calibrated(options, megabits) for _ in range(CALIBRATIONS - 1))]
            plans = [plan_of(case, cluster, steps=2).seconds for cluster in clusters]
            name = f"{options.hosts} hosts x {options.per_host} {'HSDP' if replicas > 1 else ''}".strip()
            yield {"hosts": name, "megabits": megabits, "seconds": run, "planned": plans}


def paragraphs(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page says of plans for hosts."""
    rows, errors = [], []
    for cell in cells:
        plans, run = sorted(cell["planned"]), cell["seconds"]
        errors.append(statistics.median(plans) / run - 1)
        rows.append(
            [cell["hosts"], f"{cell['megabits']} Mbit/s" if cell["megabits"] else "not shaped", f"{run:.2f}",
             f"{statistics.median(plans):.2f} ({plans[0]:.2f} to {plans[-1]:.2f})", f"{100 * errors[-1]:+.0f} %"]
        )  # fmt: skip
    within = sum(abs(error) <= TARGET for error in errors)
    return [
        "A step on hosts with a link of a given rate ([how](hosts.md)): measured, and planned after `fullshard plan "
        f"--calibrate` under torchrun on the same hosts, {CALIBRATIONS} times (median and range; no figure is fitted).",
        report.markdown_table(["hosts, ranks on each", "link", "run, s", "plan, s", "error"], rows),
        f"{within} of {len(errors)} are within {100 * TARGET:.0f} % (target: all); at most "
        f"{100 * max(map(abs, errors)):.0f} % off.",
    ]
