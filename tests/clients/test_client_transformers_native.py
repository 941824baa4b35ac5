"""transformers' own way to FSDP2, ``from_pretrained(distributed_config=...)``, on fullshard."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from trainer_runs import (
    BATCH,
    RATE,
    arguments,
    assert_losses,
    full_weights,
    logged,
    prepared,
    stacked,
    standing_in,
    texts,
    tiny,
    unsharded,
)
from transformers import AutoModelForCausalLM, DistributedConfig, Trainer
from transformers.distributed.fsdp import is_fsdp_managed_module

import fullshard
from compare import assert_equal
from fullshard.engine.ownership import unit_of
from ranks import Rank, on_ranks


def loaded(rank: Rank, folder: Path, kind: str, **config: Any) -> Any:
    """A tiny model that transformers has read from a file and sharded."""
    if rank.rank == 0:
        tiny(kind).save_pretrained(folder / "start")
    dist.barrier()
    sizes = {"fsdp_size": rank.world_size} | config
    return AutoModelForCausalLM.from_pretrained(folder / "start", distributed_config=DistributedConfig(**sizes))


def by_hand(model: nn.Module, data: Any, rank: Rank, steps: int) -> list[float]:
    """A plain loop: each rank has its part of every batch.

    Returns:
        Losses, averaged over ranks.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses, each = [], BATCH * rank.world_size
    model.train()
    for step in range(steps):
        own = data[step * each :][:each][rank.rank * BATCH :][:BATCH]
        loss = model(**stacked(own)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float() / rank.world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@on_ranks(2)
def test_plain_loop_then_saved_and_read(rank: Rank, kind: str, tmp_path: Path) -> None:
    """Layers are units that free their weights; norm and head, or the tied embeddings, are one that keeps them."""
    data = texts(16)
    with standing_in():
        model = loaded(rank, tmp_path, kind)
        assert isinstance(model, fullshard.FSDPModule) and is_fsdp_managed_module(model)
        tail = model.lm_head if kind == "llama" else model.model.embed_tokens
        assert unit_of(model.model.norm) is unit_of(tail)
        assert unit_of(model.model.norm).settings.reshard_after_forward is False
        assert unit_of(model.model.layers[0]).settings.reshard_after_forward is True
        assert_losses(by_hand(model, data, rank, 4), unsharded(tiny(kind), data, 4)[0])
        weights = full_weights(model)
        model.save_pretrained(tmp_path / "whole")
        if kind == "llama":  # transformers hands tied weights to safetensors twice, which it refuses
            model.save_pretrained(tmp_path / "parts", distributed_checkpoint=True)
        dist.barrier()
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        assert type(plain) is type(tiny(kind))
        assert_equal({name: p.detach() for name, p in plain.named_parameters()}, weights, "weights")
        for where in ("whole", "parts") if kind == "llama" else ("whole",):
            config = DistributedConfig(fsdp_size=2)
            again = AutoModelForCausalLM.from_pretrained(tmp_path / where, distributed_config=config)
            assert_equal(full_weights(again), weights, where)


@pytest.mark.parametrize(
    "options", [{"fsdp_cpu_offload": True}, {"fsdp_mixed_precision": True}], ids=["offload", "bf16"]
)
@on_ranks(2)
def test_options(rank: Rank, options: dict[str, Any], tmp_path: Path) -> None:
    """Offloading to the CPU, and bfloat16 with float32 gradients."""
    data = texts(16)
    with standing_in():
        losses = by_hand(loaded(rank, tmp_path, "llama", **options), data, rank, 4)
        assert_losses(losses, unsharded(tiny(), data, 4)[0], 2e-6 if "fsdp_cpu_offload" in options else 1.5e-3)


@on_ranks(2)
def test_every_module_by_hand(rank: Rank, tmp_path: Path) -> None:
    """A plan of one's own: norm and head apart."""
    data = texts(16)
    plan = {"model.norm": "free_full_weight", "model.layers.*.mlp": "keep_full_weight"}
    with standing_in():
        model = loaded(rank, tmp_path, "llama", fsdp_plan=plan)
        assert unit_of(model.model.norm) is not unit_of(model.lm_head)
        assert unit_of(model.model.layers[0].mlp) is not unit_of(model.model.layers[0])
        assert_losses(by_hand(model, data, rank, 3), unsharded(tiny(), data, 3)[0])


@on_ranks(4)
def test_replicas(rank: Rank, tmp_path: Path) -> None:
    """Two replicas of two parts."""
    data = texts(32)
    with standing_in():
        model = loaded(rank, tmp_path, "llama", fsdp_size=2, dp_replicate_size=2)
        assert_losses(by_hand(model, data, rank, 3), unsharded(tiny(), data, 3, ranks=4)[0])


@on_ranks(2)
def test_trainer_of_a_sharded_model(rank: Rank, tmp_path: Path) -> None:
    """The Trainer takes such a model as it is: accumulation, and saving. It refuses to make checkpoints of one."""
    data = texts(32)
    with standing_in():
        given = arguments(tmp_path, 2, gradient_accumulation_steps=2)
        del given["fsdp"], given["fsdp_config"]
        trainer = Trainer(model=loaded(rank, tmp_path, "llama"), args=prepared(given), train_dataset=data)
        trainer.train()
        assert_losses(logged(trainer), unsharded(tiny(), data, 4, accumulate=2)[0])
        weights = full_weights(trainer.model)
        trainer.save_model(str(tmp_path / "saved"))
        dist.barrier()
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert_equal({name: p.detach() for name, p in plain.named_parameters()}, weights, "weights")
