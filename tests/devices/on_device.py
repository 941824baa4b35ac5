"""Tests that need an accelerator: the one that FULLSHARD_TEST_DEVICE names, else the emulated one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from models import batch
from ranks import Rank, on_ranks
from ranks.device import EMULATED, device_type

DEVICE = EMULATED if device_type() == "cpu" else device_type()


def on_device(*worlds: int, **options: Any) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Make a body a test as ``on_ranks`` does, whose ranks compute on an accelerator."""
    return on_ranks(*worlds, device_type=DEVICE, **options)


@contextlib.contextmanager
def fake_mesh(rank: Rank, size: int) -> Iterator[DeviceMesh]:
    """Be rank 0 of ``size`` on a group that only copies the own piece: memory and streams are real, values are not.

    Ends the group of the pool, so the test has to be on one rank and ``fresh``.
    """
    dist.destroy_process_group()
    backend = f"cpu:fake,{rank.device.type}:fake"
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=size)
    yield init_device_mesh(rank.device.type, (size,))
    dist.destroy_process_group()


def data(rank: Rank, step: int, *shape: int) -> torch.Tensor:
    """``models.batch`` of this rank, on its device; the same numbers whatever the device."""
    with torch.device("cpu"):
        return batch(rank.rank, step, *shape).to(rank.device)


def built(make: Callable[..., nn.Module], *arguments: Any, device: torch.device | str = "cpu") -> Any:
    """What ``make`` makes on the CPU, with the same values on all ranks and devices, moved to ``device``."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        return make(*arguments).to(device)


def keep_busy(device: torch.device, seconds: float) -> None:
    """Have the current stream do nothing for a while, so that the device lags behind the host.

    The emulated device needs none of that: what it runs late does not depend on time.
    """
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles; clocks of current GPUs are 1 to 2 GHz


@contextlib.contextmanager
def host_never_waits(device: torch.device) -> Iterator[None]:
    """Fail if the host waits for the device within the block."""
    if device.type == EMULATED:
        from accelerator.races import count

        with count() as counts:
            yield
        assert not counts.host_syncs, "\n".join(map(str, counts.host_syncs))
        return
    torch.accelerator.synchronize()
    keep_busy(device, 1.0)
    busy = torch.accelerator.current_stream().record_event()
    yield
    if device.type == "cuda":  # elsewhere nothing keeps a device busy
        assert not busy.query(), "the host waited until the device was done"
    torch.accelerator.synchronize()


def peak_above(device: torch.device, action: Callable[[], object]) -> tuple[int, int]:
    """Bytes of device memory that ``action`` holds at most, and those that it leaves behind."""
    memory = torch.get_device_module(device)
    torch.accelerator.synchronize()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    action()
    torch.accelerator.synchronize()
    return memory.max_memory_allocated() - before, memory.memory_allocated() - before
