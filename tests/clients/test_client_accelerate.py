"""accelerate on fullshard, with both versions of FSDP: training equals the unsharded run."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, TorchDynamoPlugin
from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler
from accelerate.utils.modeling import get_grad_scaler
from accelerate_runs import (
    BATCH,
    BLOCKWISE,
    ENGINES,
    GPT,
    Block,
    accelerated,
    adam,
    full,
    gpt,
    in_bf16,
    loader,
    loss_of,
    parameters_of,
    prepared,
    texts,
    train,
    under_autocast,
    unsharded,
)
from torch import nn

import fullshard
from compare import assert_close, assert_equal
from ranks import Rank, on_ranks

STEPS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "transformer": BLOCKWISE,
    "size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 500},
    "none": {"auto_wrap_policy": "no_wrap"},
}

# By policy: units of FSDP1 (blocks and root), modules of FSDP2's units. Of these, accelerate makes one of the
# embedding, and one of the norm and the head; and by size of any module, the container of the blocks too.
UNITS = {"transformer": (3, 6), "size": (3, 7), "none": (1, 4)}

engines = pytest.mark.parametrize("engine", ENGINES)


def units(model: nn.Module) -> int:
    """How many units there are."""
    kinds = (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)
    return sum(isinstance(module, kinds) for module in model.modules())


@engines
@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2)
def test_training_equals_the_unsharded_run(rank: Rank, engine: str, policy: str) -> None:
    """Losses and parameters are the same, bit by bit, however the model is cut into units."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(STEPS))
    with accelerated(engine, **POLICIES[policy]) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")
        assert units(model) == UNITS[policy][accelerator.is_fsdp2]


@engines
@on_ranks(2)
def test_accumulation(rank: Rank, engine: str) -> None:
    """``accelerator.accumulate``: with a last step of fewer microbatches, at the end of the data."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(7), accumulation=3)
    with accelerated(engine, **BLOCKWISE, gradient_accumulation_steps=3) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(7)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@engines
@on_ranks(2)
def test_clipping(rank: Rank, engine: str) -> None:
    """``accelerator.clip_grad_norm_`` gives the norm of all gradients, and clips them."""
    expected = gpt()
    losses, norms = unsharded(expected, texts(STEPS), clip=0.1)
    with accelerated(engine, **BLOCKWISE) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        ours, found = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)), clip=0.1)
        for name, mine, theirs in (("losses", ours, losses[rank.rank]), ("norms", found, norms)):
            assert_close(torch.stack(mine), torch.stack(theirs), name, rtol=1e-6)


@engines
@on_ranks(2)
def test_offload(rank: Rank, engine: str) -> None:
    """``cpu_offload``, where there is nothing to offload from."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(STEPS))
    with accelerated(engine, **BLOCKWISE, cpu_offload=True) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@engines
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_mixed_precision(rank: Rank, engine: str, given: torch.dtype) -> None:
    """bf16: fp32 parameters are trained, also where the model came in bf16."""
    expected = gpt().to(given).to(torch.float32)
    forward = in_bf16 if engine == "fsdp2" else under_autocast
    losses, _ = unsharded(expected, texts(STEPS), forward=forward, reduced_in=torch.bfloat16)
    with accelerated(engine, **BLOCKWISE, mixed_precision="bf16") as accelerator:
        model, optimizer = prepared(accelerator, gpt().to(given))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@engines
@on_ranks(2)
def test_activation_checkpointing(rank: Rank, engine: str) -> None:
    """Blocks are computed again in backward, and nothing else changes."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(STEPS))
    with accelerated(engine, **BLOCKWISE, activation_checkpointing=True) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        block = next(module for module in model.modules() if isinstance(module, Block))
        seen: list[bool] = []
        block.register_forward_pre_hook(lambda *_: seen.append(True))
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert len(seen) == 2 * STEPS
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@engines
@pytest.mark.parametrize("policy", [BLOCKWISE, {"auto_wrap_policy": "size_based_wrap", "min_num_params": 300}])
@on_ranks(2)
def test_tied_weights(rank: Rank, engine: str, policy: dict[str, Any]) -> None:
    """One parameter under two names stays one, also where either of its modules is to be a unit, as here by size."""
    expected = gpt(tied=True)
    losses, _ = unsharded(expected, texts(STEPS))
    with accelerated(engine, **policy) as accelerator:
        model, optimizer = prepared(accelerator, gpt(tied=True))
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp1-flat"])
@on_ranks(2)
def test_two_models(rank: Rank, engine: str) -> None:
    """FSDP1, where accelerate takes several: each with its own optimizer."""
    with accelerated(engine, **BLOCKWISE) as accelerator:
        pairs = {seed: prepared(accelerator, gpt(seed)) for seed in (3, 4)}
        for seed, (model, optimizer) in pairs.items():
            losses, _ = unsharded(gpt(seed), texts(STEPS))
            ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
            assert_equal(ours, losses[rank.rank], "losses")


@engines
@on_ranks(2)
def test_mean_loss_is_that_of_the_whole_batch(rank: Rank, engine: str) -> None:
    """What a user compares: one process that sees everything in one batch."""
    whole, tokens = gpt(), texts(STEPS)
    optimizer, expected = adam(whole), []
    for batch in tokens.split(2 * BATCH):
        loss = loss_of(whole, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    with accelerated(engine, **BLOCKWISE) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        losses, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        mean = accelerator.reduce(torch.stack(losses), "mean")
        assert_close(mean, torch.stack(expected), "mean loss over ranks", rtol=1e-6)


@pytest.mark.parametrize("wrong", ["seed", "rate", "data"])
@on_ranks(2)
def test_another_run_is_told_apart(rank: Rank, wrong: str) -> None:
    """The comparisons above fail where the model, the optimizer or the data are not the same."""
    losses, _ = unsharded(gpt(), texts(STEPS))
    with accelerated("fsdp2", **BLOCKWISE) as accelerator:
        model, optimizer = prepared(accelerator, gpt(seed=4 if wrong == "seed" else 3))
        for group in optimizer.param_groups:
            group["lr"] *= 1.001 if wrong == "rate" else 1
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        with pytest.raises(AssertionError, match="losses"):
            assert_equal(ours, losses[1 - rank.rank if wrong == "data" else rank.rank], "losses")


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("fsdp2", {"reshard_after_forward": False}),
        ("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("fsdp1-flat", {"sharding_strategy": "NO_SHARD"}),
        ("fsdp1", {"sharding_strategy": "HYBRID_SHARD"}),
        ("fsdp1", {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False}),
        ("fsdp2", {"activation_checkpointing": True, "activation_checkpointing_offload": True}),
    ],
)
@on_ranks(2)
def test_other_options_of_the_plugin(rank: Rank, engine: str, options: dict[str, Any]) -> None:
    """Strategies, prefetch, and activations kept on the host."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(STEPS))
    with accelerated(engine, **BLOCKWISE, **options) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


class Listed(GPT):
    """Its blocks are in a list, where accelerate looks for what to compile one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


@pytest.mark.parametrize(("engine", "regional"), [("fsdp2", True), ("fsdp1", False)])
@on_ranks(2)
def test_compiled(rank: Rank, engine: str, regional: bool) -> None:
    """By accelerate's dynamo plugin: block by block, or as a whole."""
    from torch._dynamo.utils import counters  # slow to import

    losses, _ = unsharded(gpt(), texts(STEPS))
    torch.manual_seed(3)
    given = Listed()
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    counters.clear()
    with accelerated(engine, **BLOCKWISE, dynamo_plugin=plugin) as accelerator:
        model, optimizer = prepared(accelerator, given)
        assert (given.blocks[0]._compiled_call_impl is not None) is regional
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert counters["stats"]["unique_graphs"] > 0
        assert_equal(ours, losses[rank.rank], "losses")
    torch._dynamo.reset()


@engines
@on_ranks(2)
def test_gradient_scaler(rank: Rank, engine: str) -> None:
    """The scalers that accelerate makes for fp16: of version 1 that of FSDP, which is fullshard's."""
    losses, _ = unsharded(gpt(), texts(STEPS))
    with accelerated(engine, **BLOCKWISE) as accelerator:
        options = {"device": "cpu", "growth_interval": 2}
        if accelerator.is_fsdp2:
            accelerator.scaler = get_fsdp2_grad_scaler(**options)
        else:
            accelerator.scaler = get_grad_scaler(DistributedType.FSDP, **options)
            assert isinstance(accelerator.scaler, fullshard.ShardedGradScaler)
        model, optimizer = prepared(accelerator, gpt())
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert accelerator.scaler.get_scale() == 2.0**18


@on_ranks(2)
def test_an_optimizer_made_before_the_model_was_prepared(rank: Rank) -> None:
    """FSDP1 with ``use_orig_params=True``: it goes on with the parameters it was given."""
    expected, given = gpt(), gpt()
    losses, _ = unsharded(expected, texts(STEPS))
    with accelerated("fsdp1", **BLOCKWISE) as accelerator:
        model, optimizer, batches = accelerator.prepare(given, adam(given), loader(STEPS))
        ours, _ = train(accelerator, model, optimizer, batches)
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@engines
@on_ranks(2)
def test_ignored_modules(rank: Rank, engine: str) -> None:
    """By a regular expression: their parameters stay plain, and whole."""
    with accelerated(engine, **BLOCKWISE, ignored_modules=r"blocks\.0") as accelerator:
        model, _ = prepared(accelerator, gpt())
        plain = {_name: p for _name, p in model.named_parameters() if "blocks.0." in _name}
        assert len(plain) == 6
        assert_equal(
            {name.split("0.")[-1]: p for name, p in plain.items()}, dict(gpt().blocks[0].named_parameters()), "ignored"
        )


@on_ranks(4)
def test_hybrid_mesh(rank: Rank) -> None:
    """FSDP2 over a mesh of two axes, from ``ParallelismConfig``."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(STEPS, 4), ranks=4)
    axes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    with accelerated("fsdp2", **BLOCKWISE, parallelism_config=axes) as accelerator:
        model, optimizer = prepared(accelerator, gpt())
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS, 4)))
        assert next(model.parameters()).device_mesh.shape == (2, 2)
        for mine, theirs in zip(ours, losses[rank.rank], strict=True):
            assert_close(mine, theirs, "losses", rtol=1e-6)
