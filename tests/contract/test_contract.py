"""A program sees under fullshard what it sees under torch's FSDP1 and FSDP2, but for one short list."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard
from contract.allowed import ALLOWED, allowed
from contract.comparison import Comparison, Difference, compare, compare_points
from contract.draw import draw
from contract.operations import Session
from contract.programs import PROGRAMS
from ranks import Rank, RankPool, on_ranks

ROOT = Path(__file__).parents[2]
SEEDS = range(40)  # python -m tests.contract has as many as one likes
MOST_SHOWN = 12


def compared(rank: Rank, name: str | int) -> Comparison:
    """Body of a rank: compare a program, by its name or seed."""
    return compare(rank, PROGRAMS[name] if isinstance(name, str) else draw(name))


def run(ranks: RankPool, name: str | int) -> list[Comparison]:
    """What came of a program on all ranks."""
    world = (PROGRAMS[name] if isinstance(name, str) else draw(name)).world
    return ranks(world, compared, name)


def report(differences: list[Difference]) -> str:
    """Some of the differences, of each property and parameter the first."""
    first: dict[object, Difference] = {}
    for difference in differences:
        first.setdefault((difference.what, difference.point), difference)
    lines = [str(difference) for difference in first.values()]
    return "\n".join([f"{len(differences)} differences that are not allowed:", *lines[:MOST_SHOWN]])


def check(ranks: RankPool, name: str | int) -> None:
    """Fail with what differs and is not allowed; skip what torch refuses from the start."""
    found = run(ranks, name)
    different = [d for comparison in found for d in comparison.differences if allowed(d) is None]
    assert not different, report(different)
    if all(comparison.points < 2 for comparison in found):
        pytest.skip(f"torch refuses: {found[0].refused}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(ranks: RankPool, name: str) -> None:
    """A program sees the same under both libraries, at every point."""
    check(ranks, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs(ranks: RankPool, seed: int) -> None:
    """So do programs that are drawn from a seed."""
    check(ranks, seed)


@pytest.mark.parametrize("entry", ALLOWED, ids=lambda entry: entry.name)
def test_allowed_differences_are_used_and_documented(ranks: RankPool, entry: object) -> None:
    """Each allowed difference shows in the program that it names, and has a row of its own in the docs."""
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "differences.md").read_text(), re.MULTILINE)
    assert entry.row in rows
    found = [d for comparison in run(ranks, entry.shown_by) for d in comparison.differences]
    assert any(allowed(d) is entry for d in found), f"{entry.shown_by} no longer shows it: remove the entry"


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
