"""Host time per unit and step beside FSDP2, as ``bench.host_cost`` measures it, with the kernels on the device.

A hundred tiny units on a fake group of 8. Every step begins with an idle device and its time ends when the host has
enqueued the last kernel: kernels this small never hold the host up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import host_cost
from bench.gpu.device import group_of, use
from bench.gpu.models import PLAIN, SHARDED
from bench.gpu.parts import Settings

RANKS = 8


def measure(settings: Settings) -> dict[str, Any]:
    """Times, costs and ratios as ``bench.host_cost`` has them."""
    device = use(settings.device)
    usual = host_cost.Options(ranks=RANKS, rounds=15, steps_per_round=4)
    run = host_cost.Options(units=3, ranks=RANKS, rounds=1, steps_per_round=1) if settings.small else usual
    with group_of(RANKS, device):
        summary, failures = host_cost.measured((PLAIN, *SHARDED), run, str(device))
    return {"units": run.units, "contestants": summary, "not_run": failures}


def table(result: Mapping[str, Any]) -> str:
    return f"{result['units']} units.\n\n{host_cost.table(result['contestants'], result['not_run'])}"
