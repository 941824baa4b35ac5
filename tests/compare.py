"""Comparisons for all tests. Each raises ``AssertionError`` with what differs, where, and both values.

Nothing is converted on the way: shape and dtype have to agree, and so has the place of every NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# Segments that wrappers put into names; an FQN is the name as it was before wrapping.
WRAPPER_SEGMENTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def assert_equal(actual: Any, expected: Any, what: str) -> None:
    """Require bitwise equality of tensors (shape, dtype, every bit), and type and ``==`` of other values.

    Mappings, lists and tuples are compared entry by entry. NaN equals NaN; ``0.0`` and ``-0.0`` differ.
    """
    if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
        _assert_comparable(actual, expected, what)
        _raise_where(~_same_bits(actual, expected), actual, expected, what, "bitwise")
        return
    if type(actual) is not type(expected):
        raise AssertionError(f"{what}: expected {_brief(expected)}, got {_brief(actual)}")
    if isinstance(expected, Mapping):
        _assert_same_keys(actual, expected, what)
        for key in expected:
            assert_equal(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        if len(actual) != len(expected):
            raise AssertionError(f"{what}: expected {len(expected)} entries, got {len(actual)}")
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, f"{what}[{index}]")
    elif not (actual == expected or (actual != actual and expected != expected)):
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, rtol: float, atol: float = 0.0) -> None:
    """Require ``|actual - expected| <= atol + rtol * |expected|``, and equal shape, dtype, NaN and inf."""
    _assert_comparable(actual, expected, what)
    close = torch.isclose(_wide(actual), _wide(expected), rtol=rtol, atol=atol, equal_nan=True)
    _raise_where(~close, actual, expected, what, f"rtol={rtol:g}, atol={atol:g}")


def assert_models_equal(
    model: nn.Module, reference: nn.Module, *, grads: bool = False, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Require every parameter of a sharded model to equal the parameter of a plain module with the same FQN.

    Call it on all ranks: sharded parameters are gathered (``DTensor.full_tensor``), all of them before the
    first comparison, so that a rank that finds a difference leaves no other rank waiting. Tied parameters
    count under each name.

    Args:
        model: sharded, or not; names of wrappers are dropped from its FQNs.
        reference: plain module.
        grads: compare ``.grad`` too; None has to match None, on every rank.
        rtol, atol: tolerances as in ``assert_close``; with both 0 the comparison is bitwise.
    """
    ours, theirs = _parameters(model), _parameters(reference)
    _assert_same_keys(ours, theirs, "parameters by FQN")
    full = {fqn: _full(parameter.detach()) for fqn, parameter in ours.items()}
    full_grads = _full_gradients(ours) if grads else {}
    for fqn, parameter in theirs.items():
        assert_within(full[fqn], parameter.detach(), f"parameter {fqn}", rtol, atol)
    for fqn in theirs if grads else ():
        actual, expected = full_grads[fqn], theirs[fqn].grad
        if (actual is None) != (expected is None):
            raise AssertionError(f"gradient of {fqn}: expected {_brief(expected)}, got {_brief(actual)}")
        if expected is not None:
            assert_within(actual, expected, f"gradient of {fqn}", rtol, atol)


def fqn_of(name: str) -> str:
    """Name of a parameter without the segments that wrappers have put in."""
    for segment in WRAPPER_SEGMENTS:
        name = name.replace(segment, "")
    return name


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {fqn_of(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, where its mesh computes: shards in host memory are gathered on the device."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:
        local = local.to(tensor.device_mesh.device_type)
        tensor = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor()


def _full_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    """Gathered gradients by FQN, after all ranks have agreed which are None, lest gathering them hangs."""
    missing = [fqn for fqn, parameter in parameters.items() if parameter.grad is None]
    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        missing_by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(missing_by_rank, missing)
        for fqn in parameters:
            ranks = [rank for rank, names in enumerate(missing_by_rank) if fqn in names]
            if 0 < len(ranks) < len(missing_by_rank):
                raise AssertionError(f"gradient of {fqn} is None on ranks {ranks} of {len(missing_by_rank)} only")
    full: dict[str, torch.Tensor | None] = {}
    for fqn, parameter in parameters.items():
        full[fqn] = None if fqn in missing else _full(parameter.grad)
    return full


def assert_within(actual: Any, expected: Any, what: str, rtol: float, atol: float) -> None:
    """Require values to be close; equal in every bit without tolerances."""
    if rtol == atol == 0.0:
        assert_equal(actual, expected, what)
    else:
        assert_close(actual, expected, what, rtol, atol)


def _assert_same_keys(actual: Mapping[Any, Any], expected: Mapping[Any, Any], what: str) -> None:
    missing = [key for key in expected if key not in actual]
    unexpected = [key for key in actual if key not in expected]
    if missing or unexpected:
        raise AssertionError(f"{what}: missing {missing}, unexpected {unexpected}")


def _assert_comparable(actual: Any, expected: Any, what: str) -> None:
    for role, value in (("actual", actual), ("expected", expected)):
        if isinstance(value, DTensor):
            raise TypeError(f"{what}: {role} is a DTensor; compare .full_tensor() or .to_local()")
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        raise AssertionError(f"{what}: expected {_brief(expected)}, got {_brief(actual)}")
    for aspect in ("shape", "dtype", "device"):
        found, wanted = getattr(actual, aspect), getattr(expected, aspect)
        if found != wanted:
            raise AssertionError(
                f"{what}: {aspect} differs: expected {wanted}, got {found} "
                f"(expected {_brief(expected)}, got {_brief(actual)})"
            )


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Elementwise: same bits, or NaN both (whose sign and payload mean nothing)."""
    bits = [_bytes_of(tensor) for tensor in (actual, expected)]
    same = (bits[0] == bits[1]).all(dim=-1)
    if not (actual.is_floating_point() or actual.is_complex()):
        return same
    return same | (_wide(actual).isnan() & _wide(expected).isnan())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, as a last dim of a uint8 tensor."""
    # Flattened first: a dim of size 1 may have any stride, which view does not take.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the widest dtype of their kind, in which comparing them loses nothing."""
    if tensor.is_complex():
        return tensor.detach().to(torch.complex128)
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _raise_where(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, what: str, how: str) -> None:
    """Raise if any element is wrong, naming the one that differs most (NaN and inf count as far away)."""
    if not wrong.any():
        return
    distance = (_wide(actual) - _wide(expected)).abs().to(torch.float64)
    distance = torch.where(wrong, distance.nan_to_num(nan=torch.inf), -1.0)
    flat = int(distance.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
    values = f"expected {expected[index].item()!r}, got {actual[index].item()!r}"
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ ({how}); "
        f"shape {tuple(actual.shape)}, {actual.dtype}; worst at {index}: {values}"
    )


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__}{tuple(value.shape)} of {value.dtype} on {value.device}"
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
