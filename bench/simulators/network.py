"""A network that is a model: one process plays one rank of N, and a collective takes latency + bytes / bandwidth.

A c10d back end written in Python, registered as ``modelled``. It serves whatever is built on torch.distributed:
fullshard, torch's FSDP1, FSDP2 and DDP, DeviceMesh, and groups made from groups. See docs/design/modelled_network.md.

    with modelled_ranks(1024, Network(bandwidth=50e9, hop_latency=2e-6)) as fabric:
        ...                                  # build a model, shard it, train it
        fabric.device.compute(0.010)         # ten modelled milliseconds of computation

What time is, and how waiting is done: [Note: Time] in ``bench.simulators.clocks``. What arrives: [Note: Contents] in
``bench.simulators.group``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.simulators.clocks import Device, HostDevice, Passage, SkippingClock
from bench.simulators.group import Launch, ModelledGroup, ModelledWork


@dataclass(frozen=True)
class Network:
    """What the link of a rank is like. All communicators share it, one message after another.

    Args:
        bandwidth: Bytes per second that one rank receives.
        latency: Seconds that every launch costs, whatever its size and the number of ranks.
        hop_latency: Seconds per level of a tree of all ranks.
        like: ``nccl``: collectives of one communicator are in order, and a group call is one launch, which costs the
            latency once; the group calls itself NCCL, for a library that asks. ``collective``: every collective is a
            launch of its own.
        fills: Whether what arrives is written, see [Note: Contents]. Off: regions stay as they are.
    """

    bandwidth: float
    latency: float = 0.0
    hop_latency: float = 0.0
    like: Literal["nccl", "collective"] = "nccl"
    fills: bool = True

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or self.latency < 0 or self.hop_latency < 0:
            raise ValueError(f"a link needs a positive bandwidth and latencies of at least 0, got {self}")

    def alpha(self, ranks: int) -> float:
        """Seconds before the first byte of a collective over ``ranks`` ranks."""
        return self.latency + self.hop_latency * (ranks - 1).bit_length() if ranks > 1 else 0.0

    def seconds(self, nbytes: float, ranks: int, passes: int = 1) -> float:
        """Seconds of one collective.

        Args:
            nbytes: What this rank receives.
            ranks: Of the group. A group of one rank sends nothing.
            passes: How often data goes round: an all-reduce is a reduce-scatter and a gather, 2.
        """
        return passes * self.alpha(ranks) + nbytes / self.bandwidth if ranks > 1 else 0.0


@dataclass(frozen=True)
class Message:
    """One launch, for tests and plots.

    Args:
        what: Name of the (last) collective.
        nbytes: What this rank receives.
        passage: When it went; on simulated streams known after the next synchronization, on an accelerator never.
    """

    what: str
    nbytes: float
    passage: Passage


class Fabric:
    """The link of one process, and everything that is in flight on it.

    Args:
        network: What it is like.
        device: What computes beside it.
        group_type: What its groups are.
    """

    network: Network
    device: Any
    group_type: type[ModelledGroup]
    messages: list[Message] | None  # None: not recorded
    groups: int  # made so far

    def __init__(self, network: Network, device: Device, group_type: type[ModelledGroup] = ModelledGroup) -> None:
        self.network, self.device, self.group_type, self.messages, self.groups = network, device, group_type, None, 0

    def send(self, launch: Launch, group: ModelledGroup) -> ModelledWork:
        """Put a launch on the link."""
        passage = Passage(launch.seconds, group.number if self.network.like == "nccl" else None)
        self.device.transmit(passage, launch.fill)
        if self.messages is not None:
            self.messages.append(Message(launch.what, launch.nbytes, passage))
        return ModelledWork(self.device, passage, launch)


_current: list[Fabric] = []  # the one whose groups are being made


def _create(options: Any, _: Any = None) -> ModelledGroup:
    if not _current:
        raise RuntimeError("no modelled network is running: make groups inside modelled_ranks(...)")
    return _current[-1].group_type(_current[-1], options.group_rank, options.group_size, options.group_id)


@contextlib.contextmanager
def modelled_ranks(
    ranks: int,
    network: Network,
    *,
    rank: int = 0,
    device: Device | None = None,
    group_type: type[ModelledGroup] = ModelledGroup,
) -> Iterator[Fabric]:
    """Be rank ``rank`` of ``ranks`` as long as the block lasts; there must be no default group yet.

    Args:
        ranks: Size of the default group.
        network: Its link.
        rank: The one this process plays.
        device: What computes and waits; None: this host, with a clock that skips.
        group_type: What the groups are.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be one of the {ranks} ranks, got {rank}")
    device = device if device is not None else HostDevice(SkippingClock())
    if not hasattr(dist.Backend, "MODELLED"):
        accelerator = getattr(device, "device", torch.device("cpu")).type
        dist.Backend.register_backend("modelled", _create, extended_api=True, devices=["cpu", "cuda", accelerator])
    fabric = Fabric(network, device, group_type)
    _current.append(fabric)
    try:
        dist.init_process_group("modelled", store=dist.HashStore(), rank=rank, world_size=ranks)
        try:
            yield fabric
        finally:
            dist.destroy_process_group()
    finally:
        _current.pop()
