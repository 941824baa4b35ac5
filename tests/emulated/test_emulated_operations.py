"""Operations on the emulated accelerator give what the CPU gives, forward and backward."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerator_tools import on_emulated
from torch import nn

from ranks import Rank

Case = tuple[Any, ...]  # a function, then its arguments: tensors, modules or other things


def plain(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cpu", dtype=dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return plain(*shape, dtype=dtype).requires_grad_()


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device="cpu")


def call(module: nn.Module, *arguments: Any) -> Any:
    return module(*arguments)


def made(kind: Callable[..., nn.Module], *arguments: Any, **options: Any) -> nn.Module:
    return kind(*arguments, device="cpu", **options)


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)
    return copy.deepcopy(value).to(device) if isinstance(value, nn.Module) else value


def flat(value: Any) -> list[Any]:
    return [part for item in value for part in flat(item)] if isinstance(value, (tuple, list)) else [value]


def results(case: Case, device: str) -> list[Any]:
    """Outputs and gradients of a case on a device."""
    torch.manual_seed(0)
    function, *given = case
    arguments = [moved(argument, device) for argument in given]
    with torch.device(device):
        outputs = flat(function(*arguments))
    needs = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    if needs:
        sum((output.abs() if output.is_complex() else output.float()).sum() for output in needs).backward()
    for argument in arguments:
        parameters = argument.parameters() if isinstance(argument, nn.Module) else [argument]
        outputs += [p.grad for p in parameters if isinstance(p, torch.Tensor) and p.grad is not None]
    return outputs


def compare(case: Case, exact: bool) -> None:
    """Check that a case gives the same on CPU and device: values to the bit, or nearly, and shapes, dtypes, strides."""
    for ours, theirs in zip(results(case, "emulated"), results(case, "cpu"), strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs
            continue
        assert ours.device.type == "emulated"
        assert (ours.shape, ours.dtype, ours.layout) == (theirs.shape, theirs.dtype, theirs.layout)
        if theirs.is_sparse:  # gradients of embedding bags
            ours, theirs = ours.coalesce().to_dense(), theirs.coalesce().to_dense()
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(
            ours.detach().cpu(), theirs.detach(), equal_nan=True, **({"rtol": 0, "atol": 0} if exact else {})
        )


def layers() -> Iterable[Case]:
    """Modules as models have them, whose kernels take many tensors, and those that torch has several formulas for."""
    yield call, made(nn.Linear, 4, 3), leaf(2, 4)
    yield call, made(nn.Conv2d, 4, 8, 3).to(memory_format=torch.channels_last), leaf(2, 4, 9, 9)
    yield call, made(nn.ConvTranspose2d, 4, 6, 3, stride=2, output_padding=1), leaf(2, 4, 5, 5)
    yield call, made(nn.BatchNorm2d, 4), leaf(3, 4, 5, 5)
    yield call, made(nn.LayerNorm, 8), leaf(3, 8)
    yield F.cross_entropy, leaf(4, 5), whole(5, 4)
    yield call, made(nn.Embedding, 10, 4, padding_idx=1), whole(10, 3, 5)
    yield call, made(nn.EmbeddingBag, 10, 4, sparse=True), whole(10, 3, 5)


def attention() -> Iterable[Case]:
    attend = F.scaled_dot_product_attention
    queries = [leaf(2, 4, 6, 8) for _ in range(3)]
    yield functools.partial(attend, is_causal=True, scale=0.3), *queries
    yield attend, *queries, leaf(6, 6)
    yield attend, *queries, plain(6, 6) > -1
    yield functools.partial(attend, dropout_p=0.3), *queries
    yield attend, *(query.detach() for query in queries)
    yield attend, *(query.detach().bfloat16().requires_grad_() for query in queries)
    yield lambda m, x: m(x, x, x)[0], made(nn.MultiheadAttention, 8, 2, batch_first=True), leaf(2, 5, 8)


def numbers() -> Iterable[Case]:
    """Products, reductions, complex and random numbers."""
    yield torch.matmul, leaf(4, 5, dtype=torch.bfloat16), leaf(5, 6, dtype=torch.bfloat16)
    yield torch.addmm, leaf(6), leaf(4, 5), leaf(5, 6)
    yield functools.partial(torch.einsum, "bij,bkj->bik"), leaf(2, 4, 5), leaf(2, 3, 5)
    yield lambda x: torch.softmax(x, 1), leaf(4, 6)
    yield lambda a, b: a @ b.mH, leaf(3, 4, dtype=torch.cfloat), leaf(5, 4, dtype=torch.cfloat)

    def in_place(value: torch.Tensor) -> torch.Tensor:
        copied = value.clone()
        copied.conj().add_(1)
        copied.imag.mul_(3)
        copied[0].conj().imag.neg().copy_(value[0].real)
        return copied

    yield in_place, leaf(3, 4, dtype=torch.cfloat)
    yield lambda x: F.dropout(x, 0.4), leaf(40)
    yield lambda x: torch.multinomial(x, 5, True), plain(4, 9).abs()
    yield lambda x: torch.randperm(7, device=x.device), plain(1)
    yield lambda x: x.clone().exponential_().normal_(), plain(9)


def shapes() -> Iterable[Case]:
    """Views, indices, orders and lists of tensors."""
    rows = torch.tensor([0, 2], device="cpu")
    yield lambda x: x[x > 0], leaf(4, 5)
    yield lambda x, i: x[i], leaf(4, 5), rows
    yield lambda x: x[..., None, 1:3, ::2], leaf(4, 5, 6)
    yield lambda x: x.nonzero(), plain(4, 5).relu()
    yield lambda x, i, y: x.index_add(0, i, y), leaf(4, 5), rows, leaf(2, 5)
    yield lambda x, i: x.scatter_reduce(0, i, x, "amax"), leaf(3, 3), whole(3, 3, 3)

    def put(value: torch.Tensor) -> torch.Tensor:
        copied = value.clone()
        copied[copied > 0] = 1
        copied[torch.tensor([0, 1], device="cpu")] = 2
        copied[:, 3:] = copied[:, :2]
        return copied

    yield put, leaf(4, 5)
    yield lambda x: torch.unique(x, return_inverse=True, return_counts=True), whole(5, 20)
    yield lambda a, b: torch.cat([a, b], 1), leaf(2, 3), leaf(2, 4)
    yield lambda a: a.split(2, 1), leaf(3, 5)
    yield lambda a: a.as_strided((3, 2), (1, 2)), leaf(8)
    yield lambda a: a.view(torch.int32), plain(4)
    yield lambda a: a.to(torch.float8_e4m3fn).to(torch.float32), plain(4)
    yield lambda a: a.t().contiguous().sum(), plain(0, 3)
    yield lambda a, b: torch._foreach_mul([a, b], [b[:1], a[:1]]), plain(3), plain(4)

    def in_place(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        torch._foreach_add_([a, b], [a.clone(), b.clone()], alpha=2)
        torch._foreach_addcdiv_([a], [a.clone()], [a * 2], 0.5)
        return [a, b]

    yield in_place, plain(3), plain(4)


def composites() -> Iterable[Case]:
    """Cases for which torch has formulas of several operations on devices that it does not know, kernels on the CPU."""
    yield lambda m, x: m(x)[0], made(nn.LSTM, 4, 6, num_layers=2, bidirectional=True), leaf(5, 2, 4)
    yield lambda m, x: m(x)[0], made(nn.LSTM, 4, 6, proj_size=3), leaf(5, 2, 4)
    yield lambda m, x: m(x)[0], made(nn.GRU, 4, 6, num_layers=2), leaf(5, 2, 4)
    yield call, made(nn.GRUCell, 4, 6), leaf(2, 4)
    yield call, made(nn.RMSNorm, 8), leaf(3, 8)
    yield call, made(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True), leaf(2, 5, 8)


@on_emulated(1)
@pytest.mark.parametrize("group", [layers, attention, numbers, shapes, composites])
def test_results_are_those_of_the_cpu(rank: Rank, group: Callable[[], Iterable[Case]]) -> None:
    """Outputs and gradients are those of the CPU, to the bit where both run the same kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        for case in group():
            compare(case, exact=group is not composites)


@on_emulated(1)
def test_autocast(rank: Rank) -> None:
    """Autocast lowers products, keeps sums and losses in fp32 and widens to the widest input."""
    model, value = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("emulated", torch.bfloat16):
        lowered = model(value)
        assert lowered.dtype == torch.bfloat16
        assert (value @ value.t()).dtype == torch.bfloat16
        assert lowered.softmax(0).dtype == torch.float32
        assert F.mse_loss(lowered, lowered).dtype == torch.float32
        assert torch.cat([lowered, value]).dtype == torch.float32
        lowered.float().sum().backward()
    assert model.weight.grad.dtype == torch.float32
    assert model(value).dtype == torch.float32
    scaler = torch.amp.GradScaler("emulated")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
