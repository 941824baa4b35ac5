"""A diffusion model (DDPM): a small U-Net with time embeddings, trained with an average of its weights (EMA)."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from ranks import Rank, on_ranks

CHANNELS, SIZE, BATCH, TIMES = 2, 8, 3, 10
DECAY = 0.8


def time_embedding(times: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of (batch,) time steps: (batch, width)."""
    rates = torch.exp(-math.log(100.0) * torch.arange(width // 2) / (width // 2))
    angles = times[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Residual(nn.Module):
    """Two convolutions behind norms, shifted by the embedding of the time."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(1, inputs), nn.GroupNorm(2, outputs)])
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.of_time = nn.Linear(width, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(nn.functional.silu(self.norms[0](x))) + self.of_time(time)[:, :, None, None]
        return self.skip(x) + self.second(nn.functional.silu(self.norms[1](y)))


class Attention(nn.Module):
    """Every pixel looks at all others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(1, channels), nn.Conv1d(channels, 3 * channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x).flatten(2)).mT.chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).mT
        return x + self.out(mixed).reshape(x.shape)


class UNet(nn.Module):
    """Noisy images, their times, and a first guess of the images: the noise that is in them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(2 * CHANNELS, 4, 3, padding=1)
        self.down = nn.ModuleList([Residual(4, 4, width), Residual(4, 6, width)])
        self.middle = nn.ModuleList([Residual(6, 6, width), Attention(6)])
        self.up = nn.ModuleList([Residual(12, 4, width), Residual(8, 4, width)])
        self.norm, self.last = nn.GroupNorm(2, 4), nn.Conv2d(4, CHANNELS, 3, padding=1)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(0.02, 0.4, TIMES), 0))

    def forward(self, x: torch.Tensor, times: torch.Tensor, guess: torch.Tensor | None = None) -> torch.Tensor:
        time = self.time(time_embedding(times, 8))
        x = self.first(torch.cat([x, torch.zeros_like(x) if guess is None else guess], dim=1))
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle[1](self.middle[0](x, time))
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return self.last(nn.functional.silu(self.norm(x)))


def noised(run: Run, index: int, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noisy images of this rank, their times, and the noise."""
    generator = run.generator(index)
    image, noise = (torch.randn(BATCH, CHANNELS, SIZE, SIZE, generator=generator) for _ in range(2))
    times = torch.randint(TIMES, (BATCH,), generator=generator)
    share = kept[times][:, None, None, None]
    return share.sqrt() * image.tanh() + (1 - share).sqrt() * noise, times, noise


def sampled(run: Run, model: Any, kept: torch.Tensor) -> torch.Tensor:
    """Images that the model makes, guess by guess (DDIM, without new noise)."""
    x, guess = run.data(999, 2, CHANNELS, SIZE, SIZE), None
    with torch.no_grad():
        for time in reversed(range(TIMES)):
            noise = model(x, torch.full((2,), time), guess)
            guess = (x - (1 - kept[time]).sqrt() * noise) / kept[time].sqrt()
            before = kept[time - 1] if time else torch.tensor(1.0)
            x = before.sqrt() * guess + (1 - before).sqrt() * noise
    return x


def averaged_by_hand(run: Run) -> dict[str, nn.Module]:
    """Self-conditioning (a first guess without gradients, every other step) and an average that is a deep copy."""
    model = run.shard(built(UNet), Residual, Attention)
    average = copy.deepcopy(model).requires_grad_(False)
    kept = built(UNet).kept
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3, weight_decay=0.0)
    for step in range(4):
        x, times, noise = noised(run, step, kept)
        guess = None
        if step % 2:
            with torch.no_grad():
                guess = model(x, times)
        loss = (model(x, times, guess) - noise).square().mean()
        loss.backward()
        run.note("loss", loss)
        run.step(model, adam, max_norm=0.5)
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1 - DECAY)
    run.note("sample", sampled(run, average.eval(), kept))
    run.note("sample of the model", sampled(run, model.eval(), kept))
    return {"model": model, "average": average}


def averaged_by_torch(run: Run) -> dict[str, nn.Module]:
    """``torch.optim.swa_utils.AveragedModel`` around the model; two microbatches a step."""
    model = run.shard(built(UNet), Residual, Attention)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))
    kept = built(UNet).kept
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for index in (2 * step, 2 * step + 1):
            x, times, noise = noised(run, index, kept)
            with run.no_sync(model) if index % 2 == 0 else contextlib.nullcontext():
                loss = (model(x, times) - noise).square().mean()
                (loss / 2).backward()
            run.note("loss", loss)
        run.step(model, sgd, max_norm=0.5)
        average.update_parameters(model)
    run.note("sample", sampled(run, average, kept))
    return {"model": model, "average": average.module}


@pytest.mark.parametrize("program", [averaged_by_hand, averaged_by_torch])
@front_ends
@on_ranks(2)
def test_diffusion(rank: Rank, program: Any, front_end: str) -> None:
    """Losses, norms, weights, their average, and what either of them draws, are those of the unsharded run."""
    assert_runs_alike(rank, front_end, program)
