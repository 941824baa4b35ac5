"""A small GPT, trained with accelerate and FSDP2: accumulation, clipping, saving, resuming.

torchrun --nproc-per-node 2 examples/accelerate_gpt.py                        # on torch's FSDP
torchrun --nproc-per-node 2 -m fullshard.dropin examples/accelerate_gpt.py    # on fullshard
"""

import os
import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, SEQUENCE = 64, 32, 16
STEPS, ACCUMULATION, BATCH = 4, 2, 8  # steps of an epoch; a step is ACCUMULATION batches on every rank


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states, (batch, sequence, WIDTH)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens to logits."""

    _no_split_modules = ["Block"]  # accelerate makes a unit of each of these

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, sequence) to logits (batch, sequence, VOCABULARY)."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def data() -> TensorDataset:
    """Arithmetic progressions, for two ranks."""
    generator = torch.Generator().manual_seed(0)
    first, stride = torch.randint(1, VOCABULARY, (2, 2 * STEPS * ACCUMULATION * BATCH, 1), generator=generator)
    return TensorDataset((first + stride % 5 * torch.arange(SEQUENCE + 1)) % VOCABULARY)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> None:
    """Train on the batches, and print the mean loss over ranks of every step."""
    losses = []
    for (tokens,) in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
                accelerator.print(f"loss {mean:.5f}")
                losses = []
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Train an epoch, save, train another epoch; then load the checkpoint and repeat that epoch."""
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:  # accelerate runs FSDP only with an accelerator: make it assume one
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = None  # set by `accelerate launch` in the environment; otherwise:
    if "ACCELERATE_USE_FSDP" not in os.environ:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=BATCH))
    accelerator.print(f"{type(model).__name__} of {fully_shard_of(model)} on {accelerator.num_processes} processes")

    (folder,) = broadcast_object_list([tempfile.mkdtemp()])
    train(accelerator, model, optimizer, batches)
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, batches)
    accelerator.load_state(folder)
    accelerator.print("resumed")
    train(accelerator, model, optimizer, batches)

    accelerator.save_model(model, folder)
    accelerator.print(f"saved {', '.join(sorted(os.listdir(folder)))}")
    accelerator.end_training()


def fully_shard_of(model: nn.Module) -> str:
    """Return the package whose FSDP shards the model: torch or fullshard."""
    return next(base.__module__.partition(".")[0] for base in type(model).__mro__ if base.__name__ == "FSDPModule")


if __name__ == "__main__":
    main()
