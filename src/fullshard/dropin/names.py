"""Which name of torch's FSDP is which of fullshard's.

Public ones are those that fullshard has under the same name. Private ones that programs rely on anyway come from
``private_names.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

import fullshard
from fullshard import activation_checkpoint, wrap
from fullshard.dropin import private_names
from fullshard.dropin.not_offered import NotOffered

__all__ = ["Answers", "answers_of", "in_engine", "is_torchs"]

FSDP = "torch.distributed.fsdp"
REPLICATE = "torch.distributed._composable.replicate_with_fsdp"
CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
PACKAGES = (FSDP, "torch.distributed._composable.fsdp", REPLICATE)  # what is torch's engine, and all below
# Programs import its names next to others, to replace or to subclass some of them later: what is missing is said then.
COLLECTIVES = f"{FSDP}._fully_shard._fsdp_collectives"

# Functions on names and plain tensors, which know no engine: torch's own serve.
NEUTRAL = {
    "_all_gather_dtensor",
    "_create_chunk_dtensor",
    "_create_chunk_sharded_tensor",
    "_get_remote_device_str",
    "clean_tensor_name",
}


class Answers(NamedTuple):
    """What one of torch's modules answers while fullshard stands in.

    Attributes:
        given: fullshard's objects, by name; or a :class:`NotOffered`, which raises when it is used.
        refused: names that fullshard has nothing for: asking raises.
    """

    given: dict[str, object]
    refused: set[str]


def public_names() -> dict[str, object]:
    """fullshard's objects under the names that they have in torch."""
    return {name: getattr(holder, name) for holder in (fullshard, wrap) for name in holder.__all__}


def is_torchs(value: object) -> bool:
    """Whether ``value`` is a class or function of torch's engine, or a collection with values of one."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(is_torchs, value))
    if isinstance(value, Mapping):
        return any(map(is_torchs, value)) or any(map(is_torchs, value.values()))
    owner = getattr(value, "__module__", None)
    return isinstance(owner, str) and in_engine(owner)


def in_engine(module: str) -> bool:
    """Whether a module of this name is a part of torch's engine."""
    return any(module == one or module.startswith(f"{one}.") for one in PACKAGES)


def answers_of(module: ModuleType) -> Answers:
    """What ``module``, one of torch's, is to answer."""
    given: dict[str, object] = {}
    refused: set[str] = set()
    if module.__name__ == CHECKPOINT_WRAPPER:  # the wrappers themselves are fullshard's as well
        given["apply_activation_checkpointing"] = activation_checkpoint.apply_activation_checkpointing
        return Answers(given, refused)
    public, private = public_names(), private_names.SERVED
    for name, value in list(vars(module).items()):
        if name.startswith("__") or isinstance(value, ModuleType) or not is_torchs(value) or name in NEUTRAL:
            continue
        owner = getattr(value, "__module__", module.__name__)
        if (owner, name) in private:
            given[name] = private[owner, name]
        elif name in public:
            given[name] = public[name]
        elif module.__name__ == COLLECTIVES:
            given[name] = NotOffered(f"{module.__name__}.{name}")
        else:
            refused.add(name)
    return Answers(given, refused)
