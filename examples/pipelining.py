"""Four stages on two pipeline ranks, each sharded over two data-parallel ranks, with a zero-bubble schedule.

torchrun --nproc-per-node 4 -m fullshard.dropin examples/pipelining.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

DIM, STAGES, MICROBATCHES = 32, 4, 4


class Block(nn.Module):
    """A residual pair of linear layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        """Same shape as ``x``."""
        return x + self.down(torch.relu(self.up(x)))


def loss_of(output, target):
    """Return the loss of one microbatch."""
    return (output - target).square().mean()


def main():
    """Train five steps."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    parts = [nn.Sequential(Block(), Block()) for _ in range(STAGES)]
    stages, optimizers = [], []
    for number in range(place, STAGES, 2):
        for block in parts[number]:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        part = fully_shard(parts[number], mesh=mesh["dp"], reshard_after_forward=False)
        stages.append(PipelineStage(part, number, STAGES, torch.device("cpu"), group=mesh["pp"].get_group()))
        optimizers.append(torch.optim.Adam(part.parameters(), lr=0.001))
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    for step in range(5):
        x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(10 * step + replica))
        if place == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=x.flip(1), losses=losses)
            loss = torch.stack(losses).mean().detach()
            dist.all_reduce(loss, group=mesh["dp"].get_group())
            if replica == 0:
                print(f"step {step} loss {loss.item() / 2:.6f}", flush=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
