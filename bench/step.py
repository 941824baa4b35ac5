"""A training step of fullshard beside torch FSDP1, FSDP2, DDP and the unsharded model, on gloo CPU ranks.

    python -m bench.step                          # widths 512 and 1024, about five minutes on two cores
    python -m bench.step --width 512 --only fsdp2 --only fullshard --rounds 4

Every contestant has one process per rank, all alive in one run; they take turns, so that never two compute at
once and a drift of the machine touches all of them alike. A turn is ``--steps-per-round`` steps; a round
gives every contestant one turn, and the order changes every round. Losses come first: a contestant that
trains something else has no step time worth reporting.

Memory is the high-water mark of a rank's resident memory over its training steps, warm-up included, and the
same minus what the process held before it built its model (interpreter, torch, process group).

The table goes to ``docs/performance.md`` when all contestants were asked for, JSON and plot to
``bench/results/``.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report
from bench.comparison import (
    LOSS_TOLERANCE,
    Record,
    disagreements,
    optional_text,
    ratio_text,
    summarise,
)
from bench.contestants import CONTESTANTS, Contestant, contestant_named
from bench.contestants import process_environment as _environment_of
from bench.environment import Environment, current_environment
from bench.models import GPTShape
from bench.statistics import Spread
from bench.step_worker import Assignment, available_memory
from bench.teams import Launch, Turns, console, take_turns

# Width to (blocks, tokens per rank): compute-heavy, and dominated by parameters. Eight blocks of width 1024
# would need 30 GB for all contestants at once, and would not finish within a few minutes.
PRESETS = {512: (6, 256), 1024: (4, 64)}
# Per rank, and as a generous mean over the contestants: bytes held per parameter byte, and bytes beside that.
PARAMETER_COPIES, PROCESS_BYTES = 4.5, 0.25 * 2**30


@dataclass(frozen=True)
class Settings:
    """One run: the model, the ranks and how often everyone trains."""

    width: int
    blocks: int
    tokens: int
    ranks: int
    threads: int
    warmup_steps: int
    rounds: int
    steps_per_round: int
    learning_rate: float = 1e-3

    @property
    def worker(self) -> str:
        """The module that a rank runs."""
        return "bench.step_worker"

    def assignment(self, contestant: str, rank: int, store: str) -> Assignment:
        """What one rank of a contestant is told; ``store`` is the rendezvous file of its ranks."""
        return Assignment(
            contestant=contestant,
            rank=rank,
            ranks=self.ranks,
            store=store,
            threads=self.threads,
            width=self.width,
            blocks=self.blocks,
            tokens=self.tokens,
            learning_rate=self.learning_rate,
        )

    @property
    def turns(self) -> Turns:
        return Turns(self.warmup_steps, self.rounds, self.steps_per_round)

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.rounds * self.steps_per_round


def refuse_too_much_memory(settings: Settings, contestants: int) -> None:
    """Stop before starting anyone if not all contestants fit into the free memory together."""
    shape = GPTShape(settings.width, settings.blocks, settings.tokens)
    parameter_bytes = 4 * (12 * shape.blocks * shape.width + 2 * shape.vocabulary + shape.sequence) * shape.width
    needed = contestants * settings.ranks * (PARAMETER_COPIES * parameter_bytes + PROCESS_BYTES)
    free = available_memory()
    if free is not None and needed > free:
        raise typer.BadParameter(
            f"{contestants} contestants need about {needed / 2**30:.1f} GiB together, "
            f"{free / 2**30:.1f} GiB are free; use fewer --blocks, or --only some contestants"
        )


def compete(contestants: Sequence[Contestant], settings: Settings) -> tuple[dict[str, Record], dict[str, str]]:
    """Run all rounds. Returns the records, and why a contestant has none."""
    with tempfile.TemporaryDirectory() as folder:
        launches = [_launch(contestant, settings, Path(folder)) for contestant in contestants]
        return take_turns(launches, settings.turns, Path(folder))


def _launch(contestant: Contestant, settings: Settings, folder: Path) -> Launch:
    store = str(folder / f"{contestant.name}.store")
    assignments = [settings.assignment(contestant.name, rank, store).as_argument() for rank in range(settings.ranks)]
    return Launch(contestant.name, settings.worker, _environment_of(contestant, settings.threads), assignments)


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    """The markdown table, one row per contestant in the order they were started."""
    header = [
        "contestant",
        "step, ms",
        "step / FSDP2",
        "step / better of FSDP1, FSDP2",
        "step / better of them keeping freed memory",
        "peak over baseline, MiB",
        "/ FSDP2",
        "peak, MiB",
        "final loss",
    ]
    rows = [
        [
            name,
            f"{1e3 * entry['median_step_seconds']:.0f}",
            ratio_text(entry, "fsdp2"),
            ratio_text(entry, "better_peer"),
            ratio_text(entry, "better_peer_keeping_memory"),
            optional_text(entry["peak_over_baseline_bytes"], ".0f", 2**20),
            optional_text(entry.get("peak_over_baseline_ratio_to_fsdp2"), ".2f"),
            optional_text(entry["peak_bytes"], ".0f", 2**20),
            f"{entry['final_loss']:.6f}",
        ]
        for name, entry in summary.items()
    ]
    rows += [[name, "cannot run", *["-"] * (len(header) - 2)] for name in failures]
    return report.markdown_table(header, rows)


def _document_block(
    settings: Settings,
    tables: str,
    failures: Mapping[str, str],
    environment: Environment,
    image: Path,
    document: Path,
) -> str:
    shape = GPTShape(settings.width, settings.blocks, settings.tokens)
    lines = [
        f"GPT of {settings.blocks} blocks of width {settings.width}, {settings.tokens} tokens per rank "
        f"(sequences of {shape.sequence}), fp32, AdamW, {settings.ranks} gloo ranks, threads per rank: "
        f"{settings.threads}; {settings.rounds} rounds of {settings.steps_per_round} steps after "
        f"{settings.warmup_steps} warm-up steps.",
        "",
        tables,
        "",
        "`+malloc`: the peer in a process whose allocator keeps freed memory (`MALLOC_MMAP_MAX_=0`, "
        "`MALLOC_TRIM_THRESHOLD_`, `MALLOC_TOP_PAD_`); `fullshard-malloc`: fullshard without its own such "
        "policy (`FULLSHARD_KEEP_FREED_MEMORY=0`). `unsharded` exchanges nothing, so each rank trains alone.",
        *(f"`{name}` could not run: {reason}." for name, reason in failures.items()),
        "",
        report.provenance(environment),
        "",
        report.image_link(image, document, f"Step time and memory at width {settings.width}"),
    ]
    return "\n".join(lines)


def _plot(path: Path, settings: Settings, summary: Mapping[str, Mapping[str, Any]]) -> None:
    def ratios(label: str) -> dict[str, float | Spread]:
        entries = {name: entry.get(f"time_ratio_to_{label}") for name, entry in summary.items()}
        return {
            name: Spread(ratio["median"], ratio["lower_quartile"], ratio["upper_quartile"])
            for name, ratio in entries.items()
            if ratio is not None
        }

    memory: dict[str, float | Spread] = {
        name: entry["peak_over_baseline_ratio_to_fsdp2"]
        for name, entry in summary.items()
        if entry.get("peak_over_baseline_ratio_to_fsdp2") is not None
    }
    panels = [
        report.Panel("step time / FSDP2", ratios("fsdp2"), 1.0),
        report.Panel("step time / better of FSDP1 and FSDP2", ratios("better_peer"), 1.0),
        report.Panel("peak memory over baseline / FSDP2", memory, 1.0),
    ]
    title = f"GPT width {settings.width}, {settings.blocks} blocks, {settings.ranks} ranks (whiskers: quartiles)"
    panels = [panel for panel in panels if panel.values]
    if panels:
        report.plot_bars(path, title, panels)


def _print_losses(summary: Mapping[str, Mapping[str, Any]], wrong: Mapping[str, float], steps: int) -> None:
    console.print(f"\nlosses after {steps} steps (mean over ranks):")
    for name, entry in summary.items():
        difference = entry["largest_loss_difference_to_fsdp2"]
        verdict = "" if difference is None else f"largest difference to FSDP2 {difference:.1e}"
        if name == "unsharded":
            verdict += " (no gradient exchange: not expected to agree)"
        if name in wrong:
            verdict += f"  [red]WRONG: more than {LOSS_TOLERANCE:.0e}[/]"
        console.print(f"  {name:18} {entry['final_loss']:.6f}  {verdict}")


def run(settings: Settings, contestants: Sequence[Contestant], results: Path, document: Path | None) -> bool:
    """One width: compete, report losses, then times; write the files. True if everyone that had to agreed."""
    GPTShape(settings.width, settings.blocks, settings.tokens)  # refuse impossible sizes before starting anyone
    refuse_too_much_memory(settings, len(contestants))
    started = time.monotonic()
    console.print(
        f"[bold]width {settings.width}, {settings.blocks} blocks, {settings.tokens} tokens per rank, "
        f"{settings.ranks} ranks: {', '.join(c.name for c in contestants)}"
    )
    records, failures = compete(contestants, settings)
    summary = summarise(records)
    wrong = disagreements(records)
    _print_losses(summary, wrong, settings.total_steps)
    environment = current_environment()
    result = {
        "benchmark": "step",
        "settings": asdict(settings),
        "environment": environment.as_json(),
        "loss_tolerance": LOSS_TOLERANCE,
        "losses_that_disagree": wrong,
        "contestants": summary,
        "not_run": failures,
    }
    path = results / f"step_{settings.width}_{environment.name}.json"
    report.write_json(path, result)
    if wrong or not summary:
        console.print("[red]no times are reported: " + ("losses disagree" if wrong else "nobody ran"))
        return False
    text = table(summary, failures)
    console.print(f"\n{text}\n", markup=False, soft_wrap=True)
    image = path.with_suffix(".png")
    _plot(image, settings, summary)
    if document is not None:
        block = _document_block(settings, text, failures, environment, image, document)
        report.update_document(document, f"step:{settings.width}", block)
    console.print(f"{time.monotonic() - started:.0f} s; wrote {path.name}")
    return True


def main(
    width: Annotated[list[int] | None, typer.Option(help="Model width; repeat for several.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Transformer blocks [6 at width 512, 4 at 1024].")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank and step [256 at 512, 64 at 1024].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 9,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 2,
    warmup_steps: Annotated[int, typer.Option(min=1, help="First steps, not timed.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Processes per contestant.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Run only this contestant; repeat for several.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = report.DOCUMENT,
    write_document: Annotated[
        bool | None, typer.Option(help="Write the table into the page [only when all contestants run].")
    ] = None,
) -> None:
    """Train the same GPT with fullshard and its peers, in turns; compare losses, step time and memory."""
    try:
        contestants = [contestant_named(name) for name in only] if only else list(CONTESTANTS)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    write = write_document if write_document is not None else not only
    agreed = True
    for each in width or list(PRESETS):
        preset_blocks, preset_tokens = PRESETS.get(each, (6, 64))
        settings = Settings(
            width=each,
            blocks=blocks or preset_blocks,
            tokens=tokens or preset_tokens,
            ranks=ranks,
            threads=threads,
            warmup_steps=warmup_steps,
            rounds=rounds,
            steps_per_round=steps_per_round,
        )
        agreed &= run(settings, contestants, results, document if write else None)
    raise typer.Exit(0 if agreed else 1)


if __name__ == "__main__":
    # Killed from outside, still end the workers: the finally blocks run on SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    typer.run(main)
