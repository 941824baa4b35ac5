"""What PyTorch does to wrapped models: compiling, transforming, copying and saving them."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from earlier_front_ends import (
    CLOSE,
    Language,
    Mlp,
    Stack,
    assert_at_rest,
    assert_same_values,
    batch,
    build,
    full_values,
    square_loss,
    token_loss,
    train,
    train_reference,
    wrapped,
)
from torch import nn

from compare import assert_close, assert_equal
from fullshard import (
    CPUOffload,
    FullshardError,
    FullyShardedDataParallel,
    MixedPrecision,
)
from fullshard.activation_checkpoint import checkpoint_wrapper
from ranks import Rank, on_ranks

both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def with_wrapper(module: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(module, device_mesh=rank.mesh, **options)


# -------------------------------------------------------------------- torch.compile, torch.func


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("what", ["inside", "in place", "around blocks", "around all"])
def test_compiled(rank: Rank, what: str, use_orig_params: bool) -> None:
    """Compiled blocks inside of wrappers, wrapped blocks compiled, and the whole model compiled train right."""
    torch._dynamo.reset()
    reference = build(Stack, 2)
    for block in reference.blocks:
        block.dtypes = _Nowhere()  # a list that grows would compile anew at every call
    model = copy.deepcopy(reference)
    compiled = functools.partial(torch.compile, backend="aot_eager")
    for index, block in enumerate(model.blocks):
        if what == "inside":
            block = compiled(block)
        elif what == "in place":
            block.compile(backend="aot_eager")
        unit = with_wrapper(block, rank, use_orig_params=use_orig_params)
        model.blocks[index] = compiled(unit) if what == "around blocks" else unit
    model = with_wrapper(model, rank, use_orig_params=use_orig_params)
    if what == "around all":
        model = compiled(model)
    losses = train(model, rank, square_loss, 4)
    assert_close(losses, train_reference(reference, rank, square_loss, 4), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


class _Nowhere(list[torch.dtype]):
    def append(self, _: torch.dtype) -> None:
        pass


@on_ranks(2)
@both_modes
def test_functional_call_does_not_overwrite_the_weights(rank: Rank, use_orig_params: bool) -> None:
    """Other tensors in place of the parameters are refused, the model's own are fine, and the weights stay."""
    reference = build(Mlp, 6, 5, 3)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    x = batch(rank.rank, 0, 4, 6)
    others = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(FullshardError, match=r"no nn\.Parameter|instead of a parameter"):
            torch.func.functional_call(model, others, (x,))
    own = dict(model.named_parameters())
    assert_equal(torch.func.functional_call(model, own, (x,)), reference(x), "output")
    assert_equal(model(x), reference(x), "output")
    assert_same_values(model, reference)
    assert_at_rest(model)


# -------------------------------------------------------------------- copies


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("when", ["new", "trained", "offloaded"])
def test_deepcopy(rank: Rank, when: str, use_orig_params: bool) -> None:
    """A copy of a wrapped model trains alone, bit for bit as its original would; the original stays. Gradients are not
    copied, as with plain parameters.
    """
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    if when == "offloaded":
        options["cpu_offload"] = CPUOffload(offload_params=True)
    model = wrapped(build(Language), rank, **options)
    if when == "trained":
        train(model, rank, token_loss, 2)
    before = full_values(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    copied = copy.deepcopy(model)
    assert all(
        p.grad is None and type(p) is type(q) for p, q in zip(copied.parameters(), model.parameters(), strict=True)
    )
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert_same_values(copied, model)
    losses = train(copied, rank, token_loss, 3)
    for name, value in full_values(model).items():
        assert_equal(value, before[name], name)
    assert_equal(losses, train(model, rank, token_loss, 3), "losses")
    assert_same_values(copied, model)
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    assert all(one is not other and (not one.numel() or one.data_ptr() != other.data_ptr()) for one, other in pairs)
    assert_at_rest(copied)


@on_ranks(2)
@both_modes
def test_pickle_is_refused(rank: Rank, use_orig_params: bool) -> None:
    """A wrapped model cannot be pickled: the error says what to save instead."""
    model = wrapped(build(Mlp, 6, 5, 3), rank, use_orig_params=use_orig_params)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(model)
    with pytest.raises(RuntimeError, match="state_dict"):
        torch.save(model, io.BytesIO())
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(nn.Sequential(model))


@on_ranks(2)
@both_modes
def test_average_by_swa_utils(rank: Rank, use_orig_params: bool) -> None:
    """``torch.optim.swa_utils.AveragedModel``, which deep-copies, averages shards."""
    reference = build(Mlp, 6, 5, 3)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    rate = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    averages = [torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=rate) for m in (model, reference)]
    for step in range(3):
        train(model, rank, lambda _, step=step: square_loss(step), 1)
        train_reference(reference, rank, lambda _, step=step: square_loss(step), 1)
        for average, source in zip(averages, (model, reference), strict=True):
            average.update_parameters(source)
    x = batch(0, 0, 4, 6)
    assert_close(averages[0](x), averages[1](x), "output", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
@both_modes
def test_two_models_at_once(rank: Rank, use_orig_params: bool) -> None:
    """Two wrapped models, as a generator and its critic, in one graph and on subgroups of their own."""
    first, second = build(Mlp, 6, 5, 6), build(Stack)
    group = dist.new_group(list(range(rank.world_size)))
    ours = (
        wrapped(first, rank, use_orig_params=use_orig_params),
        wrapped(second, rank, use_orig_params=use_orig_params, process_group=group),
    )

    def losses_of(models: tuple[nn.Module, nn.Module], number: int, step: int) -> torch.Tensor:
        return models[1](models[0](batch(number, step, 4, 6))).square().mean()

    for step in range(3):
        losses_of(ours, rank.rank, step).backward()
        for other in range(rank.world_size):
            (losses_of((first, second), other, step) / rank.world_size).backward()
        for module in (*ours, first, second):
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
            module.zero_grad()
    assert_same_values(ours[0], first, **CLOSE)
    assert_same_values(ours[1], second, **CLOSE)


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_compiled_and_recomputed(rank: Rank, precision: MixedPrecision | None, use_orig_params: bool) -> None:
    """Compiled blocks, recomputed, in units, in mixed precision, equal those that are not compiled."""
    torch._dynamo.reset()
    reference = build(Stack)
    models = []
    for compiled in (True, False):
        model = copy.deepcopy(reference)
        for index, block in enumerate(model.blocks):
            block.dtypes = _Nowhere()
            if compiled:
                block.compile(backend="aot_eager")
            model.blocks[index] = FullyShardedDataParallel(
                checkpoint_wrapper(block),
                device_mesh=rank.mesh,
                use_orig_params=use_orig_params,
                mixed_precision=precision,
            )
        options: dict[str, Any] = {"use_orig_params": use_orig_params, "mixed_precision": precision}
        models.append(FullyShardedDataParallel(model, device_mesh=rank.mesh, **options))
    losses = [train(model, rank, square_loss, 3) for model in models]
    tolerance = CLOSE if precision is None else {"rtol": 2e-2, "atol": 1e-3}
    assert_close(losses[0], losses[1], "losses", **tolerance)
    assert_same_values(*models, **tolerance)


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("frozen", [True, False])
def test_deepcopy_keeps_what_is_frozen(rank: Rank, frozen: bool, use_orig_params: bool) -> None:
    """What was frozen, or unfrozen, after wrapping is so in a copy."""
    reference = build(Mlp, 6, 5, 3)
    reference.layers[0].requires_grad_(frozen)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    for module in (model, reference):
        module.layers[0].requires_grad_(not frozen)
    copied = copy.deepcopy(model)
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
    losses = train(copied, rank, square_loss, 2)
    assert_close(losses, train_reference(reference, rank, square_loss, 2), "losses", **CLOSE)
    assert_same_values(copied, reference, **CLOSE)
