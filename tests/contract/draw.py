"""Random programs: a model, units and settings, and operations, all from a seed."""

from __future__ import annotations

import random
from typing import Any

import torch

from contract.modules import Transformer
from contract.operations import Operation
from contract.programs import BF16, CAST, OFFLOAD, ONLY_REDUCED, REDUCED, Program, Units, transformer


def draw(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    depth, group = dice.choice([(1, 0), (2, 0), (3, 0), (2, 2), (2, 1), (4, 2)])
    options = {"depth": depth, "group": group, "tied": dice.random() < 0.25}
    repeat = dice.choice([1, 1, 1, 2])
    units, precise = _units(dice, Transformer(**options), options["tied"])
    attributes: dict[str, Any] = {"checkpointed": dice.choice([False, True])} if dice.random() < 0.2 else {}
    operations = tuple(_operation(dice, units) for _ in range(dice.randint(3, 6)))
    return Program(
        f"seed {seed}",
        transformer(**options),
        units,
        operations if precise else tuple(o for o in operations if o[0] not in ("to", "load")) or (("train",),),
        hooks=dice.random() < 0.5,
        adam=dice.random() < 0.3,
        attributes={**attributes, "repeat": repeat},
    )


def _units(dice: random.Random, model: Transformer, tied: bool) -> tuple[Units, bool]:
    settings: dict[str, Any] = {}
    if dice.random() < 0.25:
        settings["mp_policy"] = dice.choice([BF16, CAST, ONLY_REDUCED, REDUCED])
    if dice.random() < 0.1:
        settings["offload_policy"] = OFFLOAD
    names = [n for n, m in model.named_modules() if type(m).__name__ in ("Block", "Outer")]
    names.sort(key=lambda name: -name.count("."))
    found: list[Any] = [name for name in names if dice.random() < 0.75]
    if not tied:
        match dice.random():
            case x if x < 0.2:
                found.append(("norm", "head"))
            case x if x < 0.3:
                found.append("head")
            case x if x < 0.4:
                found.append(("embedding", "head"))
    elif dice.random() < 0.3:
        found.append(("embedding", "head"))
    every = dice.choice([None, True, False, "mixed"])

    def after() -> Any:
        return dice.choice([None, True, False]) if every == "mixed" else every

    return tuple((name, {"reshard_after_forward": after(), **settings}) for name in [*found, ""]), not settings


def _operation(dice: random.Random, units: Units) -> Operation:
    single = [path for path, _ in units if isinstance(path, str)]
    path = dice.choice(single)
    part = dice.choice(["embedding", "head", "blocks.0", "norm", "blocks"])
    choices: list[Operation] = [
        ("train", dice.choice([1, 1, 2])),
        ("train", 1, False),
        ("train",),
        ("noted_inside",),
        ("accumulate", dice.choice([2, 3])),
        ("accumulate_reduced", 2),
        ("two_forwards", dice.choice([2, 3])),
        ("two_losses",),
        ("forwards_interleaved",),
        ("forward_dropped",),
        ("input_gradient",),
        ("autograd_grad",),
        ("head_outside", dice.random() < 0.5),
        ("similarity",),
        ("freeze_inside", part),
        ("freeze", part),
        ("freeze", part, True),
        ("reshard_after_forward", dice.random() < 0.5, path),
        ("reshard_after_backward", dice.random() < 0.5),
        ("evaluate", dice.random() < 0.5, dice.choice([1, 2])),
        ("unshard", path),
        ("unshard_async", path),
        ("reshard", path),
        ("clip",),
        ("apply_",),
        ("save",),
        ("load",),
        ("to", dice.choice([torch.float64, torch.float32])),
        ("raise_in_forward", dice.choice(["head", "norm", "blocks.0"])),
        ("raise_in_backward", dice.choice(["head", "norm", "embedding"])),
    ]
    return dice.choice(choices)
