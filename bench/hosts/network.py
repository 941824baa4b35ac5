"""Hosts on one machine: network namespaces, joined by a switch, each with a link of a given rate both ways.

A host is a namespace with one interface, and a name that all hosts know. The other end of the interface is a port of a
bridge, in a namespace of its own. A token bucket at each end limits what the host sends, and what it receives: the link
is full duplex. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"  # of each host
NAMES = Path("/etc/netns")  # where ``ip netns exec`` finds what is to lie in /etc
_BURST = "256kb"  # that a link passes at once; more than the kernel hands to it in one piece
_LATENCY = "50ms"  # of data that may wait in a bucket


@dataclass(frozen=True)
class Network:
    """Hosts with links between them."""

    name: str  # of the namespaces, which exist once on a machine
    hosts: int

    def inside(self, host: int) -> list[str]:
        """The beginning of a command that runs on a host: of ``host0``, ``host1``, and so on."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}"]
        return ["ip", "netns", "exec", f"{self.name}-{host}", *named]

    def set_rate(self, megabits: float | None) -> None:
        """Limit what each host sends, and what it receives, in megabits per second; None: not at all."""
        for host in range(self.hosts):
            for namespace, device in ((f"{self.name}-{host}", INTERFACE), (f"{self.name}-switch", f"port{host}")):
                _quietly("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
                if megabits is not None:
                    rate = ["rate", f"{megabits:g}mbit", "burst", _BURST, "latency", _LATENCY]
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def kill(self, host: int) -> None:
        """End all processes of a host, as a loss of its power does."""
        found = subprocess.run(["ip", "netns", "pids", f"{self.name}-{host}"], check=True, capture_output=True)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def set_link(self, host: int, *, up: bool) -> None:
        """Take the link of a host down, or up again."""
        _run("ip", "-n", f"{self.name}-switch", "link", "set", f"port{host}", "up" if up else "down")


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    missing = [each for each in ("ip", "tc", "unshare", "hostname") if shutil.which(each) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if os.geteuid():
        return "namespaces need root"
    try:
        with hosts_on_this_machine(1) as network:  # a name of this process: several may ask at once
            network.set_rate(100)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no namespaces with a token bucket: {error}"
    return ""


@contextlib.contextmanager
def hosts_on_this_machine(hosts: int, name: str | None = None) -> Iterator[Network]:
    """Make hosts, and remove them after the block; ``name``: of the namespaces, else one of this process."""
    network = Network(name or f"fs-{os.getpid()}", hosts)
    switch = f"{network.name}-switch"
    names = [switch, *(f"{network.name}-{host}" for host in range(hosts))]
    known = "".join(f"10.77.0.{host + 1} host{host}\n" for host in range(hosts))
    for each in names:
        _quietly("ip", "netns", "del", each)
    try:
        for each in names:
            _run("ip", "netns", "add", each)
            _run("ip", "-n", each, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in range(hosts):
            own = f"{network.name}-{host}"
            (NAMES / own).mkdir(parents=True, exist_ok=True)
            (NAMES / own / "hosts").write_text(f"127.0.0.1 localhost\n{known}", encoding="ascii")
            ends = ["type", "veth", "peer", "name", f"port{host}", "netns", switch]
            _run("ip", "-n", own, "link", "add", INTERFACE, *ends)
            _run("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _run("ip", "-n", own, "addr", "add", f"10.77.0.{host + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", own, "link", "set", INTERFACE, "up")
        yield network
    finally:
        for each in names:
            _quietly("ip", "netns", "del", each)
            shutil.rmtree(NAMES / each, ignore_errors=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _quietly(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)
