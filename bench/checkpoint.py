"""fullshard's checkpoints and weight files beside torch's, on two gloo CPU ranks.

    python -m bench.checkpoint --write-document               # about six minutes on two cores
    python -m bench.checkpoint --what save --what load --rounds 7
    python -m bench.checkpoint --quick --results /tmp/try     # a tiny model, to see that everything works

``save_weights``, ``save``   a checkpoint of the model, and of the model with AdamW's state, on the disk (``fsync``)
``async_save``              the same as ``save``, in the background: until the call returns, and until it is on the disk
``async_save_kept``         with memory for the copy that both keep from call to call; torch's default does not
``load_weights``, ``load``  back into the sharded model, and optimizer
``export``                  the full weights as one ``.safetensors`` file
``import``                  from such a file, the same one for all, into the sharded model

By: fullshard's ``fully_shard`` and both forms of its wrapper, which call the same functions, and torch FSDP2 and FSDP1
(see :mod:`bench.checkpoint_systems` for what they call). Every contestant has one process per rank, all alive in one
run, and they take turns; a round gives everyone one turn, in an order that changes every round. One round comes before,
whose times do not count, and one after, in which memory is sampled. What was read is compared bit for bit with what was
saved, every time; a run with a wrong value reports no times. Files that are read are in the page cache.

*Extra memory* is the high-water mark of a rank's resident memory beyond what it held before the call, largest of all
ranks and rounds. Mapped files count in it, as the kernel counts them; in the last round they are told apart.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import report
from bench.checkpoint_report import (
    OPERATIONS,
    Operation,
    Way,
    document_block,
    plot,
    summarise,
    table,
    update_targets,
    verdicts,
)
from bench.checkpoint_systems import FILE, KEEPERS, digest, write_weights
from bench.checkpoint_worker import TRAINED, Answer, Request
from bench.comparison import LOSS_TOLERANCE
from bench.contestants import FSDP1_FLAT, Contestant, process_environment
from bench.environment import current_environment
from bench.models import GPT, GPTShape
from bench.statistics import turn_order
from bench.step_worker import Assignment, available_memory
from bench.teams import ContestantFailedError, Launch, Team, console

TOKENS = 64
PROCESS_BYTES = 0.35 * 2**30  # of a rank, beside what it holds of the model


@dataclass(frozen=True)
class Settings:
    """One run."""

    width: int
    layers: int
    rounds: int
    threads: int
    ranks: int = 2

    @property
    def shape(self) -> GPTShape:
        return GPTShape(self.width, self.layers, TOKENS)

    @property
    def parameters(self) -> int:
        """How many the model has."""
        shape = self.shape
        rows = 12 * shape.blocks * shape.width + 13 * shape.blocks + 2 * shape.vocabulary + shape.sequence + 2
        return rows * shape.width

    def launch(self, system: str, folder: Path) -> Launch:
        """How the ranks of a system are started."""
        store = str(folder / f"{system}.store")
        assignments = [
            Assignment(system, rank, self.ranks, store, self.threads, self.width, self.layers, TOKENS, 1e-3)
            for rank in range(self.ranks)
        ]
        environment = process_environment(Contestant(system, system), self.threads)
        return Launch(system, "bench.checkpoint_worker", environment, [a.as_argument() for a in assignments])


class Contest:
    """The teams of all systems, their common file, and who cannot go on.

    Args:
        settings: Of the run.
        folder: For their files.
    """

    teams: dict[str, Team]
    failures: dict[str, str]
    losses: dict[str, float]
    _settings: Settings
    _folder: Path

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.teams, self.failures, self.losses = {}, {}, {}
        self._settings, self._folder = settings, folder
        self.file.mkdir()
        torch.manual_seed(0)
        write_weights(GPT(settings.shape), self.file / FILE)
        (self.file / FILE).read_bytes()  # into the page cache, if it is not there

    @property
    def file(self) -> Path:
        """The folder of the file that everybody imports."""
        return self._folder / "file"

    def start(self, system: str) -> None:
        """Start a system's ranks."""
        self.teams[system] = Team(self._settings.launch(system, self._folder), self._folder)
        try:
            answers = self.teams[system].gather()
            self.losses[system] = sum(answer["loss"] for answer in answers) / len(answers)
        except ContestantFailedError as error:
            self._drop(system, error)

    def end(self) -> None:
        for team in self.teams.values():
            team.end()

    def call(self, system: str, request: Request) -> list[Answer] | None:
        """Every rank's answer; None if the system cannot do it, or could not do something earlier."""
        if system not in self.teams:
            return None
        try:
            return [Answer(**answer) for answer in self.teams[system].gather(request.as_message())]
        except ContestantFailedError as error:
            self._drop(system, error)
            return None

    def _drop(self, system: str, error: Exception) -> None:
        self.failures[system] = str(error)
        console.print(f"[yellow]{system} cannot go on: {error}")
        self.teams.pop(system).end()

    def compete(self, operation: Operation, ways: Sequence[Way]) -> dict[str, list[list[Answer]]]:
        """All rounds of one operation: by way and round, what the ranks answered. Those that failed are left out."""
        place = self._folder / operation.name
        place.mkdir()
        found: dict[str, list[list[Answer]]] = {way.name: [] for way in ways}
        by_name = {way.name: way for way in ways}
        for way in ways:
            if operation.made_by is not None:
                self.call(way.system, Request(operation.made_by, str(_made(place / way.name))))
        last = self._settings.rounds + 1
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
            if way.system not in self.teams:
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


def systems_of(only: Sequence[str] | None) -> list[str]:
    """Whom to start: those asked for, or all but the optional one.

    Raises:
        ValueError: If a name is unknown.
    """
    for name in only or ():
        if name not in KEEPERS:
            raise ValueError(f"unknown contestant {name!r}; known are {', '.join(KEEPERS)}")
    return [name for name in KEEPERS if (name in only if only else name != FSDP1_FLAT)]


def refuse_what_does_not_fit(settings: Settings, systems: int, folder: Path) -> None:
    """Stop before starting anyone if there is too little memory, for page cache as well, or too little disk."""
    everything = 3 * 4 * settings.parameters
    files = (systems + 1) * everything
    needed = systems * (everything + settings.ranks * PROCESS_BYTES) + everything + files
    free = available_memory()
    if free is not None and needed > free:
        raise typer.BadParameter(
            f"{systems} contestants and their files in the page cache need about {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free; use fewer --layers, or --only some contestants"
        )
    if files > shutil.disk_usage(folder).free:
        raise typer.BadParameter(f"the files need about {files / 2**30:.1f} GiB; choose another --folder")


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
        summary["not_run"] = {way.name: contest.failures[way.system] for way in ways if way.name not in found}
        contest.forget(operation)
        console.print(f"  {operation.name}: {time.monotonic() - started:.0f} s", soft_wrap=True)
        yield operation.name, summary


def run(settings: Settings, operations: Sequence[Operation], systems: Sequence[str], folder: Path) -> dict[str, Any]:
    """Start everyone, do all operations, and say how it went, JSON-ready."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        contest = Contest(settings, Path(place))
        try:
            for system in systems:
                contest.start(system)
            summaries = dict(_operations(contest, operations, systems))
        finally:
            contest.end()
    return {
        "benchmark": "checkpoint",
        "settings": {**asdict(settings), "parameters": settings.parameters, "files_on": kind_of_file_system(folder)},
        "environment": current_environment().as_json(),
        "losses": contest.losses,
        "operations": summaries,
        "wrong": wrong_values(contest.losses, summaries),
        "not_run": contest.failures,
    }


def wrong_values(losses: Mapping[str, float], summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What did not go as it must: other losses than the first one's, or values that are not those saved."""
    first = next(iter(losses.values()), 0.0)
    found = [f"the loss of {name}" for name, loss in losses.items() if not abs(loss - first) <= LOSS_TOLERANCE]
    return found + [f"{name} of {way}" for name, summary in summaries.items() for way in summary["wrong"]]


def _finish(result: Mapping[str, Any], path: Path, document: Path | None) -> bool:
    """Write and print everything. True if nothing was wrong."""
    report.write_json(path, result)
    if result["wrong"] or not result["operations"]:
        console.print(f"[red]no times are reported: {'; '.join(result['wrong']) or 'nothing ran'}", soft_wrap=True)
        return False
    console.print(f"\n{table(result)}\n", markup=False, soft_wrap=True)
    for line in verdicts(result):
        console.print(line, soft_wrap=True)
    image = path.with_suffix(".png")
    drawn = image if plot(image, result) else None
    if document is not None:
        name = f"checkpoint:{result['settings']['width']}"
        report.update_document(document, name, document_block(result, drawn, document))
        update_targets(document, result)
    console.print(f"wrote {path.name}")
    return True


def main(
    width: Annotated[int, typer.Option(help="Model width.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns that count.")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    what: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(o.name for o in OPERATIONS)}; by default all.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this contestant; repeat for several.")] = None,
    quick: Annotated[bool, typer.Option(help="A tiny model, one round.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where files go; by default where temporary ones do.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the tables.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the table into the page.")] = False,
) -> None:
    """Save, load, export and import one GPT with fullshard and torch, in turns; compare values, time and memory."""
    known = {operation.name: operation for operation in OPERATIONS}
    for name in what or ():
        if name not in known:
            raise typer.BadParameter(f"unknown {name!r}; known are {', '.join(known)}", param_hint="--what")
    try:
        systems = systems_of(only)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    settings = Settings(64, 2, 1, threads) if quick else Settings(width, layers, rounds, threads)
    place = Path(tempfile.gettempdir()) if folder is None else folder
    refuse_what_does_not_fit(settings, len(systems), place)
    started = time.monotonic()
    console.print(f"[bold]width {settings.width}, {settings.layers} layers: {', '.join(systems)}", soft_wrap=True)
    result = run(settings, [known[name] for name in known if not what or name in what], systems, place)
    # What only some took part in does not replace the results of all.
    part = "_part" if what or only else ""
    path = results / f"checkpoint_{settings.width}{part}_{current_environment().name}.json"
    right = _finish(result, path, document if write_document else None)
    console.print(f"{time.monotonic() - started:.0f} s")
    raise typer.Exit(0 if right else 1)


if __name__ == "__main__":
    # Killed from outside, still end the workers: the finally blocks run on SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    typer.run(main)
