"""Output of rank 0 during training: terminal, `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fullshard.train.run_folder import METRICS, TENSORBOARD, replace_text

PLAIN_LINES = 10  # lines of a whole run where there is no terminal
SHOWN_IN_TENSORBOARD = {"bits_per_byte", "lr", "grad_norm", "tokens_per_s"}
Record = dict[str, Any]


def bits(nats: float) -> float:
    """Convert a cross-entropy in nats per byte to bits per byte."""
    return nats / math.log(2)


def read_metrics(path: Path) -> list[Record]:
    """Return all records of a `metrics.jsonl`, in order, up to a torn line; none if there is no such file."""
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def copy_metrics(source: Path, target: Path, step: int, steps: int) -> None:
    """Write the records of a run up to optimizer step `step`, where it resumes, atomically.

    Args:
        source: a `metrics.jsonl`; it need not exist.
        target: the file to replace, which may be the same.
        step: records of later steps are left out.
        steps: of the whole run; the final validation after them is left out, as it will be repeated.
    """
    kept = [record for record in read_metrics(source) if record["step"] <= step]
    kept = [record for record in kept if record["kind"] != "final_validation" or record["step"] < steps]
    replace_text(target, "".join(json.dumps(record) + "\n" for record in kept))


class PipeConsole(Console):
    """A console that is silent once nobody reads its output any more, and says so once."""

    on_closed: Callable[[], None] = staticmethod(lambda: None)

    def on_broken_pipe(self) -> None:
        """Called by rich when the reader has closed the pipe, as `head` does."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at exit
        self.on_closed()


class RunLog:
    """Appends records to files and shows them: a progress bar on a terminal, occasional lines elsewhere.

    Silent on other ranks than rank 0: nothing is written and nothing shown.
    """

    console: PipeConsole

    def __init__(self, folder: Path, steps: int, done: int, *, is_rank0: bool, tensorboard: bool = False) -> None:
        """Open the files of a run.

        Args:
            folder: the run's folder.
            steps: optimizer steps of the whole run.
            done: steps done.
            is_rank0: True on rank 0.
            tensorboard: write for TensorBoard, too.
        """
        self.console, self._steps = PipeConsole(quiet=not is_rank0), steps
        self._file: TextIO | None = (folder / METRICS).open("a", encoding="utf-8") if is_rank0 else None
        self._tensorboard: Any = None
        self._bar: Progress | None = None
        if is_rank0 and tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # not installed with fullshard

            self._tensorboard = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1)
        if is_rank0 and self.console.is_terminal:
            columns = (MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self.console)
            self._bar.add_task("", total=steps, completed=done)

    def record(self, record: Record) -> None:
        """Append a record to the files, so that an interrupted run keeps it, and show it."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tensorboard:
            for name in SHOWN_IN_TENSORBOARD & record.keys():
                self._tensorboard.add_scalar(f"{record['kind']}/{name}", record[name], record["step"])
        step, steps = record["step"], self._steps
        if record["kind"] != "train":
            kind, on = record["kind"].replace("_", " "), f"on {record['bytes']:,} held-out bytes"
            self.say(f"step {step}: {kind} {record['bits_per_byte']:.3f} bits/byte {on}")
            return
        text = f"loss {record['bits_per_byte']:.3f} bits/byte, {record['tokens_per_s']:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        elif step % max(1, steps // PLAIN_LINES) == 0 or step in (1, steps):
            self.say(f"step {step}/{steps}  {text}, {(steps - step) * record['elapsed_s'] / step:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def sync(self) -> None:
        """Flush the records to disk: a checkpoint must not exist without the records before it."""
        if self._file:
            os.fsync(self._file.fileno())
        if self._tensorboard:
            self._tensorboard.flush()

    def __enter__(self) -> RunLog:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()
        for file in (self._file, self._tensorboard):
            if file:
                file.close()
