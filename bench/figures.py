"""The figures by which the project is judged, with their targets: one list, from which pages and claims are made.

A figure is a ratio to a peer, or to a bound, that stands in a stored result; below 1, fullshard is faster or smaller.
Nothing on the pages is typed: a figure that no result has is "not measured".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.stored import Results, common_source, oddness

UNMEASURED = "not measured"
Find = Callable[[Results], Any]


@dataclass(frozen=True)
class Figure:
    """One ratio.

    Args:
        what: Is measured.
        peer: Is what it is compared with.
        find: Its value, or its value and spread, in the results; None: not measured.
        limit: What it may be at most; None: no target.
        page: Where its table is.
        headline: Whether it is in the picture.
    """

    what: str
    peer: str
    find: Find
    limit: float | None = None
    page: str = ""
    headline: bool = False

    def text(self, results: Results) -> str:
        """The value as it is written everywhere."""
        found = self.find(results)
        return UNMEASURED if found is None else report.cell(found)

    def median(self, results: Results) -> float | None:
        """The value without its spread."""
        found = self.find(results)
        return found["median"] if isinstance(found, Mapping) else found


def at(name: str, *keys: str) -> Find:
    """What stands under keys of the result of this name."""
    return lambda results: report.value_under(results[name].result, keys) if name in results else None


def of_step(what: str, contestant: str, key: str) -> Find:
    return at(what, "contestants", contestant, key)


def counted_ratios(results: Results) -> list[float]:
    """fullshard's counted peak over FSDP2's, in each cell of the benchmark of memory."""
    if "memory_limit" not in results:
        return []
    peaks: dict[tuple[Any, ...], dict[str, int]] = {}
    for cell in results["memory_limit"].result["cells"]:
        if cell["reading"] is not None and cell["mode"] != "offload":
            row = peaks.setdefault((cell["width"], cell["ranks"], cell["mode"]), {})
            row[cell["system"]] = max(cell["reading"]["peaks"].values())
    return [row["fullshard"] / row["fsdp2"] for row in peaks.values() if {"fullshard", "fsdp2"} <= set(row)]


def counted(summary: Callable[[Sequence[float]], float]) -> Find:
    return lambda results: summary(counted_ratios(results)) if counted_ratios(results) else None


def overlap_ratios(results: Results, ours: str, peer: str, device: str) -> list[float]:
    """Step time of ours over the peer's in the cells of equal units on the modelled network."""
    cells = results["overlap"].result["cells"] if "overlap" in results else []
    pairs = [
        [report.value_under(cell, ("contestants", name, "over_bound", "median")) for name in (ours, peer)]
        for cell in cells
        if (cell["model"], cell["device"]) == ("even", device)
    ]
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def overlapped(summary: Callable[[Sequence[float]], float], ours: str, peer: str) -> Find:
    def find(results: Results) -> float | None:
        found = overlap_ratios(results, ours, peer, "streams")
        return summary(found) if found else None

    return find


def over_bound(summary: Callable[[Sequence[float]], float]) -> Find:
    """The steps of fullshard over the bound, with streams."""

    def find(results: Results) -> float | None:
        cells = results["overlap"].result["cells"] if "overlap" in results else []
        keys = ("contestants", "fullshard", "over_bound", "median")
        found = [report.value_under(c, keys) for c in cells if (c["model"], c["device"]) == ("even", "streams")]
        return summary(found) if found and None not in found else None

    return find


def _steps() -> Iterator[Figure]:
    page, both = "benchmarks.md#a-training-step-on-cpu-ranks", "the faster of FSDP1 and FSDP2, with our malloc setting"
    for width, limit in ((512, 0.80), (1024, 0.70)):
        name, head = f"step_{width}", f"step, width {width}, 2 CPU ranks"
        yield Figure(head, "FSDP2", of_step(name, "fullshard", "time_ratio_to_fsdp2"), None, page, True)
        yield Figure(head, both, of_step(name, "fullshard", "time_ratio_to_better_peer_with_our_malloc"), limit, page)
        alone = of_step(name, "fullshard-malloc", "time_ratio_to_fsdp2")
        yield Figure(f"{head}, glibc's default malloc", "FSDP2", alone, None, page)
        yield Figure(f"counted peak, {head}", "FSDP2", of_step(name, "fullshard", "counted_ratio_to_fsdp2"), 1.02, page)
        resident = of_step(name, "fullshard", "peak_over_baseline_ratio_to_fsdp2")
        yield Figure(f"resident peak, {head}", "FSDP2", resident, None, page)


def _modes() -> Iterator[Figure]:
    page = "benchmarks.md#the-modes-of-fully_shard"
    titles = {"bf16": "bf16", "hsdp": "HSDP 2 x 2", "accumulation": "accumulation", "offload": "CPU offload policy"}
    for width, limit in ((512, 0.80), (1024, 0.70)):
        for mode, title in titles.items():
            peer = "the faster of FSDP1 and FSDP2" if mode == "accumulation" else "FSDP2"
            find = of_step(f"modes_{mode}_{width}", "fullshard", "time_ratio_to_better_peer")
            yield Figure(f"{title}, step, width {width}", peer, find, limit, page, mode == "bf16" and width == 512)
            memory = of_step(f"modes_{mode}_{width}", "fullshard", "counted_ratio_to_fsdp2")
            yield Figure(f"{title}, counted peak, width {width}", "FSDP2", memory, 1.02, page)


def _wrapper() -> Iterator[Figure]:
    page = "benchmarks.md#the-wrapper"
    for width, limit in ((512, 0.85), (1024, 0.65)):
        for name, flag in (("fullshard-wrapper-flat", "flat"), ("fullshard-wrapper", "original parameters")):
            what = f"wrapper, {flag}, step, width {width}"
            find = of_step(f"wrapper_step_{width}", name, "time_ratio")
            yield Figure(what, "FSDP1", find, limit, page, (width, flag) == (512, "flat"))
            yield Figure(
                f"wrapper, {flag}, counted peak, width {width}",
                "FSDP1",
                of_step(f"wrapper_step_{width}", name, "counted_ratio"),
                1.02,
                page,
            )


def _host() -> Iterator[Figure]:
    page, ratio = "benchmarks.md#host-time-per-unit", "host_cost_ratio_to_fsdp2"
    tiny, nine = "tiny units", "units of nine parameters, a message each"
    forward, step = "host time, forward and backward", "host time, with the optimizer step"
    of = ("contestants", "fullshard")
    yield Figure(f"{forward}, {tiny}", "FSDP2", at("host_cost", *of, "forward_backward", ratio), 0.25, page, True)
    yield Figure(f"{step}, {tiny}", "FSDP2", at("host_cost", *of, "step", ratio), 0.30, page, True)
    direct = at("host_cost", "direct", *of, "forward_backward", ratio)
    yield Figure(f"{forward}, {nine}", "FSDP2", direct, 0.35, page)
    for name, flag in (("fullshard-wrapper-flat", "flat"), ("fullshard-wrapper", "original parameters")):
        keys = ("contestants", name, "forward_backward", "host_cost_ratio_to_fsdp1")
        yield Figure(f"{forward}, wrapper, {flag}", "FSDP1", at("host_cost", *keys), 0.50, page)


def _start() -> Iterator[Figure]:
    page, of = "benchmarks.md#the-wrapper", "contestants"
    for name, peer, end, limits in (
        ("fullshard", "FSDP2", "fsdp2", (0.50, 0.60)),
        ("fullshard-wrapper-flat", "FSDP1", "fsdp1", (0.50, 0.60)),
        ("fullshard-wrapper", "FSDP1", "fsdp1", (0.50, 0.60)),
    ):
        flag = "flat" if name.endswith("flat") else "original parameters"
        what = "`fully_shard` on 100 modules" if name == "fullshard" else f"wrapper, {flag}, on 1,000 modules"
        for figure, title, limit in zip(("constructor", "both"), ("", " and the first step"), limits, strict=True):
            find = at("wrap_time", of, name, figure, f"ratio_to_{end}")
            yield Figure(f"{what}{title}", peer, find, limit, page, name == "fullshard" and not title)


def _optimizer() -> Iterator[Figure]:
    page, name = "benchmarks.md#the-optimizer-step", "optimizer_cost"
    for how in ("foreach", "fused"):
        ours = ("contestants", f"fullshard {how}")
        yield Figure(f"AdamW step, {how}", "plain tensors", at(name, *ours, "ratio_to_plain"), 1.1, page)
        yield Figure(f"AdamW step, {how}", "FSDP2", at(name, *ours, "ratio_to_fsdp2"), None, page, how == "foreach")
    for which, what in (("fullshard", "torch's `clip_grad_norm_`"), ("own", "`fullshard.clip_grad_norm_`")):
        ours = ("contestants", f"{which} clip")
        yield Figure(what, "plain tensors", at(name, *ours, "ratio_to_plain"), 1.2, page)
    yield Figure(
        "Muon", "gathering every matrix", at("muon", "contestants", "fullshard", "ratio_to_gather"), None, page
    )


def _checkpoints() -> Iterator[Figure]:
    page, name = "benchmarks.md#checkpoints", "checkpoint_1024"
    for operation, what, key, peer, limit in (
        ("save", "save with AdamW's state", "done", "FSDP2 with DCP", 1.0),
        ("async_save", "`async_save`, until it returns", "returned", "`dcp.async_save`", 0.25),
        ("load", "load with AdamW's state", "returned", "FSDP2 with DCP", 1.0),
        ("export", "export to one safetensors file", "returned", "FSDP1's full state dict", 0.8),
        ("import", "import from one safetensors file", "returned", "FSDP1", 0.8),
    ):
        find = at(name, "operations", operation, "ways", "fullshard", f"{key}_ratio")
        yield Figure(what, peer, find, limit, page, operation in ("save", "async_save"))


def _bounds() -> Iterator[Figure]:
    memory, overlap = "../how_to/memory.md#measured-peak-memory", "benchmarks.md#overlap-on-a-modelled-network"
    yield Figure("counted peak, worst configuration", "FSDP2", counted(max), 1.02, memory, True)
    yield Figure("counted peak, median of the configurations", "FSDP2", counted(statistics.median), 0.95, memory)
    yield Figure("step with streams, worst of nine networks", "the lower bound", over_bound(max), 1.05, overlap)
    yield Figure(
        "step with streams, worst of nine networks", "FSDP2", overlapped(max, "fullshard", "FSDP2"), 1.0, overlap
    )
    kept = overlapped(max, "fullshard", "FSDP2, last kept")
    yield Figure("step with streams, worst of nine networks", "FSDP2, last unit kept by hand", kept, 1.0, overlap)


def _gpu() -> Iterator[Figure]:
    page, one = "gpu.md#step-time-and-memory", "step on an H200, one of eight ranks, no network"
    for dtype in ("fp32", "bf16"):
        ours = ("parts", f"step, 1 of 8, {dtype}", "contestants", "fullshard")
        yield Figure(f"{one}, {dtype}", "FSDP2", at("gpu", *ours, "time_ratio_to_fsdp2"), None, page, dtype == "bf16")


FIGURES: tuple[Figure, ...] = (
    *_steps(),
    *_modes(),
    *_wrapper(),
    *_host(),
    *_start(),
    *_optimizer(),
    *_checkpoints(),
    *_bounds(),
    *_gpu(),
)


def table(results: Results) -> str:
    """All figures beside their targets: wins, losses and what was not measured alike."""
    rows = []
    for figure in FIGURES:
        value, limit = figure.median(results), figure.limit
        judged = "" if limit is None else f"at most {limit:.2f}"
        if limit is not None and value is not None:
            judged += ": met" if value <= limit else ": **missed**"
        rows.append([f"[{figure.what}]({figure.page})", figure.peer, figure.text(results), judged])
    lines = report.markdown_table(["measured", "peer", "ratio", "target"], rows).splitlines()
    return "\n".join([lines[0], "| --- | --- | ---: | --- |", *lines[2:]])


def shortfalls(results: Results) -> str:
    """Where fullshard is slower or larger than a peer, or misses a target, a line each; how much is not measured."""
    losses = [
        f"- {figure.what}: {figure.text(results)} of {figure.peer}"
        + (f"; the target was {figure.limit:.2f}" if figure.limit is not None and value > figure.limit else "")
        for figure in FIGURES
        for value in [figure.median(results)]
        if value is not None and (value > 1.005 or (figure.limit is not None and value > figure.limit))
    ]
    missing = sum(figure.median(results) is None for figure in FIGURES)
    text = "\n".join(losses) or "No figure of the table is above 1, and no target is missed."
    return text + (f"\n\nNot measured yet: {missing} of the {len(FIGURES)} figures below." if missing else "")


def sources(results: Results) -> str:
    """Of what commit and machine each result is; those that differ from most say so."""
    common = common_source(results)
    rows = [
        [
            name,
            each.source.machine,
            each.environment.date,
            f"`{each.source.commit}`",
            "; ".join(oddness(each.source, common if each.environment.device is None else None)),
        ]
        for name, each in sorted(results.items())
    ]
    lines = report.markdown_table(["result", "machine", "date", "commit", "remark"], rows).splitlines()
    return "\n".join([lines[0], "| --- | --- | --- | --- | --- |", *lines[2:]])
