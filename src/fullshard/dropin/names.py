"""Maps names of torch's FSDP to fullshard's objects.

Public names map to fullshard's of the same name; the private one that programs import comes from ``private_names.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

import fullshard
from fullshard import activation_checkpoint, wrap
from fullshard.dropin import private_names

__all__ = ["StandInNames", "is_torch_fsdp", "is_torch_fsdp_module", "stand_in_names"]

FSDP = "torch.distributed.fsdp"
REPLICATE = "torch.distributed._composable.replicate_with_fsdp"
CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
PACKAGES = (FSDP, "torch.distributed._composable.fsdp", REPLICATE)  # torch's engine, with all submodules

# Functions on names and plain tensors, independent of the engine: torch's own are kept.
NEUTRAL = {
    "_all_gather_dtensor",
    "_create_chunk_dtensor",
    "_create_chunk_sharded_tensor",
    "_get_remote_device_str",
    "clean_tensor_name",
}


class StandInNames(NamedTuple):
    """Names of one of torch's modules while the drop-in is installed.

    Attributes:
        replaced: fullshard's objects, by name.
        unavailable: names without a replacement, which raise when they are imported.
    """

    replaced: dict[str, object]
    unavailable: set[str]


def public_names() -> dict[str, object]:
    """Return fullshard's public objects by name."""
    return {name: getattr(holder, name) for holder in (fullshard, wrap) for name in holder.__all__}


def is_torch_fsdp(value: object) -> bool:
    """True if ``value`` is a class or function of torch's FSDP, or a collection that contains one."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(is_torch_fsdp, value))
    if isinstance(value, Mapping):
        return any(map(is_torch_fsdp, value)) or any(map(is_torch_fsdp, value.values()))
    owner = getattr(value, "__module__", None)
    return isinstance(owner, str) and is_torch_fsdp_module(owner)


def is_torch_fsdp_module(module: str) -> bool:
    """True if a module of this name is a part of torch's FSDP."""
    return any(module == one or module.startswith(f"{one}.") for one in PACKAGES)


def stand_in_names(module: ModuleType) -> StandInNames:
    """Return the replaced and unavailable names of ``module``, one of torch's."""
    replaced: dict[str, object] = {}
    unavailable: set[str] = set()
    if module.__name__ == CHECKPOINT_WRAPPER:  # fullshard uses torch's checkpoint wrappers
        replaced["apply_activation_checkpointing"] = activation_checkpoint.apply_activation_checkpointing
        return StandInNames(replaced, unavailable)
    offered = {**public_names(), "_get_mesh_info": private_names.get_mesh_info}
    for name, value in list(vars(module).items()):
        if name.startswith("__") or isinstance(value, ModuleType) or not is_torch_fsdp(value) or name in NEUTRAL:
            continue
        if name in offered:
            replaced[name] = offered[name]
        else:
            unavailable.add(name)
    return StandInNames(replaced, unavailable)
