"""Initialize a module before it is sharded: materialize meta tensors, and broadcast rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.mesh import ShardMesh
from fullshard.ranks.groups import data_parallel_groups
from fullshard.wrapper.options import API

__all__ = ["Initializer", "sync_states"]

# Large enough to hide latency, small enough for memory.
BROADCAST_BYTES = 250 * 1024 * 1024


class Initializer:
    """Materializes the modules below ``root`` unit by unit, except ignored ones, and keeps tied parameters tied."""

    ignored_modules: set[nn.Module]
    ignored_parameters: set[nn.Parameter]  # as they were before any was materialized
    unclaimed: set[nn.Parameter]  # parameters that nested units left to an ancestor
    _root: nn.Module
    _replacements: dict[nn.Parameter, nn.Parameter]  # meta parameter -> the parameter that replaced it

    def __init__(self, root: nn.Module, ignored_modules: set[nn.Module], ignored_parameters: set[nn.Parameter]) -> None:
        self.ignored_modules, self.ignored_parameters = ignored_modules, ignored_parameters
        self._root, self._replacements, self.unclaimed = root, {}, set()

    def current(self, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
        """Return the parameter objects that modules hold now for these parameters."""
        return {self._replacements.get(parameter, parameter) for parameter in parameters}

    def add_unclaimed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record parameters that a nested unit left to an ancestor."""
        self.unclaimed |= self.current(parameters)

    def materialize(
        self, modules: Collection[nn.Module], init: Callable[[nn.Module], object] | None, device: torch.device
    ) -> None:
        """Allocate and initialize the meta tensors of ``modules`` themselves, not of their children.

        ``init`` is called with each module that has meta tensors. None: allocate them on ``device``, and call the
        module's ``reset_parameters()``.

        Raises:
            ValueError: If a module has no ``reset_parameters``, or still has meta tensors afterwards.
        """
        waiting = [module for module in modules if _on_meta(module)]
        if not waiting or device.type == "meta":
            return
        owners_by_parameter: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    owners_by_parameter.setdefault(parameter, []).append((module, name))
        for module in waiting:
            if init is not None:
                init(module)
                continue
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"{API}: {type(module).__name__} has parameters or buffers on the meta device and no "
                    "reset_parameters() to initialize them; pass param_init_fn"
                )
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        left = sorted({type(module).__name__ for module in waiting if _on_meta(module)})
        if left:
            raise ValueError(
                f"{API}: param_init_fn left parameters or buffers of {left} on the meta device; it has to allocate and "
                "initialize all of them, for example with module.to_empty(device=..., recurse=False)"
            )
        self._tie(owners_by_parameter)

    def _tie(self, owners_by_parameter: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> None:
        for old, owners in owners_by_parameter.items():
            held = (module._parameters[name] for module, name in owners)
            replacement = next((p for p in held if p is not None and not p.is_meta), None)
            if replacement is None or replacement is old:
                continue
            replacement.requires_grad_(old.requires_grad)
            self._replacements[old] = replacement
            for module, name in owners:
                module._parameters[name] = replacement


def _on_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def sync_states(
    modules: Iterable[nn.Module], ignored: set[nn.Parameter], others: Iterable[nn.Parameter], mesh: ShardMesh
) -> None:
    """Broadcast parameters and buffers of the first rank of ``mesh`` to all ranks. A collective.

    Sends those of ``modules`` themselves, except ``ignored`` ones, and ``others``, in the same order on all ranks.
    """
    # Not detached: an expanded tensor gets other memory, which a detached alias would keep for itself.
    found: dict[int, torch.Tensor] = {id(parameter): _local(parameter) for parameter in others}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None and parameter not in ignored:
                found[id(parameter)] = _local(parameter)
        for buffer in module._buffers.values():
            if buffer is not None:
                found[id(buffer)] = buffer
    states = list(found.values())
    # Replicas first: then the first rank of every shard group has the first rank's values.
    for group in reversed(data_parallel_groups(mesh)):
        _broadcast(states, group, mesh.device)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def _broadcast(states: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    sent = [state.to(device).resolve_conj().resolve_neg().contiguous() for state in states]
    # As bytes: back ends do not support every dtype, and it needs few messages.
    data = [state.reshape(-1).view(torch.uint8) for state in sent if state.numel()]
    if not data:
        return
    dist._broadcast_coalesced(group, data, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
    for state, received in zip(states, sent, strict=True):
        if received is state:
            continue
        if any(size > 1 and stride == 0 for size, stride in zip(state.shape, state.stride(), strict=True)):
            state.data = received.to(state.device)  # expanded: elements share memory
        else:
            state.copy_(received)
