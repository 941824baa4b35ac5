"""What units start from: modules on the meta device, and rank 0's values for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Block, Net, Snapshot, Tied, assert_states_alike, assert_trains_alike, batch, built, mean_square
from torch import nn

from compare import assert_equal
from fullshard import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy
from pairwise import pairwise
from ranks import Rank, on_ranks

S = ShardingStrategy
BLOCKS = ModuleWrapPolicy({Block})
BLOCKS_AND_LAYERS = ModuleWrapPolicy({Block, nn.Linear})
MODES = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
META = torch.device("meta")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with META:
        return make()


class Scale(nn.Module):
    """Own parameters and buffers, also ones that are not saved, and a ``reset_parameters`` that fills them."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.full((5, 1), start))
        self.frozen = nn.Parameter(torch.full((3,), start + 1), requires_grad=False)
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("hidden", torch.arange(5) + 1, persistent=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)
        self.frozen.fill_(self.start + 1)
        self.table.copy_(torch.arange(5.0))
        self.hidden.copy_(torch.arange(5) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight * self.table[:, None] / self.hidden[:, None]).sum() + self.frozen.sum()


class Nested(nn.Module):
    """Scales inside of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = Scale(0.5), nn.Sequential(Scale(0.25), nn.Sequential(Scale(0.125)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.outer(x))


def fill(module: nn.Module) -> None:
    """A ``param_init_fn``: memory, and values that depend on the shapes only."""
    module.to_empty(device=torch.empty(0).device, recurse=False)  # the rank's
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        with torch.no_grad():
            tensor.copy_(torch.linspace(-0.5, 0.5, tensor.numel()).reshape(tensor.shape))


def filled(module: nn.Module) -> nn.Module:
    """An unsharded module with the values of ``fill``."""
    for submodule in module.modules():
        fill(submodule)
    return module


# -------------------------------------------------------------------- meta device


@on_ranks(2)
@pairwise(policy=[None, ModuleWrapPolicy({Scale}), always_wrap_policy], use_orig_params=[False, True])
def test_reset_parameters(rank: Rank, policy: Any, use_orig_params: bool) -> None:
    """Without ``param_init_fn`` each module gets memory and resets itself; buffers that are not saved too."""
    model, reference = on_meta(Nested), Nested()
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert_states_alike(wrapped, reference)
    assert_equal(model.outer.hidden, reference.outer.hidden, "hidden")
    with FullyShardedDataParallel.summon_full_params(wrapped):
        flags = [p.requires_grad for p in wrapped.parameters()]
    assert flags == [p.requires_grad for p in reference.parameters()]
    assert_trains_alike(wrapped, reference, rank)


@on_ranks(2)
@pairwise(policy=[None, BLOCKS], offload=[False, True], use_orig_params=[False, True])
def test_param_init_fn(rank: Rank, policy: Any, offload: bool, use_orig_params: bool) -> None:
    """It is called once with each module that has something of its own on the meta device, and with no other.

    By hand, one module after another, it does the same.
    """
    model, reference = on_meta(Net), filled(Net())
    modules = {id(m): name for name, m in model.named_modules()}
    called: list[str] = []

    def init(module: nn.Module) -> None:
        called.append(modules[id(module)])
        fill(module)

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        param_init_fn=init,
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=offload),
    )
    own = [n for n, m in reference.named_modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]]
    assert sorted(called) == sorted(own)
    assert_states_alike(wrapped, reference)
    assert_trains_alike(wrapped, reference, rank)
    model, reference = on_meta(Net), filled(Net())
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, param_init_fn=fill, use_orig_params=use_orig_params)
    by_hand = FullyShardedDataParallel(model, param_init_fn=fill, use_orig_params=use_orig_params)
    assert_states_alike(by_hand, reference)


@on_ranks(2)
def test_frozen_parameters_that_are_made_anew_stay_frozen(rank: Rank) -> None:
    """A ``param_init_fn`` may put new parameters into modules; they require gradients as the old ones did."""

    def init(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones(parameter.shape, device=rank.device)))

    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0].requires_grad_(False)
    wrapped = FullyShardedDataParallel(model, param_init_fn=init, use_orig_params=True)
    assert [parameter.requires_grad for parameter in wrapped.parameters()] == [False, False, True, True]


@on_ranks(2)
@pairwise(policy=[None, BLOCKS, BLOCKS_AND_LAYERS], init=[fill, None], use_orig_params=[False, True])
def test_ties_are_kept(rank: Rank, init: Any, policy: Any, use_orig_params: bool) -> None:
    """Parameters that were tied on the meta device still are, within a unit and over units."""
    model = on_meta(Tied)
    reference = filled(Tied())
    torch.manual_seed(3)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, param_init_fn=init, use_orig_params=use_orig_params
    )
    with FullyShardedDataParallel.summon_full_params(wrapped):
        inner = [block.module if hasattr(block, "module") else block for block in model.blocks]
        ups = [getattr(block.up, "module", block.up) for block in inner]
        assert ups[0].weight is ups[1].weight
        heads = [getattr(m, "module", m) for m in (model.embedding, model.head)]
        assert heads[0].weight is heads[1].weight
    if init is None:
        reference.load_state_dict(wrapped.state_dict())
    assert_states_alike(wrapped, reference)
    assert_trains_alike(wrapped, reference, rank)


@on_ranks(2)
def test_only_what_is_on_meta(rank: Rank) -> None:
    """What has values keeps them; only what has none is initialized, here one buffer and one layer.

    Ignored modules stay on the meta device.
    """
    model = built(Net)
    reference = copy.deepcopy(model)
    model.blocks[1].down = on_meta(lambda: nn.Linear(7, 6, bias=False))
    fill(reference.blocks[1].down)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, param_init_fn=fill)
    assert_states_alike(wrapped, reference)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("table", torch.empty(6, device="meta"))

        def reset_parameters(self) -> None:
            self.table.copy_(torch.arange(6.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table

    table = FullyShardedDataParallel(built(Table))
    assert_equal(table.state_dict()["table"], torch.arange(6.0), "table")
    table(batch(rank.rank, 0)).sum().backward()
    model = on_meta(Net)
    spare, called = model.blocks[1], []

    def init(module: nn.Module) -> None:
        called.append(module)
        fill(module)

    FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, param_init_fn=init, ignored_modules=[spare])
    assert all(p.is_meta for p in spare.parameters())
    assert not set(called) & set(spare.modules()) and model.first in called


@on_ranks(2)
@pairwise(kind=["raises", "leaves", "no reset", "reset raises"], policy=[None, BLOCKS], use_orig_params=[False, True])
def test_failing_initialization(rank: Rank, kind: str, policy: Any, use_orig_params: bool) -> None:
    """An initialisation that fails, here in the last unit, says why; the module is as it was and can be wrapped."""

    class Head(nn.Linear):
        reset_parameters = None if kind == "no reset" else nn.Linear.reset_parameters  # type: ignore[assignment]

    model = on_meta(Net)
    reference = filled(Net())
    if kind == "no reset":
        model.head.__class__ = Head
    else:
        model.first = built(lambda: nn.Linear(6, 6))
        reference.first.load_state_dict(model.first.state_dict())
    before = Snapshot.of(model)

    def init(module: nn.Module) -> None:
        if module is model.head and kind == "raises":
            raise OSError("no weights for the head")
        if module is not model.head or kind != "leaves":
            fill(module)

    def no_reset() -> None:
        raise OSError("no weights for the head")

    if kind == "reset raises":
        model.head.__dict__["reset_parameters"] = no_reset
        before = Snapshot.of(model)
    expected: Any = {"raises": OSError, "reset raises": OSError}.get(kind, ValueError)
    words = {"leaves": "Linear.*meta", "no reset": "Head.*reset_parameters"}.get(kind, "no weights for the head")
    options: dict[str, Any] = {"auto_wrap_policy": policy, "use_orig_params": use_orig_params}
    chosen = init if kind in ("raises", "leaves") else None
    if chosen is None:
        model.__dict__["reset_parameters"] = lambda: fill_own(model)
        before = Snapshot.of(model)
    with pytest.raises(expected, match=words):
        FullyShardedDataParallel(model, param_init_fn=chosen, **options)
    before.assert_unchanged(model, meta=True)
    wrapped = FullyShardedDataParallel(filled(model), **options)
    if kind != "no reset":
        reference.first = copy.deepcopy(filled(reference).first)
    assert_states_alike(wrapped, filled(reference))
    assert_trains_alike(wrapped, reference, rank, steps=1)


def fill_own(module: nn.Module) -> None:
    """For a root with buffers only."""
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


# -------------------------------------------------------------------- rank 0's values


class Various(nn.Module):
    """States of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = Net(), nn.BatchNorm1d(3)
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.index = nn.Parameter(torch.randint(100, (7,)), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("columns", torch.randn(4, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(x)) * self.scalar + self.low.float().sum() + self.frozen


@on_ranks(2)
@pairwise(policy=[None, BLOCKS], strategy=[S.FULL_SHARD, S.NO_SHARD], use_orig_params=[False, True])
def test_sync_module_states(rank: Rank, policy: Any, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Ranks that were seeded differently start from rank 0's parameters and buffers, of every kind.

    Parameters that units leave to one above them are synchronized too.
    """
    model, reference = built(Various, seed=rank.rank), built(Various, seed=0)
    if rank.rank:
        model.norm.num_batches_tracked.fill_(5)
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        sync_module_states=True,
        use_orig_params=use_orig_params,
    )
    assert_states_alike(wrapped, reference)
    wrapped(batch(rank.rank, 0)).float().sum().backward()
    # The unit of each block's list owns what its blocks share: what it has sharded is not synchronized again above.
    for tied_over in (policy, BLOCKS_AND_LAYERS, always_wrap_policy):
        tied = FullyShardedDataParallel(
            built(Tied, seed=rank.rank),
            auto_wrap_policy=tied_over,
            sync_module_states=True,
            use_orig_params=use_orig_params,
        )
        assert_states_alike(tied, built(Tied, seed=0))


@on_ranks(4)
@pairwise(shape=[(2, 2), (4, 1), (1, 4)], given=["mesh", "groups"])
def test_sync_with_replicas(rank: Rank, shape: tuple[int, int], given: str) -> None:
    """With replicas, too, all ranks get the values of the very first one, nothing of those between."""
    mesh = rank.make_mesh(*shape, names=("replicate", "shard"))
    where: Any = {"device_mesh": mesh} if given == "mesh" else {"process_group": (mesh.get_group(1), mesh.get_group(0))}
    model, reference = built(Various, seed=rank.rank), built(Various, seed=0)
    wrapped = FullyShardedDataParallel(
        model, sharding_strategy=S.HYBRID_SHARD, auto_wrap_policy=BLOCKS, sync_module_states=True, **where
    )
    assert_states_alike(wrapped, reference)


@on_ranks(2)
@pairwise(policy=[None, BLOCKS], use_orig_params=[False, True])
def test_weights_on_the_first_rank_only(rank: Rank, policy: Any, use_orig_params: bool) -> None:
    """Rank 0 has loaded the weights, the others have the model on the meta device: all end with rank 0's."""
    reference = built(Tied)
    model = copy.deepcopy(reference) if rank.rank == 0 else on_meta(Tied)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device=rank.device, recurse=False),
        use_orig_params=use_orig_params,
    )
    assert_states_alike(wrapped, reference)
    assert_trains_alike(wrapped, reference, rank)


@on_ranks(2)
@MODES
def test_sync_of_all_dtypes(rank: Rank, use_orig_params: bool) -> None:
    """States of every dtype, also those that the back end does not know, views with no memory of their own too."""
    values: dict[str, torch.Tensor] = {
        f"state{index}": (torch.arange(7) + rank.rank).to(dtype)
        for index, dtype in enumerate((torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint8, torch.float64))
    }
    values["conj"] = (torch.randn(4) + 1j * (rank.rank + 1)).conj()
    values["expanded"] = (torch.arange(3.0) + rank.rank).expand(4, 3)
    model = nn.Linear(3, 3)
    model.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64) + rank.rank)
    model.tiny = nn.Parameter(torch.arange(5).to(torch.int16) + rank.rank, requires_grad=False)
    for name, value in values.items():
        model.register_buffer(name, value)
    wrapped = FullyShardedDataParallel(model, sync_module_states=True, use_orig_params=use_orig_params)
    plain = {name: value.resolve_conj().contiguous() for name, value in wrapped.state_dict().items()}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, {name: value.view(torch.uint8).clone().cpu() for name, value in plain.items()})
    for name, found in both[0].items():
        assert_equal(both[1][name], found, name)
    if rank.rank == 0:
        assert_equal(plain["state0"], torch.arange(7).to(torch.int16), "values of rank 0")
    assert_equal(plain["tiny"], torch.arange(5).to(torch.int16), "values of rank 0")
    assert plain["expanded"].shape == (4, 3)


@on_ranks(4)
@pytest.mark.parametrize(("strategy", "use_orig_params"), [(s, bool(i % 2)) for i, s in enumerate(S)])
def test_all_at_once(rank: Rank, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Every strategy from the meta device, ties over units, with values that differ per rank and are synchronized."""

    def init(module: nn.Module) -> None:
        fill(module)
        for parameter in module.parameters(recurse=False):
            parameter.data.add_(rank.rank)

    where: Any = {"device_mesh": rank.make_mesh(2, 2)} if strategy.hybrid else {}
    wrapped = FullyShardedDataParallel(
        on_meta(Tied),
        sharding_strategy=strategy,
        auto_wrap_policy=BLOCKS,
        param_init_fn=init,
        sync_module_states=True,
        use_orig_params=use_orig_params,
        **where,
    )
    reference = filled(Tied())
    assert_states_alike(wrapped, reference)
    assert_trains_alike(wrapped, reference, rank, steps=2)


@on_ranks(2)
def test_sync_of_units_without_states(rank: Rank) -> None:
    """Units that have neither parameters nor buffers are no obstacle, nor are parameters of no elements."""
    model = built(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Identity())), seed=rank.rank)
    model[2].empty = nn.Parameter(torch.zeros(0, 3))
    wrapped = FullyShardedDataParallel(model, sync_module_states=True, auto_wrap_policy=always_wrap_policy)
    reference = built(lambda: nn.Linear(6, 6), seed=0)
    assert_states_alike(wrapped[0], reference)
    wrapped(batch(rank.rank, 0)).sum().backward()
    FullyShardedDataParallel(nn.Sequential(nn.Tanh()), sync_module_states=True)(batch(rank.rank, 0))


@on_ranks(2)
def test_sync_by_unit(rank: Rank) -> None:
    """A policy, and wrapping by hand, choose for each unit whether it is synchronized; ignored parameters never are."""
    model, reference = built(Net, seed=rank.rank), built(Net, seed=0)
    other = built(Net, seed=1)
    spare = model.head.bias
    chosen = model.blocks[0]
    policy = CustomPolicy(lambda m: {"sync_module_states": True} if m is chosen else isinstance(m, Block))
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, ignored_states=[spare])
    state = wrapped.state_dict()
    for name, value in reference.blocks[0].state_dict().items():
        assert_equal(state[f"blocks.0.{name}"], value, name)
    own = (reference if rank.rank == 0 else other).head.bias
    assert_equal(spare.detach(), own.detach(), "ignored")
    assert not torch.equal(state["first.weight"], reference.first.weight)  # the halves are of both ranks
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert_equal(model.first.weight[0].detach(), reference.first.weight[0].detach(), "rank 0's part")
    mean_square(wrapped, batch(rank.rank, 0)).backward()
    again = FullyShardedDataParallel(
        built(Net, seed=rank.rank), ignored_states=[], sync_module_states=True, auto_wrap_policy=BLOCKS
    )
    assert_states_alike(again, reference)
