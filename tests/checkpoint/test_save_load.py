"""save and load: what one front end saved any other loads, bit by bit, on any number of ranks, all or nothing."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import fullshard
from checkpoint.contents import flip
from checkpoint.kinds import KINDS, Model, adam, build, train
from compare import assert_equal
from fullshard import CheckpointError, FullshardError, fully_shard
from fullshard.checkpoint import saving
from fullshard.checkpoint.format import files, writer
from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.reader import CheckpointReader
from fullshard.checkpoint.state import snapshot
from fullshard.checkpoint.state.model import model_state
from fullshard.engine.parameters.sharded import value_of
from ranks import Rank, RankPool, on_ranks

TRAINED = [kind for kind in KINDS if kind != "low_buffers"]  # whose norm cannot compute


def values(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copies of this rank's part of a model."""
    return {name: [local.clone() for _, local in p.shards] for name, p in model_state(model).tensors.items()}


def optimizer_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of this rank's part of an optimizer's state, in the order of parameters."""
    local = lambda t: (t._local_tensor if isinstance(t, DTensor) else t).clone()  # noqa: E731
    return [
        {name: local(value) for name, value in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@on_ranks(2)
@pytest.mark.parametrize("kind", TRAINED)
def test_any_kind_continues_what_another_saved(rank: Rank, kind: str, tmp_path: Path) -> None:
    """Trained, saved, loaded into the next kind with other values, trained on: the same losses as without a stop.

    The state that is saved is one of the unsharded model and optimizer: a ring of kinds is as good as all pairs.
    Parameters stay the same objects in the same memory.
    """
    model = build(rank, kind, seed=1)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    fullshard.save(tmp_path / "one", model, optimizer, step=2)
    expected = train(model, optimizer, 2, 4)
    resumed = build(rank, TRAINED[TRAINED.index(kind) - 1], seed=2)
    its, held = adam(resumed, lr=0.5), [(id(p), value_of(p).data_ptr()) for p in resumed.parameters()]
    assert fullshard.load(tmp_path / "one", resumed, its) == {"step": 2}
    assert held == [(id(p), value_of(p).data_ptr()) for p in resumed.parameters()]
    assert its.param_groups[0]["lr"] == 0.01
    assert train(resumed, its, 2, 4) == expected


def saved_on(rank: Rank, kind: str, folder: str) -> list[float]:
    model = build(rank, kind, seed=1)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    fullshard.save(Path(folder) / kind, model, optimizer, step=2)
    return train(model, optimizer, 2, 4)


def loaded_on(rank: Rank, kind: str, folder: str) -> list[float]:
    model = build(rank, kind, seed=2)
    optimizer = adam(model)
    fullshard.load(folder, model, optimizer)
    return train(model, optimizer, 2, 4)


@pytest.mark.parametrize(
    ("before", "kind", "after", "other"),
    [
        (4, "fully_shard", 2, "flat"),
        (1, "flat", 4, "original"),
    ],
)
def test_another_number_of_ranks_continues(
    ranks: RankPool, tmp_path: Path, before: int, kind: str, after: int, other: str
) -> None:
    """Batches are equal on all ranks, so that the number of ranks changes nothing but the order of sums."""
    expected = ranks(before, saved_on, kind, str(tmp_path))[0]
    found = ranks(after, loaded_on, other, str(tmp_path / kind))
    assert all(losses == found[0] for losses in found)
    assert found[0] == pytest.approx(expected, rel=1e-5)


class Counter:
    """Something with a state dict."""

    def __init__(self, value: int) -> None:
        self.value, self.big = value, torch.full((3000,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "big": self.big}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.big = state["value"], state["big"]


@on_ranks(2)
def test_extras_come_back(rank: Rank, tmp_path: Path) -> None:
    """Values of all sorts, tensors large and small, objects with a state dict, a second model and its optimizer."""
    model, second = build(rank, "fully_shard"), build(rank, "original", seed=4)
    optimizer, other = adam(model), adam(second)
    train(second, other, 0, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extra = {
        "position": {"file": "a.txt", "offset": 17, "seen": [1, 2.5, None, True, (3, "x")]},
        "small": torch.arange(3),
        "large": torch.arange(20_000.0).view(4, 5_000),
        "nested": [{"inside": torch.ones(2_000)}],
    }
    given = {"counter": Counter(5), "ema": second, "ema_optimizer": other, "scheduler": scheduler}
    fullshard.save(tmp_path, model, optimizer, **extra, **given)
    fresh = build(rank, "flat", seed=9)
    targets = {"counter": Counter(0), "ema": fresh, "ema_optimizer": adam(fresh), "scheduler": scheduler}
    found = fullshard.load(tmp_path, model, optimizer, **targets)
    assert_equal(found, tree_map_only(torch.Tensor, torch.Tensor.cpu, extra), "extras")
    assert targets["counter"].value == 5
    assert_equal(targets["counter"].big, torch.full((3000,), 5.0, device="cpu"), "big")
    assert train(fresh, targets["ema_optimizer"], 1, 3) == train(second, other, 1, 3)


@on_ranks(2)
def test_torchs_default_device_is_not_taken_for_the_hosts(rank: Rank, tmp_path: Path) -> None:
    """Host memory is in between whatever device a user makes the default, for checkpoints and safetensors files."""
    model = build(rank, "flat", seed=1)
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    others = [build(rank, "flat", seed=seed) for seed in (2, 3)]
    its = adam(others[0])
    torch.set_default_device("meta")
    fullshard.async_save(tmp_path / "a", model, optimizer, step=1).result()
    fullshard.export_safetensors(model, str(tmp_path / "b"), dtype=torch.float64)
    assert fullshard.load(tmp_path / "a", others[0], its) == {"step": 1}
    fullshard.load_safetensors(others[1], str(tmp_path / "b"))
    torch.set_default_device(None)
    for other in others:
        assert_equal(values(other), values(model), "values")


@on_ranks(2)
def test_random_generators_continue(rank: Rank, tmp_path: Path) -> None:
    """Every rank's own generators (torch, Python, numpy) go on where they were; not with random=False.

    An object that draws numbers while it is loaded does not shift them.
    """

    class Draws(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(3)

    model = build(rank, "fully_shard")
    draw = lambda: (torch.rand(2).tolist(), random.random(), np.random.rand())  # noqa: E731
    torch.manual_seed(rank.rank)
    random.seed(rank.rank)
    np.random.seed(rank.rank)
    fullshard.save(tmp_path, model, loader=Draws(1))
    expected = draw()
    fullshard.load(tmp_path, model, loader=Draws(1))
    assert draw() == expected
    fullshard.load(tmp_path, model, random=False)
    assert draw() != expected


def test_steps_that_follow_background_saves_at_once_are_not_in_them(tmp_path: Path) -> None:
    """Whatever the delay before the optimizer steps: every file is bit for bit the state at its call."""
    model, again = nn.Linear(300, 200), nn.Linear(300, 200)
    optimizer, restored = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, again))
    delays = random.Random(0)
    for trial in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if trial % 2 == 0:
            optimizer.step()
        before = [tensor.detach().clone() for tensor in state_tensors(model, optimizer)]
        saving = fullshard.async_save(tmp_path, model, optimizer)
        time.sleep(delays.choice((0.0, 0.0, 0.001, 0.004)))
        optimizer.step()
        saving.result()
        fullshard.load(tmp_path, again, restored)
        for found, expected in zip(state_tensors(again, restored), before, strict=True):
            assert torch.equal(found, expected), trial


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and their state, in one order."""
    parameters = list(model.parameters())
    return [*parameters, *(value for p in parameters for _, value in sorted(optimizer.state[p].items()))]


@on_ranks(2)
def test_background_saves_use_the_same_memory_again(rank: Rank, tmp_path: Path) -> None:
    """The second allocates nothing, and holds what was there at its call; one that is to free it does."""
    model = build(rank, "fully_shard", seed=1)
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    sizes, usual = [], snapshot.host_buffer

    def counted(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
        sizes.append(numel)
        return usual(numel, dtype, pin=pin)

    snapshot.host_buffer = counted
    try:
        expected, futures = {}, []
        for name in ("a", "b"):
            expected[name] = values(model)
            futures.append(fullshard.async_save(tmp_path / name, model, optimizer))
            train(model, optimizer, 1, 2)
        assert futures[0].done()  # a later save waits
        futures[1].result()
        once = list(sizes)
        fullshard.async_save(tmp_path / "c", model, optimizer, keep_memory=False).result()
        assert sizes == once
        fullshard.async_save(tmp_path / "d", model, optimizer).result()
        assert sizes == 2 * once
    finally:
        snapshot.host_buffer = usual
    for name, found in expected.items():
        loaded = build(rank, "fully_shard", seed=5)
        fullshard.load(tmp_path / name, loaded)
        assert_equal(values(loaded), found, name)


def test_a_background_save_that_failed_frees_its_copy(tmp_path: Path) -> None:
    """Although its error, which the future keeps, has come through functions that held it."""
    copies, usual = [], snapshot.host_buffer

    def counted(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
        memory = usual(numel, dtype, pin=pin)
        copies.append(weakref.ref(memory))
        return memory

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "host_buffer", counted)
        patch.setattr(writer, "write_entries", full)
        future = fullshard.async_save(tmp_path, nn.Linear(8, 8), keep_memory=False)
        assert "no space left" in str(future.exception())
    gc.collect()
    assert copies and not any(copy() is not None for copy in copies)


@on_ranks(2)
def test_unsharded_parameters_are_not_computed_with_after_a_load(rank: Rank, tmp_path: Path) -> None:
    """Units that a forward without backward, or a setting, leaves unsharded: the next forward has the loaded values."""
    tokens = torch.arange(8)
    for kind in ("fully_shard", "flat", "fully_shard, unsharded"):
        kind, _, unsharded = kind.partition(", ")
        model = build(rank, kind, seed=1).eval()
        with torch.no_grad():
            expected = model(tokens)
        fullshard.save(tmp_path / kind, model)
        other = build(rank, kind, seed=2).eval()
        if unsharded:
            other.set_reshard_after_forward(False)
            other.set_reshard_after_backward(False)
            other(tokens).sum().backward()
        with torch.no_grad():
            assert not torch.equal(other(tokens), expected)
            fullshard.load(tmp_path / kind, other)
            assert_equal(other(tokens), expected, kind)


# ---------------------------------------------------------------- what does not fit


class Wider(Model):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(7)
        self.added = nn.Parameter(torch.ones(2))
        del self.one
        self.low = nn.Parameter(torch.ones(3, 5))


@on_ranks(2)
def test_a_checkpoint_of_another_model(rank: Rank, tmp_path: Path) -> None:
    """The error lists what is missing, unexpected, of another shape or dtype; nothing of the model changes.

    With strict=False and cast=True what is missing stays, and dtypes are converted.
    """
    fullshard.save(tmp_path, build(rank, "flat", seed=1))
    model = KINDS["flat"](rank, Wider(2))
    before = values(model)
    with pytest.raises(CheckpointError) as caught:
        fullshard.load(tmp_path, model)
    for text in (
        "nothing was changed",
        "model.added: not in the checkpoint",
        "model.one: in the checkpoint, but not in the model",
        "model.norm.weight: shape (6,) in the checkpoint, (7,) in the model",
        "model.low: torch.bfloat16 in the checkpoint, torch.float32 in the model; pass cast=True",
    ):
        assert text in str(caught.value)
    assert_equal(values(model), before, "model")
    plain = Wider(2)
    plain.norm = nn.BatchNorm1d(6)
    model = fully_shard(plain, mesh=rank.mesh)
    fullshard.load(tmp_path, model, strict=False, cast=True)
    state = model.state_dict()
    assert_equal(state["low"].full_tensor(), Model(1).low.detach().float(), "low")
    assert_equal(state["added"].full_tensor(), torch.ones(2), "added")
    assert_equal(state["embed.weight"].full_tensor(), Model(1).embed.weight.detach(), "embed.weight")


@on_ranks(2)
def test_damage_on_one_rank_leaves_all_ranks_untouched(rank: Rank, tmp_path: Path) -> None:
    """One flipped byte in what only rank 1 reads: both raise, both keep model and optimizer."""
    source = build(rank, "fully_shard", seed=1)
    its = adam(source)
    train(source, its, 0, 1)
    fullshard.save(tmp_path, source, its)
    dist.barrier()
    if rank.rank == 0:
        (path,) = [path for path in tmp_path.iterdir() if path.name.endswith("-1.safetensors")]
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        flip(path, header + 10)  # in a tensor: values are read first, and by themselves
    dist.barrier()
    model = build(rank, "fully_shard", seed=2)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    before, states = values(model), optimizer_values(optimizer)
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        fullshard.load(tmp_path, model, optimizer)
    assert_equal(values(model), before, "model")
    assert_equal(optimizer_values(optimizer), states, "optimizer")


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: Rank, tmp_path: Path) -> None:
    """An optimizer or object that was not saved, and a model on the meta device, are no success; nor is a bad name."""
    model = build(rank, "fully_shard")
    fullshard.save(tmp_path, model)
    with torch.device("meta"):
        meta = fully_shard(nn.Linear(3, 3), mesh=rank.mesh)
    not_loaded: list[tuple[list[Any], dict[str, Any], str]] = [
        ([model, adam(model)], {}, "nothing was changed"),
        ([model], {"scheduler": Counter(1)}, "scheduler: not in the checkpoint"),
        ([meta], {"strict": False}, "weight: on the meta device"),
    ]
    for arguments, options, message in not_loaded:
        with pytest.raises(CheckpointError, match=message):
            fullshard.load(tmp_path, *arguments, **options)
    for name in ("strict", "cast", "random", "key_map"):
        with pytest.raises(ValueError, match=name):
            fullshard.save(tmp_path, model, **{name: 1})
    for path in ("", Path("s3://bucket/run")):  # pathlib takes a slash away
        with pytest.raises(ValueError, match=r"empty; pass a folder|pathlib"):
            fullshard.save(path, model)


@on_ranks(2)
def test_options_that_are_tensors_and_state_of_users(rank: Rank, tmp_path: Path) -> None:
    """Two groups with equal tensor learning rates become one; what users keep in the state comes back."""
    model = build(rank, "fully_shard", seed=1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": part, "lr": torch.tensor(0.25)} for part in (trained[:3], trained[3:])]
    optimizer = torch.optim.Adam(groups, foreach=False)
    train(model, optimizer, 0, 1)
    optimizer.state["phase"] = "warm"
    optimizer.state["totals"] = {"sum": torch.ones(6_000), "count": 2}
    fullshard.save(tmp_path, model, optimizer)
    other = build(rank, "flat", seed=2)
    its = adam(other, lr=1.0)
    fullshard.load(tmp_path, other, its)
    assert_equal(its.param_groups[0]["lr"], torch.tensor(0.25, device="cpu"), "lr")
    assert its.state["phase"] == "warm"
    assert_equal(its.state["totals"], {"sum": torch.ones(6_000, device="cpu"), "count": 2}, "totals")
    assert train(other, its, 1, 2) == train(model, optimizer, 1, 2)


# ---------------------------------------------------------------- what ranks do not have in common


@on_ranks(2)
def test_what_only_one_rank_has_is_an_error_on_all(rank: Rank, tmp_path: Path) -> None:
    """Another path, arguments, model, a value that could not be read again, or no package for the URL of the folder.

    A checkpoint that was there stays.
    """
    model = build(rank, "original")
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    fullshard.save(tmp_path, model, optimizer, step=1)
    other = nn.Sequential(nn.Linear(2, 2)) if rank.rank == 0 else nn.ModuleDict({"other": nn.Linear(2, 2)})
    bad = Counter if rank.rank == 1 else 0  # a class, not an instance
    calls: list[tuple[list[Any], dict[str, Any], str]] = [
        ([tmp_path / str(rank.rank), model], {}, "called different functions"),
        ([tmp_path, model, optimizer if rank.rank == 0 else None], {}, "called different functions"),
        ([tmp_path, other], {}, r"different models: .*0\.weight \(a tensor on rank 0; nothing on rank 1"),
        ([tmp_path, model], {"bad": bad}, r"extra\.bad"),
    ]
    for arguments, extra, message in calls:
        with pytest.raises((FullshardError, TypeError), match=message):
            fullshard.save(*arguments, **extra)

    def refuse(path: Any) -> Any:
        raise CheckpointError("no package for this URL")

    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(saving, "Folder", refuse)
        for call in (fullshard.save, fullshard.async_save):
            with pytest.raises(CheckpointError, match="no package for this URL"):
                call(tmp_path, model)
    assert fullshard.load(tmp_path, model, optimizer) == {"step": 1}


@on_ranks(2)
def test_parameters_without_elements_are_saved(rank: Rank, tmp_path: Path) -> None:
    """They have a name and a shape, and are missed when they are gone."""
    for kind in ("fully_shard", "flat", "original"):
        plain = Model(1)
        plain.none = nn.Parameter(torch.empty(0, 3))
        model = KINDS[kind](rank, plain)
        fullshard.save(tmp_path / kind, model)
        fullshard.load(tmp_path / kind, model)


@on_ranks(2)
def test_what_is_not_kept_equal_is_one_ranks(rank: Rank, tmp_path: Path) -> None:
    """Buffers, values and options are rank 0's, all of them; parameters that differ are refused."""
    model = build(rank, "fully_shard")
    with torch.no_grad():
        for buffer in (model.norm.running_mean, model.norm.running_var):
            buffer.fill_(rank.rank)
    optimizer = adam(model, lr=float(rank.rank))
    fullshard.save(tmp_path, model, optimizer, **{f"x{i}": rank.rank for i in range(6)})
    values_of = fullshard.load(tmp_path, model, optimizer)
    assert values_of == {f"x{i}": 0 for i in range(6)}
    assert optimizer.param_groups[0]["lr"] == 0
    for buffer in (model.norm.running_mean, model.norm.running_var):
        assert_equal(buffer, torch.zeros(6), "buffer")
    plain = Model()
    ignored = {plain.one}
    plain.one.data.fill_(rank.rank)
    with pytest.raises(CheckpointError, match=r"that are not sharded .*: model\.one \(\w+ on rank 0; \w+ on rank 1\)"):
        fullshard.save(tmp_path, fully_shard(plain, mesh=rank.mesh, ignored_params=ignored))


@on_ranks(2)
def test_a_folder_that_ranks_do_not_share_keeps_its_checkpoint(rank: Rank, tmp_path: Path) -> None:
    """What one rank wrote elsewhere is missed before the old index is given up."""
    model = build(rank, "fully_shard", seed=1)
    fullshard.save(tmp_path / "x", model, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(saving, "Folder", lambda path: Folder(tmp_path / "elsewhere"))
        patch.setattr(files, "_LOOK_S", 0)
        with pytest.raises(CheckpointError, match="the folder must be on a file system that all ranks share"):
            fullshard.save(tmp_path / "x", model, step=2)
    assert fullshard.load(tmp_path / "x", model) == {"step": 1}


@on_ranks(2, fresh=True)
def test_a_group_that_is_destroyed_while_saving_loses_no_checkpoint(rank: Rank, tmp_path: Path) -> None:
    """The ranks do not go on as if each were alone."""
    model = Model(1)
    fullshard.save(tmp_path, model, step=1)
    begin = threading.Event()

    def late(*arguments: Any, **options: Any) -> None:
        begin.wait()
        writer.write_checkpoint(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_checkpoint", late)
        future = fullshard.async_save(tmp_path, model, step=2)
        dist.destroy_process_group()
        begin.set()
        with pytest.raises(CheckpointError, match=r"the process group has been destroyed"):
            future.result()
    assert fullshard.load(tmp_path, model) == {"step": 1}


def test_a_failure_of_a_background_save(tmp_path: Path) -> None:
    """It comes with the result; if nobody asks for that, the next save warns, lest nothing is saved for weeks."""
    model = Model()
    (tmp_path / "file").write_text("in the way")
    fullshard.async_save(tmp_path / "file" / "inside", model)
    with pytest.warns(UserWarning, match="the previous async_save failed"):
        fullshard.save(tmp_path / "x", model)
    asked = fullshard.async_save(tmp_path / "file" / "inside", model)
    with pytest.raises(CheckpointError, match="cannot save the checkpoint"):
        asked.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fullshard.save(tmp_path / "x", model)
    fullshard.load(tmp_path / "x", model)


def test_objects_that_are_not_asked_for_stay_in_the_checkpoint(tmp_path: Path) -> None:
    """A model and an optimizer (also one that keeps nothing) among the extras that load is not given are no values."""
    model, second = Model(1), Model(2)
    other, plain = adam(second), torch.optim.SGD(model.parameters(), lr=0.5)
    train(second, other, 0, 1)
    fullshard.save(tmp_path, model, plain, ema=second, ema_optimizer=other, step=1)
    assert fullshard.load(tmp_path, model) == {"step": 1}
    its = torch.optim.SGD(model.parameters(), lr=0.1)
    fullshard.load(tmp_path, model, its)
    assert its.param_groups[0]["lr"] == 0.5


@on_ranks(3, fresh=True)
def test_groups_of_some_ranks(rank: Rank, tmp_path: Path) -> None:
    """torch names a group by how many a rank is in: neither a save nor the program waits for groups of other names."""
    pair = dist.new_group([0, 1])
    if rank.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    model = build(rank, "fully_shard", seed=1)
    fullshard.save(tmp_path / "a", model)
    fullshard.async_save(tmp_path / "b", model).result()
    fullshard.load(tmp_path / "b", model)
    if rank.rank < 2:
        some = nn.Linear(2, 2)
        fullshard.save(tmp_path / "c", some, process_group=pair)
        fullshard.load(tmp_path / "c", some, process_group=pair)
        fullshard.async_save(tmp_path / "d", some, process_group=pair).result()
        fullshard.load(tmp_path / "d", some, process_group=pair)
    sum_of_ranks = torch.full((1,), 1 + rank.rank)
    dist.all_reduce(sum_of_ranks, group=dist.new_group([0, 1, 2]))
    assert sum_of_ranks.item() == 6


@on_ranks(2)
def test_ranks_that_see_different_checkpoints_are_refused(rank: Rank, tmp_path: Path) -> None:
    """What is read together follows from the index: with two of them, one rank would wait for the other.

    Two saves of one model differ in their values only: half of each would be loaded.
    """
    model = build(rank, "fully_shard")
    fullshard.save(tmp_path / "0", model, step=1)
    fullshard.save(tmp_path / "1", model, step=1, more=torch.ones(9_000))
    with pytest.MonkeyPatch.context() as patch:
        usual = CheckpointReader.open
        patch.setattr(CheckpointReader, "open", lambda path: usual(tmp_path / str(rank.rank)))
        with pytest.raises(CheckpointError, match="rank 1 differs from rank 0 in the checkpoint that they read"):
            fullshard.load(tmp_path / "0", model)
        fullshard.save(tmp_path / "1", model, step=1)
        with pytest.raises(CheckpointError, match="rank 1 differs from rank 0 in the checkpoint that they read"):
            fullshard.load(tmp_path / "0", model)
    assert fullshard.load(tmp_path / "0", model) == {"step": 1}
