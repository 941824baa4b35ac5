"""torchao's low-bit weights and optimizers on fullshard, through the names of torch's FSDP.

tests/engine/test_torchao.py has NF4 and float8 weights through fullshard's own names.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from example_runs import run_example
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, _ops

pytest.importorskip("torchao")

import torchao.prototype.moe_training.tensor as moe_tensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim import _AdamW as FlexibleAdamW
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.quantized_training import (
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    precompute_bitnet_scale_for_fsdp,
)
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, linear_nf4, to_nf4

import fullshard.dropin
from compare import assert_close, assert_equal
from fullshard.comm import record
from ranks import Rank, on_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torchao_low_bit.py"
WIDTH = 128
QUANTIZED = {AdamW8bit: "OptimState8bit", AdamW4bit: "OptimState4bit", AdamWFp8: "OptimStateFp8"}


@contextmanager
def installed() -> Iterator[None]:
    """fullshard in the place of torch's FSDP; optimizers of torchao without their compilation, which takes long."""
    with fullshard.dropin.install(quiet=True):
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same for every call."""
    torch.manual_seed(3)
    layers = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
    return nn.Sequential(*layers).to(dtype)


def quantized_model(config: Any, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = plain_model(dtype)
    quantize_(model, config)
    return model


def sharded(model: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=rank.mesh, **options)
    return fully_shard(model, mesh=rank.mesh, **options)


def wrapped(model: nn.Module, use_orig_params: bool) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def input_of(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What both ranks have of a step: (2, 8, WIDTH)."""
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: Rank,
    steps: range,
    dtype: torch.dtype = torch.float32,
    before: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """Losses of this rank."""
    losses = []
    for step in steps:
        if before is not None:
            before(model)
        x = input_of(step, dtype)[rank.rank]
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, steps: range, dtype: torch.dtype = torch.float32
) -> list[float]:
    """The same without sharding: gradients of both ranks' inputs."""
    losses = []
    for step in steps:
        both = [(model(x) - x).float().square().mean() for x in input_of(step, dtype)]
        for loss in both:
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(both[rank.rank].item())
    return losses


def close(losses: list[float], expected: list[float], rtol: float) -> None:
    assert_close(torch.tensor(losses), torch.tensor(expected), "losses", rtol=rtol, atol=0.0)


def gathered_bytes(model: nn.Module, rank: Rank) -> int:
    with record() as collectives, torch.no_grad():
        model(input_of(0)[rank.rank])
    return sum(c.nbytes for c in collectives if c.kind == "all_gather")


# ---------------------------------------------------------------- weights


def float8_model(gather: bool = True) -> nn.Module:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=True)
    return convert_to_float8_training(plain_model(), config=config)


class LowBit(NamedTuple):
    """Low-bit weights, and how they are trained.

    Attributes:
        build: Makes the model that is sharded.
        reference: Makes the one that is not.
        rtol: Of the losses.
        before: Called with the model before each step.
        bits: Of a weight on the wire; 0: those of the plain model.
        optimizer: Its class.
    """

    build: Callable[[], nn.Module]
    reference: Callable[[], nn.Module]
    rtol: float
    before: Callable[[nn.Module], None] | None = None
    bits: float = 0
    optimizer: Any = torch.optim.AdamW


int8 = functools.partial(quantized_model, int8_weight_only_quantized_training())
int8_multiplied = functools.partial(quantized_model, int8_mixed_precision_training(module_swap=True))
bitnet = functools.partial(quantized_model, bitnet_training())
WEIGHTS = {
    # Rounded at random in each step; a scale of fp32 per row, of 3 * WIDTH rows.
    "int8": LowBit(int8, int8, 5e-3, bits=8 + 3 * 32 / (4 * WIDTH), optimizer=FlexibleAdamW),
    "multiplied in int8": LowBit(int8_multiplied, int8_multiplied, 1e-4),
    "bitnet": LowBit(bitnet, bitnet, 1e-3, bits=2),
    "bitnet, scales found before": LowBit(bitnet, bitnet, 1e-3, precompute_bitnet_scale_for_fsdp, 2),
    "float8": LowBit(
        float8_model, functools.partial(float8_model, False), 1e-3, precompute_float8_dynamic_scale_for_fsdp, 8
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_low_bit_weights(rank: Rank, kind: str) -> None:
    """They train with the losses of the unsharded model, and travel in as many bits as they have."""
    weights = WEIGHTS[kind]
    with installed():
        model, reference = sharded(weights.build(), rank), weights.reference()
        torch.manual_seed(rank.rank)
        losses = train(model, weights.optimizer(model.parameters(), lr=1e-2), rank, range(4), before=weights.before)
        expected = train_plain(reference, weights.optimizer(reference.parameters(), lr=1e-2), rank, range(4))
        close(losses, expected, rtol=weights.rtol)
        other = plain_model()
        plain = train_plain(other, torch.optim.AdamW(other.parameters(), lr=1e-2), rank, range(4))
        assert abs(plain[1] - expected[1]) > 3e-4 * expected[1]  # few bits do something
        if weights.bits:
            wanted = 4 * WIDTH * WIDTH * weights.bits / 8 / 2  # half of it from the other rank
            assert gathered_bytes(model, rank) == pytest.approx(wanted, rel=0.02)


class Experts(nn.Module):
    """Two experts; weights (experts, out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 64, 64) / 8)
        self.down = nn.Parameter(torch.randn(2, 64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([x.shape[0] // 2, x.shape[0]], dtype=torch.int32)
        hidden = torch.tanh(torch._grouped_mm(x, self.up.transpose(-2, -1), offs=offsets))
        return torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=offsets)


@pytest.mark.skipif(not hasattr(_ops, "scaled_mm_single_dim_strategy"), reason="torchao wants a newer torch for it")
@on_ranks(2)
def test_mxfp8_experts(rank: Rank) -> None:
    """Experts of torchao's MoE training, whose module takes MixedPrecisionPolicy from torch's FSDP."""
    recipe = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)

    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        experts = nn.Sequential(Experts().to(dtype))
        quantize_(experts, recipe, filter_fn=lambda module, _: isinstance(module, Experts))
        return experts

    def losses_of(model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(model(x) - x).float().square().mean() for x in inputs]

    torchs = moe_tensor.MixedPrecisionPolicy
    with installed():
        assert moe_tensor.MixedPrecisionPolicy is fullshard.MixedPrecisionPolicy
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(build(torch.float32), mesh=rank.mesh, mp_policy=policy)
        reference = build(torch.bfloat16)
        for step in range(2):  # the second gather fills what the first has made
            inputs = list(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(step)).bfloat16())
            (loss,) = losses_of(model, [inputs[rank.rank]])
            expected = losses_of(reference, inputs)
            assert_equal(loss.detach(), expected[rank.rank].detach(), "loss")
        loss.backward()
        (sum(expected) / 2).backward()
        for name, parameter in model.named_parameters():
            assert type(parameter.to_local()).__name__ == "MXFP8TrainingWeightWrapperTensor"
            gradient, wanted = parameter.grad.full_tensor(), reference.get_parameter(name).grad
            assert_close(gradient, getattr(wanted, "_data", wanted).float(), name, rtol=2e-2, atol=1e-4)
    assert moe_tensor.MixedPrecisionPolicy is torchs


class Adapted(nn.Module):
    """A frozen NF4 weight and a trainable layer of low rank."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.base = nn.Parameter(to_nf4(torch.randn(rows, columns) / columns**0.5, 32, 2), requires_grad=False)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(x, self.base) + self.up(self.down(x))


def nf4_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Adapted(WIDTH, 2 * WIDTH), nn.Tanh(), Adapted(2 * WIDTH, WIDTH))


@contextmanager
def folder() -> Iterator[str]:
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        named = [own]
        dist.broadcast_object_list(named)
        yield named[0]
        dist.barrier()


@on_ranks(2)
def test_adapters_on_nf4_through_dcp(rank: Rank) -> None:
    """The helpers of distributed checkpoint leave a frozen NF4 base out, and a run goes on as it was."""
    with installed(), folder() as path:

        def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = sharded(nf4_model(), rank)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return model, torch.optim.SGD(trained, lr=0.5)

        model, optimizer = begin()
        train(model, optimizer, rank, range(3))
        adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        assert sorted(adapters) == ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]
        dcp.save(adapters, checkpoint_id=path)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert isinstance(full["0.base"], NF4Tensor) and full["0.base"].shape == (2 * WIDTH, WIDTH)
        expected = train(model, optimizer, rank, range(3, 6))
        assert_equal(full["0.base"].get_original_weight(), nf4_model()[0].base.get_original_weight(), "base")

        model, optimizer = begin()
        adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        dcp.load(adapters, checkpoint_id=path)
        set_model_state_dict(model, adapters, options=StateDictOptions(strict=False))
        assert train(model, optimizer, rank, range(3, 6)) == expected


@on_ranks(2)
def test_wrapper_refuses_weights_with_hooks(rank: Rank) -> None:
    """FSDP1 flattens parameters, which such weights cannot be: an error that says so, not one from inside torchao."""
    with installed():
        for build in (nf4_model, lambda: quantized_model(int8_weight_only_quantized_training())):
            with pytest.raises(ValueError, match=r"which flat parameters do not support; use fully_shard"):
                FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)


# ---------------------------------------------------------------- optimizers


def state_kinds(optimizer: torch.optim.Optimizer) -> set[str]:
    values = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {type(value.to_local() if isinstance(value, DTensor) else value).__name__ for value in values}


@on_ranks(2)
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.__name__)
def test_quantized_optimizers(rank: Rank, kind: type[torch.optim.Optimizer]) -> None:
    """Optimizers with state of 8 and 4 bits: losses of the unsharded run, with clipping and a schedule."""

    def train_with(model: nn.Module, steps: Callable[..., list[float]]) -> tuple[list[float], torch.optim.Optimizer]:
        optimizer = kind(model.parameters(), lr=1e-2)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer.register_step_pre_hook(clip)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=4)
        losses = []
        for step in range(6):
            losses += steps(model, optimizer, rank, range(step, step + 1))
            schedule.step()
        return losses, optimizer

    with installed():
        losses, optimizer = train_with(sharded(plain_model(), rank), train)
        expected, _ = train_with(plain_model(), train_plain)
        close(losses, expected, rtol=2e-4)  # norms are summed in another order, and codes follow at rounding's edge
        assert state_kinds(optimizer) == {QUANTIZED[kind]}
        assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
        held = sum(
            getattr(state[name].to_local(), part).nbytes
            for state in optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
            for part in ("codes", "scale")
        )
        moments_in_fp32 = 2 * 4 * 4 * WIDTH * WIDTH / 2
        assert held < moments_in_fp32 / (7 if kind is AdamW4bit else 3.8)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_quantized_optimizer_on_the_wrapper(rank: Rank, use_orig_params: bool) -> None:
    """AdamW8bit steps FSDP1's flat parameters. Its blocks lie elsewhere there, so losses agree less closely."""
    with installed():
        model = wrapped(plain_model(), use_orig_params)
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, rank, range(5))
        reference = plain_model()
        expected = train_plain(reference, AdamW8bit(reference.parameters(), lr=1e-2), rank, range(5))
        close(losses, expected, rtol=1e-2)
        assert "OptimState8bit" in state_kinds(optimizer)


@on_ranks(2)
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.__name__)
def test_optimizer_state_through_dcp(rank: Rank, kind: type[torch.optim.Optimizer]) -> None:
    """Quantized state is saved as it is, and a run that goes on from it has the same losses, bit by bit."""
    with installed(), folder() as path:

        def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = sharded(plain_model(), rank)
            return model, kind(model.parameters(), lr=1e-2)

        model, optimizer = begin()
        train(model, optimizer, rank, range(3))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        expected = train(model, optimizer, rank, range(3, 6))

        model, optimizer = begin()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        fresh = {name: value.detach().clone() for name, value in model.state_dict().items()}
        assert train(model, kind(model.parameters(), lr=1e-2), rank, range(3, 6)) != expected  # the state matters
        model.load_state_dict(fresh)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state_kinds(optimizer) == {QUANTIZED[kind]}
        model.load_state_dict(fresh)
        assert train(model, optimizer, rank, range(3, 6)) == expected


# ---------------------------------------------------------------- the example and the page


def test_example_runs(tmp_path: Path) -> None:
    """The example of the page, a program that knows nothing of fullshard, under torchrun."""
    printed = run_example(EXAMPLE.name, SAVED=str(tmp_path / "saved"))
    assert "replaces torch.distributed.fsdp" in printed
    found = re.findall(r"step (\d) loss (\S+)", printed)
    assert [int(step) for step, _ in found] == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert found[3:6] == found[6:9] and float(found[5][1]) < float(found[0][1])
