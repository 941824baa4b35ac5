"""Summary of a run at its end: losses beside baselines, bytes of training state on each rank, generated text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SHOWN_RANKS = 4  # with more ranks, only the smallest and the largest are shown
LOSS_NOTE = (
    "All three are computed on the same bytes. The model predicts each byte from at most {sequence} bytes before it "
    "and was trained on other files; its own size is not counted. Order-0 uses the byte frequencies of the training "
    "files. zlib does not use those: it compresses all held-out bytes as one stream, with a window of 32 KiB."
)
MEMORY_NOTE = (
    "Counted after a step: the tensors of this state, without unsharded parameters, activations, communication "
    "buffers, and the memory of Python and torch."
)


@dataclass(frozen=True)
class Footprint:
    """Bytes of training state."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all three."""
        return self.parameters + self.gradients + self.optimizer

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, *, local: bool) -> Footprint:
        """Count bytes after a step and before gradients are cleared; a missing gradient counts as its parameter.

        Args:
            model: the sharded model.
            optimizer: its optimizer.
            local: count the tensors that this rank holds; otherwise the full size of what they are shards of.
        """

        def count(tensors: Iterable[Tensor]) -> int:
            held = (t.to_local() if local and isinstance(t, DTensor) else t for t in tensors)
            return sum(t.numel() * t.element_size() for t in held)

        parameters = list(model.parameters())
        state = (t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
        return cls(count(parameters), count(p if p.grad is None else p.grad for p in parameters), count(state))


@dataclass(frozen=True)
class Summary:
    """Results of a run, as `summary.json` holds them; sizes in bytes."""

    parameters: int
    steps: int  # optimizer steps done
    bits_per_byte: float | None  # of the last validation; None if the run was stopped before it
    baselines: Mapping[str, float]  # bits per byte of each yardstick on the same bytes
    held_out_bytes: int  # that both were measured on
    bytes_per_rank: Sequence[Footprint]  # in rank order
    bytes_unsharded: Footprint  # of one unsharded copy
    prompt: str
    sample: str  # what was generated after it; empty if nothing was
    seconds: float  # in the training loop, validations included, over all parts of a resumed run
    comm_quantization: Mapping[str, int] | None = None  # bytes that rank 0 received; None if nothing is quantized


def show(summary: Summary, sequence: int, folder: Path, console: Console) -> None:
    """Print the results as tables, then the generated text and the location of the files.

    Args:
        summary: the results.
        sequence: most bytes that the model predicts the next one from.
        folder: of the run.
        console: to print to.
    """

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=not style)

    if summary.bits_per_byte is None:
        say("stopped before the final validation: no loss to compare with the baselines")
    else:
        console.print(_loss_table(summary, summary.bits_per_byte))
        for line in verdicts(summary.bits_per_byte, summary.baselines):
            say(line)
        say(LOSS_NOTE.format(sequence=sequence), "dim")
    console.print(_memory_table(summary))
    say(MEMORY_NOTE, "dim")
    if summary.comm_quantization:
        received, full = (f"{count / 2**20:.1f}" for count in summary.comm_quantization.values())
        say(f"quantized communication: rank 0 received {received} MiB instead of {full}")
    if summary.sample:
        text = Text.assemble((escape(summary.prompt), "bold"), escape(summary.sample))
        console.print(Panel(text, title="generated after the prompt", title_align="left"))
    say(f"{summary.seconds:.0f} s in the training loop; results in {folder}")


def verdicts(bits_per_byte: float, baselines: Mapping[str, float]) -> list[str]:
    """Return one sentence per baseline: by how much the model is better or worse."""
    sentences = []
    for name, value in baselines.items():
        gap = round(bits_per_byte - value, 3)
        relation = "worse than" if gap > 0 else "better than"
        sentences.append(
            f"the model is {abs(gap):.3f} bits per byte {relation} {name}" if gap else f"the model equals {name}"
        )
    return sentences


def as_text(sample: bytes) -> str:
    """Return generated bytes as UTF-8; invalid bytes appear as `\\xff`."""
    return sample.decode("utf-8", errors="backslashreplace")


def escape(text: str) -> str:
    """Escape terminal control: only printable characters, newlines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _loss_table(summary: Summary, bits_per_byte: float) -> Table:
    table = Table(title=f"validation on {summary.held_out_bytes:,} held-out bytes", title_justify="left")
    table.add_column("predictor")
    table.add_column("bits per byte", justify="right")
    table.add_row(f"this model ({summary.parameters:,} parameters)", f"{bits_per_byte:.3f}", style="bold")
    for name, value in summary.baselines.items():
        table.add_row(name, f"{value:.3f}")
    return table


def _memory_table(summary: Summary) -> Table:
    columns = {f"rank {rank}": local for rank, local in enumerate(summary.bytes_per_rank)}
    if len(columns) > SHOWN_RANKS:
        ordered = sorted(summary.bytes_per_rank, key=lambda local: local.total)
        columns = {"smallest rank": ordered[0], "largest rank": ordered[-1]}
    columns["one unsharded copy"] = summary.bytes_unsharded
    table = Table(title="training state in MiB", title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in ("parameters", "gradients", "optimizer", "total"):
        sizes = [f"{getattr(footprint, row) / 2**20:.2f}" for footprint in columns.values()]
        label = "optimizer state" if row == "optimizer" else row
        table.add_row(label, *sizes, style="bold" if row == "total" else None)
    return table
