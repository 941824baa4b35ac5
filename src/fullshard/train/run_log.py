"""What rank 0 shows and writes while a run trains: terminal, `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fullshard.train.metrics import Record
from fullshard.train.run_folder import METRICS, TENSORBOARD

PLAIN_LINES = 10  # lines of a whole run where there is no terminal
SHOWN_IN_TENSORBOARD = ("bits_per_byte", "lr", "grad_norm", "tokens_per_s")


class PipeConsole(Console):
    """A console that, once nobody reads its output any more, says so once and is silent."""

    on_closed: Callable[[], None] = staticmethod(lambda: None)

    def on_broken_pipe(self) -> None:
        """Called by rich when the reader has closed the pipe, as `head` does."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at exit
        self.on_closed()


class RunLog:
    """Appends records to files and shows them: a progress bar on a terminal, occasional lines elsewhere.

    Silent on ranks that do not lead: nothing is written and nothing shown.
    """

    console: PipeConsole
    _leads: bool
    _steps: int
    _file: TextIO | None
    _tensorboard: Any
    _bar: Progress | None

    def __init__(self, folder: Path, steps: int, done: int, *, leads: bool, tensorboard: bool = False) -> None:
        """Open the files of a run.

        Args:
            folder: the run's folder.
            steps: optimizer steps of the whole run.
            done: steps done.
            leads: True on rank 0.
            tensorboard: write for TensorBoard, too.
        """
        self.console = PipeConsole(quiet=not leads)
        self._leads, self._steps = leads, steps
        self._file = (folder / METRICS).open("a", encoding="utf-8") if leads else None
        self._tensorboard = None
        if leads and tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # not installed with fullshard

            self._tensorboard = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1)
        self._bar = _progress_bar(self.console, steps, done) if leads and self.console.is_terminal else None

    def record(self, record: Record) -> None:
        """Append a record to the files, so that an interrupted run keeps it, and show it."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tensorboard:
            for name in SHOWN_IN_TENSORBOARD:
                if name in record:
                    self._tensorboard.add_scalar(f"{record['kind']}/{name}", record[name], record["step"])
        if record["kind"] == "train":
            self._show_step(record)
        else:
            kind, on = record["kind"].replace("_", " "), f"on {record['bytes']:,} held-out bytes"
            self.say(f"step {record['step']}: {kind} {record['bits_per_byte']:.3f} bits/byte {on}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def sync(self) -> None:
        """Flush the records to disk: a checkpoint must not exist without the records before it."""
        if self._file:
            os.fsync(self._file.fileno())
        if self._tensorboard:
            self._tensorboard.flush()

    def _show_step(self, record: Record) -> None:
        step, left = record["step"], (self._steps - record["step"]) * record["elapsed_s"] / record["step"]
        text = f"loss {record['bits_per_byte']:.3f} bits/byte, {record['tokens_per_s']:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, text=text)
        elif step % max(1, self._steps // PLAIN_LINES) == 0 or step in (1, self._steps):
            self.say(f"step {step}/{self._steps}  {text}, {left:.0f} s left")

    def __enter__(self) -> RunLog:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._bar and self._bar.stop, self._file and self._file.close):
            if each:
                each()
        if self._tensorboard:
            self._tensorboard.close()


def _progress_bar(console: Console, steps: int, done: int) -> Progress:
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    bar.add_task("train", total=steps, completed=done, text="")
    return bar
