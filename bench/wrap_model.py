"""Which modules to make units: figures from a model of one training step, not from a measurement.

Several choices of units for two models, on several numbers of GPUs, by the schedule of
``bench/simulators/schedule.py``. With ``--write-document`` the tables and ``units.png`` go to ``docs/how_to/units.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench import report
from bench.command_line import Options as SharedOptions
from bench.environment import REPOSITORY
from bench.simulators.schedule import (
    EFFICIENCY,
    NETWORK_BANDWIDTH,
    NVLINK_BANDWIDTH,
    PARAMETER_BYTES,
    PEAK_FLOPS,
    PROTOCOLS,
    REDUCE_BYTES,
    SIMPLE,
    Fabric,
    Machine,
    ModelShape,
    Outcome,
    RingProtocol,
    UnitPlan,
    Wrapping,
    simulate,
)

PAGE = REPOSITORY / "docs" / "how_to" / "units.md"
RANKS = (8, 64, 1024)

GPT = ModelShape("1.4B", 24, 2048, 50_304, 12 * 2048**2, sequence=2048, sequences=4)
LLAMA = ModelShape("8B", 32, 4096, 128_256, 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336, sequence=8192, sequences=1)
MODELS = (GPT, LLAMA)

PLAIN = "blocks"
RECOMMENDED = "blocks, embed, norm + head kept"
BY_TWO, BY_FOUR = "... and 2 blocks per unit", "... and 4 blocks per unit"


def choices(blocks: int) -> list[Wrapping]:
    """Choices of units for a model with so many blocks. Modules that a title does not name are in the root."""

    def grouped(size: int, keep: bool = False) -> tuple[UnitPlan, ...]:
        names = [f"block{i}" for i in range(blocks)]
        return tuple(UnitPlan(tuple(names[i : i + size]), keep) for i in range(0, blocks, size))

    each, embed = grouped(1), UnitPlan(("embed",))
    tail, kept_tail = UnitPlan(("norm", "head")), UnitPlan(("norm", "head"), keep=True)
    return [
        Wrapping("the model is one unit", ()),
        Wrapping(PLAIN, each),
        Wrapping("blocks, embed, norm, head", (embed, *each, UnitPlan(("norm",)), UnitPlan(("head",)))),
        Wrapping("blocks, norm + head", (*each, tail)),
        Wrapping("blocks, norm + head kept", (*each, kept_tail)),
        Wrapping("blocks, norm + head kept, root resharded", (*each, kept_tail), keep_root=False),
        Wrapping(RECOMMENDED, (embed, *each, kept_tail)),
        Wrapping("... and the last block kept", (embed, *each[:-1], replace(each[-1], keep=True), kept_tail)),
        Wrapping("... and all blocks kept", (embed, *grouped(1, keep=True), kept_tail)),
        Wrapping(BY_TWO, (embed, *grouped(2), kept_tail)),
        Wrapping(BY_FOUR, (embed, *grouped(4), kept_tail)),
    ]


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the tables. ``tokens`` and ``bandwidth`` are factors."""

    title: str = "baseline"
    efficiency: float = EFFICIENCY
    bandwidth: float = 1.0
    tokens: int = 1
    protocols: tuple[RingProtocol, ...] = PROTOCOLS

    def machine(self, ranks: int) -> Machine:
        nvlink, network = NVLINK_BANDWIDTH * self.bandwidth, NETWORK_BANDWIDTH * self.bandwidth
        fabric = Fabric(ranks, nvlink, network, self.protocols)
        return Machine(fabric.collective_seconds, self.efficiency * PEAK_FLOPS)


BASE = Assumptions()
VARIATIONS = (
    BASE,
    Assumptions("half the bandwidth", bandwidth=0.5),
    Assumptions("Simple protocol only", protocols=(SIMPLE,)),
    Assumptions("efficiency 0.35", efficiency=0.35),
    Assumptions("efficiency 0.65", efficiency=0.65),
    Assumptions("4 times the tokens", tokens=4),
)


def outcomes(model: ModelShape, assumed: Assumptions = BASE) -> dict[str, dict[int, Outcome]]:
    """Per choice, per number of ranks."""
    pieces = replace(model, sequences=assumed.tokens * model.sequences).pieces()
    return {
        wrapping.title: {ranks: simulate(pieces, wrapping, assumed.machine(ranks)) for ranks in RANKS}
        for wrapping in choices(model.blocks)
    }


def tokens_needed(unit_parameters: int, machine: Machine) -> float:
    """Tokens per GPU from which the computation of a unit of so many parameters hides communication.

    Forward must hide the all-gather of the next unit; backward an all-gather and a reduce-scatter. Attention is left
    out.
    """
    gather = machine.collective_seconds(PARAMETER_BYTES * unit_parameters)
    reduce = machine.collective_seconds(REDUCE_BYTES * unit_parameters)
    return max(gather, (gather + reduce) / 2) * machine.flops_per_second / (2 * unit_parameters)


# ---------------------------------------------------------------- output


def table(model: ModelShape) -> str:
    """Step time and exposed time per choice and number of ranks, and peak memory (equal for all ranks)."""
    header = ["units", *(f"{ranks:,} GPUs" for ranks in RANKS), "peak GiB"]
    rows = []
    for title, by_ranks in outcomes(model).items():
        cells = [f"{1e3 * o.step_seconds:,.0f} ({1e3 * o.exposed_seconds:,.0f})" for o in by_ranks.values()]
        peak = by_ranks[RANKS[0]].peak_bytes / 2**30
        row = [title, *cells, f"{peak:.1f}"]
        rows.append([f"**{cell}**" for cell in row] if title == RECOMMENDED else row)
    return report.markdown_table(header, rows)


def tokens_table() -> str:
    """Tokens per GPU that hide the communication of units of one, two and four blocks."""
    sizes = [(model, ranks) for model in MODELS for ranks in RANKS]
    header = ["blocks per unit", *(f"{model.title}, {ranks:,}" for model, ranks in sizes)]
    rows = []
    for blocks in (1, 2, 4):
        needed = [tokens_needed(blocks * model.block_parameters, BASE.machine(ranks)) for model, ranks in sizes]
        rows.append([str(blocks), *(f"{tokens:,.0f}" for tokens in needed)])
    return report.markdown_table(header, rows)


def variations_table() -> str:
    """Step time relative to ``PLAIN`` under other assumptions: one, two and four blocks per unit."""
    sizes = [(model, ranks) for model in MODELS for ranks in (RANKS[0], RANKS[-1])]
    header = ["assumption", *(f"{model.title}, {ranks:,}" for model, ranks in sizes)]
    rows = []
    for assumed in VARIATIONS:
        found = {model.title: outcomes(model, assumed) for model in MODELS}
        cells = []
        for model, ranks in sizes:
            step = {name: by_ranks[ranks].step_seconds for name, by_ranks in found[model.title].items()}
            cells.append(" / ".join(f"{step[name] / step[PLAIN]:.2f}" for name in (RECOMMENDED, BY_TWO, BY_FOUR)))
        rows.append([assumed.title, *cells])
    return report.markdown_table(header, rows)


def document_blocks() -> dict[str, str]:
    """The blocks of the documentation page, by marker."""
    blocks = {f"wrap_model:{model.title}": table(model) for model in MODELS}
    return {**blocks, "wrap_model:tokens": tokens_table(), "wrap_model:variations": variations_table()}


def panels() -> list[report.Bars]:
    """Per model: the share of the step that is exposed communication per number of ranks, and peak memory."""
    found = []
    for model in MODELS:
        of_model = outcomes(model)
        for ranks in RANKS:
            steps = {name: by_ranks[ranks] for name, by_ranks in of_model.items()}
            exposed = {name: 100 * step.exposed_seconds / step.step_seconds for name, step in steps.items()}
            found.append(report.Bars(f"{model.title}, {ranks:,} GPUs: exposed, %", exposed, None, RECOMMENDED))
        peak = {name: by_ranks[RANKS[0]].peak_bytes / 2**30 for name, by_ranks in of_model.items()}
        found.append(report.Bars(f"{model.title}: peak, GiB", peak, None, RECOMMENDED))
    return found


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Nothing to choose."""

    document: Path = PAGE


def run(options: Options) -> None:
    """Model a training step for each choice of units."""
    for name, block in document_blocks().items():
        report.write_page(options, name, [block])
    if options.write_document:
        tokens = f"{GPT.tokens:,} tokens per GPU and step"
        title = f"Modeled, not measured: H100s, {tokens}. Exposed: communication not hidden, share of the step"
        report.plot(options.document.with_name("units.png"), title, panels(), columns=len(RANKS) + 1)
