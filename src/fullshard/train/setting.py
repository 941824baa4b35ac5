"""What the results of a run depend on: kept in its checkpoints, and compared when it resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.train.config import ConfigError, TrainConfig


def setting_of(config: TrainConfig) -> dict[str, Any]:
    """Return the setting of a config with known ranks and digest of the text, for a checkpoint."""
    return {
        "model": dataclasses.asdict(config.model),
        "optimizer": config.training.optimizer,
        "seed": config.seed,
        "data_sha256": config.data_sha256,
        "sequences": config.sequences,
    }


def check_setting(before: Mapping[str, Any], config: TrainConfig, where: Path | None) -> list[str]:
    """Return notes for the user about resuming with `config` from the checkpoint `where`, saved with another setting.

    Raises:
        ConfigError: the model has another size, or optimizer or seed differ.
    """
    now = setting_of(config)
    wrong = [
        f"--{name} {value}, not {now['model'][name]}"
        for name, value in before["model"].items()
        if name in now["model"] and now["model"][name] != value
    ]
    if wrong:
        raise ConfigError(
            f"{where} has a model of {', '.join(wrong)}: leave these options out to resume, or choose another "
            f"--name for a new run"
        )
    optimizer = before.get("optimizer", now["optimizer"])
    if optimizer != now["optimizer"]:
        raise ConfigError(
            f"{where} was trained with --optimizer {optimizer}, not {now['optimizer']}, whose state it lacks: leave "
            f"--optimizer out to resume"
        )
    if before["seed"] != now["seed"]:
        raise ConfigError(
            f"{where} was trained with --seed {before['seed']}, not {now['seed']}: another seed holds out other files, "
            f"so that validation would use bytes that the model was trained on. Leave --seed out to resume"
        )
    notes = []
    if before["data_sha256"] != now["data_sha256"]:
        notes.append(
            "the text has changed since the previous steps; if held-out bytes were trained on before, validation "
            "losses are too low"
        )
    sequences = before.get("sequences", now["sequences"])
    if sequences != now["sequences"]:
        notes.append(f"a step now sees {now['sequences']} sequences, and {sequences} so far")
    return notes
