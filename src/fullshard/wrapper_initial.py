"""Before a module is sharded: memory and values for what is on the meta device, and rank 0's values for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import value_of
from fullshard.errors import FullshardError
from fullshard.wrapper_options import API

__all__ = ["Initializer", "raise_on_all", "sync_states"]

# Large enough that latency does not count, small enough to be no memory of note beside a model.
BROADCAST_BYTES = 250 * 1024 * 1024


class Initializer:
    """Materialises the modules of a tree unit by unit, and keeps tied parameters tied over it.

    Args:
        root: Of the tree.
        ignored: Modules that are left alone.
    """

    left_out: set[nn.Parameter]  # that units have left to one above them
    _root: nn.Module
    _ignored: set[nn.Module]
    _renamed: dict[nn.Parameter, nn.Parameter]  # what parameters that were on the meta device have become

    def __init__(self, root: nn.Module, ignored: set[nn.Module]) -> None:
        self._root, self._ignored, self._renamed, self.left_out = root, ignored, {}, set()

    def present(self, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
        """The same parameters as objects that modules hold now."""
        return {self._renamed.get(parameter, parameter) for parameter in parameters}

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """These were left to a unit above."""
        self.left_out |= self.present(parameters)

    def materialize(
        self, modules: Collection[nn.Module], init: Callable[[nn.Module], object] | None, device: torch.device
    ) -> None:
        """Give memory and values to what ``modules`` themselves, not those below them, have on the meta device.

        Args:
            modules: Of one unit.
            init: Called with each module that has something there; None: memory and ``reset_parameters()``.
            device: Where.

        Raises:
            ValueError: If a module has no ``reset_parameters``, or something is on the meta device afterwards.
        """
        waiting = [module for module in modules if module not in self._ignored and _on_meta(module)]
        if not waiting:
            return
        holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    holders.setdefault(parameter, []).append((module, name))
        for module in waiting:
            if init is not None:
                init(module)
                continue
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"{API}: {type(module).__name__} has parameters or buffers on the meta device and no "
                    "reset_parameters() to fill them; pass param_init_fn"
                )
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        left = sorted({type(module).__name__ for module in waiting if _on_meta(module)})
        if left:
            raise ValueError(f"{API}: param_init_fn left parameters or buffers of {left} on the meta device")
        self._tie(holders)

    def _tie(self, holders: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> None:
        for old, places in holders.items():
            held = (module._parameters[name] for module, name in places)
            made = next((p for p in held if p is not None and not p.is_meta), None)
            if made is None or made is old:
                continue
            made.requires_grad_(old.requires_grad)
            self._renamed[old] = made
            for module, name in places:
                module._parameters[name] = made


def _on_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def sync_states(
    modules: Iterable[nn.Module], ignored: set[nn.Parameter], others: Iterable[nn.Parameter], mesh: ShardMesh
) -> None:
    """Give all ranks the parameters and buffers that the first one has. A collective.

    Args:
        modules: Theirs, but not those that are ``ignored``.
        ignored: See there.
        others: Parameters of other modules, in the same order on all ranks.
        mesh: The ranks.
    """
    found: dict[int, torch.Tensor] = {id(parameter): value_of(parameter) for parameter in others}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None and parameter not in ignored:
                found[id(parameter)] = value_of(parameter)
        for buffer in module._buffers.values():
            if buffer is not None:
                found[id(buffer)] = buffer
    states = list(found.values())
    # Replicas first: after that, the first rank of every shard group has the very first one's values.
    for part, size in ((mesh.replicate, mesh.replicas), (mesh.shard, mesh.world_size)):
        if part is not None and size > 1 and states:
            _broadcast(states, part.get_group(), mesh.device)


def _broadcast(states: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    sent = [state.to(device).resolve_conj().resolve_neg().contiguous() for state in states]
    # As bytes: back ends do not know every dtype, and so few messages carry all of them.
    data = [state.reshape(-1).view(torch.uint8) for state in sent if state.numel()]
    if not data:
        return
    dist._broadcast_coalesced(group, data, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
    with torch.no_grad():
        for state, received in zip(states, sent, strict=True):
            if received is state:
                continue
            if any(size > 1 and stride == 0 for size, stride in zip(state.shape, state.stride(), strict=True)):
                state.data = received  # expanded: several elements lie in one place
            else:
                state.copy_(received)


def raise_on_all(failure: Exception | None, mesh: ShardMesh) -> None:
    """Raise ``failure`` if there is one, and on the other ranks an error that says so. A collective.

    Raises:
        FullshardError: If another rank has a failure.
    """
    failed = failure is not None
    for part, size in ((mesh.shard, mesh.world_size), (mesh.replicate, mesh.replicas)):
        if part is not None and size > 1:
            flag = torch.tensor([failed], dtype=torch.int32, device=mesh.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=part.get_group())
            failed = bool(flag.item())
    if failure is not None:
        raise failure
    if failed:
        raise FullshardError(f"{API}: the initialisation of a module failed on another rank; see its error")
