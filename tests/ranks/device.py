"""Where the ranks of the pool compute: on the CPU, on what FULLSHARD_TEST_DEVICE names, or on what a test asks for.

``emulated`` is the accelerator of ``tests/accelerator``, on which every body is also checked for races; ``cuda``, or
any other type that torch knows here, is a real one. Bodies need not know: factories that are called without a device,
by a test or by torch on its behalf, make their tensors on the rank's device. Those that fullshard calls are not
redirected, so that a missing ``device=`` shows, nor those of torch's optimizers and checkpoints: these mean host
memory.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE_VARIABLE = "FULLSHARD_TEST_DEVICE"
# What the groups of all worlds are made with. Has to serve CPU tensors: bodies make those, too.
BACKEND_VARIABLE = "FULLSHARD_TEST_BACKEND"
# NCCL's own. Gloo is no way out: c10d's coalesced all-gather over it reads a GPU's memory on the host, and crashes.
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
EMULATED = "emulated"

_TORCH = str(Path(torch.__file__).parent) + os.sep
_ON_THE_HOST = (_TORCH + "optim" + os.sep, _TORCH + os.path.join("utils", "checkpoint.py"))
_FULLSHARD = f"{os.sep}src{os.sep}fullshard{os.sep}"


def device_type() -> str:
    """The type of device that bodies run on."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


def unavailable(device: str, world_size: int = 1) -> str | None:
    """Why so many ranks cannot run on a type of device here; None if they can, as far as is known.

    Asks nothing that would start CUDA in this process, which forks the ranks.
    """
    if device == EMULATED:
        from accelerator.build import missing

        return missing()
    if device == "cuda" and world_size > torch.cuda.device_count() and os.environ.get(SHARING_VARIABLE) != "1":
        return f"{world_size} ranks need as many GPUs, or NCCL 2.30 and {SHARING_VARIABLE}=1, with which they share"
    return None


def load_accelerator() -> None:
    """Make the emulated accelerator known to torch, if bodies are to run on it."""
    if device_type() == EMULATED:
        import accelerator

        accelerator.register()


def device_of(rank: int) -> torch.device:
    """The device of a rank, which becomes the current one. Ranks share devices if there are too few."""
    if device_type() == "cpu":
        return torch.device("cpu")
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(device_type(), index)


def process_group_backend(device: torch.device, world_size: int) -> str:
    """The back ends for CPU tensors and for those of ``device``."""
    if device.type == "cpu":
        return os.environ.get(BACKEND_VARIABLE, "gloo")
    if device.type == EMULATED:
        from accelerator import BACKEND

        return f"cpu:gloo,{EMULATED}:{BACKEND}"
    return f"cpu:gloo,{device.type}:{torch.distributed.Backend.default_device_backend_map.get(device.type, 'gloo')}"


class DeviceOfTests(TorchFunctionMode):
    """Make tensors on ``device`` where a test, or torch on its behalf, names none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func not in _device_constructors()
            or kwargs.get("device") is not None
            or kwargs.get("pin_memory")
            or _placed_by_its_caller()
        ):
            return func(*args, **kwargs)
        if kwargs.get("generator") is None:
            return func(*args, **{**kwargs, "device": self.device})
        needs_grad = kwargs.pop("requires_grad", False)  # a CPU's generator draws on the CPU
        return func(*args, **kwargs).to(self.device).requires_grad_(needs_grad)


def _placed_by_its_caller() -> bool:
    """Whether fullshard makes a tensor, an optimizer, or a checkpoint: those say where it goes, or mean host memory.

    (What a checkpoint recomputes is made on autograd's thread, where this mode is not.)
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith(_ON_THE_HOST):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and _FULLSHARD in frame.f_code.co_filename


def races_so_far(device: torch.device) -> Sequence[object]:
    """What has raced since the last call: for a test that says which of it may."""
    if device.type != EMULATED:
        return ()
    from accelerator.races import take_races

    return take_races()


def forget_races(device: torch.device) -> None:
    """Begin a body: what was found before is not its fault."""
    races_so_far(device)


def check_races(device: torch.device) -> None:
    """End a body: fail it if anything raced, also what ends with it."""
    if device.type == EMULATED:
        from accelerator.races import Races, take_races

        gc.collect()
        torch.accelerator.synchronize()
        if found := take_races():
            raise Races(found)
