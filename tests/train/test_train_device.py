"""Where `fullshard train` computes: any accelerator that torch has, in the place of which functions stand here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fullshard.train.group import Group, choose

# Types of accelerators and what c10d names as their back end. HPU stands for those that come with a package of their
# own: neither its module nor its back end is part of torch.
KINDS = [("cuda", "nccl"), ("xpu", "xccl"), ("hpu", "hccl")]


@pytest.fixture(params=KINDS, ids=lambda kind: kind[0])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The type of accelerator of which this machine seems to have two."""
    name, backend = request.param
    seem_to_have(monkeypatch, name, 2)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, name, backend)
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "hccl"])
    monkeypatch.setattr(dist, f"is_{backend}_available", lambda: True, raising=False)
    return str(name)


def seem_to_have(monkeypatch: pytest.MonkeyPatch, name: str | None, count: int) -> None:
    found = None if name is None else torch.device(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_accelerators_are_taken_if_there_is_one_for_each_rank(kind: str) -> None:
    """One rank per accelerator unless the user says otherwise; with more ranks than that, all compute on the CPU."""
    assert choose("auto", 0) == (kind, 2) and choose("auto", 1) == (kind, 1)
    assert choose("auto", 3) == ("cpu", 3)
    assert choose("cpu", 0) == ("cpu", 2) and choose("cpu", 5) == ("cpu", 5)


@pytest.mark.parametrize(("name", "count"), [(None, 0), ("mps", 1), ("xpu", 1), ("mtia", 1)])
def test_without_accelerators_that_work_together(monkeypatch: pytest.MonkeyPatch, name: str | None, count: int) -> None:
    """On the CPU compute those with which torch makes no mesh (MPS), and without a back end, built in or at all."""
    seem_to_have(monkeypatch, name, count)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
    assert choose("auto", 0) == ("cpu", 2)


def test_ranks_take_the_device_of_their_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank selects the accelerator with its local number, and its process group is that of c10d's back end for it."""
    done: list[object] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, device_id: done.append((backend, device_id)))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    own = torch.device(kind, 1)
    assert Group.join("auto") == Group(5, 8, own)
    assert Group.join("cpu") == Group(5, 8, torch.device("cpu"))
    assert done == [1, (dict(KINDS)[kind], own), ("gloo", None)]


def test_torchrun_restarts_need_a_store_for_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are started anew would wait for killed ones: the error says which variable to set."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="--max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        Group.join("cpu")
