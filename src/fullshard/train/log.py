"""Output of rank 0 during training: terminal and `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from fullshard.train.run_folder import METRICS, replace_text

LINES = 20  # about the losses of a whole run
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


def cut_metrics(path: Path, step: int, steps: int) -> None:
    """Remove the records that a run will repeat which resumes at `step` of `steps`, atomically."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    kept = [record for record in kept if record["kind"] != "final_validation" or record["step"] < steps]
    replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))


class PipeConsole(Console):
    """A console that stops the run, as SIGTERM does, once nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        """Stop without further output; rich calls this when the reader has closed the pipe, as `head` does."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at exit
        signal.raise_signal(signal.SIGTERM)


class RunLog:
    """Appends records to a file and prints some of them, on rank 0 only; on other ranks it does nothing."""

    console: PipeConsole

    def __init__(self, folder: Path, steps: int, *, is_rank0: bool) -> None:
        """Open the file of a run of so many optimizer steps."""
        self.console, self._steps = PipeConsole(quiet=not is_rank0), steps
        self._file: TextIO | None = (folder / METRICS).open("a", encoding="utf-8") if is_rank0 else None

    def record(self, record: Record) -> None:
        """Append a record to the file, so that an interrupted run keeps it, and show it."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        step, steps = record["step"], self._steps
        if record["kind"] != "train":
            kind, on = record["kind"].replace("_", " "), f"on {record['bytes']:,} held-out bytes"
            self.say(f"step {step}: {kind} {record['bits_per_byte']:.3f} bits/byte {on}")
        elif step % max(1, steps // LINES) == 0 or step in (1, steps):
            text = f"loss {record['bits_per_byte']:.3f} bits/byte, {record['tokens_per_s']:,.0f} tokens/s"
            self.say(f"step {step}/{steps}  {text}, {(steps - step) * record['elapsed_s'] / step:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def sync(self) -> None:
        """Flush the records to disk: a checkpoint must not exist without the records before it."""
        if self._file:
            os.fsync(self._file.fileno())
