"""A small run of the benchmark of hosts, and its lower bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.contestants import CONTESTANTS, DDP, FSDP2, FULLSHARD, HSDP
from bench.hosts.driver import INT8, KEPT, OWN, Options, bound, needed_bytes
from bench.hosts.network import why_not
from bench.models import GPTShape
from small_runs import run_small

REASON = why_not()


@pytest.mark.skipif(bool(REASON), reason=f"no hosts on this machine: {REASON}")
def test_a_small_run(tmp_path: Path) -> None:
    """The benchmark runs, losses agree, and nobody is faster than the lower bound."""
    options = "--megabits 500 --width 64 --blocks 2 --tokens 64 --rounds 1 --only unsharded --only fullshard"
    page, result = run_small(tmp_path, "hosts", options, "--only", "fsdp2+our-malloc")
    assert "500 Mbit/s, fullshard |" in page
    (cell,) = result["cells"]
    assert cell["losses_that_disagree"] == {} and cell["not_run"] == {}
    assert cell["contestants"]["fullshard"]["median_step_seconds"] > 0


def test_bounds() -> None:
    """Half of the parameters, of blocks that are resharded twice, and of the gradients of two hosts."""
    options, fsdp2 = Options(), CONTESTANTS[FSDP2]
    parameters, block = GPTShape(512, 6, 512).parameters, (12 * 512 + 13) * 512
    assert needed_bytes(options, fsdp2) == (2 * parameters + 6 * block) * 2
    assert needed_bytes(options, CONTESTANTS[FULLSHARD]) == (2 * parameters + 4 * block) * 2
    for gathered_once in (OWN[KEPT], CONTESTANTS[DDP]):
        assert needed_bytes(options, gathered_once) == parameters * 4
    assert needed_bytes(options, OWN[INT8]) == (2 * parameters + 4 * block) * (1 + 4 / 128) / 2
    assert needed_bytes(Options(mode=HSDP), fsdp2) == parameters * 4
    assert needed_bytes(Options(microbatches=2), fsdp2) == (3 * parameters + 12 * block) * 2
    assert bound(options, fsdp2, 500, 1.0) == pytest.approx((2 * parameters + 6 * block) * 2 / 62.5e6)
    assert bound(options, fsdp2, 0, 1.0) == 1.0
