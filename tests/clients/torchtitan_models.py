"""torchtitan's decoders in sizes for a CPU, and its training step: what the tests of torchtitan share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.full_dtensor import parallelize_inputs
from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_backend, get_spmd_context, set_spmd_backend
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

import fullshard.dropin

DIM, VOCABULARY, LENGTH, BATCH, STEPS, MAX_NORM = 32, 64, 16, 4, 3, 0.5

# torchtitan takes CUDA for granted where there is no accelerator.
torchtitan.distributed.parallel_dims.device_type = "cpu"


def llama_config(layers: int = 2, tied: bool = False) -> Any:
    """A Llama 3 with attention that a CPU has."""
    embedding = llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT
    blocks = llama3._build_llama3_layers(
        n_layers=layers,
        dim=DIM,
        n_heads=4,
        hidden_dim=96,
        rope=ComplexRoPE.Config(dim=DIM // 4, max_seq_len=LENGTH, theta=10000, scaling="none"),
        attn_backend="flex",
    )
    return _decoder_config(llama3.Llama3Model, blocks, llama3, embedding, enable_weight_tying=tied)


def qwen_moe_config(experts: int = 4) -> Any:
    """A Qwen 3 with a mixture of experts in every layer."""
    blocks = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=DIM,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=32,
        num_experts=experts,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=LENGTH, theta=10000),
    )
    return _decoder_config(qwen3.Qwen3Model, blocks, qwen3, qwen3._EMBEDDING_INIT)


def deepseek_config() -> Any:
    """A DeepSeek V3: latent attention, one dense layer and one with shared and routed experts."""
    blocks = deepseek_v3._build_dsv3_layers(
        n_layers=2,
        n_dense_layers=1,
        dim=DIM,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        mscale=1.0,
        dense_hidden_dim=64,
        moe_hidden_dim=32,
        num_experts=4,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="softmax",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=LENGTH, theta=10000, scaling="none"),
    )
    return _decoder_config(deepseek_v3.DeepSeekV3Model, blocks, deepseek_v3, deepseek_v3._EMBEDDING_INIT)


def _decoder_config(model: Any, blocks: list[Any], family: Any, embedding: Any, **further: Any) -> Any:
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    return model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=family.Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=embedding),
        norm=family.RMSNorm.Config(normalized_shape=DIM, param_init=family._NORM_INIT),
        lm_head=family.Linear.Config(
            in_features=DIM, out_features=VOCABULARY, param_init=llama3._output_linear_init(DIM)
        ),
        layers=blocks,
        **further,
    )


def build(config: Any, parallelism: ParallelismConfig | None = None) -> Any:
    """The same model on every rank, with torchtitan's own initial values; not sharded yet."""
    parallelism = parallelism or ParallelismConfig()
    set_sharding, takes_ep = SHARDINGS[type(config).__qualname__.partition(".")[0]]
    set_sharding(
        config,
        enable_sp=parallelism.enable_sequence_parallel,
        **({"enable_ep": parallelism.expert_parallel_degree > 1} if takes_ep else {}),
    )
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


# What the configurations' update_from_config() calls, which itself needs torchtitan's whole trainer.
SHARDINGS: dict[str, tuple[Callable[..., None], bool]] = {
    "Llama3Model": (set_llama3_sharding_config, False),
    "Qwen3Model": (set_qwen3_sharding_config, True),
    "DeepSeekV3Model": (set_deepseek_v3_sharding_config, True),
}
PARALLELIZE: dict[str, Callable[..., Any]] = {
    "Llama3Model": llama3.parallelize_llama,
    "Qwen3Model": qwen3.parallelize_qwen3,
    "DeepSeekV3Model": deepseek_v3.parallelize_deepseekv3,
}


@contextlib.contextmanager
def on_fullshard(backend: str = "partial_dtensor") -> Iterator[None]:
    """fullshard in the place of torch's FSDP, and torchtitan told how it distributes tensors."""
    before = get_spmd_backend()
    set_spmd_backend(backend)
    try:
        with fullshard.dropin.install(quiet=True):
            yield
    finally:
        set_spmd_backend(before)


@contextlib.contextmanager
def exact_experts() -> Iterator[None]:
    """Experts compute in fp32. torchtitan's cast to bf16, where sums round differently for every way to cut tokens."""
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        yield


@contextlib.contextmanager
def on_torch(backend: str = "partial_dtensor") -> Iterator[None]:
    """torch's own FSDP, to compare with."""
    before = get_spmd_backend()
    set_spmd_backend(backend)
    try:
        yield
    finally:
        set_spmd_backend(before)


class Sharded:
    """A model of torchtitan that its own function has parallelized, and how it is trained."""

    model: Any
    dims: ParallelDims
    parallelism: ParallelismConfig

    def __init__(self, config: Any, training: TrainingConfig | None = None, ac: Any = None, **degrees: Any) -> None:
        self.parallelism = ParallelismConfig(**{"spmd_backend": "partial_dtensor", **degrees})
        self.dims = ParallelDims.from_config(self.parallelism, dist.get_world_size())
        model = build(config, self.parallelism)
        self.model = PARALLELIZE[type(model).__name__](
            model,
            parallel_dims=self.dims,
            training=training or TrainingConfig(mixed_precision_param="float32", seq_len=LENGTH),
            parallelism=self.parallelism,
            compile_config=CompileConfig(),
            ac_config=ac,
            dump_folder="",
        )

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a batch."""
        ways = self.dims.dp_replicate * self.dims.dp_shard
        return whole.chunk(ways)[dist.get_rank() // self.dims.tp]

    def losses(self, steps: int = STEPS, **options: Any) -> list[tuple[float, float]]:
        """Like :func:`losses`, of the whole batch."""
        own = losses(self.model, self, steps, **options)
        if get_spmd_backend() == "full_dtensor":
            return own
        sums = torch.tensor([loss for loss, _ in own])
        dist.all_reduce(sums)
        return [(loss.item() / self.dims.tp, norm) for loss, (_, norm) in zip(sums, own, strict=True)]


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a step, int64 (BATCH, LENGTH)."""
    drawn = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def losses(
    model: nn.Module, sharded: Sharded | None = None, steps: int = STEPS, optimizer: Any = None, first: int = 0
) -> list[tuple[float, float]]:
    """Train as torchtitan's trainer does: sums of losses over the count of all tokens, its clipping, AdamW.

    Returns:
        Loss and norm of the gradients of every step.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    context = get_spmd_context(parallel_dims=sharded.dims) if sharded else contextlib.nullcontext
    found = []
    for step in range(first, first + steps):
        inputs, labels = tokens(step)
        if sharded:
            inputs, labels = sharded.part(inputs), sharded.part(labels)
            if get_spmd_backend() == "full_dtensor":
                inputs, labels, _ = parallelize_inputs(sharded.dims, inputs, labels, {})
        with context():
            loss = cross_entropy_loss(model(inputs), labels) / (BATCH * LENGTH)
            loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM, ep_enabled=sharded.dims.ep_enabled if sharded else False)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        found.append(((value.full_tensor() if isinstance(value, DTensor) else value).item(), norm.item()))
    return found


def assert_same(found: list[tuple[float, float]], expected: list[tuple[float, float]], rtol: float) -> None:
    """Require the same losses and gradient norms."""
    assert len(found) == len(expected)
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0
    )
