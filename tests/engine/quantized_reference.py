"""What quantized communication makes of values, written as plainly as possible."""

from __future__ import annotations

import torch


def quantized(values: torch.Tensor, name: str, block: int) -> torch.Tensor:
    """What flat values become, block by block."""
    limit = 127 if name == "int8" else 448
    blocks = []
    for part in values.to(torch.float32).split(block):
        scale = part.abs().max() / limit
        codes = part / scale if scale >= 2**-126 else torch.zeros_like(part)
        codes = codes.round() if name == "int8" else codes.to(torch.float8_e4m3fn).to(torch.float32)
        blocks.append(codes * scale)
    return torch.cat(blocks).to(values.dtype)
