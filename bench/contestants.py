"""The contestants: fullshard and its peers, each applied to a model as its own documentation recommends.

FSDP1 on CPU needs no patch: without ``device_id`` it raises "FSDP needs a non-CPU accelerator device";
with ``device_id=torch.device("cpu")`` it takes ``torch.cpu`` as its device module and trains (torch 2.13).
Its gather is then a blocking ``all_gather`` into chunks of the flat parameter, its own path for CPU tensors,
so it overlaps nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

UNSHARDED, DDP, FSDP1, FSDP2, FULLSHARD = "unsharded", "ddp", "fsdp1", "fsdp2", "fullshard"
RAGGED = "fullshard-ragged"  # fullshard with layout="ragged"
FSDP1_FLAT, WRAPPER, WRAPPER_FLAT = "fsdp1-flat", "fullshard-wrapper", "fullshard-wrapper-flat"
OURS = (FULLSHARD, WRAPPER, WRAPPER_FLAT)
# Where each finds its fully_shard and the policies that go with it.
COMPOSABLE = {FSDP2: "torch.distributed.fsdp", FULLSHARD: "fullshard"}


class Wrapping(NamedTuple):
    """A ``FullyShardedDataParallel``: the package that has it, and the flag it is called with."""

    library: str
    use_orig_params: bool


WRAPPING: Mapping[str, Wrapping] = {
    FSDP1: Wrapping("torch.distributed.fsdp", use_orig_params=True),
    FSDP1_FLAT: Wrapping("torch.distributed.fsdp", use_orig_params=False),
    WRAPPER: Wrapping("fullshard", use_orig_params=True),
    WRAPPER_FLAT: Wrapping("fullshard", use_orig_params=False),
}
# fullshard's wrapper and FSDP1 with the same use_orig_params.
PEER_WITH_SAME_FLAG: Mapping[str, str] = {WRAPPER: FSDP1, WRAPPER_FLAT: FSDP1_FLAT}

# fullshard sets glibc's malloc when it shards on CPU. How much of a gain is that setting's is shown by peers that get
# the very same one, by the same function and at the same moment, and by fullshard without it.
KEPT_MEBIBYTES = 256  # blocks of up to this size: fullshard's default, as a test checks
NOT_KEPT = {"FULLSHARD_KEEP_FREED_MEMORY": "0"}
# Ends of names: a peer with fullshard's setting, and fullshard with what glibc does by itself.
WITH_OURS, WITHOUT_OURS = "+our-malloc", "-malloc"
# fullshard keeps the last two units gathered between their forward and their backward; so does this one, told by hand.
KEPT_UNITS = 2
TWO_KEPT = f"{FSDP2}-two-kept{WITH_OURS}"
# Removed from every contestant's environment before its own are added: all that changes glibc's malloc.
GOVERNED_VARIABLES = (
    *(f"MALLOC_{name}_" for name in ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD", "ARENA_MAX")),
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    *NOT_KEPT,
    "FULLSHARD_LAYOUT",
)

# The end of a wrapper's name, and the member of BackwardPrefetch that it passes.
PREFETCHES = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": None}


@dataclass(frozen=True)
class Contestant:
    """A system in one configuration. What is 0, empty or None is as it comes."""

    name: str  # in tables
    system: str  # what shards the model
    environment: Mapping[str, str] = field(default_factory=dict)  # that its processes are started with
    peer: str | None = None  # the contestant in the same configuration that it is measured by; None: itself
    prefetch: str | None = None  # of a wrapper: a key of PREFETCHES
    kept: int = 0  # MiB of blocks that ``fullshard.keep_freed_memory`` is told to keep
    keep_last: int = 0  # of ``fully_shard``: how many of the last units stay unsharded from forward to backward
    quantized: str = ""  # of fullshard: the format in which parameters are sent, gradients in int8
    ahead: int = 0  # of fullshard: how many units may be prefetched


def _contestants() -> Iterator[Contestant]:
    for system in (UNSHARDED, DDP, FSDP2, FULLSHARD, *WRAPPING):
        peer = PEER_WITH_SAME_FLAG.get(system)
        yield Contestant(system, system, peer=peer)
        if system in OURS:
            yield Contestant(f"{system}{WITHOUT_OURS}", system, NOT_KEPT, peer=peer)
        else:
            yield Contestant(f"{system}{WITH_OURS}", system, peer=system, kept=KEPT_MEBIBYTES)
        for name in PREFETCHES if system in WRAPPING else ():
            with_prefetch = None if peer is None else f"{peer}-{name}"
            yield Contestant(f"{system}-{name}", system, peer=with_prefetch, prefetch=name)
    yield Contestant(RAGGED, FULLSHARD, {"FULLSHARD_LAYOUT": "ragged"}, peer=FSDP2)
    yield Contestant(TWO_KEPT, FSDP2, peer=FSDP2, kept=KEPT_MEBIBYTES, keep_last=KEPT_UNITS)


CONTESTANTS = {contestant.name: contestant for contestant in _contestants()}


def with_setting(peers: Sequence[str]) -> tuple[str, ...]:
    """The same peers, each followed by itself with fullshard's setting of malloc."""
    return tuple(each for peer in peers for each in (peer, f"{peer}{WITH_OURS}"))


def set_allocator(contestant: Contestant) -> None:
    """Give this process the setting of malloc that the contestant is to have; to be called just before it shards."""
    if contestant.kept:
        from fullshard.allocator import keep_freed_memory

        if not keep_freed_memory(contestant.kept << 20):
            raise RuntimeError(f"{contestant.name}: the C allocator does not take the setting; it has to be glibc's")


def process_environment(contestant: Contestant, threads: int) -> dict[str, str]:
    """The environment of a contestant's processes: this one's, less what would favor one of them."""
    kept = {name: value for name, value in os.environ.items() if name not in GOVERNED_VARIABLES}
    network = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**kept, **network, "OMP_NUM_THREADS": str(threads), **contestant.environment}


def start_fake_group(ranks: int) -> None:
    """Become rank 0 of a group whose collectives return at once without moving anything, on one thread."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    # A fake all-gather leaves whatever bytes were there; denormal numbers among them would cost time.
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Be rank 0 of a fake group as long as the block lasts."""
    start_fake_group(ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def composable(system: str) -> Any:
    """Import the library whose ``fully_shard`` the system is, with the layout that the environment asks for."""
    if system == FULLSHARD and os.environ.get("FULLSHARD_LAYOUT") == "ragged":
        importlib.import_module("fullshard.ragged")
    return importlib.import_module(COMPOSABLE[system])


def prepare(system: str) -> None:
    """Import what the system needs, so that its code is loaded before a memory baseline is taken."""
    if system in COMPOSABLE:
        composable(system)
    elif system in WRAPPING:
        importlib.import_module(f"{WRAPPING[system].library}.wrap")


# ------------------------------------------------------------------ who shards what, and how

FP32, BF16, HSDP, OFFLOAD = "fp32", "bf16", "hsdp", "offload"


def mesh_of(mode: str, device: torch.device) -> DeviceMesh:
    """All ranks of the default group; of HSDP in two replicas."""
    ranks = dist.get_world_size()
    if mode != HSDP:
        return init_device_mesh(device.type, (ranks,))
    if ranks % 2:
        raise ValueError(f"{HSDP} needs an even number of ranks, got {ranks}")
    return init_device_mesh(device.type, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


def options_of(system: str, mode: str) -> dict[str, Any]:
    """What a mode adds to every unit of the system, made of that system's own policies."""
    if system in COMPOSABLE:
        library = composable(system)
        if mode == BF16:
            return {"mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        return {"offload_policy": library.CPUOffloadPolicy(pin_memory=False)} if mode == OFFLOAD else {}
    library = importlib.import_module(WRAPPING[system].library)
    if mode == HSDP:
        raise ValueError(f"{system} takes no part in mode {mode}")
    if mode == BF16:
        return {"mixed_precision": library.MixedPrecision(torch.bfloat16, torch.float32)}
    return {"cpu_offload": library.CPUOffload(offload_params=True)} if mode == OFFLOAD else {}


def distribute(
    system: str,
    model: nn.Module,
    unit_type: type[nn.Module],
    device: torch.device,
    mode: str = FP32,
    *,
    prefetch: str | None = None,
    keep_last: int = 0,
    quantized: str = "",
    ahead: int = 0,
) -> nn.Module:
    """Apply ``system`` to ``model`` over the default group: every ``unit_type`` a unit, and the root.

    Args:
        system: By name.
        model: Unsharded.
        unit_type: Of the units.
        device: That it trains on.
        mode: FP32, BF16 (parameters gathered in bf16, gradients reduced in fp32), HSDP or OFFLOAD.
        prefetch, keep_last, quantized, ahead: See :class:`Contestant`.
    """
    if system == UNSHARDED:
        return model.to(torch.bfloat16 if mode == BF16 else None)
    if system == DDP:
        return nn.parallel.DistributedDataParallel(model)
    if system in COMPOSABLE:
        fully_shard = composable(system).fully_shard
        every = {"mesh": mesh_of(mode, device), **options_of(system, mode)}
        units = [module for module in model.modules() if isinstance(module, unit_type)]
        largest = max(sum(parameter.nbytes for parameter in unit.parameters()) for unit in units)
        for index, unit in enumerate(units):
            kept = {"reshard_after_forward": False} if index >= len(units) - keep_last else {}
            fully_shard(unit, **every, **kept)
        fully_shard(model, **every)
        if quantized:
            form = composable(system).CommQuantization(quantized, "int8")
            model.set_comm_quantization(shard=form)  # type: ignore[operator]
        if ahead:
            model.set_prefetch_bytes(ahead * largest)  # type: ignore[operator]
        return model
    if system not in WRAPPING:
        raise ValueError(f"unknown system {system!r}")
    wrapping = WRAPPING[system]
    library, policies = (importlib.import_module(f"{wrapping.library}{end}") for end in ("", ".wrap"))
    options = options_of(system, mode)
    if prefetch is not None:
        member = PREFETCHES[prefetch]
        options["backward_prefetch"] = None if member is None else library.BackwardPrefetch[member]
    wrapped: nn.Module = library.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policies.ModuleWrapPolicy({unit_type}),
        use_orig_params=wrapping.use_orig_params,
        device_id=device,
        **options,
    )
    return wrapped
