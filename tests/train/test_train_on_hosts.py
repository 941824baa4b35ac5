"""`fullshard train`, and calibration, under torchrun on two hosts with a slow link between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench.hosts.network import INTERFACE, hosts_on_this_machine, why_not
from train_processes import LIMIT, SIZE, last_step, run_on, start, wait_for, write_text

from fullshard.planning.cluster import cluster_of
from fullshard.train.log import read_metrics
from patience import patient
from ranks import RankPool

REASON = why_not()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=f"no hosts on this machine: {REASON}")


@needs_hosts
def test_a_host_that_dies_and_comes_back(ranks: RankPool, tmp_path: Path) -> None:
    """One loses its power, and is started again: the run resumes, with the losses and weights of an undisturbed one."""
    (tmp_path / "text").mkdir()
    line = [write_text(tmp_path / "text"), *SIZE, "--steps", 60, "--checkpoint-every", 5, "--eval-every", 30]
    line += ["--eval-bytes", 2000, "--out", tmp_path / "out", "--name"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "run"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, *rendezvous, "--max-restarts", 3]
    folder, logs = tmp_path / "out" / "hosts", [tmp_path / f"host{host}.txt" for host in range(2)]
    with hosts_on_this_machine(2) as network:
        network.set_rate(500)

        def start_on(host: int) -> subprocess.Popen[str]:
            words = [*network.inside(host), sys.executable, *torchrun, "-m", "fullshard", "train", *line, "hosts"]
            settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
            return start(*words, output=logs[host], FULLSHARD_WATCHDOG_LOST_S="10", **settings)

        agents = [start_on(0), start_on(1)]
        try:
            wait_for(lambda: last_step(folder / "metrics.jsonl") > 7 or agents[0].poll() is not None)
            network.set_link(1, up=False)
            network.kill(1)
            agents[1].wait()
            network.set_link(1, up=True)
            agents[1] = start_on(1)
            codes = [agent.wait(patient(LIMIT)) for agent in agents]
        finally:
            for host in range(2):
                network.kill(host)
    printed = "\n".join(log.read_text() for log in logs)
    assert codes == [0, 0] and "resumed from step" in printed, printed
    assert run_on(ranks, 2, *line, "whole").returncode == 0
    results = [tmp_path / "out" / name for name in ("whole", "hosts")]
    losses = [[(each["step"], each["loss"]) for each in read_metrics(path / "metrics.jsonl")] for path in results]
    assert losses[0] == losses[1]
    weights = [(path / "model.safetensors").read_bytes() for path in results]
    assert weights[0] == weights[1]


@needs_hosts
def test_links_between_nodes_are_measured(tmp_path: Path) -> None:
    """`fullshard plan --calibrate` under torchrun: one rank writes nodes of two ranks, and what is between them."""
    path, rendezvous = tmp_path / "nodes.toml", ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, *rendezvous, "--rdzv-id", "run"]
    program = tmp_path / "calibrate.py"
    program.write_text(
        "import sys\n"
        "from functools import partial\n"
        "from fullshard.__main__ import main\n"
        "from fullshard.planning import calibration\n"
        "from fullshard import planned\n"
        "planned.calibrate = partial(calibration.calibrate, seconds=0.02)\n"
        "main()\n"
    )
    with hosts_on_this_machine(2) as network:
        network.set_rate(200)
        words = [sys.executable, *torchrun, program, "plan", "--calibrate", path]
        logs = [tmp_path / f"host{host}.txt" for host in range(2)]
        nodes = [
            start(*network.inside(host), *words, output=logs[host], GLOO_SOCKET_IFNAME=INTERFACE) for host in range(2)
        ]
        assert [node.wait(patient(LIMIT)) for node in nodes] == [0, 0], [log.read_text() for log in logs]
    found = cluster_of(path)
    assert (found.node, found.calibrated, list(found.outer)) == (2, 4, [2])
    assert found.outer[2].bandwidth < 1.1 * 200e6 / 8 and found.inner.bandwidth > 2 * found.outer[2].bandwidth
    # Of 4/4 a rank receives 3/4, of which 2/4 cross the link of its host: once for both of its ranks. Two replicas
    # of two shards each receive 1/2, and both groups want the link at once.
    whole, replicas = found.link(4).bandwidth, found.link(2, stride=2).bandwidth
    assert (whole, replicas) == pytest.approx((1.5 * found.outer[2].bandwidth, 0.5 * found.outer[2].bandwidth))
    assert "written to" in logs[0].read_text() + logs[1].read_text()
