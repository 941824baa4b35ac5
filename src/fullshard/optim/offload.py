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
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.parameters.placement import dtensor
from fullshard.engine.parameters.sharded import value_of
from fullshard.memory import CommStream, PendingWork, host_buffer, make_comm_stream
from fullshard.optim.local.localize import local_step_of, localize
from fullshard.optim.local.step import State

__all__ = ["StateOffload", "offload"]

_O = TypeVar("_O", bound=Optimizer)

# Bytes of parameters whose state is copied at a time, at least: what a bus takes milliseconds for.
PART_BYTES = 32 * 2**20


def offload(optimizer: _O, *, pin_memory: bool = True) -> _O:
    """Keep the state of an optimizer in CPU memory, and copy it to the device and back in each step.

    Parameters and gradients stay where they are, and the step is computed on the device with the same results, bit for
    bit. The step is divided into parts: the state of three parts at a time is on the device, only during the step. The
    step takes as long as the copies: in fp32 with Adam 8 bytes per parameter each way. ``step()`` returns when the last
    copy has arrived. State in ``state_dict()`` and ``fullshard.save`` is in CPU memory.

    State of parameters in CPU memory (``CPUOffloadPolicy``, CPU ranks) stays there and is stepped there, as always.
    Scalars such as ``step`` stay where they are. Call it again on a copy of the optimizer.

    Args:
        optimizer: Elementwise optimizer, as for ``fullshard.optim.localize``, with or without state. It is changed in
            place, and localized first if it is not.
        pin_memory: Pin (page-lock) the CPU memory, so that the copies overlap.

    Returns:
        The same optimizer.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``optimizer`` cannot be localized.

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
    if not isinstance(pin_memory, bool):
        raise TypeError(f"offload: pin_memory: expected True or False, found {pin_memory!r}")
    step = local_step_of(optimizer) or local_step_of(localize(optimizer))
    if step is None:
        raise ValueError(
            f"offload: expected an elementwise optimizer, found {type(optimizer).__name__}; for others, offload the "
            "parameters too: offload_policy=CPUOffloadPolicy()"
        )
    if all(parameter.device.type == "cpu" for parameter in _parameters(optimizer)):
        warnings.warn("offload has no effect: all parameters, and so their state, are in CPU memory", stacklevel=2)
    if not isinstance(step.offload, StateOffload):
        step.offload = StateOffload()
        optimizer.register_load_state_dict_post_hook(step.offload.place)
    step.offload.pin_memory = pin_memory
    step.offload.place(optimizer)
    return optimizer


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Part:
    """Some local tensors that are stepped together, and their state while it is on the device."""

    tensors: list[torch.Tensor]
    host: dict[tuple[int, Any], torch.Tensor]  # state in host memory, by the identity of the entries and the name
    work: PendingWork | None  # that copies it to the device, and later back
    leaving: list[torch.Tensor]  # kept alive while a side stream copies them back

    def __init__(self) -> None:
        self.tensors, self.host, self.work, self.leaving = [], {}, None, []

    def elementwise(self, state: State) -> Iterator[tuple[dict[Any, Any], Any, torch.Tensor]]:
        """Yield the entries of each tensor, and the name and value of each elementwise one among them."""
        for tensor in self.tensors:
            entries = state.get(tensor, {})
            for name, entry in _elementwise(entries, tensor):
                yield entries, name, entry

    def finish(self) -> None:
        """Have the current stream wait for the copies that were begun last, and free what they no longer need."""
        if self.work is not None:
            self.work.wait()
        self.work, self.leaving = None, []


class StateOffload:
    """Keeps state of one optimizer in host memory, see [Note: Streamed optimizer state]."""

    pin_memory: bool
    streams: dict[torch.device, tuple[CommStream, CommStream]]  # that copy to the device, and to the host

    def __init__(self) -> None:
        self.pin_memory, self.streams = True, {}

    def place(self, optimizer: Optimizer) -> None:
        """Move the state of parameters on a device to host memory."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter in _parameters(optimizer):
                if parameter.device.type not in ("cpu", "meta"):
                    entries = optimizer.state.get(parameter, {})
                    for name, entry in _elementwise(entries, parameter):
                        if entry.device.type != "cpu":
                            entries[name] = self._on_host(entry)
                            value_of(entries[name]).copy_(value_of(entry))

    def _on_host(self, entry: torch.Tensor) -> torch.Tensor:
        """Allocate host memory for an entry of the state, with its strides."""
        local = value_of(entry)
        memory = host_buffer(local.numel(), local.dtype, pin=self.pin_memory)
        return _like(entry, memory.as_strided(local.shape, torch.empty_like(local, device="meta").stride()))

    # ---------------------------------------------------------------- a step

    def divide(self, tensors: Iterable[torch.Tensor], state: State) -> Iterator[set[int]]:
        """Yield the ids of all local tensors, in parts; ``state`` of each is on the device meanwhile."""
        by_device: dict[torch.device, list[_Part]] = {}
        on_host = set()
        for tensor in tensors:
            if tensor.device.type in ("cpu", "meta"):
                on_host.add(id(tensor))
                continue
            parts = by_device.setdefault(tensor.device, [])
            if not parts or sum(each.nbytes for each in parts[-1].tensors) >= PART_BYTES:
                parts.append(_Part())
            parts[-1].tensors.append(tensor)
        if on_host or not by_device:
            yield on_host
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
        found = [each for each in part.elementwise(state) if each[2].device.type == "cpu"]
        copies: list[torch.Tensor] = []

        def allocate() -> None:
            copies.extend(torch.empty_like(value_of(entry), device=device) for _, _, entry in found)

        def copy() -> None:
            for there, (_, _, entry) in zip(copies, found, strict=True):
                there.copy_(value_of(entry), non_blocking=True)

        with torch.inference_mode(False), torch.no_grad():
            part.work = stream.issue(list, copy, allocate=allocate)
        for there, (entries, name, entry) in zip(copies, found, strict=True):
            part.host[id(entries), name] = entry
            entries[name] = _like(entry, there)

    def _store(self, part: _Part, state: State, stream: CommStream) -> None:
        """Begin to copy the state of a part, which has been stepped, to host memory: where it was, or to new memory."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entries, name, entry in part.elementwise(state):
            if entry.device.type != "cpu":
                host = part.host.get((id(entries), name))
                if host is None or host.dtype is not entry.dtype:
                    host = self._on_host(entry)
                entries[name] = host
                pairs.append((value_of(host), value_of(entry)))

        def copy() -> None:
            for host, local in pairs:
                host.copy_(local, non_blocking=True)

        with torch.inference_mode(False), torch.no_grad():
            part.work, part.leaving = stream.issue(list, copy), [local for _, local in pairs]


def _like(entry: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return dtensor(local, entry._spec) if isinstance(entry, DTensor) else local


def _elementwise(entries: Any, parameter: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    """Return the entries of the state of a parameter that are not empty and have the parameter's shape."""
    shape = value_of(parameter).shape
    return [
        (name, entry)
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
        if isinstance(entry, torch.Tensor)
        and entry.dim()
        and isinstance(entry, DTensor) == isinstance(parameter, DTensor)
        and value_of(entry).shape == shape
        and value_of(entry).numel()
    ]
