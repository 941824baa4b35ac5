"""fullshard's FullyShardedDataParallel beside torch FSDP1 (and fairscale, if installed), on two gloo CPU ranks.

    python -m bench.wrapper --write-document                # everything at widths 512 and 1024
    python -m bench.wrapper --width 512 --what step --what summon --rounds 5

``step``              a training step, with use_orig_params False (``-flat``) and True
``accumulation``      8 microbatches a step, all but the last in ``no_sync``; both flags, and fairscale's own
``summon``            entering and leaving ``summon_full_params(writeback=False)`` of the whole model; both flags
``summon_writeback``  the same with ``writeback=True``
``prefetch``          a step with BACKWARD_PRE, BACKWARD_POST and None; flat

Contestants take turns as in ``bench.step``: ratios are paired per round, and a run whose losses disagree reports
no times. Every contestant is measured by its peer, FSDP1 in the same configuration. Optional contestants
(``--only``): ``fsdp1+malloc`` and ``fsdp1-flat+malloc``, in processes that keep freed memory as fullshard's do, and
``fullshard-wrapper-malloc`` and ``fullshard-wrapper-flat-malloc``, which do not. The result goes to
``bench/results/``; with ``--write-document`` the table of a width, with the latest results on this kind of machine,
goes to ``docs/performance.md``.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report
from bench.comparison import LOSS_TOLERANCE, Record, optional_text
from bench.contestants import FAIRSCALE, FSDP1, FSDP1_FLAT, WRAPPER, WRAPPER_FLAT
from bench.environment import Environment, current_environment
from bench.models import GPTShape
from bench.statistics import Spread, largest_difference, paired_spread, round_medians, spread
from bench.step import Settings, compete, refuse_too_much_memory
from bench.teams import console
from bench.wrapper_worker import (
    ACCUMULATION,
    PREFETCH,
    PREFETCHES,
    STEP,
    SUMMON,
    SUMMON_WRITEBACK,
    WRAPPER_CONTESTANTS,
    WrapperAssignment,
    WrapperContestant,
    wrapper_contestant_named,
)

# What the wrapper's step may take of FSDP1's with the same flag, by width.
STEP_TARGETS = {512: 0.85, 1024: 0.65}
BOTH_FLAGS = (FSDP1_FLAT, WRAPPER_FLAT, FSDP1, WRAPPER)
ALLOCATOR_VARIANTS = tuple(name for name in WRAPPER_CONTESTANTS if name.endswith("malloc"))


@dataclass(frozen=True)
class Measurement:
    """One thing to measure. ``blocks``, ``tokens`` (per microbatch) by width; ``optional``: run if asked for."""

    name: str
    title: str
    blocks: Mapping[int, int]
    tokens: Mapping[int, int]
    contestants: tuple[str, ...] = BOTH_FLAGS
    optional: tuple[str, ...] = ALLOCATOR_VARIANTS
    microbatches: int = 1
    steps_per_round: int = 2


# Shapes of bench.step and bench.modes; fewer blocks where there are more contestants than fit into 24 GiB together.
_STEP_TOKENS = {512: 256, 1024: 64}
MEASUREMENTS = {
    measurement.name: measurement
    for measurement in (
        Measurement(STEP, "a training step", {512: 6, 1024: 8}, _STEP_TOKENS),
        Measurement(
            ACCUMULATION,
            "no_sync in all microbatches but the last",
            {512: 6, 1024: 6},
            {512: 64, 1024: 64},
            contestants=(*BOTH_FLAGS, FAIRSCALE),
            microbatches=8,
            steps_per_round=1,
        ),
        Measurement(SUMMON, "summon_full_params(writeback=False)", {512: 6, 1024: 8}, _STEP_TOKENS, steps_per_round=5),
        Measurement(
            SUMMON_WRITEBACK, "summon_full_params(writeback=True)", {512: 6, 1024: 8}, _STEP_TOKENS, steps_per_round=5
        ),
        Measurement(
            PREFETCH,
            "backward_prefetch BACKWARD_PRE, BACKWARD_POST, None",
            {512: 6, 1024: 4},
            _STEP_TOKENS,
            contestants=tuple(f"{system}-{name}" for name in PREFETCHES for system in (FSDP1_FLAT, WRAPPER_FLAT)),
            optional=tuple(f"{system}-{name}" for name in PREFETCHES for system in (FSDP1, WRAPPER)),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class WrapperSettings(Settings):
    """One run: those of a plain step, and what is measured. ``tokens`` are those of one microbatch."""

    what: str
    microbatches: int

    @property
    def name(self) -> str:
        return f"{self.what}_{self.width}"

    @property
    def worker(self) -> str:
        """See :class:`Settings`."""
        return "bench.wrapper_worker"

    def assignment(self, contestant: str, rank: int, store: str) -> WrapperAssignment:
        """See :class:`Settings`."""
        plain = asdict(super().assignment(contestant, rank, store))
        return WrapperAssignment(**plain, what=self.what, microbatches=self.microbatches)


def contestants_of(measurement: Measurement, only: Sequence[str] | None) -> list[WrapperContestant]:
    """The measurement's contestants, or those asked for that take part in it.

    Raises:
        ValueError: If a name is unknown.
    """
    chosen = [wrapper_contestant_named(name) for name in only or measurement.contestants]
    return [c for c in chosen if c.name in {*measurement.contestants, *measurement.optional}]


def installed(contestants: Sequence[WrapperContestant]) -> list[WrapperContestant]:
    """Those whose library is there. Only fairscale may be missing; a missing peer does not spoil the others."""
    missing = {FAIRSCALE} if importlib.util.find_spec("fairscale") is None else set()
    return [contestant for contestant in contestants if contestant.system not in missing]


def disagreements(records: Mapping[str, Record], tolerance: float = LOSS_TOLERANCE) -> dict[str, float]:
    """Contestants that trained something else than the first one, FSDP1 unless it did not run, and by how much."""
    if not records:
        return {}
    reference = next(iter(records.values()))
    found = {name: largest_difference(r.losses, reference.losses) for name, r in records.items()}
    return {name: difference for name, difference in found.items() if not difference <= tolerance}


def summarise(records: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """Everything reported about each contestant, JSON-ready; no ratio to a peer that did not run."""
    summary: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        peer = WRAPPER_CONTESTANTS[name].peer
        entry: dict[str, Any] = {
            "median_step_seconds": spread([s for turn in record.seconds for s in turn]).median,
            "final_loss": record.losses[-1],
            "peak_bytes": record.peak,
            "peak_over_baseline_bytes": record.peak_over_baseline,
            "sent_bytes_per_step": record.largest("sent_per_step"),
            "memory_by_rank": record.memory,
            "seconds": record.seconds,
            "losses": record.losses,
            "peer": peer if peer in records else None,
        }
        if peer is not None and peer in records:
            entry.update(_compared(record, records[peer]))
        summary[name] = entry
    return summary


def _compared(record: Record, peer: Record) -> dict[str, Any]:
    ratios: dict[str, Any] = {
        "time_ratio": paired_spread(round_medians(record.seconds), round_medians(peer.seconds)).as_json(),
        "largest_loss_difference": largest_difference(record.losses, peer.losses),
    }
    figures = {
        "peak_ratio": (record.peak, peer.peak),
        "peak_over_baseline_ratio": (record.peak_over_baseline, peer.peak_over_baseline),
        "sent_ratio": (record.largest("sent_per_step"), peer.largest("sent_per_step")),
    }
    for label, (mine, theirs) in figures.items():
        ratios[label] = mine / theirs if mine is not None and theirs else None
    return ratios


def time_ratio(entry: Mapping[str, Any]) -> Spread | None:
    """Of a contestant's time to its peer's."""
    ratio = entry.get("time_ratio")
    return None if ratio is None else Spread(**ratio)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The markdown table of several measurements' results, one row per measurement and contestant."""
    header = [
        "measurement, contestant",
        "time, ms",
        "/ FSDP1 in the same configuration",
        "peak over baseline, MiB",
        "/ FSDP1",
        "peak, MiB",
        "/ FSDP1",
        "sent per rank, MiB",
        "/ FSDP1",
        "final loss",
    ]
    rows = []
    for result in results:
        what = result["settings"]["what"]
        for name, entry in result["contestants"].items():
            ratio = time_ratio(entry)
            rows.append(
                [
                    f"{what}, {name}",
                    f"{1e3 * entry['median_step_seconds']:.0f}",
                    "-" if ratio is None else f"{ratio:.2f}",
                    optional_text(entry["peak_over_baseline_bytes"], ".0f", 2**20),
                    optional_text(entry.get("peak_over_baseline_ratio"), ".2f"),
                    optional_text(entry["peak_bytes"], ".0f", 2**20),
                    optional_text(entry.get("peak_ratio"), ".2f"),
                    optional_text(entry["sent_bytes_per_step"], ".1f", 2**20),
                    optional_text(entry.get("sent_ratio"), ".2f"),
                    f"{entry['final_loss']:.6f}",
                ]
            )
        rows += [[f"{what}, {name}", "cannot run", *["-"] * (len(header) - 2)] for name in result["not_run"]]
    return report.markdown_table(header, rows)


def verdicts(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Per wrapper whose plain step has a target at this width: its ratio to FSDP1's, and whether it meets it."""
    for result in results:
        settings = result["settings"]
        target = STEP_TARGETS.get(settings["width"])
        if settings["what"] != STEP or target is None:
            continue
        for name in (WRAPPER_FLAT, WRAPPER):
            ratio = time_ratio(result["contestants"].get(name, {}))
            if ratio is not None:
                missed = "" if ratio.median <= target else " (missed)"
                yield f"{STEP}, {name}: {ratio.median:.2f} of at most {target:.2f}{missed}"


def _shape_text(settings: Mapping[str, Any]) -> str:
    microbatches = settings["microbatches"]
    batch = f"{settings['tokens']} tokens" if microbatches == 1 else f"{microbatches} x {settings['tokens']} tokens"
    return (
        f"`{settings['what']}` ({MEASUREMENTS[settings['what']].title}): {settings['blocks']} blocks, {batch} per "
        f"rank, {settings['ranks']} ranks, {settings['rounds']} rounds of {settings['steps_per_round']}"
    )


def document_block(results: Sequence[Mapping[str, Any]], image: Path | None, document: Path) -> str:
    """What stands between the markers of one width."""
    settings = [result["settings"] for result in results]
    provenances: dict[str, list[str]] = {}
    for result in results:
        line = report.provenance(Environment(**result["environment"]))
        provenances.setdefault(line, []).append(result["settings"]["what"])
    judged = list(verdicts(results))
    threads = " or ".join(sorted({str(s["threads"]) for s in settings}))
    lines = [
        f"GPT of width {settings[0]['width']}, fp32, AdamW, threads per rank: {threads}. "
        + "; ".join(_shape_text(s) for s in settings)
        + ".",
        "",
        table(results),
        "",
        *([f"Against the targets: {'; '.join(judged)}.", ""] if judged else []),
        *(
            f"`{result['settings']['what']}`: `{name}` could not run: {reason}.\n"
            for result in results
            for name, reason in result["not_run"].items()
        ),
        *(line if len(provenances) == 1 else f"`{', '.join(w)}`: {line}" for line, w in provenances.items()),
    ]
    if image is not None:
        lines += ["", report.image_link(image, document, f"The wrapper at width {settings[0]['width']}")]
    return "\n".join(lines)


def plot(path: Path, results: Sequence[Mapping[str, Any]]) -> bool:
    """Bars of everyone who has a peer, measurement by measurement; False without a ratio to show."""
    times: dict[str, float | Spread] = {}
    memory: dict[str, float | Spread] = {}
    for result in results:
        for name, entry in result["contestants"].items():
            label = f"{name}, {result['settings']['what']}"
            ratio = time_ratio(entry)
            if ratio is None:
                continue
            times[label] = ratio
            if entry["peak_over_baseline_ratio"] is not None:
                memory[label] = entry["peak_over_baseline_ratio"]
    candidates = (
        report.Panel("time / FSDP1 in the same configuration", times, 1.0),
        report.Panel("peak over baseline / FSDP1", memory, 1.0),
    )
    panels = [panel for panel in candidates if panel.values]
    if panels:
        width = results[0]["settings"]["width"]
        report.plot_bars(path, f"FullyShardedDataParallel at width {width} (whiskers: quartiles)", panels)
    return bool(panels)


def latest_results(folder: Path, width: int, machine: str) -> list[dict[str, Any]]:
    """The stored results of a width on this kind of machine, those with agreeing losses, in the usual order."""
    paths = (folder / f"wrapper_{name}_{width}_{machine}.json" for name in MEASUREMENTS)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return [result for result in results if result["contestants"] and not result["losses_that_disagree"]]


def run(settings: WrapperSettings, contestants: Sequence[WrapperContestant], results: Path) -> bool:
    """One measurement at one width: compete, write the result, print losses, then times. True if all losses agreed."""
    GPTShape(settings.width, settings.blocks, settings.tokens)  # refuse impossible sizes before starting anyone
    present = installed(contestants)
    absent = {c.name: f"{c.system} is not installed" for c in contestants if c not in present}
    refuse_too_much_memory(settings, len(present))
    started = time.monotonic()
    console.print(f"[bold]{settings.what}, width {settings.width}: {', '.join(c.name for c in present)}")
    records, failures = compete(present, settings)
    summary = summarise(records)
    wrong = disagreements(records)
    environment = current_environment()
    result = {
        "benchmark": "wrapper",
        "settings": asdict(settings),
        "environment": environment.as_json(),
        "loss_tolerance": LOSS_TOLERANCE,
        "losses_that_disagree": wrong,
        "contestants": summary,
        "not_run": {**failures, **absent},
    }
    path = results / f"wrapper_{settings.name}_{environment.name}.json"
    report.write_json(path, result)
    for name, entry in summary.items():
        difference = entry.get("largest_loss_difference")
        verdict = "" if difference is None else f"largest difference to {entry['peer']} {difference:.1e}"
        line = f"  loss after {len(entry['losses'])} steps, {name:28} {entry['final_loss']:.6f}  {verdict}"
        console.print(line, soft_wrap=True)
    for name, reason in absent.items():
        console.print(f"  {name} takes no part: {reason}")
    if wrong or not summary:
        console.print(
            "[red]no times are reported: " + (f"losses of {', '.join(wrong)} disagree" if wrong else "nobody ran")
        )
        return False
    console.print(f"\n{table([result])}\n", markup=False, soft_wrap=True)
    for line in verdicts([result]):
        console.print(line, soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s; wrote {path.name}")
    return True


def write_page(width: int, results: Path, document: Path) -> None:
    """The table of one width, of the latest results of every measurement, and its plot."""
    machine = current_environment().name
    found = latest_results(results, width, machine)
    if not found:
        return
    image = results / f"wrapper_{width}_{machine}.png"
    block = document_block(found, image if plot(image, found) else None, document)
    report.update_document(document, f"wrapper:{width}", block)


def main(
    width: Annotated[list[int] | None, typer.Option(help="Model width; repeat for several [512 and 1024].")] = None,
    what: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MEASUREMENTS)}; repeat [all].")] = None,
    blocks: Annotated[int | None, typer.Option(help="Transformer blocks [by measurement and width].")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank and microbatch [by the same].")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches of a step [8 in accumulation].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 7,
    steps_per_round: Annotated[int | None, typer.Option(min=1, help="Steps, or summons, in a turn.")] = None,
    warmup_steps: Annotated[int, typer.Option(min=1, help="First steps, not timed.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Run only this contestant; repeat for several.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the tables.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the width's table into the page.")] = False,
) -> None:
    """Train or summon the same GPT in fullshard's wrapper and in FSDP1, in turns; compare losses, time and memory."""
    for name in what or ():
        if name not in MEASUREMENTS:
            raise typer.BadParameter(f"unknown {name!r}; known are {', '.join(MEASUREMENTS)}", param_hint="--what")
    try:
        chosen = {name: contestants_of(MEASUREMENTS[name], only) for name in what or MEASUREMENTS}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    agreed = True
    for each in width or list(STEP_TARGETS):
        for name, contestants in chosen.items():
            if not contestants:
                console.print(f"[yellow]{name}: none of the contestants asked for takes part")
                continue
            preset = MEASUREMENTS[name]
            settings = WrapperSettings(
                what=name,
                width=each,
                blocks=blocks or preset.blocks.get(each, 6),
                tokens=tokens or preset.tokens.get(each, 64),
                microbatches=microbatches or preset.microbatches,
                ranks=2,
                threads=threads,
                warmup_steps=warmup_steps,
                rounds=rounds,
                steps_per_round=steps_per_round or preset.steps_per_round,
            )
            agreed &= run(settings, contestants, results)
        if write_document:
            write_page(each, results, document)
    raise typer.Exit(0 if agreed else 1)


if __name__ == "__main__":
    # Killed from outside, still end the workers: the finally blocks run on SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    typer.run(main)
