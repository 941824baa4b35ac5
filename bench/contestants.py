"""The contestants: fullshard and its peers, each applied to a model as its own documentation recommends.

FSDP1 on CPU needs no patch: without ``device_id`` it raises "FSDP needs a non-CPU accelerator device";
with ``device_id=torch.device("cpu")`` it takes ``torch.cpu`` as its device module and trains (torch 2.13).
Its gather is then a blocking ``all_gather`` into chunks of the flat parameter, its own path for CPU tensors,
so it overlaps nothing.

fairscale 0.4.13 (optional: ``pip install --no-build-isolation fairscale``, which needs setuptools and wheel) wraps
on CPU, and its first forward then raises ``KeyError: 'all_gather'``: its CUDA streams exist only where CUDA does. With
stand-ins for them it trains; with its own switch ``ENABLE_NCCL_BASE_COLLECTIVES=0``, without which gloo refuses the
shapes that it reduces. See ``_stand_in_for_streams``. Everything it would overlap, it does one after another.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

UNSHARDED, DDP, FSDP1, FSDP2, FULLSHARD = "unsharded", "ddp", "fsdp1", "fsdp2", "fullshard"
# Where each finds its fully_shard and the policies that go with it.
COMPOSABLE = {FSDP2: "torch.distributed.fsdp", FULLSHARD: "fullshard"}

FSDP1_FLAT, WRAPPER, WRAPPER_FLAT = "fsdp1-flat", "fullshard-wrapper", "fullshard-wrapper-flat"
FAIRSCALE = "fairscale"


@dataclass(frozen=True)
class Wrapping:
    """A ``FullyShardedDataParallel``: the package that has it, and the flag it is called with."""

    library: str
    use_orig_params: bool

    @property
    def policies(self) -> str:
        """The module with its auto-wrap policies."""
        return f"{self.library}.wrap"


WRAPPING: Mapping[str, Wrapping] = {
    FSDP1: Wrapping("torch.distributed.fsdp", use_orig_params=True),
    FSDP1_FLAT: Wrapping("torch.distributed.fsdp", use_orig_params=False),
    WRAPPER: Wrapping("fullshard", use_orig_params=True),
    WRAPPER_FLAT: Wrapping("fullshard", use_orig_params=False),
}
# fullshard's wrapper and FSDP1 with the same use_orig_params.
PEER_WITH_SAME_FLAG: Mapping[str, str] = {WRAPPER: FSDP1, WRAPPER_FLAT: FSDP1_FLAT}

# glibc reads these when a process starts: never return freed memory to the kernel, so that the next step does
# not fault the same pages in again. fullshard may choose as much for its own process; given to the peers too,
# it shows how much of a gain is the allocator's.
KEEP_FREED_MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
# Removed from every contestant's environment before its own are added.
GOVERNED_VARIABLES = (*KEEP_FREED_MEMORY, "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "FULLSHARD_KEEP_FREED_MEMORY")


@dataclass(frozen=True)
class Contestant:
    """A system in one configuration.

    Args:
        name: In tables.
        system: What shards the model.
        environment: Variables that its processes are started with.
        peer: Of a wrapper: the contestant in the same configuration that it is measured by. None: itself.
        prefetch: Of a wrapper: a key of PREFETCHES. None: not passed.
    """

    name: str
    system: str
    environment: Mapping[str, str] = field(default_factory=dict)
    peer: str | None = None
    prefetch: str | None = None


# The end of a wrapper's name, and the member of BackwardPrefetch that it passes.
PREFETCHES = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": None}
NOT_KEPT = {"FULLSHARD_KEEP_FREED_MEMORY": "0"}


def _contestants() -> Iterator[Contestant]:
    yield from (Contestant(system, system) for system in (UNSHARDED, DDP, FSDP2, FULLSHARD))
    yield Contestant(f"{FSDP2}+malloc", FSDP2, KEEP_FREED_MEMORY)
    yield Contestant(f"{FULLSHARD}-malloc", FULLSHARD, NOT_KEPT)
    for system in WRAPPING:
        peer = PEER_WITH_SAME_FLAG.get(system)
        yield Contestant(system, system, peer=peer)
        if peer is None:
            yield Contestant(f"{system}+malloc", system, KEEP_FREED_MEMORY, peer=system)
        else:
            yield Contestant(f"{system}-malloc", system, NOT_KEPT, peer=peer)
        for name in PREFETCHES:
            with_prefetch = None if peer is None else f"{peer}-{name}"
            yield Contestant(f"{system}-{name}", system, peer=with_prefetch, prefetch=name)
    yield Contestant(FAIRSCALE, FAIRSCALE, {"ENABLE_NCCL_BASE_COLLECTIVES": "0"}, peer=FSDP1_FLAT)


CONTESTANTS = {contestant.name: contestant for contestant in _contestants()}


def system_alone(system: str) -> Contestant:
    """The system as it comes."""
    return Contestant(system, system)


def process_environment(contestant: Contestant, threads: int) -> dict[str, str]:
    """The environment of a contestant's processes: this one's, less what would favour one of them."""
    kept = {name: value for name, value in os.environ.items() if name not in GOVERNED_VARIABLES}
    network = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**kept, **network, "OMP_NUM_THREADS": str(threads), **contestant.environment}


def start_fake_group(ranks: int) -> None:
    """Become rank 0 of a group whose collectives return at once without moving anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Be rank 0 of a fake group, on one thread, as long as the block lasts."""
    torch.set_num_threads(1)
    # A fake gather leaves whatever bytes were there; denormal numbers among them would cost time.
    torch.set_flush_denormal(True)
    start_fake_group(ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def prepare(system: str) -> None:
    """Import what the system needs, so that its code is loaded before a memory baseline is taken."""
    if system in COMPOSABLE:
        importlib.import_module(COMPOSABLE[system])
    elif system in WRAPPING:
        importlib.import_module(WRAPPING[system].policies)
    elif system == FAIRSCALE:
        if importlib.util.find_spec("fairscale") is None:
            raise RuntimeError("fairscale is not installed")
        importlib.import_module("fairscale.nn")


def distribute(system: str, model: nn.Module, unit_type: type[nn.Module], device: torch.device) -> nn.Module:
    """Apply ``system`` to ``model`` over the default group: every ``unit_type`` a unit, and the root."""
    if system == UNSHARDED:
        return model
    if system == DDP:
        return nn.parallel.DistributedDataParallel(model)
    if system in WRAPPING:
        return wrap_units(system, model, unit_type, device)
    if system == FAIRSCALE:
        return _wrap_by_fairscale(model, unit_type, device)
    if system not in COMPOSABLE:
        raise ValueError(f"unknown system {system!r}")
    shard_units(system, model, unit_type, init_device_mesh(device.type, (dist.get_world_size(),)))
    return model


def shard_units(system: str, model: nn.Module, unit_type: type[nn.Module], mesh: DeviceMesh, **options: Any) -> None:
    """Call the system's ``fully_shard`` with the same options on every ``unit_type``, then on the root."""
    fully_shard = importlib.import_module(COMPOSABLE[system]).fully_shard
    for module in model.modules():
        if isinstance(module, unit_type):
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def wrap_units(
    system: str, model: nn.Module, unit_type: type[nn.Module], device: torch.device, **options: Any
) -> nn.Module:
    """The system's ``FullyShardedDataParallel`` around ``model``, every ``unit_type`` inside a unit of its own."""
    wrapping = WRAPPING[system]
    library, policies = importlib.import_module(wrapping.library), importlib.import_module(wrapping.policies)
    wrapped: nn.Module = library.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policies.ModuleWrapPolicy({unit_type}),
        use_orig_params=wrapping.use_orig_params,
        device_id=device,
        **options,
    )
    return wrapped


def _wrap_by_fairscale(model: nn.Module, unit_type: type[nn.Module], device: torch.device) -> nn.Module:
    from fairscale.nn import FullyShardedDataParallel

    if not torch.cuda.is_available():
        _stand_in_for_streams(FullyShardedDataParallel)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, unit_type):
                wrapped = FullyShardedDataParallel(child, compute_device=device)
                module._modules[name] = wrapped
    root: nn.Module = FullyShardedDataParallel(model, compute_device=device)
    return root


class _Stream:
    """In place of a CUDA stream: on a CPU everything is in order already."""

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


def _stand_in_for_streams(wrapper: Any) -> None:
    """Give fairscale's wrapper streams that do nothing, in this process: it asks for them unconditionally."""
    only = _Stream()
    functions: Any = torch.cuda
    functions.current_stream = lambda *_: only
    functions.stream = lambda *_: contextlib.nullcontext()
    tensors: Any = torch.Tensor
    tensors.record_stream = lambda *_: None
    set_up = wrapper._setup_streams

    def set_up_streams(self: Any) -> None:
        set_up(self)  # shares an empty dict with the wrappers inside
        if not self._streams and self._is_root:
            self._streams.update(dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), only))

    wrapper._setup_streams = set_up_streams
