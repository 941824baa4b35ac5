"""The model of a step against times and sizes worked out by hand, and against the engine's order of collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.contestants import start_fake_group
from bench.simulators.schedule import (
    PROTOCOLS,
    SIMPLE,
    Fabric,
    Machine,
    Piece,
    UnitPlan,
    Wrapping,
    simulate,
)
from bench.wrap_model import (
    BY_FOUR,
    BY_TWO,
    GPT,
    LLAMA,
    MODELS,
    PAGE,
    PLAIN,
    RANKS,
    RECOMMENDED,
    Assumptions,
    Options,
    choices,
    outcomes,
    run,
    tokens_needed,
)
from torch import nn

from fullshard import fully_shard
from fullshard.comm import CollectiveTransport, record

# Ten parameters: 20 bytes to gather in 2 s, 40 bytes to reduce in 4 s.
SLOW_LINK = Machine(collective_seconds=lambda nbytes: nbytes / 10, flops_per_second=1.0)


def pieces_of(seconds: float, *names: str) -> list[Piece]:
    return [Piece(name, 10, seconds) for name in names]


def units(*members: str, keep: str = "") -> tuple[UnitPlan, ...]:
    """``units("a", "bc", keep="bc")``: a unit of a and a kept one of b and c."""
    return tuple(UnitPlan(tuple(names), keep=names == keep) for names in members)


# ---------------------------------------------------------------- the schedule, by hand


# Pieces, wrapping, step and exposed seconds, peak bytes (None: not worked out).
BY_HAND = {
    # gather a 0-2 | a 2-4, gather b 2-4 | b 4-6 | gather b 6-8 | backward b 8-12, gather a 8-10
    # | backward a 12-16, reduce b 12-16 | reduce a 16-20
    # a and b gathered (40), the gradients of b (20) and their fp32 copy (40)
    "two units": (pieces_of(2.0, "a", "b"), Wrapping("", units("a", "b")), 20.0, 8.0, 100),
    # gather a 0-2 | a 2-4 | b 4-6 | backward b 6-10, gather a 6-8 | backward a 10-14, reduce b 10-14 | reduce a 14-18
    "the last one kept": (pieces_of(2.0, "a", "b"), Wrapping("", units("a", "b", keep="b")), 18.0, 6.0, None),
    # gather 0-4 | forward 4-8, backward 8-16 | reduce 16-24
    "everything in the root": (pieces_of(2.0, "a", "b"), Wrapping("", ()), 24.0, 12.0, 40 + 40 + 80),
    "the root freed": (pieces_of(2.0, "a", "b"), Wrapping("", (), keep_root=False), 28.0, 16.0, None),
    # gather a 0-2 | a 2-3, gather b 2-4 | b 4-5, gather c 4-6 | c 6-7 | gather c 7-9 | backward c 9-11, gather b 9-11
    # | backward b 11-13, reduce c 11-15, gather a behind it 15-17 | reduce b waits for c and runs 17-21
    # | backward a 17-19 | reduce a waits for b and runs 21-25
    "one reduction in flight": (pieces_of(1.0, "a", "b", "c"), Wrapping("", units("a", "b", "c")), 25.0, 16.0, None),
    # gather a 0-2 | a 2-3, gather bc 2-6 | bc 6-8 | gather bc 8-12 | backward bc 12-16, gather a 12-14
    # | backward a 16-18, reduce bc 16-24 | reduce a waits for it and runs 24-28
    "two in a unit": (pieces_of(1.0, "a", "b", "c"), Wrapping("", units("a", "bc")), 28.0, 19.0, 20 + 40 + 40 + 80),
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


def test_no_step_is_shorter_than_its_computation_or_its_communication() -> None:
    """And an infinitely fast link exposes nothing."""
    for model in MODELS:
        for wrapping in choices(model.blocks):
            machine = Assumptions().machine(64)
            spent: list[float] = []

            def seconds(nbytes: int, machine: Machine = machine, spent: list[float] = spent) -> float:
                spent.append(machine.collective_seconds(nbytes))
                return spent[-1]

            outcome = simulate(model.pieces(), wrapping, replace(machine, collective_seconds=seconds))
            assert outcome.step_seconds >= max(outcome.compute_seconds, sum(spent)) * (1 - 1e-9)
            free = simulate(model.pieces(), wrapping, replace(machine, collective_seconds=lambda nbytes: 0.0))
            assert free.exposed_seconds == pytest.approx(0.0)


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


def test_more_ranks_and_more_bytes_take_longer() -> None:
    """A single rank and no bytes take no time; ranks fill whole nodes."""
    assert Fabric(1).collective_seconds(10**9) == Fabric(1024).collective_seconds(0) == 0.0
    for nbytes in (10**4, 10**7, 10**9):
        seconds = [Fabric(ranks).collective_seconds(nbytes) for ranks in (2, 8, 16, 64, 1024, 2048)]
        assert seconds == sorted(seconds)
        assert Fabric(64).collective_seconds(nbytes) < Fabric(64).collective_seconds(2 * nbytes)
    with pytest.raises(ValueError, match="12"):
        Fabric(12)


def test_models_have_their_published_size() -> None:
    """Of GPT with a head of its own: 24 blocks of 12 d^2 and two tables."""
    assert sum(piece.parameters for piece in LLAMA.pieces()) == pytest.approx(8.03e9, rel=1e-3)
    assert sum(piece.parameters for piece in GPT.pieces()) == pytest.approx(1.414e9, rel=1e-3)


def test_tokens_that_hide_a_unit_do_hide_it() -> None:
    """One per cent more leaves only both ends exposed, a tenth less is seen."""
    machine = Assumptions().machine(1024)
    blocks = 40
    needed = tokens_needed(GPT.block_parameters, machine)

    def exposed(tokens: float) -> float:
        pieces = [Piece(f"b{i}", GPT.block_parameters, 2 * GPT.block_parameters * tokens) for i in range(blocks)]
        each = tuple(UnitPlan((piece.name,)) for piece in pieces)
        return simulate(pieces, Wrapping("", each), machine).exposed_seconds

    reduce = machine.collective_seconds(4 * GPT.block_parameters)
    ends = 2 * machine.collective_seconds(2 * GPT.block_parameters) + reduce  # first and last gather, last reduction
    assert exposed(1.01 * needed) == pytest.approx(ends)
    assert exposed(0.9 * needed) > ends + 0.05 * blocks * reduce


# ---------------------------------------------------------------- what the page says


def test_the_advice_follows_from_the_figures() -> None:
    """Sentence by sentence of the page."""
    for model in MODELS:
        found = outcomes(model)
        for ranks in RANKS:
            step = {name: by_ranks[ranks].step_seconds for name, by_ranks in found.items()}
            peak = {name: by_ranks[ranks].peak_bytes for name, by_ranks in found.items()}
            kept, freed = "blocks, norm + head kept", "blocks, norm + head kept, root freed"
            assert peak[RECOMMENDED] < 0.65 * peak[PLAIN]
            assert step[RECOMMENDED] < 1.02 * step[PLAIN]
            assert step[RECOMMENDED] < step["blocks, embed, norm, head"]
            assert step[freed] > step[kept] and peak[freed] == peak[kept]
            assert step["... and the last block kept"] == pytest.approx(step[RECOMMENDED], rel=1e-3)
            assert 3 * peak[RECOMMENDED] < peak["... and all blocks kept"] < 4 * peak[RECOMMENDED]
            if model.tokens >= tokens_needed(model.block_parameters, Assumptions().machine(ranks)):
                others = {name for name in step if name != "the model is one unit"}
                assert max(step[name] for name in others) <= 1.03 * min(step[name] for name in others)
                assert step["the model is one unit"] > 1.1 * step[RECOMMENDED]
    latency_bound = {name: by_ranks[1024].step_seconds for name, by_ranks in outcomes(GPT).items()}
    assert latency_bound[BY_TWO] < 0.75 * latency_bound[RECOMMENDED]
    assert latency_bound[BY_FOUR] < 0.75 * latency_bound[RECOMMENDED]


@pytest.mark.parametrize(("protocols", "drop"), [(PROTOCOLS, (0.0, 0.05)), ((SIMPLE,), (0.30, 0.40))])
def test_throughput_of_a_7b_model_from_128_to_2048_ranks(
    protocols: tuple[object, ...], drop: tuple[float, float]
) -> None:
    """The page says how far the two sets of latencies are apart where they matter most."""
    llama2 = replace(
        LLAMA, vocabulary=32_000, block_parameters=4 * 4096**2 + 3 * 4096 * 11_008, sequence=4096, sequences=2
    )
    wrapping = next(wrapping for wrapping in choices(llama2.blocks) if wrapping.title == PLAIN)
    assumed = Assumptions(protocols=protocols)  # type: ignore[arg-type]
    few, many = (simulate(llama2.pieces(), wrapping, assumed.machine(ranks)).step_seconds for ranks in (128, 2048))
    assert drop[0] <= 1 - few / many <= drop[1]


def test_the_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figure by figure; and a plot."""
    page = tmp_path / "page.md"
    text = PAGE.read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    run(Options(write_document=True, document=page))
    assert page.read_text(encoding="utf-8") == text, "stale: python -m bench wrap_model --write-document"
    assert (tmp_path / "wrapping.png").stat().st_size > 10_000
    assert RECOMMENDED in capsys.readouterr().out
