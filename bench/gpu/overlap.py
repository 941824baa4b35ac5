"""How much communication hides behind computation, by the profiler's trace of a step.

On one GPU NCCL has nothing to send, so the network is the modelled one (docs/design/modelled_network.md) of 8 ranks:
a message is a kernel that spins, on a stream of its own, for as long as the link would take. Its bandwidth is chosen so
that the messages of a step take 0.8 of the plain model's step; then a schedule that overlaps perfectly hides all but
the first gather and the last reduction.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from bench import report
from bench.gpu.device import CUDA, forget_freed, use
from bench.gpu.models import PLAIN, SHAPES, SHARDED, Trainer
from bench.gpu.parts import Settings
from bench.report import column
from bench.simulators.spinning import StreamDevice
from bench.statistics import spread
from bench.turns import each_that_runs
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks

RANKS, LINK_SHARE, STEPS = 8, 0.8, 10
MESSAGE = "spin_kernel"  # of torch.cuda._sleep

Interval = tuple[float, float]


def measure(settings: Settings) -> dict[str, Any]:
    """Step times and what the traces say, by system."""
    device = use(settings.device)
    torch.set_float32_matmul_precision("high")
    shape = SHAPES["tiny" if settings.small else "medium"]
    plain = Trainer(PLAIN, shape, device)
    numel = sum(parameter.numel() for parameter in plain.model.parameters())
    plain_seconds = _step_seconds(plain)
    del plain
    received = 3 * 4 * numel * (RANKS - 1) / RANKS  # gathered, gathered again, reduced
    # Nothing is written on arrival: with NCCL that is part of the message, here it would be kernels beside it.
    network = Network(bandwidth=received / (LINK_SHARE * plain_seconds), latency=5e-6, fills=False)

    def one(system: str) -> dict[str, Any]:
        with modelled_ranks(RANKS, network, device=StreamDevice(device)):
            trainer = Trainer(system, shape, device)
            found = {"step_seconds": _step_seconds(trainer)}
            if device.type == CUDA:
                found |= hidden(_traced(trainer))
            del trainer
        forget_freed()
        return found

    systems, failures = each_that_runs(SHARDED, one)
    return {"plain_seconds": plain_seconds, "link_share": LINK_SHARE, "systems": systems, "not_run": failures}


def _step_seconds(trainer: Trainer) -> float:
    trainer.steps(3)
    seconds = []
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        trainer.step()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begun)
    return spread(seconds).median


def _traced(trainer: Trainer) -> list[dict[str, Any]]:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trainer.step()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def hidden(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of a trace: seconds of messages, and the share of them during which a kernel of the computation ran.

    Messages are the kernels that spin. Computation is what runs on the stream that is busiest without them; copies
    into and out of messages on other streams are neither.
    """
    streams: dict[Any, list[Interval]] = defaultdict(list)
    messages: list[Interval] = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("ph") == "X":
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            (messages if MESSAGE in event["name"] else streams[event["args"]["stream"]]).append(span)
    computation = max(streams.values(), key=lambda spans: sum(end - begin for begin, end in spans), default=[])
    sent, computed, both = durations(messages, computation)
    return {
        "message_seconds": sent / 1e6,
        "computation_seconds": computed / 1e6,
        "hidden_share": both / sent if sent else 0.0,
    }


def durations(first: Sequence[Interval], second: Sequence[Interval]) -> tuple[float, float, float]:
    """How long something of the first lasts, something of the second, and both at a time."""
    changes = sorted(
        (moment, which, change)
        for which, spans in enumerate((first, second))
        for span in spans
        for moment, change in zip(span, (1, -1), strict=True)
    )
    open_spans, totals, before = [0, 0], [0.0, 0.0, 0.0], 0.0
    for moment, which, change in changes:
        running = [count > 0 for count in open_spans]
        for index, counts in enumerate((*running, all(running))):
            totals[index] += counts * (moment - before)
        open_spans[which] += change
        before = moment
    return totals[0], totals[1], totals[2]


def table(result: Mapping[str, Any]) -> str:
    plain = result["plain_seconds"]
    entries = {"plain, no network": {"step_seconds": plain}, **result["systems"]}
    columns = (
        column("step, ms", "step_seconds", scale=1e3),
        column("/ plain step", "step_seconds", scale=1 / plain),
        column("messages, ms", "message_seconds", scale=1e3),
        column("hidden behind computation", "hidden_share", spec=".1%"),
    )
    return report.table("system", entries, columns, result["not_run"])
