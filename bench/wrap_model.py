"""Which modules to make units: plans of a training step for several choices, on several numbers of GPUs.

The engine itself runs, by ``dry_run``, on the planner's H100s. Nothing is measured. With ``--write-document`` the
tables and ``units.png`` go to ``docs/how_to/units.md``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench import report
from bench.command_line import Options as SharedOptions
from bench.environment import REPOSITORY
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.planning.cluster import MEASURED_BYTES, PRESETS, Cluster, Link
from fullshard.planning.dry_run import Step, dry_run

PAGE = REPOSITORY / "docs" / "how_to" / "units.md"
GIB = 2**30
MANY = (64, 512)  # 64 nodes are the most of which the network's figures are known
TOKEN_FACTORS = (1, 2, 4)
NODE = PRESETS["h100"].node


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class DecoderShape:
    """A decoder-only transformer with an untied head, and the batch per GPU.

    Args:
        title: For tables.
        width: Of the residual stream.
        blocks: How many.
        heads: Of attention.
        key_value_heads: Of attention.
        hidden: Width of the MLP.
        gated: Whether the MLP has a gate.
        vocabulary: Tokens that there are.
        sequence: Tokens of a sequence.
        sequences: Of a GPU and a step.
        checkpoint: Whether blocks are recomputed in backward.
    """

    title: str
    width: int
    blocks: int
    heads: int
    key_value_heads: int
    hidden: int
    gated: bool
    vocabulary: int
    sequence: int
    sequences: int
    checkpoint: bool

    @property
    def tokens(self) -> int:
        """Of a GPU and a step."""
        return self.sequence * self.sequences


GPT = DecoderShape("1.4B", 2048, 24, 16, 16, 8192, False, 50_304, 2048, 4, checkpoint=False)
LLAMA = DecoderShape("8B", 4096, 32, 32, 8, 14_336, True, 128_256, 8192, 1, checkpoint=True)
MODELS = (GPT, LLAMA)


class DecoderBlock(nn.Module):
    """Causal attention and an MLP, each after a norm.

    The norm is torch's layer norm without bias, which has as many parameters as an RMS norm and is one kernel on the
    meta device, too; RMS norm is several there.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, small = shape.width, shape.width // shape.heads * shape.key_value_heads
        self.shape = shape
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, small, bias=False), nn.Linear(width, small, bias=False)
        self.up, self.down = nn.Linear(width, shape.hidden, bias=False), nn.Linear(shape.hidden, width, bias=False)
        self.gate = nn.Linear(width, shape.hidden, bias=False) if shape.gated else None

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        shape, y = self.shape, self.attention_norm(x)
        query, key, value = (
            each(y).view(batch, sequence, -1, width // shape.heads).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        if shape.key_value_heads < shape.heads:
            key, value = (each.repeat_interleave(shape.heads // shape.key_value_heads, 1) for each in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        y = self.mlp_norm(x)
        inner = F.silu(self.gate(y)) * self.up(y) if self.gate is not None else F.gelu(self.up(y))
        return x + self.down(inner)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- choices


@dataclass(frozen=True)
class Units:
    """A choice of units. Modules that it does not name are in the root unit.

    Args:
        per_unit: Blocks of a unit; 0: the root has them.
        embed: Whether the embedding is a unit.
        tail: What norm and head are: ``"root"``, ``"units"`` of their own, or ``"unit"``: one of both.
        reshard: ``reshard_after_forward`` of the blocks.
        reshard_tail: That of norm and head.
        hybrid: Sharded within nodes, and replicated over them.
    """

    per_unit: int = 1
    embed: bool = True
    tail: str = "unit"
    reshard: bool | int | None = None
    reshard_tail: bool | None = False
    hybrid: bool = False

    def applies(self, ranks: int) -> bool:
        """Whether it differs from others on so many ranks: nodes matter if there are several."""
        return ranks > NODE or not (self.hybrid or (self.reshard is not None and self.reshard > 1))

    def mesh(self, ranks: int) -> DeviceMesh:
        """Of all ranks."""
        if not self.hybrid:
            return init_device_mesh("meta", (ranks,))
        return init_device_mesh("meta", (ranks // NODE, NODE), mesh_dim_names=("replicate", "shard"))

    def shard(self, model: Decoder, ranks: int) -> nn.Module:
        """Shard a model so."""
        options: dict[str, Any] = {
            "mesh": self.mesh(ranks),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        }
        blocks = list(model.blocks)
        for first in range(0, len(blocks), self.per_unit) if self.per_unit else ():
            fully_shard(blocks[first : first + self.per_unit], reshard_after_forward=self.reshard, **options)
        if self.embed:
            fully_shard(model.embed, **options)
        tails = {"root": [], "units": [[model.norm], [model.head]], "unit": [[model.norm, model.head]]}[self.tail]
        for modules in tails:
            fully_shard(modules, reshard_after_forward=self.reshard_tail, **options)
        return fully_shard(model, **options)


PLAIN = "blocks"
RECOMMENDED = "blocks, embed, norm + head"
BY_TWO, BY_FOUR = "... and 2 blocks per unit", "... and 4 blocks per unit"
WITHIN, HYBRID = "... and all-gathered again within nodes", "... and HSDP: one copy of the model per node"
CHOICES: Mapping[str, Units] = {
    "the model is one unit": Units(0, embed=False, tail="root"),
    PLAIN: Units(embed=False, tail="root"),
    "blocks, embed, norm, head": Units(tail="units", reshard_tail=None),
    "blocks, norm + head": Units(embed=False),
    RECOMMENDED: Units(),
    "... and every unit resharded": Units(reshard=True, reshard_tail=True),
    "... and all blocks kept": Units(reshard=False),
    BY_TWO: Units(2),
    BY_FOUR: Units(4),
    WITHIN: Units(reshard=NODE),
    HYBRID: Units(hybrid=True),
}


# ---------------------------------------------------------------- machines

EFA, INFINIBAND, AS_BANDWIDTH = "EFA", "InfiniBand", "bandwidth"
READINGS: Mapping[str, str] = {
    EFA: "EFA: more nodes add latency",
    AS_BANDWIDTH: "EFA, read as bandwidth: more nodes lower it",
    INFINIBAND: "InfiniBand, by NCCL's figures",
}
COLUMNS = ((8, EFA), (64, EFA), (512, EFA), (512, INFINIBAND))


def cluster_of(reading: str = EFA) -> Cluster:
    """H100s with one of the networks of ``READINGS``.

    Args:
        reading: Of EFA, messages of one size were measured. The preset takes what they take beyond those in a node as
            latency, once for each message; ``AS_BANDWIDTH`` in proportion to their bytes.
    """
    if reading == INFINIBAND:
        return PRESETS["h100-infiniband"]
    base = PRESETS["h100"]
    if reading == EFA:
        return base
    return dataclasses.replace(base, outer={nodes: _as_bandwidth(link, base) for nodes, link in base.outer.items()})


def _as_bandwidth(link: Link, base: Cluster) -> Link:
    inner, size = base.inner, MEASURED_BYTES
    beyond, reduced = link.latency - inner.latency, link.all_reduce_latency - inner.all_reduce_latency
    return dataclasses.replace(
        inner,
        bandwidth=size / (size / inner.bandwidth + beyond),
        all_reduce_bandwidth=size / (size / inner.all_reduce_bandwidth + reduced),
    )


# ---------------------------------------------------------------- plans


class Case(NamedTuple):
    """A plan to make. ``tokens``: a factor."""

    model: DecoderShape
    choice: str
    ranks: int
    reading: str = EFA
    tokens: int = 1


class Outcome(NamedTuple):
    """Of a plan: seconds of a step and of communication that nothing hides, and most bytes at a time."""

    seconds: float
    exposed: float
    peak: int

    @classmethod
    def of(cls, step: Step) -> Outcome:
        """Return that of a dry run."""
        return cls(step.seconds, sum(each.seconds for each in step.trace.exposed(0)), step.peak.nbytes)


Outcomes = Mapping[Case, Outcome]


def outcome(case: Case) -> Outcome:
    """Plan a step."""
    shape, units = case.model, CHOICES[case.choice]
    ids = torch.zeros(case.tokens * shape.sequences, shape.sequence, dtype=torch.int64, device="meta")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = Decoder(shape)
        if shape.checkpoint:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, DecoderBlock))
        sharded = units.shard(model, case.ranks)
        return sharded, torch.optim.AdamW(sharded.parameters())

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    return Outcome.of(dry_run(build, loss, cluster=cluster_of(case.reading), ranks=case.ranks))


def cases(models: Sequence[DecoderShape]) -> list[Case]:
    """All that the page shows."""
    base = [
        Case(model, name, ranks, reading)
        for model in models
        for name in CHOICES
        for ranks, reading in COLUMNS
        if CHOICES[name].applies(ranks)
    ]
    several = partial(_several, models)
    more = [Case(m, name, n, tokens=k) for m, n in several() for name in (RECOMMENDED, HYBRID) for k in TOKEN_FACTORS]
    names = (RECOMMENDED, *COMPARED)
    other = [Case(m, name, n, reading) for reading in READINGS for m, n in several() for name in names]
    return list(dict.fromkeys([*base, *more, *other]))


def _several(models: Sequence[DecoderShape]) -> list[tuple[DecoderShape, int]]:
    return [(model, ranks) for model in models for ranks in MANY]


def outcomes(models: Sequence[DecoderShape]) -> Outcomes:
    """All plans."""
    found: dict[Case, Outcome] = {}
    for case in cases(models):
        begun = time.monotonic()
        found[case] = each = outcome(case)
        print(
            f"{case.model.title}, {case.choice}, {case.ranks} GPUs, {case.reading}, {case.tokens} x tokens: "
            f"{1e3 * each.seconds:.0f} ms, {each.peak / GIB:.1f} GiB ({time.monotonic() - begun:.1f} s)",
            flush=True,
        )
    return found


# ---------------------------------------------------------------- output

COMPARED = (BY_FOUR, WITHIN, HYBRID)


def row(found: Outcomes, model: DecoderShape, name: str) -> list[str]:
    """Step time, exposed time and peak memory of a choice, per number of ranks."""
    own = {column: found.get(Case(model, name, *column)) for column in COLUMNS}
    times = ["-" if o is None else f"{1e3 * o.seconds:,.0f} ({1e3 * o.exposed:,.0f})" for o in own.values()]
    peaks = " / ".join("-" if o is None else f"{o.peak / GIB:.1f}" for (_, reading), o in own.items() if reading == EFA)
    cells = [name, *times, peaks]
    return [f"**{cell}**" for cell in cells] if name == RECOMMENDED else cells


def title_of(ranks: int, reading: str) -> str:
    """Of a column."""
    return f"{ranks:,} GPUs" + f", {reading}" * (ranks > NODE)


def table(found: Outcomes, model: DecoderShape) -> str:
    """A row per choice."""
    header = ["units", *(title_of(*column) for column in COLUMNS), "peak, GiB"]
    return report.markdown_table(header, [row(found, model, name) for name in CHOICES])


def tokens_table(found: Outcomes, models: Sequence[DecoderShape]) -> str:
    """Share of a step that is exposed communication, by tokens: sharded over all ranks, and HSDP."""
    header = ["model, GPUs", *(f"{factor * models[0].tokens:,} tokens" for factor in TOKEN_FACTORS)]
    rows = []
    for model, ranks in _several(models):
        pairs = [
            [found[Case(model, name, ranks, tokens=factor)] for name in (RECOMMENDED, HYBRID)]
            for factor in TOKEN_FACTORS
        ]
        cells = [" / ".join(f"{100 * each.exposed / each.seconds:.0f} %" for each in pair) for pair in pairs]
        rows.append([f"{model.title}, {ranks:,}", *cells])
    return report.markdown_table(header, rows)


def readings_table(found: Outcomes, models: Sequence[DecoderShape]) -> str:
    """Step time of the recommended choice for each reading of the network, and that of others relative to it."""
    header = ["network between nodes", "model, GPUs", "step, ms", *(name.removeprefix("... and ") for name in COMPARED)]
    rows = []
    for reading, title in READINGS.items():
        for model, ranks in _several(models):
            base = found[Case(model, RECOMMENDED, ranks, reading)].seconds
            others = [found[Case(model, name, ranks, reading)].seconds / base for name in COMPARED]
            cells = [f"{1e3 * base:,.0f}", *(f"{other:.2f}" for other in others)]
            rows.append([title, f"{model.title}, {ranks:,}", *cells])
    return report.markdown_table(header, rows)


def document_blocks(found: Outcomes, models: Sequence[DecoderShape]) -> dict[str, str]:
    """The blocks of the documentation page, by marker."""
    blocks = {f"wrap_model:{model.title}": table(found, model) for model in models}
    blocks["wrap_model:tokens"] = tokens_table(found, models)
    blocks["wrap_model:readings"] = readings_table(found, models)
    return blocks


def panels(found: Outcomes, models: Sequence[DecoderShape]) -> list[report.Bars]:
    """Per model: the share of the step that is exposed communication per number of ranks, and peak memory."""
    bars = []
    for model in models:
        for column in COLUMNS:
            some = {name: found[case] for name in CHOICES if (case := Case(model, name, *column)) in found}
            exposed = {name: 100 * each.exposed / each.seconds for name, each in some.items()}
            bars.append(report.Bars(f"{model.title}, {title_of(*column)}: exposed, %", exposed, None, RECOMMENDED))
        peaks = {name: found[Case(model, name, MANY[0])].peak / GIB for name in CHOICES}
        bars.append(report.Bars(f"{model.title}, {MANY[0]} GPUs: peak, GiB", peaks, None, RECOMMENDED))
    return bars


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Nothing to choose: some five minutes."""

    document: Path = PAGE


def run(options: Options) -> None:
    """Plan a training step for each choice of units."""
    found = outcomes(MODELS)
    for name, block in document_blocks(found, MODELS).items():
        report.write_page(options, name, [block])
    if options.write_document:
        tokens = f"{GPT.tokens:,} tokens per GPU and step"
        title = (
            f"Planned, not measured: H100s, {tokens}. Exposed: share of the step in which communication is waited for"
        )
        report.plot(options.document.with_name("units.png"), title, panels(found, MODELS), columns=len(COLUMNS) + 1)
