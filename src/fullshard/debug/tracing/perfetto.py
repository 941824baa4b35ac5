"""A trace as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: ranks as processes, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fullshard.debug.tracing.timeline import Launched, RankGroup, Segment, short_units

__all__ = ["chrome_trace"]

_THREADS = {0: "training thread", 1: "all-gather", 2: "reduce-scatter", 3: "all-reduce"}
_THREAD_OF = {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 3}


def chrome_trace(
    segments: Mapping[int, Sequence[Segment]],
    launches: Mapping[int, Mapping[tuple[RankGroup, int], Launched]],
    memory: Mapping[int, Sequence[tuple[float, int]]],
) -> dict[str, Any]:
    """Return the events in the Trace Event Format, with times in microseconds since the first one."""
    start = min((own[0].begin for own in segments.values() if own), default=0.0)
    spans, collectives = _spans(segments, launches, start), _collectives(launches, start)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(segments), *spans, *collectives, *_memory(memory, start)],
    }


def _memory(memory: Mapping[int, Sequence[tuple[float, int]]], start: float) -> Iterator[dict[str, Any]]:
    for rank, own in memory.items():
        for moment, nbytes in own:
            time = round((moment - start) * 1e6, 1)
            yield {"ph": "C", "pid": rank, "name": "buffers of fullshard", "ts": time, "args": {"bytes": nbytes}}


def _names(segments: Mapping[int, Sequence[Segment]]) -> Iterator[dict[str, Any]]:
    for rank in segments:
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for thread, name in _THREADS.items():
            yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _spans(
    segments: Mapping[int, Sequence[Segment]],
    launches: Mapping[int, Mapping[tuple[RankGroup, int], Launched]],
    start: float,
) -> Iterator[dict[str, Any]]:
    for rank, own in segments.items():
        for segment in own:
            awaited = launches[rank].get((segment.group, segment.number)) if segment.activity == "wait" else None
            if awaited is not None:
                name = f"wait: {awaited.kind.replace('_', '-')} of {short_units(awaited.units)}"
            elif segment.activity == "compute":
                of_unit = segment.phase in ("forward", "backward")
                name = f"{segment.phase} of {short_units(segment.units)}" if of_unit else segment.phase
            else:
                name = f"{segment.activity}: {short_units(segment.units)}"
            arguments = {
                "step": segment.step,
                "microbatch": segment.microbatch,
                "phase": segment.phase,
                "units": segment.units,
                **({} if awaited is None else {"collective": awaited.kind, "number": segment.number}),
            }
            yield _complete(rank, 0, name, segment.activity, segment.begin - start, segment.seconds, arguments)


def _collectives(
    launches: Mapping[int, Mapping[tuple[RankGroup, int], Launched]], start: float
) -> Iterator[dict[str, Any]]:
    """Yield spans from the issue of each collective to its end, as far as that is known."""
    for rank, own in launches.items():
        for (_, number), launched in own.items():
            if launched.end is not None:
                span = launched.time - start, launched.end - launched.time
                thread, name = _THREAD_OF[launched.kind], launched.units or "the root"
                yield _complete(rank, thread, name, launched.kind, *span, {"number": number})


def _complete(
    rank: int, thread: int, name: str, category: str, begin: float, seconds: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(begin * 1e6, 1), "dur": round(seconds * 1e6, 1)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name.strip(), "cat": category, **times, "args": arguments}
