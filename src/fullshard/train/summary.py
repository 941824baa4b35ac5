"""Results of a run at its end: losses beside baselines, and bytes of training state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SHOWN_RANKS = 4  # the first ones; summary.json has all
LOSS_NOTE = (
    "All three are computed on the same bytes. The model predicts each byte from at most {sequence} bytes before it "
    "and was trained on other files; its own size is not counted. Order-0 uses the byte frequencies of the training "
    "files. zlib does not use those: it compresses all held-out bytes as one stream, with a window of 32 KiB."
)
MEMORY_NOTE = (
    "Counted after a step: the tensors of this state, without unsharded parameters, activations, communication "
    "buffers, and the memory of Python and torch."
)


def count_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of training state that this rank holds, and those of one unsharded copy.

    Call it after a step and before gradients are cleared; a missing gradient counts as its parameter.
    """
    parameters = list(model.parameters())
    state: dict[str, list[Tensor]] = {
        "parameters": [*parameters],
        "gradients": [p if p.grad is None else p.grad for p in parameters],
        "optimizer": [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)],
    }
    local = {
        name: sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
        for name, tensors in state.items()
    }
    return local, {name: sum(t.nbytes for t in tensors) for name, tensors in state.items()}


def show(summary: Mapping[str, Any], sequence: int, folder: Path, console: Console) -> None:
    """Print the content of `summary.json`: tables, then the location of the files.

    Args:
        summary: the content of the file.
        sequence: most bytes that the model predicts the next one from.
        folder: of the run.
        console: to print to.
    """

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=not style)

    if summary["bits_per_byte"] is None:
        say("stopped before the final validation: no loss to compare with the baselines")
    else:
        rows = {f"this model ({summary['parameters']:,} parameters)": [summary["bits_per_byte"]]}
        rows |= {name: [value] for name, value in summary["baselines"].items()}
        title = f"validation on {summary['held_out_bytes']:,} held-out bytes"
        console.print(_table(title, ["predictor", "bits per byte"], rows, digits=3, bold=0))
        say(LOSS_NOTE.format(sequence=sequence), "dim")
    console.print(_memory_table(summary["bytes_per_rank"], summary["bytes_unsharded"]))
    say(MEMORY_NOTE, "dim")
    say(f"{summary['seconds']:.0f} s in the training loop; results in {folder}")


def _memory_table(ranks: Sequence[Mapping[str, int]], unsharded: Mapping[str, int]) -> Table:
    columns = {f"rank {rank}": local for rank, local in enumerate(ranks[:SHOWN_RANKS])}
    columns["one unsharded copy"] = unsharded
    labels = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
    rows = {label: [sizes[name] / 2**20 for sizes in columns.values()] for name, label in labels.items()}
    rows["total"] = [sum(sizes.values()) / 2**20 for sizes in columns.values()]
    return _table("training state in MiB", ["", *columns], rows, digits=2, bold=3)


def _table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float]], digits: int, bold: int) -> Table:
    """Return a table of numbers, with one row in bold."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for number, (label, values) in enumerate(rows.items()):
        table.add_row(label, *(f"{value:.{digits}f}" for value in values), style="bold" if number == bold else None)
    return table
