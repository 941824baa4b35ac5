"""docs/checkpoints/weights.md: a Llama on the meta device, sharded, loaded, trained, exported, and read again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fullshard
from compare import assert_close
from ranks import Rank, on_ranks

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64}


def step(model: torch.nn.Module) -> torch.Tensor:
    """One step of SGD on fixed tokens; the loss before it."""
    tokens = torch.arange(40).view(2, 20) % 99
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return loss.detach()


@on_ranks(2)
def test_llama_from_meta_to_from_pretrained(rank: Rank) -> None:
    """Computes as one that transformers has loaded, frequencies of its rotary embedding included."""
    places: list[str | None] = [None]
    if rank.rank == 0:
        torch.manual_seed(3)
        places = [tempfile.mkdtemp()]
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(places[0])
    dist.broadcast_object_list(places)
    folder = Path(str(places[0]))
    reference = LlamaForCausalLM.from_pretrained(folder)

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    for layer in model.model.layers:
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    fullshard.load_safetensors(model, folder)
    for _ in range(3):
        assert_close(step(model), step(reference), "loss", rtol=1e-5, atol=1e-6)
    fullshard.export_safetensors(model, folder / "trained")
    if rank.rank == 0:
        LlamaConfig.from_pretrained(folder).save_pretrained(folder / "trained")
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(folder / "trained")
    for name, weight in reference.named_parameters():
        assert_close(again.get_parameter(name), weight, name, rtol=1e-4, atol=1e-6)
