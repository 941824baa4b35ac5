"""Bytes per rank of a Llama-3-8B, by strategy: formulas that tests compare with counted bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pictures import style
from pictures.style import Palette

SLOW = False
GB = 1e9
RANKS, NODE = (8, 64), 8
GPU = 80  # GB
KINDS = ("parameters", "gradients", "optimizer state", "unsharded")


@dataclass(frozen=True)
class LlamaShape:
    """Sizes as in the model's published configuration."""

    width: int = 4096
    inner: int = 14336
    layers: int = 32
    keys: int = 1024  # 8 heads of 128
    vocabulary: int = 128256

    @property
    def units(self) -> list[int]:
        """Parameters of the embedding, the blocks, and the norm and the head."""
        attention = 2 * self.width**2 + 2 * self.width * self.keys
        block = attention + 3 * self.width * self.inner + 2 * self.width
        table = self.vocabulary * self.width
        return [table, *[block] * self.layers, table + self.width]


@dataclass(frozen=True)
class Widths:
    """Bytes per parameter: of shards, unsharded parameters, gradients, gradients in a reduction, sharded gradients, and
    optimizer state."""

    master: int = 4
    gathered: int = 4
    gradient: int = 4
    reduced: int = 4
    resting: int = 4
    optimizer: int = 8


# bf16 in computation, fp32 in reduction and at rest, AdamW.
MIXED = Widths(gathered=2, gradient=2)


def most_with_neighbors(units: list[int], widths: Widths) -> int:
    """The most that is unsharded at a time with one unit of overlap: the next unit is all-gathered, and the last one
    reduced, while one computes."""
    padded = [0, *units, 0]
    forward = [widths.gathered * (unit + after) for unit, after in pairwise(padded[1:])]
    backward = [
        widths.gathered * (before + unit) + widths.gradient * unit + widths.reduced * after
        for before, unit, after in zip(padded, units, padded[2:], strict=False)
    ]
    return max(forward + backward)


@dataclass(frozen=True)
class Strategy:
    """How many ranks share the state, and what of it is unsharded beside the units that compute.

    Args:
        name: In the picture.
        call: What a user writes.
        share: Ranks that share the state, of so many in all.
        parameters: All stay unsharded until their backward.
        gradients: All stay unsharded until the last microbatch.
        offload: The state is in CPU memory.
    """

    name: str
    call: str
    share: Any
    parameters: bool = False
    gradients: bool = False
    offload: bool = False

    def bytes_on(self, units: list[int], ranks: int, widths: Widths) -> dict[str, float]:
        """Bytes per rank, of each of :data:`KINDS`."""
        share = self.share(ranks)
        each = sum(units) / share
        unsharded = most_with_neighbors(units, widths)
        if self.gradients:
            unsharded = (widths.gathered + widths.reduced) * sum(units) + widths.gradient * max(units)
        elif self.parameters:
            unsharded = most_in_backward(units, widths)
        sizes = (widths.master * each, widths.resting * each, widths.optimizer * each)
        resting = (0.0, 0.0, 0.0) if self.offload else sizes
        return dict(zip(KINDS, (*resting, unsharded), strict=True))


def most_in_backward(units: list[int], widths: Widths) -> int:
    """The most that is unsharded in backward where all parameters stay until then: each unit's are freed after its own.

    One unit has gradients, and those of the one after it are being reduced.
    """
    following = [*units[1:], 0]
    return max(
        widths.gathered * sum(units[: i + 1]) + widths.gradient * units[i] + widths.reduced * following[i]
        for i in range(len(units))
    )


STRATEGIES = (
    Strategy("Replicated (DDP)", "replicate(model)", lambda ranks: 1, parameters=True),
    Strategy("ZeRO-1", "... without gradient sync", lambda ranks: ranks, parameters=True, gradients=True),
    Strategy("ZeRO-2", "reshard_after_forward=False", lambda ranks: ranks, parameters=True),
    Strategy("HSDP", "mesh=(replicate, shard)", lambda ranks: min(NODE, ranks // 2)),
    Strategy("ZeRO-3", "fully_shard(model)", lambda ranks: ranks),
    Strategy("ZeRO-3, offloaded", "CPUOffloadPolicy()", lambda ranks: ranks, offload=True),
)


def record() -> dict[str, Any]:
    units = LlamaShape().units
    return {
        "parameters": sum(units),
        "gigabytes": {
            str(ranks): {
                each.name: {kind: round(size / GB, 2) for kind, size in each.bytes_on(units, ranks, MIXED).items()}
                for each in STRATEGIES
            }
            for ranks in RANKS
        },
    }


def draw(data: Any, palette: Palette) -> Any:
    figure = style.figure(5.9)
    found = data["gigabytes"]
    most, least = (sum(found["64"][name].values()) for name in ("Replicated (DDP)", "ZeRO-3"))
    title = f"Llama 3 8B on 64 GPUs: {most:.0f} GB per GPU replicated, {least:.1f} GB with fully_shard"
    style.heading(figure, palette, title, "GB per GPU, without activations. bf16 computation, fp32 state, AdamW.")
    colors = dict(zip(KINDS, (palette.accent, palette.tint, palette.faint, palette.second), strict=True))
    for x, kind in zip((0.012, 0.15, 0.275, 0.445), KINDS, strict=True):
        text = "unsharded parameters and gradients" if kind == "unsharded" else kind
        figure.text(x, 0.862, "\u25a0", fontsize=15, color=colors[kind], va="center")
        figure.text(x + 0.025, 0.862, text, fontsize=10.5, va="center")
    for index, ranks in enumerate(RANKS):
        axis = figure.add_axes((0.235 + index * 0.395, 0.10, 0.365, 0.62))
        rows = found[str(ranks)]
        for row, sizes in enumerate(rows.values()):
            left = 0.0
            for kind, size in sizes.items():
                axis.barh(row, size, left=left, color=colors[kind], height=0.62)
                left += size
            axis.text(left + 2, row, f"{left:.0f}" if left >= 20 else f"{left:.1f}", va="center", fontweight="bold")
        axis.text(0, -0.85, f"{ranks} GPUs", fontsize=12.5, fontweight="bold", va="bottom")
        axis.axvline(GPU, color=palette.muted, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axis.text(GPU, -0.6, f"{GPU} GB", fontsize=10, color=palette.muted, ha="center", va="bottom")
        axis.set(xlim=(0, 178), ylim=(len(rows) - 0.5, -0.55))
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[["bottom"]].set_visible(False)
        for row, each in enumerate(STRATEGIES if index == 0 else ()):
            axis.text(-4, row - 0.14, each.name, ha="right", va="center", fontsize=11.5)
            mono = {"family": "DejaVu Sans Mono", "fontsize": 8, "color": palette.muted}
            axis.text(-4, row + 0.2, each.call, ha="right", va="center", **mono)
    style.caption(
        figure,
        palette,
        "Arithmetic, not a measurement: the formulas of docs/how_to/memory.md for "
        f"{data['parameters'] / 1e9:.2f} billion parameters. "
        "HSDP: 4 of 8 GPUs share\nthe state, or 8 of 64. Embedding and head are units of their own. "
        "Offloaded state is in CPU memory.",
    )
    return figure
