"""A network that is a model: one process plays one rank of N, and a collective takes latency + bytes / bandwidth.

A c10d back end written in Python, registered as ``modelled``. It serves whatever is built on torch.distributed:
fullshard, torch's FSDP1, FSDP2 and DDP, DeviceMesh, and groups made from groups. See docs/design/modelled_network.md.

    with modelled_ranks(1024, Network(bandwidth=50e9, hop_latency=2e-6)) as fabric:
        ...                                  # build a model, shard it, train it
        fabric.device.compute(0.010)         # ten modelled milliseconds of computation

What time is, and how waiting is done: [Note: Time] in ``clocks.py``. What arrives: [Note: Contents] in
``group.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fullshard.planning.simulation.clocks import Device, HostDevice, SkippingClock
from fullshard.planning.simulation.group import Fabric, ModelledGroup
from fullshard.planning.simulation.network import Network

_current: list[Fabric] = []  # the one whose groups are being made


def _create(options: Any, _: Any = None) -> ModelledGroup:
    if not _current:
        raise RuntimeError("no modelled network is running: make groups inside modelled_ranks(...)")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return _current[-1].group_type(_current[-1], options.group_rank, ranks, options.group_id)


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
        devices = ["cpu", "meta", accelerator]
        dist.Backend.register_backend("modelled", _create, extended_api=True, devices=devices)
    fabric = Fabric(network, device, group_type)
    _current.append(fabric)
    try:
        dist.init_process_group("modelled", store=dist.HashStore(), rank=rank, world_size=ranks)  # type: ignore[attr-defined]
        try:
            yield fabric
        finally:
            dist.destroy_process_group()
    finally:
        _current.pop()
