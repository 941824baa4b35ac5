"""The model of a step against times and sizes worked out by hand, and against the engine's order of collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.contestants import start_fake_group
from bench.simulators.schedule import (
    SIMPLE,
    Fabric,
    Machine,
    Piece,
    UnitPlan,
    Wrapping,
    simulate,
)
from bench.wrap_model import (
    PAGE,
    RECOMMENDED,
    Options,
    choices,
    run,
)
from torch import nn

from fullshard import fully_shard
from fullshard.comm import CollectiveTransport, record

# Ten parameters: 20 bytes to gather in 2 s, 40 bytes to reduce in 4 s.
SLOW_LINK = Machine(collective_seconds=lambda nbytes: nbytes / 10, flops_per_second=1.0)


def pieces_of(seconds: float, *names: str) -> list[Piece]:
    return [Piece(name, 10, seconds) for name in names]


def units(*members: str) -> tuple[UnitPlan, ...]:
    """``units("a", "bc")``: a unit of a and one of b and c."""
    return tuple(UnitPlan(tuple(names)) for names in members)


# ---------------------------------------------------------------- the schedule, by hand


# Pieces, wrapping, step and exposed seconds, peak bytes (None: not worked out).
BY_HAND = {
    # gather a 0-2 | a 2-4, gather b 2-4 | b 4-6 | gather b 6-8 | backward b 8-12, gather a 8-10
    # | backward a 12-16, reduce b 12-16 | reduce a 16-20
    # a and b gathered (40), the gradients of b (20) and their fp32 copy (40)
    "two units": (pieces_of(2.0, "a", "b"), Wrapping("", units("a", "b")), 20.0, 8.0, 100),
    # gather 0-4 | forward 4-8, backward 8-16 | reduce 16-24
    "everything in the root": (pieces_of(2.0, "a", "b"), Wrapping("", ()), 24.0, 12.0, 40 + 40 + 80),
    # gather root (40 bytes) 0-4 | gather a 4-6 | a 6-8 | head 8-10 | backward head 10-14, gather a 10-12
    # | backward a 14-18 | reduce a 18-22 | reduce root waits for it and runs 22-30
    # embed and head gathered (40), their gradients (40) and the fp32 copy of these (80)
    "parameters in the root": (
        [Piece("embed", 10, 0.0, fed_by_ids=True), *pieces_of(2.0, "a"), Piece("head", 10, 2.0)],
        Wrapping("", units("a")),
        30.0,
        18.0,
        160,
    ),
    # gather embed 0-2 | gather a 2-4 | a 4-6 | backward a 6-10, gather embed 6-8 | reduce a 10-14 | reduce embed 14-18
    "an embedding": (
        [Piece("embed", 10, 0.0, fed_by_ids=True), *pieces_of(2.0, "a")],
        Wrapping("", (UnitPlan(("embed",)), UnitPlan(("a",), keep=True))),
        18.0,
        12.0,
        None,
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_the_schedule_by_hand(case: str) -> None:
    """Ten parameters: 20 bytes to gather in 2 s, 40 bytes to reduce in 4 s."""
    pieces, wrapping, step, exposed, peak = BY_HAND[case]
    outcome = simulate(pieces, wrapping, SLOW_LINK)
    assert (outcome.step_seconds, outcome.exposed_seconds) == (step, exposed)
    assert peak is None or outcome.peak_bytes == peak


# ---------------------------------------------------------------- the schedule, against the engine


class _Decoder(nn.Sequential):
    """Pieces in forward order. Those of one unit lie in a container, which runs them as a list of modules would."""

    def __init__(self, wrapping: Wrapping, blocks: int) -> None:
        pieces: dict[str, nn.Module] = {
            "embed": nn.Embedding(64, 16),
            **{f"block{i}": nn.Linear(16, 16) for i in range(blocks)},
            "norm": nn.LayerNorm(16),
            "head": nn.Linear(16, 64),
        }
        self.names = list(pieces)
        starts = {plan.members[0]: plan for plan in wrapping.units}
        inside = {name for plan in wrapping.units for name in plan.members[1:]}
        super().__init__()
        for name, piece in pieces.items():
            if name in starts:
                self.add_module(name, nn.Sequential(*(pieces[member] for member in starts[name].members)))
            elif name not in inside:
                self.add_module(name, piece)


@pytest.mark.parametrize("wrapping", choices(4), ids=lambda wrapping: wrapping.title)
def test_the_engine_communicates_in_the_same_order(wrapping: Wrapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in backward, for every row of the page."""
    start_fake_group(8)
    monkeypatch.setattr(CollectiveTransport, "tiny_bytes", 0)  # the model sends every unit on its own
    model = _Decoder(wrapping, 4)
    for plan in wrapping.units:
        fully_shard(model.get_submodule(plan.members[0]), reshard_after_forward=not plan.keep)
    fully_shard(model, reshard_after_forward=None if wrapping.keep_root else True)
    tokens = torch.randint(64, (2, 8))
    model(tokens).sum().backward()  # the next step uses the recorded order
    with record() as forward:
        loss = model(tokens).sum()
    with record() as backward:
        loss.backward()

    order: list[tuple[str, str]] = []
    for collectives in (forward, backward):
        found = [(c.kind, c.unit or "root") for c in collectives]  # one per message: a unit may send several
        order += [c for i, c in enumerate(found) if i == 0 or c != found[i - 1]]
    pieces = [Piece(name, 10, 1.0, fed_by_ids=name == "embed") for name in model.names]
    assert order == list(simulate(pieces, wrapping, SLOW_LINK).collectives)


# ---------------------------------------------------------------- machine and shapes


def test_a_ring_by_hand() -> None:
    """The fastest of the protocols."""
    node = Fabric(8)
    assert node.collective_seconds(10**9) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 0.875e9 / 370e9)  # Simple
    # 896 hops within nodes at 1 us and 127 between them at 2.7 us: LL
    assert Fabric(1024).collective_seconds(1024) == pytest.approx(6.6e-6 + 896 * 1e-6 + 127 * 2.7e-6, rel=1e-3)
    simple = Fabric(64, protocols=(SIMPLE,))
    expected = 8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6 + 1e9 * 63 / 64 / 368e9
    assert simple.collective_seconds(10**9) == pytest.approx(expected)


# ---------------------------------------------------------------- what the page says


def test_the_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figure by figure; and a plot."""
    page = tmp_path / "page.md"
    text = PAGE.read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    run(Options(write_document=True, document=page))
    assert page.read_text(encoding="utf-8") == text, "stale: python -m bench wrap_model --write-document"
    assert (tmp_path / "units.png").stat().st_size > 10_000
    assert RECOMMENDED in capsys.readouterr().out
