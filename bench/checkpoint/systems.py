"""How each system saves, loads, exports and imports, as its own documentation recommends.

A *method* is a name that :meth:`Keeper.perform` takes. Peers are called through torch's own functions only:

``async_save``            with the defaults of each: fullshard keeps the memory of the copy for the next call;
                          ``async_save_kept``: torch does too, in a ``DefaultStager``
``save``, ``load``        DCP on ``get_state_dict``; ``load`` reads in place into what ``get_state_dict`` gave and
                          ends with ``set_state_dict``
``export``                FSDP1: ``FULL_STATE_DICT`` with ``FullStateDictConfig(rank0_only=True)``; FSDP2:
                          ``get_model_state_dict(full_state_dict=True, cpu_offload=True)``; rank 0 then calls
                          ``safetensors.torch.save_file``
``import``                FSDP1: every rank maps the whole file, ``load_state_dict`` of the full state dict;
                          FSDP2: rank 0 reads it, ``set_model_state_dict(broadcast_from_rank0=True)``
``import_broadcast``      FSDP1 by the same function as FSDP2

Two ways of FSDP1 do not exist on CPU ranks (torch 2.13). With ``offload_to_cpu=True`` it frees the full parameters that
it takes to have copied to the CPU: a segmentation fault. Without it they
are in CPU memory all the same. And ``sync_module_states=True`` refuses parameters in CPU memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from bench.contestants import FSDP1, FSDP2, FULLSHARD, OURS, WRAPPER, WRAPPER_FLAT

FILE = "model.safetensors"
Wait = Callable[[], None]


class Keeper:
    """A rank's sharded model and optimizer, and how its system keeps them in files."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def perform(self, method: str, path: Path) -> Wait | None:
        """Do it, on all ranks together. Returns what waits until it is done, if it is done in the background."""
        action: Callable[[Path], Wait | None] = getattr(self, f"do_{method}")
        return action(path)

    def weights(self) -> Iterator[Tensor]:
        yield from (_local(parameter.detach()) for parameter in self.model.parameters())

    def state(self) -> Iterator[Tensor]:
        for parameter in self.model.parameters():
            values = self.optimizer.state.get(parameter, {})
            yield from (_local(values[name]) for name in sorted(values))


class FullshardKeeper(Keeper):
    """``fully_shard`` and both forms of the wrapper: the same five functions."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.library: Any = importlib.import_module("fullshard")  # not in the processes of peers

    def do_save(self, path: Path) -> None:
        self.library.save(path, self.model, self.optimizer)

    def do_save_weights(self, path: Path) -> None:
        self.library.save(path, self.model)

    def do_async_save(self, path: Path) -> Wait:
        wait: Wait = self.library.async_save(path, self.model, self.optimizer).result
        return wait

    do_async_save_kept = do_async_save  # it keeps the memory unless told otherwise

    def do_load(self, path: Path) -> None:
        self.library.load(path, self.model, self.optimizer)

    def do_load_weights(self, path: Path) -> None:
        self.library.load(path, self.model)

    def do_export(self, path: Path) -> None:
        self.library.export_safetensors(self.model, path)

    def do_import(self, path: Path) -> None:
        self.library.load_safetensors(self.model, path)


class TorchKeeper(Keeper):
    """torch's FSDP2. What it does with DCP, FSDP1 does as well."""

    _stager: Any = None  # keeps the memory of copies from one asynchronous save to the next

    def do_save(self, path: Path) -> None:
        dcp.save(self._everything(), checkpoint_id=path)

    def do_save_weights(self, path: Path) -> None:
        dcp.save({"model": get_model_state_dict(self.model)}, checkpoint_id=path)

    def do_async_save(self, path: Path) -> Wait:
        future: Any = dcp.async_save(self._everything(), checkpoint_id=path)
        return lambda: future.result() and None

    def do_async_save_kept(self, path: Path) -> Wait:
        if self._stager is None:  # options that dcp.async_save itself takes: here is no memory to pin
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        future: Any = dcp.async_save(self._everything(), checkpoint_id=path, async_stager=self._stager)
        return lambda: future.result() and None

    def do_load(self, path: Path) -> None:
        found = self._everything()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def do_load_weights(self, path: Path) -> None:
        found = {"model": get_model_state_dict(self.model)}
        dcp.load(found, checkpoint_id=path)
        set_model_state_dict(self.model, found["model"])

    def do_export(self, path: Path) -> None:
        _write_file(self._full_weights(), path)

    def do_import(self, path: Path) -> None:
        self._import_from_rank_0(path)

    def _import_from_rank_0(self, path: Path) -> None:
        full: dict[str, Any] = dict(_read_file(path)) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, full, options=options)

    def _full_weights(self) -> dict[str, Tensor]:
        """On rank 0 only, in CPU memory."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found: Any = get_model_state_dict(self.model, options=options)
        return dict(found)

    def _everything(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class WrappedTorchKeeper(TorchKeeper):
    def do_import(self, path: Path) -> None:
        with self._full_state_dicts():
            self.model.load_state_dict(_read_file(path))

    def do_import_broadcast(self, path: Path) -> None:
        self._import_from_rank_0(path)

    def _full_weights(self) -> dict[str, Tensor]:
        with self._full_state_dicts():
            return self.model.state_dict()

    def _full_state_dicts(self) -> Any:
        config = FullStateDictConfig(rank0_only=True)  # no offload_to_cpu: see above
        return FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config)


KEEPERS: dict[str, type[Keeper]] = {
    FULLSHARD: FullshardKeeper,
    WRAPPER: FullshardKeeper,
    WRAPPER_FLAT: FullshardKeeper,
    FSDP1: WrappedTorchKeeper,
    FSDP2: TorchKeeper,
}


def digest(tensors: Iterator[Tensor]) -> str:
    """Of every bit of the tensors, and their order. Not by ``Tensor.numpy``: it would forbid to resize the memory."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor.numel():
            dense = tensor.detach().contiguous()
            found.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))
    return found.hexdigest()


@torch.no_grad()
def spoil(tensors: Iterator[Tensor]) -> None:
    """Overwrite them, so that what is read afterwards shows."""
    for tensor in tensors:
        tensor.fill_(7.0)


def load_code(system: str) -> None:
    """Import what saving and loading need: the first call shall not pay for it, nor its memory count."""
    if system in OURS:
        for name in ("fullshard.checkpoint.safetensors.export", "fullshard.checkpoint.safetensors.importing"):
            importlib.import_module(name)


def write_weights(model: nn.Module, path: Path) -> None:
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)


def _write_file(full: dict[str, Tensor], path: Path) -> None:
    if dist.get_rank() == 0:
        save_file(full, path / FILE)


def _read_file(path: Path) -> dict[str, Tensor]:
    return load_file(path / FILE)


def _local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found
