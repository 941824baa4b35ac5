"""A speech model: convolutions with weight norm, of both kinds that torch has, and recurrent layers, under CTC."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn
from torch.nn.utils import parametrizations

from ranks import Rank, on_ranks

BANDS, CHANNELS, FRAMES, LETTERS, BATCH = 5, 7, 24, 6, 3


def older(module: nn.Module, **options: Any) -> nn.Module:
    """``torch.nn.utils.weight_norm``: a hook before forward, and the weight as a plain tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module, **options)


NORMS: dict[str, Callable[..., nn.Module]] = {"parametrization": parametrizations.weight_norm, "hook": older}


class Layer(nn.Module):
    """Dilated convolutions behind a gate, with a residual and a learned scale per channel."""

    def __init__(self, dilation: int, normed: Callable[..., nn.Module]) -> None:
        super().__init__()
        pad = dilation
        self.gate = normed(nn.Conv1d(CHANNELS, 2 * CHANNELS, 3, padding=pad, dilation=dilation))
        self.out = normed(nn.Conv1d(CHANNELS, CHANNELS, 1))
        self.scale = nn.Parameter(torch.full((CHANNELS, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.out(nn.functional.glu(self.gate(x), dim=1))


class Recognizer(nn.Module):
    """Spectra (batch, BANDS, FRAMES) to the log-probabilities of letters (FRAMES / 2, batch, LETTERS)."""

    def __init__(self, normed: Callable[..., nn.Module], recurrent: type[nn.Module]) -> None:
        super().__init__()
        self.encode = normed(nn.Conv1d(BANDS, CHANNELS, 4, stride=2, padding=1))
        self.place = normed(nn.Conv1d(CHANNELS, CHANNELS, 5, padding=2, groups=CHANNELS), dim=2)  # as in wav2vec 2.0
        self.layers = nn.Sequential(Layer(1, normed), Layer(2, normed))
        self.recurrent = recurrent(CHANNELS, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.letters = normed(nn.Linear(8, LETTERS))

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        x = self.encode(spectra)
        x = self.layers(x + nn.functional.gelu(self.place(x)))
        x, _ = self.recurrent(x.mT)
        return self.letters(x).log_softmax(dim=-1).transpose(0, 1)


def trained(run: Run, norm: str, recurrent: type[nn.Module], units: tuple[type[nn.Module], ...]) -> dict[str, Any]:
    """Four steps on spectra of several lengths, then an evaluation."""
    model = run.shard(built(Recognizer, NORMS[norm], recurrent), *units)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    for step in range(4):
        spectra = run.data(step, BATCH, BANDS, FRAMES)
        texts = torch.randint(1, LETTERS, (BATCH, 4), generator=run.generator(step))
        frames, letters = torch.tensor([12, 10, 8 + step]), torch.tensor([4, 2, 3])
        loss = nn.functional.ctc_loss(model(spectra), texts, frames, letters)
        loss.backward()
        run.note("loss", loss)
        run.step(model, adam, max_norm=3.0)
    with torch.no_grad():
        run.note("evaluation", model.eval()(run.data(50, BATCH, BANDS, FRAMES)))
    return {"model": model}


CASES: dict[str, dict[str, Any]] = {
    "hooks, LSTM, one unit": {"norm": "hook", "recurrent": nn.LSTM, "units": ()},
    "parametrizations, GRU, layers": {"norm": "parametrization", "recurrent": nn.GRU, "units": (Layer,)},
    "hooks, GRU, each module": {"norm": "hook", "recurrent": nn.GRU, "units": (nn.Conv1d, nn.RNNBase)},
    "parametrizations, LSTM, each module": {
        "norm": "parametrization",
        "recurrent": nn.LSTM,
        "units": (nn.Conv1d, nn.RNNBase),
    },
}


@pytest.mark.parametrize("case", CASES)
@front_ends
@on_ranks(2)
def test_speech(rank: Rank, case: str, front_end: str) -> None:
    """Losses, norms of gradients, weights and outputs are those of the unsharded run, whatever the units."""
    assert_runs_alike(rank, front_end, functools.partial(trained, **CASES[case]))
