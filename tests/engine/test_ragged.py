"""``layout="ragged"``: one slice of all parameters of a unit per rank, and parameters that are RaggedDTensors.

That it trains as the other front ends do, and is saved and loaded as they are, is tested where theirs is.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as torch_tensors
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from checkpoint.kinds import shared_folder
from compare import assert_close, assert_equal
from front_ends import RAGGED, assert_same_values, assert_trains_alike, build, full_gradients, sharded_with_reference
from fullshard import CommQuantization, fully_shard
from fullshard.comm import record
from fullshard.engine.buckets.formats import added_layouts
from fullshard.engine.ownership import nested_units
from fullshard.optim import Muon
from fullshard.optim.local.localize import stepping_dtensors
from fullshard.ragged import RaggedDTensor, RaggedShard
from models import Mlp, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks

GRANULARITIES = ("element", "row", 2, "parameter")


def sharded(rank: Rank, granularity: Any = "element", *sizes: int, **options: Any) -> tuple[Any, Any]:
    """A model of uneven layers, sharded, and an unsharded copy."""
    model = build(Mlp, *(sizes or (6, 7, 15, 5)))
    return sharded_with_reference(RAGGED, rank, model, granularity=granularity, **options)


@on_ranks(1, 3)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_parameters(rank: Rank, granularity: Any) -> None:
    """They have global shapes, this rank's part in memory, and all values on request; parts add up."""
    model, reference = sharded(rank, granularity)
    for ours, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours, RaggedDTensor) and isinstance(ours, nn.Parameter) and ours.requires_grad
        assert (ours.shape, ours.stride(), ours.device_mesh) == (whole.shape, whole.stride(), rank.mesh)
        assert_equal(ours.full_tensor().detach(), whole.detach(), "full")
        local, placement = ours.to_local().detach(), ours.placements[0]
        assert isinstance(placement, RaggedShard) and pickle.loads(pickle.dumps(placement)) == placement
        if granularity != "element" or whole.dim() == 1 or rank.world_size == 1:
            assert local.shape[1:] == whole.shape[1:]
        parts = [placement.view(each).shape for each in range(rank.world_size)]
        assert tuple(local.shape) == parts[rank.rank]
        assert sum(torch.Size(part).numel() for part in parts) == whole.numel()
        assert granularity != "parameter" or sorted(torch.Size(p).numel() for p in parts)[-1] == whole.numel()
        assert_equal(ours.redistribute(placements=[Replicate()]).to_local().detach(), whole.detach(), "replicated")
        chunk = whole.detach().chunk(rank.world_size)
        found = ours.redistribute(placements=[Shard(0)]).to_local().detach()
        assert_equal(found, chunk[rank.rank] if rank.rank < len(chunk) else whole.detach()[:0], "redistributed")
        assert "RaggedShard" in repr(ours)


@on_ranks(3)
def test_operations(rank: Rank) -> None:
    """Elementwise ones, reductions and random ones give what they give of the whole tensor."""
    model, reference = sharded(rank, "element")
    ours = [parameter.detach() for parameter in model.parameters()]
    whole = [parameter.detach() for parameter in reference.parameters()]
    ones = torch.ones_like(whole[0])
    replicated = DTensor.from_local(ones, rank.mesh, [Replicate()])
    for name, operation in {
        "functions": lambda t: (t.exp() * 2 + t).to(torch.float64),
        "whole operand": lambda t: t + (replicated if isinstance(t, DTensor) else ones),
        "plain operand": lambda t: torch.where(t > 0, t, ones),
        "number": lambda t: t * torch.tensor(3.0),
        "in place": lambda t: t.clone().mul_(2).add_(t),
        "copy": lambda t: torch.zeros_like(t).copy_(ones),
        "view": lambda t: t.clone().view(t.shape),
        "random": lambda t: (torch.manual_seed(7), nn.init.trunc_normal_(t.clone(), std=0.5))[1],
        "uniform": lambda t: (torch.manual_seed(7), nn.init.kaiming_uniform_(t.clone(), a=2.0))[1],
        "drawn": lambda t: (torch.manual_seed(7), torch.rand_like(t))[1],
    }.items():
        assert_equal(operation(ours[0]).full_tensor(), operation(whole[0]), name)
    for name, reduction in {
        "sum": lambda t: t.sum(),
        "mean": lambda t: t.mean(),
        "norm": lambda t: t.norm(),
        "norm of 3": lambda t: torch.linalg.vector_norm(t, 3.0),
        "largest": lambda t: t.max(),
        "smallest": lambda t: t.abs().amin(),
        "any": lambda t: (t > 0.3).any(),
        "all": lambda t: (t < 9).all(),
        "norm of infinity": lambda t: torch.linalg.vector_norm(t, float("inf")),
    }.items():
        for mine, expected in zip(ours, whole, strict=True):
            found = reduction(mine).full_tensor()
            assert found.dtype == reduction(expected).dtype
            assert_close(found.double(), reduction(expected).double(), name, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours[0], ours[0].clone()) and not torch.equal(ours[0], ours[0] + 1)
    assert (
        torch.equal(whole[0], ours[0]) and not torch.equal(whole[0] + 1, ours[0]) and not torch.equal(ours[0], ones[0])
    )
    assert ours[0].new_zeros(7, 6).placements == ours[0].placements and ours[0].new_ones(2).shape == (2,)
    for position in (0, -1):  # of the first and the last rank
        broken = whole[0].clone()
        broken.view(-1)[position] = float("nan")
        found = ours[0].clone().copy_(broken)
        for reduction in (torch.max, torch.min, lambda t: torch.linalg.vector_norm(t, float("inf"))):
            assert reduction(found).full_tensor().isnan()
    norms = torch._foreach_norm(ours)
    for found, expected in zip(norms, torch._foreach_norm(whole), strict=True):
        assert_close(found.full_tensor(), expected, "norms", rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_what_is_refused(rank: Rank) -> None:
    """What needs other elements than those at its place raises, and says what to do; nothing is computed silently."""
    model, _ = sharded(rank, "row")
    weight, other = model.layers[0].weight.detach(), model.layers[1].weight.detach()
    for refused in (
        lambda: weight.t(),
        lambda: weight.view(-1),
        lambda: weight @ torch.ones(6, 2),
        lambda: weight[0],
        lambda: weight.softmax(0),
        lambda: weight.sum(0),
        lambda: torch.cat([weight, weight]),
        lambda: weight + torch.ones(6),
        lambda: weight + other,
        lambda: weight.redistribute(placements=other.placements),
        lambda: torch.normal(weight, 0.1),
        lambda: torch.bernoulli(weight.sigmoid()),
        lambda: weight.clone().bernoulli_(weight.sigmoid()),
        lambda: torch.linalg.vector_norm(weight, keepdim=True),
        lambda: weight.as_strided(weight.shape, weight.stride(), 3),
        lambda: torch._foreach_max([weight]),
    ):
        with pytest.raises(NotImplementedError, match=r"full_tensor|found shapes"):
            refused()
    with pytest.raises(NotImplementedError, match="found a DTensor beside a RaggedDTensor"):
        torch._foreach_add_([weight.unsharded()], [weight])


@on_ranks(2)
def test_tensors_of_other_placements(rank: Rank) -> None:
    """A ragged tensor added to, or copied into, another tensor is all-gathered; the other tensor is what changes."""
    model, reference = sharded(rank)
    weight, whole = model.layers[0].weight.detach(), reference.layers[0].weight.detach()
    for placement in (Replicate(), Shard(0)):
        target = DTensor.from_local(torch.ones(7, 6), rank.mesh, [Replicate()]).redistribute(placements=[placement])
        target.add_(weight)
        assert_equal(target.full_tensor(), whole + 1, f"added to {placement}")
        target.copy_(weight)
        assert_equal(target.full_tensor(), whole, f"copied to {placement}")
    cut = DTensor.from_local(whole, rank.mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    assert_equal((weight + cut).full_tensor(), whole + whole, "sum")
    partial = DTensor.from_local(whole, rank.mesh, [Partial()])
    assert_equal((weight + partial).full_tensor(), whole + 2 * whole, "partial")


@on_ranks(2)
def test_what_is_written_to(rank: Rank) -> None:
    """A result, or state of an optimizer, that lies otherwise than the parameter is written to, or refused."""
    model, reference = sharded(rank)
    weight, whole = model.layers[0].weight.detach(), reference.layers[0].weight.detach()
    rows = fully_shard(build(Mlp, 6, 7, 15, 5), mesh=rank.mesh, layout="ragged", granularity="row")
    target = rows.layers[0].weight.detach()
    assert target.placements != weight.placements
    torch.add(weight, 1, out=target)
    assert_equal(target.full_tensor(), whole + 1, "out")
    plain = torch.optim.Adam(reference.parameters(), fused=True)
    square_loss(0)(reference, 0).backward()
    plain.step()
    cut = fully_shard(build(Mlp, 6, 7, 15, 5), mesh=rank.mesh)
    for trained, message in ((model, "no placements that is written to"), (cut, "mixed torch.Tensor and DTensor")):
        optimizer = torch.optim.Adam(trained.parameters(), fused=True)
        optimizer.load_state_dict(plain.state_dict())  # whole tensors
        square_loss(0)(trained, rank.rank).backward()
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    for parameter in model.parameters():  # a rank without elements, too
        torch.save(parameter, io.BytesIO())


@on_ranks(2)
def test_units_of_both_layouts(rank: Rank) -> None:
    """They are clipped, scaled and stepped together, also beside a plain parameter."""
    model = build(Mlp, 6, 7, 15, 5)
    reference = copy.deepcopy(model)
    ignored = {model.layers[2].bias}
    fully_shard(model.layers[0], mesh=rank.mesh, layout="ragged")
    fully_shard(model, mesh=rank.mesh, ignored_params=ignored)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    loss = square_loss(0)
    scaler.scale(loss(model, rank.rank)).backward()
    reference_backward(reference, rank.world_size, loss)
    scaler.unscale_(optimizer)
    gradients = [p.grad for p in model.parameters() if p not in ignored]
    expected = [p.grad for name, p in reference.named_parameters() if name != "layers.2.bias"]
    for foreach in (True, False):
        norm = nn.utils.get_total_norm(gradients, foreach=foreach).full_tensor()
        assert_close(norm, nn.utils.get_total_norm(expected), "norm", rtol=1e-5, atol=1e-7)
    nn.utils.clip_grads_with_norm_([p for p in model.parameters() if p not in ignored], 0.1, norm, foreach=True)
    scaler.step(optimizer)
    assert_close(nn.utils.get_total_norm(gradients).full_tensor(), torch.tensor(0.1), "clipped", rtol=1e-3, atol=0)


@on_ranks(2)
def test_gradients_of_full_tensors(rank: Rank) -> None:
    """``full_tensor`` and ``to_local`` are differentiable: a penalty on all values reaches the parameters."""
    model, reference = sharded(rank)
    (model.layers[1].weight.full_tensor() ** 2).sum().backward()
    (model.layers[0].weight.to_local() * 3).sum().backward()
    expected = reference.layers[1].weight.detach() * 2
    assert_close(model.layers[1].weight.grad.full_tensor(), expected, "full", rtol=0, atol=1e-6)
    assert_equal(model.layers[0].weight.grad.full_tensor(), torch.full((7, 6), 3.0), "local")
    (gradient,) = torch.autograd.grad(
        (model.layers[1].weight.full_tensor() ** 3).sum(), model.layers[1].weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.to_local().sum().backward()


@on_ranks(3)
@each_value(granularity=GRANULARITIES, kind=["SGD", "AdamW", "fused", "DTensors", "foreach of DTensors"])
def test_optimizers(rank: Rank, granularity: Any, kind: str) -> None:
    """torch's optimizers step local tensors, or RaggedDTensors, and clipping takes the norm of all values."""
    model, reference = sharded(rank, granularity)
    make = torch.optim.SGD if kind == "SGD" else torch.optim.AdamW
    options: dict[str, Any] = {"lr": 0.01} | ({"eps": 1e-3} if kind != "SGD" else {})
    options |= {"fused": True} if kind == "fused" else {"foreach": kind.startswith("foreach")}
    optimizers = [make(m.parameters(), **options) for m in (model, reference)]
    for step in range(3):
        loss = square_loss(step)
        loss(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss)
        found, expected = (nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference))
        assert isinstance(found, DTensor)
        assert_close(found.full_tensor(), expected, "norm", rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            if "DTensors" in kind:
                with stepping_dtensors(optimizer):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, reference, rtol=1e-4, atol=1e-5)
    if kind != "SGD":
        state = optimizers[0].state[model.layers[0].weight]["exp_avg"]
        assert isinstance(state, RaggedDTensor) and state.shape == (7, 6)


@on_ranks(2, 4)
def test_messages(rank: Rank) -> None:
    """Each unit is all-gathered in one message, and its gradients reduced from one buffer and the presence numbers."""
    model, _ = sharded(rank, "row")
    square_loss(0)(model, rank.rank).backward()
    with record() as seen:
        square_loss(1)(model, rank.rank).backward()
    units = [unit for unit in nested_units(model) if unit.parameters]
    for unit in units:
        gathers = [each for each in seen if (each.kind, each.unit) == ("all_gather", unit.name)]
        assert {each.numel for each in gathers} == {unit.buckets[0].layout.unsharded_numel}
        reduced = [each.numel for each in seen if (each.kind, each.unit) == ("reduce_scatter", unit.name)]
        assert reduced == [unit.buckets[0].layout.unsharded_numel, 2 * rank.world_size]


@on_ranks(4)
def test_subgroups(rank: Rank) -> None:
    """Backward all-gathers from a slice of the unsharded buffer that is kept over some ranks."""
    model, reference = sharded(rank, "element", reshard_after_forward=2)
    assert_trains_alike(model, reference, rank)


class Mixed(nn.Module):
    """Parameters that are frozen, 0-D, empty, transposed, and of two dtypes, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(6, 7), nn.Linear(7, 7).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(6, 7).t())
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(x).tanh()) @ self.turned
        return x * self.scale + self.empty.sum() + self.wide.float()


@on_ranks(3)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_parameters_of_all_kinds(rank: Rank, granularity: Any) -> None:
    """They train as unsharded in one unit."""
    model = build(Mixed)
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh, layout="ragged", granularity=granularity)
    assert_trains_alike(model, reference, rank)
    assert all(isinstance(parameter, RaggedDTensor) for parameter in model.parameters())


@on_ranks(2)
def test_granularity_by_parameter(rank: Rank) -> None:
    """A function chooses it by FQN and parameter; a dim that the user chooses is cut as without the layout."""
    model = build(Mlp, 6, 8, 5)
    asked: dict[str, tuple[int, ...]] = {}

    def choose(fqn: str, parameter: nn.Parameter) -> str:
        asked[fqn] = tuple(parameter.shape)
        return "parameter" if parameter.dim() == 2 else "element"

    fully_shard(model, mesh=rank.mesh, layout="ragged", granularity=choose)
    assert asked == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {tuple(p.to_local().shape) for p in model.parameters() if p.dim() == 2} <= {(8, 6), (5, 8), (0, 6), (0, 8)}
    by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else None}
    columns = fully_shard(build(Mlp, 6, 8, 5), mesh=rank.mesh, layout="ragged", **by_columns)
    assert columns.layers[0].weight.placements == (Shard(1),) and isinstance(columns.layers[0].bias, RaggedDTensor)
    assert_trains_alike(columns, build(Mlp, 6, 8, 5), rank)
    for options, message in (
        ({"layout": "ragged", "granularity": "rows"}, "weight: granularity: expected one of 'element'"),
        ({"layout": "ragged", "first_rank": 1}, "first_rank: expected .*granularity='parameter'.* found .*'element'"),
        ({"granularity": "element", "first_rank": 2}, "first_rank: expected layout='ragged' and .* with 2; found"),
        ({"layout": "flat"}, "fully_shard: layout: expected one of 'per_parameter', 'ragged', found 'flat'"),
        ({"granularity": "row"}, "granularity: expected layout='ragged' with 'row', found layout='per_parameter'"),
    ):
        other = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=message):
            fully_shard(other, mesh=rank.mesh, **options)
        assert type(other) is nn.Linear


@on_ranks(1)
def test_the_environment(rank: Rank) -> None:
    """``FULLSHARD_LAYOUT`` chooses for programs that do not; an argument wins; another value is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_LAYOUT", "ragged")
        assert isinstance(fully_shard(nn.Linear(2, 2), mesh=rank.mesh).weight, RaggedDTensor)
        assert type(fully_shard(nn.Linear(2, 2), mesh=rank.mesh, layout="per_parameter").weight) is DTensor
        patch.setenv("FULLSHARD_LAYOUT", "best")
        with pytest.raises(ValueError, match=r"FULLSHARD_LAYOUT in the environment: expected .* found 'best'"):
            fully_shard(nn.Linear(2, 2), mesh=rank.mesh)


def test_the_layout_is_there_after_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, an argument or the environment that asks for it raises, and says what to import."""
    monkeypatch.delitem(added_layouts, "ragged")
    with pytest.raises(ValueError, match=r"fully_shard: layout: 'ragged' needs `import fullshard\.ragged`"):
        fully_shard(nn.Linear(2, 2), layout="ragged")
    monkeypatch.setenv("FULLSHARD_LAYOUT", "ragged")
    with pytest.raises(ValueError, match=r"FULLSHARD_LAYOUT in the environment: 'ragged' needs `import"):
        fully_shard(nn.Linear(2, 2))
    code = (
        "import fullshard, sys; fullshard.fully_shard; assert 'fullshard.ragged' not in sys.modules; "
        "import fullshard.dropin as d, fullshard.engine.buckets.formats as f; d.install(); "
        "assert 'ragged' in f.added_layouts"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@on_ranks(2)
def test_torchs_checkpoints(rank: Rank) -> None:
    """Distributed checkpoint saves and loads them, to and from parameters that are cut one by one."""
    folder = shared_folder(rank)
    model = build(Mixed)
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh, layout="ragged")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "ragged")
    other = fully_shard(build(Mixed, seed=9), mesh=rank.mesh)
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder / "ragged")
    other.load_state_dict(state)
    assert_same_values(other, reference)
    dcp.save({"model": other.state_dict()}, checkpoint_id=folder / "one_by_one")
    again = fully_shard(build(Mixed, seed=8), mesh=rank.mesh, layout="ragged", granularity="row")
    state = again.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder / "one_by_one")
    again.load_state_dict(state)
    assert_same_values(again, reference)


@on_ranks(2)
def test_full_state_dicts(rank: Rank) -> None:
    """Whole tensors are loaded as they are; torch's own functions return all values."""
    model, reference = sharded(rank)
    values = {name: value + 1 for name, value in reference.state_dict().items()}
    model.load_state_dict(values)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in values.items():
        assert_equal(found[name], value, name)
    set_model_state_dict(model, model.state_dict())
    assert_equal(model.layers[0].weight.full_tensor().detach(), values["layers.0.weight"], "set")
    model.layers[0].weight = nn.Parameter(reference.layers[0].weight.detach())
    square_loss(0)(model, rank.rank).backward()
    assert full_gradients(model)["layers.0.weight"] is not None
    assert_equal(model.layers[0].weight.full_tensor().detach(), reference.layers[0].weight.detach(), "replaced")


@on_ranks(1, 2)
def test_torch_refuses_the_placements_by_itself(rank: Rank) -> None:
    """What torch does not refuse itself is a DTensor that refuses all operations."""
    model, _ = sharded(rank)
    ours = model.layers[0].weight
    placed = {"device_mesh": rank.mesh, "placements": ours.placements}

    def calls() -> list[Any]:
        local, shaped = ours.to_local().detach(), {"shape": ours.shape, "stride": ours.stride()}
        made = (lambda: DTensor.from_local(local, **placed, **shaped)), (lambda: torch_tensors.zeros(7, 6, **placed))
        uses = torch.t, torch.clone, torch.zeros_like, lambda d: d.view(-1), lambda d: d[0], lambda d: d.softmax(0)
        return [lambda make=make, use=use: use(make()) for make in made for use in uses]

    for refused in calls():
        with pytest.raises(NotImplementedError, match="a plain DTensor has the placement"):
            refused()
    for make in (DTensor.from_local, torch_tensors.distribute_tensor):
        with pytest.raises(RuntimeError, match=r"not supported|unsupported placements RaggedShard"):
            make(ours.to_local().detach(), **placed)
    assert {ours.placements: 1, ours._spec: 2}[model.layers[0].weight.placements] == 1


def step_both(rank: Rank, models: tuple[Any, Any], optimizers: Sequence[torch.optim.Optimizer], steps: int = 3) -> None:
    """Train the sharded and the unsharded model, each with its optimizer."""
    for step in range(steps):
        loss = square_loss(step)
        loss(models[0], rank.rank).backward()
        reference_backward(models[1], rank.world_size, loss)
        for optimizer, trained in zip(optimizers, models, strict=True):
            optimizer.step()
            trained.zero_grad()


@on_ranks(3)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_muon(rank: Rank, granularity: Any) -> None:
    """It trains as without sharding; with whole matrices on a rank it sends nothing."""
    model, reference = sharded(rank, granularity, 6, 7, 15, 7)
    optimizers = [Muon([p for p in m.parameters() if p.dim() == 2], lr=0.02) for m in (model, reference)]
    step_both(rank, (model, reference), optimizers)
    assert_same_values(model, reference, rtol=1e-3, atol=1e-4)
    assert granularity != "parameter" or not optimizers[0].plan().rounds
    assert {tuple(state) for state in optimizers[0].state.values()} == {("momentum_buffer",)}


@on_ranks(1, 3)
def test_first_ranks_spread_matrices(rank: Rank) -> None:
    """Equal units that begin at different ranks give each rank as many matrices, also in a copy, and train as usual."""
    model = build(Mlp, *[6] * 7)
    reference = copy.deepcopy(model)
    for index, layer in enumerate(model.layers):
        whole = {"layout": "ragged", "granularity": "parameter", "first_rank": index + 2}
        fully_shard(layer, mesh=rank.mesh, **whole)
    fully_shard(model, mesh=rank.mesh, layout="ragged")
    for each in (model, copy.deepcopy(model)):
        held = [p.to_local().numel() for p in each.parameters() if p.dim() == 2]
        assert sum(held) == 6 * 36 / rank.world_size and held[0] == (36 if rank.rank == 2 % rank.world_size else 0)
    optimizers = [Muon([p for p in m.parameters() if p.dim() == 2], lr=0.02) for m in (model, reference)]
    step_both(rank, (model, reference), optimizers)
    assert_same_values(model, reference, rtol=1e-3, atol=1e-4)
    assert not optimizers[0].plan().rounds


@on_ranks(4)
def test_operands_of_another_mesh(rank: Rank) -> None:
    """Tensors that are cut alike over other ranks are not added part by part."""
    mesh = init_device_mesh(rank.mesh.device_type, (2, 2), mesh_dim_names=("a", "b"))
    found = []
    for axis in ("a", "b"):
        model = build(Mlp, 6, 6)
        fully_shard(model, mesh=mesh[axis], layout="ragged", granularity="row")
        found.append(model.layers[0].weight.detach())
    one, other = found
    assert one.placements == other.placements and one.device_mesh != other.device_mesh
    whole = one.full_tensor()
    values = torch.arange(36.0, device=rank.device).view(6, 6)
    other.copy_(values)
    for added in (other, other.full_tensor()):
        assert_equal(one.add(added).full_tensor(), whole + values, "sum")


@on_ranks(2)
def test_quantized_communication(rank: Rank) -> None:
    """A unit's slice is quantized as a whole; gradients are those of full precision but for its rounding."""
    gradients = []
    for quantization in (None, CommQuantization(all_gather="int8", reduce="int8", min_bytes=1024)):
        model, _ = sharded(rank, "row", 64, 96, 32)
        model.set_comm_quantization(shard=quantization)
        square_loss(0, 16, 64)(model, rank.rank).backward()
        gradients.append(full_gradients(model))
    traffic = model.comm_quantization_report().traffic
    assert len(traffic) == 2 and all(each.quantized_bytes > 0.9 * each.full_bytes for each in traffic)
    for name, exact in gradients[0].items():
        found = gradients[1][name]
        assert exact is not None and found is not None and not torch.equal(found, exact), name
        assert (found - exact).abs().max() < 0.05 * exact.abs().max(), name


@on_ranks(2)
def test_full_tensors_in_compiled_code(rank: Rank) -> None:
    """A compiled function that reads all values sees them, and has their gradient."""
    model, reference = sharded(rank)
    compiled = torch.compile(lambda weight: weight.full_tensor() * 2, backend="aot_eager")
    parameters = list(zip(model.parameters(), reference.parameters(), strict=True))
    for (ours, whole), trained in zip(parameters, (True, False), strict=False):
        ours.requires_grad_(trained)
        for _ in range(2):
            found = compiled(ours)
            assert_equal(found.detach(), whole.detach() * 2, "read")
        if trained:
            found.square().sum().backward()
            assert_equal(ours.grad.full_tensor(), whole.detach() * 8, "gradient")
