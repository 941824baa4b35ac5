"""Ways to gather and reduce one GPT block on two gloo ranks; the figures in transports.md come from here.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 docs/design/gloo_probe.py
"""

import statistics
import time
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, PEER, RANKS = dist.get_rank(), 1 - dist.get_rank(), 2
NUMELS = [3072 * 1024, 1024 * 1024, 4096 * 1024, 1024 * 4096]  # the matrices of a block of width 1024

full = [torch.randn(numel) for numel in NUMELS]
shards = [torch.randn(numel // RANKS) for numel in NUMELS]
pieces = [torch.empty(numel // RANKS) for numel in NUMELS]
received = [torch.empty(numel) for numel in NUMELS]
flat, flat_shard = torch.randn(sum(NUMELS)), torch.randn(sum(NUMELS) // RANKS)


def gather_flat() -> None:
    dist.all_gather_into_tensor(flat, flat_shard)


def gather_each() -> None:
    works = [dist.all_gather_into_tensor(f, s, async_op=True) for f, s in zip(full, shards, strict=True)]
    [work.wait() for work in works]


def gather_exchange() -> None:
    works = []
    for f, s in zip(full, shards, strict=True):
        works += [dist.isend(s, PEER), dist.irecv(f.chunk(RANKS)[PEER], PEER)]
    for f, s in zip(full, shards, strict=True):
        f.chunk(RANKS)[RANK].copy_(s)
    [work.wait() for work in works]


def reduce_flat() -> None:
    dist.reduce_scatter_tensor(flat_shard, flat)


def reduce_each() -> None:
    works = [dist.reduce_scatter_tensor(p, f, async_op=True) for p, f in zip(pieces, full, strict=True)]
    [work.wait() for work in works]


def reduce_all_reduce() -> None:
    works = [dist.all_reduce(f, async_op=True) for f in full]
    [work.wait() for work in works]


def reduce_all_to_all() -> None:
    works = [dist.all_to_all_single(r, f, async_op=True) for r, f in zip(received, full, strict=True)]
    for work, r, p in zip(works, received, pieces, strict=True):
        work.wait()
        torch.add(*r.chunk(RANKS), out=p)


def reduce_exchange() -> None:
    works = [(dist.isend(f.chunk(RANKS)[PEER], PEER), dist.irecv(p, PEER)) for f, p in zip(full, pieces, strict=True)]
    for (sent, got), f, p in zip(works, full, pieces, strict=True):
        got.wait()
        p.add_(f.chunk(RANKS)[RANK])
        sent.wait()


WAYS = [
    gather_flat,
    gather_each,
    gather_exchange,
    reduce_flat,
    reduce_each,
    reduce_all_reduce,
    reduce_all_to_all,
    reduce_exchange,
]
times: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
for _ in range(8):
    for way in WAYS:
        dist.barrier()
        start = time.perf_counter()
        way()
        times[way.__name__].append((time.perf_counter() - start) * 1e3)
if RANK == 0:
    for name, values in times.items():
        print(f"{name:18s} median {statistics.median(values[2:]):6.1f} ms, fastest {min(values):6.1f} ms")
dist.destroy_process_group()
