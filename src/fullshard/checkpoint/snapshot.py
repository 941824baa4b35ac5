"""What one call saves, as a flat dictionary: what torch.distributed.checkpoint plans and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.extras import random_state, split, state_of
from fullshard.checkpoint.model_state import model_state
from fullshard.checkpoint.optimizer_state import optimizer_state
from fullshard.checkpoint.pieces import Piece, Pieces
from fullshard.checkpoint.values import to_bytes
from fullshard.errors import CheckpointError
from fullshard.memory import host_buffer
from fullshard.version import __version__

__all__ = [
    "EXTRA",
    "GROUPS",
    "MODEL",
    "OPTIMIZER",
    "RANDOM",
    "STATE",
    "Part",
    "Snapshot",
    "compute_device",
    "parts",
    "snapshot",
]

# What keys begin with.
MODEL, OPTIMIZER, EXTRA, RANDOM = "model.", "optimizer.", "extra.", "rng."
STATE, GROUPS = "state.", "param_groups."  # after that of an optimizer
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved, on this rank.

    Attributes:
        entries: By key: tensors, and values as bytes.
        aliases: Further keys of tied parameters.
        about: What the checkpoint says of itself.
        states: Of optimizers, which have to be alike on all ranks; none in a copy.
    """

    entries: dict[str, Pieces | bytes]
    aliases: dict[str, str]
    about: dict[str, Any]
    states: Sequence[Mapping[str, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of tensors on this rank."""
        return sum(entry.nbytes for entry in self.entries.values() if isinstance(entry, Pieces))

    def staged(self) -> Snapshot:
        """A copy in CPU memory, pinned where tensors come from an accelerator. One allocation, one copy of each."""
        locals_ = [piece.local for e in self.entries.values() if isinstance(e, Pieces) for piece in e.pieces]
        accelerator = next((local.device for local in locals_ if local.device.type != "cpu"), None)
        nbytes = sum(_aligned(local.nbytes) for local in locals_)
        memory = host_buffer(nbytes, torch.uint8, pin=accelerator is not None)
        entries: dict[str, Pieces | bytes] = {}
        start = 0
        for key, entry in self.entries.items():
            if isinstance(entry, bytes):
                entries[key] = entry
                continue
            copies = []
            for box, local in entry.pieces:
                copy = memory[start : start + local.nbytes].view(local.dtype).view(local.shape)
                copy.copy_(local, non_blocking=accelerator is not None)
                copies.append(Piece(box, copy))
                start += _aligned(local.nbytes)
            entries[key] = Pieces(entry.shape, entry.dtype, torch.device("cpu"), copies)
        if accelerator is not None:
            torch.get_device_module(accelerator).current_stream(accelerator).synchronize()
        return Snapshot(entries, self.aliases, self.about, ())


class Part(NamedTuple):
    """A model, or an optimizer on one, among the things that are saved or loaded.

    Attributes:
        prefix: Of its keys.
        model: The model.
        optimizer: None: it is the model itself that is saved.
    """

    prefix: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None


def parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any]) -> list[Part]:
    """The models and optimizers that are to be saved or loaded, those among the extras as well.

    Raises:
        CheckpointError: If an optimizer has parameters of none of the models.
    """
    found = [Part(MODEL, model)]
    found += [Part(f"{EXTRA}{name}.", value) for name, value in extra.items() if isinstance(value, nn.Module)]
    models = [part.model for part in found]
    if optimizer is not None:
        found.append(Part(OPTIMIZER, model, optimizer))
    for name, value in extra.items():
        if isinstance(value, torch.optim.Optimizer):
            own = {id(parameter) for group in value.param_groups for parameter in group["params"]}
            of = next((each for each in models if any(id(p) in own for p in each.parameters())), None)
            if of is None:
                raise CheckpointError(
                    f"{name}: an optimizer whose parameters belong to none of the models that are passed; pass its "
                    "model as well"
                )
            found.append(Part(f"{EXTRA}{name}.", of, value))
    return found


def snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Snapshot:
    """This rank's part of a checkpoint. No communication, and no copies.

    Raises:
        PhaseError: If the model is in the middle of a step.
        CheckpointError: If a value could not be read again.
    """
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    entries: dict[str, Pieces | bytes] = {}
    aliases: dict[str, str] = {}
    states = []
    for part in parts(model, optimizer, extra):
        if part.optimizer is None:
            _add_model(entries, aliases, part)
        else:
            states.append(_add_optimizer(entries, part, part.optimizer))
    count = sum(math.prod(e.shape) for key, e in entries.items() if key.startswith(MODEL) and isinstance(e, Pieces))
    for name, value in extra.items():
        if not isinstance(value, (nn.Module, torch.optim.Optimizer)):
            _add_value(entries, EXTRA + name, state_of(value))
    _add_value(entries, f"{RANDOM}{rank}", random_state(compute_device(model)))
    about = {
        "fullshard": __version__,
        "torch": str(torch.__version__),
        "saved": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": size,
        "model": type(model).__name__,
        "elements": count,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "extra": list(extra),
    }
    return Snapshot(entries, aliases, about, states)


def _add_model(entries: dict[str, Pieces | bytes], aliases: dict[str, str], part: Part) -> None:
    state = model_state(part.model)
    entries.update({part.prefix + name: pieces for name, pieces in state.tensors.items()})
    for name, value in state.extra.items():
        _add(entries, part.prefix + name, value)
    aliases.update({part.prefix + name: part.prefix + first for name, first in state.aliases.items()})


def _add_optimizer(
    entries: dict[str, Pieces | bytes], part: Part, optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """Returns the state, which has to be alike on all ranks."""
    tree = optimizer_state(part.model, optimizer)
    known = {fqn for options in tree["param_groups"] for fqn in options["params"]}
    for fqn, values in tree["state"].items():
        if fqn not in known:  # a user's own, of the optimizer as a whole
            _add_value(entries, f"{part.prefix}{STATE}{fqn}", values)
            continue
        for name, value in values.items():
            _add(entries, f"{part.prefix}{STATE}{fqn}.{name}", value)
    for index, options in enumerate(tree["param_groups"]):
        for name, value in options.items():
            _add(entries, f"{part.prefix}{GROUPS}{index}.{name}", value)
    state: Mapping[str, Any] = tree["state"]
    return state


def compute_device(model: nn.Module) -> torch.device:
    """Where the model computes, as far as its parameters tell."""
    found = next(model.parameters(), None)
    return torch.device("cpu") if found is None or found.device.type == "meta" else found.device


def _add(entries: dict[str, Pieces | bytes], key: str, value: Any) -> None:
    if isinstance(value, Pieces):
        entries[key] = value
    elif isinstance(value, torch.Tensor):
        entries[key] = Pieces.of(value)
    else:
        _add_value(entries, key, value)


def _add_value(entries: dict[str, Pieces | bytes], key: str, value: Any) -> None:
    tensors: dict[str, Pieces] = {}
    entries[key] = to_bytes(key, split(value, tensors, f"{key}.tensor"))
    entries.update(tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
