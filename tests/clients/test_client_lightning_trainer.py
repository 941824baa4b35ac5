"""Lightning's Trainer on fullshard, with FSDPStrategy and ModelParallelStrategy."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

import os
import re
from pathlib import Path
from typing import Any

import torch
from example_runs import losses_in, run_example
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_runs import Block, adam, batch, full, loss_of, net, standing_in, unsharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import fullshard
from compare import assert_close, assert_equal
from ranks import Rank, on_ranks

STEPS = range(4)


class FSDPOnCpu(FSDPStrategy):
    """Lightning turns an FSDPStrategy away where there is no GPU; a subclass it lets pass."""


class Task(LightningModule):
    """The model of the other tests, and the losses it has seen."""

    losses: list[float]
    validated: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses, self.validated = net(), [], []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, pair: Any, _: int) -> torch.Tensor:
        loss = loss_of(self, pair)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, pair: Any, _: int) -> None:
        self.validated.append(loss_of(self, pair).item())

    test_step = validation_step

    def predict_step(self, pair: Any, _: int) -> torch.Tensor:
        return self(pair[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self)


class Sharded(Task):
    """Shards itself, as ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        if isinstance(self.model, fullshard.FSDPModule):
            return
        for module in self.model:
            if isinstance(module, Block):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"], reshard_after_forward=True)


class Wrapped(Task):
    """Wraps blocks itself, in the context that FSDPStrategy sets up."""

    def configure_model(self) -> None:
        if not isinstance(self.model, fullshard.FullyShardedDataParallel):
            for name, module in list(self.model.named_children()):
                if isinstance(module, Block):
                    setattr(self.model, name, wrap(module))
            self.model = wrap(self.model)


def trainer_on(strategy: Any, steps: int = len(STEPS), **options: Any) -> Trainer:
    """A Trainer on the ranks of the pool, that keeps quiet."""
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    devices = int(os.environ["WORLD_SIZE"])
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, **defaults | options)


def model_parallel(**options: Any) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **options)


def batches(rank: Rank, steps: range) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader([batch(rank.rank, step) for step in steps], batch_size=None)  # type: ignore[arg-type]


KINDS = pytest.mark.parametrize("kind", ["fsdp", "fsdp_wrapped", "model_parallel"])


def made(kind: str, **options: Any) -> tuple[Task, Any]:
    """A task and a strategy for it. ``sharded``: how checkpoints are saved."""
    sharded = options.pop("sharded", False)
    if kind == "model_parallel":
        return Sharded(), model_parallel(save_distributed_checkpoint=sharded)
    options["state_dict_type"] = "sharded" if sharded else "full"
    if kind == "fsdp":
        options["auto_wrap_policy"] = {Block}
    return (Task if kind == "fsdp" else Wrapped)(), FSDPOnCpu(**options)


@KINDS
@on_ranks(2)
def test_fit(rank: Rank, kind: str) -> None:
    """Losses and weights of the unsharded run."""
    with standing_in():
        task, strategy = made(kind)
        trainer = trainer_on(strategy)
        trainer.fit(task, batches(rank, STEPS))
        front_end = fullshard.FSDPModule if kind == "model_parallel" else fullshard.FullyShardedDataParallel
        assert sum(isinstance(module, front_end) for module in trainer.model.modules()) == 3
        expected = net()
        assert task.losses == [step[rank.rank] for step in unsharded(expected, STEPS)]
        found = {name.replace("model.", "", 1): value for name, value in full(trainer.model).items()}
        assert_equal(found, dict(expected.named_parameters()), "parameters")


@KINDS
@on_ranks(2)
def test_validate_and_predict(rank: Rank, kind: str) -> None:
    """Validation while training and afterwards, testing, predictions: those of the unsharded model."""
    with standing_in():
        task, strategy = made(kind)
        trainer = trainer_on(strategy, val_check_interval=2)
        trainer.fit(task, batches(rank, STEPS), batches(rank, range(20, 21)))
        expected, pair = net(), batch(rank.rank, 20)
        optimizer, reference = adam(expected), []
        for steps in (range(2), range(2, 4)):
            unsharded(expected, steps, optimizer=optimizer)
            reference.append(loss_of(expected, pair).item())
        assert task.validated == reference
        if kind == "fsdp":  # Lightning loses the outer wrapper that it has made, whosever FSDP it is
            with pytest.raises(RuntimeError, match="got 1-D tensor"):
                trainer.validate(task, batches(rank, range(20, 21)), verbose=False)
            return
        trainer.validate(task, batches(rank, range(20, 21)), verbose=False)
        trainer.test(task, batches(rank, range(20, 21)), verbose=False)
        assert task.validated == [*reference, reference[-1], reference[-1]]
        predicted = trainer.predict(task, batches(rank, range(20, 21)))
        assert predicted is not None
        assert_equal(predicted[0], expected(pair[0]).detach(), "prediction")


@KINDS
@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
@on_ranks(2)
def test_resuming_from_a_checkpoint(rank: Rank, kind: str, sharded: bool, tmp_path: Path) -> None:
    """ModelCheckpoint saves every second step; a fresh Trainer goes on from there as if nothing had happened."""
    with standing_in():
        task, strategy = made(kind, sharded=sharded)
        place = [str(tmp_path)]
        torch.distributed.broadcast_object_list(place)
        saving = ModelCheckpoint(place[0], filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = trainer_on(strategy, 2, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(task, batches(rank, range(6)))
        path = Path(place[0]) / "step=2.ckpt"
        assert path.is_dir() is sharded
        reference = unsharded(expected := net(), range(2))

        again, strategy = made(kind, sharded=sharded)
        trainer = trainer_on(strategy, 6)
        trainer.fit(again, batches(rank, range(6)), ckpt_path=str(path), weights_only=False)
        assert task.losses == [step[rank.rank] for step in reference]
        seen = [0, 1, 0, 1, 2, 3]  # Lightning starts a loader that keeps no state of its own from its beginning
        assert again.losses == [step[rank.rank] for step in unsharded(net(), seen)][2:]

        saved = torch.load(path, weights_only=False) if not sharded else _load_distributed_checkpoint(path)
        if sharded and kind != "model_parallel":
            saved = _format_checkpoint(saved)
        weights = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
        assert_equal(weights, {n: p.detach() for n, p in expected.named_parameters()}, "saved parameters")


# ---------------------------------------------------------------- gradients


@on_ranks(2)
def test_accumulation(rank: Rank) -> None:
    """``accumulate_grad_batches``: every second batch steps."""
    for kind in ("fsdp", "model_parallel"):
        with standing_in():
            task, strategy = made(kind)
            trainer = trainer_on(strategy, 2, accumulate_grad_batches=2)
            trainer.fit(task, batches(rank, STEPS))
            reference = unsharded(net(), STEPS, accumulate=2)
            assert_close(torch.tensor(task.losses), torch.tensor([s[rank.rank] for s in reference]), "losses", 1e-6)


class ClippedByNorm(Task):
    """What Lightning tells users of FSDPStrategy to do."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.trainer.model.clip_grad_norm_(gradient_clip_val)


@pytest.mark.parametrize("how", ["value", "refused", "norm", "model_parallel"])
@on_ranks(2)
def test_clipping(rank: Rank, how: str) -> None:
    """``gradient_clip_val=``: by norm with ModelParallelStrategy, or through the wrapper's method; by value."""
    with standing_in():
        algorithm, value = ("value", 1e-3) if how == "value" else ("norm", 0.1)
        task, strategy = made("model_parallel" if how == "model_parallel" else "fsdp")
        task = ClippedByNorm() if how == "norm" else task
        trainer = trainer_on(strategy, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
        if how == "refused":
            with pytest.raises(MisconfigurationException, match="not supported for `FSDPPrecision`"):
                trainer.fit(task, batches(rank, STEPS))
            return
        trainer.fit(task, batches(rank, STEPS))
        clips = {"value": nn.utils.clip_grad_value_, "norm": nn.utils.clip_grad_norm_}
        reference = unsharded(net(), STEPS, clip=lambda parameters: clips[algorithm](parameters, value))
        assert_close(torch.tensor(task.losses), torch.tensor([s[rank.rank] for s in reference]), "losses", 1e-5)


class ByHand(Task):
    """Two optimizers, stepped by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [adam(self.model[0]), adam(self.model[1:])]

    def training_step(self, pair: Any, _: int) -> None:
        loss = loss_of(self, pair)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class ByHandSharded(ByHand, Sharded):
    """The same, for ModelParallelStrategy."""


@pytest.mark.parametrize("kind", ["fsdp", "one unit", "model_parallel"])
@on_ranks(2)
def test_manual_optimization(rank: Rank, kind: str) -> None:
    """``manual_backward`` and two optimizers, each of a part of the model.

    With FSDPStrategy the whole step, backward and optimizers included, runs inside of the wrapper's forward.
    """
    with standing_in():
        task = ByHandSharded() if kind == "model_parallel" else ByHand()
        strategy = FSDPOnCpu() if kind == "one unit" else made(kind)[1]
        trainer_on(strategy, 2 * len(STEPS)).fit(task, batches(rank, STEPS))
        assert task.losses == [step[rank.rank] for step in unsharded(net(), STEPS)]


class LateOptimizer(Task):
    """As Lightning wants it for ``use_orig_params=False``: the optimizer is made of the wrapper's parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self.trainer.model)


@on_ranks(2)
def test_flat_parameters(rank: Rank) -> None:
    """``use_orig_params=False``: the optimizer has flat parameters, or Lightning says so."""
    with standing_in():
        task = LateOptimizer()
        trainer = trainer_on(FSDPOnCpu(auto_wrap_policy={Block}, use_orig_params=False))
        trainer.fit(task, batches(rank, STEPS))
        assert task.losses == [step[rank.rank] for step in unsharded(net(), STEPS)]
        assert all(isinstance(p, fullshard.FlatParameter) for p in trainer.optimizers[0].param_groups[0]["params"])

        early, plain = LateOptimizer(), nn.Linear(2, 2)
        early.configure_optimizers = lambda: adam(plain)  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="does not seem to reference any FSDP parameters"):
            trainer_on(FSDPOnCpu(use_orig_params=False)).fit(early, batches(rank, STEPS))


# ---------------------------------------------------------------- more


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
@on_ranks(2)
def test_precision(rank: Rank, precision: Any) -> None:
    """Dtypes in forward and of kept parameters; losses near those of float32."""
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    with standing_in():
        trainer = trainer_on(FSDPOnCpu(auto_wrap_policy={Block}), precision=precision)
        with trainer.init_module():
            task = Task()
        trainer.fit(task, batches(rank, STEPS))
        assert [m.seen for m in task.modules() if isinstance(m, Block)] == [{(dtype, dtype)}] * 2
        kept = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert {p.dtype for p in task.parameters()} == {kept}
        torch.set_default_dtype(kept)  # other dtypes draw other numbers
        expected = net().float()
        torch.set_default_dtype(torch.float32)
        reference = torch.tensor([step[rank.rank] for step in unsharded(expected, STEPS)])
        assert_close(torch.tensor(task.losses), reference, "losses", 5e-2)


@on_ranks(2)
def test_moving_average(rank: Rank) -> None:
    """Lightning's callback for moving averages copies the sharded model; its average is the plain model's."""
    with standing_in():
        task = Sharded()
        trainer = trainer_on(model_parallel(), callbacks=[EMAWeightAveraging(decay=0.5)], val_check_interval=len(STEPS))
        trainer.fit(task, batches(rank, STEPS), batches(rank, range(20, 21)))
        assert task.losses == [step[rank.rank] for step in unsharded(net(), STEPS)]

        expected = net()
        average, optimizer = AveragedModel(expected, avg_fn=get_ema_avg_fn(0.5)), adam(expected)
        for step in STEPS:
            unsharded(expected, [step], optimizer=optimizer)
            average.update_parameters(expected)
        found = {name.replace("model.", "", 1): value for name, value in full(task).items()}
        for name, value in average.module.named_parameters():
            assert_close(found[name], value, name, 1e-6, 1e-7)
        validated = loss_of(average.module, batch(rank.rank, 20))
        assert_close(torch.tensor(task.validated), validated.detach().reshape(1), "validation of the average", 1e-6)


# ---------------------------------------------------------------- programs


def test_example_of_fabric_with_lightnings_launcher() -> None:
    """Lightning starts the second process, which stands in as well; training and resuming bring the loss down."""
    printed = run_example("lightning_fabric.py", by=("fullshard.dropin",))
    assert sorted(re.findall(r"rank (\d) trains with (\S+)", printed)) == [
        ("0", "fullshard.wrapper.fsdp"),
        ("1", "fullshard.wrapper.fsdp"),
    ]
    losses = losses_in(printed)
    assert len(losses) == 15 and losses[0] > 4 and losses[14] < losses[10] < losses[9] < 2.8


def test_example_of_the_trainer_with_torchrun() -> None:
    """fully_shard in configure_model, gradients clipped, and an average of the weights that is validated."""
    printed = run_example("lightning_trainer.py")
    losses = losses_in(printed)
    assert len(losses) == 10 and losses[0] > 4 and losses[9] < 2.8
    assert re.search(r"validation of the averaged weights: [23]\.\d+", printed)
