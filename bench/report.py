"""Results as files: JSON, a markdown table between markers in the documentation, a plot beside the JSON."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.environment import REPOSITORY, Environment
from bench.statistics import Spread

RESULTS = REPOSITORY / "bench" / "results"
DOCUMENT = REPOSITORY / "docs" / "performance.md"

_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
_NEW_DOCUMENT = """# Performance

Every table below is written by a benchmark in `bench/`; the figures behind it lie in `bench/results/`. The contestants
of one measurement ran in one run, taking turns (scaling: one after another); ratios are taken within a round of turns
and given as the median over the rounds, with the quartiles in brackets. Below 1 is faster, or smaller, than the peer.
The tables are of separate runs: compare figures of one measurement only.

## A training step on CPU ranks

`python -m bench.step` trains the same GPT with every contestant, one process per rank.

<!-- bench:step:512 -->
<!-- /bench -->

<!-- bench:step:1024 -->
<!-- /bench -->

## The modes of fully_shard

`python -m bench.modes --write-document` trains the same GPT with mixed precision, on a two-axis mesh, with gradient
accumulation and under the CPU offload policy. "Sent per rank" is what the busiest rank sends per step, by the
kernel's count of TCP payload.

<!-- bench:modes:512 -->
<!-- /bench -->

<!-- bench:modes:1024 -->
<!-- /bench -->

## The wrapper

`python -m bench.wrapper --write-document` trains the same GPT with fullshard's `FullyShardedDataParallel` and with
torch's (FSDP1), and summons full parameters of it. `-flat` means `use_orig_params=False`, other names True; each is
measured by FSDP1 in the same configuration.

<!-- bench:wrapper:512 -->
<!-- /bench -->

<!-- bench:wrapper:1024 -->
<!-- /bench -->

`python -m bench.wrap_time --write-document` times the constructor on a thousand tiny modules, each to become a unit.

<!-- bench:wrap_time -->
<!-- /bench -->

## Through accelerate

`python -m bench.accelerate_step --write-document` trains the GPT through accelerate (version 2 of its FSDP) with
torch's FSDP2, and with fullshard in its place. It wants accelerate, as `make test-clients` installs it.

<!-- bench:accelerate_step:512 -->
<!-- /bench -->

<!-- bench:accelerate_step:1024 -->
<!-- /bench -->

## Host time per unit

`python -m bench.host_cost` steps through a hundred tiny units on a fake process group, which only copies within the
process, for all contestants: what is left beside the plain model is nearly the time the library itself needs.

<!-- bench:host_cost -->
<!-- /bench -->

## The optimizer step

`python -m bench.optimizer_cost --write-document` steps AdamW on 800 parameters in 100 units, on a fake group.

<!-- bench:optimizer_cost -->
<!-- /bench -->

`python -m bench.muon --write-document` steps Muon with owners, and with every rank gathering everything.

<!-- bench:muon -->
<!-- /bench -->

## Overlap on a modelled network

`python -m bench.overlap --write-document` plays one rank of many: collectives take the time that a network of a given
latency and bandwidth would need ([how](design/modelled_network.md)). T_LB is the lower bound of a schedule.

<!-- bench:overlap -->
<!-- /bench -->

## Quantized communication

`python -m bench.quantization --write-document` runs the default training job (869,504 parameters, 500 steps, one seed)
with quantized messages: losses within 0.5%, on 0.26 of the bytes. The tables are in [low bandwidth](low_bandwidth.md).

## Memory and its bound

`python -m bench.memory_limit --write-document` counts every allocation of a step and compares the peak with the bound;
`python -m bench.memory_limit_faults --write-document` counts page faults with and without kept blocks. The tables are
in [memory](memory.md).

## Scaling

`python -m bench.scaling --write-document` initialises, trains and plans checkpoints as one rank of up to 16,384
([scaling](scaling.md)).

<!-- bench:scaling -->
<!-- /bench -->

## One GPU

`make gpu` runs all that a CUDA device can show, and writes [a page of its own](gpu.md).
"""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose other columns are right-aligned figures."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def replace_block(text: str, name: str, block: str) -> str:
    """Put ``block`` between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; missing markers are appended."""
    opening, closing = f"<!-- bench:{name} -->", "<!-- /bench -->"
    fresh = f"{opening}\n{block.strip()}\n{closing}"
    pattern = re.compile(re.escape(opening) + r"(?:(?!<!-- bench:).)*?" + re.escape(closing), re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: fresh, text, count=1)
    if opening in text:
        raise ValueError(f"{opening} has no {closing} after it")
    return f"{text.rstrip()}\n\n{fresh}\n"


def update_document(path: Path, name: str, block: str) -> None:
    """Replace one block of the documentation page, creating the page with its headings if it is missing."""
    text = path.read_text(encoding="utf-8") if path.exists() else _NEW_DOCUMENT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(replace_block(text, name, block), encoding="utf-8")


def write_json(path: Path, result: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with NaN and infinities, which JSON does not know, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def provenance(environment: Environment) -> str:
    """One line under a table: what it was measured on."""
    machine = f"{environment.device}, " if environment.device else ""
    return (
        f"{machine}{environment.cpu}, {environment.cores} cores, torch {environment.torch}, "
        f"Python {environment.python}, {environment.date}, commit {environment.commit}."
    )


def image_link(image: Path, document: Path, text: str) -> str:
    """A markdown image, relative to the document it stands in."""
    relative = os.path.relpath(image.resolve(), document.resolve().parent)
    return f"![{text}]({Path(relative).as_posix()})"


@dataclass(frozen=True)
class Panel:
    """One group of horizontal bars: a value, or a value with its quartiles, per contestant."""

    title: str
    values: Mapping[str, float | Spread]
    reference: float | None = None


def plot_bars(path: Path, title: str, panels: Sequence[Panel], highlight: str = "fullshard") -> None:
    """Draw the panels side by side; bars of contestants whose name starts with ``highlight`` stand out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tallest = max(len(panel.values) for panel in panels)
    size = (5.2 * len(panels), 1.4 + 0.42 * tallest)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        names = list(panel.values)
        spreads = [v if isinstance(v, Spread) else Spread(v, v, v) for v in panel.values.values()]
        medians = [s.median for s in spreads]
        whiskers = [
            [s.median - s.lower_quartile for s in spreads],
            [s.upper_quartile - s.median for s in spreads],
        ]
        colors = ["#1f6f8b" if name.startswith(highlight) else "#b9c4cc" for name in names]
        has_spread = any(isinstance(v, Spread) for v in panel.values.values())
        axis.barh(names, medians, color=colors, xerr=whiskers if has_spread else None, capsize=3)
        limit = max([s.upper_quartile for s in spreads] + [panel.reference or 0.0]) or 1.0
        for row, s in enumerate(spreads):
            axis.text(
                s.upper_quartile + 0.015 * limit,
                row,
                f"{s.median:.2f}",
                va="center",
                fontsize=9,
                bbox=_LABEL_BOX,
            )
        if panel.reference is not None:
            axis.axvline(panel.reference, color="#555555", linewidth=1, linestyle="--")
        axis.set_xlim(0, 1.14 * limit)
        axis.invert_yaxis()
        axis.set_title(panel.title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)
