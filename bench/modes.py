"""The modes of fully_shard beside FSDP2 (and FSDP1 where it has the mode), on gloo CPU ranks.

    python -m bench.modes                                   # every mode at widths 512 and 1024
    python -m bench.modes --width 512 --mode bf16 --mode hsdp --rounds 5 --write-document

``bf16``          parameters and compute in bf16, gradients reduced in fp32, 2 ranks
``hsdp``          a (2, 2) mesh: sharded over pairs, replicated over two of them, 4 ranks
``accumulation``  8 microbatches a step, gradients exchanged in the last only, 2 ranks; FSDP1 as well
``offload``       shards, gradients and optimizer state under the CPU offload policy, 2 ranks

Contestants take turns as in ``bench.step``: ratios are paired per round, and a run whose losses disagree reports
no times. Beside time and memory stands what a rank sends per step, counted by the kernel. The result of a mode
and width goes to ``bench/results/``; with ``--write-document`` the table of a width, with the latest results of
all its modes on this kind of machine, goes to ``docs/performance.md``.
"""

from __future__ import annotations

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
from bench.comparison import LOSS_TOLERANCE, Record, disagreements, optional_text, ratio_text, summarise
from bench.contestants import COMPOSABLE, Contestant, contestant_named
from bench.environment import Environment, current_environment
from bench.models import GPTShape
from bench.modes_worker import ACCUMULATION, BF16, HSDP, OFFLOAD, ModeAssignment
from bench.statistics import Spread
from bench.step import Settings, compete, refuse_too_much_memory
from bench.teams import console

BLOCKS = {512: 6, 1024: 8}
OUR_SYSTEM, PEER = "fullshard", "fsdp2"
# What fullshard's step may take of the better peer's, and its peak over baseline of FSDP2's.
STEP_TARGETS = {512: 0.80, 1024: 0.70}
MEMORY_TARGET = 0.75


@dataclass(frozen=True)
class Mode:
    """One mode: who can run it, on how many ranks, with which batches. ``tokens``: per microbatch, by width."""

    name: str
    title: str
    tokens: Mapping[int, int]
    contestants: tuple[str, ...] = ("fsdp2", "fullshard")
    ranks: int = 2
    microbatches: int = 1
    steps_per_round: int = 2
    loss_tolerance: float = LOSS_TOLERANCE


# Batches are those of bench.step, smaller where compute would hide the exchange: forward, backward and optimizer
# alone, without sharding, take at most three fifths of FSDP2's step at width 512 and under a third at 1024, on a CPU
# that multiplies bf16 matrices in hardware (AVX-512 BF16: 400 GFLOP/s a core beside 90 in fp32). Where it does
# not, bf16 would measure mostly the emulation. HSDP halves them because two ranks share a core. The tolerance of
# losses is that of fp32 in all modes: reductions of two summands and divisions by powers of two round alike.
MODES = {
    mode.name: mode
    for mode in (
        Mode(BF16, "parameters gathered in bf16, gradients reduced in fp32", {512: 256, 1024: 64}),
        Mode(HSDP, "mesh (2, 2) of replicate and shard axis", {512: 128, 1024: 32}, ranks=4),
        Mode(
            ACCUMULATION,
            "gradients exchanged in the last microbatch only",
            {512: 64, 1024: 64},
            contestants=("fsdp1", "fsdp2", "fullshard"),
            microbatches=8,
            steps_per_round=1,
        ),
        Mode(OFFLOAD, "CPU offload policy, not pinned", {512: 256, 1024: 64}),
    )
}


@dataclass(frozen=True, kw_only=True)
class ModeSettings(Settings):
    """One run: those of a plain step, and the mode. ``tokens`` are those of one microbatch."""

    mode: str
    microbatches: int

    @property
    def name(self) -> str:
        return f"{self.mode}_{self.width}"

    @property
    def worker(self) -> str:
        """See :class:`Settings`."""
        return "bench.modes_worker"

    def assignment(self, contestant: str, rank: int, store: str) -> ModeAssignment:
        """See :class:`Settings`."""
        plain = asdict(super().assignment(contestant, rank, store))
        return ModeAssignment(**plain, mode=self.mode, microbatches=self.microbatches)


def contestants_of(mode: Mode, only: Sequence[str] | None) -> list[Contestant]:
    """The mode's contestants, or those asked for that can run it.

    Raises:
        ValueError: If a name is unknown.
    """
    chosen = [contestant_named(name) for name in only or mode.contestants]
    return [contestant for contestant in chosen if contestant.system in {*COMPOSABLE, *mode.contestants}]


def summarise_mode(records: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """As of a plain step, and the bytes that the busiest rank sent per step."""
    summary = summarise(records)
    sent = {name: record.largest("sent_per_step") for name, record in records.items()}
    for name, entry in summary.items():
        mine, theirs = sent[name], sent.get(PEER)
        entry["sent_bytes_per_step"] = mine
        entry["sent_ratio_to_fsdp2"] = mine / theirs if mine is not None and theirs else None
    return summary


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The markdown table of several modes' results, one row per mode and contestant."""
    header = [
        "mode, contestant",
        "step, ms",
        "step / FSDP2",
        "step / better of FSDP1, FSDP2",
        "peak over baseline, MiB",
        "/ FSDP2",
        "peak, MiB",
        "/ FSDP2",
        "sent per rank, MiB",
        "/ FSDP2",
        "final loss",
    ]
    rows = []
    for result in results:
        mode = result["settings"]["mode"]
        for name, entry in result["contestants"].items():
            rows.append(
                [
                    f"{mode}, {name}",
                    f"{1e3 * entry['median_step_seconds']:.0f}",
                    ratio_text(entry, "fsdp2"),
                    ratio_text(entry, "better_peer"),
                    optional_text(entry["peak_over_baseline_bytes"], ".0f", 2**20),
                    optional_text(entry.get("peak_over_baseline_ratio_to_fsdp2"), ".2f"),
                    optional_text(entry["peak_bytes"], ".0f", 2**20),
                    optional_text(entry.get("peak_ratio_to_fsdp2"), ".2f"),
                    optional_text(entry["sent_bytes_per_step"], ".1f", 2**20),
                    optional_text(entry["sent_ratio_to_fsdp2"], ".2f"),
                    f"{entry['final_loss']:.6f}",
                ]
            )
        rows += [[f"{mode}, {name}", "cannot run", *["-"] * (len(header) - 2)] for name in result["not_run"]]
    return report.markdown_table(header, rows)


def verdicts(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Per mode that fullshard ran at a width with targets: its ratios, and whether they meet them."""
    for result in results:
        settings, entry = result["settings"], result["contestants"].get(OUR_SYSTEM, {})
        target = STEP_TARGETS.get(settings["width"])
        step = entry.get("time_ratio_to_better_peer")
        memory = entry.get("peak_over_baseline_ratio_to_fsdp2")
        if target is None or step is None:
            continue
        figures = [_verdict("step", step["median"], target)]
        if memory is not None:
            figures.append(_verdict("peak over baseline", memory, MEMORY_TARGET))
        yield f"{settings['mode']}: {', '.join(figures)}"


def _verdict(what: str, value: float, target: float) -> str:
    return f"{what} {value:.2f} of at most {target:.2f}{'' if value <= target else ' (missed)'}"


def _shape_text(settings: Mapping[str, Any]) -> str:
    microbatches = settings["microbatches"]
    batch = f"{settings['tokens']} tokens" if microbatches == 1 else f"{microbatches} x {settings['tokens']} tokens"
    return (
        f"`{settings['mode']}` ({MODES[settings['mode']].title}): {settings['blocks']} blocks, {batch} per rank, "
        f"{settings['ranks']} ranks, {settings['rounds']} rounds of {settings['steps_per_round']}"
    )


def document_block(results: Sequence[Mapping[str, Any]], image: Path | None, document: Path) -> str:
    """What stands between the markers of one width."""
    settings = [result["settings"] for result in results]
    provenances: dict[str, list[str]] = {}
    for result in results:
        line = report.provenance(Environment(**result["environment"]))
        provenances.setdefault(line, []).append(result["settings"]["mode"])
    shared = len(provenances) == 1
    judged = list(verdicts(results))
    threads = " or ".join(sorted({str(s["threads"]) for s in settings}))
    lines = [
        f"GPT of width {settings[0]['width']}, AdamW, threads per rank: {threads}. "
        + "; ".join(_shape_text(s) for s in settings)
        + ".",
        "",
        table(results),
        "",
        *([f"Against the targets: {'; '.join(judged)}.", ""] if judged else []),
        *(
            f"`{result['settings']['mode']}`: `{name}` could not run: {reason}.\n"
            for result in results
            for name, reason in result["not_run"].items()
        ),
        *(line if shared else f"`{', '.join(modes)}`: {line}" for line, modes in provenances.items()),
    ]
    if image is not None:
        lines += ["", report.image_link(image, document, f"The modes at width {settings[0]['width']}")]
    return "\n".join(lines)


def plot(path: Path, results: Sequence[Mapping[str, Any]]) -> bool:
    """Bars of fullshard and its peers, mode by mode; False without a ratio to show."""
    times: dict[str, float | Spread] = {}
    memory: dict[str, float | Spread] = {}
    for result in results:
        for name, entry in result["contestants"].items():
            label = f"{name}, {result['settings']['mode']}"
            ratio = entry.get("time_ratio_to_fsdp2")
            if name == PEER or ratio is None:  # 1 by definition
                continue
            times[label] = Spread(ratio["median"], ratio["lower_quartile"], ratio["upper_quartile"])
            if entry.get("peak_over_baseline_ratio_to_fsdp2") is not None:
                memory[label] = entry["peak_over_baseline_ratio_to_fsdp2"]
    candidates = (
        report.Panel("step time / FSDP2", times, 1.0),
        report.Panel("peak memory over baseline / FSDP2", memory, 1.0),
    )
    panels = [panel for panel in candidates if panel.values]
    if panels:
        report.plot_bars(path, f"Modes at width {results[0]['settings']['width']} (whiskers: quartiles)", panels)
    return bool(panels)


def latest_results(folder: Path, width: int, machine: str) -> list[dict[str, Any]]:
    """The stored results of a width on this kind of machine, those with agreeing losses, in the order of the modes."""
    paths = (folder / f"modes_{name}_{width}_{machine}.json" for name in MODES)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return [result for result in results if result["contestants"] and not result["losses_that_disagree"]]


def run(settings: ModeSettings, contestants: Sequence[Contestant], results: Path) -> bool:
    """One mode at one width: compete, write the result, print losses, then times. True if all losses agreed."""
    GPTShape(settings.width, settings.blocks, settings.tokens)  # refuse impossible sizes before starting anyone
    refuse_too_much_memory(settings, len(contestants))
    started = time.monotonic()
    console.print(f"[bold]{settings.mode}, width {settings.width}: {', '.join(c.name for c in contestants)}")
    records, failures = compete(contestants, settings)
    summary = summarise_mode(records)
    wrong = disagreements(records, MODES[settings.mode].loss_tolerance)
    environment = current_environment()
    result = {
        "benchmark": "modes",
        "settings": asdict(settings),
        "environment": environment.as_json(),
        "loss_tolerance": MODES[settings.mode].loss_tolerance,
        "losses_that_disagree": wrong,
        "contestants": summary,
        "not_run": failures,
    }
    path = results / f"modes_{settings.name}_{environment.name}.json"
    report.write_json(path, result)
    for name, entry in summary.items():
        difference = entry["largest_loss_difference_to_fsdp2"]
        verdict = "" if difference is None else f"largest difference to FSDP2 {difference:.1e}"
        line = f"  loss after {settings.total_steps} steps, {name:18} {entry['final_loss']:.6f}  {verdict}"
        console.print(line, soft_wrap=True)
    if wrong or not summary:
        console.print("[red]no times are reported: " + ("losses disagree" if wrong else "nobody ran"))
        return False
    console.print(f"\n{table([result])}\n", markup=False, soft_wrap=True)
    for line in verdicts([result]):
        console.print(line, soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s; wrote {path.name}")
    return True


def write_page(width: int, results: Path, document: Path) -> None:
    """The table of one width, of the latest results of every mode, and its plot."""
    machine = current_environment().name
    found = latest_results(results, width, machine)
    if not found:
        return
    image = results / f"modes_{width}_{machine}.png"
    block = document_block(found, image if plot(image, found) else None, document)
    report.update_document(document, f"modes:{width}", block)


def main(
    width: Annotated[list[int] | None, typer.Option(help="Model width; repeat for several [512 and 1024].")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Run only this mode; repeat for several.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Transformer blocks [6 at width 512, 8 at 1024].")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank and microbatch [by mode and width].")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches of a step [by mode].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 5,
    steps_per_round: Annotated[int | None, typer.Option(min=1, help="Steps in a turn [by mode].")] = None,
    warmup_steps: Annotated[int, typer.Option(min=1, help="First steps, not timed.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Run only this contestant; repeat for several.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the tables.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the width's table into the page.")] = False,
) -> None:
    """Train the same GPT in each mode with fullshard and its peers, in turns; compare losses, time and memory."""
    for name in mode or ():
        if name not in MODES:
            raise typer.BadParameter(f"unknown mode {name!r}; known are {', '.join(MODES)}", param_hint="--mode")
    try:
        chosen = {name: contestants_of(MODES[name], only) for name in mode or MODES}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    agreed = True
    for each in width or list(BLOCKS):
        for name, contestants in chosen.items():
            if not contestants:
                console.print(f"[yellow]{name}: none of the contestants asked for has this mode")
                continue
            preset = MODES[name]
            settings = ModeSettings(
                mode=name,
                width=each,
                blocks=blocks or BLOCKS.get(each, 6),
                tokens=tokens or preset.tokens.get(each, 64),
                microbatches=microbatches or preset.microbatches,
                ranks=preset.ranks,
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
