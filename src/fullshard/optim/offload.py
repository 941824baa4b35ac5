"""Optimizer state in host memory, while parameters and gradients stay on the device.

[Note: Streamed optimizer state]
The optimizer steps on the device as it always does, but in parts. While one part is stepped, the state of the next one
is copied to the device, and the state of the one before back to the host, on two side streams. So the state of three
parts is on the device at a time, during the step only, and the arithmetic is the same bit for bit.

The alternative was to step copies of the shards on the host. It needs memory on the host for these copies and for the
gradients, and its arithmetic differs in the last bits. Adam in fp32 then moves 28 bytes per parameter through the
memory of the host, where this moves 8 bytes each way over the bus. It could only hide the copies of gradients behind
backward, not the step.

The host waits for the last copy: state may be read or saved as soon as ``step()`` returns.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.parameters.placement import dtensor
from fullshard.engine.parameters.sharded import managed_by, value_of
from fullshard.engine.unit import unit_owning
from fullshard.memory import CommStream, PendingWork, host_buffer, make_comm_stream
from fullshard.optim.local.localize import local_step_of, localize
from fullshard.optim.local.step import State

__all__ = ["StateOffload", "offload"]

_O = TypeVar("_O", bound=Optimizer)

# Bytes of parameters whose state is copied at a time, at least: what a bus takes milliseconds for.
PART_BYTES = 32 * 2**20


def offload(optimizer: _O, fraction: float = 1.0, *, pin_memory: bool = True) -> _O:
    """Keep the state of an optimizer in CPU memory, and copy it to the device and back in each step.

    Parameters and gradients stay where they are, and the step is computed on the device with the same results, bit for
    bit. The step is divided into parts: the state of three parts at a time is on the device, only during the step. The
    step takes as long as the copies: in fp32 with Adam 8 bytes per parameter each way. ``step()`` returns when the last
    copy has arrived. State in ``state_dict()`` and ``fullshard.save`` is in CPU memory.

    State of parameters in CPU memory (``CPUOffloadPolicy``, CPU ranks) stays there and is stepped there, as always.
    Scalars such as ``step`` stay where they are. Call it again to change the fraction, and on a copy of the optimizer.

    Args:
        optimizer: Elementwise optimizer, as for ``fullshard.optim.localize``, with or without state. It is changed in
            place, and localized first if it is not.
        fraction: Share of the state to offload, from 0 (none) to 1 (all): that of whole units, spread evenly.
        pin_memory: Pin (page-lock) the CPU memory, so that the copies overlap.

    Returns:
        The same optimizer.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``fraction`` is not between 0 and 1, or ``optimizer`` cannot be localized.

    Warns:
        UserWarning: If all parameters are in CPU memory, where their state is already.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import fully_shard
        from fullshard.optim import offload

        model = fully_shard(nn.Linear(16, 16))
        optimizer = offload(torch.optim.AdamW(model.parameters(), lr=1e-3))
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        ```
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"offload: fraction: expected a number, found {fraction!r}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"offload: fraction: expected a number from 0 to 1, found {fraction!r}")
    if not isinstance(pin_memory, bool):
        raise TypeError(f"offload: pin_memory: expected True or False, found {pin_memory!r}")
    step = local_step_of(optimizer) or local_step_of(localize(optimizer))
    if step is None:
        raise ValueError(
            f"offload: expected an elementwise optimizer, found {type(optimizer).__name__}; for others, offload the "
            "parameters too: offload_policy=CPUOffloadPolicy()"
        )
    if fraction and all(parameter.device.type == "cpu" for parameter in _parameters(optimizer)):
        warnings.warn("offload has no effect: all parameters, and so their state, are in CPU memory", stacklevel=2)
    state = step.offload
    if not isinstance(state, StateOffload):
        state = step.offload = StateOffload(optimizer)
        optimizer.register_load_state_dict_post_hook(state.place)
    state.fraction, state.pin_memory = float(fraction), pin_memory
    state.place(optimizer)
    return optimizer


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Part:
    """Some local tensors that are stepped together, and their state while it is on the device."""

    tensors: list[torch.Tensor]
    homes: dict[tuple[int, Any], torch.Tensor]  # state in host memory, by the identity of the entries and the name
    work: PendingWork | None  # that copies it to the device, and later back
    leaving: list[torch.Tensor]  # what is being copied back

    def __init__(self) -> None:
        self.tensors, self.homes, self.work, self.leaving = [], {}, None, []

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def finish(self) -> None:
        """Have the current stream wait for the copies that were begun last, and free what they no longer need."""
        if self.work is not None:
            self.work.wait()
        self.work, self.leaving = None, []


class StateOffload:
    """Keeps state of one optimizer in host memory, see [Note: Streamed optimizer state]."""

    fraction: float
    pin_memory: bool
    streams: dict[torch.device, tuple[CommStream, CommStream]]  # that copy to the device, and to the host
    _optimizer: weakref.ref[Optimizer]
    _choice: tuple[list[int], float, set[int]]  # parameters, fraction, and those whose state is offloaded, by id

    def __init__(self, optimizer: Optimizer) -> None:
        self.fraction, self.pin_memory, self.streams = 0.0, True, {}
        self._optimizer, self._choice = weakref.ref(optimizer), ([], 0.0, set())

    # ---------------------------------------------------------------- what is where

    def _chosen(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of the parameters whose state is offloaded: those of every so many units."""
        parameters = _parameters(optimizer)
        ids = list(map(id, parameters))
        if self._choice[:2] == (ids, self.fraction):
            return self._choice[2]
        units: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.device.type not in ("cpu", "meta"):
                managed = managed_by(parameter)
                unit = None if managed is None else unit_owning(managed)
                units.setdefault(id(unit or parameter), []).append(parameter)
        chosen: set[int] = set()
        seen = moved = 0
        for members in units.values():
            size = sum(parameter.numel() * parameter.itemsize for parameter in members)
            seen += size
            if moved + size <= self.fraction * seen:
                moved += size
                chosen.update(map(id, members))
        self._choice = ids, self.fraction, chosen
        return chosen

    def place(self, optimizer: Optimizer) -> None:
        """Move state that there is to where it belongs."""
        chosen = self._chosen(optimizer)
        with torch.inference_mode(False), torch.no_grad():
            for parameter in _parameters(optimizer):
                entries = optimizer.state.get(parameter)
                if not isinstance(entries, dict) or parameter.device.type in ("cpu", "meta"):
                    continue
                target = torch.device("cpu") if id(parameter) in chosen else parameter.device
                for name, entry in list(entries.items()):
                    if _is_elementwise_entry(entry, parameter) and entry.device.type != target.type:
                        entries[name] = _like(entry, value_of(entry).to(target))

    # ---------------------------------------------------------------- a step

    def divide(self, parameters: Mapping[torch.Tensor, torch.Tensor], state: State) -> Iterator[set[int]]:
        """Yield the ids of all local tensors, in parts; ``state`` of each is on the device meanwhile."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer is stepping"
        chosen, rest = self._chosen(optimizer), []
        by_device: dict[torch.device, list[_Part]] = {}
        for tensor, parameter in parameters.items():
            if id(parameter) not in chosen:
                _bring_to_device(tensor, state)
                rest.append(tensor)
                continue
            parts = by_device.setdefault(tensor.device, [])
            if not parts or parts[-1].nbytes >= PART_BYTES:
                parts.append(_Part())
            parts[-1].tensors.append(tensor)
        if rest or not by_device:
            yield set(map(id, rest))
        for device, parts in by_device.items():
            yield from self._stream(parts, device, state)

    def _stream(self, parts: list[_Part], device: torch.device, state: State) -> Iterator[set[int]]:
        if device not in self.streams:
            self.streams[device] = make_comm_stream(device), make_comm_stream(device)
        to_device, to_host = self.streams[device]
        try:
            self._fetch(parts[0], device, state, to_device)
            for stored, part, after in zip([None, None, *parts], parts, [*parts[1:], None], strict=False):
                if stored is not None:  # the last but one, whose copies went beside the last one's step
                    stored.finish()
                if after is not None:
                    self._fetch(after, device, state, to_device)
                part.finish()
                yield set(map(id, part.tensors))
                self._store(part, state, to_host)
        finally:  # if a step raises, state is left where it is then; the next step moves it
            for part in parts:
                part.finish()
            to_host.synchronize()

    def _fetch(self, part: _Part, device: torch.device, state: State, stream: CommStream) -> None:
        """Begin to copy the state of a part to the device, as far as it is in host memory."""
        found = [
            (entries, name, entry)
            for tensor in part.tensors
            for entries in (state.get(tensor, {}),)
            for name, entry in entries.items()
            if _is_elementwise_entry(entry, tensor) and entry.device.type == "cpu"
        ]
        copies: list[torch.Tensor] = []

        def allocate() -> None:
            copies.extend(torch.empty_like(value_of(entry), device=device) for _, _, entry in found)

        def copy() -> None:
            for there, (_, _, entry) in zip(copies, found, strict=True):
                there.copy_(value_of(entry), non_blocking=True)

        with torch.inference_mode(False), torch.no_grad():
            part.work = stream.issue(list, copy, allocate=allocate)
        for there, (entries, name, entry) in zip(copies, found, strict=True):
            part.homes[id(entries), name] = entry
            entries[name] = _like(entry, there)

    def _store(self, part: _Part, state: State, stream: CommStream) -> None:
        """Begin to copy the state of a part, which has been stepped, to host memory: where it was, or to new memory."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in part.tensors:
            entries = state.get(tensor, {})
            for name, entry in entries.items():
                if not _is_elementwise_entry(entry, tensor) or entry.device.type == "cpu":
                    continue
                local, home = value_of(entry), part.homes.get((id(entries), name))
                if (
                    home is None
                    or home.dtype is not local.dtype
                    or (self.pin_memory and not value_of(home).is_pinned())
                ):
                    memory = host_buffer(local.numel(), local.dtype, pin=self.pin_memory)
                    home = _like(entry, memory.as_strided(local.shape, torch.empty_like(local, device="meta").stride()))
                entries[name] = home
                pairs.append((value_of(home), local))

        def copy() -> None:
            for home, local in pairs:
                home.copy_(local, non_blocking=True)

        with torch.inference_mode(False), torch.no_grad():
            part.work, part.leaving = stream.issue(list, copy), [local for _, local in pairs]


def _bring_to_device(tensor: torch.Tensor, state: State) -> None:
    """Move state that stays on the device there, if something else has put it on the host, such as a load."""
    device, entries = tensor.device, state.get(tensor, {})
    for name, entry in entries.items():
        if device.type != "cpu" and _is_elementwise_entry(entry, tensor) and entry.device.type == "cpu":
            entries[name] = _like(entry, value_of(entry).to(device))


def _like(entry: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return dtensor(local, entry._spec) if isinstance(entry, DTensor) else local


def _is_elementwise_entry(entry: Any, parameter: torch.Tensor) -> bool:
    """True if an entry of the state of a parameter has one element for each of the parameter's, and any."""
    if (
        not isinstance(entry, torch.Tensor)
        or not entry.dim()
        or isinstance(entry, DTensor) != isinstance(parameter, DTensor)
    ):
        return False
    return value_of(entry).shape == value_of(parameter).shape and value_of(entry).numel() > 0
