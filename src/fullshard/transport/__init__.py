"""Transports: how a bucket's gather and reduce become messages on a given back end."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.transport.base import Collective, Move, Transport, record
from fullshard.transport.collective import CollectiveTransport, NcclTransport
from fullshard.transport.gloo import GlooTransport

__all__ = [
    "Collective",
    "CollectiveTransport",
    "GlooTransport",
    "Move",
    "NcclTransport",
    "Transport",
    "make_transport",
    "record",
]

_BY_BACKEND: dict[str, type[Transport]] = {"gloo": GlooTransport, "nccl": NcclTransport}


def make_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport for the back end that ``group`` uses on ``device``."""
    backend = group._get_backend(device).name().lower()
    if backend == "gloo" and device.type != "cpu":
        return CollectiveTransport(group)  # gloo stages device memory in its collectives, not in send and recv
    return _BY_BACKEND.get(backend, CollectiveTransport)(group)
