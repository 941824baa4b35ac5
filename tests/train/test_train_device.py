"""Where `fullshard train` computes: any accelerator that torch has, in the place of which functions stand here."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist

from fullshard.train import group
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.group import Group, choose
from fullshard.train.launcher import resolve_ranks
from ranks import Rank, on_ranks

# Types of accelerators and what c10d names as their back end. HPU stands for those that come with a package of their
# own: neither its module nor its back end is part of torch.
KINDS = [("cuda", "nccl"), ("xpu", "xccl"), ("hpu", "hccl")]


@pytest.fixture(params=KINDS, ids=lambda kind: kind[0])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The type of accelerator of which this machine seems to have two."""
    name, backend = request.param
    seem_to_have(monkeypatch, name, 2)
    monkeypatch.setattr(torch, name, types.SimpleNamespace(is_initialized=lambda: False), raising=False)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, name, backend)
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "hccl"])
    monkeypatch.setattr(dist, f"is_{backend}_available", lambda: True, raising=False)
    return str(name)


def seem_to_have(monkeypatch: pytest.MonkeyPatch, name: str | None, count: int) -> None:
    found = None if name is None else torch.device(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_auto_takes_accelerators_if_there_is_one_for_each_rank(kind: str) -> None:
    """One rank per accelerator unless told otherwise; with more ranks than that, all compute on the CPU."""
    assert choose("auto", 0) == (kind, 2)
    assert choose("auto", 1) == (kind, 1)
    assert choose("auto", 3) == ("cpu", 3)


def test_accelerators_and_cpu_by_name(kind: str) -> None:
    """A type is what torch calls it; the CPU is taken where it is asked for."""
    assert choose(kind, 0) == (kind, 2)
    assert choose(kind, 1) == (kind, 1)
    assert choose("cpu", 0) == ("cpu", 2)
    assert choose("cpu", 5) == ("cpu", 5)


def test_what_the_launcher_settles(kind: str) -> None:
    """The config has the device and the number of ranks that are chosen."""
    config = resolve_ranks(TrainConfig(seed=3))
    assert config == TrainConfig(seed=3, device=kind, ranks=2)


def test_too_few_accelerators_are_an_error(kind: str) -> None:
    """The message says how many there are, how many are needed, and what to do."""
    message = f"--device {kind} needs one accelerator per rank: found 2 for 3 ranks. Use fewer --ranks, or --device cpu"
    with pytest.raises(ConfigError, match=message):
        choose(kind, 3)


@pytest.mark.parametrize("wanted", ["mtia", "tpu", "", "cpu:0"])
def test_another_type_of_device_is_an_error(kind: str, wanted: str) -> None:
    """The message names what this machine has."""
    with pytest.raises(ConfigError, match=f"one of auto, cpu, {kind} on this machine, found '{wanted}'"):
        choose(wanted, 1)


@pytest.mark.parametrize("ranks", [0, 1])
def test_without_accelerators(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Two ranks on the CPU; asking for an accelerator is an error."""
    seem_to_have(monkeypatch, None, 0)
    assert choose("auto", ranks) == ("cpu", ranks or 2)
    with pytest.raises(ConfigError, match="one of auto, cpu on this machine, found 'cuda'"):
        choose("cuda", ranks)


@pytest.mark.parametrize("name", ["mps", "xpu", "mtia"])
def test_accelerators_that_cannot_work_together(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On the CPU compute those with which torch makes no mesh (MPS), and without a back end, built in or at all."""
    seem_to_have(monkeypatch, name, 1)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
    assert choose("auto", 1) == ("cpu", 1)
    with pytest.raises(ConfigError, match=f"one of auto, cpu on this machine, found '{name}'"):
        choose(name, 1)


def test_ranks_take_the_device_of_their_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank selects the accelerator with its local number, and its process group is that of c10d's back end for it."""
    done: list[object] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(group, "_initialize", lambda backend, device: done.append((backend, device)))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    own = torch.device(kind, 1)
    assert Group.join("auto") == Group(5, 8, own)
    assert done == [1, (dict(KINDS)[kind], own)]
    done.clear()
    assert Group.join("cpu") == Group(5, 8, torch.device("cpu"))
    assert done == [("gloo", None)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="found 2 for 3 ranks") as raised:
        Group.join(kind)
    assert not isinstance(raised.value, ConfigError)  # of which only rank 0 would tell


@on_ranks(2, 4)
def test_sums_are_those_of_float64(rank: Rank) -> None:
    """Sums are right where float32 would round, and equal on all ranks."""
    everyone = Group(rank.rank, rank.world_size, torch.device("cpu"))
    assert everyone.sum(1.0 if rank.rank else 2.0**50, 1) == [2.0**50 + rank.world_size - 1, rank.world_size]
