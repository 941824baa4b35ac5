"""fullshard's checkpoints and weight files beside torch's, on two gloo CPU ranks.

``save_weights``, ``save``   a checkpoint of the model, and of the model with AdamW's state, on the disk (``fsync``)
``async_save``              the same as ``save``, in the background: until the call returns, and until it is on the disk
``async_save_kept``         with memory for the copy that both keep from call to call; torch's default does not
``load_weights``, ``load``  back into the sharded model, and optimizer
``export``                  the full weights as one ``.safetensors`` file
``import``                  from such a file, the same one for all, into the sharded model

By: fullshard's ``fully_shard`` and both forms of its wrapper, which call the same functions, and torch FSDP2 and FSDP1
(see ``systems.py`` for what they call). Every contestant has one process per rank, all alive in one
run, and they take turns; a round gives everyone one turn, in an order that changes every round. One round comes before,
whose times do not count, and one after, in which memory is sampled. What was read is compared bit for bit with what was
saved, every time; a run with a wrong value reports no times. Files that are read are in the page cache.

*Extra memory* is the high-water mark of a rank's resident memory beyond what it held before the call, largest of all
ranks and rounds. Mapped files count in it, as the kernel counts them; in the last round they are told apart.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import report, resident_memory
from bench.checkpoint.report import OPERATIONS, Operation, Way, bars, paragraphs, summarise, update_targets
from bench.checkpoint.systems import FILE, KEEPERS, digest, write_weights
from bench.checkpoint.worker import TRAINED, Answer, Request
from bench.command_line import Options as SharedOptions
from bench.command_line import UsageError, option
from bench.contestants import FSDP1_FLAT, system_alone
from bench.models import GPT, GPTShape
from bench.statistics import turn_order
from bench.teams import Launch, Teams
from bench.training.contest import LOSS_TOLERANCE

TOKENS = 64
TEMPORARY = Path(tempfile.gettempdir())
PROCESS_BYTES = 0.35 * 2**30  # of a rank, beside what it holds of the model


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Everything, by all but FSDP1's flat form: about six minutes on two cores."""

    width: int = 1024
    blocks: int = 8
    rounds: int = 4
    threads: int = 1
    ranks: int = 2
    what: tuple[str, ...] = option((), choices=tuple(operation.name for operation in OPERATIONS))
    only: tuple[str, ...] = option((), choices=tuple(KEEPERS))
    folder: Path = option(TEMPORARY, "Where files go.")

    @property
    def shape(self) -> GPTShape:
        return GPTShape(self.width, self.blocks, TOKENS)

    @property
    def parameters(self) -> int:
        """How many the model has."""
        shape = self.shape
        rows = 12 * shape.blocks * shape.width + 13 * shape.blocks + 2 * shape.vocabulary + shape.sequence + 2
        return rows * shape.width


class Contest:
    """The teams of all systems, and their common file.

    Args:
        options: Of the run.
        folder: For their files.
        teams: Alive as long as the contest.
    """

    losses: dict[str, float]
    teams: Teams
    _options: Options
    _folder: Path

    def __init__(self, options: Options, folder: Path, teams: Teams) -> None:
        self.losses, self.teams = {}, teams
        self._options, self._folder = options, folder
        self.file.mkdir()
        torch.manual_seed(0)
        write_weights(GPT(options.shape), self.file / FILE)
        (self.file / FILE).read_bytes()  # into the page cache, if it is not there

    @property
    def file(self) -> Path:
        """The folder of the file that everybody imports."""
        return self._folder / "file"

    def start(self, system: str) -> None:
        """Start a system's ranks."""
        told = {name: getattr(self._options, name) for name in ("ranks", "threads", "width", "blocks")}
        worker = "bench.checkpoint.worker"
        self.teams.start(Launch.of(system_alone(system), worker, self._folder, system=system, tokens=TOKENS, **told))
        losses: Any = self.teams.ask(system, "loss")
        if losses is not None:
            self.losses[system] = sum(losses) / len(losses)

    def call(self, system: str, request: Request) -> list[Answer] | None:
        """Every rank's answer; None if the system cannot do it, or could not do something earlier."""
        answers = self.teams.ask(system, "perform", **asdict(request))
        return None if answers is None else [Answer(**answer) for answer in answers]

    def compete(self, operation: Operation, ways: Sequence[Way]) -> dict[str, list[list[Answer]]]:
        """All rounds of one operation: by way and round, what the ranks answered. Those that failed are left out."""
        place = self._folder / operation.name
        place.mkdir()
        found: dict[str, list[list[Answer]]] = {way.name: [] for way in ways}
        by_name = {way.name: way for way in ways}
        for way in ways:
            if operation.made_by is not None:
                self.call(way.system, Request(operation.made_by, str(_made(place / way.name))))
        last = self._options.rounds + 1
        for index in range(last + 1):  # the first is to warm up, the last for memory
            for name in turn_order(list(by_name), index):
                way = by_name[name]
                path = self._path(operation, place, name)
                request = Request(way.method, str(path), operation.expect, operation.optimizer, sample=index == last)
                answers = self.call(way.system, request)
                if answers is not None:
                    found[name].append(answers)
                if operation.expect is None and not (operation.kept and index == last):
                    shutil.rmtree(path, ignore_errors=True)
        return {name: rounds for name, rounds in found.items() if len(rounds) == last + 1}

    def _path(self, operation: Operation, place: Path, name: str) -> Path:
        if operation.expect is None:
            return _made(place / name)
        return self.file if operation.made_by is None else place / name

    def check_exports(self, operation: Operation, ways: Sequence[Way]) -> list[str]:
        """Ways whose exported file has other names or bits than the first one's, or is read back as something else."""
        wrong, first = [], None
        for way in ways:
            path = self._folder / operation.name / way.name
            if way.system not in self.teams.alive:
                continue
            found = digest_of_file(path)
            first = first or found
            right = found == first
            if (path / FILE).exists():
                request = Request(f"import{way.method.removeprefix('export')}", str(path), TRAINED)
                answers = self.call(way.system, request)
                right &= answers is not None and all(answer.right for answer in answers)
            wrong += [] if right else [way.name]
        return wrong

    def forget(self, operation: Operation) -> None:
        """Remove its files."""
        shutil.rmtree(self._folder / operation.name, ignore_errors=True)


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def digest_of_file(folder: Path) -> str:
    """Of names, shapes and bits of the full weights that were exported to a folder, whatever the order."""
    if (folder / FILE).exists():
        from safetensors.torch import load_file

        found = load_file(folder / FILE)
    else:
        found = torch.load(folder / "model.pt", weights_only=True)
    names = sorted(found)
    return f"{[(name, found[name].shape) for name in names]} {digest(found[name] for name in names)}"


def systems_of(only: Sequence[str]) -> list[str]:
    """Whom to start: those asked for, or all but the optional one."""
    return [name for name in KEEPERS if (name in only if only else name != FSDP1_FLAT)]


def refuse_what_does_not_fit(options: Options, systems: int) -> None:
    """Stop before starting anyone if there is too little memory, for page cache as well, or too little disk."""
    everything = 3 * 4 * options.parameters
    files = (systems + 1) * everything
    needed = systems * (everything + options.ranks * PROCESS_BYTES) + everything + files
    free = resident_memory.available()
    if free is not None and needed > free:
        raise UsageError(
            f"{systems} contestants and their files in the page cache need about {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free; use fewer --blocks, or --only some contestants"
        )
    if files > shutil.disk_usage(options.folder).free:
        raise UsageError(f"the files need about {files / 2**30:.1f} GiB; choose another --folder")


def kind_of_file_system(folder: Path) -> str:
    """Such as ext4; "unknown" where the kernel does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    mounts = {fields[1]: fields[2] for fields in map(str.split, lines)}
    for parent in (folder.resolve(), *folder.resolve().parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return "unknown"


def _operations(
    contest: Contest, operations: Sequence[Operation], systems: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operation's name and summary, as they are done."""
    for operation in operations:
        started = time.monotonic()
        ways = [way for way in operation.ways if way.system in systems]
        if not ways:
            continue
        found = contest.compete(operation, ways)
        summary = summarise(operation, found)
        if operation.kept:
            summary["wrong"] += contest.check_exports(operation, [way for way in ways if way.name in found])
        summary["not_run"] = {way.name: contest.teams.failures[way.system] for way in ways if way.name not in found}
        contest.forget(operation)
        print(f"  {operation.name}: {time.monotonic() - started:.0f} s", flush=True)
        yield operation.name, summary


def measured(options: Options, operations: Sequence[Operation], systems: Sequence[str]) -> dict[str, Any]:
    """Start everyone, do all operations, and say how it went, JSON-ready."""
    with tempfile.TemporaryDirectory(dir=options.folder) as place, Teams(Path(place)) as teams:
        contest = Contest(options, Path(place), teams)
        for system in systems:
            contest.start(system)
        summaries = dict(_operations(contest, operations, systems))
    names = ("width", "rounds", "threads", "ranks", "parameters")
    settings = {"layers": options.blocks, **{name: getattr(options, name) for name in names}}
    return {
        "settings": {**settings, "files_on": kind_of_file_system(options.folder)},
        "losses": contest.losses,
        "operations": summaries,
        "wrong": wrong_values(contest.losses, summaries),
        "not_run": teams.failures,
    }


def wrong_values(losses: Mapping[str, float], summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What did not go as it must: other losses than the first one's, or values that are not those saved."""
    first = next(iter(losses.values()), 0.0)
    found = [f"the loss of {name}" for name, loss in losses.items() if not abs(loss - first) <= LOSS_TOLERANCE]
    return found + [f"{name} of {way}" for name, summary in summaries.items() for way in summary["wrong"]]


def run(options: Options) -> bool:
    """Save, load, export and import the same model in turns; compare values, times and memory."""
    systems = systems_of(options.only)
    refuse_what_does_not_fit(options, len(systems))
    print(f"width {options.width}, {options.blocks} blocks: {', '.join(systems)}", flush=True)
    chosen = [operation for operation in OPERATIONS if not options.what or operation.name in options.what]
    result = measured(options, chosen, systems)
    # What only some took part in does not replace the results of all.
    parts = (options.width, *(["part"] if options.what or options.only else []))
    right = bool(result["operations"]) and not result["wrong"]
    told = paragraphs(result) if right else [f"No times are reported: {'; '.join(result['wrong']) or 'nothing ran'}."]
    title = f"Checkpoints at width {options.width} (whiskers: smallest and largest)"
    report.publish(
        options if right else replace(options, write_document=False),
        "checkpoint",
        result,
        told,
        draw=(lambda path: report.plot_bars(path, title, bars(result))) if right else None,
        image_text=f"Checkpoints at width {options.width}",
        parts=parts,
        marker=f"checkpoint:{options.width}",
    )
    if right and options.write_document:
        update_targets(options.document, result)
    return right
