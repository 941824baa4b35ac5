"""The first thing that is said about speed: steps of two hosts over the rate of their link, and the plot of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.contestants import DDP, FSDP1, FSDP2, FULLSHARD, TWO_KEPT, UNSHARDED, WITH_OURS
from bench.hosts.driver import INT8, KEPT, OURS_KEPT, rate
from bench.stored import Results

SHOWN = {
    UNSHARDED: "unsharded, no communication",
    f"{DDP}{WITH_OURS}": "DDP",
    f"{FSDP1}{WITH_OURS}": "FSDP1",
    f"{FSDP2}{WITH_OURS}": "FSDP2",
    TWO_KEPT: "FSDP2, last two units not resharded after forward",
    KEPT: "FSDP2, `reshard_after_forward=False`",
    FULLSHARD: "fullshard",
    OURS_KEPT: "fullshard, `reshard_after_forward=False`",
    INT8: "fullshard, int8",
}
NAME = "hosts_2x1"


def of(document: Path) -> Callable[[Results], str]:
    """What stands on a page: seconds of a step by rate, with the plot."""

    def write(results: Results) -> str:
        if NAME not in results:
            return "not measured"
        stored = results[NAME]
        rows, kept = [], []
        for cell in stored.result["cells"]:
            found = cell["contestants"]
            ours = found[FULLSHARD]
            seconds = [report.cell(found.get(name, {}).get("median_step_seconds")) for name in SHOWN]
            ratio = report.cell(ours.get("time_ratio_to_better_peer"))
            rows.append([rate(cell), *seconds, report.cell(ours["bound"]), ratio])
            if KEPT in found:
                kept.append(f"{ours['median_step_seconds'] / found[KEPT]['median_step_seconds']:.2f}")
        header = ["link bandwidth", *SHOWN.values(), "lower bound of fullshard", "fullshard / faster of FSDP1, FSDP2"]
        told = (
            f"Of the time of FSDP2 with `reshard_after_forward=False`, fullshard as it comes takes {', '.join(kept)}."
        )
        image = report.image_link(stored.path.with_suffix(".png"), document, stored.result["page"]["title"])
        return "\n\n".join([report.markdown_table(header, rows), told, image, report.provenance(stored.environment)])

    return write
