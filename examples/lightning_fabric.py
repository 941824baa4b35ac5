"""Train a small transformer with Lightning Fabric and FSDPStrategy, save a sharded checkpoint, and resume from it.

Start it on fullshard, on two processes:

    torchrun --nproc-per-node 2 -m fullshard.dropin examples/lightning_fabric.py

or have Lightning start the second process itself:

    python -m fullshard.dropin examples/lightning_fabric.py
"""

import tempfile

import lightning as L
import torch
from lightning.fabric.strategies import FSDPStrategy
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 8


class FSDPAnywhere(FSDPStrategy):
    """Lightning accepts FSDPStrategy itself only with a GPU. It accepts a subclass on CPUs too."""


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens at all positions."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def make(fabric: L.Fabric):
    """Return a model and an optimizer, set up by Fabric."""
    torch.manual_seed(0)
    model = Model()
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))


def train(fabric: L.Fabric, model, optimizer, steps: range) -> None:
    """Train, every rank on its own data, and print the mean of the losses."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        tokens = ((start + torch.arange(LENGTH)) % VOCABULARY).to(fabric.device)  # count up from a random token
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach())
        fabric.print(f"step {step}: loss {mean:.4f}")


def main() -> None:
    """Train, save, load into a new model, and continue."""
    strategy = FSDPAnywhere(auto_wrap_policy={nn.TransformerEncoderLayer}, state_dict_type="sharded")
    fabric = L.Fabric(accelerator="auto", devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer = make(fabric)
    print(f"rank {fabric.global_rank} trains with {type(model._forward_module).__module__}")
    train(fabric, model, optimizer, range(10))

    folder = fabric.broadcast(tempfile.mkdtemp())
    fabric.save(folder, {"model": model, "optimizer": optimizer, "step": 10})
    model, optimizer = make(fabric)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder, state)
    train(fabric, model, optimizer, range(state["step"], 15))


if __name__ == "__main__":
    main()
