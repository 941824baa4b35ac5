"""Train a small transformer with Lightning's Trainer and ModelParallelStrategy, with fully_shard and averaged weights.

Start it on fullshard, on two processes:

    torchrun --nproc-per-node 2 -m fullshard.dropin examples/lightning_trainer.py
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 8


class Counting(torch.utils.data.Dataset):
    """Rows of tokens that count up from different starts."""

    def __len__(self) -> int:
        return 20 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        """One batch."""
        return (index * 7 + torch.arange(LENGTH)) % VOCABULARY


class Model(L.LightningModule):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def configure_model(self) -> None:
        """Shard every layer, then the rest. Lightning calls this more than once."""
        if isinstance(self, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        # The average of the weights copies sharded parameters, also after a validation.
        fully_shard(self, mesh=mesh, reshard_after_forward=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens at all positions."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next token."""
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        """One batch."""
        loss = self.loss(tokens)
        mean = self.trainer.strategy.reduce(loss.detach())
        if self.global_rank == 0:
            print(f"step {index}: loss {mean:.4f}")
        return loss

    def validation_step(self, tokens: torch.Tensor, index: int) -> None:
        """One batch, with the averaged weights."""
        self.log("validation", self.loss(tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer of the sharded parameters."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train, and validate the averaged weights."""
    trainer = L.Trainer(
        accelerator="auto",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[EMAWeightAveraging(decay=0.9)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    data = torch.utils.data.DataLoader(Counting(), batch_size=BATCH)
    trainer.fit(model, data, data)
    if trainer.is_global_zero:
        print(f"validation of the averaged weights: {trainer.callback_metrics['validation']:.4f}")


if __name__ == "__main__":
    main()
