"""Ranks that are stuck, or out of step, all get the same error, which names ranks, units, phases and steps."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fullshard.ragged
from fullshard import (
    CommQuantization,
    FullshardError,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    memory,
    replicate,
    unsharded,
)
from fullshard.checkpoint import saving
from fullshard.engine.ownership import unit_of
from fullshard.progress import PROGRESS, Launch
from fullshard.ranks import watchdog
from fullshard.ranks.agreement import differs
from fullshard.ranks.verdict import OURS, GroupReport, Report, judge
from fullshard.train.stop import StopRequest
from fullshard.wrap import ModuleWrapPolicy
from models import tiny_units
from ranks import Rank, RankPool, on_ranks

STUCK_S, LOST_S = 0.5, 2.0
LONG_S = 2.0  # that a rank of a correct program does something else
ODD = 2  # the rank that does something else, in step 1
WIDTH = 16


class Block(nn.Module):
    """A layer that first does what a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            self.before()
        return x + torch.relu(self.linear(x))


class Net(nn.Module):
    """Blocks in a given order; the output of one may be kept out of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.order, self.without_gradient, self.steps_done = [0, 1, 2, 3], -1, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            y = self.blocks[index](x)
            x = x + y.detach() if index == self.without_gradient else y
        return x


@contextlib.contextmanager
def polling() -> Iterator[None]:
    """Have the watchdog compare ranks every 0.1 s, as with a store that a server keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_has_server", lambda store: True)
        patch.setattr(watchdog, "_POLL_S", 0.1)
        yield


def warnings_of_the_watchdog() -> list[str]:
    """A list that gets all that the watchdog logs from now on; the process is to be a fresh one."""
    written: list[str] = []
    logging.getLogger(watchdog.__name__).addFilter(lambda record: written.append(record.getMessage()) is None)
    return written


def what_is_said(work: Callable[[], object]) -> str:
    """The message of the error that ``work`` raises; "trained" without one."""
    try:
        work()
    except FullshardError as error:
        return str(error)
    return "trained"


def the_one_word(told: Sequence[str]) -> str:
    """What all ranks have said, which has to be the same."""
    assert len(set(told)) == 1, told
    return told[0]


def train_for(seconds: float, step: Callable[[int], object]) -> None:
    """Steps with a pause after each, until the watchdog ends them."""
    for number in range(int(seconds / 0.02)):
        step(number)
        time.sleep(0.02)


def step_of(model: nn.Module, optimizer: Any = None, width: int = WIDTH) -> None:
    model(torch.ones(2, width)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def fail() -> None:
    raise ValueError("a bad batch")


def end(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)
    time.sleep(30)


def train(rank: Rank, front_end: str, scenario: str, folder: str = "") -> str:
    """Three steps of two microbatches; returns the error and how long it took."""
    warned = warnings_of_the_watchdog()
    os.environ[watchdog.TIMEOUT_VARIABLE], os.environ[watchdog.LOST_VARIABLE] = str(STUCK_S), str(LOST_S)
    torch.manual_seed(0)
    net = Net()
    blocks = list(net.blocks)
    with tiny_units():
        if front_end == "composable":
            for block in net.blocks:
                fully_shard(block)
            model: nn.Module = fully_shard(net)
        else:
            model = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        since = time.monotonic()
        try:
            for step in range(2 if scenario == "fewer steps" and rank.rank == ODD else 3):
                since = time.monotonic()
                if rank.rank == ODD and step == (0 if scenario == "first order" else 1) and scenario in ODD_ACTIONS:
                    ODD_ACTIONS[scenario](net, blocks)
                if (scenario, step, rank.rank == ODD) in (("saves alone", 1, True), ("does not save", 1, False)):
                    fullshard.checkpoint.save(f"{folder}/saved", model)
                for microbatch in range(2):
                    if scenario == "fewer microbatches" and rank.rank == ODD and step == 1 and microbatch == 1:
                        continue
                    loss = model(torch.ones(2, WIDTH)).square().mean()
                    if scenario == "raises between" and rank.rank == ODD and step == 1:
                        fail()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                blocks[1].before = None
        except FullshardError as error:
            return f"{time.monotonic() - since:.1f} {error}"
        except ValueError as error:
            if scenario == "raises between":  # and nobody handles it
                sys.last_value = error
                PROGRESS.watchdog._exit()
            time.sleep(4 * STUCK_S)
            return "handled"
    if scenario.startswith("fewer"):
        PROGRESS.watchdog._exit()  # this process is through
    return "\n".join(["trained", *warned])


def destroy_the_group_after_an_error(net: Net, blocks: list[Any]) -> None:
    try:
        raise ValueError("a bad record")
    finally:
        dist.destroy_process_group()
        time.sleep(4 * STUCK_S)


def before_block_1(action: Callable[[], object]) -> Callable[[Net, list[Any]], None]:
    return lambda net, blocks: setattr(blocks[1], "before", action)


# What the odd rank does: in step 1, but for "first order".
ODD_ACTIONS: dict[str, Callable[[Net, list[Any]], object]] = {
    "first order": lambda net, blocks: setattr(net, "order", [0, 2, 1, 3]),
    "order": lambda net, blocks: setattr(net, "order", [0, 2, 1, 3]),
    "skipped": lambda net, blocks: setattr(net, "order", [0, 1, 3]),
    "not in the loss": lambda net, blocks: setattr(net, "without_gradient", 1),
    "forward raises": before_block_1(fail),
    "backward raises": lambda net, blocks: blocks[1].register_full_backward_hook(lambda *_: fail()),
    "killed": before_block_1(lambda: end(signal.SIGKILL)),
    "stopped": before_block_1(lambda: end(signal.SIGSTOP)),
    "slow": before_block_1(lambda: time.sleep(4 * STUCK_S)),
    "other collective": lambda net, blocks: dist.all_reduce(torch.ones(1)),
    "waits for another": lambda net, blocks: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "full tensor": lambda net, blocks: next(net.parameters()).full_tensor(),
    "destroys": destroy_the_group_after_an_error,
}
# Others wait for a collective, or it fails.
ENDED = ["has ended (without an exception that is known)", "on rank 2", "a collective", " in the forward of"]
# What the error says.
SCENARIOS = {
    "first order": ["'blocks.1' on ranks 0, 1, 3", "'blocks.2' on rank 2"],
    "order": [
        "(step 1, microbatch 0) on ranks 0, 1, 3",
        "all-gather of 'blocks.1' (step 1, microbatch 0) on rank 2",
        "different units at position 2 (from 0): 'blocks.1' on ranks 0, 1, 3; 'blocks.2' on rank 2",
    ],
    "skipped": ["position 3 (from 0): 'blocks.2' on ranks 0, 1, 3; 'blocks.3' on rank 2", "step 1, microbatch 0"],
    "not in the loss": ["of 'blocks.1' (step 1, microbatch 0) on ranks 0, 1, 3", "waits for a collective in the"],
    "fewer microbatches": ENDED,
    "fewer steps": ENDED,
    "forward raises": ["forward of 'blocks.1': ValueError: a bad batch", "step 1, microbatch 0) on rank 2"],
    "backward raises": ["raised an exception (backward)", "step 1, microbatch 0) on rank 2"],
    "raises between": [
        "has ended (ValueError: a bad batch)",
        "user code after the forward (step 1, microbatch 0) on rank 2",
    ],
    "killed": ["rank 2 is lost", "in the forward of 'blocks.", "(step 1, microbatch 0)", "its process is gone"],
    "stopped": ["rank 2 is lost", "waits for a collective in the forward of", "its process is stopped"],
    "other collective": [
        "ranks 0-3 wait for each other",
        "waits in all_reduce, called at test_watchdog.py:",
        "user code after the optimizer step",
        "on rank 2",
    ],
    "waits for another": ["waits in all_reduce, called at test_watchdog.py:", "on rank 2"],
    "full tensor": ["waits in all_gather in full_tensor, called at test_watchdog.py:", "on rank 2"],
    "saves alone": ["ranks 0-3 wait for each other", "waits for a collective in save /", "step 1", "on rank 2"],
    "does not save": ["ranks 0-3 wait for each other", "waits for a collective in save /", "on ranks 0, 1, 3"],
    "destroys": ["has ended (ValueError: a bad record)", "on rank 2"],
}
# The front ends differ in who catches what a forward or a backward raises.
OF_BOTH = ("order", "forward raises", "backward raises")


@pytest.mark.parametrize(
    ("front_end", "scenario"),
    [("composable", scenario) for scenario in SCENARIOS] + [("wrapper", scenario) for scenario in OF_BOTH],
)
def test_every_rank_says_what_happened(ranks: RankPool, scenario: str, front_end: str, tmp_path: Path) -> None:
    """All ranks that can raise the same error, far sooner than the back end."""
    limit = 8 if scenario == "stopped" else 25  # which is waited for: a stopped rank does not end
    outcomes = ranks(4, train, front_end, scenario, str(tmp_path), fresh=True, expect_failure=True, timeout=limit)
    told = []
    for outcome in outcomes:
        if outcome.rank != ODD:
            assert outcome.kind == "returned", outcome
            seconds, error = outcome.value.split(" ", 1)
            assert float(seconds) < 15
            told.append(error)
    text = the_one_word(told)
    for words in SCENARIOS[scenario]:
        assert words in text, text


def test_training_goes_on_after_a_slow_rank(ranks: RankPool) -> None:
    """It is reported, once."""
    outcomes = ranks(4, train, "composable", "slow", fresh=True, expect_failure=True)
    written = "\n".join(outcome.value for outcome in outcomes).split("\n")
    warned = [line for line in written if line != "trained"]
    assert len(written) == 4 + len(warned)
    assert 1 <= len(warned) <= 3, "\n".join(warned)  # at most once by a rank that waits
    for line in warned:
        assert "wait for slow ranks: computes in the forward of 'blocks.1' (step 1, microbatch 0), for " in line
        assert "on rank 2. Training goes on" in line


@on_ranks(2)
def test_a_process_that_was_asked_to_end_does_not_wait_for_a_reason(rank: Rank) -> None:
    """A launcher that ends it starts ranks again only when all have ended."""
    step_of(fully_shard(Net()))
    current, broken = PROGRESS.watchdog, RuntimeError("gloo: Connection closed by peer")
    request = StopRequest.__new__(StopRequest)  # without handlers of signals in this process
    request.code = 0
    with mock.patch.object(current.failed, "wait", side_effect=AssertionError("waits")):
        with pytest.raises(AssertionError, match="waits"):
            current.explained(broken)
        request._ask(signal.SIGTERM, None)
        assert current.explained(broken) is broken
    PROGRESS.ends = False  # the process goes on to other tests


@polling()
def train_out_of_step(rank: Rank, odd: str, kind: str) -> str:
    """Rank 2 leaves something out; collectives match, and nobody is ever stuck."""
    model = replicate(Net()) if kind == "replicate" else fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        for microbatch in range(2):
            if odd != "microbatch" or number != 1 or microbatch or rank.rank != ODD:
                step_of(model)
        if not (rank.rank == ODD and (odd == "all steps" or (odd == "a step" and number % 10 == 1))):
            optimizer.step()

    return what_is_said(lambda: train_for(20, step))


@pytest.mark.parametrize(
    ("kind", "odd"),
    [("fully_shard", "microbatch"), ("fully_shard", "a step"), ("fully_shard", "all steps"), ("replicate", "a step")],
)
def test_ranks_that_are_out_of_step(ranks: RankPool, odd: str, kind: str) -> None:
    """They gather shards of different steps into one parameter, or add their gradients, and do not go on."""
    told = the_one_word(ranks(4, train_out_of_step, odd, kind, fresh=True))
    where = r"of the root \(step \d+, microbatch \d+\), after \d+ steps of an optimizer, on rank"
    assert re.search(rf"in different optimizer steps, .* {where}s 0, 1, 3; .* {where} 2\nNow:\n", told), told


@polling()
def train_cut_differently(rank: Rank, how: str) -> str:
    """Rank 2 cuts parameters otherwise; messages have the same sizes, and nobody is ever stuck."""
    odd = rank.rank == ODD
    options: dict[str, Any] = {
        "dim": {"shard_placement_fn": lambda parameter: Shard(1 if odd and parameter.ndim == 2 else 0)},
        "granularity": {"layout": "ragged", "granularity": "parameter" if odd else "element"},
        "order": {},
        "strides": {},
        "dtype": {"mp_policy": MixedPrecisionPolicy(torch.float16 if odd else torch.bfloat16)},
    }[how]
    net = Net()
    if odd and how == "order":
        net.blocks = nn.ModuleDict({str(index): net.blocks[index] for index in (1, 0, 2, 3)})
        net.order = ["0", "1", "2", "3"]
    elif odd and how == "strides":
        net.blocks[0].linear.weight = nn.Parameter(net.blocks[0].linear.weight.detach().t().contiguous().t())
    model = fully_shard(net, **options)
    with mock.patch.object(watchdog.Watchdog, "compare_units"):  # as if they changed after the first forward
        return what_is_said(lambda: train_for(20, lambda _: step_of(model)))


@on_ranks(2)
def test_strides_that_mean_nothing_are_not_compared(rank: Rank) -> None:
    """Those of dims of size 1 may depend on how a rank has loaded its model."""
    layouts = []
    for strides in ((1, 1), (1, 7)):
        module = nn.Linear(1, 7, bias=False)
        module.weight = nn.Parameter(torch.ones(7).as_strided((7, 1), strides))
        model = fully_shard(module)
        model(torch.ones(2, 1)).sum().backward()
        (bucket,) = unit_of(model).buckets
        layouts.append(bucket.launch_name("", {}).layout)
    assert layouts[0] == layouts[1] != 0


CUTS = {
    "dim": r"blocks.0.linear.weight \(16, 16\) .* dim 0, packed on ranks 0, 1, 3; .* dim 1, packed on rank 2\nNow:\n",
    "granularity": r"blocks.0.linear.bias .* of 272 elements on ranks 0, 1, 3; .* elements on rank 2\nNow:\n",
    "order": r"blocks.0.linear.weight .* on ranks 0, 1, 3; blocks.1.linear.weight .* on rank 2\nNow:\n",
    "strides": r"blocks.0.linear.weight .* \(16, 1\).* on ranks 0, 1, 3; .* \(1, 16\).* on rank 2\nNow:\n",
    "dtype": r".*sent in torch.bfloat16 .* on ranks 0, 1, 3; .*sent in torch.float16 .* on rank 2\nNow:\n",
}


@pytest.mark.parametrize("how", CUTS)
def test_ranks_that_cut_parameters_differently(ranks: RankPool, how: str) -> None:
    """They read elements of other parameters, or other numbers, and do not go on."""
    told = the_one_word(ranks(4, train_cut_differently, how, fresh=True))
    assert re.search(rf"mix up elements of parameters: the root has {CUTS[how]}", told), told
    assert "arguments of fully_shard that depend on the rank" in told


@polling()
def experts_of_other_sizes(rank: Rank, width: int) -> str:
    """Experts on pairs of ranks, larger on one pair, which does not step its own in each step; and a second model."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))
    net = nn.Module()
    net.first, net.last, second = (nn.Linear(width, width) for _ in range(3))
    net.expert = nn.Linear(width, width if rank.rank < 2 else 3 * width)
    net.forward = lambda x: net.last(net.first(x) + net.expert(x).mean())
    fully_shard(net.expert, mesh=pairs["shard"])
    for module in (net.first, net.last, net, second):
        fully_shard(module, mesh=rank.mesh)
    trunk = torch.optim.SGD([p for name, p in net.named_parameters() if "expert" not in name], lr=0.01)
    experts, seconds = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (net.expert, second))

    def step(number: int) -> None:
        step_of(net, trunk, width)
        if number % 3 or rank.rank < 2:
            experts.step()
        net.zero_grad()
        step_of(second, seconds, width)

    return what_is_said(lambda: train_for(0.6, step))


@pytest.mark.parametrize("width", [96, 256])  # of 96, some experts are tiny units, and some are not
def test_experts_of_other_sizes(ranks: RankPool, width: int) -> None:
    """Steps are counted in each process group; tiny units of another mesh do not share a launch."""
    assert ranks(4, experts_of_other_sizes, width, fresh=True) == ["trained"] * 4


def train_after_another_group(rank: Rank, folder: str) -> str:
    """A process group is destroyed and another one made; then ranks run different units."""
    os.environ[watchdog.TIMEOUT_VARIABLE], os.environ[watchdog.LOST_VARIABLE] = str(STUCK_S), str(LOST_S)
    step_of(fully_shard(Net()))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank.rank, world_size=4)
    with tiny_units():
        net = Net()
        for block in net.blocks:
            fully_shard(block)
        model = fully_shard(net)

        def step(number: int) -> None:
            if rank.rank == ODD and number == 1:
                net.order = [0, 1, 3]
            step_of(model)

        return what_is_said(lambda: train_for(0.06, step))


def test_a_second_process_group_is_watched(ranks: RankPool, tmp_path: Path) -> None:
    """Its collectives are known, though they are of units that were made before the first forward."""
    told = ranks(4, train_after_another_group, str(tmp_path), fresh=True, expect_failure=True)
    assert all(outcome.kind == "returned" and "launch different collectives" in outcome.value for outcome in told), told


def train_with_other_parameters(rank: Rank, front_end: str, how: str) -> str:
    os.environ[watchdog.TIMEOUT_VARIABLE] = str(STUCK_S)
    torch.manual_seed(0)
    net = Net()
    if rank.rank == ODD and how == "frozen":
        net.blocks[1].linear.bias.requires_grad_(False)
    elif rank.rank == ODD:
        net.blocks[1].linear.to(torch.bfloat16)
    options: dict[str, Any] = {}
    if how == "override":
        dtype = torch.float32 if rank.rank == ODD else torch.bfloat16
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda _: dtype)
    shard = fully_shard if front_end == "composable" else FullyShardedDataParallel
    return what_is_said(lambda: step_of(shard(net, **options)))


@pytest.mark.parametrize(
    ("front_end", "how"), [("composable", "frozen"), ("composable", "override"), ("wrapper", "dtype")]
)
def test_parameters_that_differ(ranks: RankPool, front_end: str, how: str) -> None:
    """They are compared before the first launch: no rank communicates, and all say which parameter it is."""
    told = ranks(4, train_with_other_parameters, front_end, how, fresh=True)
    for text in told:
        assert "ranks have sharded different parameters: the root has " in text, told
        assert "on rank 2" in text or f"on rank {told.index(text)}" in text, told
    if how == "frozen":
        assert "trained blocks.1.linear.bias (16,)" in told[ODD] and "frozen blocks.1.linear.bias" in told[ODD]


def run_two_models(rank: Rank) -> str:
    """Two models of one class, in another order on one rank in one step: messages match by their sizes."""
    written = warnings_of_the_watchdog()
    models = [fully_shard(Net()), fully_shard(Net())]
    for step in range(4):
        for model in models[::-1] if step == 2 and rank.rank == 1 else models:
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
    PROGRESS.watchdog._exit()
    return "\n".join(written)


def test_two_models_in_another_order(ranks: RankPool) -> None:
    """It is said when processes end, as no rank was ever stuck."""
    told = "".join(ranks(2, run_two_models, fresh=True))
    assert "the results of this run are wrong" in told
    assert "the root of model 1 (step 0, microbatch 2) on rank 0; " in told
    assert "the root of model 2 (step 0, microbatch 2) on rank 1" in told


@on_ranks(2)
def test_buckets_that_one_rank_makes_anew(rank: Rank) -> None:
    """They are those of the same unit: what other ranks launch does not differ."""
    model = fully_shard(Net())
    step_of(model)
    if rank.rank == 0:
        unit_of(model).rebuild()
    step_of(model)
    assert not differs(PROGRESS.log_of(rank.group).recent()[1][-3:], rank.group)


@on_ranks(2)
def test_quantized_launches_are_compared(rank: Rank) -> None:
    """They are noted like all others, and recorded with what is really sent."""
    model = fully_shard(Net())
    model.set_comm_quantization(CommQuantization(all_gather="int8", min_bytes=1))
    log = PROGRESS.log_of(rank.group)
    before = log.count
    with fullshard.comm.record() as collectives:
        step_of(model)
    assert log.count - before == len({each.launch for each in collectives}) == 2
    assert [each.kind for each in log.recent()[1][-2:]] == ["all_gather", "reduce_scatter"]
    assert torch.uint8 in {each.dtype for each in collectives} or torch.int8 in {each.dtype for each in collectives}


def save_without_one(rank: Rank, path: str) -> str:
    model = fully_shard(Net())
    step_of(model)
    if rank.rank == ODD:
        os.kill(os.getpid(), signal.SIGKILL)
    since = time.monotonic()
    said = what_is_said(lambda: fullshard.checkpoint.save(path, model))
    return f"{time.monotonic() - since:.1f} {said}"


def test_a_save_whose_rank_is_killed(ranks: RankPool, tmp_path: Path) -> None:
    """The others do not wait for it until they time out."""
    outcomes = ranks(3, save_without_one, str(tmp_path / "saved"), fresh=True, expect_failure=True)
    for outcome in outcomes[:ODD]:
        seconds, error = outcome.value.split(" ", 1)
        assert float(seconds) < 15 and "its process is gone" in error and "on rank 2" in error, error


@on_ranks(2)
def test_a_store_that_does_not_answer(rank: Rank) -> None:
    """A rank that is stuck says so; after long, it ends its wait."""
    written = warnings_of_the_watchdog()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_QUIET_S", 0.1)
        found = watchdog.Watchdog(dist.group.WORLD, 0.1, 1.0)
        patch.setattr(found, "_poll_s", 0.05)
        patch.setattr(found, "_since_stuck", lambda: 0.0)
        patch.setattr(found, "_fail", lambda message: written.append(message))
        found._watch_store()
    assert "waits for collectives, and the store of the process groups has not answered for" in written[0]
    assert written[-1].startswith("the watchdog ended this run") and "rank 0 or the launcher" in written[-1]


@on_ranks(2)
def test_a_barrier_that_ends_while_it_is_looked_at(rank: Rank) -> None:
    """The training thread leaves it at any moment, between any two reads of the watchdog."""
    step_of(fully_shard(Net()))
    values = itertools.cycle([(0.0, "save /a", "a group", 1), None])
    PROGRESS.barriers["a group"] = [0, 1], 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(PROGRESS), "barrier", property(lambda _: next(values), lambda *_: None), raising=False)
        patch.setattr(PROGRESS.watchdog, "_beat_of", lambda _: watchdog._Beat(-1, "", {}, ""))
        for _ in range(4):
            PROGRESS.watchdog._since_stuck()
            PROGRESS.watchdog._report("a place", time.monotonic())
            watchdog._place()
            next(values)
            PROGRESS.watchdog._compare(0, time.monotonic())
    del PROGRESS.barriers["a group"]


# -------------------------------------------------------------------- correct programs


def late_start(rank: Rank, shard: Any) -> None:
    """One rank prepares its data before the first forward."""
    model = shard(Net())
    time.sleep(rank.rank % 2 * LONG_S)
    step_of(model)


def alone_in_evaluation(rank: Rank, shard: Any) -> None:
    """With whole replicas, a forward without gradients has no collectives, and one rank may run it."""
    model = replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        step_of(model, optimizer)
        if number % 5 == 0 and rank.rank == 0:
            with torch.no_grad():
                model(torch.ones(2, WIDTH))

    train_for(1.0, step)


def uneven_accumulation(rank: Rank, shard: Any) -> None:
    """Ranks have different numbers of microbatches without sync."""
    model = replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(_: int) -> None:
        model.set_requires_gradient_sync(False)
        for _ in range(1 + rank.rank % 2):
            step_of(model)
        model.set_requires_gradient_sync(True)
        step_of(model, optimizer)

    train_for(1.0, step)


def checkpointed(rank: Rank, shard: Any) -> None:
    """Recomputation ends early, by an exception; then one rank is slow."""
    net = Net()
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model = shard(net)
    step_of(model)
    time.sleep(rank.rank % 2 * LONG_S)
    step_of(model)


def replica_that_is_through(rank: Rank, shard: Any) -> None:
    """One replica evaluates fewer batches, and ends; in the other one a rank is slow."""
    mesh = rank.make_mesh(2, 2)
    model = fully_shard(Net(), mesh=mesh)
    step_of(model)
    if rank.rank >= 2:
        PROGRESS.watchdog._exit()
        return
    with torch.no_grad():
        for _ in range(2):
            time.sleep(rank.rank * LONG_S)
            model(torch.ones(2, WIDTH))


def handled_by_all(rank: Rank, net: Net, model: nn.Module) -> None:
    """All ranks run out of memory, and skip the batch; then one of them is slow."""
    net.blocks[1].before = fail
    with pytest.raises(ValueError, match="a bad batch"):
        step_of(model)
    net.blocks[1].before = None
    dist.barrier()
    time.sleep(rank.rank % 2 * LONG_S)


def destroyed_group(rank: Rank, net: Net, model: nn.Module) -> None:
    """A process group is destroyed while its model exists; then a rank is slow."""
    group = dist.new_group()
    other = fully_shard(Net(), mesh=DeviceMesh.from_group(group, "cpu"))
    step_of(other)
    dist.destroy_process_group(group)
    time.sleep(1)
    step_of(model)
    time.sleep(rank.rank % 2 * LONG_S)
    step_of(model)
    assert PROGRESS.watchdog.watches(dist.group.WORLD) and not PROGRESS.watchdog._stop.is_set()


def slow_link(rank: Rank, net: Net, model: nn.Module) -> None:
    """The messages of one rank take long; the others have theirs, and are ahead."""
    usual, waited = memory.wait_for_all, []

    def slow(works: Any) -> None:
        if not waited and rank.rank == 1:
            waited.append(True)
            time.sleep(LONG_S)
        usual(works)

    with mock.patch.object(memory, "wait_for_all", slow):
        step_of(model)


def slow_before_a_save(rank: Rank, net: Net, model: nn.Module) -> None:
    """One rank evaluates for long, and another one collects for long."""
    time.sleep(LONG_S if rank.rank == 1 else 0)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    usual = saving.snapshot

    def slow(*arguments: Any) -> Any:
        time.sleep(LONG_S if rank.rank == 2 else 0)
        return usual(*arguments)

    with mock.patch.object(saving, "snapshot", slow):
        fullshard.checkpoint.save(f"{folder[0]}/saved", model)
    step_of(model)
    if rank.rank == 0:
        shutil.rmtree(folder[0])


def held_lock(rank: Rank, net: Net, model: nn.Module) -> None:
    """One rank computes for long in a function that does not release Python's lock."""
    if rank.rank == 1:
        ctypes.PyDLL(None).usleep(int(1e6 * (LONG_S + 1)))


JOIN = """
import datetime, sys, time, torch, torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
def join(store, rank):  # as OpenRLHF and verl do
    store, limit = PrefixStore("sync", store), datetime.timedelta(minutes=2)
    group, _ = _new_process_group_helper(2, rank, [], "gloo", store, group_name="sync", timeout=limit)
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group
"""
ENGINE = f"""{JOIN}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = join(dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=False), 1)
time.sleep(3)
dist.broadcast(torch.zeros(4), 0, group=group)
"""


def weights_to_an_engine(rank: Rank, net: Net, model: nn.Module) -> None:
    """A rank sends weights to a process outside of the world, which takes its time; ranks 0 and 1 of their group."""
    started = dist.distributed_c10d._get_default_store()
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(store.port)])
        names: dict[str, Any] = {}
        exec(JOIN, names)
        group = names["join"](store, 0)
        started.set("engine", "started")
    started.wait(["engine"], timedelta(minutes=2))
    step_of(model)
    if rank.rank == 0:
        dist.broadcast(torch.ones(4), 0, group=group)
        assert engine.wait() == 0


def exception_in_an_evaluation(rank: Rank, net: Net, model: nn.Module) -> None:
    """One rank evaluates alone, skips a sample that raises, and takes its time."""
    with unsharded(model):
        if rank.rank == 0:
            net.blocks[1].before = fail
            with torch.no_grad(), contextlib.suppress(ValueError):
                model(torch.ones(2, WIDTH))
            net.blocks[1].before = None
    time.sleep(LONG_S if rank.rank == 0 else 0)


def stopped_for_a_while(rank: Rank, net: Net, model: nn.Module) -> None:
    """A process is stopped, as by a debugger or a scheduler, and goes on."""
    if rank.rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep {LONG_S + 1}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def another_thread_trains(rank: Rank, net: Net, model: nn.Module) -> None:
    """On one rank two threads train; its watchdog ends, and others wait for it."""
    groups = [dist.new_group([each]) for each in range(rank.world_size)]
    if rank.rank == 1:
        mesh = DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("alone",))
        other = threading.Thread(target=lambda: step_of(fully_shard(Net(), mesh=mesh)))
        other.start()
        other.join()
        time.sleep(LONG_S)


# Programs with models of their own, and what is done between two steps of one.
WHOLE = [late_start, alone_in_evaluation, uneven_accumulation, checkpointed, replica_that_is_through]
CORRECT = [
    *WHOLE,
    handled_by_all,
    destroyed_group,
    slow_link,
    held_lock,
    slow_before_a_save,
    weights_to_an_engine,
    exception_in_an_evaluation,
    stopped_for_a_while,
    another_thread_trains,
]


def run_program(program: Any, rank: Rank, front_end: str) -> str:
    """Run one of the correct programs."""
    torch.manual_seed(0)
    shard = fully_shard if front_end == "composable" else partial(FullyShardedDataParallel, use_orig_params=True)
    if program in WHOLE:
        program(rank, shard)
        return "trained"
    net = Net()
    model = shard(net)
    step_of(model)
    program(rank, net, model)
    step_of(model)
    return "trained"


@polling()
def run_correct(rank: Rank, name: str, front_end: str) -> str:
    os.environ[watchdog.TIMEOUT_VARIABLE] = str(STUCK_S)
    if name == held_lock.__name__:  # longer than a rank may be silent whose process is not seen to run
        os.environ[watchdog.LOST_VARIABLE] = str(LOST_S)
    return run_program(globals()[name], rank, front_end)


@pytest.mark.parametrize("program", CORRECT, ids=lambda program: program.__name__)
def test_a_correct_program_is_not_ended(ranks: RankPool, program: Any) -> None:
    """Whatever a rank does alone, or for how long: each of these was ended by a first version."""
    front_end = "wrapper" if program in (late_start, handled_by_all) else "composable"
    outcomes = ranks(4, run_correct, program.__name__, front_end, fresh=True, expect_failure=True)
    assert [outcome.value for outcome in outcomes] == ["trained"] * 4, outcomes


# -------------------------------------------------------------------- reasons


CALL = "all_reduce, called at train.py:3"
Reports = dict[int, Report]


def report(
    state: str, count: int, *, units: tuple[str, ...] = ("a", "b"), step: int = 0, began: int = 0, **further: Any
) -> Report:
    """A rank that has launched all-gathers of ``units`` in turns."""
    launches = [Launch("all_gather", (units[number % len(units)],), step, 0, step) for number in range(count)]
    return Report(state, "a place", groups={"0": GroupReport([0, 1, 2], 0, launches, began)}, **further)


def calls(launches: int, own: int = 0) -> dict[str, GroupReport[str]]:
    """The collectives of a group: launches, then ones of the user's."""
    return {"0": GroupReport([0, 1, 2], 1, [OURS] * launches + [CALL] * own)}


def foreign(launches: int, collectives: dict[str, GroupReport[str]]) -> Report:
    """A rank that waits in the last collective of its group."""
    at = ("0", collectives["0"].end - 1)
    return report("runs", launches, foreign=CALL, foreign_at=at, collectives=collectives)


def verdict_of(reports: Reports, lost: dict[int, str] | None = None, **options: Any) -> Any:
    found = judge(reports, lost or {}, **options)
    assert found is not None
    return found


WAITS = report("waits", 5, waits_for=("0", 4))
WAITING = dict.fromkeys((0, 1), WAITS)
WITH_CALLS = dict.fromkeys((0, 1), replace(WAITS, collectives=calls(5)))
UNLIKE = foreign(4, {"0": GroupReport([0, 1], 1, [OURS] * 5 + [CALL])})  # of a group of the same name


@pytest.mark.parametrize(
    ("kind", "reports"),
    [
        ("differ", {**WAITING, 2: report("waits", 5, units=("a", "c"))}),
        ("raised", {**WAITING, 2: report("raised", 4, error="an error")}),
        ("exited", {**WAITING, 2: report("exited", 4)}),
        ("broken", {**WAITING, 2: report("broken", 5, error="closed")}),
        ("deadlock", {**WITH_CALLS, 2: foreign(4, calls(5, 1))}),
        ("calls", {**WITH_CALLS, 2: foreign(4, calls(4, 1))}),
        ("slow", {**WAITING, 2: report("runs", 4)}),
        ("slow", {**WITH_CALLS, 2: foreign(5, calls(5, 1))}),  # it has issued what they wait for
        ("slow", {**WITH_CALLS, 2: replace(foreign(4, calls(5)), foreign_at=None)}),  # in a group with an engine
        ("slow", {**WITH_CALLS, 2: UNLIKE}),
        ("slow", {**WAITING, 2: report("raised", 4, error="an error", began=4)}),  # nothing launched in that forward
    ],
)
def test_one_report_decides(kind: str, reports: Reports) -> None:
    """What one rank reports says why others wait; where it is merely slow, that is not final."""
    verdict = verdict_of(reports)
    assert (verdict.kind, verdict.is_final) == (kind, kind != "slow")


def test_without_a_culprit_nothing_is_wrong() -> None:
    """Ranks that may answer yet, slow networks and links, and groups that are unlike decide nothing."""
    assert verdict_of(WAITING, {2: "the forward"}).kind == "lost"
    ahead = report("waits", 7, waits_for=("0", 6))
    assert judge(WAITING, {}, [2]) is None  # it may answer yet
    assert judge({**WAITING, 2: WAITS}, {}) is None  # the network is slow
    assert judge({0: WAITS, 1: ahead, 2: ahead}, {}) is None  # a slow link
    assert judge({0: report("runs", 5), 1: report("runs", 7)}, {}) is None
    assert judge({0: UNLIKE, 1: UNLIKE}, {}, mismatch="differ") is None


def test_layouts_and_steps_that_differ_are_told() -> None:
    """Which unit and parameter ranks cut differently, and who is in another optimizer step."""
    usual, other = (
        replace(WAITS, groups={"0": GroupReport([0, 1, 2], 0, [Launch("all_gather", ("a",), 0, 0, 0, (layout,))])})
        for layout in (8, 7)
    )
    verdict = verdict_of({0: usual, 1: other, 2: usual})
    assert (verdict.kind, verdict.culprits) == ("differ", [1])
    assert "mix up elements of parameters: those of 'a'\nNow:\n" in verdict.message
    told = {0: replace(usual, layouts={"8": "w, along dim 0\nb"}), 1: replace(other, layouts={"7": "w, along dim 0"})}
    assert "'a' has b on rank 0; no more parameters on rank 1\nNow:\n" in verdict_of(told).message
    behind = report("runs", 5, step=2)
    verdict = verdict_of({0: report("runs", 7), 1: behind, 2: behind}, mismatch="out of step")
    assert (verdict.kind, verdict.culprits, verdict.is_final) == ("out of step", [0], True)
    assert judge({0: behind, 1: behind}, {}, mismatch="out of step") is None  # by what is still known
    assert judge({0: report("runs", 7), 1: behind}, {}) is None


def test_reports_survive_the_store() -> None:
    """As JSON, with lists for tuples."""
    first = report("waits", 3, order=["", "a"], locks={"a": "runs"}, foreign_at=("0", 1), waits_for=("0", 2))
    assert Report.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_long_messages_show_where_launches_differ() -> None:
    """After the units with which both begin."""
    common = tuple(f"blocks.{index}" for index in range(50))
    reports = {
        rank: Report("waits", "a place", groups={"0": GroupReport([0, 1], 7, [Launch("all_gather", units, 1, 2)])})
        for rank, units in enumerate([(*common, "x", "y"), (*common, "y", *common)])
    }
    assert (
        "collective 7 (from 0) of a process group is all-gather of ... 'x', 'y' (step 1, microbatch 2) on rank 0; "
        "all-gather of ... 'y', 'blocks.0', 'blocks.1' and 48 more (step 1, microbatch 2) on rank 1\n"
    ) in verdict_of(reports).message


@on_ranks(2)
def test_settings(rank: Rank) -> None:
    """The watchdog can be switched off; what is no number is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PROGRESS, "watchdog", None)
        patch.setenv(watchdog.TIMEOUT_VARIABLE, "0")
        watchdog.watch()
        assert PROGRESS.watchdog is None
        patch.setenv(watchdog.TIMEOUT_VARIABLE, "soon")
        with pytest.raises(ValueError, match=r"FULLSHARD_WATCHDOG_S.*soon"):
            watchdog.watch()
