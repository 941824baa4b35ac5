"""`loss.png`: training and validation loss over steps, with the baselines as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fullshard.train.log import Record

SMOOTHED_SHARE = 1 / 40  # of all steps, which the smoothed training loss averages over


def plot_losses(path: Path, records: Sequence[Record], baselines: Mapping[str, float]) -> None:
    """Draw the losses of a run in bits per byte.

    Args:
        path: PNG file to write.
        records: what `metrics.jsonl` holds; nothing is written if there is no training record.
        baselines: bits per byte of each yardstick by name.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    train = [(r["step"], r["bits_per_byte"]) for r in records if r["kind"] == "train"]
    between, final = (
        [(r["step"], r["bits_per_byte"], r["bytes"]) for r in records if r["kind"] == kind]
        for kind in ("validation", "final_validation")
    )
    if not train:
        return
    steps, losses = zip(*train, strict=True)
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, _smooth(losses), color="tab:blue", linewidth=1.6, label="training, smoothed")
    if between:
        where, values, sizes = zip(*between, strict=True)
        label = f"validation, {sizes[-1]:,} held-out bytes"
        axes.plot(where, values, color="tab:red", marker="o", markersize=4, linewidth=1.2, label=label)
    for step, loss, size in final[-1:]:
        label = f"final validation, {size:,} held-out bytes: {loss:.2f}"
        axes.plot(step, loss, color="tab:green", marker="*", markersize=13, linestyle="", clip_on=False, label=label)
    for (name, value), style in zip(baselines.items(), ("--", ":", "-."), strict=False):
        axes.axhline(value, color="0.35", linestyle=style, linewidth=1, label=f"{name}: {value:.2f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (bits per byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(0, max(steps[-1], 2))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a window around each value; windows shrink towards both ends, so that there is no lag."""
    reach = int(SMOOTHED_SHARE * len(values) / 2)
    smoothed = []
    for at in range(len(values)):
        near = min(reach, at, len(values) - 1 - at)
        window = values[at - near : at + near + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed
