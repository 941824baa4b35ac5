"""GANs with gradient penalties: a Wasserstein GAN (WGAN-GP), and one that is regularized on real data alone (R1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn

from ranks import Rank, on_ranks

LATENT, FEATURES, BATCH = 3, 6, 4


class Residual(nn.Module):
    """A residual pair of linear layers. The smooth activation has a second derivative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class Tower(nn.Module):
    """Vectors to vectors, through two residual blocks."""

    def __init__(self, inputs: int, outputs: int, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.blocks = nn.Sequential(Residual(width), Residual(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def networks(run: Run) -> tuple[Any, Any, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Generator and critic, and their optimizers."""
    generator = run.shard(built(Tower, LATENT, FEATURES), Residual)
    critic = run.shard(built(Tower, FEATURES, 1, seed=5), Residual)
    adam = [torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.0, 0.9)) for m in (generator, critic)]
    return generator, critic, *adam


def slope(critic: Any, x: torch.Tensor) -> torch.Tensor:
    """Norms of the critic's gradients by its inputs, as part of the graph."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return gradient.norm(dim=1)


def wasserstein(run: Run) -> dict[str, nn.Module]:
    """Two steps of the critic, with its penalty, for each of the generator's."""
    generator, critic, generator_adam, critic_adam = networks(run)
    for step in range(3):
        for index in (2 * step, 2 * step + 1):
            real, latent = run.data(index, BATCH, FEATURES), run.data(100 + index, BATCH, LATENT)
            with torch.no_grad():
                fake = generator(latent)
            mix = torch.rand(BATCH, 1, generator=run.generator(200 + index))
            penalty = (slope(critic, mix * real + (1 - mix) * fake) - 1).square().mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            loss.backward()
            run.note("loss", loss)
            run.note("penalty", penalty)
            run.step(critic, critic_adam)
        critic.requires_grad_(False)
        loss = -critic(generator(run.data(300 + step, BATCH, LATENT))).mean()
        loss.backward()
        critic.requires_grad_(True)
        run.note("loss of the generator", loss)
        run.step(generator, generator_adam)
    return {"generator": generator, "critic": critic}


def wasserstein_at_once(run: Run) -> dict[str, nn.Module]:
    """As many write it: real, generated and mixed rows in one call of the critic, and the penalty of a slice."""
    generator, critic, _, critic_adam = networks(run)
    for step in range(3):
        real, latent = run.data(step, BATCH, FEATURES), run.data(100 + step, BATCH, LATENT)
        fake = generator(latent).detach()
        mix = torch.rand(BATCH, 1, generator=run.generator(200 + step))
        mixed = (mix * real + (1 - mix) * fake).requires_grad_()
        scores = critic(torch.cat([real, fake, mixed]))
        (gradient,) = torch.autograd.grad(scores[2 * BATCH :].sum(), mixed, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        loss = scores[BATCH : 2 * BATCH].mean() - scores[:BATCH].mean() + 10 * penalty
        loss.backward()
        run.note("loss", loss)
        run.step(critic, critic_adam)
    return {"critic": critic}


def lazily_regularized(run: Run) -> dict[str, nn.Module]:
    """StyleGAN2's: every other step of the discriminator has no loss but the penalty (R1)."""
    generator, critic, generator_adam, _ = networks(run)
    # A parameter that the penalty does not depend on has no gradient: None, or zero. To this optimizer it is the same.
    critic_sgd = torch.optim.SGD(critic.parameters(), lr=1e-2)
    for step in range(4):
        real, latent = run.data(step, BATCH, FEATURES), run.data(100 + step, BATCH, LATENT)
        if step % 2:
            loss = 5 * slope(critic, real).square().mean()
        else:
            softplus = nn.functional.softplus
            loss = softplus(critic(generator(latent).detach())).mean() + softplus(-critic(real)).mean()
        loss.backward()
        run.note("loss", loss)
        run.step(critic, critic_sgd)
        loss = nn.functional.softplus(-critic(generator(latent))).mean()
        loss.backward()
        run.note("loss of the generator", loss)
        run.step(generator, generator_adam)
        critic_sgd.zero_grad()
    return {"generator": generator, "critic": critic}


PROGRAMS = {program.__name__: program for program in (wasserstein, wasserstein_at_once, lazily_regularized)}


@pytest.mark.parametrize("program", PROGRAMS)
@front_ends
@on_ranks(2)
def test_with_the_settings_for_gradients_of_gradients(rank: Rank, program: str, front_end: str) -> None:
    """Parameters that stay unsharded through backward, as docs/differences.md prescribes: the unsharded result."""
    assert_runs_alike(rank, front_end, PROGRAMS[program], keep=True)


@pytest.mark.parametrize("program", PROGRAMS)
@front_ends
@on_ranks(2)
def test_with_default_settings(rank: Rank, program: str, front_end: str) -> None:
    """The unsharded result: what was freed is unsharded again for the graph of gradients."""
    assert_runs_alike(rank, front_end, PROGRAMS[program])
