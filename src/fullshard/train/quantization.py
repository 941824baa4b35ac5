"""Quantized communication of a training run: how it is set, and the bytes in the run's summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from fullshard.composable.fsdp_module import FSDPModule
from fullshard.engine.quantized_report import QuantizationReport
from fullshard.policy import CommQuantization
from fullshard.train.model import GPT

__all__ = ["QuantizationSummary", "quantization_summary", "set_comm_quantization", "summarize"]


@dataclass(frozen=True)
class QuantizationSummary:
    """Bytes that rank 0 received.

    Attributes:
        format: of the blocks.
        bytes_received: with scales.
        bytes_in_full_precision: that it would have been.
        quantized_parameters: how many parameters are quantized in any collective.
        parameters: how many there are.
    """

    format: str
    bytes_received: int
    bytes_in_full_precision: int
    quantized_parameters: int
    parameters: int

    def __str__(self) -> str:
        if not self.bytes_in_full_precision:
            return f"comm quantization {self.format}: nothing was sent, with one rank"
        ratio = self.bytes_received / self.bytes_in_full_precision
        return (
            f"comm quantization {self.format}: rank 0 received {self.bytes_received / 2**20:.1f} MiB of weights and "
            f"gradients instead of {self.bytes_in_full_precision / 2**20:.1f} ({ratio:.3f}); "
            f"{self.quantized_parameters} of {self.parameters} parameters are quantized"
        )


def set_comm_quantization(model: GPT, name: str) -> None:
    """Send weights in blocks of the format `name`, and then gradients in blocks of int8."""
    if name != "none":
        policy = CommQuantization(all_gather=cast('Literal["int8", "fp8"]', name), reduce="int8")
        cast("FSDPModule", model).set_comm_quantization(shard=policy)


def quantization_summary(model: GPT, name: str) -> QuantizationSummary | None:
    """Bytes received so far; None in full precision."""
    return None if name == "none" else summarize(name, cast("FSDPModule", model).comm_quantization_report())


def summarize(name: str, report: QuantizationReport) -> QuantizationSummary:
    """The totals of a report."""
    quantized = sum(parameter.quantized for parameter in report.parameters)
    return QuantizationSummary(name, report.nbytes, report.full_bytes, quantized, len(report.parameters))
