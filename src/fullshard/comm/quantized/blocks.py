"""Blocks of 8-bit numbers that share a scale: the formats of quantized communication.

[Note: Rows]
A block of k values becomes a *row* of k + 4 bytes: one byte per value, then the scale as fp32. So rows can be cut apart
and sent to different ranks, and are read without knowing what lies beside them. The last block of a tensor may have
fewer values; its row is as long, with zeros.

The scale is the block's largest magnitude over the largest number of the format. fp32, not a shorter one: it reaches as
far as the values, and for k = 128 costs 3% of the message. A block with an inf or NaN in it has such a scale, so that
all of it arrives as NaN, which a GradScaler or clipping finds. A block whose scale would be denormal,
which some devices flush to zero, arrives as zeros: its values are below 6e-36.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SCALE_BYTES", "BlockFormat"]

SCALE_BYTES = 4

# Values that are worked on at a time. On CPUs temporaries then stay in the second-level cache; on accelerators the
# number of kernels counts instead.
_AT_A_TIME = {"cpu": 128 * 1024}
_AT_A_TIME_ELSEWHERE = 64 * 1024 * 1024

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smaller ones are denormal


@dataclass(frozen=True)
class BlockFormat:
    """Writes values into rows and reads them back, see [Note: Rows].

    Args:
        name: "int8" or "fp8".
        block: Values per row, a multiple of 4.
    """

    name: str
    block: int

    @property
    def dtype(self) -> torch.dtype:
        """Element type of one value as it is sent."""
        return torch.int8 if self.name == "int8" else torch.float8_e4m3fn

    @property
    def limit(self) -> float:
        """The number that the largest value of a block becomes."""
        return 127.0 if self.name == "int8" else 448.0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.block + SCALE_BYTES

    def rows(self, numel: int) -> int:
        """Return the number of rows that ``numel`` values take."""
        return -(-numel // self.block)

    def encode(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Write values into rows.

        Args:
            values: ``(m, n)``, of any floating-point dtype, each ``[i]`` contiguous.
            rows: ``(m, rows(n), row_bytes)`` of uint8; gets every byte.
        """
        codes, scales = self._parts(rows)
        for start, count, width in self._chunks(values):
            taken = values.narrow(1, start * self.block, count * width).view(-1, count, width)
            # A copy even of fp32: it is scaled and rounded in place.
            work = taken.to(torch.float32, copy=True)
            largest = work.abs().amax(-1)
            scale = largest / self.limit
            scale.masked_fill_(scale < _SMALLEST_SCALE, 0.0)
            inverse = torch.where(scale == 0, scale, scale.reciprocal())
            work.mul_(inverse.unsqueeze(-1))
            if self.name == "int8":
                work.round_()
            place = codes.narrow(1, start, count)
            if width < self.block:
                rows.narrow(1, start, count).zero_()
            place.narrow(2, 0, width).copy_(work)
            scales.narrow(1, start, count).copy_(scale)

    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write what ``encode`` has written, or as much as there is room for, into ``values``.

        Args:
            rows: ``(m, rows(n), row_bytes)`` of uint8.
            values: ``(m, n)``, of any floating-point dtype, each ``[i]`` contiguous.
        """
        codes, scales = self._parts(rows)
        for start, count, width in self._chunks(values):
            target = values.narrow(1, start * self.block, count * width).view(-1, count, width)
            work = target if target.dtype is torch.float32 else torch.empty_like(target, dtype=torch.float32)
            work.copy_(codes.narrow(1, start, count).narrow(2, 0, width))
            work.mul_(scales.narrow(1, start, count).unsqueeze(-1))
            if work is not target:
                target.copy_(work)

    def add(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of the rows to ``total``.

        Args:
            rows: ``(m, rows(n), row_bytes)`` of uint8.
            total: ``(m, n)`` of fp32, each ``[i]`` contiguous.
        """
        codes, scales = self._parts(rows)
        for start, count, width in self._chunks(total):
            target = total.narrow(1, start * self.block, count * width).view(-1, count, width)
            work = codes.narrow(1, start, count).narrow(2, 0, width).to(torch.float32)
            target.addcmul_(work, scales.narrow(1, start, count).unsqueeze(-1))

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes ``(m, r, block)`` and the scales ``(m, r)`` in rows."""
        return rows[..., : self.block].view(self.dtype), rows.view(torch.float32)[..., self.block // SCALE_BYTES]

    def _chunks(self, values: torch.Tensor) -> list[tuple[int, int, int]]:
        """Return the first row, number of rows and values per row of each chunk that is worked on at a time."""
        ranks, numel = values.shape
        whole, rest = divmod(numel, self.block)
        room = _AT_A_TIME.get(values.device.type, _AT_A_TIME_ELSEWHERE)
        step = max(1, room // (self.block * max(ranks, 1)))
        chunks = [(start, min(step, whole - start), self.block) for start in range(0, whole, step)]
        if rest:
            chunks.append((whole, 1, rest))
        return chunks if ranks else []
