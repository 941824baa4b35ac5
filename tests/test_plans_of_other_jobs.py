"""What a plan says where its short cuts do not hold, and what a process finds after it."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import pytest
import torch
from torch import nn

import fullshard
from fullshard.planning.caching import CachingAllocator
from fullshard.planning.cluster import PRESETS, Link
from fullshard.planning.search import SAME
from fullshard.planning.simulation.clocks import Passage, SkippingClock
from fullshard.planning.simulation.streams import SimulatedDevice


class Repeats(nn.Module):
    """A block whose layer runs several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(256, 256), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


def test_blocks_that_take_longer_than_they_look_are_run() -> None:
    """They have the classes and the shapes of the others, from which a search would estimate them."""
    with torch.device("meta"):
        model = nn.Sequential(*(Repeats(1) for _ in range(7)), *(Repeats(9) for _ in range(7)))
    fixed = {"replicas": 1, "microbatches": 1, "blocks_per_unit": 1, "prefetch_bytes": None}
    fixed |= {"offload_optimizer": False, "reshard_after_forward": None, "mixed_precision": None}
    batch = torch.empty(4096, 256)
    found = fullshard.plan(model, batch, ranks=8, choices=fixed, search=True)
    assert len(found.alternatives) == 2
    for each in found.alternatives:
        full = fullshard.plan(model, batch, ranks=8, choices=each.choices)
        assert each.seconds == pytest.approx(full.step.seconds, rel=SAME), each.name


def test_messages_on_one_link_follow_one_another() -> None:
    """Also those of several communicators; one on another link does not wait for them."""
    device = SimulatedDevice(SkippingClock(lambda: 0.0))
    passages = [Passage(1.0), Passage(1.0), Passage(1.0, link="outer")]
    for passage in passages:
        device.transmit(passage, lambda: None)
    assert device.ends_of([passage.mark for passage in passages]) == [1.0, 2.0, 1.0]


def test_freed_neighbors_are_joined_in_any_order() -> None:
    """A segment of which all is free serves a request of its size, as torch's caching allocator has it."""
    for order in itertools.permutations(range(4)):
        allocator = CachingAllocator()
        chunks = [allocator.allocate(5 * 2**20) for _ in order]
        for index in order:
            allocator.free(chunks[index])
        allocator.allocate(20 * 2**20)
        assert allocator.reserved == 20 * 2**20, order


def test_what_a_step_leaves_to_others() -> None:
    """A step does not fit if it needs more than 95 % of the memory."""
    with torch.device("meta"):
        plan = fullshard.plan(nn.Linear(64, 64), torch.empty(8, 64), ranks=2)
    for share, fits in ((0.94, True), (0.96, False)):
        cluster = dataclasses.replace(plan.cluster, memory=plan.reserved_bytes / share)
        assert dataclasses.replace(plan, cluster=cluster).fits is fits


def test_over_gloo_a_byte_crosses_the_network_once_for_a_node() -> None:
    """Of four ranks on two nodes, one of the three shards that a rank receives is from its own; in a ring all pass."""
    gloo = dataclasses.replace(PRESETS["cpu"], node=2, outer={2: Link(1e9)})
    assert gloo.link(4).bandwidth == pytest.approx(1.5e9)
    assert dataclasses.replace(gloo, backend="nccl").link(4).bandwidth == pytest.approx(1e9)


def test_uncaught_errors_are_shown_as_before() -> None:
    """A process group adds the number of its rank to them, and the one of a plan is gone."""
    before = sys.excepthook
    with torch.device("meta"):
        fullshard.plan(nn.Linear(4, 4), torch.empty(2, 4), ranks=2)
    assert sys.excepthook is before
