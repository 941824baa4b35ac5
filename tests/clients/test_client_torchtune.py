"""torchtune's distributed functions on fullshard: sharding, state dicts, checkpoints of activations."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtune_names", reason="needs torchtune and torchao", exc_type=ImportError)

import copy
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from example_runs import TORCHRUN, losses_in, run_example
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.models.llama3 import base_llama_tp_plan
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import (
    LoRALinear,
    get_adapter_params,
    get_adapter_state_dict,
    get_merged_lora_ckpt,
    validate_missing_and_unexpected_for_lora,
)
from torchtune_models import LENGTH, LORA, PLAIN, VOCABULARY, assert_same, full_model, lora_model, losses, shard

import fullshard
import fullshard.dropin
from ranks import Rank, on_ranks

DEVICE = torch.device("cpu")


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_shard_model(rank: Rank, reshard: bool):
    """Every layer and the named modules become units; losses and norms of the whole model."""
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        model = shard(full_model(), ["tok_embeddings"], reshard_after_forward=reshard)
        units = [name for name, module in model.named_modules() if isinstance(module, fullshard.FSDPModule)]
        assert units == ["", "tok_embeddings", "layers.0", "layers.1"]
        kept = []
        weight_of = model.layers[0].mlp.w1
        weight_of.register_forward_hook(lambda module, *_: kept.append(module.weight))
        assert_same(losses(model), expected)
        model(torch.zeros(1, 2, dtype=torch.int64))
        assert (kept[-1].untyped_storage().nbytes() > 0) != reshard


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@on_ranks(2)
def test_hybrid(rank: Rank, shape: tuple[int, int]):
    """dp_mesh with an axis of replicas."""
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        model = shard(full_model(), dp_mesh=rank.make_mesh(*shape, names=("replicate", "shard")))
        assert next(model.parameters()).placements == (Replicate(), Shard(0))
        assert_same(losses(model), expected)


@on_ranks(2)
def test_tensor_parallel(rank: Rank):
    """prepare_mha_for_tp and torchtune's plan, then shard_model over the other axis: logits of the whole model."""
    reference = full_model()
    mesh = rank.make_mesh(1, 2, names=("dp", "tp"))
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    with fullshard.dropin.install(quiet=True):
        model = training.prepare_mha_for_tp(full_model(), mesh["tp"])
        parallelize_module(model, mesh["tp"], base_llama_tp_plan())
        shard(model, dp_mesh=mesh["dp"])
        assert model.layers[0].mlp.w1.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
        for _ in range(3):
            found, expected = model(tokens), reference(tokens)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            for logits, optimizer in zip((found, expected), optimizers, strict=True):
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(2)
def test_cpu_offload(rank: Rank):
    """cpu_offload=True on a machine that has nothing but a CPU."""
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        assert_same(losses(shard(full_model(), cpu_offload=True)), expected)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_meta_device(rank: Rank, offload: bool):
    """Built on the meta device, sharded, then given its values: load_from_full_model_state_dict; and back."""
    reference = full_model()
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        with torch.device("meta"):
            model = full_model()
        shard(model, cpu_offload=offload)
        with pytest.raises(RuntimeError, match="on meta device"):
            training.validate_no_params_on_meta_device(model)
        missing, unexpected = training.load_from_full_model_state_dict(
            model, dict(reference.state_dict()), DEVICE, strict=True, cpu_offload=offload
        )
        assert (missing, unexpected) == ([], [])
        with DEVICE:
            for module in model.modules():
                if hasattr(module, "rope_init"):
                    module.rope_init()
        training.validate_no_params_on_meta_device(model)
        gathered = training.gather_cpu_state_dict(model, rank.rank == 0, DEVICE)
        assert gathered.keys() == (reference.state_dict().keys() if rank.rank == 0 else set())
        for name, value in gathered.items():
            assert torch.equal(value, reference.state_dict()[name]), name
        assert_same(losses(model), expected)


@on_ranks(2)
def test_optimizer_state(rank: Rank):
    """The full state of the optimizer on rank 0; loaded into another model, it goes on bitwise."""
    with fullshard.dropin.install(quiet=True):
        model = shard(full_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses(model, 2, optimizer=optimizer)
        weights = training.gather_cpu_state_dict(model, True, DEVICE)
        state = training.get_full_optimizer_state_dict(model, optimizer, rank.rank == 0, DEVICE)
        assert bool(state) == (rank.rank == 0)
        reference = full_model()
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        losses(reference, 2, sharded=False, optimizer=plain)
        if rank.rank == 0:
            for name, parameter in reference.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(
                        state["state"][name][key], plain.state[parameter][key], rtol=1e-3, atol=1e-7, msg=name
                    )
        state = copy.deepcopy(_from_rank_0(state))  # its steps are the optimizer's own tensors
        expected = losses(model, 2, optimizer=optimizer, first=2)
        resumed = shard(full_model())
        training.load_from_full_model_state_dict(resumed, weights, DEVICE, strict=True)
        optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
        training.load_from_full_optimizer_state_dict(resumed, optimizer, state, DEVICE)
        first = next(iter(optimizer.state.values()))["exp_avg"]
        assert isinstance(first, DTensor)
        assert losses(resumed, 2, optimizer=optimizer, first=2) == expected


def _from_rank_0(value: object) -> object:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@on_ranks(2)
def test_activation_checkpointing(rank: Rank):
    """set_activation_checkpointing and the selective one: bitwise the losses without."""
    with fullshard.dropin.install(quiet=True):
        expected = losses(shard(full_model()))
        model = full_model()
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
        assert "_checkpoint_wrapped_module" in "".join(name for name, _ in model.named_modules())
        assert losses(shard(model)) == expected
        model = full_model()
        training.apply_selective_activation_checkpointing(model, "selective", 2)
        assert losses(shard(model)) == expected


@on_ranks(2)
def test_optimizer_in_backward(rank: Rank):
    """Optimizers that step in hooks of the parameters' gradients, one per parameter."""
    with fullshard.dropin.install(quiet=True):
        expected = shard(full_model())
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        model = shard(full_model())
        steps = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
        training.register_optim_in_bwd_hooks(model, steps)
        tokens = torch.arange(16).view(2, 8) + rank.rank
        for _ in range(2):
            expected(tokens).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(tokens).logsumexp(-1).sum().backward()
        for (name, one), two in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), two.full_tensor()), name


# ---------------------------------------------------------------- LoRA and QLoRA


def packed(model: torch.nn.Module) -> list[str]:
    """Names of the parameters whose local part is packed to four bits."""
    found = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter.to_local() if isinstance(parameter, DTensor) else parameter, NF4Tensor):
            found.append(name)
    return found


@pytest.mark.parametrize("quantized", [False, True], ids=["lora", "qlora"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@on_ranks(2)
def test_lora(rank: Rank, quantized: bool, checkpoints: bool):
    """Losses and norms of the whole model; the base stays as it is, packed to four bits with QLoRA."""
    reference = lora_model(quantize_base=quantized)
    expected = losses(lora_model(quantize_base=quantized), sharded=False)
    with fullshard.dropin.install(quiet=True):
        model = lora_model(quantize_base=quantized)
        if checkpoints:
            training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
        shard(model)
        names = [name.replace("_checkpoint_wrapped_module.", "") for name in packed(model)]
        assert names == packed(reference)
        assert len(names) == (14 if quantized else 0)
        assert_same(losses(model), expected)
        after = training.gather_cpu_state_dict(model, True, DEVICE)
        for name, parameter in reference.named_parameters():
            whole = parameter.to(parameter.dtype) if isinstance(parameter, NF4Tensor) else parameter
            assert torch.equal(after[name], whole.detach()) != parameter.requires_grad, name


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_qlora_memory(rank: Rank, reshard: bool):
    """A rank holds its half of the packed base: 4 bits and scales per weight, no more."""
    with fullshard.dropin.install(quiet=True):
        model = shard(lora_model(quantize_base=True), reshard_after_forward=reshard)
        weight = model.layers[0].mlp.w1.weight
        local = weight.to_local()
        assert tuple(weight.shape) == (256, 256)
        assert local.quantized_data.numel() * 2 == 256 * 256 // 2
        assert local.quantized_scalers.numel() == 256 * 256 // 64 // 2
        assert_same(losses(model), losses(lora_model(quantize_base=True), sharded=False))


@pytest.mark.parametrize("kind", ["lora", "qlora", "dora"])
@on_ranks(2)
def test_adapters_on_the_meta_device(rank: Rank, kind: str):
    """As recipes build it: on meta, sharded, adapters initialized in place, the base from a full state dict."""
    options = {"quantize_base": kind == "qlora", "use_dora": kind == "dora"}
    base = full_model().state_dict()
    with fullshard.dropin.install(quiet=True):
        with torch.device("meta"):
            model = lora_model(**options)
        shard(model)
        for module in model.modules():
            if hasattr(module, "initialize_parameters"):
                module.to_empty(device=DEVICE)
                module.initialize_parameters()
            if hasattr(module, "rope_init"):
                with DEVICE:
                    module.rope_init()
        missing, unexpected = training.load_from_full_model_state_dict(model, dict(base), DEVICE)
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()
        targets = {key: LORA[key] for key in ("lora_attn_modules", "apply_lora_to_mlp")}
        if kind != "dora":
            validate_missing_and_unexpected_for_lora(
                **targets, apply_lora_to_output=False, base_missing=missing, base_unexpected=unexpected
            )
        training.validate_no_params_on_meta_device(model)
        assert len(packed(model)) == (14 if kind == "qlora" else 0)
        # The unsharded model with what the ranks have come to.
        values = training.gather_cpu_state_dict(model, True, DEVICE)
        plain = lora_model(**(options | {"quantize_base": False}))
        plain.load_state_dict(values)
        found = losses(model)
        if kind == "qlora":
            # torchtune's own gathering rounds once more than the packed weights do: the losses tell the same story.
            assert_same(found, losses(plain, sharded=False), 1e-3)
        else:
            assert_same(found, losses(plain, sharded=False))
        adapters = training.gather_cpu_state_dict(model, rank.rank == 0, DEVICE, adapter_weights_only=True)
        assert (set(adapters) == set(get_adapter_params(model))) == (rank.rank == 0)


@on_ranks(2)
def test_qlora_with_replicas(rank: Rank):
    """Packed weights with an axis of replicas train; torchtune's own loading of them says that it cannot."""
    expected = losses(lora_model(quantize_base=True), sharded=False)
    mesh = rank.make_mesh(2, 1, names=("replicate", "shard"))
    with fullshard.dropin.install(quiet=True):
        model = shard(lora_model(quantize_base=True), dp_mesh=mesh)
        assert_same(losses(model), expected)
        with pytest.raises(NotImplementedError, match="only support 1D FSDP"):
            training.load_from_full_model_state_dict(model, full_model().state_dict(), DEVICE)


@on_ranks(2)
def test_merge(rank: Rank):
    """Adapters of a sharded QLoRA run, merged by torchtune into full weights: the logits of the sharded model."""
    with fullshard.dropin.install(quiet=True):
        model = shard(lora_model(quantize_base=True))
        losses(model)
        tokens = torch.arange(LENGTH).view(1, LENGTH)
        expected = model(tokens).detach()
        gathered = training.gather_cpu_state_dict(model, True, DEVICE)
        assert set(get_adapter_state_dict(gathered)) == set(get_adapter_params(model))
        merged = full_model()
        merged.load_state_dict(get_merged_lora_ckpt(gathered, rank=LORA["lora_rank"], alpha=LORA["lora_alpha"]))
        torch.testing.assert_close(merged(tokens).detach(), expected, rtol=1e-4, atol=1e-4)
        assert isinstance(model.layers[0].mlp.w1, LoRALinear)


# ---------------------------------------------------------------- a whole recipe


class Tokenizer:
    """What a recipe asks a tokenizer for."""

    pad_id = 0


def tokenizer() -> Tokenizer:
    """For the recipe's configuration."""
    return Tokenizer()


def dataset(_: Tokenizer) -> list[dict[str, list[int]]]:
    """Sixteen rows of tokens."""
    drawn = torch.randint(1, VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"tokens": row, "labels": row} for row in drawn]


def recipe_module(name: str) -> ModuleType:
    """A recipe. Its folder refuses to be imported as a package."""
    folder = Path(importlib.util.find_spec("torchtune").origin).parents[1] / "recipes"
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logged(path: Path) -> torch.Tensor:
    """Loss and gradient norm of every step, fp64 (steps, 2)."""
    numbers = re.findall(r"loss:([\d.]+) .*grad_norm:([\d.]+)", path.read_text())
    return torch.tensor([[float(value) for value in pair] for pair in numbers], dtype=torch.float64)


def recipe_config(folder: Path, name: str, resume: bool, quantized: bool) -> Any:
    """Of two epochs of two steps; ``resume`` starts behind the first."""
    here = __name__
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(folder / "base"),
        "checkpoint_files": ["model.pt"],
        "adapter_checkpoint": "epoch_0/adapter_model.pt" if resume else None,
        "recipe_checkpoint": "recipe_state/recipe_state.pt" if resume else None,
        "output_dir": str(folder / "out"),
        "model_type": "LLAMA3",
    }
    return OmegaConf.create(
        {
            "output_dir": str(folder / "out"),
            "tokenizer": {"_component_": f"{here}.tokenizer"},
            "dataset": {"_component_": f"{here}.dataset"},
            "model": {
                "_component_": "torchtune.models.llama3.lora_llama3",
                **PLAIN,
                **LORA,
                "quantize_base": quantized,
            },
            "checkpointer": checkpointer,
            "resume_from_checkpoint": resume,
            "seed": 5,
            "shuffle": False,
            "batch_size": 2,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 1,
            },
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss", "num_output_chunks": 2},
            "epochs": 2,
            "max_steps_per_epoch": 2,
            "gradient_accumulation_steps": 2,
            "clip_grad_norm": 1.0,
            "enable_activation_checkpointing": True,
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(folder / "logs"),
                "filename": f"{name}.txt",
            },
            "device": "cpu",
            "dtype": "fp32",
        }
    )


@pytest.mark.parametrize("quantized", [False, True], ids=["lora", "qlora"])
@on_ranks(2)
def test_recipe(rank: Rank, tmp_path: Path, quantized: bool):
    """lora_finetune_distributed, whole, and resumed after its first epoch: losses and norms as with torch's FSDP."""
    recipe = recipe_module("lora_finetune_distributed")
    if rank.rank == 0:
        (tmp_path / "base").mkdir()
        torch.save(full_model().state_dict(), tmp_path / "base" / "model.pt")
    dist.barrier()

    def run(name: str, resume: bool = False) -> torch.Tensor:
        config = recipe_config(tmp_path, name, resume, quantized)
        runner = recipe.LoRAFinetuneRecipeDistributed(config)
        runner.setup(config)
        assert isinstance(runner._model.layers[0], fullshard.FSDPModule) == (name != "theirs")
        runner.train()
        dist.barrier()
        return logged(tmp_path / "logs" / f"{name}.txt")

    with pytest.MonkeyPatch.context() as patch:
        # These read the GPU's memory, and have no way around it on a CPU.
        for name in ("get_memory_stats", "cleanup_before_training", "log_memory_stats"):
            patch.setattr(recipe.training, name, lambda *_, **__: {})
        theirs = run("theirs")
        with fullshard.dropin.install(quiet=True):
            ours, resumed = run("ours"), run("resumed", resume=True)
    assert ours.shape == (4, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert torch.equal(resumed, ours[2:])


def test_example():
    """The example, as a user starts it, trains and gathers its adapters."""
    names = Path(__file__).with_name("torchtune_names.py")  # for a torchao that torchtune does not know
    printed = run_example("torchtune_distributed.py", by=(*TORCHRUN, str(names)))
    found = losses_in(printed)
    assert len(found) == 5
    assert found == sorted(found, reverse=True)
    assert "40 adapter tensors, 102,400 values gathered" in printed
