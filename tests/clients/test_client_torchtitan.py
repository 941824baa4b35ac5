"""torchtitan's parallelization of dense decoders on fullshard."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("triton", reason="torchtitan's models import Triton, also where there is only a CPU")

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from example_runs import losses_in, run_example
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.experiments.transformers_modeling_backend.parallelize import apply_fsdp
from torchtitan_models import (
    BATCH,
    LENGTH,
    MAX_NORM,
    Sharded,
    assert_same,
    build,
    deepseek_config,
    exact_experts,
    llama_config,
    losses,
    on_fullshard,
    on_torch,
    qwen_moe_config,
    tokens,
)

import fullshard
import fullshard.dropin
from ranks import Rank, on_ranks

DEGREES = {
    "fsdp": {"data_parallel_shard_degree": 4},
    "hsdp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    "tp": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
}


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
@pytest.mark.parametrize("shape", DEGREES)
@on_ranks(4)
def test_dense(rank: Rank, shape: str, backend: str):
    """FSDP, HSDP and FSDP with TP, with meshes for data alone and with dp_mesh_dims: losses of the whole model."""
    expected = losses(build(llama_config()))
    with on_fullshard(backend):
        sharded = Sharded(llama_config(), spmd_backend=backend, **DEGREES[shape])
        assert isinstance(sharded.model, fullshard.FSDPModule)
        assert isinstance(sharded.model.layers["0"], FSDPModule)
        assert_same(sharded.losses(), expected, 1e-5)


@on_ranks(4)
def test_meta_device(rank: Rank):
    """Built on meta, sharded, then given memory and values by torchtitan: bitwise those that torch's FSDP gives."""

    def values() -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = Sharded(llama_config(), **DEGREES["fsdp"]).model
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        with torch.no_grad():
            model.init_states(buffer_device=torch.device("cpu"))
        assert isinstance(model, fullshard.FSDPModule) == fullshard.dropin.installed()
        assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
        return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}

    with on_torch():
        theirs = values()
    with on_fullshard():
        ours = values()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("policy", ["always", "never", "default"])
@on_ranks(4)
def test_reshard_policies(rank: Rank, policy: str):
    """Each fsdp_reshard_after_forward keeps full after a forward what torchtitan says, and the same losses."""
    expected = losses(build(llama_config()))
    with on_fullshard():
        sharded = Sharded(llama_config(), fsdp_reshard_after_forward=policy, **DEGREES["fsdp"])
        modules = {"block": sharded.model.layers["0"].feed_forward.w2, "head": sharded.model.lm_head}
        used = {}
        for name, module in modules.items():
            module.register_forward_hook(lambda module, *_, name=name: used.__setitem__(name, module.weight))
        result = sharded.model(sharded.part(tokens(0)[0]))
        full = {name: weight.untyped_storage().nbytes() > 0 for name, weight in used.items()}
        assert full == {"block": policy == "never", "head": policy != "always"}
        result.sum().backward()
        sharded.model.zero_grad()
        assert_same(sharded.losses(), expected, 1e-5)


@on_ranks(4)
def test_mixed_precision(rank: Rank):
    """Parameters are used in bf16 and kept in fp32, as are gradients: losses near those in fp32, and not those."""
    with on_fullshard():
        training = TrainingConfig(mixed_precision_param="bfloat16", seq_len=LENGTH)
        sharded = Sharded(llama_config(), training, **DEGREES["fsdp"])
        used = []
        weight_of = sharded.model.layers["1"].feed_forward.w2
        weight_of.register_forward_hook(lambda module, *_: used.append(module.weight.dtype))
        found = sharded.losses()
        assert set(used) == {torch.bfloat16}
        assert all(parameter.dtype == torch.float32 for parameter in sharded.model.parameters())
    expected = losses(build(llama_config()))
    assert_same(found, expected, 2e-2)
    with pytest.raises(AssertionError):
        assert_same(found, expected, 1e-6)


@on_ranks(4)
def test_cpu_offload(rank: Rank):
    """training.enable_cpu_offload changes nothing on a CPU."""
    expected = losses(build(llama_config()))
    with on_fullshard():
        training = TrainingConfig(mixed_precision_param="float32", seq_len=LENGTH, enable_cpu_offload=True)
        assert_same(Sharded(llama_config(), training, **DEGREES["fsdp"]).losses(), expected, 1e-5)


@pytest.mark.parametrize("policy", [FullAC.Config(), SelectiveAC.Config()], ids=["full", "selective"])
@on_ranks(4)
def test_activation_checkpointing(rank: Rank, policy: object):
    """With full and with selective checkpoints around the blocks: bitwise the losses without."""
    with on_fullshard():
        expected = Sharded(llama_config(), **DEGREES["fsdp"]).losses()
        found = Sharded(llama_config(), ac=policy, **DEGREES["fsdp"]).losses()
        assert found == expected


@on_ranks(4)
def test_tied_weights(rank: Rank):
    """Embedding and head that share a weight are one unit with the norm, and stay one parameter."""
    expected = losses(build(llama_config(tied=True)))
    with on_fullshard():
        sharded = Sharded(llama_config(tied=True), **DEGREES["fsdp"])
        assert_same(sharded.losses(), expected, 1e-5)
        assert sharded.model.tok_embeddings.weight is sharded.model.lm_head.weight


@on_ranks(4)
def test_chunked_loss(rank: Rank):
    """ChunkedLossWrapper holds the head over its chunks and reduces once: gradients of the whole loss."""
    reference = build(llama_config())
    inputs, labels = tokens(0)
    loss, _ = CrossEntropyLoss.Config().build()(reference(inputs), labels, torch.tensor(BATCH * LENGTH))
    loss.backward()
    with on_fullshard():
        sharded = Sharded(llama_config(), **DEGREES["fsdp"])
        model = sharded.model
        chunked = ChunkedLossWrapper.Config(num_chunks=4).build()
        chunked.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        for _ in range(2):
            model.zero_grad()
            hidden = model(sharded.part(inputs))
            part, _ = chunked(hidden, sharded.part(labels), torch.tensor(BATCH * LENGTH))
            part.backward()
        whole = part.detach().clone()
        dist.all_reduce(whole)
        torch.testing.assert_close(whole, loss.detach(), rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@on_ranks(4)
def test_pipeline(rank: Rank, schedule: str):
    """Two pipeline stages, each sharded over two ranks: gradients and norms of the whole model."""
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan_models import PARALLELIZE, CompileConfig, ParallelDims, ParallelismConfig

    reference = build(llama_config())
    inputs, labels = tokens(0)
    count = torch.tensor(BATCH * LENGTH)
    loss, _ = CrossEntropyLoss.Config().build()(reference(inputs), labels, count)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    with on_fullshard():
        parallelism = ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_shard_degree=2,
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_microbatch_size=1,
        )
        dims = ParallelDims.from_config(parallelism, 4)
        config = llama_config()
        pipeline, parts, first, last = pipeline_llm(
            build(config, parallelism),
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32", seq_len=LENGTH, local_batch_size=2),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
            device=torch.device("cpu"),
            model_config=config,
            parallelize_fn=PARALLELIZE["Llama3Model"],
            loss_fn=CrossEntropyLoss.Config().build(),
        )
        assert all(isinstance(part, fullshard.FSDPModule) for part in parts)
        own = dims.get_mesh("fsdp").get_local_rank()
        target = labels.chunk(2)[own] if last else None
        per_microbatch: list[torch.Tensor] = []
        options = {"target": target, "losses": per_microbatch, "loss_kwargs": {"global_valid_tokens": count}}
        pipeline.step(*([inputs.chunk(2)[own]] if first else []), **options)
        parameters = [parameter for part in parts for parameter in part.parameters()]
        found = clip_grad_norm_(parameters, MAX_NORM, pp_mesh=dims.get_mesh("pp"))
        torch.testing.assert_close(found, norm, rtol=1e-5, atol=0)
        for part in parts:
            for name, parameter in part.named_parameters():
                expected = reference.get_parameter(name).grad
                torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-7, msg=name)
        total = torch.stack(per_microbatch).sum() if last else torch.zeros(())
        dist.all_reduce(total)
        torch.testing.assert_close(total.detach(), loss.detach(), rtol=1e-6, atol=0)


class Progress:
    """What a checkpoint has beside model, optimizer and schedule."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
@on_ranks(4)
def test_checkpoint_manager(rank: Rank, tmp_path: Path, mode: str):
    """Saved by torchtitan's CheckpointManager over four shards, loaded over 2 x 2: goes on bitwise as before."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
    from torchtitan.components.optimizer.optimizer import ParamGroupConfig

    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})

    def start(shape: str) -> tuple[Sharded, OptimizersContainer, CheckpointManager, Progress]:
        sharded, progress = Sharded(llama_config(), **DEGREES[shape]), Progress()
        parts = [sharded.model]
        optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(
            model_parts=parts
        )
        schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=10)
        manager = CheckpointManager.Config(enable=True, interval=1, async_mode=mode, keep_latest_k=0).build(
            dataloader=Progress(),
            model_parts=parts,
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": progress},
            sd_adapter=None,
            base_folder=str(tmp_path),
        )
        return sharded, optimizers, manager, progress

    with on_fullshard():
        sharded, optimizers, manager, progress = start("fsdp")
        sharded.losses(2, optimizer=optimizers)
        progress.step = 2
        manager.save(2)
        manager.maybe_wait_for_saving()
        saved = {name: p.full_tensor().clone() for name, p in sharded.model.state_dict().items()}
        expected = sharded.losses(2, optimizer=optimizers, first=2)
        manager.close()
        resumed, optimizers, manager, progress = start("hsdp")
        assert manager.load()
        assert progress.step == 2
        for name, value in resumed.model.state_dict().items():
            assert torch.equal(value.full_tensor(), saved[name]), name
        assert_same(resumed.losses(2, optimizer=optimizers, first=2), expected, 1e-6)
        manager.close()


class Transformer(nn.Module):
    """The parts that the Transformers back end of torchtitan looks for."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 64, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(inputs)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.lm_head(self.norm(hidden))


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4)
def test_transformers_modeling_backend(rank: Rank, tied: bool):
    """apply_fsdp of the back end for models of Transformers: losses of the whole model, gradients not divided."""
    torch.manual_seed(0)
    model = Transformer(tied)
    expected = losses(copy.deepcopy(model))
    with on_fullshard():
        sharded = Sharded(llama_config(), **DEGREES["fsdp"])  # for its mesh, its part of the batch
        apply_fsdp(model, sharded.dims.get_mesh("fsdp"), torch.float32, torch.float32, pp_enabled=False)
        sharded.model = model
        assert_same(sharded.losses(), expected, 1e-5)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("shape", ["fsdp", "hsdp"])
@on_ranks(4)
def test_spmd_types(rank: Rank, shape: str):
    """torchtitan's default back end, plain tensors with annotations; FSDP2 refuses it before torch 2.14.

    With other parallelisms it needs what torchtitan's trainer sets up: see test_client_torchtitan_trainer.py.
    """
    expected = losses(build(llama_config()))
    with on_fullshard("spmd_types"):
        sharded = Sharded(llama_config(), spmd_backend="spmd_types", **DEGREES[shape])
        assert_same(sharded.losses(), expected, 1e-5)
        assert all(isinstance(parameter, DTensor) for parameter in sharded.model.parameters())


def test_example():
    """The example, as a user starts it, trains."""
    printed = run_example("torchtitan_parallelize.py")
    found = losses_in(printed)
    assert len(found) == 5
    assert found == sorted(found, reverse=True)
    assert "FSDPLlama3Model: 3,081,856 of 6,163,712 parameters here" in printed
    assert "replaces torch.distributed.fsdp" in printed


# ---------------------------------------------------------------- mixtures of experts

RTOL = 5e-5

EP = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}
HSDP_EP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
TP_EP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": 2}


def experts_of(sharded: Sharded) -> torch.nn.Parameter:
    """A weight of the experts of the last layer."""
    return sharded.model.layers["1"].moe.routed_experts.inner_experts.w1_EFD


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
@pytest.mark.parametrize(("degrees", "axes"), [(EP, 2), (HSDP_EP, 3), (TP_EP, 2)], ids=["ep", "hsdp", "tp"])
@on_ranks(4)
def test_expert_parallel(rank: Rank, degrees: dict[str, int], axes: int, backend: str):
    """Experts on a mesh of their own (efsdp, ep), the rest on all ranks: losses and norms of the whole model."""
    with exact_experts():
        expected = losses(build(qwen_moe_config()))
    with exact_experts(), on_fullshard(backend):
        sharded = Sharded(qwen_moe_config(), spmd_backend=backend, **degrees)
        weight, rest = experts_of(sharded), sharded.model.layers["1"].attention.wo.weight
        assert weight.device_mesh.mesh_dim_names[-2:] == ("efsdp", "ep")
        assert weight.device_mesh.ndim == axes
        assert "ep" not in rest.device_mesh.mesh_dim_names
        assert weight.to_local().shape[0] == 4 // 2 // weight.device_mesh["efsdp"].size()
        assert_same(sharded.losses(), expected, RTOL)


@pytest.mark.parametrize("degrees", [EP, {"data_parallel_shard_degree": 4}], ids=["ep", "no_ep"])
@on_ranks(4)
def test_few_experts(rank: Rank, degrees: dict[str, int]):
    """Fewer experts than ranks are sharded on dim 1, so that no rank's part is padding."""
    with exact_experts():
        expected = losses(build(qwen_moe_config(experts=2)))
    with exact_experts(), on_fullshard():
        sharded = Sharded(qwen_moe_config(experts=2), **degrees)
        assert experts_of(sharded).placements[0] == Shard(1)
        assert_same(sharded.losses(), expected, RTOL)


@on_ranks(4)
def test_deepseek(rank: Rank):
    """DeepSeek V3: latent attention, shared experts beside routed ones, a dense first layer."""
    with exact_experts():
        expected = losses(build(deepseek_config()))
    with exact_experts(), on_fullshard():
        assert_same(Sharded(deepseek_config(), **EP).losses(), expected, RTOL)


@on_ranks(4)
def test_experts_in_bf16(rank: Rank):
    """As torchtitan has it: what differs is how sums round."""
    expected = losses(build(qwen_moe_config()))
    with on_fullshard():
        assert_same(Sharded(qwen_moe_config(), **EP).losses(), expected, 3e-3)


@on_ranks(4)
def test_mesh_info(rank: Rank):
    """What torchtitan builds with _get_mesh_info has the fields that it reads."""
    with on_fullshard():
        from torch.distributed.fsdp import DataParallelMeshDims
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

        dims = Sharded(qwen_moe_config(), **HSDP_EP).dims
        info = _get_mesh_info(dims.get_mesh(["dp_replicate", "efsdp"]), None)
        assert isinstance(info, FSDPMeshInfo)
        assert isinstance(info, fullshard.HSDPMeshInfo)
        assert (info.shard_mesh_dim, info.replicate_mesh_dim) == (1, 0)
        result = ShardPlacementResult(placement=Shard(0), mesh_info=info)
        assert result.mesh_info is info
        whole = rank.make_mesh(2, 2, names=("dp_replicate", "efsdp"))
        named = _get_mesh_info(whole, DataParallelMeshDims(shard="efsdp", replicate="dp_replicate"))
        assert isinstance(named, fullshard.HSDPMeshInfo)
        assert (named.dp_mesh_dims.shard, named.spmd_mesh) == ("efsdp", whole)
