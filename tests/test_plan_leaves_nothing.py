"""What a process finds after a plan, in which it has been a rank of a modelled job."""

from __future__ import annotations

import sys

import torch
from torch import nn

import fullshard


def test_uncaught_errors_are_shown_as_before() -> None:
    """A process group adds the number of its rank to them, and the one of a plan is gone."""
    before = sys.excepthook
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fullshard.plan(model, torch.empty(2, 4), ranks=2)
    assert sys.excepthook is before
