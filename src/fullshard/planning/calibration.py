"""Measure this machine, or the nodes of a job: what operations and messages take here, as figures of a cluster.

[Note: Calibration]
All ranks measure at the same time, as they compute at the same time in a step: processes of a machine share its cores,
its caches and its memory. So the figures are those of so many ranks, and of no other number. Each figure is the median
of several runs, so that a moment of other work on the machine does not decide. Operands are those of several layers,
since a step comes to each of them once, and does not find it in a cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fullshard.allocator import keep_freed_memory_by_default
from fullshard.comm import CommRequest, GlooTransport, Operand
from fullshard.errors import FullshardError
from fullshard.memory import Work, wait_for_all
from fullshard.planning.cluster import Cluster, Link, cluster_of, to_toml

__all__ = ["calibrate"]

SECONDS, PARTS = 0.8, 5  # of each figure, and the parts of which the median counts
TIME_LIMIT = 60.0
_MODULE = "fullshard.planning.calibration"
_LAYERS = 8
_SMALL, _LARGE = 4 * 1024, 8 * 1024 * 1024  # bytes of messages


def calibrate(ranks: int = 1, *, seconds: float = SECONDS) -> Cluster:
    """Measure what operations and messages of this machine take, with so many ranks on it.

    It takes 8 to 20 seconds on CPU ranks, and at most a minute. The machine should have nothing else to do.

    Under torchrun, the ranks of the job measure their nodes, and the links between them.

    Args:
        ranks: Processes that measure at the same time; under torchrun, 1 or as many as it has started. With
            accelerators: at most as many as there are.
        seconds: For each of the figures.

    Returns:
        The machine as a cluster of one node; under torchrun the nodes, on all ranks.

    Raises:
        FullshardError: If a rank fails, or takes longer than a minute.
    """
    if ranks < 1:
        raise ValueError(f"calibrate: expected at least one rank, found {ranks}")
    if dist.is_torchelastic_launched():
        return _of_this_job(ranks, seconds)
    if torch.accelerator.is_available() and ranks > torch.accelerator.device_count():
        raise FullshardError(
            f"calibrate: expected at most {torch.accelerator.device_count()} ranks, as there are accelerators, found "
            f"{ranks}"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        _run([*torchrun, "-m", _MODULE, str(file), str(seconds)], _threads(ranks))
        return cluster_of(file)


def _run(command: list[str], threads: int) -> None:
    """Run torchrun until its ranks have ended.

    Raises:
        FullshardError: If one fails, or all take too long.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.communicate(timeout=TIME_LIMIT)[1]
        except subprocess.TimeoutExpired:
            process.terminate()  # then it ends its ranks
            raise FullshardError(
                f"calibrate: expected all ranks to be through in {TIME_LIMIT:.0f} s, they are not; is the machine busy?"
            ) from None
    if process.returncode:
        raise FullshardError(f"calibrate: expected all ranks to succeed, found:\n{said.strip()[-4000:]}")


def _of_this_job(ranks: int, seconds: float) -> Cluster:
    """Measure the nodes on which torchrun has started this process and others."""
    world, on_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks not in (1, world) or world % on_node:
        raise FullshardError(
            f"calibrate: expected as many ranks as torchrun has started ({world}), and as many on each node "
            f"({on_node}), found {ranks}"
        )
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    try:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, _measured(world, seconds, on_node))
        return _cluster(found, on_node)
    finally:
        dist.destroy_process_group()


def _threads(ranks: int) -> int:
    """Return the threads of a rank: all cores are shared out, as by launchers that are told to."""
    return int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // ranks)))


def _cluster(found: list[dict[str, Any]], ranks: int) -> Cluster:
    """Return the figures of all ranks as a cluster of nodes with so many each: the median of each figure."""

    def median(name: str) -> float:
        return float(statistics.median(each[name] for each in found))

    flops = {name: statistics.median(each["flops"][name] for each in found) for name in found[0]["flops"]}
    on_cpu, nodes = found[0]["device"] == "cpu", len(found) // ranks

    def link(where: str) -> Link:
        return Link(median(f"{where}_bandwidth"), median(f"{where}_latency"))

    return Cluster(
        name=f"measured, {f'{nodes} nodes of ' * (nodes > 1)}{ranks} rank{'s' * (ranks > 1)}",
        device="cpu" if on_cpu else "accelerator",
        memory=found[0]["memory"] / (ranks if on_cpu else 1),
        flops=flops,
        bandwidth=median("bandwidth"),
        node=ranks,
        inner=link("inner") if ranks > 1 else Link(1e12),
        outer={nodes: link("outer")} if nodes > 1 else {},
        efficiency={"matmul": 1.0, "attention": median("attention"), "memory": 1.0, "function": median("function")},
        backend="gloo" if on_cpu else "nccl",
        op_seconds=0.0 if on_cpu else median("op_seconds"),
        kernel_seconds=median("op_seconds") if on_cpu else median("kernel_seconds"),
        calibrated=len(found),
        contention=min(1.0, max(0.0, median("contention"))) if len(found) > 1 else 0.0,
        source=f"measured on {found[0]['host']} with {len(found)} ranks, {found[0]['threads']} threads each",
    )


# ------------------------------------------------------------------------------------------------- on one rank


class _Meter:
    """Times what runs on a device, at the same time as the other ranks."""

    def __init__(self, device: torch.device, ranks: int, seconds: float) -> None:
        self.device, self._ranks, self._seconds = device, ranks, seconds

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median seconds of a call, over series of calls.

        A series is longer than the slices of time in which ranks that share a core take turns: a single call may be
        over before its rank's turn is. All ranks make as many calls, since they may send to each other.
        """
        self._series(run, 1)
        trial = torch.tensor([self._series(run, 1)], dtype=torch.float64, device=self.device)
        if self._ranks > 1:
            dist.all_reduce(trial, dist.ReduceOp.MAX)
        if trial.item() > self._seconds:
            return trial.item()  # a processor without instructions for the dtype
        count = min(max(1, round(self._seconds / PARTS / trial.item())), 1000)
        return statistics.median(self._series(run, count) for _ in range(PARTS))

    def _series(self, run: Callable[[], object], count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            run()
        self.synchronize()
        return (time.perf_counter() - begun) / count

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def _measured(ranks: int, seconds: float, on_node: int) -> dict[str, Any]:
    """Return the figures of this rank; ``on_node``: ranks of each node."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if accelerator is None else accelerator
    keep_freed_memory_by_default()
    torch.set_flush_denormal(True)
    meter = _Meter(device, ranks, seconds)
    rows = 512 if accelerator is None else 8192
    found: dict[str, Any] = {
        "device": device.type,
        "host": os.uname().machine if accelerator is None else torch.get_device_module(device).get_device_name(),
        "threads": torch.get_num_threads(),
        "memory": _memory(device),
        "flops": {name: _matmul(meter, getattr(torch, name), rows) for name in ("float32", "bfloat16")},
        **_streaming(meter, min(rows, 2048)),  # together larger than caches, and smaller than any accelerator's memory
        **_launches(meter),
    }
    fastest = found["flops"]["float32" if accelerator is None else "bfloat16"]
    found["attention"] = _attention(meter, rows) / fastest
    for where, group in _groups(ranks, on_node).items():
        nearby = on_node if where == "outer" and accelerator is None else 1  # whose parts do not cross the network
        found |= _messages(meter, where, group, nearby, rows)  # what is lost beside the slowest of them counts
    return found


def _groups(ranks: int, on_node: int) -> dict[str, dist.ProcessGroup | None]:
    """Return the groups of this rank's node and of all ranks, without groups of one rank."""
    groups: dict[str, dist.ProcessGroup | None] = {}
    if on_node > 1:
        groups["inner"] = dist.group.WORLD if on_node == ranks else dist.new_subgroups(on_node)[0]  # type: ignore[no-untyped-call]
    return groups | ({"outer": dist.group.WORLD} if ranks > on_node else {})


def _memory(device: torch.device) -> float:
    if device.type == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.get_device_module(device).mem_get_info()[1])


def _matmul(meter: _Meter, dtype: torch.dtype, rows: int) -> float:
    """Floating-point operations per second of a linear layer's three products, there and back."""
    width = 2 * rows
    shapes = ((rows, rows), (width, rows), (rows, width))
    count = 1 if meter.device.type == "cpu" and dtype is not torch.float32 else _LAYERS  # some need minutes for more
    layers = [[torch.randn(*shape, device=meter.device, dtype=dtype) for shape in shapes] for _ in range(count)]

    def products() -> None:
        for x, weight, grad in layers:
            _ = x @ weight.t(), grad @ weight, grad.t() @ x

    return count * 3 * 2 * rows * width * rows / meter.seconds(products)


def _attention(meter: _Meter, rows: int) -> float:
    """Floating-point operations per second of causal attention there and back, counted as if it were not causal."""
    dtype = torch.float32 if meter.device.type == "cpu" else torch.bfloat16
    heads, length, size = rows // 64, min(rows, 2048), 64
    query = torch.randn(1, heads, length, size, device=meter.device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(query)

    def there_and_back() -> None:
        F.scaled_dot_product_attention(query, query, query, is_causal=True).backward(grad)  # type: ignore[no-untyped-call]

    return (4 + 10) * heads * length * length * size / meter.seconds(there_and_back)


def _streaming(meter: _Meter, rows: int) -> dict[str, float]:
    """Bytes per second of arithmetic by element; and the share of it that functions reach.

    Arithmetic by element is that of optimizers, sums of gradients and copies of shards: so it is that of AdamW.
    """
    many = [torch.randn(rows, 4 * rows, device=meter.device) for _ in range(32)]
    inputs = [tensor.clone().requires_grad_() for tensor in many[:_LAYERS]]
    grad = torch.randn(4 * rows, rows, device=meter.device)

    def steps() -> None:
        for at in range(0, len(many), 4):
            parameter, gradient, first, second = many[at : at + 4]
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
            parameter.addcdiv_(first, second.abs().add_(1.0), value=-1e-3)

    def functions() -> None:
        for x in inputs:
            result = F.layer_norm(F.gelu(x.view(-1, rows)), (rows,)).softmax(-1)
            result.backward(grad)  # type: ignore[no-untyped-call]

    # Read and written, as plans count it: what is changed in place counts twice.
    plain = len(many) / 4 * (2 + 3 + 2 + 4 + 2 + 2 + 4) * grad.nbytes / meter.seconds(steps)
    # gelu 2 and 3, norm 2 and 3, softmax 2 and 3 times the bytes of x: forward and backward; and x.grad is added to.
    functional = _LAYERS * (3 * 5 + 3) * grad.nbytes / meter.seconds(functions)
    return {"bandwidth": plain, "function": functional / plain}


def _launches(meter: _Meter) -> dict[str, float]:
    """Seconds of the host for an operation that has next to nothing to do, and of the device for it."""
    weight = torch.ones(16, device=meter.device, requires_grad=True)

    def few() -> None:
        y = weight
        for _ in range(20):
            y = y * 2.0
        y.backward(weight)  # type: ignore[no-untyped-call]

    seconds = meter.seconds(few) / 40  # as many backwards
    begun = time.perf_counter()
    few()
    host = time.perf_counter() - begun  # without waiting for the device
    meter.synchronize()
    return {"op_seconds": min(seconds, host / 40), "kernel_seconds": seconds}


def _messages(meter: _Meter, where: str, group: dist.ProcessGroup | None, nearby: int, rows: int) -> dict[str, float]:
    """Latency and bandwidth of an all-gather in a group, and what it costs the computation beside it."""
    assert group is not None
    ranks, exchange = group.size(), partial(_all_gather, meter.device, group)
    small = meter.seconds(exchange(_SMALL))
    large = max(meter.seconds(exchange(_LARGE)), 2 * small)  # else other work held up small ones
    bandwidth = (_LARGE - _SMALL) * (ranks - nearby) / ranks / (large - small)
    x = torch.randn(rows, rows, device=meter.device)
    times = max(1, round(large / meter.seconds(lambda: x @ x)))

    def products() -> None:
        for _ in range(times):
            x @ x

    send = exchange(_LARGE, products)
    alone, both = meter.seconds(products), meter.seconds(send)
    # Both begin at the same time. What lies beyond the longer of them was lost.
    contention = (both - max(alone, large)) / min(alone, large)
    return {f"{where}_latency": small, f"{where}_bandwidth": bandwidth, "contention": contention}


def _nothing() -> None:
    pass


def _all_gather(
    device: torch.device, group: dist.ProcessGroup, nbytes: int, meanwhile: Callable[[], None] = _nothing
) -> Callable[[], None]:
    """All-gather as the transport of CPU ranks does, and on accelerators with the back end's own collective."""
    output = torch.zeros(nbytes // group.size() * group.size(), dtype=torch.uint8, device=device)
    own = output.chunk(group.size())[group.rank()]
    transport = GlooTransport(group) if device.type == "cpu" else None

    def run() -> None:
        works: Sequence[Work | None]
        if transport is None:
            works = [dist.all_gather_into_tensor(output, own, group=group, async_op=True)]
        else:
            works = transport.all_gather([CommRequest("calibration", [Operand(own, output)])])
        meanwhile()
        wait_for_all(work for work in works if work is not None)

    return run


def _main(file: str, seconds: str) -> None:
    """Measure on a rank that ``calibrate`` has started; the first one writes the cluster to a file."""
    cluster = _of_this_job(1, float(seconds))
    if os.environ["RANK"] == "0":
        Path(file).write_text(to_toml(cluster), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
