"""The counter of copies, kernels, allocations and messages: what it says of known sequences, and of one small block."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bench.contestants import FSDP2, FULLSHARD, UNSHARDED
from bench.nccl_counts import kernels
from bench.nccl_counts.blocks import Configuration
from bench.nccl_counts.driver import rows_of, without_plain, worse
from bench.nccl_counts.group import ALL_GATHER, REDUCE_SCATTER, counted_ranks
from bench.nccl_counts.kernels import Kernels
from bench.nccl_counts.recorder import LEFT_OUT_BYTES, Recorder, resizes_noted
from bench.nccl_counts.worker import block_of


def test_a_known_sequence_is_counted() -> None:
    """Copies, allocations (a storage that grows is one), and messages: one launch per group call."""
    with counted_ranks(4) as journal:
        recorder = Recorder(journal)
        gathered, shard = torch.ones(4 * 30), torch.ones(30)
        large = torch.zeros(LEFT_OUT_BYTES)
        with recorder, resizes_noted(recorder):
            recorder.phase = "forward"
            target = torch.empty(120, dtype=torch.bfloat16)
            target.copy_(torch.ones(120))
            dist.group.WORLD._allgather_base(gathered, shard)
            torch._foreach_copy_([target[:60].view(6, 10)], [gathered.view(6, 20)[:, :10]])
            storage = torch.empty(0).untyped_storage()
            storage.resize_(400)
            storage.resize_(0)
            large.copy_(torch.ones(LEFT_OUT_BYTES))
            large.mul_(3)
            recorder.phase = ""
            target.copy_(gathered)
        group, cpu = dist.group.WORLD, torch.device("cpu")
        dist.reduce_scatter_tensor(shard, gathered, op=dist.ReduceOp.AVG)
        group._start_coalescing(cpu)
        for async_op in (True, False):
            options = dist.distributed_c10d.AllgatherOptions()
            options.asyncOp = async_op
            group._allgather_base(gathered, shard, options)
        group._end_coalescing(cpu).wait()
    found = [(each.kind, each.nbytes, each.asynchronous, each.launch) for each in journal.collectives[1:]]
    assert found == [(REDUCE_SCATTER, 480, False, 2), (ALL_GATHER, 480, True, 3), (ALL_GATHER, 480, False, 3)]
    assert not large.any(), "large copies are counted, not made"
    copies = [each for each in recorder.operations if each.copies]
    assert [(each.read, each.written) for each in copies] == [(480, 240), (240, 120), (262144, 262144)]
    assert [each.leaves_gather for each in copies] == [False, True, False]
    assert [each.kernels for each in copies] == [Kernels(1), Kernels(1, 1), Kernels(1)]
    assert [each.name for each in recorder.operations if not each.copies] == ["aten::ones"] * 2 + ["aten::mul_"]
    assert recorder.allocations == [("forward", nbytes) for nbytes in (240, 480, 400, 262144)]


def test_which_copies_are_fused() -> None:
    """Those of equal strides, whatever the dtypes: 64 tensors, 320 chunks of 65536; else one kernel per pair."""
    sizes = {(): 0, (1,): 1, (65536,) * 64: 1, (1,) * 65: 2, (65536 * 320 + 1,): 2, (65536 * 321,) * 2: 3}
    assert {numels: kernels.fused_launches(numels) for numels in sizes} == sizes
    dense, rows = torch.empty(8, 6), torch.empty(8, 12)[:, :6]
    assert kernels.of_foreach([dense, dense], [dense.bfloat16(), dense.bfloat16()]) == (1, 0)
    assert kernels.of_foreach([dense, dense], [dense, dense.bfloat16()]) == (2, 0)
    assert kernels.of_foreach([dense, dense], [rows, rows]) == (2, 2)
    assert kernels.of_foreach([rows], [rows]) == (1, 1), "equal strides, but not dense"
    assert kernels.of_split([dense, dense], torch.empty(16, 6)) == (1, 0)
    assert kernels.of_split([rows, dense], torch.empty(16, 6)) == (2, 2)
    assert kernels.of_chunk_cat(torch.empty(4, 24), [dense.bfloat16(), dense.bfloat16()]) == (1, 0)
    assert kernels.of_chunk_cat(torch.empty(4, 24), [rows, dense]) == (3, 2)


def test_a_block_of_both_engines() -> None:
    """What can be said in advance of one block: bytes, messages and casts; two axes have an all-reduce."""
    shape = Configuration(width=512, key_width=128, hidden=1792, ranks=4, shards=4)
    plain = block_of(UNSHARDED, shape)
    rows = {system: rows_of(without_plain(block_of(system, shape), plain)) for system in (FSDP2, FULLSHARD)}
    theirs, ours = rows[FSDP2], rows[FULLSHARD]
    gathered = 2 * shape.parameters / 1e6
    assert theirs["messages per all-gather"] == theirs["messages per reduce-scatter"] == 1
    assert theirs["packed share of an all-gather"] == 1
    assert theirs["copy-out, MB per all-gather"] == pytest.approx(2 * gathered)
    for row in rows.values():
        # A shard is cast, from 4 to 2 bytes per element; FSDP2 copies the result once more.
        assert row["copy-in, MB per all-gather"] >= gathered / 4 * 3 * (1 - 1e-3)
        assert row["copied, MB per reduction"] >= 3 * gathered * (1 - 1e-3)
        assert row["sent, MB per step"] == pytest.approx(4 * gathered, rel=1e-3)
        assert row["reads of the host, per step"] == 0
    assert theirs["copy-in, MB per all-gather"] == pytest.approx(gathered / 4 * 5, rel=1e-3)
    assert worse({"a": {FSDP2: {**theirs, "x": 1}, FULLSHARD: {**theirs, "x": 2, "y": 3}}}) == {"a": ["x"]}
    assert ours["launches of NCCL, per step"] <= theirs["launches of NCCL, per step"]
    hybrid = Configuration(width=256, key_width=128, hidden=512, ranks=8, shards=4)
    for system in (FSDP2, FULLSHARD):
        counts = block_of(system, hybrid)
        assert rows_of(counts)["messages per all-reduce"] == 1 and counts["communicators"] >= 2
