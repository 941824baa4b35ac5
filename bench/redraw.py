"""The plots, tables and claims of all stored results, written again from their JSON without a measurement.

A page's figures are those of the JSON behind it, because all of them are written by this: tables that several results
share out of their figures, the others as their benchmark put them beside its figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import claims, figures, host_cost, report, wrap_time
from bench.checkpoint import report as checkpoint
from bench.command_line import DOCUMENT
from bench.command_line import Options as SharedOptions
from bench.environment import REPOSITORY
from bench.hosts import driver as hosts
from bench.hosts import summary
from bench.memory_limit import driver as memory_limit
from bench.muon import driver as muon
from bench.overlap import driver as overlap
from bench.pictures import driver as pictures
from bench.scaling import driver as scaling
from bench.stored import Results, StoredResult, common_source, newest, oddness
from bench.training import accelerate_step, modes, page, page_faults, step, wrapper

README = REPOSITORY / "README.md"
PERFORMANCE = REPOSITORY / "docs" / "performance" / "index.md"
# Whose tables have all measurements of a width, and the pages that they are on.
TRAINING = (
    (step.STEP, DOCUMENT),
    (modes.BENCHMARK, DOCUMENT),
    (wrapper.BENCHMARK, DOCUMENT),
    (accelerate_step.BENCHMARK, DOCUMENT),
    (page_faults.BENCHMARK, page_faults.PAGE),
)
# What is made of all results: page and marker -> text.
OF_ALL = {
    (README, "hosts"): summary.of(README),
    (PERFORMANCE, "hosts"): summary.of(PERFORMANCE),
    (README, "claims"): claims.claims,
    (PERFORMANCE, "claims"): claims.claims,
    (PERFORMANCE, "shortfalls"): figures.shortfalls,
    (PERFORMANCE, "figures"): figures.table,
    (DOCUMENT, "sources"): figures.sources,
    (PERFORMANCE.with_name("scaling.md"), "scaling_answer"): claims.scaling,
}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All that are in the folder of results."""


def panels_of(result: Mapping[str, Any]) -> list[Any]:
    """Of a result with a plot of its own; none if there is none."""
    found: Mapping[str, Any] = result.get("contestants", {})
    match result["benchmark"]:
        case "hosts":
            return list(hosts.panels(result["cells"]))
        case "host_cost":
            return list(host_cost.panels(found))[:1]
        case "wrap_time":
            return list(wrap_time.panels(found))[:1]
        case "muon":
            return list(muon.panels(found))
        case "memory_limit":
            return list(memory_limit.panels(result["cells"]))
        case "overlap":
            return list(overlap.panels(result))
        case "scaling":
            return list(scaling.panels(result["costs"]))
        case "checkpoint":
            return list(checkpoint.panels(result))
    return []


def draw(results: Results, folder: Path) -> Iterator[Path]:
    """Draw all plots; their files."""
    for benchmark, _ in TRAINING:
        for width in page.widths(benchmark, results):
            image, _ = page.draw(benchmark, page.latest_results(benchmark, results, width), folder, width)
            yield from [] if image is None else [image]
    for each in results.values():
        if "page" in each.result:
            title = each.result["page"]["title"]
            image = report.plot(each.path.with_suffix(".png"), title, panels_of(each.result))
            yield from [] if image is None else [image]


def blocks(results: Results) -> Iterator[tuple[Path, str, str]]:
    """What stands on which page between which markers, by the results."""
    common = common_source(results)
    for benchmark, document in TRAINING:
        for width in page.widths(benchmark, results):
            some = page.latest_results(benchmark, results, width)
            first = next(each for each in results.values() if each.result is next(iter(some.values())))
            image = first.path.with_name(f"{benchmark.name}_{width}_{first.environment.name}.png")
            told, title = page.paragraphs(benchmark, some, common), f"{benchmark.title} at width {width}"
            shown = image if benchmark.panel else None
            yield document, f"{benchmark.name}:{width}", report.block(told, document, shown, title)
    for each in results.values():
        if each.result.get("page", {}).get("document"):
            yield _own(each, oddness(each.source, common))
    for (document, marker), write in OF_ALL.items():
        yield document, marker, write(results)


def _own(each: StoredResult, odd: list[str]) -> tuple[Path, str, str]:
    """The block of a result that has one to itself."""
    told = each.result["page"]
    document, image = REPOSITORY / told["document"], each.path.with_suffix(".png")
    paragraphs = [*told["paragraphs"], report.provenance(each.environment, odd)]
    shown = image if panels_of(each.result) else None
    return document, told["marker"], report.block(paragraphs, document, shown, told["title"])


def run(options: Options) -> None:
    """Redraw; results with wrong values, and withdrawn ones, are left alone."""
    results = newest(options.results)
    for image in draw(results, options.results):
        print(f"wrote {image.name}", flush=True)
    if options.write_document:
        for document, marker, text in blocks(results):
            report.put(document, marker, text)
        pictures.run(pictures.Options(only=("summary",), record=True))
        print("wrote the pages", flush=True)
