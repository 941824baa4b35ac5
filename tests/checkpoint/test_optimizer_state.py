"""The state of optimizers by FQN: what is saved is what an unsharded optimizer holds, and what is loaded is that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint.kinds import Model, build, train
from checkpoint.optimizers import (
    OPTIMIZERS,
    Custom,
    assert_states_close,
    groups_of,
    held_by,
    joined,
    map_leaves,
    trained,
)
from compare import assert_equal
from fullshard import CheckpointError, fully_shard, load, save
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.checkpoint.state.optimizer.initial import give_initial_state
from fullshard.checkpoint.state.optimizer.state import optimizer_state
from fullshard.checkpoint.state.types import StateDictType
from fullshard.engine.parameters.sharded import value_of
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import FullshardError, PhaseError
from fullshard.optim import localize
from ranks import Rank, on_ranks

FLAT = ("flat", "no_shard")  # with visible flat parameters
# One optimizer on all kinds, one with all sorts of state on what differs most, and some that keep state elsewhere.
KINDS_AND_OPTIMIZERS = [(kind, "custom") for kind in ("fully_shard", "flat", "original")]
KINDS_AND_OPTIMIZERS += [(kind, "adam") for kind in ("ddp", "replicate", "no_shard", "mixture")]
KINDS_AND_OPTIMIZERS += [("fully_shard", "asgd"), ("flat", "adamw_fused"), ("original", "plain_sgd")]


def stepped(model: nn.Module, name: str = "adam", steps: int = 3) -> torch.optim.Optimizer:
    """An optimizer of that name, of two groups, after some steps."""
    optimizer = OPTIMIZERS[name](groups_of(model))
    train(model, optimizer, 0, steps)
    return optimizer


def stepped_model(name: str = "adam", *, mark: str = "") -> tuple[Model, torch.optim.Optimizer]:
    """An unsharded model with its optimizer, whose groups flat parameters would mix unless they have one mark."""
    model = Model()
    optimizer = stepped(model, name)
    for group in optimizer.param_groups:
        group["mark"] = mark or group["mark"]
    return model, optimizer


def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What the optimizer holds now, by FQN, whole."""
    return joined(optimizer_state(model, optimizer)["state"])


# ---------------------------------------------------------------- what is saved and loaded


def assert_state_is_that_of_an_unsharded_optimizer(rank: Rank, kind: str, name: str, folder: Path) -> None:
    reference, plain = stepped_model(name, mark="all" if kind in FLAT else "")
    model = build(rank, kind)
    tree = optimizer_state(model, stepped(model, name))
    assert_states_close(joined(tree["state"]), held_by(reference, plain))
    if kind not in FLAT:
        groups = [tree["param_groups"], optimizer_state(reference, plain)["param_groups"]]
        found, wanted = ([(sorted(group["params"]), group["mark"]) for group in each] for each in groups)
        assert found == wanted
    save(folder, reference, plain)
    model = build(rank, kind, seed=2)
    new = OPTIMIZERS[name](groups_of(model, order=-1))
    load(folder, model, new)
    saved = held_by(reference, plain)
    if name == "asgd":  # alone in making steps on the device: they are loaded to where torch has those of others
        saved = {fqn: {**state, "step": state["step"].cpu()} for fqn, state in saved.items()}
    assert_states_close(own(model, new), saved, exact=True)
    for group in new.param_groups:
        assert group["mark"] in (("all",) if kind in FLAT else ("big", "small"))
    losses = [train(m, o, 3, 5) for m, o in ((model, new), (reference, plain))]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)
    assert_states_close(own(model, new), held_by(reference, plain))


@on_ranks(2)
@pytest.mark.parametrize(("kind", "name"), KINDS_AND_OPTIMIZERS)
def test_state_is_that_of_an_unsharded_optimizer(rank: Rank, kind: str, name: str, tmp_path: Path) -> None:
    """What is saved has the names, whole tensors, shared tensors and values of the plain model's optimizer.

    What that optimizer saved is loaded into a new one with other groups in another order: the same state bit by bit,
    and the same next steps.
    """
    assert_state_is_that_of_an_unsharded_optimizer(rank, kind, name, tmp_path)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["hybrid", "flat"])
def test_state_on_four_ranks(rank: Rank, kind: str, tmp_path: Path) -> None:
    """Ranks whose shard of a parameter is empty, and replicas, hold the same state as the others, and load it."""
    assert_state_is_that_of_an_unsharded_optimizer(rank, kind, "adam", tmp_path)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
def test_tensor_parallel_parameters(rank: Rank, kind: str, tmp_path: Path) -> None:
    """Parameters that are DTensors already are sharded once more; their state is whole again, and goes back."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    reference = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    for index, parameter in enumerate(reference.parameters()):
        parameter.data = torch.linspace(-1, 1 + index, parameter.numel()).view_as(parameter)
    model = parallelize_module(copy.deepcopy(reference), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    plain = copy.deepcopy(reference)
    model = fully_shard(model, mesh=mesh["dp"]) if kind == "fully_shard" else FSDP(model, device_mesh=mesh["dp"])
    optimizers = [torch.optim.Adam(m.parameters(), foreach=False) for m in (model, reference)]
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        m(torch.linspace(0, 1, 12).view(2, 6)).square().mean().backward()
        optimizer.step()
    saved = copy.deepcopy(own(model, optimizers[0]))
    assert_states_close(saved, held_by(reference, optimizers[1]))
    save(tmp_path, model, optimizers[0])
    load(tmp_path, plain)
    assert_states_close(dict(plain.state_dict()), dict(reference.state_dict()))
    new, again = (torch.optim.Adam(model.parameters(), foreach=False) for _ in range(2))
    load(tmp_path, model, new)
    assert_states_close(own(model, new), saved, exact=True)
    in_host_memory = map_leaves(saved, torch.Tensor.cpu)  # as torch's configurations have it
    for form in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, form):
            state = FSDP.optim_state_dict(model, new)
            again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, state))
        whole = map_leaves(state["state"], lambda value: value.full_tensor() if isinstance(value, DTensor) else value)
        assert_states_close(whole, in_host_memory, exact=True)
        assert_states_close(own(model, again), saved, exact=True)
    first = FSDP.full_optim_state_dict(model, new)
    assert (first == {}) == (rank.rank > 0)
    assert_states_close(first.get("state", in_host_memory), in_host_memory, exact=True)


def test_what_is_sharded_as_its_parameter() -> None:
    """Not a table that all parameters have, though one has its shape; the moments of a lone scalar, not its counter."""
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer: torch.optim.Optimizer = Custom(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    table = optimizer_state(model, optimizer)["state"]["0.bias"]["table"]
    assert type(table) is torch.Tensor and table.shape == model[0].bias.shape
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam(model.parameters())
    model.scale.square().backward()
    optimizer.step()
    state = optimizer_state(model, optimizer)["state"]["scale"]
    assert isinstance(state["exp_avg"], TensorShards) and isinstance(state["exp_avg_sq"], TensorShards)
    assert type(state["step"]) is torch.Tensor


@on_ranks(2)
def test_wrong_moments_and_parameters_are_refused(rank: Rank, tmp_path: Path) -> None:
    """State is not saved inside of summon_full_params, nor of an optimizer of another model's parameters."""
    model = build(rank, "flat")
    with FSDP.summon_full_params(model), pytest.raises(PhaseError):
        save(tmp_path, model, stepped_model()[1])
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(3))]}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 of the optimizer \(shape \(3,\)"):
        save(tmp_path, model, optimizer)


class SkipsEmpty(torch.optim.SGD):
    """As some hand-written optimizers: no state where this rank has nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in list(self.state):
            if not value_of(parameter).numel():
                del self.state[parameter]


@on_ranks(2)
def test_state_that_differs_between_ranks_is_refused(rank: Rank, tmp_path: Path) -> None:
    """No state, or another number of steps, shape, dtype or entry: all ranks name the parameter and the ranks."""
    model = build(rank, "fully_shard")
    skips = SkipsEmpty(trained(model), lr=0.1, momentum=0.9)
    train(model, skips, 0, 1)
    message = r"one \((nothing on rank 0; |momentum_buffer.* on rank 0; nothing on rank 1)"
    with pytest.raises(FullshardError, match=message):
        save(tmp_path, model, skips)
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (
            lambda state: state["step"].add_(1),
            r"= 1\.0 on rank 0; .*step \(\) float32 = 2\.0 on rank 1",
        ),
        (lambda state: state.update(step=state["step"].double()), r"on rank 0; .*step \(\) float64 = 1\.0 on rank 1"),
        (lambda state: state.update(step=state["step"][None]), r"on rank 0; .*step \(1,\) float32 = 1\.0 on rank 1"),
        (lambda state: state.update(extra=3), "on rank 0; .*extra = 3.* on rank 1"),
        (lambda state: state.clear(), "on rank 0; nothing on rank 1"),
    ]
    for change, message in changes:
        optimizer = stepped(model, "adam", 1)
        if rank.rank == 1:
            change(optimizer.state[model.low])
        with pytest.raises(FullshardError, match=rf"low \(.*{message}"):
            save(tmp_path, model, optimizer)


# ---------------------------------------------------------------- loading


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
def test_existing_memory_is_used(rank: Rank, kind: str, tmp_path: Path) -> None:
    """An optimizer that has stepped gets its own tensors filled."""
    reference, plain = stepped_model(mark="all")
    save(tmp_path, reference, plain)
    model = build(rank, kind)
    optimizer = stepped(model, "adam", 2)
    before = {id(p): state["exp_avg"] for p, state in optimizer.state.items()}
    load(tmp_path, model, optimizer)
    assert all(state["exp_avg"] is before[id(p)] for p, state in optimizer.state.items())
    assert_states_close(own(model, optimizer), held_by(reference, plain), exact=True)


@on_ranks(2)
def test_parameters_without_saved_state(rank: Rank, tmp_path: Path) -> None:
    """Their state is removed, also if they had some: the optimizer is what it was when it was saved.

    In a flat parameter, of which other parts had state, they get zeros, as they would have had.
    """
    reference, plain = stepped_model(mark="all")
    del plain.state[reference.blocks[0][0].bias]
    save(tmp_path, reference, plain)
    for kind, steps in (("flat", 0), ("flat", 2), ("original", 2)):
        model = build(rank, kind)
        optimizer = stepped(model, "adam", steps)
        load(tmp_path, model, optimizer)
        found = own(model, optimizer)
        if kind == "flat":
            assert not found["blocks.0.0.bias"]["exp_avg"].any()
            assert_equal(found.pop("blocks.0.0.bias")["step"], torch.tensor(3.0, device="cpu"), "step")
        assert_states_close(found, held_by(reference, plain), exact=True)


CONFLICTS: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "steps": (
        "adam",
        lambda state: state["step"].add_(2),
        r"cannot load the optimizer \(nothing was changed\): blocks\.1\.0\.weight and blocks\.1\.0\.bias share a flat "
        r"parameter, but were saved with different step, 3\.0 and 5\.0; load them .* use_orig_params=True",
    ),
    "values": ("custom", lambda state: state.update(count=5), "different count, 3 and 5"),
    "dtypes": (
        "custom",
        lambda state: state["nested"].update(square=state["nested"]["square"].double()),
        r"nested\.square of blocks\.1\.0\.weight, blocks\.1\.0\.bias.* was saved with different dtypes or nesting",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", CONFLICTS)
def test_flat_parameters_have_one_state(rank: Rank, what: str, tmp_path: Path) -> None:
    """Parts that were saved with different steps are an error before anything changes; not for original parameters."""
    name, change, message = CONFLICTS[what]
    reference, plain = stepped_model(name, mark="all")
    change(plain.state[reference.blocks[1][0].bias])
    save(tmp_path, reference, plain)
    model = build(rank, "flat")
    optimizer = stepped(model, name, 1)
    before = copy.deepcopy(own(model, optimizer))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model, optimizer)
    assert_states_close(own(model, optimizer), before, exact=True)
    original = build(rank, "original")
    new = OPTIMIZERS[name](groups_of(original))
    load(tmp_path, original, new)
    assert_states_close(own(original, new), held_by(reference, plain), exact=True)


def test_tied_parameters_have_two_names(tmp_path: Path) -> None:
    """Their state is found under whichever it was saved."""
    saved, optimizer = stepped_model()
    save(tmp_path / "embed", saved, optimizer)
    saved._modules["embed"] = saved._modules.pop("embed")  # behind the head
    save(tmp_path / "head", saved, optimizer)
    for name in ("embed", "head"):
        model = Model(2)
        new = OPTIMIZERS["adam"](groups_of(model))
        load(tmp_path / name, model, new)
        assert_states_close(new.state[model.head.weight], optimizer.state[saved.head.weight], exact=True)


class Factored(torch.optim.Optimizer):
    """Scales by means over rows and columns; of DTensors, these are DTensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            squared, state = parameter.grad.square() + 0.1, self.state[parameter]
            means = {"row": squared.mean(-1, keepdim=True), "column": squared.mean(0, keepdim=True)}
            for name, mean in means.items():
                state[name] = 0.5 * (state[name] + mean) if name in state else mean
                state[name] = state[name].redistribute(placements=[Replicate()])
                parameter.sub_(0.1 * parameter.grad / state[name].sqrt())


@on_ranks(2)
def test_state_of_other_shapes_made_of_dtensors(rank: Rank, tmp_path: Path) -> None:
    """It is made of DTensors again, so that the optimizer can go on."""
    plain = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Linear(7, 4, bias=False))
    for index, parameter in enumerate(plain.parameters()):
        parameter.data = torch.linspace(-1, 1 + index, parameter.numel()).view_as(parameter)
    models = [fully_shard(copy.deepcopy(plain), mesh=rank.mesh) for _ in range(2)]
    optimizers = [Factored(m.parameters()) for m in models]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> None:
        model(torch.full((2, 6), scale)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(models[0], optimizers[0], 1.0)
    save(tmp_path, models[0], optimizers[0])
    saved = own(models[0], optimizers[0])
    assert saved["0.weight"]["row"].shape == (7, 1)
    load(tmp_path, models[1], optimizers[1])
    assert_states_close(own(models[1], optimizers[1]), saved, exact=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, 0.5)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_equal(one.full_tensor().detach(), other.full_tensor().detach(), "after another step")


# ---------------------------------------------------------------- before the first step


def made(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The initial state of an optimizer, with local tensors."""
    give_initial_state(optimizer)
    return [map_leaves(state, value_of) for state in optimizer.state.values()]


@on_ranks(2)
@pytest.mark.parametrize("name", ["nadam", "asgd", "adagrad", "adamw_fused"])
def test_local_steps_begin_with_the_same_state(rank: Rank, name: str) -> None:
    """What their first step begins with, not what it leaves: products and averages too."""
    plain = made(OPTIMIZERS[name](nn.Linear(3, 2).parameters()))
    for shard in (fully_shard, partial(FSDP, use_orig_params=True)):
        optimizers = [OPTIMIZERS[name](shard(nn.Linear(3, 2)).parameters()) for _ in range(2)]
        localize(optimizers[0], enable=False)
        dtensors, local = map(made, optimizers)
        assert_states_close(local, dtensors, exact=True)
        scalars = [{key: v for key, v in state.items() if not v.dim()} for state in plain]
        assert_states_close([{key: state[key] for key in scalars[0]} for state in local], scalars, exact=True)


class Delegating(torch.optim.AdamW):
    """Its step calls torch's, around which torch runs hooks too."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("elementwise", [False, True], ids=["dtensors", "local"])
def test_hooks_are_for_real_steps(rank: Rank, elementwise: bool) -> None:
    """They do not run, and are there afterwards; state is that before the first step."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch adds the hooks when the class is used first
    model, calls = fully_shard(nn.Linear(3, 2)), []
    optimizer = Delegating(model.parameters())
    if elementwise:
        localize(optimizer, elementwise=True)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    give_initial_state(optimizer)
    assert not calls and all(state["step"] == 0 for state in optimizer.state.values())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert calls[:1] == ["pre"] and calls[-1:] == ["post"]
    assert all(state["step"] == 1 for state in optimizer.state.values())


class OfPlainTensors(torch.optim.SGD):
    """Fails with DTensors, as kernels of one's own do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            raise RuntimeError("no kernel for it")


@on_ranks(2)
def test_optimizers_that_cannot_step_dtensors(rank: Rank) -> None:
    """Nobody can tell what their state begins with, which is an error."""
    model = fully_shard(nn.Linear(3, 2))
    before = [p.full_tensor() for p in model.parameters()]
    optimizer = localize(OfPlainTensors(model.parameters()), elementwise=True)
    with pytest.raises(FullshardError, match=r"OfPlainTensors.*no kernel for it.*run a step first"):
        give_initial_state(optimizer)
    assert not optimizer.state and optimizer.param_groups[0]["params"] == list(model.parameters())
    assert_equal([p.full_tensor() for p in model.parameters()], before, "parameters")


# ---------------------------------------------------------------- what does not fit


def adam_of(model: nn.Module, parameters: Any = None, steps: int = 1) -> torch.optim.Optimizer:
    """Adam of some parameters of a linear layer, after some steps."""
    optimizer = torch.optim.Adam(model.parameters() if parameters is None else parameters, lr=0.1, foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer


def refused(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why a checkpoint is not loaded."""
    with pytest.raises(CheckpointError, match="nothing was changed") as caught:
        load(folder, model, optimizer)
    return str(caught.value)


def test_parameters_of_one_side(tmp_path: Path) -> None:
    """State of a parameter that this optimizer does not have is a problem; without state it is none.

    A parameter that the saved optimizer did not have is a problem; without ``strict`` its state stays. Whether frozen
    parameters were given to an optimizer says nothing.
    """
    model = nn.Linear(2, 2)
    save(tmp_path / "both", model, adam_of(model))
    save(tmp_path / "weight", model, adam_of(model, [model.weight]))
    save(tmp_path / "no state", model, adam_of(model, steps=0))
    of_weight = adam_of(model, [model.weight], 0)
    unexpected = "the checkpoint has state for bias, which this optimizer does not have"
    assert unexpected in refused(tmp_path / "both", model, of_weight)
    load(tmp_path / "both", model, of_weight, strict=False)
    assert list(of_weight.state) == [model.weight]
    load(tmp_path / "no state", model, adam_of(model, [model.weight], 0))
    assert "the saved optimizer has no parameters bias" in refused(tmp_path / "weight", model, adam_of(model))
    both = adam_of(model, steps=2)
    old = copy.deepcopy(both.state[model.bias])
    load(tmp_path / "weight", model, both, strict=False)
    assert_equal(both.state[model.bias], old, "bias")
    assert both.state[model.weight]["step"] == 1
    model.bias.requires_grad_(False)
    both = adam_of(model, steps=0)
    load(tmp_path / "weight", model, both)
    assert list(both.state) == [model.weight]


def test_wrong_shape(tmp_path: Path) -> None:
    """State of another shape than its parameter is a problem that names both."""
    saved, optimizer = stepped_model()
    optimizer.state[saved.low]["exp_avg"] = torch.zeros(5, 3, dtype=torch.bfloat16)
    save(tmp_path, saved, optimizer)
    model = Model()
    for new in (OPTIMIZERS["adam"](groups_of(model)), stepped(model, "adam", 1)):
        problem = refused(tmp_path, model, new)
        assert "low: exp_avg was saved with shape (5, 3)" in problem and "(3, 5)" in problem


def test_state_with_fewer_elements(tmp_path: Path) -> None:
    """An entry that is a mean over dims, where others of its name follow their parameters, is shared and kept."""
    model: Any = nn.Linear(3, 2)
    model.more = nn.Parameter(torch.ones(4))
    saved, optimizer = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    for parameter, shape in ((model.weight, (2, 1)), (model.bias, (2,)), (model.more, (4,))):
        saved.state[parameter]["scale"] = torch.rand(shape)
    save(tmp_path, model, saved)
    load(tmp_path, model, optimizer)
    assert_states_close(held_by(model, optimizer), held_by(model, saved), exact=True)


def test_groups_that_were_others(tmp_path: Path) -> None:
    """Groups may be joined where options are equal, and split; where they differ, the error names the parameters.

    Empty groups get the options of the saved empty one of their number, or stay what they are.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def sgd(*rates: float) -> torch.optim.Optimizer:
        groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(model, rates, strict=False)]
        return torch.optim.SGD([*groups, *({"params": [], "lr": rate} for rate in rates[2:])], momentum=0.9)

    one = torch.optim.SGD(model.parameters(), lr=1.0)
    save(tmp_path / "different", model, sgd(0.5, 0.125))
    assert "(lr): 0.weight, 0.bias and 1.weight, 1.bias" in refused(tmp_path / "different", model, one)
    save(tmp_path / "equal", model, sgd(0.5, 0.5))
    load(tmp_path / "equal", model, one)
    assert one.param_groups[0]["lr"] == 0.5 and one.param_groups[0]["momentum"] == 0.9
    split = torch.optim.SGD([{"params": [p]} for p in reversed(list(model.parameters()))], lr=1.0)
    load(tmp_path / "different", model, split)
    assert [group["lr"] for group in split.param_groups] == [0.125, 0.125, 0.5, 0.5]
    save(tmp_path / "empty", model, sgd(0.5, 0.5, 3.0))
    for folder, rate in (("empty", 3.0), ("equal", 4.0)):
        with_empty = sgd(0.5, 0.5, 4.0)
        load(tmp_path / folder, model, with_empty)
        assert with_empty.param_groups[2]["lr"] == rate


def test_options_that_are_tensors(tmp_path: Path) -> None:
    """A learning rate that is a tensor stays that tensor; numbers and tensors may replace each other."""
    model = nn.Linear(2, 2)
    number, tensor = (torch.optim.Adam(model.parameters(), lr=lr, foreach=False) for lr in (0.5, torch.tensor(0.25)))
    save(tmp_path / "number", model, number)
    save(tmp_path / "tensor", model, tensor)
    own = tensor.param_groups[0]["lr"]
    load(tmp_path / "number", model, tensor)
    assert tensor.param_groups[0]["lr"] is own and own.item() == 0.5
    load(tmp_path / "tensor", model, number)
    assert_equal(number.param_groups[0]["lr"], torch.tensor(0.25), "lr")


def test_values_become_what_torch_makes_of_them(tmp_path: Path) -> None:
    """torch's own optimizers get state in their parameters' dtype, plain numbers of steps as tensors, and run hooks.

    Other optimizers get the state as it was saved.
    """

    class Own(torch.optim.Adam):
        """Keeps its state in fp32."""

    model = nn.Linear(2, 2)
    saved = adam_of(model)
    save(tmp_path / "tensor", model, saved)
    low = copy.deepcopy(model).bfloat16()
    kept = Own(low.parameters())
    load(tmp_path / "tensor", low, kept, cast=True)
    assert_states_close(held_by(low, kept), held_by(model, saved), exact=True)
    saved.state[model.weight]["step"] = 9
    save(tmp_path / "number", model, saved)
    heard: list[torch.optim.Optimizer] = []
    optimizer = torch.optim.Adam(low.parameters())
    optimizer.register_load_state_dict_post_hook(heard.append)
    load(tmp_path / "number", low, optimizer, cast=True)
    state = optimizer.state[low.weight]
    assert state["exp_avg"].dtype is torch.bfloat16 and heard == [optimizer]
    assert_equal(state["step"], torch.tensor(9.0), "step")


def test_comparison_fails_on_wrong_values() -> None:
    """The helper of this file notices what differs."""
    model = nn.Linear(2, 2)
    state = held_by(model, adam_of(model))
    assert_states_close(copy.deepcopy(state), state, exact=True)
    weight, bias = state["weight"], state["bias"]
    for other in (
        {**state, "weight": {**weight, "exp_avg": weight["exp_avg"] * 1.01}},
        {**state, "bias": {**bias, "step": bias["step"] + 1}},
        {**state, "bias": {"step": bias["step"]}},
        {**state, "bias": {**bias, "exp_avg": bias["exp_avg"].double()}},
    ):
        with pytest.raises(AssertionError):
            assert_states_close(other, state)
