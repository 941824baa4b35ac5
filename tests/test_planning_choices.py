"""What a plan recommends, what it says about other choices, how it is applied; and calibration of a machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fullshard
from fullshard import FSDPModule, FullshardError, MixedPrecisionPolicy, fully_shard
from fullshard import planned as planned_module
from fullshard.activation_checkpoint import ActivationWrapper
from fullshard.cli import app
from fullshard.engine.ownership import nested_units
from fullshard.planning import calibration
from fullshard.planning import search as search_module
from fullshard.planning.choices import Choices
from fullshard.planning.cluster import PRESETS, Cluster, Link, cluster_of, to_toml
from fullshard.planning.nearest import nearest
from fullshard.planning.simulation.clocks import HostDevice, Passage, SkippingClock
from fullshard.progress import PROGRESS
from models import Block
from ranks import Rank, on_ranks

WIDTH, BF16 = 256, torch.bfloat16
# Leaves recomputation and microbatches to a search.
FEW = {
    "replicas": 1,
    "offload_optimizer": False,
    "prefetch_bytes": None,
    "blocks_per_unit": 1,
    "reshard_after_forward": None,
}


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches run fewer blocks. Estimates of other numbers of blocks per unit are as good as elsewhere with more."""
    monkeypatch.setattr(search_module, "SHORT", (2, 4))


class Layer(Block):
    """A block, ``inner`` times wider inside."""

    def __init__(self, inner: int = 4) -> None:
        super().__init__(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner * WIDTH), nn.Linear(inner * WIDTH, WIDTH)


class ByNumber(nn.Sequential):
    """Asks for its blocks by their numbers: one with fewer of them cannot run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(6):
            x = self[number](x)
        return x


def stack(blocks: int = 6, device: str = "meta", kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    with torch.device(device):
        return kind(*(Layer() for _ in range(blocks)))


def planned(model: nn.Module | None = None, rows: int = 4096, **options: Any) -> Any:
    chosen = {"ranks": 16, "cluster": "h100", "search": True, **options}
    return fullshard.plan(stack() if model is None else model, torch.empty(rows, WIDTH), **chosen)


@functools.cache
def unlimited() -> Any:
    """The plan of a search where everything fits."""
    return planned(choices=FEW)


def test_a_search_saves_memory_only_as_needed() -> None:
    """What fits is not recomputed; with less memory it is, and if nothing fits, the least is recommended."""
    free = unlimited()
    assert free.fits and not free.choices.checkpoint_activations and free.choices.microbatches == 1
    tight = planned(choices=FEW, cluster=dataclasses.replace(PRESETS["h100"], memory=0.6 * free.reserved_bytes))
    assert tight.fits and tight.reserved_bytes < 0.95 * 0.6 * free.reserved_bytes
    assert tight.step.seconds > free.step.seconds
    rejected = [each for each in tight.alternatives if each.verdict.startswith("does not fit: 0.")]
    assert rejected and all(each.extra > 0 for each in rejected)
    hopeless = planned(choices=FEW, cluster=dataclasses.replace(PRESETS["h100"], memory=1e6))
    assert not hopeless.fits and hopeless.choices.checkpoint_activations == 1.0 and hopeless.choices.microbatches == 4
    assert "DOES NOT FIT into" in hopeless.table()


def test_alternatives_are_what_full_plans_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates from a few blocks are those of all blocks, and their differences too; sorted by time."""
    monkeypatch.setattr(search_module, "SHORT", (4, 6))
    confirmed = []
    usual = search_module._Estimates.learn

    def learn(self: Any, choices: Any, full: Any) -> bool:
        confirmed.append(usual(self, choices, full))
        return confirmed[-1]

    monkeypatch.setattr(search_module._Estimates, "learn", learn)
    found = planned(stack(10), choices={"microbatches": 1, "offload_optimizer": False})
    assert confirmed == [True]  # else all blocks were run for each alternative
    assert found.alternatives and [each.change for each in found.alternatives] == sorted(
        c.change for c in found.alternatives
    )
    for each in found.alternatives:
        full = planned(stack(10), choices=each.choices, search=False)
        assert each.seconds == pytest.approx(full.step.seconds, rel=search_module.SAME), each.name
        assert each.reserved == pytest.approx(full.reserved_bytes, abs=64 * 2**20), each.name  # some segments
        assert each.change == pytest.approx(full.step.seconds / found.step.seconds - 1, abs=0.05), each.name
    assert "What one other choice would change" in found.table()
    names = " ".join(each.name for each in found.alternatives)
    assert "per unit" in names and "50% of the blocks recomputed" in names and "reshard_after_forward=False" in names


def test_a_search_leaves_what_is_given() -> None:
    """Given choices are not looked at, whatever their values; precision is shown and not chosen."""
    found = planned(choices={"replicas": 1, "checkpoint_activations": True, "prefetch_bytes": None})
    assert (found.choices.replicas, found.choices.checkpoint_activations) == (1, True)
    assert not any("HSDP" in each.name or "recompu" in each.name for each in found.alternatives)
    half = next(each for each in found.alternatives if each.choices.mixed_precision == "bf16")
    assert half.verdict == "not looked at: it changes results" and found.choices.mixed_precision is None
    everything = {field.name: field.default for field in dataclasses.fields(Choices)}
    assert not planned(choices=everything).alternatives


def test_a_model_that_cannot_be_shortened() -> None:
    """A forward that asks for blocks by number is run in full."""
    model = stack(6, kind=ByNumber)
    found = planned(model, rows=64, choices={"replicas": 1, "microbatches": 1, "prefetch_bytes": None})
    assert found.alternatives and not any(each.verdict.startswith("cannot") for each in found.alternatives)


def test_offloaded_optimizer_state() -> None:
    """Its bytes are not on the device, and the bus takes time for them."""
    usual, moved = (planned(search=False, rows=8, choices={"offload_optimizer": flag}) for flag in (False, True))
    state = usual.step.held["optimizer state"]
    assert "optimizer state" not in moved.step.held
    assert usual.step.resting - moved.step.resting == state
    assert moved.step.seconds - usual.step.seconds == pytest.approx(state / PRESETS["h100"].bus)
    assert "fullshard.optim.offload(optimizer)" in moved.table()


def test_bad_choices() -> None:
    """Values that cannot be are refused, with the words of the choice."""
    with pytest.raises(ValueError, match=r"expected replicas, .* found {'blocks_per_unit': 0}"):
        Choices(blocks_per_unit=0)
    with pytest.raises(ValueError, match=r"a checkpoint_activations from 0 to 1, found 2"):
        Choices(checkpoint_activations=2.0)
    with pytest.raises(TypeError, match="no_such"):
        planned(choices={"no_such": 1})
    with pytest.raises(ValueError, match="expected a batch that can be divided into 3 microbatches, found 64 rows"):
        planned(rows=64, search=False, choices={"microbatches": 3})


def test_the_picture(tmp_path: Path) -> None:
    """Files are written; the figures of JSON are those of the plan."""
    found = planned(stack(4), rows=64)
    found.save(tmp_path / "new" / "folder")
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"plan.json", "plan.txt", "plan.png"}
    stored = json.loads((tmp_path / "new" / "folder" / "plan.json").read_text())
    assert [each["name"] for each in stored["alternatives"]] == [each.name for each in found.alternatives]
    assert (tmp_path / "new" / "folder" / "plan.png").stat().st_size > 10_000


@on_ranks(4)
def test_a_plan_is_applied(rank: Rank) -> None:
    """``fully_shard`` and ``shard`` do all that a plan says, and train as the plan's own lines of code do."""
    choices = {"replicas": 2, "mixed_precision": "bf16", "checkpoint_activations": 0.5, "blocks_per_unit": 2}
    losses = []
    for apply in ("fully_shard", "shard", "by hand"):
        torch.manual_seed(0)
        model = stack(6, "cpu")
        plan = _stored(choices, model)
        if apply == "fully_shard":
            sharded: Any = fully_shard(model, policy=plan)
        elif apply == "shard":
            sharded = fullshard.shard(model, plan=plan)
        else:
            sharded = plan.choices.shard(model, 4, "cpu")
        assert isinstance(sharded, FSDPModule) and sum(isinstance(m, ActivationWrapper) for m in model.modules()) == 3
        units = nested_units(model)
        assert len(units) == 4 and all(unit.mesh.replicas == 2 for unit in units)
        assert all(unit.policy.precision.param_dtype is torch.bfloat16 for unit in units)
        loss = sharded(torch.ones(8, WIDTH)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1] == losses[2]


def _stored(choices: dict[str, Any], model: nn.Module, ranks: int = 4) -> Any:
    """A plan as it would be made before the run: inside of one none can be made."""
    from fullshard.planning.plan import Plan

    numel = sum(parameter.numel() for parameter in model.parameters())
    return Plan(type(model).__name__, numel, ranks, 8, 0, PRESETS["cpu"], Choices(**choices), None)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_plan_of_something_else(rank: Rank) -> None:
    """Another model, another number of ranks, or arguments beside a plan are refused, and nothing is sharded."""
    model = stack(2, "cpu")
    plan, other = _stored({}, model, 2), nn.Linear(2, 2)
    planned_model = r"expected the planned model, Sequential with .* found Linear with 6"
    for error, message, call in (
        (FullshardError, planned_model, partial(fully_shard, other, policy=plan)),
        (
            FullshardError,
            "a job of 4 ranks, as planned, found 2",
            partial(fully_shard, model, policy=_stored({}, model)),
        ),
        (ValueError, "found mp_policy", partial(fully_shard, model, policy=plan, mp_policy=MixedPrecisionPolicy(BF16))),
        (ValueError, "found reshard_after_f", partial(fully_shard, model, policy=plan, reshard_after_forward=False)),
        (ValueError, "found a list of modules", partial(fully_shard, [*model], policy=plan)),
        (ValueError, "found mixed_precision", partial(fullshard.shard, model, plan=plan, mixed_precision="bf16")),
    ):
        with pytest.raises(error, match=message) as raised:
            call()
        assert error is FullshardError or "no other arguments beside a plan of fullshard.plan" in str(raised.value)
    assert not isinstance(model, FSDPModule) and not any(isinstance(m, FSDPModule) for m in model.modules())


@on_ranks(1)
def test_shares_of_blocks_and_blocks_per_unit(rank: Rank) -> None:
    """A share of the blocks is recomputed, evenly spread; consecutive blocks are a unit."""
    for share, expected in ((0.5, [1, 3, 5, 7, 9]), (0.25, [3, 7]), (1.0, list(range(10))), (0.1, [9]), (0, [])):
        model = fullshard.shard(stack(10, "cpu"), checkpoint_activations=share, report=False)
        assert [at for at, block in enumerate(model) if isinstance(block, ActivationWrapper)] == expected, share
    with pytest.raises(ValueError, match=r"expected a share from 0 to 1, found 1.5"):
        fullshard.shard(stack(4, "cpu"), checkpoint_activations=1.5)
    units = fullshard.wrap.plan_blocks(stack(5), blocks_per_unit=2).modules
    assert [len(each) if isinstance(each, tuple) else 1 for each in units] == [2, 2, 1]
    with pytest.raises(ValueError, match="blocks_per_unit: expected at least 1, found 0"):
        fullshard.wrap.plan_blocks(stack(5), blocks_per_unit=0)


def test_contention() -> None:
    """Computation beside messages on a host takes longer, by the share that the messages take."""
    for share, seconds, expected in ((0.0, 3.0, 3.0), (0.5, 3.0, 4.0), (1.0, 3.0, 5.0), (0.5, 0.5, 1.0)):
        clock = SkippingClock(lambda: 0.0)
        host = HostDevice(clock, share)
        host.transmit(Passage(2.0), lambda: None)
        host.compute(seconds)
        assert clock.now() == pytest.approx(expected), (share, seconds)
        host.clock.wait_until(10.0)
        host.compute(1.0)
        assert clock.now() == pytest.approx(11.0)


def test_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine is measured with all its ranks, written as a file, and planned with; a rank that fails is named."""
    monkeypatch.setattr(planned_module, "calibrate", partial(calibration.calibrate, seconds=0.02))
    path = tmp_path / "here.toml"
    done = CliRunner().invoke(app, ["plan", "--calibrate", str(path), "--ranks", "2"])
    assert done.exit_code == 0 and "plan with --cluster" in done.output, done.output
    found = cluster_of(path)
    assert (found.device, found.node, found.backend) == ("cpu", 2, "gloo")
    assert found.flops["float32"] > 1e8 and found.bandwidth > 1e7 and 0 <= found.contention <= 1
    assert 0 < found.inner.latency < 1 and found.inner.bandwidth > 1e5
    plan = fullshard.plan(stack(2), torch.empty(8, WIDTH), ranks=2, cluster=path)
    assert plan.step.seconds > 0 and not any("calibration" in each for each in plan.assumptions)
    alone = fullshard.plan(stack(2), torch.empty(8, WIDTH), ranks=1, cluster=path)
    assert "1 ranks compute as fast as 2 did in the calibration" in alone.assumptions
    with pytest.raises(FullshardError, match=r"expected at most the 2 ranks of its node, .* calibrate with as many"):
        fullshard.plan(stack(2), torch.empty(8, WIDTH), ranks=4, cluster=path)
    monkeypatch.setattr(calibration, "_MODULE", "fullshard.no_such_module")
    with pytest.raises(FullshardError, match=r"(?s)calibrate: expected all ranks .*No module named fullshard.no_such"):
        calibration.calibrate(1)


def test_clusters_as_files(tmp_path: Path) -> None:
    """What is written is read again."""
    for name, cluster in PRESETS.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(to_toml(cluster))
        assert cluster_of(path) == cluster
    with pytest.raises(ValueError, match="expected positive efficiencies of matmul"):
        dataclasses.replace(PRESETS["h100"], efficiency={"magic": 1.0})
    assert PRESETS["h100"].rate("matmul", torch.bfloat16) > PRESETS["h100"].rate("attention", torch.bfloat16)
    assert isinstance(PRESETS["cpu"], Cluster) and PRESETS["cpu"].inner == Link(2e9, 1e-4)


def test_questions_of_the_command(tmp_path: Path) -> None:
    """A global batch is divided by the ranks; memory is that of the option; nothing to plan is an error."""
    file = tmp_path / "model.py"
    file.write_text(
        "from torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.table = nn.Embedding(64, 32)\n\n    def forward(self, tokens):\n"
        "        return self.table(tokens)\n\n\ndef build():\n    return Model()\n"
    )
    arguments = ["plan", f"{file}:build", "--ranks", "4", "--no-search", "--sequence", "16"]
    done = CliRunner().invoke(app, [*arguments, "--global-batch", "32", "--microbatches", "2"])
    assert done.exit_code == 0 and "# 2 microbatches of 4 rows" in done.output, done.output
    assert CliRunner().invoke(app, [*arguments, "--memory", "0.0001"]).exit_code == 1
    wrong = CliRunner().invoke(app, [*arguments, "--global-batch", "30"])
    assert wrong.exit_code == 2 and "expected a multiple of 4 ranks, found 30" in wrong.output
    nothing = CliRunner().invoke(app, ["plan", "--ranks", "4"])
    assert nothing.exit_code == 2 and "expected MODEL, or --calibrate FILE" in nothing.output


@on_ranks(1, fresh=True)
def test_a_plan_needs_no_training_code(rank: Rank) -> None:
    """Planning starts quickly: matplotlib is imported only for a picture."""
    assert fullshard.plan and "matplotlib" not in sys.modules


def test_estimates_are_corrected_by_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recommended fits in the full run, also if its estimate was far too small."""
    free = unlimited()
    small = dataclasses.replace(PRESETS["h100"], memory=0.7 * free.reserved_bytes / 0.95)
    usual = search_module._Estimates._continued

    def too_small(self: Any, few: Any, more: Any) -> Any:
        found = usual(self, few, more)
        return dataclasses.replace(found, reserved=0.4 * found.reserved)

    monkeypatch.setattr(search_module._Estimates, "_continued", too_small)
    found = planned(choices=FEW, cluster=small)
    assert found.fits and found.choices != free.choices


def test_choices_are_a_dict() -> None:
    """Another value is named, and the dtype of computation is said."""
    with pytest.raises(ValueError, match="expected choices as a dict of those that stay, found Choices"):
        planned(choices=Choices())
    assert any("computation is in float32" in each for each in planned(search=False, rows=8).assumptions)


def test_functions_of_users(tmp_path: Path) -> None:
    """What they raise is said with its place; their own batch excludes options about it; a missing one is named."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\ndef wrong():\n    raise ValueError('oops')\n\n\n"
        "def both():\n    return nn.Linear(8, 8), torch.empty(2, 8)\n\n\n"
        "class Looks(nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x) if x.sum() > 0 else x\n\n\n"
        "def looks():\n    return Looks(8, 8), torch.empty(2, 8)\n"
    )
    broken = tmp_path / "broken.py"
    broken.write_text("def build(:\n")
    done = CliRunner().invoke(app, ["plan", f"{broken}:build", "--ranks", "2"])
    assert done.exit_code == 2 and "SyntaxError" in done.output  # 1 says that a step does not fit
    for name, options, message in (
        ("wrong", [], "raised ValueError: oops"),
        ("missing", [], "expected a function missing"),
        ("both", ["--batch", "4"], "returns the batch, too"),
        ("looks", [], "mine.py:15"),
    ):
        done = CliRunner().invoke(app, ["plan", f"{file}:{name}", "--ranks", "2", "--no-search", *options])
        assert done.exit_code == 2 and message in done.output.replace("\n", ""), (name, done.output)


def test_blocks_that_differ_are_all_run() -> None:
    """Neither blocks of other sizes, nor ones that take longer than they look, are estimated from a few."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(5)), *(Layer(32) for _ in range(5)))
    found = planned(model, rows=256, choices={**FEW, "microbatches": 1})
    for each in found.alternatives:
        full = planned(model, rows=256, choices=each.choices, search=False)
        assert each.seconds == pytest.approx(full.step.seconds, rel=1e-3), each.name


def test_links_between_known_ones() -> None:
    """A file without figures of all-reduces has them as other collectives, also between the numbers that it knows."""
    outer = {2: Link(50e9, 1e-4), 16: Link(40e9, 1e-3)}
    cluster = dataclasses.replace(PRESETS["h100"], outer=outer)
    link = cluster.link(32)
    assert (link.all_reduce_bandwidth, link.all_reduce_latency) == (0.0, 0.0) and 40e9 < link.bandwidth < 50e9
    times = [
        planned(ranks=ranks, cluster=cluster, search=False, choices={"replicas": ranks // 8}) for ranks in (16, 32)
    ]
    assert times[1].step.seconds < 3 * times[0].step.seconds
    for wrong in ({"bandwidth": "fast"}, {"bandwidth": -1.0}, {"bandwidth": 1e9, "latency": float("nan")}):
        with pytest.raises(ValueError, match="link: expected numbers of at least 0"):
            Link(**wrong)
    for name, value in {"op_seconds": -1, "node": 8.5, "backend": "foo", "efficiency": 0.5}.items():
        with pytest.raises(ValueError, match="expected"):
            dataclasses.replace(PRESETS["h100"], **{name: value})


def test_nearest_published_run() -> None:
    """The one of a like model on as many like GPUs; none for what nobody has published. Errors stand beside it."""
    found = nearest(6_658_859_008, 128, 6 * 2048, "h100", 0.0)
    assert found is not None and (found.text["model"], found.text["gpus"]) == ("MPT-7b", "128")
    assert "MPT-7b on 128 h100_80gb, 6 x 2048 tokens, recomputation none: 10475 tokens/s" in str(found)
    recomputed = nearest(12_853_954_560, 64, 16 * 2048, "h100", 1.0)
    assert recomputed is not None and recomputed.text["activation_checkpointing"] == "full"
    assert nearest(10**6, 2, 64, "h100", 0.0) is None and nearest(6_658_859_008, 128, 6 * 2048, "b300", 0.0) is None
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for cluster, errors in (("h100", "memory some 10 %"), ("cpu", "memory 1 %")):
        plan = fullshard.plan(model, tokens, ranks=2, cluster=cluster)
        assert plan.tokens == 16 and plan.nearest is None and f"Errors: {errors}" in plan.table()


def test_nothing_is_left_behind() -> None:
    """What the process notes of its own training is as before, after a plan and after one that failed."""
    before = {name: getattr(PROGRESS, name) for name in ("phase", "unit", "launched", "raised")}
    steps = PROGRESS.steps
    planned(stack(2), rows=8, search=False)
    with pytest.raises(ValueError, match="multiple of replicas"):
        planned(stack(2), rows=8, search=False, choices={"replicas": 3})
    assert {name: getattr(PROGRESS, name) for name in before} == before
    assert PROGRESS.steps is steps
    assert not torch.distributed.is_initialized()


def test_small_models_on_cpu_ranks() -> None:
    """Small tensors that gloo joins in a message are planned, too; an autocast in the model is said to do nothing."""

    class Cast(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    with torch.device("meta"):
        model = nn.Sequential(Cast(16, 16), nn.Linear(16, 16))
    found = fullshard.plan(model, torch.empty(4, 16), ranks=2, cluster="cpu")
    assert any("torch.autocast" in each for each in found.assumptions)
