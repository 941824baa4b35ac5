"""How the cost of one rank grows with the units of a model and with the ranks of a job, up to 2,000 and 16,384.

Rank 0 of a fake process group, on CPU, one process per measurement. A unit is two vectors: of 16,384 elements where
ranks vary, so that every group cuts them evenly; of 1,024 where units vary, so that a large model fits the processor's
caches as a small one does. Collectives do nothing: what is left is what the library does on its host. All
figures are CPU time of the process, the best of several, with the garbage collector off. An exponent is the slope of a
line through the logarithms: 1 is in proportion, 0 is no growth. A second table has what ranks compute for a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import CONTESTANTS, FSDP1, FSDP2, FULLSHARD, OURS, WRAPPER, WRAPPER_FLAT
from bench.report import column
from bench.scaling.checkpoint import TENSORS_PER_UNIT
from bench.scaling.worker import Case
from bench.teams import Launch, ask_alone

TITLE = "Host cost of one rank by ranks and by units"
SYSTEMS = (FULLSHARD, WRAPPER, WRAPPER_FLAT, FSDP2, FSDP1)
PHASES = {"init": "initialization", "first": "first step", "steady": "steady step"}
SHOWN = (FSDP1, FSDP2, FULLSHARD)  # in the plot
LONG, SHORT = 16_384, 1_024  # elements of a parameter where ranks vary, and where units do
CHECKPOINTS = ((100, 8), (100, 128), (100, 1024), (10, 16384))  # units, ranks
# Slopes that are growth, and not noise or the size of a message: beyond proportion in units, beyond none in ranks.
LIMITS = {"units": 1.1, "ranks": 0.1}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All systems and sizes, and checkpoints."""

    units: tuple[int, ...] = (10, 100, 500, 2000)
    ranks: tuple[int, ...] = (8, 64, 512, 4096, 16384)
    usual_units: int = option(100, "Units where ranks vary.")
    usual_ranks: int = option(64, "Ranks where units vary.")
    limit_s: float = option(180.0, "Seconds for one measurement.")
    checkpoints: bool = option(True, "Measure checkpoints as well.")
    only: tuple[str, ...] = option((), choices=SYSTEMS)


def asked(worker: str, system: str, limit_s: float, /, **request: object) -> dict[str, Any]:
    """The cost, measured by a process of its own; or why there is none."""
    outcome = ask_alone(Launch.alone(CONTESTANTS[system], f"bench.scaling.{worker}"), limit_s, "measure", **request)
    return {"cost": outcome["answers"][0]} if "answers" in outcome else outcome


def slope(costs: Mapping[int, float]) -> float:
    """The exponent of a power of the keys that the values follow best; NaN of less than two.

    Least squares on logarithms, as ``numpy.polyfit`` of degree 1.
    """
    points = [(math.log(size), math.log(cost)) for size, cost in costs.items() if cost > 0]
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    rise = math.fsum((x - mean_x) * (y - mean_y) for x, y in points)
    return rise / math.fsum((x - mean_x) * (x - mean_x) for x, _ in points)


def series(costs: Sequence[Mapping[str, Any]], system: str, phase: str, over: str) -> dict[int, float]:
    """One figure of a system by number of units or of ranks, the other being the usual one; without missing ones."""
    chosen = [c for c in costs if c["system"] == system and c["over"] == over and "cost" in c]
    return {c[over]: c["cost"][phase] for c in sorted(chosen, key=lambda c: int(c[over]))}


def exponents(costs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By system, phase and what varies. Without the smallest model, in which a fixed cost shows."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for system in dict.fromkeys(c["system"] for c in costs):
        found[system] = {}
        for phase in PHASES:
            units = series(costs, system, phase, "units")
            large = {size: cost for size, cost in units.items() if size > min(units)} if len(units) > 2 else units
            ranks = series(costs, system, phase, "ranks")
            found[system][phase] = {"units": slope(large), "ranks": slope(ranks)}
    return found


def verdicts(slopes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """What of ours grows faster than it may; empty if nothing does."""
    return [
        f"{system}, {PHASES[phase]}: exponent {exponent:.2f} in {over}, allowed {LIMITS[over]:.2f}"
        for system in OURS
        for phase, of_phase in slopes.get(system, {}).items()
        for over, exponent in of_phase.items()
        if exponent > LIMITS[over]
    ]


def table(costs: Sequence[Mapping[str, Any]], slopes: Mapping[str, Any], settings: Options) -> str:
    """A row per system and phase: milliseconds at each size, and the exponents."""
    sizes = {"ranks": settings.ranks, "units": settings.units}
    columns = []
    for over, values in sizes.items():
        columns += [column(f"{n:,} {over}", f"{n} {over}", spec=",.0f", scale=1e3) for n in values]
        columns.append(column("exponent", over))
    rows: dict[str, dict[str, Any]] = {}
    for system in slopes:
        for phase, label in PHASES.items():
            rows[f"{system}, {label}"] = row = {}
            for over in sizes:
                row |= {f"{n} {over}": cost for n, cost in series(costs, system, phase, over).items()}
                exponent = slopes[system][phase][over]
                row[over] = None if math.isnan(exponent) else exponent
    return report.table("CPU time, ms", rows, columns)


def memory_table(costs: Sequence[Mapping[str, Any]]) -> str:
    """Python's memory per unit, of the cases in which it was measured."""
    rows = {
        f"{c['system']}, {c['units']:,} units, {c['ranks']:,} ranks": {
            "held": c["cost"]["python_bytes"] / c["units"],
            "peak": c["cost"]["python_peak"] / c["units"],
            "resident": c["cost"]["resident_peak"],
        }
        for c in costs
        if c.get("cost", {}).get("python_bytes") is not None
    }
    columns = (
        column("Python objects, KiB per unit", "held", spec=".1f", scale=2**-10),
        column("their peak, KiB per unit", "peak", spec=".1f", scale=2**-10),
        report.mebibytes("growth of the process, MiB", "resident"),
    )
    return report.table("memory", rows, columns)


def checkpoint_table(found: Sequence[Mapping[str, Any]]) -> str:
    """A row per size of checkpoint; a dash for what could not be measured."""
    columns = (
        column("tensors", "tensors", spec=",.0f"),
        column("shards", "shards", spec=",.0f"),
        column("one rank: plan, ms", "plan", spec=".1f", scale=1e3),
        column("sends, KiB", "sent", spec=".1f", scale=2**-10),
        column("rank 0: write plan, s", "plan_writes"),
        column("index, s", "index"),
        column("index, MB", "index_bytes", spec=".1f", scale=1e-6),
        column("each rank in a load: index, s", "parse"),
        column("plan, s", "load_plan"),
    )
    rows = {f"{one['ranks']:,}": {"tensors": TENSORS_PER_UNIT * one["units"], **one.get("cost", {})} for one in found}
    return report.table("ranks", rows, columns)


def panels(costs: Sequence[Mapping[str, Any]]) -> list[report.Curves]:
    """A later step over ranks, both axes logarithmic: whether it grows."""
    lines = {system: series(costs, system, "steady", "ranks") for system in SHOWN}
    milliseconds = {name: {n: 1e3 * cost for n, cost in line.items()} for name, line in lines.items() if line}
    return [report.Curves("a later step of 100 units, CPU ms", milliseconds, "ranks", logarithmic=True)]


def paragraphs(result: Mapping[str, Any], settings: Options) -> list[str]:
    """What stands between the markers."""
    judged = verdicts(result["exponents"])
    failures = [c for c in (*result["costs"], *result["checkpoints"]) if "failure" in c]
    missing = [
        f"{c.get('system', 'a checkpoint')} with {c['units']:,} units on {c['ranks']:,} ranks ({c['failure']})"
        for c in failures
    ]
    return [
        f"{settings.usual_units} units of two vectors of {LONG:,} elements where ranks vary; "
        f"{settings.usual_ranks} ranks and vectors of {SHORT:,} where units vary; a fake process group whose "
        "collectives do nothing; best of several, garbage collector off.",
        table(result["costs"], result["exponents"], settings),
        *([f"Not measured: {'; '.join(missing)}."] if missing else []),
        f"Allowed: {LIMITS['units']} in units, {LIMITS['ranks']} in ranks. "
        f"{'; '.join(judged) or 'All of ours keep to it'}.",
        memory_table(result["costs"]),
        "A checkpoint, by what one rank computes; nothing is written:",
        checkpoint_table(result["checkpoints"]),
    ]


def cases(systems: Sequence[str], settings: Options) -> list[tuple[str, Case]]:
    """What varies, and the case: all ranks with the usual units, all units with the usual ranks.

    Python's memory is measured at both ends of the ranks.
    """
    ends = (min(settings.ranks), max(settings.ranks))
    found = []
    for system in systems:
        for ranks in settings.ranks:
            memory = system in (FULLSHARD, WRAPPER) and ranks in ends
            found.append(("ranks", Case(system, settings.usual_units, ranks, LONG, memory=memory)))
        found += [("units", Case(system, units, settings.usual_ranks, SHORT)) for units in settings.units]
    return found


def run(options: Options) -> None:
    """Measure how one rank's cost grows with units and ranks, fullshard's beside its peers'."""
    costs: list[dict[str, Any]] = []
    for over, case in cases([name for name in SYSTEMS if not options.only or name in options.only], options):
        outcome = asked("worker", case.system, options.limit_s, **asdict(case))
        costs.append({"system": case.system, "over": over, "units": case.units, "ranks": case.ranks, **outcome})
        print(f"{case.system}, {case.units} units, {case.ranks} ranks: {outcome}", flush=True)
    saved: list[dict[str, Any]] = []
    for units, ranks in CHECKPOINTS if options.checkpoints else ():
        outcome = asked("checkpoint", FULLSHARD, 4 * options.limit_s, units=units, ranks=ranks)
        saved.append({"units": units, "ranks": ranks, **outcome})
    result = {"settings": options.settings, "exponents": exponents(costs), "costs": costs, "checkpoints": saved}
    report.publish(options, "scaling", result, paragraphs(result, options), title=TITLE, panels=panels(costs))
