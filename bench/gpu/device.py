"""An accelerator for the parts: CUDA, or for a rehearsal the emulated one of the tests."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from bench.environment import REPOSITORY

CUDA, EMULATED = "cuda", "emulated"


def use(device_type: str) -> torch.device:
    if device_type == EMULATED:
        sys.path.insert(0, str(REPOSITORY / "tests"))
        import accelerator

        accelerator.register()
    torch.accelerator.set_device_index(0)
    return torch.device(device_type, 0)


@contextlib.contextmanager
def group_of(ranks: int, device: torch.device) -> Iterator[None]:
    """Be rank 0 of ``ranks``: of one on the device's own back end, of more on c10d's fake one, which only copies."""
    if ranks == 1:
        from torch.distributed import Backend

        backend = f"cpu:gloo,{device.type}:{Backend.default_device_backend_map[device.type]}"
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # port 0: any free one
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        backend, store = f"cpu:fake,{device.type}:fake", FakeStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def memory_of(device: torch.device) -> Any:
    """The module with the statistics of the caching allocator."""
    return torch.get_device_module(device)


def forget_freed() -> None:
    """Return what is no longer used to the device, so that the next measurement starts from nothing."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


def nccl_version() -> str:
    """Of the library that is loaded; torch tells the one that it was compiled with."""
    found = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    return f"{found.value // 10_000}.{found.value // 100 % 100}.{found.value % 100}"


def name_of(device_type: str) -> str:
    return torch.cuda.get_device_name(0) if device_type == CUDA else device_type
