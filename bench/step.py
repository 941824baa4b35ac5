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

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console

from bench import report
from bench.contestants import CONTESTANTS, GOVERNED_VARIABLES, Contestant, contestant_named
from bench.environment import REPOSITORY, Environment, current_environment
from bench.models import GPTShape
from bench.statistics import Spread, largest_difference, paired_spread, round_medians, spread, turn_order
from bench.step_worker import Assignment, available_memory

# Width to (blocks, tokens per rank): compute-heavy, and dominated by parameters. Eight blocks of width 1024
# would need 30 GB for all contestants at once, and would not finish within a few minutes.
PRESETS = {512: (6, 256), 1024: (4, 64)}
# Per rank, and as a generous mean over the contestants: bytes held per parameter byte, and bytes beside that.
PARAMETER_COPIES, PROCESS_BYTES = 4.5, 0.25 * 2**30
LOSS_TOLERANCE = 1e-5
# Contestants whose losses must equal FSDP2's: all that average gradients.
SAME_LOSSES_AS = "fsdp2"
PEERS = ("fsdp1", "fsdp2")
PEERS_KEEPING_MEMORY = ("fsdp1+malloc", "fsdp2+malloc")
REPLY_TIMEOUT = 150.0  # seconds; longer than a process group's own timeout

console = Console(highlight=False)


class ContestantFailedError(RuntimeError):
    """A contestant could not start or continue; its message says why."""


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
    def total_steps(self) -> int:
        return self.warmup_steps + self.rounds * self.steps_per_round


class Rank:
    """One worker process and the lines it answers with."""

    def __init__(self, contestant: Contestant, assignment: Assignment, log: IO[str]) -> None:
        self.log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.step_worker", assignment.as_argument()],
            cwd=REPOSITORY,
            env=_environment_of(contestant, assignment.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def ask(self, request: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead rank is reported when its answer is read
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=REPLY_TIMEOUT)
        except queue.Empty:
            raise ContestantFailedError(f"no answer within {REPLY_TIMEOUT:.0f} s") from None
        if line is None:
            raise ContestantFailedError(f"its process ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContestantFailedError(str(answer["error"]).splitlines()[0])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait(timeout=5)
        self.log.flush()
        lines = Path(self.log.name).read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{cause}, {said[-1] if said else 'nothing on stderr'}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Team:
    """All ranks of one contestant."""

    def __init__(self, contestant: Contestant, settings: Settings, folder: Path) -> None:
        self.name = contestant.name
        self.ranks: list[Rank] = []
        self._files = contextlib.ExitStack()
        for rank in range(settings.ranks):
            assignment = Assignment(
                contestant=contestant.name,
                rank=rank,
                ranks=settings.ranks,
                store=str(folder / f"{contestant.name}.store"),
                threads=settings.threads,
                width=settings.width,
                blocks=settings.blocks,
                tokens=settings.tokens,
                learning_rate=settings.learning_rate,
            )
            log = self._files.enter_context((folder / f"{contestant.name}.{rank}.log").open("w"))
            self.ranks.append(Rank(contestant, assignment, log))

    def gather(self, request: Mapping[str, object] | None = None) -> list[dict[str, Any]]:
        """Every rank's answer to a request (None: to its start)."""
        if request is not None:
            for rank in self.ranks:
                rank.ask(request)
        return [rank.reply() for rank in self.ranks]

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
        self._files.close()


@dataclass
class Record:
    """Per step the mean loss over ranks; per round and step the slowest rank's time; memory per rank."""

    losses: list[float]
    seconds: list[list[float]]
    memory: list[dict[str, int | None]]

    def largest(self, field: str) -> int | None:
        values = [rank[field] for rank in self.memory]
        return max(v for v in values if v is not None) if None not in values and values else None

    @property
    def peak(self) -> int | None:
        return self.largest("peak")

    @property
    def peak_over_baseline(self) -> int | None:
        differences = [
            rank["peak"] - rank["baseline"]
            for rank in self.memory
            if rank["peak"] is not None and rank["baseline"] is not None
        ]
        return max(differences) if differences else None


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


def _environment_of(contestant: Contestant, threads: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in GOVERNED_VARIABLES}
    network = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**kept, **network, "OMP_NUM_THREADS": str(threads), **contestant.environment}


@contextlib.contextmanager
def _teams(
    contestants: Sequence[Contestant], settings: Settings, failures: dict[str, str]
) -> Iterator[dict[str, Team]]:
    """Start the contestants one after another and warm each up; those that cannot are in ``failures``."""
    teams: dict[str, Team] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for contestant in contestants:
                team = Team(contestant, settings, Path(folder))
                teams[contestant.name] = team
                try:
                    team.gather()
                except ContestantFailedError as error:
                    _drop(teams, contestant.name, error, failures)
            yield teams
        finally:
            for team in teams.values():
                team.end()


def _drop(teams: dict[str, Team], name: str, error: Exception, failures: dict[str, str]) -> None:
    failures[name] = str(error)
    console.print(f"[yellow]{name} cannot run: {error}")
    teams.pop(name).end()


def compete(contestants: Sequence[Contestant], settings: Settings) -> tuple[dict[str, Record], dict[str, str]]:
    """Run all rounds. Returns the records, and why a contestant has none."""
    failures: dict[str, str] = {}
    records: dict[str, Record] = {}
    with _teams(contestants, settings, failures) as teams:
        for name in list(teams):
            try:
                losses, _ = _turn(teams[name], settings.warmup_steps)
                records[name] = Record(losses, [], [])
            except ContestantFailedError as error:
                _drop(teams, name, error, failures)
        for index in range(settings.rounds):
            for name in turn_order(list(teams), index) if teams else ():
                try:
                    losses, seconds = _turn(teams[name], settings.steps_per_round)
                except ContestantFailedError as error:
                    _drop(teams, name, error, failures)
                    continue
                records[name].losses += losses
                records[name].seconds.append(seconds)
        for name, team in teams.items():
            records[name].memory = team.gather({"do": "memory"})
    return {name: record for name, record in records.items() if name not in failures}, failures


def _turn(team: Team, steps: int) -> tuple[list[float], list[float]]:
    """Train some steps: the mean loss over the ranks and the slowest rank's time, per step."""
    answers = team.gather({"do": "run", "steps": steps})
    losses = [sum(ranks) / len(ranks) for ranks in zip(*(a["losses"] for a in answers), strict=True)]
    seconds = [max(ranks) for ranks in zip(*(a["seconds"] for a in answers), strict=True)]
    return losses, seconds


def disagreements(records: Mapping[str, Record]) -> dict[str, float]:
    """Contestants that average gradients and yet trained something else than FSDP2, by how much."""
    if SAME_LOSSES_AS not in records:
        return {}
    reference = records[SAME_LOSSES_AS]
    found = {name: largest_difference(r.losses, reference.losses) for name, r in records.items() if name != "unsharded"}
    return {name: difference for name, difference in found.items() if not difference <= LOSS_TOLERANCE}


def faster_of(names: Sequence[str], records: Mapping[str, Record]) -> str | None:
    """The contestant with the smaller median round time over the whole run."""
    present = [name for name in names if name in records]
    return min(present, key=lambda n: spread(round_medians(records[n].seconds)).median, default=None)


def summarise(records: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """Everything reported about each contestant, JSON-ready; no ratio to a reference that did not run."""
    references = {
        "fsdp2": "fsdp2" if "fsdp2" in records else None,
        "better_peer": faster_of(PEERS, records),
        "better_peer_keeping_memory": faster_of(PEERS_KEEPING_MEMORY, records),
    }
    summary: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        times = round_medians(record.seconds)
        entry: dict[str, Any] = {
            "median_step_seconds": spread([s for turn in record.seconds for s in turn]).median,
            "final_loss": record.losses[-1],
            "largest_loss_difference_to_fsdp2": None,
            "peak_bytes": record.peak,
            "peak_over_baseline_bytes": record.peak_over_baseline,
            "memory_by_rank": record.memory,
            "seconds": record.seconds,
            "losses": record.losses,
        }
        for label, reference in references.items():
            if reference is None:
                continue
            base = records[reference]
            ratio = paired_spread(times, round_medians(base.seconds))
            entry[f"time_ratio_to_{label}"] = {"reference": reference, **ratio.as_json()}
        if (base := records.get("fsdp2")) is not None:
            entry["largest_loss_difference_to_fsdp2"] = largest_difference(record.losses, base.losses)
            for field in ("peak", "peak_over_baseline"):
                mine, theirs = getattr(record, field), getattr(base, field)
                entry[f"{field}_ratio_to_fsdp2"] = mine / theirs if mine and theirs else None
        summary[name] = entry
    return summary


def _ratio_text(entry: Mapping[str, Any], label: str) -> str:
    ratio = entry.get(f"time_ratio_to_{label}")
    if ratio is None:
        return "-"
    return f"{ratio['median']:.2f} ({ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f})"


def _optional(value: float | None, spec: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, spec)


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
            _ratio_text(entry, "fsdp2"),
            _ratio_text(entry, "better_peer"),
            _ratio_text(entry, "better_peer_keeping_memory"),
            _optional(entry["peak_over_baseline_bytes"], ".0f", 2**20),
            _optional(entry.get("peak_over_baseline_ratio_to_fsdp2"), ".2f"),
            _optional(entry["peak_bytes"], ".0f", 2**20),
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
