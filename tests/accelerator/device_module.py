"""``torch.emulated``: what ``torch.get_device_module`` returns for the emulated accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from accelerator.native import native

DEVICES: int = native.device_count()
Event = torch.Event
Stream = torch.Stream


def _index(device: Any = None) -> int:
    if device is None:
        return int(torch.accelerator.current_device_index())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.accelerator.current_device_index()) if index is None else index


def is_available() -> bool:
    return True


is_initialized = is_available


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return _index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # a context manager of its own


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def memory_allocated(device: Any = None) -> int:
    return native.memory(_index(device))["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    return native.memory(_index(device))["peak_allocated"]


def memory_reserved(device: Any = None) -> int:
    return native.memory(_index(device))["reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def is_current_stream_capturing() -> bool:
    return bool(native.is_capturing())


def get_rng_state(device: Any = None) -> torch.Tensor:
    return native.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    native.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    native.default_generator(_index()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        native.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return int(native.default_generator(_index()).initial_seed())


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
