"""What other parts of PyTorch do to sharded modules: compiling, transforming and saving them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from compare import assert_close, assert_equal
from fullshard import FullshardError, MixedPrecisionPolicy, fully_shard
from ranks import Rank, on_ranks

WIDTH = 12


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).double()


def shard(rank: Rank, model: nn.Sequential) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    return model


def inputs(rank: Rank, step: int, *, everyone: bool = False) -> torch.Tensor:
    batch = torch.randn(rank.world_size, 4, WIDTH, generator=torch.Generator().manual_seed(step)).double()
    return batch.flatten(0, 1) if everyone else batch[rank.rank]


def close(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Require what was computed in fp64 to agree to 1e-5 of each element.

    The reference sums over the batches of all ranks in one matrix product, so that elements differ by some tens of
    rounding errors of their summands. In fp32 that is some 1e-6 of the summands, and more than 1e-5 of an element whose
    summands cancel, which ones do depends on the processor. In fp64 it is 1e-14: they may cancel to 1e-9.
    """
    assert_close(actual, expected, what, rtol=1e-5)


def train(rank: Rank, model: nn.Module, *, everyone: bool = False, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(inputs(rank, step, everyone=everyone)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_compiled_blocks(rank: Rank) -> None:
    """What torch.compile returns can be a unit; it keeps its own class, and the block inside keeps its own."""
    reference, model = build(), build()
    for index, block in enumerate(model):
        model[index] = torch.compile(block, backend="aot_eager")
    shard(rank, model)
    assert type(model[0]).__name__ == "FSDPOptimizedModule" and type(model[0]._orig_mod) is nn.Sequential
    train(rank, model)
    train(rank, reference, everyone=True)
    for sharded, plain in zip(model.parameters(), reference.parameters(), strict=True):
        close(sharded.full_tensor(), plain)


@on_ranks(1, 2)
def test_forward_mode(rank: Rank) -> None:
    """torch.func.jvp goes through a sharded model, before and between training steps."""
    model, reference = shard(rank, build()), build()
    x, tangent = inputs(rank, 0), inputs(rank, 1)
    expected = torch.func.jvp(reference, (x,), (tangent,))
    for actual, wanted in zip(torch.func.jvp(model, (x,), (tangent,)), expected, strict=True):
        close(actual, wanted)
    train(rank, model)
    train(rank, reference, everyone=True)
    close(torch.func.jvp(model, (x,), (tangent,))[1], torch.func.jvp(reference, (x,), (tangent,))[1])


@on_ranks(2)
def test_parameters_can_be_saved_and_copied(rank: Rank) -> None:
    """Sharded parameters, their state dict and copies of them go through torch.save, read back by anyone."""
    model = shard(rank, build())
    for values in (dict(model.named_parameters()), model.state_dict(), copy.deepcopy(model.state_dict())):
        file = io.BytesIO()
        torch.save(values, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert list(loaded) == list(values)
        for name, value in values.items():
            close(loaded[name].to_local(), value.to_local().detach())


@on_ranks(2)
def test_functional_call_does_not_overwrite_the_weights(rank: Rank) -> None:
    """Other tensors in place of the parameters are refused, the model's own are fine, and the weights stay."""
    model, reference = shard(rank, build()), build()
    others = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    with pytest.raises(FullshardError, match=r"0\.0\.weight .* is no nn.Parameter, as torch.func.functional_call"):
        torch.func.functional_call(model, others, (inputs(rank, 0),))
    own = dict(model.named_parameters())
    close(torch.func.functional_call(model, own, (inputs(rank, 0),)), reference(inputs(rank, 0)))
    train(rank, model)
    train(rank, reference, everyone=True)
    for sharded, plain in zip(model.parameters(), reference.parameters(), strict=True):
        close(sharded.full_tensor(), plain)


@on_ranks(2)
def test_second_backward_after_one_that_raised(rank: Rank) -> None:
    """A backward that follows a failed one, without a forward in between, reduces its own gradients."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("on purpose")

    model, reference = shard(rank, build()), build()
    fails = model[2](Fails.apply(model[0](inputs(rank, 0))))
    works = model(inputs(rank, 1)).square().mean()
    with pytest.raises(RuntimeError, match="on purpose"):
        fails.sum().backward()
    works.backward()
    reference(inputs(rank, 1, everyone=True)).square().mean().backward()
    for sharded, plain in zip(model.parameters(), reference.parameters(), strict=True):
        close(sharded.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_policies_may_be_none(rank: Rank) -> None:
    """None for a policy is its default, as where a program sets it by a switch."""
    model, reference = build(), build()
    fully_shard(model, mesh=rank.mesh, mp_policy=None, offload_policy=None)
    fully_shard(reference, mesh=rank.mesh)
    train(rank, model)
    train(rank, reference)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_equal(one.to_local(), other.to_local(), "parameter")


@on_ranks(2)
def test_packed_sequences(rank: Rank) -> None:
    """An RNN as a unit takes a PackedSequence, whose sizes stay on the CPU, and casts only its data."""
    torch.manual_seed(0)
    model = nn.LSTM(WIDTH, WIDTH)
    reference = copy.deepcopy(model).double()
    fully_shard(model, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(torch.float64, output_dtype=torch.float32))
    lengths = torch.tensor([2, 4], device="cpu")  # not sorted: the packed sequence carries the two orders as well
    packed = pack_padded_sequence(
        inputs(rank, 0).float()[:, None].expand(4, 2, WIDTH), lengths, batch_first=False, enforce_sorted=False
    )
    seen: list[PackedSequence] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output, expected = model(packed)[0], reference(packed._replace(data=packed.data.double()))[0]
    (taken,) = seen
    assert taken.data.dtype is torch.float64 and taken.batch_sizes.dtype is torch.int64
    assert taken.batch_sizes.device.type == "cpu"
    assert output.data.dtype is torch.float32
    assert output.batch_sizes.tolist() == [2, 2, 1, 1]
    for name in ("sorted_indices", "unsorted_indices"):
        assert_equal(getattr(output, name), getattr(expected, name), name)
    close(output.data, expected.data.float())
    output.data.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
