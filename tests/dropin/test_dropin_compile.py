"""torch.compile of models that stand in for torch's: dynamo finds the marks that torch's FSDP leaves on modules."""

from __future__ import annotations

import pytest
import torch

from front_ends import COMPOSABLE, ORIGINAL, FrontEnd, assert_trains_alike, build, sharded_with_reference
from fullshard import dropin
from models import Stack
from ranks import Rank, on_ranks


@pytest.mark.parametrize(("front_end", "what"), [(COMPOSABLE, "model"), (ORIGINAL, "blocks")], ids=str)
@on_ranks(2)
def test_compiled_models_train(rank: Rank, front_end: FrontEnd, what: str) -> None:
    """Blocks compiled before sharding, or the sharded model compiled, train as the plain model."""
    torch.compiler.reset()
    with dropin.install(quiet=True):
        plain = build(Stack, 2)
        if what == "blocks":
            for block in plain.blocks:
                block.compile(backend="aot_eager")
        model, reference = sharded_with_reference(front_end, rank, plain)
        if what == "model":
            model.compile(backend="aot_eager")
        assert_trains_alike(model, reference, rank)
    torch.compiler.reset()
