"""The nursery: one process that has imported torch and fullshard once and forks ranks on demand.

Importing torch, DTensor and dynamo takes 3 s of CPU per process, fullshard 0.6 s; forking a process that has done so
takes milliseconds. So a world of four starts in 0.2 s, which makes it cheap to throw a world away after a failure.
Forking is safe here because the nursery never starts a thread (checked before each fork) and never runs a
kernel or touches a device.

Every process of the pool asks the kernel to be killed when its parent ends: ranks with the nursery, the
nursery with the pytest thread that started it. So nothing is left behind, however pytest ends.

Protocol, over a Unix socket, one reply per request, both pickled:
    ("fork", directory, world size) with one descriptor per rank  ->  list of pids
    ("reap", pid)                                                 ->  exit code, once the process has ended
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranks.device import DEVICE_VARIABLE, load_accelerator

MESSAGE_BYTES = 1 << 16
MAX_WORLD = 64
# What ranks find imported, unless a pool says otherwise.
PRELOADED = ("fullshard.optim", "fullshard.checkpoint", "fullshard.wrapper.fsdp", "fullshard.composable.fully_shard")
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


class Nursery:
    """The nursery as pytest sees it. Its ranks compute on a type of device, and have imported ``preload``."""

    def __init__(self, directory: Path, device: str, preload: Sequence[str] = PRELOADED) -> None:
        self._socket, theirs = socket.socketpair()
        self._log = directory / f"nursery_{device}.log"
        tests = Path(__file__).resolve().parent.parent
        environment = {**os.environ, DEVICE_VARIABLE: device, "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
        for library in ("OMP", "MKL", "OPENBLAS"):
            environment[f"{library}_NUM_THREADS"] = "1"
        with theirs, self._log.open("wb") as log:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "ranks.nursery", str(theirs.fileno()), str(os.getpid()), *preload],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches pytest only, which then ends the ranks in order
            )

    def fork(self, directory: Path, descriptors: list[int]) -> list[int]:
        """Start one rank per descriptor (its end of the connection to pytest); return the pids by rank."""
        return self._request(("fork", str(directory), len(descriptors)), descriptors)

    def reap(self, pid: int) -> int:
        """Wait for the end of a rank and return its exit code."""
        return self._request(("reap", pid))

    def close(self) -> None:
        """End the nursery, and with it any rank that is left."""
        self._socket.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _request(self, request: tuple[Any, ...], descriptors: list[int] | None = None) -> Any:
        try:
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors or [])
            reply = self._socket.recv(MESSAGE_BYTES)
        except OSError:
            reply = b""
        if not reply:
            raise RuntimeError(f"the rank nursery ended; its output:\n{self._log.read_text(errors='replace')}")
        return pickle.loads(reply)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere idle ranks see EOF)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def main(control: socket.socket, preload: Sequence[str]) -> None:
    """Serve requests until pytest closes the connection."""
    # All that bodies commonly need, dynamo included: torch.optim imports it on the first step.
    import pytest  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    load_accelerator()
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that gc.collect() in a rank looks only at what the rank has made
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, MAX_WORLD)
        if not message:
            return
        match pickle.loads(message):
            case ("fork", directory, _):
                reply: Any = _fork_world(control, Path(directory), descriptors)
            case ("reap", pid):
                reply = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        control.sendall(pickle.dumps(reply))


def _fork_world(control: socket.socket, directory: Path, descriptors: list[int]) -> list[int]:
    if sys.platform == "linux" and len(threads := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"the nursery has {len(threads)} threads, so it must not fork: which import started one?")
    nursery, pids = os.getpid(), []
    for rank, own in enumerate(descriptors):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                die_with_parent(nursery)
                control.close()
                for other in descriptors:
                    os.set_inheritable(other, False)
                    if other != own:
                        os.close(other)
                from ranks.worker import serve

                serve(own, rank, len(descriptors), directory)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    return pids


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:])
