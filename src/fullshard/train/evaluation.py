"""Loss on held-out bytes, computed by all ranks together, and what simple compressors need for the same bytes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.train.corpus import Bytes, windows
from fullshard.train.group import Group


@dataclass(frozen=True)
class HeldOut:
    """Held-out bytes of a validation, as consecutive fixed windows.

    Every byte but the first is predicted exactly once, from those before it in its window.

    Attributes:
        text: held-out bytes, uint8 of shape `(windows * sequence + 1,)`.
        sequence: length of a window.
    """

    text: Bytes
    sequence: int

    @classmethod
    def take(cls, validation: Bytes, limit: int, sequence: int) -> HeldOut:
        """Return the first `limit` bytes of `validation`, cut to whole windows, at least one."""
        count = max(1, (min(limit, len(validation) - 1)) // sequence)
        return cls(validation[: count * sequence + 1], sequence)

    @property
    def targets(self) -> Bytes:
        """Bytes that are predicted, on which baselines must be computed."""
        return self.text[1:]

    @property
    def count(self) -> int:
        """Number of windows."""
        return len(self.targets) // self.sequence


def evaluate(model: nn.Module, held_out: HeldOut, batch: int, group: Group) -> float:
    """Return the mean cross-entropy in nats per byte over all of `held_out`; the same number on every rank.

    Every rank runs the same number of forwards, which are collectives: windows are dealt out in rounds, and a
    rank without a window left in the last round predicts one that does not count.
    """
    total = 0.0
    model.eval()
    for first in range(0, held_out.count, batch * group.size):
        own = first + group.rank * batch + np.arange(batch)
        counts = own < held_out.count
        pairs = windows(held_out.text, np.where(counts, own, 0) * held_out.sequence, held_out.sequence)
        tokens = torch.from_numpy(pairs).to(group.device)
        with torch.no_grad():
            logits = model(tokens[:, :-1])
            losses = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        total += float(losses.cpu()[torch.from_numpy(counts)].double().sum())  # not every device knows float64
    model.train()
    return sum(group.gather(total)) / len(held_out.targets)


def baselines(train: Bytes, held_out: Bytes) -> dict[str, float]:
    """Return the bits per byte of `held_out` for simple compressors, by name.

    Args:
        train: uint8 of any length; order-0 coding is an ideal entropy coder with the frequencies of these bytes, one
            added to every count.
        held_out: uint8, at least one byte; zlib compresses them as one stream, headers included.
    """
    counts = np.bincount(train, minlength=256) + 1
    order0 = -np.log2(counts / counts.sum())
    return {
        "order-0 entropy coding": float(order0[held_out].mean()),
        "zlib level 9": 8 * len(zlib.compress(held_out.tobytes(), 9)) / len(held_out),
    }
