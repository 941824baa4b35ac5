"""Hosts that are namespaces, with a link of a given rate: exchanges use both directions, outages are survived."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.hosts.network import INTERFACE, hosts_on_this_machine, why_not

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
