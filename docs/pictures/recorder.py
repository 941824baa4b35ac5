"""One rank whose training steps are recorded: what computes, what communicates and which memory is allocated, and when.

Times and memory are those of torch's profiler (``bench.ledger``): memory is that of every tensor, exactly.
Of a message over gloo the profiler does not know when it has arrived. So a thread of its own waits for each, notes the
time, and the engine waits for that thread.
"""

from __future__ import annotations

import functools
import importlib
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from bench.contestants import FSDP2, FULLSHARD, prepare, start_fake_group
from bench.ledger import Block, Ledger, Span, mark, range_of, recorded
from bench.models import GPT, GPTShape, batch_of, next_token_loss
from bench.models import Block as GPTBlock
from bench.worker import join_group
from torch import nn

COMPUTE, CLOCK, GRADIENT = "compute", "clock", "gradient"
# As fullshard and FSDP2 name what they do in profiles, for example "fullshard::all_gather (blocks.3)".
OPERATION = re.compile(r"(?:fullshard|FSDP)::(\w+)(?: \((.*)\))?")
WAITING_THREADS = 64
PHASES = ("forward", "backward", "optimizer")
# Kinds of memory, from below to above in the pictures.
KINDS = ("at rest", "sharded gradients", "parameters", "gradients", "other")
SHARDED = "sharded"  # instead of a unit's name: memory of its sharded gradients


# ------------------------------------------------------------------ what computes


def watch_unit(module: nn.Module, name: str) -> None:
    """Mark when a unit's forward and backward begin and end, without what the engine does around them."""
    forward = module.forward

    @functools.wraps(forward)
    def watched(inputs: torch.Tensor) -> torch.Tensor:
        mark(f"{COMPUTE}|forward|begin|{name}")
        if inputs.requires_grad:
            inputs.register_hook(lambda _: mark(f"{COMPUTE}|backward|end|{name}"))
        output: torch.Tensor = forward(inputs)
        if output.requires_grad:
            output.register_hook(lambda _: mark(f"{COMPUTE}|backward|begin|{name}"))
        mark(f"{COMPUTE}|forward|end|{name}")
        return output

    module.forward = watched  # type: ignore[method-assign]


def watch_gradients() -> None:
    """Mark the memory of each unsharded gradient of fullshard when autograd has accumulated it, and of sharded ones."""
    from fullshard.engine.parameters.sharded import ShardedParameter

    collect = ShardedParameter.collect_gradient

    def watched(self: ShardedParameter, *, notify: bool = False) -> None:
        unsharded = self.__dict__.get("unsharded")
        if unsharded is not None and unsharded.grad is not None:
            unit = re.match(r"(blocks\.\d+)?", self.fqns[0])
            mark(f"{GRADIENT}|{unit[0] if unit else ''}|{unsharded.grad.untyped_storage().data_ptr()}")
        collect(self, notify=notify)

    def accumulate_watched(self: ShardedParameter, local: torch.Tensor) -> None:
        mark(f"{GRADIENT}|{SHARDED}|{local.data_ptr()}")
        accumulate(self, local)

    accumulate = ShardedParameter.accumulate
    ShardedParameter.collect_gradient = watched  # type: ignore[method-assign]
    ShardedParameter.accumulate = accumulate_watched  # type: ignore[method-assign]


# ------------------------------------------------------------------ what communicates


@dataclass
class Launch:
    """One launch of a transport: its kind and units, the bytes of its messages, and when the last of them was there."""

    kind: str
    units: list[str]
    issued: int = 0
    received_bytes: int = 0
    arrivals: list[int] = field(default_factory=list)


class WatchedWork:
    """A work that a thread waits for, which notes when it is done."""

    def __init__(self, work: Any, pool: ThreadPoolExecutor, done: Callable[[], None]) -> None:
        def wait() -> None:
            work.wait()
            done()

        self._waiting = pool.submit(wait)

    def wait(self) -> None:
        self._waiting.result()


class WatchedGroup:
    """Point-to-point messages of a gloo group; what else it has is the group's."""

    def __init__(self, group: Any, launches: Launches) -> None:
        self._group, self._launches = group, launches

    def send(self, tensors: Sequence[torch.Tensor], *where: Any) -> WatchedWork:
        return WatchedWork(self._group.send(tensors, *where), self._launches.pool, lambda: None)

    def recv(self, tensors: Sequence[torch.Tensor], *where: Any) -> WatchedWork:
        launch = self._launches.current[-1]
        launch.received_bytes += sum(tensor.nbytes for tensor in tensors)
        work = self._group.recv(tensors, *where)
        return WatchedWork(work, self._launches.pool, lambda: launch.arrivals.append(time.time_ns()))


class Launches:
    """All launches of this rank since it was made."""

    def __init__(self) -> None:
        from fullshard.comm import Transport, gloo, record

        self.all: list[Launch] = []
        self.current: list[Launch] = []
        self.pool = ThreadPoolExecutor(WAITING_THREADS)
        make = gloo._Exchange.__init__

        def make_watched(exchange: Any, group: Any, *more: Any) -> None:
            make(exchange, WatchedGroup(group, self), *more)

        gloo._Exchange.__init__ = make_watched  # type: ignore[method-assign]
        for kind in ("all_gather", "reduce_scatter"):
            setattr(Transport, kind, self._watched(kind, getattr(Transport, kind), record))

    def _watched(self, kind: str, launch: Callable[..., Any], record: Callable[..., Any]) -> Callable[..., Any]:
        def launched(transport: Any, requests: Any) -> Any:
            self.current.append(Launch(kind, [], time.time_ns()))
            with record() as seen:
                works = launch(transport, requests)
            own = self.current.pop()
            own.units = list(dict.fromkeys(each.unit for each in seen))
            self.all.append(own)
            return works

        return launched


# ------------------------------------------------------------------ what a ledger says


def spans_of_compute(ledger: Ledger, step: Span) -> list[tuple[str, str, int, int]]:
    """``(phase, unit, begin, end)`` of what computes, the time of waiting left out; the root's unit is ""."""
    phases = phases_of(ledger, step)
    marks = [s for s in ledger.spans if s.name.startswith(f"{COMPUTE}|") and step.begin <= s.begin < step.end]
    found: list[tuple[str, str, int, int]] = []
    for phase in ("forward", "backward"):
        cursor, own = phases[phase].begin, [s for s in marks if f"|{phase}|" in s.name]
        for each in own:
            _, _, edge, unit = each.name.split("|")
            found.append((phase, "" if edge == "begin" else unit, cursor, each.begin))
            cursor = each.begin
        found.append((phase, "", cursor, phases[phase].end))
    found.append(("optimizer", "", phases["optimizer"].begin, phases["optimizer"].end))
    waits = [s for s in ledger.operations if "::wait" in s.name and step.begin <= s.begin < step.end]
    return [(phase, unit, *part) for phase, unit, *span in found for part in without((span[0], span[1]), waits)]


def without(span: tuple[int, int], gaps: Sequence[Span]) -> list[tuple[int, int]]:
    """The parts of a span that are in none of the gaps, which are in the order of time."""
    parts, begin = [], span[0]
    for gap in gaps:
        if gap.begin < span[1] and gap.end > begin:
            if gap.begin > begin:
                parts.append((begin, gap.begin))
            begin = gap.end
    return [*parts, (begin, span[1])] if begin < span[1] else parts


def phases_of(ledger: Ledger, step: Span) -> dict[str, Span]:
    return {s.name: s for s in ledger.spans if step.begin <= s.begin < step.end and s.name in PHASES}


def kind_of(block: Block, step: Span, owners: dict[int, str]) -> str:
    """Which of :data:`KINDS` a block is."""
    if block.begin < step.begin:
        return "at rest"
    if id(block) in owners:
        return "sharded gradients" if owners[id(block)] == SHARDED else "gradients"
    operations = [found[1] for found in map(OPERATION.match, block.operators) if found is not None]
    if not operations:
        return "other"
    return "parameters" if "all_gather" in operations[-1] else "gradients"


def owners_of(ledger: Ledger, step: Span) -> dict[int, str]:
    """By the identity of blocks: the unit of the gradients in them, or :data:`SHARDED`."""
    owners: dict[int, str] = {}
    fresh = [block for block in ledger.blocks if step.begin <= block.begin < step.end]
    for span in ledger.spans:
        if span.name.startswith(f"{GRADIENT}|") and step.begin <= span.begin < step.end:
            _, unit, address = span.name.split("|")
            for block in fresh:
                if block.alive(span.begin) and block.address <= int(address) < block.address + block.nbytes:
                    owners[id(block)] = unit
    return owners


def memory_of(ledger: Ledger, step: Span) -> list[tuple[int, list[int]]]:
    """Moments at which memory changes, with the live bytes of each of :data:`KINDS` right after."""
    owners = owners_of(ledger, step)
    changes: list[tuple[int, int, int]] = []
    for block in ledger.blocks:
        if block.begin > step.end or (block.end is not None and block.end <= step.begin):
            continue
        kind = KINDS.index(kind_of(block, step, owners))
        changes.append((max(block.begin, step.begin), kind, block.nbytes))
        if block.end is not None and block.end <= step.end:
            changes.append((block.end, kind, -block.nbytes))
    live, points = [0] * len(KINDS), []
    for moment, kind, change in sorted(changes):
        live[kind] += change
        points.append((moment, list(live)))
    return points


def thinned(points: list[tuple[int, list[int]]], step: Span, least: int) -> list[list[int]]:
    """Microseconds since the step began, and bytes; changes smaller than ``least`` are left to the next larger one."""
    found: list[list[int]] = []
    for moment, live in points:
        row = [(moment - step.begin) // 1000, *live]
        if found and found[-1][0] == row[0]:
            found[-1] = row
        elif not found or any(abs(a - b) >= least for a, b in zip(found[-1][1:], live, strict=True)):
            found.append(row)
    return found


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Train one step, with its phases as ranges."""
    with range_of("forward"):
        loss = next_token_loss(model, batch)
    with range_of("backward"):
        loss.backward()
    with range_of("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Recorder:
    """Trains one system and records steps.

    Args:
        shape: Of the model.
        rank: Of this process.
        system: A key of :data:`SYSTEMS`.
        gloo: Whether ranks exchange messages; else collectives do nothing.
    """

    def __init__(self, shape: GPTShape, rank: int, system: str, gloo: bool) -> None:
        self.shape, self.rank = shape, rank
        prepare(FSDP2 if system == FSDP2 else FULLSHARD)
        if system != FSDP2:
            watch_gradients()
        self.launches = Launches() if gloo else None
        torch.manual_seed(0)
        # Made while it is recorded, so that memory at rest is known as well.
        self._build = functools.partial(SYSTEMS[system], shape)

    def record(self, steps: int, warmup: int = 3) -> dict[str, Any]:
        """Of the fastest of so many steps: spans of compute, launches, operations and memory, in microseconds."""
        with recorded() as ledger:
            before = time.time_ns()
            mark(CLOCK)
            model = self._build()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for number in range(warmup + steps):
                batch = batch_of(self.shape, number, self.rank)
                with range_of(f"step {number}" if number >= warmup else "warm-up"):
                    train_step(model, optimizer, batch)
        timed = [span for span in ledger.spans if span.name.startswith("step ")]
        step = min(timed, key=lambda span: span.end - span.begin)
        # A step of its own: what was allocated in earlier ones, and is still there, is at rest.
        skew = ledger.span(CLOCK).begin - before
        begin = step.begin

        def micro(moment: int) -> int:
            return (moment - begin) // 1000

        launches = [] if self.launches is None else self.launches.all
        inside = [each for each in launches if begin <= each.issued + skew < step.end]
        return {
            "microseconds": micro(step.end),
            "all_steps": [(span.end - span.begin) // 1000 for span in timed],
            "parameters": self.shape.parameters,
            "phases": {name: [micro(s.begin), micro(s.end)] for name, s in phases_of(ledger, step).items()},
            "compute": [[p, u, micro(a), micro(b)] for p, u, a, b in spans_of_compute(ledger, step)],
            "launches": [
                [
                    each.kind,
                    each.units,
                    micro(each.issued + skew),
                    micro(max(each.arrivals) + skew),
                    each.received_bytes,
                ]
                for each in inside
                if each.arrivals
            ],
            "operations": [
                [s.name, micro(s.begin), micro(s.end)] for s in ledger.operations if begin <= s.begin < step.end
            ],
            "memory": thinned(memory_of(ledger, step), step, 1 << 18),
        }


def _sharded(shape: GPTShape, library: str = "fullshard", function: str = "fully_shard", **options: Any) -> nn.Module:
    shard = getattr(importlib.import_module(library), function)
    model = GPT(shape)
    for index, module in enumerate(model.blocks):
        assert isinstance(module, GPTBlock)
        watch_unit(module, f"blocks.{index}")
        shard(module, **options)
    return shard(model, **options)  # type: ignore[no-any-return]


SYSTEMS: dict[str, Callable[[GPTShape], nn.Module]] = {
    FULLSHARD: _sharded,
    "kept": functools.partial(_sharded, reshard_after_forward=False),
    "replicate": functools.partial(_sharded, function="replicate"),
    FSDP2: functools.partial(_sharded, library="torch.distributed.fsdp"),
}


def build(
    width: int, blocks: int, tokens: int, ranks: int, system: str, rank: int = 0, store: str = "", threads: int = 1
) -> Recorder:
    """Make rank 0 of a fake group if there is no file where ranks meet."""
    torch.set_flush_denormal(True)
    if store:
        join_group(rank, ranks, store)
    else:
        start_fake_group(ranks)
    return Recorder(GPTShape(width, blocks, tokens), rank, system, gloo=bool(store))
