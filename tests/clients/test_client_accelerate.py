"""accelerate on fullshard, with both versions of FSDP: training equals the unsharded run."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

import gc
import re
import runpy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import (
    DistributedType,
    TorchDynamoPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler, merge_fsdp_weights
from accelerate.utils.modeling import get_grad_scaler
from accelerate_runs import (
    BLOCKWISE,
    ENGINES,
    GPT,
    accelerated,
    adam,
    full,
    gpt,
    in_bf16,
    loader,
    on_all_ranks,
    parameters_of,
    prepared,
    texts,
    train,
    under_autocast,
    unsharded,
)
from example_runs import TORCHRUN, run_example
from safetensors.torch import load_file
from torch import nn

import fullshard
from compare import assert_close, assert_equal
from fullshard.errors import FullshardError
from ranks import Rank, on_ranks

STEPS = 4
PREFETCH = {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False}
BY_SIZE = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 500}
OFFLOADED = {"activation_checkpointing": True, "activation_checkpointing_offload": True}

# By policy: units of FSDP1 (blocks and root), modules of FSDP2's units. Of these, accelerate makes one of the
# embedding, and one of the norm and the head; and by size of any module, the container of the blocks too.
POLICIES: list[tuple[dict[str, Any], tuple[int, int]]] = [
    (BLOCKWISE, (3, 6)),
    (BY_SIZE, (3, 7)),
    ({"auto_wrap_policy": "no_wrap"}, (1, 4)),
]
# Settings of the plugin that change no value.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((engine, {"cpu_offload": True, "activation_checkpointing": True}) for engine in ENGINES),
    ("fsdp2", {"reshard_after_forward": False}),
    ("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("fsdp1-flat", {"sharding_strategy": "NO_SHARD"}),
    ("fsdp1", {"sharding_strategy": "HYBRID_SHARD"}),
    ("fsdp1", PREFETCH),
    ("fsdp2", OFFLOADED),
]

engines = pytest.mark.parametrize("engine", ENGINES)


def units(model: nn.Module) -> int:
    """How many units there are."""
    kinds = (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)
    return sum(isinstance(module, kinds) for module in model.modules())


def assert_trains_as_unsharded(rank: Rank, engine: str, tied: bool = False, **options: Any) -> nn.Module:
    """Require losses and parameters of the unsharded run, bit by bit; the prepared model."""
    expected = gpt(tied=tied)
    losses, _ = unsharded(expected, texts(STEPS))
    given = gpt(tied=tied)
    with accelerated(engine, **options) as accelerator:
        model, optimizer = prepared(accelerator, given)
        assert accelerator.unwrap_model(model) is given
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(STEPS)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")
        return model


@engines
@pytest.mark.parametrize(("policy", "count"), POLICIES)
@on_ranks(2)
def test_policies(rank: Rank, engine: str, policy: dict[str, Any], count: tuple[int, int]) -> None:
    """However the model is cut into units."""
    assert units(assert_trains_as_unsharded(rank, engine, **policy)) == count[engine == "fsdp2"]


@engines
@pytest.mark.parametrize("policy", [BLOCKWISE, {"auto_wrap_policy": "size_based_wrap", "min_num_params": 300}])
@on_ranks(2)
def test_tied_weights(rank: Rank, engine: str, policy: dict[str, Any]) -> None:
    """One parameter under two names stays one, also where either of its modules is to be a unit, as here by size."""
    assert_trains_as_unsharded(rank, engine, tied=True, **policy)


@pytest.mark.parametrize(("engine", "options"), SETTINGS)
@on_ranks(2)
def test_settings_of_the_plugin(rank: Rank, engine: str, options: dict[str, Any]) -> None:
    """Strategies, prefetch, offloading, and activations that are computed again or kept on the host."""
    model = assert_trains_as_unsharded(rank, engine, **BLOCKWISE, **options)
    checkpointed = any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    assert checkpointed == ("activation_checkpointing" in options)


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


# ---------------------------------------------------------------- the example and its page

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "accelerate_gpt.py"
PAGE = ROOT / "docs" / "integrations" / "accelerate.md"

LAUNCH = ("fullshard.dropin", "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2")
LAUNCH += ("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_state_dict_type", "FULL_STATE_DICT")
LAUNCH += ("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
LAUNCH += ("--main_process_port", "0", "--num_cpu_threads_per_process", "1")


def losses_without_accelerate() -> list[float]:
    """Of the steps of two epochs, in one process that sees whole steps."""
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = example["GPT"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (tokens,) = example["data"]().tensors
    losses = []
    for _ in range(2):
        for step in tokens.split(2 * example["ACCUMULATION"] * example["BATCH"]):
            loss = example["loss_of"](model, step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("command", [TORCHRUN, LAUNCH], ids=["torchrun", "accelerate_launch"])
def test_the_example_runs(command: tuple[str, ...]) -> None:
    """By torchrun, installed before accelerate is imported; by ``accelerate launch``, whose children inherit it."""
    said = run_example(EXAMPLE.name, by=command)
    assert "FSDPGPT of fullshard on 2 processes" in said
    first, second = said.split("resumed\n")
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", first, re.MULTILINE)]
    assert losses == pytest.approx(losses_without_accelerate(), abs=2e-5)
    again = [float(loss) for loss in re.findall(r"^loss (\S+)$", second, re.MULTILINE)]
    assert again == losses[len(losses) // 2 :]
    whole = "optimizer.bin, pytorch_model_fsdp.bin" if command is LAUNCH else "optimizer_0, pytorch_model_fsdp_0"
    assert f"saved model.safetensors, {whole}" in said


def test_losses_on_the_page() -> None:
    """The page shows the losses that the example prints."""
    printed = [float(loss) for loss in re.findall(r"^loss (\S+)$", PAGE.read_text(), re.MULTILINE)]
    expected = losses_without_accelerate()
    assert printed == pytest.approx(expected + expected[len(expected) // 2 :], abs=5e-4)


# ---------------------------------------------------------------- states and models, saved and loaded

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def trained(accelerator: Accelerator, steps: int = 2) -> tuple[Any, Any]:
    """The model and its optimizer after so many steps."""
    model, optimizer = prepared(accelerator, gpt())
    train(accelerator, model, optimizer, accelerator.prepare(loader(steps)))
    return model, optimizer


def rest(accelerator: Accelerator, model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Losses of the two steps after the first two."""
    batches = accelerator.skip_first_batches(accelerator.prepare(loader(4)), 2)
    losses, _ = train(accelerator, model, optimizer, batches)
    return losses


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize(
    ("saving", "loading"),
    [("fsdp1", "fsdp1"), ("fsdp2", "fsdp2"), ("fsdp1", "fsdp2"), ("fsdp2", "fsdp1-flat"), ("fsdp1-flat", "fsdp1")],
)
@on_ranks(2)
def test_resuming(rank: Rank, saving: str, loading: str, kind: str, tmp_path: Path) -> None:
    """After ``load_state`` another model goes on as the unsharded one does, also with the other version of FSDP."""
    expected = gpt()
    losses, _ = unsharded(expected, texts(4))
    with accelerated(saving, **BLOCKWISE, state_dict_type=kind) as accelerator:
        trained(accelerator)
        accelerator.save_state(str(tmp_path))
    with accelerated(loading, **BLOCKWISE, state_dict_type=kind) as accelerator:
        model, optimizer = prepared(accelerator, gpt(seed=4))
        accelerator.load_state(str(tmp_path))
        assert_equal(rest(accelerator, model, optimizer), losses[rank.rank][2:], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1-flat"])
@on_ranks(2)
def test_resuming_without_distributed_checkpoint(rank: Rank, engine: str, tmp_path: Path) -> None:
    """``use_dcp=False``: each rank saves its shards with ``torch.save``, and loads them weights-only."""
    losses, _ = unsharded(gpt(), texts(4))
    with accelerated(engine, **BLOCKWISE, state_dict_type=SHARDED) as accelerator:
        plugin = accelerator.state.fsdp_plugin
        model, optimizer = trained(accelerator)
        save_fsdp_model(plugin, accelerator, model, str(tmp_path), use_dcp=False)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path), use_dcp=False)
    with accelerated(engine, **BLOCKWISE, state_dict_type=SHARDED) as accelerator:
        plugin = accelerator.state.fsdp_plugin
        model, optimizer = prepared(accelerator, gpt(seed=4))
        load_fsdp_model(plugin, accelerator, model, str(tmp_path), use_dcp=False)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path), use_dcp=False)
        assert_equal(rest(accelerator, model, optimizer), losses[rank.rank][2:], "losses")


@pytest.mark.parametrize(
    ("engine", "kind", "ours_first"),
    [
        ("fsdp2", FULL, True),  # torch's own FSDP1 ends here: with FULL by a fault, with SHARDED without Adam's state
        ("fsdp2", SHARDED, False),
        ("fsdp1", SHARDED, False),
    ],
)
@on_ranks(2)
def test_states_go_to_and_from_torchs_engine(
    rank: Rank, engine: str, kind: str, ours_first: bool, tmp_path: Path
) -> None:
    """What accelerate saved on one engine, it resumes on the other."""
    losses, _ = unsharded(gpt(), texts(4))
    with accelerated(engine, ours=ours_first, **BLOCKWISE, state_dict_type=kind) as accelerator:
        trained(accelerator)
        accelerator.save_state(str(tmp_path))
    gc.collect()
    with accelerated(engine, ours=not ours_first, **BLOCKWISE, state_dict_type=kind) as accelerator:
        model, optimizer = prepared(accelerator, gpt(seed=4))
        kinds = (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)
        assert isinstance(model, kinds) is not ours_first
        accelerator.load_state(str(tmp_path))
        assert_equal(rest(accelerator, model, optimizer), losses[rank.rank][2:], "losses")
    gc.collect()


@on_ranks(2)
def test_local_state_is_refused(rank: Rank, tmp_path: Path) -> None:
    """LOCAL_STATE_DICT with ``use_orig_params=True``: with what to do instead."""
    with accelerated("fsdp1", **BLOCKWISE, state_dict_type="LOCAL_STATE_DICT") as accelerator:
        trained(accelerator)
        with pytest.raises(FullshardError, match="use SHARDED_STATE_DICT"):
            accelerator.save_state(str(tmp_path))


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1-flat"])
@on_ranks(2)
def test_schedulers_are_resumed(rank: Rank, engine: str, tmp_path: Path) -> None:
    """With the state of the model, in one ``save_state``."""
    found = []
    for resumed in (False, True):
        with accelerated(engine, **BLOCKWISE) as accelerator:
            model, optimizer = prepared(accelerator, gpt())
            scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            if resumed:
                accelerator.load_state(str(tmp_path))
            else:
                train(accelerator, model, optimizer, accelerator.prepare(loader(2)))
                scheduler.step()
                accelerator.save_state(str(tmp_path))
            losses = rest(accelerator, model, optimizer)
            found.append((losses, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]))
    assert_equal(found[1], found[0], "resumed")
    assert found[1][2] < 1e-2


# ---------------------------------------------------------------- models


@engines
@on_ranks(2)
def test_models_are_saved_and_merged(rank: Rank, engine: str, tmp_path: Path) -> None:
    """``get_state_dict``, ``save_model`` and ``merge_fsdp_weights`` give what a plain model has, in fp32."""
    expected = gpt()
    unsharded(expected, texts(2))
    with accelerated(engine, **BLOCKWISE, state_dict_type=SHARDED) as accelerator:
        model, _ = trained(accelerator)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, str(tmp_path / "whole"))
        accelerator.save_model(model, str(tmp_path / "parts"), max_shard_size="2KB")
        accelerator.save_state(str(tmp_path / "state"))
        merge_fsdp_weights(str(tmp_path / "state" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
        accelerator.wait_for_everyone()
    assert_equal(dict(state), dict(expected.state_dict()) if rank.rank == 0 else {}, "get_state_dict")
    for file in ("whole", "merged"):
        found = load_file(tmp_path / file / "model.safetensors")
        assert_equal(found, dict(expected.state_dict()), file)
    parts = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(parts) > 1
    assert_equal({k: v for part in parts for k, v in load_file(part).items()}, dict(expected.state_dict()), "parts")


@engines
@on_ranks(2)
def test_tied_weights_are_saved(rank: Rank, engine: str, tmp_path: Path) -> None:
    """By ``save_model``, once, with FSDP2 under both names; a plain model that ties them takes the file."""
    expected = gpt(tied=True)
    unsharded(expected, texts(2))
    with accelerated(engine, **BLOCKWISE) as accelerator:
        model, optimizer = prepared(accelerator, gpt(tied=True))
        train(accelerator, model, optimizer, accelerator.prepare(loader(2)))
        accelerator.save_model(model, str(tmp_path))
        accelerator.wait_for_everyone()
    plain = gpt(seed=4, tied=True)
    missing, unexpected = plain.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert len(missing) == (engine != "fsdp2") and not unexpected
    assert_equal(parameters_of(plain), parameters_of(expected), "parameters")


# ---------------------------------------------------------------- weights on rank 0 only


@pytest.mark.parametrize(("tied", "offload"), [(False, False), (True, False), (False, True)])
@on_ranks(2)
def test_ram_efficient_loading(rank: Rank, tied: bool, offload: bool) -> None:
    """FSDP2 with ``cpu_ram_efficient_loading``: all get what rank 0 has."""
    expected = gpt(tied=tied)
    losses, _ = unsharded(expected, texts(4))
    options = {**BLOCKWISE, "cpu_ram_efficient_loading": True, "cpu_offload": offload}
    with accelerated("fsdp2", **options) as accelerator:
        model, optimizer = prepared(accelerator, gpt(seed=3 if rank.rank == 0 else 4, tied=tied))
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(4)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")


def synchronized(plugin: FullyShardedDataParallelPlugin) -> None:
    """What ``sync_module_states=True`` does where there is an accelerator; elsewhere the plugin raises."""
    plugin.sync_module_states = True
    plugin.param_init_fn = lambda module: module.to_empty(device=torch.device("cpu"), recurse=False)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp1-flat"])
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_sync_module_states(rank: Rank, engine: str, tied: bool) -> None:
    """FSDP1: a rank whose model is on the meta device gets weights and buffers of rank 0."""
    expected = gpt(tied=tied)
    losses, _ = unsharded(expected, texts(4))
    with accelerated(engine, before=synchronized, **BLOCKWISE) as accelerator:
        with torch.device("meta" if rank.rank else "cpu"):
            given = gpt(tied=tied)
        model, optimizer = prepared(accelerator, given)
        ours, _ = train(accelerator, model, optimizer, accelerator.prepare(loader(4)))
        assert_equal(ours, losses[rank.rank], "losses")
        assert_equal(full(model), parameters_of(expected), "parameters")
        assert on_all_ranks(float(given.scale)) == [0.5, 0.5]
