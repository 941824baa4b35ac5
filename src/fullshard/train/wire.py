"""Messages in fewer bytes: what a run sets, and what its summary says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from fullshard.engine.wire_report import WireReport
from fullshard.fsdp_module import FSDPModule
from fullshard.policy import Wire
from fullshard.train.model import GPT

__all__ = ["WireSummary", "set_wire", "summarise", "wire_summary"]


@dataclass(frozen=True)
class WireSummary:
    """What rank 0 received.

    Attributes:
        format: of the blocks.
        bytes_received: with scales.
        bytes_in_full_precision: that it would have been.
        rounded_parameters: how many parameters are rounded anywhere.
        parameters: how many there are.
    """

    format: str
    bytes_received: int
    bytes_in_full_precision: int
    rounded_parameters: int
    parameters: int

    def __str__(self) -> str:
        if not self.bytes_in_full_precision:
            return f"wire {self.format}: nothing travelled, with one rank"
        ratio = self.bytes_received / self.bytes_in_full_precision
        return (
            f"wire {self.format}: rank 0 received {self.bytes_received / 2**20:.1f} MiB of weights and gradients "
            f"instead of {self.bytes_in_full_precision / 2**20:.1f} ({ratio:.3f}); {self.rounded_parameters} of "
            f"{self.parameters} parameters are rounded"
        )


def set_wire(model: GPT, name: str) -> None:
    """Have weights travel as `name` says, and then gradients as int8 blocks."""
    if name != "none":
        wire = Wire(gather=cast('Literal["int8", "fp8"]', name), reduce="int8")
        cast("FSDPModule", model).set_wire(shard=wire)


def wire_summary(model: GPT, name: str) -> WireSummary | None:
    """What has travelled so far; None without a wire."""
    return None if name == "none" else summarise(name, cast("FSDPModule", model).wire_report())


def summarise(name: str, report: WireReport) -> WireSummary:
    """What a report says."""
    rounded = sum(parameter.rounded for parameter in report.parameters)
    return WireSummary(name, report.nbytes, report.full_bytes, rounded, len(report.parameters))
