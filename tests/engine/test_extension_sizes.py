"""Extensions of tensor subclasses whose inner tensors change their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_tensor import RoundedWeight, with_cast_weights

from compare import assert_equal
from fullshard import FullshardError, fully_shard
from models import Mlp, assert_at_rest, batch
from ranks import Rank, on_ranks


class Growing(RoundedWeight):
    """Sends as many columns as ``hint`` says."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        (low,), metadata = super().fsdp_pre_all_gather(mesh)
        return (low if self.hint is None else low[:, : self.hint],), metadata


@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_extension_whose_sizes_change(rank: Rank, when: str) -> None:
    """Inner tensors of other sizes than at the first gather are refused on every rank, and the right ones go on.

    Without the check they would be padded to the old sizes, and the layer compute with shifted rows.
    """
    torch.manual_seed(4)
    model = with_cast_weights(Mlp(8, 8, 8), Growing)
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=rank.mesh, reshard_after_forward=True)
    x = batch(rank.rank, 0, 4, 8)
    expected = model(x).detach()
    local = model.layers[1].weight._local_tensor
    words = (
        rf"layers\.1\.weight \(shape \(8, 8\).*Growing returned "
        rf"\[\({8 // rank.world_size}, 3\) torch\.bfloat16\].*gathers before "
        rf"\[\({8 // rank.world_size}, 8\) torch\.bfloat16\]"
    )
    loss = model(x).square().mean() if when == "backward" else None
    local.hint = 3
    with pytest.raises(FullshardError, match=words):
        loss.backward() if loss is not None else model(x)
    local.hint = None
    assert_equal(model(x).detach(), expected, "output")
    model(x).square().mean().backward()
    assert_at_rest(model)
