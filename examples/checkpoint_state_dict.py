"""Save a run with fully_shard by torch.distributed.checkpoint, and resume it with FullyShardedDataParallel.

torchrun --nproc-per-node 2 -m fullshard.dropin examples/checkpoint_state_dict.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def a_model(seed):
    """Return the unsharded model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def train(model, optimizer, steps):
    """Run these steps, and print the mean loss of the ranks."""
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if dist.get_rank() == 0:
            print(f"{type(model).__name__} step {step} loss {loss.item() / dist.get_world_size():.6f}", flush=True)


def main():
    """Train, save, continue; load into a wrapped model, and repeat the last steps."""
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)

    model = fully_shard(a_model(seed=0), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(3))
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder[0])
    train(model, optimizer, range(3, 5))

    model = FullyShardedDataParallel(a_model(seed=1), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    train(model, optimizer, range(3, 5))  # the same losses

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, _ = get_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        print({name: tuple(value.shape) for name, value in model_state.items()}, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
