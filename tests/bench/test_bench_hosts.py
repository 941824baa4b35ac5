"""Hosts that are namespaces: links are as fast as they say in both directions, and a small run of the benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.contestants import CONTESTANTS, DDP, FSDP2, FULLSHARD, HSDP
from bench.hosts.driver import INT8, KEPT, OWN, Options, bound, needed_bytes
from bench.hosts.network import INTERFACE, hosts_on_this_machine, why_not
from bench.models import GPTShape
from small_runs import run_small

from network_proof import PLACES, Trouble, run
from patience import patient

REASON = why_not()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=f"no hosts on this machine: {REASON}")

EXCHANGE = """
import sys, time, torch, torch.distributed as dist
from fullshard.comm import CommRequest, GlooTransport, Operand
from fullshard.memory import wait_for_all
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
transport, seconds = GlooTransport(dist.group.WORLD), ([], [])
for turn in range(10):
    both = Operand(torch.zeros(2_500_000), torch.zeros(5_000_000))
    dist.barrier()
    begun = time.monotonic()
    wait_for_all(transport.all_gather([CommRequest("a", [both])]))
    seconds[0].append(time.monotonic() - begun)
    one = torch.zeros(2_500_000)
    dist.barrier()
    begun = time.monotonic()
    dist.recv(one, 0) if rank else dist.send(one, 1)
    dist.barrier()
    seconds[1].append(time.monotonic() - begun)
print(*(sorted(each)[3] for each in seconds))
"""


def on_hosts(hosts: int, megabits: int, program: str, folder: Path) -> list[str]:
    """What a program prints on each host, which gets its number and the path of a store."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    with hosts_on_this_machine(hosts) as network:
        network.set_rate(megabits)
        ranks = [
            subprocess.Popen(
                [*network.inside(host), sys.executable, "-c", program, str(host), str(folder / "store")],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(hosts)
        ]
        try:
            told = [rank.communicate(timeout=patient(120))[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * hosts, told
    return told


@needs_hosts
def test_both_directions_at_once(tmp_path: Path) -> None:
    """An exchange takes the time of its bytes in one direction, not in both: receives are posted before sends.

    With sends first it took twice as long in every second exchange.
    """
    for told in on_hosts(2, 200, EXCHANGE, tmp_path):
        both, one_way = map(float, told.split())
        assert both < 1.5 * one_way, (both, one_way)


@needs_hosts
def test_a_link_that_is_down_for_a_while() -> None:
    """In forward, backward, optimizer and save: all go on when it is back, with the losses of a run without trouble."""
    name = f"fs-outage-{os.getpid()}"
    expected, _ = run([Trouble(place, 0) for place in PLACES], name)
    assert run([Trouble(place, 2) for place in PLACES], name)[0] == expected


@needs_hosts
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
