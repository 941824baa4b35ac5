"""A training step through accelerate: with torch's FSDP2, and with fullshard in its place, on gloo CPU ranks.

    python -m bench.accelerate_step --write-document     # widths 512 and 1024, about five minutes on two cores
    python -m bench.accelerate_step --width 512 --only fsdp2 --only fullshard --rounds 4

The step is that of ``examples/accelerate_gpt.py``: ``accumulate``, ``backward``, ``clip_grad_norm_``, AdamW. All
contestants run the same code; for fullshard's, ``fullshard.dropin.install()`` comes before it. They take turns as in
``bench.step``: ratios are paired per round, and a run whose losses disagree reports no times. Needs accelerate
(``make test-clients`` installs it). The result goes to ``bench/results/``; with ``--write-document`` the table goes to
``docs/performance.md``.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report
from bench.comparison import LOSS_TOLERANCE, disagreements, optional_text, ratio_text, summarise
from bench.contestants import Contestant, contestant_named
from bench.environment import Environment, current_environment
from bench.models import GPTShape
from bench.step import PRESETS, Settings, compete, refuse_too_much_memory
from bench.teams import console

# FSDP2 and fullshard; each also with the other's way of keeping freed memory.
TAKING_PART = ("fsdp2", "fsdp2+malloc", "fullshard", "fullshard-malloc")


@dataclass(frozen=True)
class AccelerateSettings(Settings):
    """One run: those of a plain step."""

    @property
    def worker(self) -> str:
        """See :class:`Settings`."""
        return "bench.accelerate_step_worker"


def contestants_of(only: Sequence[str] | None) -> list[Contestant]:
    """Those asked for, or all that take part.

    Raises:
        ValueError: If one does not.
    """
    for name in only or ():
        if name not in TAKING_PART:
            raise ValueError(f"unknown contestant {name!r}; known are {', '.join(TAKING_PART)}")
    return [contestant_named(name) for name in only or TAKING_PART]


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    """The markdown table, one row per contestant."""
    header = [
        "contestant",
        "step, ms",
        "step / FSDP2",
        "step / FSDP2 keeping freed memory",
        "peak over baseline, MiB",
        "/ FSDP2",
        "final loss",
    ]
    rows = [
        [
            name,
            f"{1e3 * entry['median_step_seconds']:.0f}",
            ratio_text(entry, "fsdp2"),
            ratio_text(entry, "better_peer_keeping_memory"),
            optional_text(entry["peak_over_baseline_bytes"], ".0f", 2**20),
            optional_text(entry.get("peak_over_baseline_ratio_to_fsdp2"), ".2f"),
            f"{entry['final_loss']:.6f}",
        ]
        for name, entry in summary.items()
    ]
    rows += [[name, "cannot run", *["-"] * (len(header) - 2)] for name in failures]
    return report.markdown_table(header, rows)


def document_block(result: Mapping[str, Any]) -> str:
    """What stands between the markers of one width."""
    settings, failures = result["settings"], result["not_run"]
    lines = [
        f"GPT of {settings['blocks']} blocks of width {settings['width']}, {settings['tokens']} tokens per rank, fp32, "
        f"AdamW, gradients clipped, {settings['ranks']} gloo ranks, threads per rank: {settings['threads']}; "
        f"{settings['rounds']} rounds of {settings['steps_per_round']} steps after {settings['warmup_steps']} warm-up "
        f"steps. accelerate {result['accelerate']}, FSDP version 2, a unit per block.",
        "",
        table(result["contestants"], failures),
        "",
        *(f"`{name}` could not run: {reason}.\n" for name, reason in failures.items()),
        report.provenance(Environment(**result["environment"])),
    ]
    return "\n".join(lines)


def run(settings: AccelerateSettings, contestants: Sequence[Contestant], results: Path, document: Path | None) -> bool:
    """One width: compete, write the result, print losses, then times. True if all losses agreed."""
    GPTShape(settings.width, settings.blocks, settings.tokens)  # refuse impossible sizes before starting anyone
    refuse_too_much_memory(settings, len(contestants))
    started = time.monotonic()
    console.print(f"[bold]accelerate, width {settings.width}: {', '.join(c.name for c in contestants)}")
    records, failures = compete(contestants, settings)
    summary, wrong = summarise(records), disagreements(records)
    environment = current_environment()
    result = {
        "benchmark": "accelerate_step",
        "settings": asdict(settings),
        "environment": environment.as_json(),
        "accelerate": metadata.version("accelerate"),
        "loss_tolerance": LOSS_TOLERANCE,
        "losses_that_disagree": wrong,
        "contestants": summary,
        "not_run": failures,
    }
    path = results / f"accelerate_step_{settings.width}_{environment.name}.json"
    report.write_json(path, result)
    for name, entry in summary.items():
        difference = entry["largest_loss_difference_to_fsdp2"]
        verdict = "" if difference is None else f"largest difference to FSDP2 {difference:.1e}"
        console.print(f"  loss after {settings.total_steps} steps, {name:18} {entry['final_loss']:.6f}  {verdict}")
    if wrong or not summary:
        reason = f"losses of {', '.join(wrong)} disagree" if wrong else "nobody ran"
        console.print(f"[red]no times are reported: {reason}")
        return False
    console.print(f"\n{table(summary, failures)}\n", markup=False, soft_wrap=True)
    if document is not None:
        report.update_document(document, f"accelerate_step:{settings.width}", document_block(result))
    console.print(f"{time.monotonic() - started:.0f} s; wrote {path.name}")
    return True


def main(
    width: Annotated[list[int] | None, typer.Option(help="Model width; repeat for several [512 and 1024].")] = None,
    blocks: Annotated[int | None, typer.Option(help="Transformer blocks [6 at width 512, 4 at 1024].")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank and step [256 at 512, 64 at 1024].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 9,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 2,
    warmup_steps: Annotated[int, typer.Option(min=1, help="First steps, not timed.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Processes per contestant.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Run only this contestant; repeat for several.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the table into the page.")] = False,
) -> None:
    """Train the same GPT through accelerate with FSDP2 and with fullshard, in turns; compare losses, time, memory."""
    try:
        contestants = contestants_of(only)
        metadata.version("accelerate")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    except metadata.PackageNotFoundError:
        console.print("[red]accelerate is not installed: `make test-clients` installs what clients' tests need")
        raise typer.Exit(1) from None
    agreed = True
    for each in width or list(PRESETS):
        preset_blocks, preset_tokens = PRESETS.get(each, (6, 64))
        settings = AccelerateSettings(
            width=each,
            blocks=blocks or preset_blocks,
            tokens=tokens or preset_tokens,
            ranks=ranks,
            threads=threads,
            warmup_steps=warmup_steps,
            rounds=rounds,
            steps_per_round=steps_per_round,
        )
        agreed &= run(settings, contestants, results, document if write_document else None)
    raise typer.Exit(0 if agreed else 1)


if __name__ == "__main__":
    # Killed from outside, still end the workers: the finally blocks run on SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    typer.run(main)
