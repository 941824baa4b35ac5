"""The figures by which the project is judged, with their targets: one list, from which pages and claims are made.

A figure is a ratio to a peer that stands in a stored result; below 1, fullshard is faster or smaller. Nothing on the
pages is typed: a figure that no result has is "not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench import host_cost, report
from bench.checkpoint import report as checkpoint
from bench.results import Results, common_source, oddness

UNMEASURED = "not measured"
# A peer is judged with what fullshard sets by itself.
OURS, OUR_MALLOC = "fullshard", "with our malloc"
# Contestants of the wrapper, and what they say in its tables.
FLAGS = {"fullshard-wrapper-flat": "flat", "fullshard-wrapper": "original parameters"}
Find = Callable[[Results], Any]


@dataclass(frozen=True)
class Figure:
    """One ratio."""

    what: str  # is measured
    peer: str  # is what it is compared with
    find: Find  # its value, or its value and spread, in the results; None: not measured
    limit: float | None = None  # what it may be at most; None: no target
    page: str = ""  # where its table is
    headline: bool = False  # whether it is in the picture

    def text(self, results: Results) -> str:
        """The value as it is written everywhere."""
        found, value, limit = self.find(results), self.median(results), self.limit
        if found is None or value is None:
            return UNMEASURED
        # A third digit where two would show a value above its limit as equal to it.
        hides = limit is not None and value > limit and f"{value:.2f}" == f"{limit:.2f}"
        return report.cell(found, ".3f" if hides else ".2f")

    def median(self, results: Results) -> float | None:
        found = self.find(results)
        return found["median"] if isinstance(found, Mapping) else found


def at(name: str, *keys: str) -> Find:
    """What stands under keys of the result of this name."""
    return lambda results: report.value_under(results[name].result, keys) if name in results else None


def of_step(what: str, contestant: str, key: str) -> Find:
    return at(what, "contestants", contestant, key)


def whole_steps(name: str, *keys: str, figure: str) -> Find:
    """Of the benchmark of host time: fullshard's step over FSDP2's, with what the plain model takes, too."""

    def find(results: Results) -> Any:
        summary = at(name, *keys)(results)
        return None if summary is None else host_cost.whole_step_ratio(summary, OURS, figure)

    return find


def files(operation: str, clock: str, peer: str) -> Find:
    """Of the benchmark of checkpoints: fullshard's time over a peer's, which need not be the fastest."""

    def find(results: Results) -> Any:
        ways = [at("checkpoint_1024", "operations", operation, "ways", way)(results) for way in (OURS, peer)]
        times = [report.value_under(way, ("seconds", clock)) for way in ways]
        return None if None in times else checkpoint.ratio_of(*times).as_json()

    return find


def _training() -> Iterator[Figure]:
    page, both = "benchmarks.md#a-training-step-on-cpu-ranks", f"the faster of FSDP1 and FSDP2, {OUR_MALLOC}"
    for width, limit in ((512, 0.80), (1024, 0.70)):
        name, head = f"step_{width}", f"step, width {width}, 2 CPU ranks"
        yield Figure(head, both, of_step(name, OURS, "time_ratio_to_better_peer_with_our_malloc"), limit, page, True)
        two = f"FSDP2, last two units kept, {OUR_MALLOC}"
        yield Figure(head, two, of_step(name, OURS, "time_ratio_to_two_kept"), limit, page, True)
        yield Figure(head, "FSDP2", of_step(name, OURS, "time_ratio_to_fsdp2"), None, page)
        alone = of_step(name, "fullshard-malloc", "time_ratio_to_better_peer")
        yield Figure(f"{head}, glibc's default malloc", "the faster of FSDP1 and FSDP2", alone, None, page)
        yield Figure(f"counted peak, {head}", "FSDP2", of_step(name, OURS, "counted_ratio_to_fsdp2"), 1.02, page)
        resident = of_step(name, OURS, "peak_over_baseline_ratio_to_fsdp2_with_our_malloc")
        yield Figure(f"resident peak, {head}", f"FSDP2, {OUR_MALLOC}", resident, None, page)
    page = "benchmarks.md#the-modes-of-fully_shard"
    titles = {"bf16": "bf16", "hsdp": "HSDP 2 x 2", "accumulation": "accumulation", "offload": "CPU offload policy"}
    for width, limit in ((512, 0.80), (1024, 0.70)):
        for mode, title in titles.items():
            name, peer = f"modes_{mode}_{width}", both if mode == "accumulation" else f"FSDP2, {OUR_MALLOC}"
            find = of_step(name, OURS, "time_ratio_to_better_peer_with_our_malloc")
            yield Figure(f"{title}, step, width {width}", peer, find, limit, page, width == 512)
            memory = of_step(name, OURS, "counted_ratio_to_fsdp2")
            yield Figure(f"{title}, counted peak, width {width}", "FSDP2", memory, 1.02, page)
    page = "benchmarks.md#the-wrapper"
    for width, limit in ((512, 0.85), (1024, 0.65)):
        for name, flag in FLAGS.items():
            what, result = f"wrapper, {flag}, step, width {width}", f"wrapper_step_{width}"
            find = of_step(result, name, "time_ratio_with_our_malloc")
            yield Figure(what, f"FSDP1, {OUR_MALLOC}", find, limit, page, flag == "flat")
            memory = of_step(result, name, "counted_ratio")
            yield Figure(f"wrapper, {flag}, counted peak, width {width}", "FSDP1", memory, 1.02, page)


def _host() -> Iterator[Figure]:
    page, ratio, of = "benchmarks.md#host-time-per-unit", "host_cost_ratio_to_fsdp2", ("contestants", OURS)
    tiny, nine = "tiny units", "units of nine parameters, a message each"
    beyond, forward = "host time beyond the plain model's", "forward and backward"
    for what, key, limit in ((forward, "forward_backward", 0.25), ("with the optimizer step", "step", 0.30)):
        yield Figure(f"{beyond}, {what}, {tiny}", "FSDP2", at("host_cost", *of, key, ratio), limit, page, True)
        whole = whole_steps("host_cost", "contestants", figure=key)
        yield Figure(f"host time of the whole step, {what}, {tiny}", "FSDP2", whole, None, page, True)
    direct = at("host_cost", "direct", *of, "forward_backward", ratio)
    yield Figure(f"{beyond}, {forward}, {nine}", "FSDP2", direct, 0.35, page)
    for name, flag in FLAGS.items():
        find = at("host_cost", "contestants", name, "forward_backward", "host_cost_ratio_to_fsdp1")
        yield Figure(f"{beyond}, {forward}, wrapper, {flag}", "FSDP1", find, 0.50, page)
    page = "benchmarks.md#the-wrapper"
    for name in (OURS, *FLAGS):
        peer = "FSDP2" if name == OURS else "FSDP1"
        what = "`fully_shard` on 100 modules" if name == OURS else f"wrapper, {FLAGS[name]}, on 1,000 modules"
        for figure, title, limit in (("constructor", "", 0.50), ("both", " and the first step", 0.60)):
            find = at("wrap_time", "contestants", name, figure, f"ratio_to_{peer.lower()}")
            yield Figure(f"{what}{title}", peer, find, limit, page, name != "fullshard-wrapper")


def _optimizer() -> Iterator[Figure]:
    page, name = "benchmarks.md#the-optimizer-step", "optimizer_cost"
    for how in ("foreach", "fused"):
        ours, step = ("contestants", f"fullshard {how}"), f"AdamW step of 800 small parameters, {how}"
        yield Figure(step, "plain tensors", at(name, *ours, "ratio_to_plain"), 1.1, page)
        yield Figure(step, "FSDP2", at(name, *ours, "ratio_to_fsdp2"), None, page, how == "foreach")
    for how in ("foreach", "fused", "loop"):
        find, what = at(name, "contestants", f"dtensors {how}", "ratio_to_fsdp2"), "as of an unknown optimizer"
        yield Figure(f"AdamW step on DTensors, {what}, {how}", "FSDP2", find, 1.0, page, how == "foreach")
    for which, what in (("fullshard", "torch's `clip_grad_norm_`"), ("own", "`fullshard.clip_grad_norm_`")):
        ours = ("contestants", f"{which} clip")
        yield Figure(what, "plain tensors", at(name, *ours, "ratio_to_plain"), 1.2, page)
        yield Figure(what, "FSDP2", at(name, *ours, "ratio_to_fsdp2"), 1.0, page, which == "fullshard")


def _checkpoints() -> Iterator[Figure]:
    page, dcp = "benchmarks.md#checkpoints", "FSDP2 with DCP"
    asynchronous = "`async_save`, until it returns"
    for operation, what, clock, way, peer, limit in (
        ("save", "save with AdamW's state", "done", "fsdp2", dcp, 1.0),
        ("async_save_kept", f"{asynchronous}, both with kept memory", "returned", "fsdp2", dcp, 0.25),
        ("async_save", f"{asynchronous}, as each comes", "returned", "fsdp2", dcp, None),
        ("load", "load with AdamW's state", "returned", "fsdp2", dcp, 1.0),
        ("export", "export to one safetensors file", "returned", "fsdp2", "FSDP2's full state dict", 0.8),
        ("export", "export to one safetensors file", "returned", "fsdp1", "FSDP1's full state dict", 0.8),
        ("import", "import from one safetensors file", "returned", "fsdp2", "FSDP2", 0.8),
        ("import", "import from one safetensors file", "returned", "fsdp1", "FSDP1", 0.8),
    ):  # not in the picture: ``async_save`` as each comes, which is not of like with like
        shown = operation in ("save", "async_save_kept", "load")
        yield Figure(what, peer, files(operation, clock, way), limit, page, shown)


def _gpu() -> Iterator[Figure]:
    page, one = "gpu.md#step-time-and-memory", "step on an H200, one of eight ranks, no network"
    for dtype in ("fp32", "bf16"):
        ours = ("parts", f"step, 1 of 8, {dtype}", "contestants", "fullshard")
        yield Figure(f"{one}, {dtype}", "FSDP2", at("gpu", *ours, "time_ratio_to_fsdp2"), None, page, True)


FIGURES: tuple[Figure, ...] = (*_training(), *_host(), *_optimizer(), *_checkpoints(), *_gpu())


def table(results: Results) -> str:
    """All figures beside their targets: wins, losses and what was not measured alike."""
    rows = []
    for figure in FIGURES:
        value, limit = figure.median(results), figure.limit
        judged = "" if limit is None else f"at most {limit:.2f}"
        if limit is not None and value is not None:
            judged += ": met" if value <= limit else ": **missed**"
        rows.append([f"[{figure.what}]({figure.page})", figure.peer, figure.text(results), judged])
    return report.markdown_table(["measured", "peer", "ratio", "target"], rows, ["---", "---", "---:", "---"])


def shortfalls(results: Results) -> str:
    """Where fullshard is slower or larger than a peer, or misses a target, a line each; how much is not measured."""
    losses, missing = [], 0
    for figure in FIGURES:
        value, limit = figure.median(results), figure.limit
        missed = value is not None and limit is not None and value > limit
        if value is not None and (value > 1.005 or missed):
            target = f"; the target was {limit:.2f}" if missed else ""
            losses.append(f"- {figure.what}: {figure.text(results)} of {figure.peer}{target}")
        missing += value is None
    text = "\n".join(losses) or "No figure of the table is above 1, and no target is missed."
    return text + (f"\n\nNot measured yet: {missing} of the {len(FIGURES)} figures below." if missing else "")


def sources(results: Results) -> str:
    """Of what commit and machine each result is; those that differ from most say so."""
    common, rows = common_source(results), []
    for name, each in sorted(results.items()):
        odd = oddness(each.source, common if each.environment.device is None else None)
        rows.append([name, each.source.machine, each.environment.date, f"`{each.source.commit}`", "; ".join(odd)])
    return report.markdown_table(["result", "machine", "date", "commit", "remark"], rows, ["---"] * 5)
