"""What one call saves, as a flat dictionary: what torch.distributed.checkpoint plans and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import Common
from fullshard.checkpoint.division import TensorTable
from fullshard.checkpoint.extras import random_state, split, state_of
from fullshard.checkpoint.host import bytes_of
from fullshard.checkpoint.model_state import model_state
from fullshard.checkpoint.optimizer_state import fingerprint, optimizer_state
from fullshard.checkpoint.parameters import local_parameters
from fullshard.checkpoint.pieces import Piece, Pieces
from fullshard.checkpoint.values import to_bytes
from fullshard.engine.ownership import nested_units
from fullshard.errors import CheckpointError
from fullshard.memory import host_buffer, wait_for_stream
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
ARGUMENTS = {"cast", "random", "storage_reader", "storage_writer", "strict"}
ALIGNMENT_BYTES = 64
BLOCK_BYTES = 1 << 28


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved, on this rank.

    Attributes:
        entries: By key: tensors, and values as bytes.
        aliases: Further keys of tied parameters.
        about: What the checkpoint says of itself.
        common: What ranks have to have in common.
    """

    entries: dict[str, Pieces | bytes]
    aliases: dict[str, str]
    about: dict[str, Any]
    common: Common

    @property
    def nbytes(self) -> int:
        """Bytes of tensors on this rank."""
        return sum(entry.nbytes for entry in self.entries.values() if isinstance(entry, Pieces))

    def staged(self) -> Snapshot:
        """A copy in CPU memory, pinned where tensors come from an accelerator."""
        pieces = [piece for e in self.entries.values() if isinstance(e, Pieces) for piece in e.pieces]
        accelerator = next((p.local.device for p in pieces if p.local.device.type != "cpu"), None)
        memory = _Memory(sum(_aligned(p.local.nbytes) for p in pieces), pin=accelerator is not None)
        entries: dict[str, Pieces | bytes] = {}
        for key, entry in self.entries.items():
            if isinstance(entry, bytes):
                entries[key] = entry
                continue
            copies = [Piece(box, memory.like(local)) for box, local in entry.pieces]
            for (_, copy), (_, local) in zip(copies, entry.pieces, strict=True):
                copy.copy_(local, non_blocking=accelerator is not None)
            entries[key] = Pieces(entry.shape, entry.dtype, torch.device("cpu"), copies, equal=entry.equal)
        if accelerator is not None:
            wait_for_stream(accelerator)
        return Snapshot(entries, self.aliases, self.about, self.common)


class _Memory:
    """CPU memory for copies, in blocks: pinned memory is allocated in powers of two, so one block could be twice as
    large as needed.
    """

    _left: int  # bytes that are still to be asked for
    _block: torch.Tensor
    _pin: bool

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self._left, self._pin, self._block = nbytes, pin, torch.empty(0, dtype=torch.uint8, device="cpu")

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for a tensor, contiguous."""
        nbytes = _aligned(tensor.nbytes)
        if nbytes > self._block.numel():
            size = max(nbytes, min(BLOCK_BYTES, self._left))
            self._block = host_buffer(size, torch.uint8, pin=self._pin)
        found, self._block = self._block[: tensor.nbytes], self._block[nbytes:]
        self._left -= nbytes
        return found.view(tensor.dtype).view(tensor.shape)


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
        ValueError: If an extra has the name of an argument of ``save`` or ``load``.
    """
    taken = sorted(ARGUMENTS.intersection(extra))
    if taken:
        raise ValueError(f"an extra cannot be named {taken[0]!r}: load takes that for an argument; choose another name")
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
    keys: list[str] = []
    states: dict[str, str] = {}
    local: dict[str, str] = {}
    for part in parts(model, optimizer, extra):
        if part.optimizer is None:
            _add_model(entries, aliases, part)
            keys += [key for key in entries if key.startswith(part.prefix)]
            local.update(_digests(part))
        else:
            found = fingerprint(_add_optimizer(entries, part, part.optimizer))
            states.update({f"{part.prefix}{fqn}": words for fqn, words in found.items()})
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
    tensors = TensorTable.of({key: entry for key, entry in entries.items() if isinstance(entry, Pieces)}).digest
    return Snapshot(entries, aliases, about, Common(tuple(keys), states, local, tensors))


def _add_model(entries: dict[str, Pieces | bytes], aliases: dict[str, str], part: Part) -> None:
    state = model_state(part.model)
    entries.update({part.prefix + name: pieces for name, pieces in state.tensors.items()})
    for name, value in state.extra.items():
        _add(entries, part.prefix + name, value)
    aliases.update({part.prefix + name: part.prefix + first for name, first in state.aliases.items()})


def _digests(part: Part) -> dict[str, str]:
    """Of the parameters of a sharded model that no unit has: nothing keeps them equal over ranks."""
    if not nested_units(part.model):
        return {}
    loose = [p for p in local_parameters(part.model) if p.sharded is None and not isinstance(p.parameter, DTensor)]
    found = {}
    for parameter in loose:
        host = parameter.parameter.detach().cpu().contiguous()
        found[part.prefix + parameter.fqn] = xxhash.xxh3_64_hexdigest(bytes_of(host))
    return found


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
            if not isinstance(name, str):
                raise CheckpointError(
                    f"the state of {fqn} has the key {name!r}: names have to be texts, or it would come back as another"
                )
            _add(entries, f"{part.prefix}{STATE}{fqn}.{name}", value)
    for index, options in enumerate(tree["param_groups"]):
        for name, value in options.items():
            _add(entries, f"{part.prefix}{GROUPS}{index}.{name}", value)
    state: Mapping[str, Any] = tree["state"]
    return state


def compute_device(model: nn.Module) -> torch.device:
    """Where the model computes, as far as its units or its parameters tell; its shards may be elsewhere."""
    units = nested_units(model)
    devices = [unit.mesh.device for unit in units] or [parameter.device for parameter in model.parameters()]
    near = [device for device in devices if device.type not in ("cpu", "meta")]
    return near[0] if near else torch.device("cpu")


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
