"""How the cost of one rank grows with the units of a model and with the ranks of a job, up to 2,000 and 16,384.

Rank 0 of a fake process group, on CPU, one process per measurement. A unit is two vectors: of 16,384 elements where
ranks vary, so that every group cuts them evenly; of 1,024 where units vary, so that a large model fits the processor's
caches as a small one does. Collectives do nothing: what is left is what the library does on its host. All
figures are CPU time of the process, the best of several, with the garbage collector off. An exponent is the slope of a
line through the logarithms: 1 is in proportion, 0 is no growth. A second table has what ranks compute for a checkpoint.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import FSDP1, FSDP2, FULLSHARD, WRAPPER, WRAPPER_FLAT, process_environment, system_alone
from bench.scaling.checkpoint import TENSORS_PER_UNIT
from bench.scaling.worker import Case
from bench.teams import Launch, Teams

SYSTEMS = (FULLSHARD, WRAPPER, WRAPPER_FLAT, FSDP2, FSDP1)
OURS = (FULLSHARD, WRAPPER, WRAPPER_FLAT)
PHASES = {"init": "initialisation", "first": "first step", "steady": "steady step"}
LONG, SHORT = 16_384, 1_024  # elements of a parameter where ranks vary, and where units do
CHECKPOINTS = ((100, 8), (100, 128), (100, 1024), (10, 16384))  # units, ranks
# Slopes that are growth, and not noise or the size of a message: beyond proportion in units, beyond none in ranks.
UNITS_LIMIT, RANKS_LIMIT = 1.1, 0.1


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
    launch = Launch(system, f"bench.scaling.{worker}", process_environment(system_alone(system), threads=1), [{}])
    with tempfile.TemporaryDirectory() as folder, Teams(Path(folder)) as teams:
        teams.start(launch, limit_s)
        answers = teams.ask(system, "measure", **request)
        return {"failure": teams.failures[system]} if answers is None else {"cost": answers[0]}


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
    """One figure of a system by number of units or of ranks, the other being the usual one; without missing ones.

    A case without ``cost`` failed; a cost without the phase was withdrawn.
    """
    chosen = [c for c in costs if c["system"] == system and c["over"] == over and phase in c.get("cost", {})]
    return {c[over]: c["cost"][phase] for c in sorted(chosen, key=lambda c: int(c[over]))}


def exponents(costs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By system, phase and what varies. Without the smallest model, in which a fixed cost shows."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for system in dict.fromkeys(c["system"] for c in costs):
        found[system] = {}
        for phase in PHASES:
            units = series(costs, system, phase, "units")
            large = {size: cost for size, cost in units.items() if size > min(units)} if len(units) > 2 else units
            found[system][phase] = {
                "units": slope(large),
                "ranks": slope(series(costs, system, phase, "ranks")),
            }
    return found


def verdicts(slopes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """What of ours grows faster than it may; empty if nothing does."""
    limits = {"units": UNITS_LIMIT, "ranks": RANKS_LIMIT}
    return [
        f"{system}, {PHASES[phase]}: exponent {exponent:.2f} in {over}, allowed {limits[over]:.2f}"
        for system in OURS
        for phase, of_phase in slopes.get(system, {}).items()
        for over, exponent in of_phase.items()
        if exponent > limits[over]
    ]


def table(costs: Sequence[Mapping[str, Any]], slopes: Mapping[str, Any], settings: Options) -> str:
    """A row per system and phase: milliseconds at each size, and the exponents."""
    ranks, units = settings.ranks, settings.units
    header = ["CPU time, ms", *(f"{n:,} ranks" for n in ranks), "exponent"]
    header += [*(f"{n:,} units" for n in units), "exponent"]
    rows = []
    for system in slopes:
        for phase, label in PHASES.items():
            by_ranks = series(costs, system, phase, "ranks")
            by_units = series(costs, system, phase, "units")
            found = slopes[system].get(phase, {})
            rows.append(
                [
                    f"{system}, {label}",
                    *(_ms(by_ranks.get(n)) for n in ranks),
                    _exponent(found.get("ranks")),
                    *(_ms(by_units.get(n)) for n in units),
                    _exponent(found.get("units")),
                ]
            )
    return report.markdown_table(header, rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f}"


def _exponent(found: float | None) -> str:
    return "-" if found is None or math.isnan(found) else f"{found:.2f}"


def memory_table(costs: Sequence[Mapping[str, Any]]) -> str:
    """Python's memory per unit, of the cases in which it was measured."""
    rows = [
        [
            f"{c['system']}, {c['units']:,} units, {c['ranks']:,} ranks",
            f"{c['cost']['python_bytes'] / c['units'] / 1024:.1f}",
            f"{c['cost']['python_peak'] / c['units'] / 1024:.1f}",
            f"{c['cost']['resident_peak'] / 2**20:.0f}",
        ]
        for c in costs
        if c.get("cost", {}).get("python_bytes") is not None
    ]
    header = ["memory", "Python objects, KiB per unit", "their peak, KiB per unit", "growth of the process, MiB"]
    return report.markdown_table(header, rows)


def checkpoint_table(found: Sequence[Mapping[str, Any]]) -> str:
    """A row per size of checkpoint."""
    header = ["ranks", "tensors", "shards", "one rank: plan, ms", "sends, KiB"]
    header += ["rank 0: write plan, s", "index, s", "index, MB", "each rank in a load: index, s", "plan, s"]
    rows = []
    for one in found:
        start = [f"{one['ranks']:,}", f"{TENSORS_PER_UNIT * one['units']:,}"]
        if "cost" not in one:
            rows.append([*start, one["failure"], *["-"] * (len(header) - 3)])
            continue
        c = one["cost"]
        rows.append(
            [
                *start,
                f"{c['shards']:,}",
                f"{1e3 * c['plan']:.1f}",
                f"{c['sent'] / 1024:.1f}",
                *(f"{c[name]:.2f}" for name in ("plan_writes", "index")),
                f"{c['index_bytes'] / 1e6:.1f}",
                *(f"{c[name]:.2f}" for name in ("parse", "load_plan")),
            ]
        )
    return report.markdown_table(header, rows)


def plot(path: Path, costs: Sequence[Mapping[str, Any]], settings: Options) -> bool:
    """Curves: a column per phase, ranks above and units below, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {FULLSHARD: "#1f6f8b", WRAPPER: "#2a9d8f", WRAPPER_FLAT: "#8ab17d", FSDP2: "#d1495b", FSDP1: "#edae49"}
    figure, axes = pyplot.subplots(2, len(PHASES), figsize=(12.5, 7), sharey="row", layout="constrained")
    for row, over in zip(axes, ("ranks", "units"), strict=True):
        for axis, (phase, label) in zip(row, PHASES.items(), strict=True):
            for system in dict.fromkeys(c["system"] for c in costs):
                found = series(costs, system, phase, over)
                values = [1e3 * cost for cost in found.values()]
                style = "o-" if system in OURS else "s--"
                axis.plot(list(found), values, style, color=colors.get(system), label=system, markersize=4)
            sizes = settings.ranks if over == "ranks" else settings.units
            axis.set(xscale="log", yscale="log", xlabel=over, ylabel="CPU time, ms", title=label)
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(
        f"Host cost of one rank: {settings.usual_units} units on N ranks (above), "
        f"N units on {settings.usual_ranks} ranks (below)",
        fontsize=11,
    )
    report.save_figure(figure, path)
    return True


def paragraphs(result: Mapping[str, Any], settings: Options) -> list[str]:
    """What stands between the markers."""
    slopes, judged = result["exponents"], verdicts(result["exponents"])
    failures = [c for c in result["costs"] if "failure" in c]
    kept = "; ".join(judged) or "All of ours keep to it"
    missing = [f"{c['system']} with {c['units']:,} units on {c['ranks']:,} ranks ({c['failure']})" for c in failures]
    return [
        f"{settings.usual_units} units of two vectors of {LONG:,} elements where ranks vary; "
        f"{settings.usual_ranks} ranks and vectors of {SHORT:,} where units vary; a fake process group whose "
        "collectives do nothing; best of several, garbage collector off.",
        table(result["costs"], slopes, settings),
        *([f"Not measured: {'; '.join(missing)}."] if missing else []),
        f"Allowed: {UNITS_LIMIT} in units, {RANKS_LIMIT} in ranks. {kept}.",
        memory_table(result["costs"]),
        "A checkpoint, by what one rank computes; nothing is written:",
        checkpoint_table(result["checkpoints"]),
    ]


def cases(systems: Sequence[str], settings: Options) -> dict[str, list[Case]]:
    """By what varies: ranks with the usual units, units with the usual ranks. Python's memory at both ends of ranks."""
    ends = (min(settings.ranks), max(settings.ranks))
    found: dict[str, list[Case]] = {"ranks": [], "units": []}
    for system in systems:
        for ranks in settings.ranks:
            memory = system in (FULLSHARD, WRAPPER) and ranks in ends
            found["ranks"].append(Case(system, settings.usual_units, ranks, LONG, memory=memory))
        found["units"] += [Case(system, units, settings.usual_ranks, SHORT) for units in settings.units]
    return found


def run(options: Options) -> None:
    """Measure how one rank's cost grows with units and ranks, fullshard's beside its peers'."""
    costs: list[dict[str, Any]] = []
    for over, of_one in cases([name for name in SYSTEMS if not options.only or name in options.only], options).items():
        for case in of_one:
            outcome = asked("worker", case.system, options.limit_s, **asdict(case))
            costs.append({"system": case.system, "over": over, "units": case.units, "ranks": case.ranks, **outcome})
            print(f"{case.system}, {case.units} units, {case.ranks} ranks: {outcome}", flush=True)
    saved: list[dict[str, Any]] = []
    for units, ranks in CHECKPOINTS if options.checkpoints else ():
        outcome = asked("checkpoint", FULLSHARD, 4 * options.limit_s, units=units, ranks=ranks)
        saved.append({"units": units, "ranks": ranks, **outcome})
    result = {"settings": options.settings, "exponents": exponents(costs), "costs": costs, "checkpoints": saved}
    report.publish(
        options,
        "scaling",
        result,
        paragraphs(result, options),
        draw=lambda path: plot(path, costs, options),
        image_text="Host cost of one rank by ranks and by units",
    )
