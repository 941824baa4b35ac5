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
whose times do not count. What was read is compared bit for bit with what was saved, every time; a run with a wrong
value reports no times. Files that are read are in the page cache.

*Extra memory* is the high-water mark of a rank's resident memory beyond what it held before the call, largest of all
ranks and rounds. Mapped files count in it, as the kernel counts them.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench import report, resident_memory
from bench.checkpoint.report import OPERATIONS, Operation, paragraphs, summarize
from bench.checkpoint.systems import FILE, KEEPERS, digest, write_weights
from bench.checkpoint.worker import TRAINED, Answer
from bench.command_line import Options as SharedOptions
from bench.command_line import UsageError, option
from bench.contestants import CONTESTANTS
from bench.models import GPT, GPTShape
from bench.teams import Launch, Teams
from bench.training.contest import LOSS_TOLERANCE
from bench.turns import turn_order

TOKENS = 64
TEMPORARY = Path(tempfile.gettempdir())
PROCESS_BYTES = 0.35 * 2**30  # of a rank, beside what it holds of the model


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Everything: about six minutes on two cores."""

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


class Contest:
    """The teams of all systems, and a file that everybody imports, in a folder for all files."""

    def __init__(self, options: Options, folder: Path, teams: Teams) -> None:
        self.losses: dict[str, float] = {}
        self.teams, self._options, self._folder, self.file = teams, options, folder, folder / "file"
        self.file.mkdir()
        torch.manual_seed(0)
        write_weights(GPT(options.shape), self.file / FILE)
        (self.file / FILE).read_bytes()  # into the page cache, if it is not there

    def start(self, system: str) -> None:
        told: dict[str, Any] = {name: getattr(self._options, name) for name in ("ranks", "threads", "width", "blocks")}
        told |= {"system": system, "tokens": TOKENS}
        self.teams.start(Launch.of(CONTESTANTS[system], "bench.checkpoint.worker", self.teams.folder, **told))
        losses = self.teams.ask(system, "loss")
        if losses is not None:
            self.losses[system] = sum(losses) / len(losses)

    def call(self, system: str, **request: Any) -> list[Answer] | None:
        """Every rank's answer; None if the system cannot do it, or could not do something earlier."""
        answers = self.teams.ask(system, "perform", **request)
        return None if answers is None else [Answer(**answer) for answer in answers]

    def compete(self, operation: Operation, ways: Mapping[str, tuple[str, str]]) -> dict[str, list[list[Answer]]]:
        """All rounds of one operation: by contestant and round, what the ranks answered. Those that failed are left
        out."""
        place = self._folder / operation.name
        found: dict[str, list[list[Answer]]] = {name: [] for name in ways}
        if operation.made_by is not None:
            for name, (system, _) in ways.items():
                self.call(system, method=operation.made_by, path=str(_made(place / name)))
        for index in range(self._options.rounds + 1):  # the first is to warm up
            for name in turn_order(list(ways), index):
                system, method = ways[name]
                path = place / name if operation.writes or operation.made_by else self.file
                if operation.writes:
                    _made(path)
                request = {"expect": operation.expect, "optimizer": operation.optimizer}
                answers = self.call(system, method=method, path=str(path), **request)
                if answers is not None:
                    found[name].append(answers)
                if operation.writes and not (operation.kept and index == self._options.rounds):
                    shutil.rmtree(path, ignore_errors=True)
        return {name: rounds for name, rounds in found.items() if len(rounds) == self._options.rounds + 1}

    def summary_of(self, operation: Operation, ways: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """Do an operation, and say how it went; its files are gone afterwards."""
        found = self.compete(operation, ways)
        summary = summarize(operation, found)
        if operation.kept:
            summary["wrong"] += self.check_exports(operation, {name: ways[name] for name in found})
        summary["not_run"] = {name: self.teams.failures[way[0]] for name, way in ways.items() if name not in found}
        shutil.rmtree(self._folder / operation.name, ignore_errors=True)
        print(f"  {operation.name}", flush=True)
        return summary

    def check_exports(self, operation: Operation, ways: Mapping[str, tuple[str, str]]) -> list[str]:
        """Contestants whose exported file has other names or bits than the first one's, or is read back as something
        else."""
        wrong, first = [], None
        for name, (system, _) in ways.items():
            path = self._folder / operation.name / name
            if system not in self.teams.alive:
                continue
            found = digest_of_file(path)
            first = first or found
            answers = self.call(system, method="import", path=str(path), expect=TRAINED)
            right = found == first and answers is not None and all(answer.right for answer in answers)
            wrong += [] if right else [name]
        return wrong


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def digest_of_file(folder: Path) -> str:
    """Of names, shapes and bits of the full weights that were exported to a folder, whatever the order."""
    found = load_file(folder / FILE)
    names = sorted(found)
    return f"{[(name, found[name].shape) for name in names]} {digest(found[name] for name in names)}"


def refuse_what_does_not_fit(options: Options, systems: int) -> None:
    """Stop before starting anyone if there is too little memory, for page cache as well, or too little disk."""
    everything = 3 * 4 * options.shape.parameters
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


def measured(options: Options, operations: Sequence[Operation], systems: Sequence[str]) -> dict[str, Any]:
    """Start everyone, do all operations, and say how it went, JSON-ready."""
    with tempfile.TemporaryDirectory(dir=options.folder) as place, Teams() as teams:
        contest = Contest(options, Path(place), teams)
        for system in systems:
            contest.start(system)
        summaries = {}
        for operation in operations:
            ways = {name: way for name, way in operation.ways.items() if way[0] in systems}
            if ways:
                summaries[operation.name] = contest.summary_of(operation, ways)
    settings = {name: getattr(options, name) for name in ("width", "blocks", "rounds", "threads", "ranks")}
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(options.folder)], capture_output=True, text=True, check=False)
    settings |= {"parameters": options.shape.parameters, "files_on": kind.stdout.strip() or "an unknown file system"}
    return {
        "settings": settings,
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
    systems = [name for name in KEEPERS if not options.only or name in options.only]
    refuse_what_does_not_fit(options, len(systems))
    print(f"width {options.width}, {options.blocks} blocks: {', '.join(systems)}", flush=True)
    chosen = [operation for operation in OPERATIONS if not options.what or operation.name in options.what]
    result = measured(options, chosen, systems)
    right = bool(result["operations"]) and not result["wrong"]
    told = paragraphs(result) if right else [f"No times are reported: {'; '.join(result['wrong']) or 'nothing ran'}."]
    options = options if right else replace(options, write_document=False)
    # What only some took part in does not replace the results of all.
    parts = (options.width, *(["part"] if options.what or options.only else []))
    report.publish(options, "checkpoint", result, told, parts=parts, marker=f"checkpoint:{options.width}")
    return right
