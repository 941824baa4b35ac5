"""The optimizers of a plan, for either model."""

from __future__ import annotations

import torch
from torch import nn

from fullshard import optim
from fuzz.plan import HistoryPlan

# Adam divides gradients by their own size; a large eps keeps it from making rounding errors as large as a step.
EPS = 1e-4


def optimizers(model: nn.Module, history: HistoryPlan, *, sharded: bool) -> list[torch.optim.Optimizer]:
    """New ones, without state; sharded ones step as the plan says."""
    plan = history.optimizer
    matrices: list[nn.Parameter] = []
    others = list(model.parameters())
    made: list[torch.optim.Optimizer] = []
    if plan.name == "muon":
        named = [(name, p) for name, p in model.named_parameters() if name.endswith(MATRICES)]
        matrices = [parameter for _, parameter in named]
        known = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in others if id(parameter) not in known]
        if matrices:
            made.append((optim.Muon if sharded else torch.optim.Muon)(matrices, lr=0.02))
    # Adapters may be plain beside DTensors, which foreach kernels take no list of.
    added = {id(parameter) for name, parameter in model.named_parameters() if ".adapter." in name}
    groups = [
        {"params": [parameter for parameter in others if (id(parameter) in added) is apart]} for apart in (False, True)
    ]
    groups = [group for group in groups if group["params"]]
    if plan.name == "adamw":
        own: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01, eps=EPS, foreach=True)
    else:
        own = torch.optim.SGD(groups, lr=0.05 / history.loss_scale, momentum=0.9 if plan.name == "momentum" else 0.0)
    if sharded and plan.mode == "dtensors":
        optim.localize(own, enable=False)
    return [*made, own]


MATRICES = ("up.weight", "down.weight", "entry.weight", "head.weight")
