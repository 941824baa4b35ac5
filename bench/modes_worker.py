"""One rank of one contestant of ``bench.modes``: like ``bench.step_worker``, in a mode and with microbatches.

Started by ``bench.modes`` as ``python -m bench.modes_worker``, its assignment as JSON in the first argument.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import stat
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.contestants import COMPOSABLE, FSDP1, contestant_named, distribute, prepare, shard_units
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.step_worker import Assignment, ResidentMemory, join_group, load_training_code, serve

BF16, HSDP, ACCUMULATION, OFFLOAD = "bf16", "hsdp", "accumulation", "offload"
# The mesh of HSDP has this many ranks on its replicate axis, all others on its shard axis.
REPLICAS = 2
# Offset of tcpi_bytes_acked in struct tcp_info of linux/tcp.h: sent and arrived, retransmissions not counted.
TCPI_BYTES_ACKED = 120


@dataclass(frozen=True)
class ModeAssignment(Assignment):
    """That of a plain step, in a mode. ``tokens`` are those of one microbatch."""

    mode: str
    microbatches: int


def mesh_of(mode: str, ranks: int) -> DeviceMesh:
    if mode != HSDP:
        return init_device_mesh("cpu", (ranks,))
    if ranks % REPLICAS:
        raise ValueError(f"{HSDP} needs a multiple of {REPLICAS} ranks, got {ranks}")
    return init_device_mesh("cpu", (REPLICAS, ranks // REPLICAS), mesh_dim_names=("replicate", "shard"))


def options_of(mode: str, system: str) -> dict[str, Any]:
    """What the mode adds to every call of the system's ``fully_shard``, made of that system's own policies."""
    library = importlib.import_module(COMPOSABLE[system])
    if mode == BF16:
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return {"mp_policy": policy}
    if mode == OFFLOAD:
        return {"offload_policy": library.CPUOffloadPolicy(pin_memory=False)}
    return {}


def shard(system: str, model: nn.Module, mode: str) -> nn.Module:
    """The model sharded over the default group in this mode. FSDP1 takes part in accumulation only."""
    if system == FSDP1 and mode == ACCUMULATION:
        return distribute(system, model, Block, torch.device("cpu"))
    if system not in COMPOSABLE:
        raise ValueError(f"{system} takes no part in mode {mode}")
    shard_units(system, model, Block, mesh_of(mode, dist.get_world_size()), **options_of(mode, system))
    return model


def unsynchronised(system: str, model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    """Around a microbatch's forward and backward: gradients are exchanged in the ``last`` one only."""
    if system == FSDP1:
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


class Trainer:
    """The model of one rank, its optimizer, and how many steps it has trained."""

    def __init__(self, assignment: ModeAssignment) -> None:
        self.assignment = assignment
        self.shape = GPTShape(assignment.width, assignment.blocks, assignment.tokens)
        self.system = contestant_named(assignment.contestant).system
        self.step = 0
        prepare(self.system)
        join_group(assignment)
        load_training_code()
        self.baseline = ResidentMemory.now()
        torch.manual_seed(0)
        self.model = shard(self.system, GPT(self.shape), assignment.mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=assignment.learning_rate)
        ResidentMemory.forget_freed()
        self.sent_before_first_step = bytes_sent()

    def run(self, steps: int) -> dict[str, object]:
        """Train ``steps`` steps; ``zero_grad`` is part of the timed step, making its data is not."""
        seconds, losses = [], []
        count = self.assignment.microbatches
        for _ in range(steps):
            first = count * self.step
            batches = [batch_of(self.shape, first + index, self.assignment.rank) for index in range(count)]
            start = time.perf_counter()
            partial = []
            for index, batch in enumerate(batches):
                with unsynchronised(self.system, self.model, last=index == count - 1):
                    loss = next_token_loss(self.model, batch) / count
                    loss.backward()
                partial.append(loss.detach())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - start)
            losses.append(sum(loss.item() for loss in partial))
            self.step += 1
        return {"seconds": seconds, "losses": losses}

    def memory(self) -> dict[str, object]:
        """Resident memory in bytes, and what a step sent, warm-up included."""
        sent, before = bytes_sent(), self.sent_before_first_step
        return {
            "baseline": self.baseline,
            "peak": ResidentMemory.peak(),
            "resting": ResidentMemory.now(),
            "sent_per_step": None if sent is None or before is None else (sent - before) // max(1, self.step),
        }


def bytes_sent() -> int | None:
    """Payload bytes that this process sent over its open TCP connections so far (Linux; None elsewhere).

    The kernel's count, so that it means the same for every contestant, however it calls the process group.
    Gloo keeps the connections of a group open, so no count is lost.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # closed meanwhile, not TCP, or a kernel without the field
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("=Q", information, TCPI_BYTES_ACKED)[0]
    return total


if __name__ == "__main__":
    given = ModeAssignment(**json.loads(sys.argv[1]))
    serve(given.threads, lambda: Trainer(given))
