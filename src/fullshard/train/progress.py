"""Progress display of rank 0: a progress bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

from types import TracebackType

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

PLAIN_LINES = 10  # lines of a whole run where there is no terminal


class RunProgress:
    """Shows step, loss, tokens per second and the time left. Silent if `console` is None."""

    _console: Console | None
    _steps: int
    _bar: Progress | None

    def __init__(self, console: Console | None, steps: int, done: int = 0) -> None:
        self._console = console
        self._steps = steps
        self._bar = None
        if console and console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._bar.add_task("train", total=steps, completed=done, text="")

    def train(self, record: Record, *, is_saving: bool = False) -> None:
        """Show a training record, and if a checkpoint is being written."""
        step, left = record["step"], (self._steps - record["step"]) * record["elapsed_s"] / record["step"]
        text = f"loss {record['bits_per_byte']:.3f} bits/byte, {record['tokens_per_s']:,.0f} tokens/s"
        if self._bar:
            text = f"saving, {text}" if is_saving else text
            self._bar.update(self._bar.task_ids[0], completed=step, text=text)
        elif self._console and (step % max(1, self._steps // PLAIN_LINES) == 0 or step in (1, self._steps)):
            self._console.print(f"step {step}/{self._steps}  {text}, {left:.0f} s left", highlight=False)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._console:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> RunProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
