"""CPU memory of offloaded optimizer state."""

from __future__ import annotations

import torch
from on_device import on_device
from torch import nn

from fullshard import fully_shard
from fullshard.engine.parameters.sharded import value_of
from fullshard.optim import offload
from ranks import Rank


@on_device(1)
def test_steps_use_the_same_memory(rank: Rank) -> None:
    """Pinned memory is slow to allocate, so state returns to where it was."""
    model = fully_shard(nn.Linear(8, 8), mesh=rank.mesh).to(rank.device)
    optimizer = offload(torch.optim.AdamW(model.parameters()))
    places = []
    for _ in range(3):
        model(torch.ones(2, 8, device=rank.device)).sum().backward()
        optimizer.step()
        state = [value_of(entry) for own in optimizer.state.values() for entry in own.values() if entry.dim()]
        places.append([value.data_ptr() for value in state])
    assert places[0] == places[1] == places[2] and len(set(places[0])) == 4
