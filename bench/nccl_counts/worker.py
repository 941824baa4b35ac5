"""One contestant in one configuration: what a block adds to a steady step, as counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.contestants import BF16, UNSHARDED, composable, options_of
from bench.ledger import Ledger, range_of, recorded
from bench.nccl_counts import group
from bench.nccl_counts.blocks import CONFIGURATIONS, Configuration, LlamaBlock
from bench.nccl_counts.group import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective, Journal, counted_ranks
from bench.nccl_counts.host import READS, Calls, calls_counted
from bench.nccl_counts.recorder import Recorder, resizes_noted

DEPTHS = (3, 5)  # blocks; what a block adds is the difference, without what begins and ends a step
WARMUP_STEPS = 4
TOKENS = 2
FORWARD, BACKWARD = "forward", "backward"


@dataclass
class Step:
    """Everything that was noted in one step, and in one more of the calls of functions."""

    recorder: Recorder
    collectives: list[tuple[str, Collective]]  # with the phase
    calls: Calls
    of_model: dict[str, float]  # what is not a sum over blocks


def shard(system: str, model: nn.Module, shape: Configuration) -> nn.Module:
    """Every block a unit, and the root; parameters gathered in bf16, gradients reduced in fp32."""
    if system == UNSHARDED:
        return model.to(torch.bfloat16).to_empty(device="cpu")
    mesh = init_device_mesh("cpu", (shape.ranks,))
    if shape.ranks > shape.shards:
        sizes, names = (shape.ranks // shape.shards, shape.shards), ("replicate", "shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    fully_shard = composable(system).fully_shard
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh, **options_of(system, BF16))
    return model.to_empty(device="cpu")


def steady_step(system: str, shape: Configuration, depth: int) -> Step:
    """Build a model of so many blocks, and count one of its later steps."""
    with counted_ranks(shape.ranks) as journal:
        recorder = Recorder(journal)
        with recorder, resizes_noted(recorder):
            with torch.device("meta"):
                model = nn.Sequential(*(LlamaBlock(shape) for _ in range(depth)))
            model = shard(system, model, shape)
            x = torch.zeros(TOKENS, shape.width, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(WARMUP_STEPS):
                _step(model, x, recorder, journal)
            outside = {Recorder.__torch_dispatch__.__code__, resizes_noted.__wrapped__.__code__}
            outside |= {each.__code__ for each in vars(group.CountedGroup).values() if hasattr(each, "__code__")}
            with calls_counted(outside) as calls:
                _step(model, x, recorder, journal)
            collectives = _step(model, x, recorder, journal, noted=True)
            of_model = _peaks(lambda: _step(model, x, recorder, journal), 2 * shape.parameters)
        of_model["communicators"] = len({each.communicator for each in journal.collectives})
        return Step(recorder, collectives, calls, of_model)


def _peaks(step: Callable[[], object], unit: int) -> dict[str, float]:
    """Memory at its highest, in units, above what was there before and without the gradients that it leaves."""
    with recorded() as ledger:
        step()
    spans = {phase: ledger.span(phase) for phase in (FORWARD, BACKWARD)}
    left = ledger.alive(spans[BACKWARD].end)
    passing = Ledger([block for block in ledger.blocks if block not in left])
    return {f"peak, {phase}": passing.peak(span.begin, span.end)[1] / unit for phase, span in spans.items()}


def _step(
    model: nn.Module, x: torch.Tensor, recorder: Recorder, journal: Journal, *, noted: bool = False
) -> list[tuple[str, Collective]]:
    """Forward, backward, and gradients cleared; the collectives of each phase."""
    begun = len(journal.collectives)
    recorder.phase = FORWARD if noted else ""
    with range_of(FORWARD):
        loss = model(x).sum()
    middle = len(journal.collectives)
    recorder.phase = BACKWARD if noted else ""
    with range_of(BACKWARD):
        loss.backward()
    recorder.phase = ""
    model.zero_grad(set_to_none=True)
    x.grad = None
    found = journal.collectives
    return [(FORWARD, each) for each in found[begun:middle]] + [(BACKWARD, each) for each in found[middle:]]


def counts_of(step: Step) -> Counter[str]:
    totals: Counter[str] = Counter()
    for phase, each in step.collectives:
        totals[f"{each.kind} messages, {phase}"] += 1
        totals[f"{each.kind} bytes, {phase}"] += each.nbytes
        totals["asynchronous messages"] += each.asynchronous
    for phase in (FORWARD, BACKWARD):
        for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
            launches = {one.launch for at, one in step.collectives if at == phase and one.kind == kind}
            totals[f"{kind} launches, {phase}"] = len(launches)
    for operation in step.recorder.operations:
        where = "copy-out" if operation.leaves_gather else "copies" if operation.copies else "other"
        totals[f"{where} bytes, {operation.phase}"] += operation.read + operation.written
        totals[f"{where} kernels, {operation.phase}"] += operation.kernels.launched
        totals[f"{where} strided kernels, {operation.phase}"] += operation.kernels.strided
        if operation.leaves_gather:
            totals[f"copy-out written, {operation.phase}"] += operation.written
    for phase, _ in step.recorder.allocations:
        totals[f"allocations, {phase}"] += 1
    totals["reads of the host"] = len(step.recorder.reads) + sum(step.calls.c[name] for name in READS)
    totals["calls of Python functions"] = sum(step.calls.python.values())
    totals["calls of C functions"] = sum(step.calls.c.values())
    return totals


def block_of(system: str, shape: Configuration) -> dict[str, float]:
    """What one block adds, and what the model has once."""
    shallow, deep = (steady_step(system, shape, depth) for depth in DEPTHS)
    first, second = counts_of(shallow), counts_of(deep)
    blocks = DEPTHS[1] - DEPTHS[0]
    added = {name: (second[name] - first[name]) / blocks for name in sorted({*first, *second})}
    return {**added, **deep.of_model}


@dataclass(frozen=True)
class Worker:
    system: str

    def count(self, configuration: str) -> dict[str, float]:
        return block_of(self.system, CONFIGURATIONS[configuration])


def build(system: str) -> Worker:
    torch.set_num_threads(1)
    return Worker(system)
