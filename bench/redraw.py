"""The tables and claims of all stored results, written again from their JSON without a measurement.

A page's figures are those of the JSON behind it, because all of them are written by this: tables that several results
share out of their figures, the others as their benchmark put them beside its figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from bench import claims, figures, report
from bench.command_line import DOCUMENT, Options
from bench.environment import REPOSITORY
from bench.gpu import driver as gpu
from bench.hosts import driver as hosts
from bench.results import Results, common_source, newest, oddness
from bench.training import modes, page, step, wrapper

README = REPOSITORY / "README.md"
PERFORMANCE = REPOSITORY / "docs" / "performance" / "index.md"
# Whose tables have all measurements of a width.
TRAINING = (step.STEP, modes.BENCHMARK, wrapper.BENCHMARK)
# What is made of all results: page and marker -> text.
OF_ALL = {
    (README, "hosts"): hosts.summary(README),
    (PERFORMANCE, "hosts"): hosts.summary(PERFORMANCE),
    (README, "claims"): claims.claims,
    (PERFORMANCE, "claims"): claims.claims,
    (PERFORMANCE, "shortfalls"): figures.shortfalls,
    (PERFORMANCE, "figures"): figures.table,
    (DOCUMENT, "sources"): figures.sources,
}


def blocks(results: Results) -> Iterator[tuple[Path, str, str]]:
    """What stands on which page between which markers, by the results."""
    common = common_source(results)
    for benchmark in TRAINING:
        for width in page.widths(benchmark, results):
            yield DOCUMENT, f"{benchmark.name}:{width}", page.block(benchmark, results, width)
    for marker, text in gpu.blocks(results["gpu"].result) if "gpu" in results else ():
        yield gpu.PAGE, marker, text
    for each in results.values():
        if document := each.result.get("page", {}).get("document"):
            path = REPOSITORY / document
            yield path, each.result["page"]["marker"], report.block(each, path, oddness(each.source, common))
    for (path, marker), write in OF_ALL.items():
        yield path, marker, write(results)


def run(options: Options) -> None:
    """Write the pages and the picture of the figures; results with wrong values, and withdrawn ones, are left alone."""
    if not options.write_document:
        print("nothing to do without --write-document")
        return
    for document, marker, text in blocks(newest(options.results)):
        report.put(document, marker, text)
    sys.path.insert(0, str(REPOSITORY / "docs"))
    from pictures import draw

    draw.record("summary")
    draw.draw("summary", draw.stored("summary"))
    print("wrote the pages", flush=True)
