"""Machines as figures: what computes, how much memory it has, and how it communicates."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fullshard.errors import FullshardError
from fullshard.planning.simulation.network import Link, is_number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["EFFICIENCY", "MEASURED_BYTES", "PRESETS", "Cluster", "Link", "cluster_of", "to_toml"]

GIB = 2**30
# Of GPUs, if a cluster does not say otherwise: round figures, not measured by us.
EFFICIENCY: Mapping[str, float] = {"matmul": 0.7, "attention": 0.5, "memory": 0.8, "function": 0.7}


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes.

    Attributes:
        name: For reports.
        device: ``"accelerator"``: computes beside the host, with streams; ``"cpu"``: the host computes, and waits.
        memory: Bytes of a rank's device.
        flops: Floating-point operations per second that matrix multiplications are specified with, by dtype.
        bandwidth: Bytes per second of the device's memory, as specified.
        efficiency: The shares that are reached, by kind of operation: ``"matmul"`` and ``"attention"`` of ``flops``,
            ``"memory"`` (copies and arithmetic by element) and ``"function"`` (norms, softmax, activation functions) of
            ``bandwidth``. Kinds that are left out reach those of ``EFFICIENCY``.
        backend: ``"nccl"``, ``"gloo"``, or ``"collective"``: one whose collectives are launched one by one.
        op_seconds: Seconds of the host for an operation.
        kernel_seconds: Seconds that the shortest kernel takes.
        contention: Seconds of computation that a second of communication beside it costs, on CPUs.
        bus: Bytes per second between a device and its host, each way.
        calibrated: Ranks that measured the figures at the same time; 0: they were not measured.
        gpu: Kind of GPU, such as ``"h100"``, by which published runs are found; empty: none.
        node: Ranks of a node.
        inner: Collectives within a node.
        outer: Collectives over nodes, by their number; others are interpolated.
        source: Where the figures are from.
    """

    name: str
    device: str
    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    node: int
    inner: Link
    outer: Mapping[int, Link] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    backend: Literal["nccl", "gloo", "collective"] = "nccl"
    op_seconds: float = 5e-6
    kernel_seconds: float = 2e-6
    contention: float = 0.0
    bus: float = 50e9
    calibrated: int = 0
    gpu: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        positive = {name: getattr(self, name) for name in ("memory", "bandwidth", "node", "bus")} | dict(self.flops)
        wrong: dict[str, object] = {
            name: value for name, value in positive.items() if not is_number(value) or not value
        }
        others = ("op_seconds", "kernel_seconds", "contention", "calibrated")
        wrong |= {name: getattr(self, name) for name in others if not is_number(getattr(self, name))}
        wrong |= {} if isinstance(self.node, int) else {"node": self.node}
        wrong |= {} if self.backend in ("nccl", "gloo", "collective") else {"backend": self.backend}
        if wrong or not self.flops or self.device not in ("accelerator", "cpu"):
            raise ValueError(
                f"cluster {self.name!r}: expected positive memory, bandwidth and node, flops by dtype, and a device "
                f"that is 'accelerator' or 'cpu', found {wrong or dict(self.flops) or self.device!r}"
            )
        shares = self.efficiency if isinstance(self.efficiency, Mapping) else {"efficiency": self.efficiency}
        unknown = {name: value for name, value in shares.items() if name not in EFFICIENCY or not is_number(value)}
        if unknown or not all(shares.values()) or self.contention > 1:
            raise ValueError(
                f"cluster {self.name!r}: expected positive efficiencies of {', '.join(EFFICIENCY)} and a contention "
                f"from 0 to 1, found {unknown or dict(shares)} and {self.contention}"
            )

    @property
    def usable(self) -> float:
        """Bytes that a step may reserve: 95 % of those of the device. Plans have errors, and NCCL has buffers."""
        return 0.95 * self.memory

    def rate(self, kind: str, dtype: torch.dtype) -> float:
        """Return what operations of a kind reach: per second, floating-point operations, or bytes read and written."""
        share = self.efficiency.get(kind, EFFICIENCY[kind])
        if kind in ("memory", "function"):
            return share * self.bandwidth
        name = str(dtype).removeprefix("torch.")
        return share * self.flops.get(name, self.flops.get("float32", min(self.flops.values())))

    def link(self, ranks: int, stride: int = 1) -> Link:
        """Return what collectives cost over a group.

        Args:
            ranks: Size of the group.
            stride: Distance of its ranks: 1 of neighbors, the size of a shard group of replicas.
        """
        span = (ranks - 1) * stride + 1
        if span <= self.node:
            return self.inner
        if not self.outer:
            raise FullshardError(
                f"cluster {self.name!r}: expected at most the {self.node} ranks of its node, for it has no figures of "
                f"a network between nodes ([outer.2] of a file), found a group over {span}"
                + ("; calibrate with as many ranks" if self.calibrated else "")
            )
        nodes = min(ranks, math.ceil(span / self.node))
        inside = max(1, min(ranks, self.node // stride))  # ranks of the group on a node share its network
        found, share = _interpolated(self.outer, nodes), inside / self.node
        # Over gloo what a rank receives from its node is no load of the network; in NCCL's rings all passes by once.
        once = (ranks - 1) / (ranks - inside) if self.backend == "gloo" else 1.0
        return dataclasses.replace(
            found,
            bandwidth=found.bandwidth * share * once,
            latency=found.latency * share,  # a ring of fewer ranks
            all_reduce_bandwidth=found.all_reduce_bandwidth * share * once,
        )


def _interpolated(known: Mapping[int, Link], nodes: int) -> Link:
    """Return the link for a number of nodes: between two that are known by a power of it.

    With fewer than are known, that of the fewest; with more, latencies grow as the number does.
    """
    sizes = sorted(known)
    above = next((size for size in sizes if size >= nodes), sizes[-1])
    below = max((size for size in sizes if size <= nodes), default=sizes[0])
    if nodes > sizes[-1]:
        most, beyond = known[sizes[-1]], nodes / sizes[-1]
        later = {"latency": most.latency * beyond, "all_reduce_latency": most.all_reduce_latency * beyond}
        return dataclasses.replace(most, **later)
    if above == below or not below <= nodes <= above:
        return known[below]
    share = math.log(nodes / below) / math.log(above / below)
    first, last = known[below], known[above]
    # Figures that one of them leaves out (0) are left out between them, too.
    return Link(
        *(
            math.exp((1 - share) * math.log(a) + share * math.log(b)) if a and b else 0.0
            for a, b in zip(dataclasses.astuple(first), dataclasses.astuple(last), strict=True)
        )
    )


# [Note: What is known of the network]
# Bytes per second of all-gathers and of all-reduces of 256 MB among nodes of eight H100s on AWS EFA, by nodes, are
# published in the "ultra-scale playbook" of Hugging Face. One size of message does not tell bandwidth from latency. But
# what an all-gather takes beyond one in a node is 23 to 43 microseconds for each rank, from 16 ranks to 512: it grows
# as the ring does, as latency would. Bandwidth would stay the same, or be halved again and again by nothing that is
# known. So it is taken as latency, once for each collective, and bandwidth as that of a node.
MEASURED_BYTES = 256e6
_GATHERED = {2: 184.61e9, 4: 118.97e9, 8: 69.0e9, 16: 54.97e9, 32: 27.97e9, 64: 11.04e9}
_REDUCED = {1: 435.97e9, 2: 361.75e9, 4: 160.14e9, 8: 99.56e9, 16: 84.74e9, 32: 64.93e9, 64: 32.94e9}
_LATENCY = 20e-6  # within a node


def _outer(inner: Link) -> dict[int, Link]:
    """Return the links between nodes: see [Note: What is known of the network]."""
    return {
        nodes: dataclasses.replace(
            inner,
            latency=_LATENCY + MEASURED_BYTES / _GATHERED[nodes] - MEASURED_BYTES / _H100.bandwidth,
            all_reduce_latency=_LATENCY + MEASURED_BYTES / _REDUCED[nodes] - MEASURED_BYTES / _REDUCED[1],
        )
        for nodes in _GATHERED
    }


# Of InfiniBand no such table is known. NCCL itself reckons with these seconds, when it chooses algorithms: at the start
# of a collective, for each hop of a ring between nodes, and for each hop within one.
_START, _HOP, _INNER_HOP = 8.4e-6, 14e-6, 3.4e-6


def infiniband(cluster: Cluster) -> Cluster:
    """Return a cluster with InfiniBand between its nodes: NCCL's own figures of latency, and a node's bandwidth.

    Args:
        cluster: With nodes of eight ranks.
    """
    outer = {}
    for nodes in _GATHERED:
        latency = _START + (nodes - 1) * _HOP + nodes * (cluster.node - 1) * _INNER_HOP
        outer[nodes] = dataclasses.replace(cluster.inner, latency=latency, all_reduce_latency=latency)
    source = f"{_SHEETS.partition(';')[0]}; latencies between nodes as NCCL reckons for InfiniBand"
    return dataclasses.replace(cluster, name=f"{cluster.name}-infiniband", outer=outer, source=source)


def _float8(flops: float) -> dict[str, float]:
    return {"float8_e4m3fn": flops, "float8_e5m2": flops}


def _nvlink(share: float = 1.0) -> Link:
    """Within a node, as measured on H100s, or a share of it."""
    return Link(share * 249.85e9, _LATENCY, 0.0, share * _REDUCED[1], _LATENCY)


_H100 = _nvlink()


def _gpu(name: str, memory: float, flops: Mapping[str, float], bandwidth: float, inner: Link, source: str) -> Cluster:
    return Cluster(name, "accelerator", memory, flops, bandwidth, 8, inner, _outer(inner), source=source, gpu=name)


_SHEETS = "data sheets of NVIDIA, dense; collectives of 256 MB in a node and over nodes as published for AWS EFA"
_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, **_float8(1979e12)}
_BLACKWELL = {"bfloat16": 2250e12, "float16": 2250e12, "float32": 80e12, **_float8(4500e12)}
_GPUS: Mapping[str, Cluster] = {
    "h100": _gpu("h100", 79.1 * GIB, _HOPPER, 3.35e12,
                 _H100, _SHEETS),
    "h200": _gpu("h200", 139.8 * GIB, _HOPPER, 4.8e12,
                 _H100, _SHEETS),
    "a100": _gpu("a100", 79.1 * GIB, {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}, 2.04e12,
                 _nvlink(2 / 3), _SHEETS),
    "b200": _gpu("b200", 178.4 * GIB, _BLACKWELL, 8e12,
                 _nvlink(2), _SHEETS),
}  # fmt: skip
PRESETS: Mapping[str, Cluster] = {
    **_GPUS,
    **{f"{name}-infiniband": infiniband(cluster) for name, cluster in _GPUS.items()},
    "cpu": Cluster("cpu", "cpu", 8 * GIB, {"float32": 6e10, "bfloat16": 3e10}, 1e10, 64, Link(2e9, 1e-4),
                   backend="gloo", op_seconds=0.0, kernel_seconds=5e-6, source="two cores of an AMD EPYC"),
}  # fmt: skip


def cluster_of(value: str | Path | Cluster) -> Cluster:
    """Return a preset by name, or the cluster that a TOML file describes.

    Args:
        value: A name, a file, or the cluster itself. A file has the attributes of ``Cluster``; ``[inner]`` and
            ``[outer.N]`` those of ``Link``; ``base``, the name of a preset that it changes.

    Raises:
        FullshardError: If there is neither, or the file does not describe a cluster.
    """
    if isinstance(value, Cluster):
        return value
    if str(value) in PRESETS:
        return PRESETS[str(value)]
    path = Path(value)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return _from_table(path.stem, table)
    except OSError as error:
        raise FullshardError(
            f"cluster: expected one of {', '.join(PRESETS)} or a TOML file, found {str(value)!r} ({error.strerror})"
        ) from None
    except (tomllib.TOMLDecodeError, TypeError, ValueError, KeyError) as error:
        raise FullshardError(f"cluster: {path} does not describe a cluster: {error}") from None


def _from_table(name: str, table: dict[str, Any]) -> Cluster:
    base = table.pop("base", None)
    if "inner" in table:
        table["inner"] = Link(**table["inner"])
    if "outer" in table:
        table["outer"] = {int(nodes): Link(**link) for nodes, link in table["outer"].items()}
    if base is not None:
        if base not in PRESETS:
            raise ValueError(f"base: expected one of {', '.join(PRESETS)}, found {base!r}")
        if isinstance(table.get("flops"), dict):
            table["flops"] = {**PRESETS[base].flops, **table["flops"]}
        return dataclasses.replace(PRESETS[base], **{"name": name, **table})
    known: Sequence[str] = [each.name for each in dataclasses.fields(Cluster)]
    unknown = [key for key in table if key not in known]
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return Cluster(**{"name": name, **table})


def to_toml(cluster: Cluster) -> str:
    """Return a cluster as a TOML file has it, for ``cluster_of``.

    Args:
        cluster: The cluster.
    """
    values = dataclasses.asdict(cluster)
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if not isinstance(value, dict)]
    tables = {name: value for name, value in values.items() if isinstance(value, dict) and name != "outer"}
    tables |= {f"outer.{nodes}": link for nodes, link in values["outer"].items()}
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {float(value)!r}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
