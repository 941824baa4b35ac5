"""What users write into flat parameters and pieces outside of forward is computed with, saved and trained on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from wrapper_models import (
    adam,
    assert_at_rest,
    assert_like,
    assert_trains_alike,
    pieces_of,
    slice_of,
    with_reference,
    wrap,
)

from compare import assert_close, assert_equal
from fullshard import FullshardError, ShardingStrategy
from models import Mlp, Stack, batch, reference_backward, square_loss
from pairwise import pairwise
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
ALL = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


def run(model: nn.Module) -> torch.Tensor:
    return model(batch(7, 0, 3, 5))


def changed(reference: nn.Module, name: str = "layers.0.weight") -> nn.Parameter:
    """Change one parameter of the reference and return it."""
    parameter = reference.get_parameter(name)
    with torch.no_grad():
        parameter.mul_(-2).add_(0.25)
    return parameter


def replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Assign a parameter to the module that holds ``name``."""
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, parameter)


# How this rank's piece of a new value is put into a module. (module, name, piece)
WAYS: dict[str, Callable[[nn.Module, str, torch.Tensor], object]] = {
    "in place": lambda m, name, piece: m.get_parameter(name).data.copy_(piece),
    "data": lambda m, name, piece: setattr(m.get_parameter(name), "data", piece.clone()),
    "parameter": lambda m, name, piece: replace(m, name, nn.Parameter(piece.clone())),
}


@on_ranks(2)
@pairwise(way=WAYS, when=["first", "forward", "step"], strategy=ALL)
def test_new_pieces_count(rank: Rank, way: str, when: str, strategy: ShardingStrategy) -> None:
    """A new piece counts from the next forward on: before the first, after a forward, after a step."""
    model, reference = with_reference(Mlp(5, 7, 3), rank, use_orig_params=True, sharding_strategy=strategy)
    if when == "forward":
        # What a forward with grad keeps for backward is not gathered again for edits in place: as documented.
        with torch.set_grad_enabled(way != "in place"):
            run(model)
    elif when == "step":
        assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, 5), steps=1)
    changed(reference)
    if strategy is ShardingStrategy.NO_SHARD:
        piece = reference.layers[0].weight.detach()
    else:
        piece = pieces_of(list(reference.parameters()), rank)[0]
    WAYS[way](model.module, "layers.0.weight", piece)
    assert_close(run(model), run(reference), "output", 1e-4, 1e-6)
    assert_like(model, reference, rtol=1e-4, atol=1e-6)
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, 5), steps=2)
    assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("way", ["data", "parameter"])
def test_whole_parameters_count(rank: Rank, way: str) -> None:
    """Instead of its piece a rank may assign the whole parameter; its piece is taken out of it."""
    model, reference = with_reference(Mlp(5, 8, 3), rank, use_orig_params=True)
    parameter = changed(reference)
    WAYS[way](model.module, "layers.0.weight", parameter.detach())
    assert_equal(run(model), run(reference), "output")
    assert_like(model, reference)
    assert all(p.dim() == 1 for p in model.parameters())
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, 5), steps=2)


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_new_pieces_are_saved(rank: Rank, way: str) -> None:
    """A state dict, and full parameters on demand, have what was written, also before any forward."""
    model, reference = with_reference(Mlp(5, 7, 3), rank, use_orig_params=True)
    changed(reference, "layers.1.bias")
    piece = pieces_of(list(reference.parameters()), rank)[3]
    WAYS[way](model.module, "layers.1.bias", piece)
    for name, value in model.state_dict().items():
        assert_equal(value, reference.state_dict()[name], name)
    assert_like(model, reference)


@on_ranks(2)
def test_assigned_parameter_is_the_parameter(rank: Rank) -> None:
    """An assigned parameter stays the object that is registered, and optimizers built with it train it."""
    model, reference = with_reference(Mlp(5, 7, 3), rank, use_orig_params=True)
    new = nn.Parameter(pieces_of(list(reference.parameters()), rank)[0].clone())
    model.module.layers[0].weight = new
    run(model)
    assert model.module.layers[0].weight is new
    assert next(model.parameters()) is new
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, 5))


@on_ranks(2)
@pairwise(way=WAYS, strategy=ALL)
def test_new_flat_parameters_count(rank: Rank, way: str, strategy: ShardingStrategy) -> None:
    """The same for visible flat parameters."""
    model, reference = with_reference(Mlp(5, 7, 3), rank, sharding_strategy=strategy)
    changed(reference)
    parameters = list(reference.parameters())
    alone = Rank(0, 1, rank.mesh, rank.group, rank.device)
    new = slice_of(parameters, alone if strategy is ShardingStrategy.NO_SHARD else rank)
    WAYS[way](model.module, "_flat_param", new)
    assert_equal(run(model), run(reference), "output")
    assert_like(model, reference)
    assert len(list(model.parameters())) == 1
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, 5), steps=2)


@on_ranks(2)
@pytest.mark.parametrize("way", ["data", "parameter"])
@BOTH
def test_wrong_shapes_are_refused(rank: Rank, way: str, original: bool) -> None:
    """A new value of another shape raises, naming parameter and shapes; once put right, training goes on."""
    model, reference = with_reference(Mlp(5, 8, 3), rank, use_orig_params=original)
    name = "layers.0.weight" if original else "_flat_param"
    old = model.module.get_parameter(name).detach().clone()
    WAYS[way](model.module, name, torch.zeros(2, 3))
    with pytest.raises(FullshardError, match=r"cannot write back.*(layers\.0\.weight|_flat_param).*\(2, 3\)"):
        run(model)
    with pytest.raises(FullshardError, match="cannot write back"):
        model.state_dict()
    WAYS[way](model.module, name, old)
    assert_equal(run(model), run(reference), "output")
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, 5), steps=2)


@on_ranks(2)
def test_padding_is_dropped(rank: Rank) -> None:
    """What is written to the padding of a flat parameter changes nothing."""
    model, reference = with_reference(Mlp(5, 7, 3), rank)
    (flat,) = model.parameters()
    padding = slice_of([torch.ones_like(p) for p in reference.parameters()], rank) == 0
    assert padding.any()
    with torch.no_grad():
        flat[padding] = float("nan")
    assert_like(model, reference)
    assert_equal(run(model), run(reference), "output")
    square_loss(0, 4, 5)(model, rank.rank).backward()
    assert not flat.grad[padding].any()
    model.zero_grad()
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, 5))


@on_ranks(2)
@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
def test_new_pieces_while_full_ones_are_kept(rank: Rank, strategy: ShardingStrategy) -> None:
    """After a backward without sync, which may leave full parameters for the next forward, new pieces count too."""
    model, reference = with_reference(Stack(1), rank, ["blocks.0"], use_orig_params=True, sharding_strategy=strategy)
    with model.no_sync():
        square_loss()(model, rank.rank).backward()
    for parameter in (*model.parameters(), *reference.parameters()):
        parameter.data = parameter.data.clone() * 2
    model.zero_grad()
    assert_equal(model(batch(0, 3, 4, 6)), reference(batch(0, 3, 4, 6)), "output")
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
def test_assigned_frozen_parameter(rank: Rank) -> None:
    """A new parameter that needs no gradient takes the place of a trained one."""
    model, reference = with_reference(Stack(1), rank, ["blocks.0"], use_orig_params=True)
    first = model.module.first
    first.weight = nn.Parameter(first.weight.detach().clone(), requires_grad=False)
    reference.first.weight.requires_grad_(False)
    assert_trains_alike(model, reference, rank)
    assert first.weight.grad is None


@on_ranks(2)
def test_removed_parameters_are_refused(rank: Rank) -> None:
    """A parameter that was set to None, or deleted, is missed by name."""
    for remove in (lambda of: setattr(of, "bias", None), lambda of: delattr(of, "bias")):
        plain = nn.Linear(5, 3)
        model = wrap(plain, rank, use_orig_params=True)
        remove(plain)
        with pytest.raises(FullshardError, match="bias"):
            run(model)


class Marked(nn.Parameter):
    """A kind of parameter that a user has made."""


@on_ranks(2)
def test_parameters_of_the_users_own_class(rank: Rank) -> None:
    """With original parameters their class stays, as the object does."""
    plain = nn.Linear(6, 3)
    plain.weight = Marked(plain.weight.detach())
    weight = plain.weight
    model, reference = with_reference(plain, rank, use_orig_params=True)
    assert_trains_alike(model, reference, rank)
    assert plain.weight is weight and type(plain.weight) is Marked


@on_ranks(2)
def test_size_of_pieces_is_what_optimizers_hold(rank: Rank) -> None:
    """The state of an optimizer is sharded as the parameters are."""
    model, reference = with_reference(Stack(1), rank, ["blocks.0"], use_orig_params=True)
    optimizer = adam(model.parameters())
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    optimizer.step()
    held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert held == sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in reference.parameters()) * 0.6
    root = [p for name, p in reference.named_parameters() if not name.startswith("blocks")]
    gradients = [p.grad for p in root]
    expected = pieces_of(gradients, rank)
    own = [p for name, p in model.named_parameters() if "blocks" not in name]
    for parameter, gradient in zip(own, expected, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.1 * gradient)
