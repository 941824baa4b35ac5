"""Contestants train in turns: the settings of a run, the records that it gives, and what is concluded from these."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench import resident_memory
from bench.command_line import Options, UsageError
from bench.contestants import CONTESTANTS, TWO_KEPT, UNSHARDED, WITH_OURS, Contestant
from bench.models import GPTShape
from bench.statistics import largest_difference, paired_spread, round_medians, spread
from bench.teams import Launch, Teams
from bench.turns import turn_order

LOSS_TOLERANCE = 1e-5
TRAINER = "bench.training.trainer"
# Per rank, and as a generous mean over the contestants: bytes held per parameter byte, and bytes beside that.
PARAMETER_COPIES, PROCESS_BYTES = 4.5, 0.25 * 2**30


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """What the benchmarks of training can be told; None and nothing: as the measurement has it."""

    width: tuple[int, ...] = (512, 1024)
    blocks: int | None = None
    tokens: int | None = None
    microbatches: int | None = None
    ranks: int | None = None
    threads: int = 1
    rounds: int = 9
    steps_per_round: int | None = None
    warmup_steps: int = 2
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """One thing to measure: a way to train, and names of the CONTESTANTS who take part."""

    name: str
    title: str
    contestants: tuple[str, ...]
    # By width: compute-heavy, and dominated by parameters. More blocks of width 1024 would not fit into 24 GiB for all.
    blocks: Mapping[int, int] = field(default_factory=lambda: {512: 6, 1024: 4})
    tokens: Mapping[int, int] = field(default_factory=lambda: {512: 256, 1024: 64})  # of a microbatch
    ranks: int = 2
    microbatches: int = 1
    steps_per_round: int = 2

    def chosen(self, only: Sequence[str] = ()) -> list[Contestant]:
        """The contestants, or those asked for that can take part."""
        names = [name for name in only if name in self.contestants] if only else self.contestants
        return [CONTESTANTS[name] for name in names]


@dataclass(frozen=True)
class Settings:
    """One run. ``tokens`` are those of one microbatch."""

    what: str
    width: int
    blocks: int
    tokens: int
    microbatches: int
    ranks: int
    threads: int
    warmup_steps: int
    rounds: int
    steps_per_round: int
    learning_rate: float = 1e-3

    @classmethod
    def of(cls, measurement: Measurement, width: int, options: TrainingOptions) -> Settings:
        """Those of the measurement, but for what the options say."""
        return cls(
            what=measurement.name,
            width=width,
            blocks=options.blocks or measurement.blocks.get(width, 6),
            tokens=options.tokens or measurement.tokens.get(width, 64),
            microbatches=options.microbatches or measurement.microbatches,
            ranks=options.ranks or measurement.ranks,
            threads=options.threads,
            warmup_steps=options.warmup_steps,
            rounds=options.rounds,
            steps_per_round=options.steps_per_round or measurement.steps_per_round,
        )

    @property
    def assignment(self) -> dict[str, Any]:
        told = asdict(self)
        return {name: told[name] for name in ("what", "width", "blocks", "tokens", "microbatches", "learning_rate")}


@dataclass
class Record:
    """Per step the mean loss over ranks; per round and step the slowest rank's time; memory per rank.

    [Note: Two kinds of memory]
    *Counted* is the peak of the bytes of all live tensors in one step, from a record of every allocation and free: what
    the system needs, and what carries over to another allocator. *Resident* is what the kernel gave the process. The
    difference is heap slack: freed blocks that glibc still holds, gaps between blocks, and memory that holds no tensor.
    """

    losses: list[float]
    seconds: list[list[float]]
    memory: list[dict[str, Any]]

    @property
    def bytes_of(self) -> dict[str, int | None]:
        """Of the rank that needs, or sends, most."""
        peaks, baselines = ([rank.get(key) for rank in self.memory] for key in ("peak", "baseline"))
        pairs = [peak - base for peak, base in zip(peaks, baselines, strict=True) if None not in (peak, base)]
        return {
            "counted": self._largest("counted"),
            "peak": self._largest("peak"),
            "peak_over_baseline": max(pairs, default=None),
            "sent": self._largest("sent_per_step"),
        }

    def _largest(self, key: str) -> int | None:
        values = [rank.get(key) for rank in self.memory]
        return None if None in values or not values else max(values)  # type: ignore[type-var]


# ------------------------------------------------------------------ the run


def refuse_what_does_not_fit(settings: Settings, contestants: int) -> None:
    """Stop before starting anyone if the sizes are impossible, or not all contestants fit into the free memory."""
    try:
        shape = GPTShape(settings.width, settings.blocks, settings.tokens)
    except ValueError as error:
        raise UsageError(str(error)) from None
    needed = contestants * settings.ranks * (PARAMETER_COPIES * 4 * shape.parameters + PROCESS_BYTES)
    free = resident_memory.available()
    if free is not None and needed > free:
        raise UsageError(
            f"{contestants} contestants need about {needed / 2**30:.1f} GiB together, "
            f"{free / 2**30:.1f} GiB are free; use fewer --blocks, or --only some contestants"
        )


def compete(
    contestants: Sequence[Contestant],
    settings: Settings,
    places: Sequence[Sequence[str]] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Record], dict[str, str]]:
    """Have all train in turns: the warm-up and all rounds. The records, and why a contestant has none.

    Args:
        contestants: Who trains.
        settings: What, and how often.
        places: Where each rank runs, see ``Launch``; empty: here.
        environment: Variables for all of them.
    """
    records: dict[str, Record] = {}
    told = {"ranks": settings.ranks, "threads": settings.threads, **settings.assignment}
    with Teams() as teams:
        for contestant in contestants:
            launch = Launch.of(contestant, TRAINER, teams.folder, contestant=asdict(contestant), **told)
            teams.start(replace(launch, places=places, environment={**launch.environment, **(environment or {})}))
        for name in list(teams.alive):
            answers = teams.ask(name, "warm_up", steps=settings.warmup_steps)
            if answers is not None:
                records[name] = Record(_by_step(answers, "losses", statistics.fmean), [], [])
        for index in range(settings.rounds):
            for name in turn_order(list(teams.alive), index) if teams.alive else ():
                answers = teams.ask(name, "run", steps=settings.steps_per_round)
                if answers is not None:
                    records[name].losses += _by_step(answers, "losses", statistics.fmean)
                    records[name].seconds.append(_by_step(answers, "seconds", max))
        for name in list(teams.alive):
            records[name].memory = teams.ask(name, "memory") or []
        return {name: record for name, record in records.items() if name not in teams.failures}, teams.failures


def _by_step(
    answers: Sequence[Mapping[str, Any]], key: str, combined: Callable[[Sequence[float]], float]
) -> list[float]:
    return [combined(ranks) for ranks in zip(*(answer[key] for answer in answers), strict=True)]


# ------------------------------------------------------------------ conclusions


def disagreements(records: Mapping[str, Record]) -> dict[str, float]:
    """Contestants that average gradients and yet trained something else, by how much.

    The reference is FSDP2; of wrappers, the first of them, FSDP1 unless it did not run.
    """
    exchanging = {name: record for name, record in records.items() if name != UNSHARDED}
    if not exchanging:
        return {}
    reference = exchanging.get("fsdp2", next(iter(exchanging.values())))
    found = {name: largest_difference(r.losses, reference.losses) for name, r in exchanging.items()}
    return {name: difference for name, difference in found.items() if not difference <= LOSS_TOLERANCE}


def faster_of(names: Sequence[str], records: Mapping[str, Record]) -> str | None:
    """The contestant with the smaller median round time over the whole run."""
    present = [name for name in names if name in records]
    return min(present, key=lambda n: spread(round_medians(records[n].seconds)).median, default=None)


def by_fsdp2(_: Contestant, records: Mapping[str, Record]) -> dict[str, str]:
    """Measure everybody by FSDP2, and by the better one of it and FSDP1; the same with fullshard's setting of malloc,
    and by FSDP2 that has this setting and keeps its last two units unsharded, as fullshard does.

    Without those that did not run.
    """
    peers = {
        "_to_fsdp2": ("fsdp2",),
        "_to_better_peer": ("fsdp1", "fsdp2"),
        "_to_fsdp2_with_our_malloc": (f"fsdp2{WITH_OURS}",),
        "_to_better_peer_with_our_malloc": (f"fsdp1{WITH_OURS}", f"fsdp2{WITH_OURS}"),
        "_to_two_kept": (TWO_KEPT,),
    }
    found = {end: faster_of(names, records) for end, names in peers.items()}
    return {end: name for end, name in found.items() if name is not None}


def by_peer(contestant: Contestant, records: Mapping[str, Record]) -> dict[str, str]:
    """Measure a contestant by its own peer, and by this one with fullshard's setting of malloc, if they ran."""
    found = {"": contestant.peer, "_with_our_malloc": f"{contestant.peer}{WITH_OURS}"}
    return {end: name for end, name in found.items() if name in records}


def summarize(records: Mapping[str, Record], references: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Everything reported about each contestant that ran, JSON-ready. ``references``: by contestant, whom it is
    measured by, by the end of the ratios' names."""
    summary: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        nbytes = record.bytes_of
        summary[name] = entry = {
            "median_step_seconds": spread([s for turn in record.seconds for s in turn]).median,
            "final_loss": record.losses[-1],
            "counted_bytes": nbytes["counted"],
            "peak_bytes": nbytes["peak"],
            "peak_over_baseline_bytes": nbytes["peak_over_baseline"],
            "sent_bytes_per_step": nbytes["sent"],
            "memory_by_rank": record.memory,
            "seconds": record.seconds,
            "losses": record.losses,
        }
        for end, reference in references.get(name, {}).items():
            entry.update({f"{key}{end}": value for key, value in _compared(record, records[reference]).items()})
            entry[f"time_ratio{end}"]["reference"] = reference
    return summary


def _compared(record: Record, base: Record) -> dict[str, Any]:
    ratios: dict[str, Any] = {
        "time_ratio": paired_spread(round_medians(record.seconds), round_medians(base.seconds)).as_json(),
        "largest_loss_difference": largest_difference(record.losses, base.losses),
    }
    theirs = base.bytes_of
    for name, mine in record.bytes_of.items():
        ratios[f"{name}_ratio"] = mine / theirs[name] if mine is not None and theirs[name] else None
    return ratios
