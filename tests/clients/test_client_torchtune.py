"""torchtune's distributed functions on fullshard: sharding, state dicts, checkpoints of activations."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torchtune_names", reason="needs torchtune and torchao", exc_type=ImportError)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torchtune import training
from torchtune.models.llama3 import base_llama_tp_plan
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune_models import LENGTH, VOCABULARY, assert_same, full_model, losses, shard

import fullshard
import fullshard.dropin
from ranks import Rank, on_ranks

DEVICE = torch.device("cpu")


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_shard_model(rank: Rank, reshard: bool):
    """Every layer and the named modules become units; losses and norms of the whole model."""
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        model = shard(full_model(), ["tok_embeddings"], reshard_after_forward=reshard)
        units = [name for name, module in model.named_modules() if isinstance(module, fullshard.FSDPModule)]
        assert units == ["", "tok_embeddings", "layers.0", "layers.1"]
        kept = []
        weight_of = model.layers[0].mlp.w1
        weight_of.register_forward_hook(lambda module, *_: kept.append(module.weight))
        assert_same(losses(model), expected)
        model(torch.zeros(1, 2, dtype=torch.int64))
        assert (kept[-1].untyped_storage().nbytes() > 0) != reshard


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@on_ranks(2)
def test_hybrid(rank: Rank, shape: tuple[int, int]):
    """dp_mesh with an axis of replicas."""
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        model = shard(full_model(), dp_mesh=rank.make_mesh(*shape, names=("replicate", "shard")))
        assert next(model.parameters()).placements == (Replicate(), Shard(0))
        assert_same(losses(model), expected)


@on_ranks(2)
def test_tensor_parallel(rank: Rank):
    """prepare_mha_for_tp and torchtune's plan, then shard_model over the other axis: logits of the whole model."""
    reference = full_model()
    mesh = rank.make_mesh(1, 2, names=("dp", "tp"))
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    with fullshard.dropin.install(quiet=True):
        model = training.prepare_mha_for_tp(full_model(), mesh["tp"])
        parallelize_module(model, mesh["tp"], base_llama_tp_plan())
        shard(model, dp_mesh=mesh["dp"])
        assert model.layers[0].mlp.w1.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
        for _ in range(3):
            found, expected = model(tokens), reference(tokens)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            for logits, optimizer in zip((found, expected), optimizers, strict=True):
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(2)
def test_cpu_offload(rank: Rank):
    """cpu_offload=True on a machine that has nothing but a CPU."""
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        assert_same(losses(shard(full_model(), cpu_offload=True)), expected)


@on_ranks(2)
def test_no_condition_holds(rank: Rank):
    """torchtune's own error, if nothing is to be sharded."""
    with fullshard.dropin.install(quiet=True):
        with pytest.raises(ValueError, match="No layer modules were sharded"):
            training.shard_model(nn.Linear(4, 4), [training.get_shard_conditions], cpu_offload=False)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_meta_device(rank: Rank, offload: bool):
    """Built on the meta device, sharded, then given its values: load_from_full_model_state_dict; and back."""
    reference = full_model()
    expected = losses(full_model(), sharded=False)
    with fullshard.dropin.install(quiet=True):
        with torch.device("meta"):
            model = full_model()
        shard(model, cpu_offload=offload)
        with pytest.raises(RuntimeError, match="on meta device"):
            training.validate_no_params_on_meta_device(model)
        missing, unexpected = training.load_from_full_model_state_dict(
            model, dict(reference.state_dict()), DEVICE, strict=True, cpu_offload=offload
        )
        assert (missing, unexpected) == ([], [])
        with DEVICE:
            for module in model.modules():
                if hasattr(module, "rope_init"):
                    module.rope_init()
        training.validate_no_params_on_meta_device(model)
        gathered = training.gather_cpu_state_dict(model, rank.rank == 0, DEVICE)
        assert gathered.keys() == (reference.state_dict().keys() if rank.rank == 0 else set())
        for name, value in gathered.items():
            assert torch.equal(value, reference.state_dict()[name]), name
        assert_same(losses(model), expected)


@on_ranks(2)
def test_optimizer_state(rank: Rank):
    """The full state of the optimizer on rank 0; loaded into another model, it goes on bitwise."""
    with fullshard.dropin.install(quiet=True):
        model = shard(full_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses(model, 2, optimizer=optimizer)
        weights = training.gather_cpu_state_dict(model, True, DEVICE)
        state = training.get_full_optimizer_state_dict(model, optimizer, rank.rank == 0, DEVICE)
        assert bool(state) == (rank.rank == 0)
        reference = full_model()
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        losses(reference, 2, sharded=False, optimizer=plain)
        if rank.rank == 0:
            for name, parameter in reference.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(
                        state["state"][name][key], plain.state[parameter][key], rtol=1e-3, atol=1e-7, msg=name
                    )
        state = copy.deepcopy(_from_rank_0(state))  # its steps are the optimizer's own tensors
        expected = losses(model, 2, optimizer=optimizer, first=2)
        resumed = shard(full_model())
        training.load_from_full_model_state_dict(resumed, weights, DEVICE, strict=True)
        optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
        training.load_from_full_optimizer_state_dict(resumed, optimizer, state, DEVICE)
        first = next(iter(optimizer.state.values()))["exp_avg"]
        assert isinstance(first, DTensor)
        assert losses(resumed, 2, optimizer=optimizer, first=2) == expected


def _from_rank_0(value: object) -> object:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@on_ranks(2)
def test_activation_checkpointing(rank: Rank):
    """set_activation_checkpointing and the selective one: bitwise the losses without."""
    with fullshard.dropin.install(quiet=True):
        expected = losses(shard(full_model()))
        model = full_model()
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
        assert "_checkpoint_wrapped_module" in "".join(name for name, _ in model.named_modules())
        assert losses(shard(model)) == expected
        model = full_model()
        training.apply_selective_activation_checkpointing(model, "selective", 2)
        assert losses(shard(model)) == expected


@on_ranks(2)
def test_optimizer_in_backward(rank: Rank):
    """Optimizers that step in hooks of the parameters' gradients, one per parameter."""
    with fullshard.dropin.install(quiet=True):
        expected = shard(full_model())
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        model = shard(full_model())
        steps = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
        training.register_optim_in_bwd_hooks(model, steps)
        tokens = torch.arange(16).view(2, 8) + rank.rank
        for _ in range(2):
            expected(tokens).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(tokens).logsumexp(-1).sum().backward()
        for (name, one), two in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), two.full_tensor()), name
