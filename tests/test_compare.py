"""The comparison helpers: each passes on what is equal and fails on every kind of difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from compare import assert_close, assert_equal, assert_models_equal, fqn_of
from ranks import Rank, on_ranks

nan, inf = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.bool, torch.float8_e4m3fn]

Compare = Callable[[object, object, str], None]
closely: Compare = partial(assert_close, rtol=1e-3, atol=1e-6)
both = pytest.mark.parametrize("compare", [assert_equal, closely], ids=["assert_equal", "assert_close"])
VALUES = torch.tensor([[1.0, nan, -inf], [4.0, 5.0, 6.0]])


def changed(index: tuple[int, int], value: float) -> torch.Tensor:
    tensor = VALUES.clone()
    tensor[index] = value
    return tensor


@both
def test_equal_tensors_pass(compare: Compare) -> None:
    """Tensors of any dtype and shape, empty and 0-D ones too, equal their copies, whatever their strides; NaN does NaN.

    One wrong element fails whatever the dtype, and is found.
    """
    for dtype in DTYPES:
        for shape in ((), (0,), (0, 3), (5,), (2, 3)):
            tensor = torch.randint(0, 2, shape).to(dtype)
            compare(tensor, tensor.clone(), "x")
        expected = torch.zeros(2, 3).to(dtype)
        actual = expected.clone()
        actual[1, 2] = 1
        with pytest.raises(AssertionError, match=r"x: 1 of 6 elements differ .* worst at \(1, 2\)"):
            compare(actual, expected, f"{dtype} x")
    compare(VALUES, VALUES.clone(), "x")
    tensor = torch.randn(3, 4).t()
    compare(tensor, tensor.contiguous(), "x")
    with pytest.raises(AssertionError, match="differ"):
        compare(tensor, tensor.t().reshape(4, 3), "x")


WRONG: dict[str, object] = {  # by the message; values show where they differ
    "worst at (1, 2): expected 6.0, got 7.0": changed((1, 2), 7.0),
    "worst at (1, 1): expected 5.0, got nan": changed((1, 1), nan),
    "worst at (0, 1): expected nan, got 2.0": changed((0, 1), 2.0),
    "worst at (0, 2): expected -inf, got inf": changed((0, 2), inf),
    "x: dtype differs: expected torch.float32, got torch.float64": VALUES.double(),
    "x: shape differs: expected torch.Size([2, 3]), got torch.Size([6])": VALUES.view(6),
    "x: device differs: expected cpu, got meta": VALUES.to("meta"),
    "x: expected Tensor(2, 3) of torch.float32 on cpu, got None": None,
    "got a list": VALUES.tolist(),
}


@both
def test_differences_fail(compare: Compare) -> None:
    """One wrong element, NaN and inf included, and another dtype, shape, device or type; the worst element is named."""
    for message, actual in WRONG.items():
        with pytest.raises(AssertionError, match=re.escape(message)):
            compare(actual, VALUES, "x")
    actual = torch.tensor([1.0, 2.5, 30.0, 4.1])
    with pytest.raises(AssertionError, match=r"x: 3 of 4 .*shape \(4,\), .* worst at \(2,\): expected 3.0, got 30.0"):
        compare(actual, torch.tensor([1.0, 2.0, 3.0, 4.0]), "x")


def test_equal_is_bitwise() -> None:
    """The last bit and the sign of zero count for ``assert_equal``, the sign of a NaN does not."""
    one = torch.tensor([1.0])
    with pytest.raises(AssertionError, match=r"expected 1\.0, got 1\.00000011"):
        assert_equal(torch.nextafter(one, torch.tensor([2.0])), one, "x")
    with pytest.raises(AssertionError, match=r"expected 0\.0, got -0\.0"):
        assert_equal(torch.tensor([-0.0]), torch.tensor([0.0]), "x")
    assert_equal(torch.tensor([-nan]), torch.tensor([nan]), "x")
    assert_equal({"a": [VALUES, nan, "b", None]}, {"a": [VALUES.clone(), nan, "b", None]}, "x")


def test_close_keeps_to_its_tolerances() -> None:
    """``assert_close`` allows atol + rtol * |expected| and no more, in float64: no dtype hides a difference."""
    expected = torch.tensor([100.0])
    assert_close(expected + 0.9, expected, "x", rtol=0.01)
    assert_close(expected + 1.4, expected, "x", rtol=0.01, atol=0.5)
    with pytest.raises(AssertionError, match=r"rtol=0\.01, atol=0\b"):
        assert_close(expected + 1.1, expected, "x", rtol=0.01)
    with pytest.raises(AssertionError, match=r"rtol=0\.01, atol=0\.5"):
        assert_close(expected + 1.6, expected, "x", rtol=0.01, atol=0.5)
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_close(torch.tensor([1.0078125]).bfloat16(), torch.ones(1).bfloat16(), "x", rtol=0.007)
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_close(torch.tensor([2**60 + 1]), torch.tensor([2**60]), "x", rtol=0.0)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "x['a'][1]: expected 3, got 2"),
        ({"a": 1}, {"b": 1}, "x: missing ['b'], unexpected ['a']"),
        ([1, 2], [1, 2, 3], "x: expected 3 entries, got 2"),
        ([1, 2], (1, 2), "x: expected a tuple, got a list"),
        (1, 1.0, "x: expected 1.0, got 1"),
        (1.0, nan, "x: expected nan, got 1.0"),
        ({"a": VALUES}, {"a": VALUES + 1}, "x['a']: 4 of 6 elements differ"),
        ({"a": VALUES}, {"a": None}, "x['a']: expected None, got Tensor(2, 3)"),
    ],
)
def test_nested_difference_fails(actual: object, expected: object, message: str) -> None:
    """``assert_equal`` goes through mappings and sequences and names the place of a difference."""
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_equal(actual, expected, "x")


def model_with_gradients() -> nn.Module:
    """Two layers, the second one frozen, and a scalar."""
    torch.manual_seed(1)
    model = nn.Module()
    model.first, model.second = nn.Linear(3, 5), nn.Linear(5, 3).requires_grad_(False)
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.first(torch.randn(4, 3)).sum().mul(model.scale).backward()
    return model


def sharded(model: nn.Module, rank: Rank) -> nn.Module:
    """The same model with its matrices and vectors cut on dim 0, gradients too; the scalar stays plain."""
    for layer in (model.first, model.second):
        for name, parameter in list(layer.named_parameters()):
            cut = nn.Parameter(distribute_tensor(parameter.detach(), rank.mesh, [Shard(0)]), parameter.requires_grad)
            if parameter.grad is not None:
                cut.grad = distribute_tensor(parameter.grad, rank.mesh, [Shard(0)])
            setattr(layer, name, cut)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def widen(model: nn.Module) -> None:
    model.scale = nn.Parameter(model.scale.detach().double())


def rename(model: nn.Module) -> None:
    model.factor = model.scale
    del model.scale


def invent_a_gradient(model: nn.Module) -> None:
    model.second.bias.grad = torch.zeros_like(model.second.bias)


# What makes a difference, by the message; those of gradients only are found if gradients are compared.
DIFFERENCES: dict[str, Callable[[nn.Module], object]] = {
    r"parameter first\.bias: \d of 5 elements differ .*shape \(5,\)": lambda m: local(m.first.bias)[-1:].add_(1),
    r"parameter second\.weight: .* got nan": lambda m: local(m.second.weight)[:1].fill_(nan),
    "parameter scale: dtype differs: expected torch.float32, got torch.float64": widen,
    r"parameters by FQN: missing \['scale'\], unexpected \['factor'\]": rename,
    r"gradient of first\.weight: \d+ of 15 elements": lambda m: local(m.first.weight.grad)[:1].mul_(1.5),
    r"gradient of first\.bias: expected Tensor\(5,\) .*, got None": lambda m: setattr(m.first.bias, "grad", None),
    r"gradient of second\.bias: expected None, got Tensor\(3,\)": invent_a_gradient,
}


@on_ranks(2)
@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_models_are_compared(rank: Rank, tolerance: float) -> None:
    """Equal models pass; each difference fails on every rank and names the FQN, gradients only when asked for."""
    close = {"rtol": tolerance, "atol": tolerance}
    for message, spoil in DIFFERENCES.items():
        for model in (model_with_gradients(), sharded(model_with_gradients(), rank)):
            assert_models_equal(model, model_with_gradients(), grads=True, **close)
            spoil(model)
            if message.startswith("gradient"):
                assert_models_equal(model, model_with_gradients(), **close)
            with pytest.raises(AssertionError, match=message):
                assert_models_equal(model, model_with_gradients(), grads=True, **close)


@on_ranks(2)
def test_difference_on_one_rank_fails_on_all(rank: Rank) -> None:
    """A gradient that is None, or a wrong value, on one rank only is an error on every rank and not a hang."""
    model = sharded(model_with_gradients(), rank)
    if rank.rank == 1:
        model.first.weight.grad = None
    with pytest.raises(AssertionError, match=r"gradient of first\.weight is None on ranks \[1\] of 2 only"):
        assert_models_equal(model, model_with_gradients(), grads=True)
    if rank.rank == 1:
        local(model.first.weight)[0, 0] += 1
    with pytest.raises(AssertionError, match=r"parameter first\.weight: 1 of 15 .* worst at \(3, 0\)"):
        assert_models_equal(model, model_with_gradients())
    with pytest.raises(TypeError, match="x: actual is a DTensor"):  # it would compare local shards
        assert_equal(model.first.weight, torch.ones(5, 3), "x")


def test_names_of_wrappers_are_dropped() -> None:
    """An FQN is the name that a parameter had before any wrapping."""
    assert fqn_of("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b.weight") == "a.b.weight"
    assert fqn_of("_orig_mod.a.bias") == "a.bias"
    model = model_with_gradients()
    assert_models_equal(nn.ModuleDict({"_fsdp_wrapped_module": model}), model)
