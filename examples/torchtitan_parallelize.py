"""A Llama 3 of torchtitan, parallelized by torchtitan's own function, on CPU ranks.

torchrun --nproc-per-node 2 -m fullshard.dropin examples/torchtitan_parallelize.py
"""

import dataclasses

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

LENGTH, BATCH, STEPS = 64, 4, 5  # length and batch size are per rank

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torchtitan.distributed.parallel_dims.device_type = "cpu"  # without an accelerator, torchtitan assumes "cuda"

config = llama3_configs["debugmodel"](attn_backend="flex")
for layer in config.layers:  # flex attention requires a compiler
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
    layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=LENGTH)

with torch.device("meta"):
    model = config.build()
parallelism = ParallelismConfig(spmd_backend="partial_dtensor", data_parallel_shard_degree=ranks)
set_spmd_backend(parallelism.spmd_backend)
model = parallelize_llama(
    model,
    parallel_dims=ParallelDims.from_config(parallelism, ranks),
    training=TrainingConfig(mixed_precision_param="bfloat16", seq_len=LENGTH),
    parallelism=parallelism,
    compile_config=CompileConfig(),
    ac_config=None,
    dump_folder="",
)
model.to_empty(device="cpu")
torch.manual_seed(rank)
with torch.no_grad():
    model.init_states(buffer_device=torch.device("cpu"))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.randint(0, config.vocab_size, (BATCH, LENGTH + 1))
for step in range(STEPS):
    loss = cross_entropy_loss(model(text[:, :-1]), text[:, 1:]) / (ranks * BATCH * LENGTH)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach()
    dist.all_reduce(whole)
    if rank == 0:
        print(f"step {step}: loss {whole:.4f}, gradient norm {norm.item():.4f}", flush=True)
if rank == 0:
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"{type(model).__name__}: {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters here")
dist.destroy_process_group()
