"""Float8 layers of torchao, sharded by FSDP2, with an 8-bit optimizer. It does not mention fullshard.

torchrun --nproc-per-node 2 -m fullshard.dropin examples/torchao_low_bit.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.optim import AdamW8bit

WIDTH, SAVED = 256, os.environ.get("SAVED", "torchao-low-bit")


def build(device):
    """Return the sharded model and its optimizer."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*blocks).to(device)
    emulate = device.type == "cpu" or torch.cuda.get_device_capability() < (8, 9)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model, AdamW8bit(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    """Print the loss of every step."""
    for step in steps:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(32, WIDTH, generator=generator).to(next(model.parameters()).device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        loss = loss.detach()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() / dist.get_world_size():.4f}", flush=True)


def main():
    """Train, save, and continue twice: with the model in memory, and with the loaded checkpoint."""
    dist.init_process_group()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.compiler.set_stance("force_eager")  # AdamW8bit compiles its step, which takes a while on a CPU
    model, optimizer = build(device)
    train(model, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=SAVED)
    train(model, optimizer, range(3, 6))

    model, optimizer = build(device)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=SAVED)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    precompute_float8_dynamic_scale_for_fsdp(model)
    if dist.get_rank() == 0:
        print("again from step 3", flush=True)
    train(model, optimizer, range(3, 6))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
