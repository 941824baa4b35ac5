"""torchtune's Llama 3 in a size for a CPU, plain, with LoRA and with QLoRA, and one way to train them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchtune_names  # noqa: F401
from torch import nn
from torchtune import training
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules.peft import get_adapter_params, set_trainable_params

VOCABULARY, LENGTH, BATCH = 64, 12, 4

# NF4 needs parts of whole blocks: 256 blocks of 64 values, on each rank.
PLAIN = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 256,
    "max_seq_len": LENGTH,
    "intermediate_dim": 256,
}
LORA = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}


def full_model() -> nn.Module:
    """All parameters are trained; the same values on every rank."""
    torch.manual_seed(0)
    return llama3(**PLAIN)


def lora_model(**further: Any) -> nn.Module:
    """Only adapters are trained, which do something already; the same values on every rank."""
    torch.manual_seed(0)
    model = lora_llama3(**PLAIN, **LORA, **further)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter, std=0.02)
    set_trainable_params(model, get_adapter_params(model))
    return model


def shard(model: nn.Module, names: list[str] | None = None, **options: Any) -> nn.Module:
    """As torchtune's recipes do."""
    conditions = [partial(training.get_shard_conditions, names_to_match=names)]
    training.shard_model(model, conditions, **{"cpu_offload": False, **options})
    return model


def batches(steps: int, first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels, int64 (BATCH, LENGTH)."""
    for step in range(first, first + steps):
        drawn = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        yield drawn[:, :-1], drawn[:, 1:]


def losses(model: nn.Module, steps: int = 3, sharded: bool = True, optimizer: Any = None, first: int = 0) -> list[Any]:
    """Train with the recipes' way of scaling and clipping; losses and gradient norms of the whole batch."""
    ways, place = (dist.get_world_size(), dist.get_rank()) if sharded else (1, 0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2)
    found = []
    for tokens, labels in batches(steps, first):
        tokens, labels = tokens.chunk(ways)[place], labels.chunk(ways)[place]
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        total, count = loss.detach().clone(), torch.tensor(labels.numel())
        if sharded:
            dist.all_reduce(total)
            dist.all_reduce(count)
        training.scale_grads(model, ways / count)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append((total.item() / count.item(), (norm.full_tensor() if sharded else norm).item()))
    return found


def assert_same(found: list[Any], expected: list[Any], rtol: float = 1e-5) -> None:
    """Require the same losses and gradient norms."""
    assert len(found) == len(expected)
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0
    )
