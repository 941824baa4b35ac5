"""The first thing that is said about speed: steps of two hosts over the rate of their link, and the plot of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.contestants import FSDP1, FSDP2, FULLSHARD, TWO_KEPT, UNSHARDED, WITH_OURS
from bench.hosts.driver import INT8
from bench.stored import Results

SHOWN = {
    UNSHARDED: "unsharded, no exchange",
    f"{FSDP1}{WITH_OURS}": "FSDP1",
    f"{FSDP2}{WITH_OURS}": "FSDP2",
    TWO_KEPT: "FSDP2, its last two units kept by hand",
    FULLSHARD: "fullshard",
    INT8: "fullshard, int8",
}
NAME = "hosts_2x1"


def of(document: Path) -> Callable[[Results], str]:
    """What stands on a page: seconds of a step by rate, with the plot."""

    def write(results: Results) -> str:
        if NAME not in results:
            return "not measured"
        stored = results[NAME]
        rows = []
        for cell in stored.result["cells"]:
            found = cell["contestants"]
            seconds = [report.cell(found.get(name, {}).get("median_step_seconds")) for name in SHOWN]
            ours = found[FULLSHARD]
            ratio = report.cell(ours.get("time_ratio_to_better_peer"))
            rate = f"{cell['megabits']} Mbit/s" if cell["megabits"] else "not shaped"
            rows.append([rate, *seconds[:-1], report.cell(ours["bound"]), ratio, seconds[-1]])
        header = ["link, each way", *SHOWN.values()]
        header[-1:] = ["its lower bound", "/ better of FSDP1, FSDP2", SHOWN[INT8]]
        image = report.image_link(stored.path.with_suffix(".png"), document, stored.result["page"]["title"])
        return "\n\n".join([report.markdown_table(header, rows), image, report.provenance(stored.environment)])

    return write
