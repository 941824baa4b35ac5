"""What the ranks of a large job compute for one checkpoint, with the other ranks made up: no process, no file.

One rank's own work (what it holds and sends, who writes what), the first rank's (the index), and what each rank does
with the index in a load. Tensors are cut on dim 0, as fully_shard cuts them; a unit has two parameters and Adam's
state.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.scaling.worker import timed
from fullshard.checkpoint.format.index import CHECKSUM, FileEntry
from fullshard.checkpoint.format.index_json import from_json, to_json
from fullshard.checkpoint.format.write_plan import RankInventory, TensorTable, plan_writes
from fullshard.checkpoint.format.writer import index_of
from fullshard.engine.parameters.tensor_shards import TensorShard, TensorShards
from fullshard.layout import Region, chunk_of

ROWS, COLUMNS = 32_768, 64
TENSORS_PER_UNIT = 8


@dataclass(frozen=True)
class CheckpointCost:
    """CPU seconds and bytes.

    Args:
        plan: Of one rank: what it holds, as it is sent.
        sent: Bytes that one rank sends to the others to plan.
        plan_writes: Of one rank: who writes what.
        index: Of the first rank: the index as text.
        index_bytes: Of that file.
        parse: Of one rank in a load: the index, read and checked.
        load_plan: Of one rank in a load: which shards it reads.
        shards: How many the index has.
    """

    plan: float
    sent: int
    plan_writes: float
    index: float
    index_bytes: int
    parse: float
    load_plan: float
    shards: int


def tensors(units: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and shapes."""
    for unit in range(units):
        for name, shape in (("weight", (ROWS, COLUMNS)), ("bias", (ROWS,))):
            fqn = f"layers.{unit}.block.{name}"
            yield f"model.{fqn}", shape
            yield f"optimizer.state.{fqn}.exp_avg", shape
            yield f"optimizer.state.{fqn}.exp_avg_sq", shape
            yield f"optimizer.state.{fqn}.step", ()


def box_on(rank: int, ranks: int, shape: tuple[int, ...]) -> Region:
    if not shape:
        return Region((), ())
    start, size = chunk_of(shape[0], ranks, rank)
    return Region((start, *(0,) * (len(shape) - 1)), (size, *shape[1:]))


def entries(units: int, rank: int, ranks: int) -> dict[str, Any]:
    """What ``fullshard.save`` has of one rank; its memory is on the meta device."""
    found: dict[str, Any] = {}
    for key, shape in tensors(units):
        region = box_on(rank, ranks, shape)
        local = torch.empty(region.sizes, device="meta")
        found[key] = TensorShards(
            torch.Size(shape), local.dtype, torch.device("cpu"), [TensorShard(region, local)], equal=True
        )
    return found


def measure(units: int, ranks: int) -> CheckpointCost:
    torch.set_num_threads(1)
    own = entries(units, 0, ranks)

    def plan() -> bytes:
        return pickle.dumps(RankInventory.of(own))

    plan()
    message, plan_s = timed(plan)
    shapes = [shape for _, shape in tensors(units)]
    table = TensorTable.of(own).packed
    regions = [[(i, box_on(rank, ranks, shape)) for i, shape in enumerate(shapes)] for rank in range(ranks)]
    held = [RankInventory(table, RankInventory.packed(of_rank), ()) for of_rank in regions]
    write_plan, plan_writes_s = timed(lambda: plan_writes(held))
    save = "0" * 12
    files = [FileEntry(1 << 40, 264, bytes(2 * CHECKSUM)) if writes.any() else None for writes in write_plan.writes]
    text, index_s = timed(lambda: to_json(index_of("index", write_plan, files, {}, {}, save)))
    parsed, parse_s = timed(lambda: from_json(text, "index"))

    def load_plan() -> int:
        return sum(len(list(parsed.shards(key, s.region))) for key, held in own.items() for s in held.shards)

    _, load_s = timed(load_plan)
    shards = len(parsed.regions)
    return CheckpointCost(plan_s, len(message), plan_writes_s, index_s, len(text), parse_s, load_s, shards)


class Worker:
    def measure(self, units: int, ranks: int) -> dict[str, Any]:
        return asdict(measure(units, ranks))


def build() -> Worker:
    return Worker()
