"""Programs with ``FullyShardedDataParallel``, and random ones with ``fully_shard``, see what they see under torch.

The suite has some of both. ``python -m tests.contract --all-programs`` runs all that have names, and
``python -m tests.contract --seed 0 -n 1000`` more random ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import fullshard
from contract.comparison import compare_points
from contract.operations import Session
from contract.programs import PROGRAMS, SUITE
from contract.running import check, check_entries
from ranks import Rank, RankPool, on_ranks

SEEDS = range(24)
NAMES = [name for name, program in SUITE.items() if program.wrapper]


@pytest.mark.parametrize("name", NAMES)
def test_wrappers(ranks: RankPool, name: str) -> None:
    """A program with wrappers sees the same under both libraries, at every point."""
    check(ranks, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs(ranks: RankPool, seed: int) -> None:
    """So do programs that are drawn from a seed."""
    check(ranks, seed)


def test_allowed_differences_are_seen(ranks: RankPool) -> None:
    """Each allowed difference shows in the program that it names, and has a row in the docs."""
    check_entries(ranks, NAMES)


# ---------------------------------------------------------------- that differences are found


def replace_a_parameter(session: Session) -> None:
    block = session.unit("blocks.0.up")
    old = block.bias
    block.bias = nn.Parameter(old.detach().clone())
    block.bias.grad = old.grad


def flip_a_flag(session: Session) -> None:
    session.unit("blocks.0.up").bias.requires_grad_(False)


def change_a_value(session: Session) -> None:
    with torch.no_grad():
        session.unit("blocks.0.up").bias.add_(1e-2)


def change_a_gradient(session: Session) -> None:
    session.unit("blocks.0.up").bias.grad.mul_(1.01)


def drop_a_gradient(session: Session) -> None:
    session.unit("blocks.0.up").bias.grad = None


def rename_a_parameter(session: Session) -> None:
    block = session.unit("blocks.0.up")
    block._parameters["other"] = block._parameters.pop("bias")


def forget_a_parameter_in_the_optimizer(session: Session) -> None:
    session.optimizer.param_groups[0]["params"].pop()


# What is done between backward and step, to fullshard's model only, and the properties in which that shows.
FAULTS = {
    replace_a_parameter: {"identity"},
    flip_a_flag: {"requires_grad"},
    change_a_value: {"values"},
    change_a_gradient: {"grad's values", "values"},
    drop_a_gradient: {"grad"},
    rename_a_parameter: {"kind", "names"},
    forget_a_parameter_in_the_optimizer: {"optimizer's parameter 11"},
}


@on_ranks(2)
def test_differences_are_found(rank: Rank) -> None:
    """Two runs under fullshard show the same; one thing that is changed by hand in the second is found."""
    program = replace(PROGRAMS["stack raf=True"], operations=(("train", 2),))
    clean = program.run(fullshard, rank)
    assert compare_points(program, clean, program.run(fullshard, rank)).differences == ()
    step = Session.step
    for fault, expected in FAULTS.items():

        def faulty_step(session: Session, set_to_none: bool = True, fault: Callable[..., None] = fault) -> None:
            fault(session)
            session.note("after backward")
            step(session, set_to_none)

        def noted_step(session: Session, set_to_none: bool = True) -> None:
            session.note("after backward")
            step(session, set_to_none)

        try:
            Session.step = noted_step
            theirs = program.run(fullshard, rank)
            Session.step = faulty_step
            ours = program.run(fullshard, rank)
        finally:
            Session.step = step
        found = compare_points(program, theirs, ours).differences
        assert expected <= {difference.what for difference in found}, fault.__name__
