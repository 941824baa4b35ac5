"""How the cost of one rank grows with the units of a model and with the ranks of a job, up to 2,000 and 16,384.

    python -m bench.scaling --write-document

Rank 0 of a fake process group, on CPU, one process per measurement. A unit is two vectors: of 16,384 elements where
ranks vary, so that every group cuts them evenly; of 1,024 where units vary, so that a large model fits the processor's
caches as a small one does. Collectives do nothing: what is left is what the library does on its host. All
figures are CPU time of the process, the best of several, with the garbage collector off. An exponent is the slope of a
line through the logarithms: 1 is in proportion, 0 is no growth. A second table has what ranks compute for a checkpoint.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import report
from bench.contestants import COMPOSABLE, FSDP1, FSDP2, FULLSHARD, WRAPPER, WRAPPER_FLAT, WRAPPING, Contestant
from bench.contestants import process_environment as environment_of
from bench.environment import REPOSITORY, Environment, current_environment
from bench.scaling_checkpoint import TENSORS_PER_UNIT, CheckpointCost
from bench.scaling_worker import Case, Cost

SYSTEMS = (FULLSHARD, WRAPPER, WRAPPER_FLAT, FSDP2, FSDP1)
OURS = (FULLSHARD, WRAPPER, WRAPPER_FLAT)
PHASES = {"init": "initialisation", "first": "first step", "steady": "steady step"}
RANKS, UNITS = (8, 64, 512, 4096, 16384), (10, 100, 500, 2000)
LONG, SHORT = 16_384, 1_024  # elements of a parameter where ranks vary, and where units do
CHECKPOINTS = ((100, 8), (100, 128), (100, 1024), (10, 16384))  # units, ranks
# Slopes that are growth, and not noise or the size of a message: beyond proportion in units, beyond none in ranks.
UNITS_LIMIT, RANKS_LIMIT = 1.1, 0.1

console = Console(highlight=False)


@dataclass(frozen=True)
class Settings:
    units: tuple[int, ...]
    ranks: tuple[int, ...]
    usual_units: int  # where ranks vary
    usual_ranks: int  # where units vary
    limit_s: float


def run_case(case: Case, limit_s: float) -> Cost | str:
    """The cost; or why there is none."""
    found = _run(["bench.scaling_worker", json.dumps(asdict(case))], case.system, limit_s)
    return found if isinstance(found, str) else Cost(**found)


def run_checkpoint(units: int, ranks: int, limit_s: float) -> CheckpointCost | str:
    """As :func:`run_case`."""
    found = _run(["bench.scaling_checkpoint", str(units), str(ranks)], FULLSHARD, limit_s)
    return found if isinstance(found, str) else CheckpointCost(**found)


def _run(arguments: Sequence[str], system: str, limit_s: float) -> Any:
    environment = environment_of(Contestant(system, system), threads=1)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"more than {limit_s:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(lines[-1])


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


def table(costs: Sequence[Mapping[str, Any]], slopes: Mapping[str, Any], settings: Settings) -> str:
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


def plot(path: Path, costs: Sequence[Mapping[str, Any]], settings: Settings) -> None:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)


def document_block(result: Mapping[str, Any], settings: Settings, provenance: str, image: str) -> str:
    """What stands between the markers."""
    slopes, judged = result["exponents"], verdicts(result["exponents"])
    failures = [c for c in result["costs"] if "failure" in c]
    kept = "; ".join(judged) or "All of ours keep to it"
    missing = [f"{c['system']} with {c['units']:,} units on {c['ranks']:,} ranks ({c['failure']})" for c in failures]
    return "\n\n".join(
        [
            f"{settings.usual_units} units of two vectors of {LONG:,} elements where ranks vary; "
            f"{settings.usual_ranks} ranks and vectors of {SHORT:,} where units vary; a fake process group whose "
            "collectives do nothing; best of several, garbage collector off.",
            table(result["costs"], slopes, settings),
            *([f"Not measured: {'; '.join(missing)}."] if missing else []),
            *([f"Withdrawn: {result['withdrawn']}"] if "withdrawn" in result else []),
            f"Allowed: {UNITS_LIMIT} in units, {RANKS_LIMIT} in ranks. {kept}.",
            memory_table(result["costs"]),
            "A checkpoint, by what one rank computes; nothing is written:",
            checkpoint_table(result["checkpoints"]),
            provenance,
            image,
        ]
    )


def cases(systems: Sequence[str], settings: Settings) -> dict[str, list[Case]]:
    """By what varies: ranks with the usual units, units with the usual ranks. Python's memory at both ends of ranks."""
    ends = (min(settings.ranks), max(settings.ranks))
    found: dict[str, list[Case]] = {"ranks": [], "units": []}
    for system in systems:
        for ranks in settings.ranks:
            memory = system in (FULLSHARD, WRAPPER) and ranks in ends
            found["ranks"].append(Case(system, settings.usual_units, ranks, LONG, memory=memory))
        found["units"] += [Case(system, units, settings.usual_ranks, SHORT) for units in settings.units]
    return found


def main(
    units: Annotated[list[int] | None, typer.Option(help=f"Numbers of units [{UNITS}]; repeat.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help=f"Numbers of ranks [{RANKS}]; repeat.")] = None,
    usual_units: Annotated[int, typer.Option(min=1, help="Units where ranks vary.")] = 100,
    usual_ranks: Annotated[int, typer.Option(min=1, help="Ranks where units vary.")] = 64,
    limit_s: Annotated[float, typer.Option(help="Seconds for one measurement.")] = 180.0,
    only: Annotated[list[str] | None, typer.Option(help=f"Run only this of {', '.join(SYSTEMS)}; repeat.")] = None,
    checkpoints: Annotated[bool, typer.Option(help="Measure checkpoints as well.")] = True,
    drawn_from: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: tables and plot of this JSON anew.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the table into the page.")] = False,
) -> None:
    """Measure how one rank's cost grows with units and ranks, fullshard's beside its peers'."""
    for name in only or []:
        if name not in (*COMPOSABLE, *WRAPPING):
            raise typer.BadParameter(f"unknown contestant {name!r}; known are {', '.join(SYSTEMS)}")
    if drawn_from is not None:
        result = json.loads(drawn_from.read_text(encoding="utf-8"))
        path = drawn_from
    else:
        settings = Settings(tuple(units or UNITS), tuple(ranks or RANKS), usual_units, usual_ranks, limit_s)
        chosen = [system for system in SYSTEMS if not only or system in only]
        result = measured(chosen, settings, checkpoints=checkpoints)
        path = results / f"scaling_{Environment(**result['environment']).name}.json"
        report.write_json(path, result)
    publish(result, path, document, write_document=write_document)


def measured(systems: Sequence[str], settings: Settings, *, checkpoints: bool) -> dict[str, Any]:
    """Everything, as it is kept in JSON."""
    costs: list[dict[str, Any]] = []
    for over, of_one in cases(systems, settings).items():
        for case in of_one:
            found = run_case(case, settings.limit_s)
            outcome = {"failure": found} if isinstance(found, str) else {"cost": asdict(found)}
            costs.append({"system": case.system, "over": over, "units": case.units, "ranks": case.ranks, **outcome})
            console.print(f"{case.system}, {case.units} units, {case.ranks} ranks: {found}", soft_wrap=True)
    saved: list[dict[str, Any]] = []
    for unit_count, rank_count in CHECKPOINTS if checkpoints else ():
        cost = run_checkpoint(unit_count, rank_count, 4 * settings.limit_s)
        outcome = {"failure": cost} if isinstance(cost, str) else {"cost": asdict(cost)}
        saved.append({"units": unit_count, "ranks": rank_count, **outcome})
    return {
        "benchmark": "scaling",
        "settings": asdict(settings),
        "environment": current_environment().as_json(),
        "exponents": exponents(costs),
        "costs": costs,
        "checkpoints": saved,
    }


def publish(result: Mapping[str, Any], path: Path, document: Path, *, write_document: bool) -> None:
    """Draw the plot beside the JSON, print the tables, and write them into the page if asked."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in result["settings"].items()}
    settings = Settings(**fields)
    picture = path.with_suffix(".png")
    plot(picture, result["costs"], settings)
    image = report.image_link(picture, document, "Host cost of one rank by ranks and by units")
    block = document_block(result, settings, report.provenance(Environment(**result["environment"])), image)
    console.print(f"\n{block}\n", markup=False, soft_wrap=True)
    if write_document:
        report.update_document(document, "scaling", block)
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    typer.run(main)
