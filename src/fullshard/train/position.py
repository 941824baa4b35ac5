"""The progress of a run, which a checkpoint holds beside model and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.train.config import ConfigError, TrainConfig


@dataclass(frozen=True)
class BestValidation:
    """The best validation so far.

    Attributes:
        step: optimizer step of the validation.
        loss: nats per byte, on the part of the held-out bytes that validations during the run use.
        bytes: number of these bytes.
        data_sha256: digest of the text and its split.
    """

    step: int
    loss: float
    bytes: int = 0
    data_sha256: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BestValidation:
        """Invert `dataclasses.asdict`; unknown names are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def is_comparable(self, other: BestValidation) -> bool:
        """Return True if both losses are on the same bytes."""
        return (self.bytes, self.data_sha256) == (other.bytes, other.data_sha256)


@dataclass(frozen=True)
class Position:
    """Progress of a run. The batches of later steps are a function of the seed and the step's number.

    Attributes:
        step: optimizer steps done.
        validated: True unless a validation after `step` is still due.
        elapsed: seconds in the training loop, over all parts of the run.
        best: the best validation; None before the first.
        validation_loss: nats per byte of the full validation after the last step; None before it.
        origin: the folder of another run that this one was started from with `--resume`; empty for none.
    """

    step: int = 0
    validated: bool = True
    elapsed: float = 0.0
    best: BestValidation | None = None
    validation_loss: float | None = None
    origin: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and dictionaries, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        """Invert `to_dict`; unknown names are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        best = given.get("best")
        return cls(**{**given, "best": BestValidation.from_dict(best) if best else None})


@dataclass(frozen=True)
class Setting:
    """The settings that a run's results depend on, kept in a checkpoint to compare them when the run resumes.

    Attributes:
        model: the model's size, by name of setting.
        seed: the seed, which also decides what is held out.
        data_sha256: digest of the text and its split.
        ranks: number of ranks.
        batch: sequences per step and rank.
    """

    model: Mapping[str, int]
    seed: int
    data_sha256: str
    ranks: int
    batch: int

    @classmethod
    def of(cls, config: TrainConfig) -> Setting:
        """Return the setting of a config with known ranks and digest of the text."""
        model = dataclasses.asdict(config.model)
        return cls(model, config.seed, config.data_sha256, config.ranks, config.training.batch)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and dictionaries, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Setting:
        """Invert `to_dict`; unknown names are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def check(self, now: Setting, where: str) -> None:
        """Raise if a run of this setting cannot resume with `now`.

        Args:
            now: the setting to resume with.
            where: location of this setting, for the error.

        Raises:
            ConfigError: the model has another size, or the seed differs.
        """
        wrong = [
            f"--{name} {value}, not {now.model[name]}"
            for name, value in self.model.items()
            if name in now.model and now.model[name] != value
        ]
        if wrong:
            raise ConfigError(
                f"{where} has a model of {', '.join(wrong)}: leave these options out to resume, or choose another "
                f"--name for a new run"
            )
        if self.seed != now.seed:
            raise ConfigError(
                f"{where} was trained with --seed {self.seed}, not {now.seed}: another seed holds out other files, so "
                f"that validation would use bytes that the model was trained on. Leave --seed out to resume"
            )

    def notes(self, now: Setting) -> list[str]:
        """Return notes for the user about resuming with `now`."""
        notes = []
        if self.data_sha256 != now.data_sha256:
            notes.append(
                "the text has changed since the previous steps; if held-out bytes were trained on before, validation "
                "losses are too low"
            )
        before, after = self.ranks * self.batch, now.ranks * now.batch
        if before != after:
            notes.append(
                f"a step now sees {after} sequences ({now.ranks} ranks of {now.batch}), and {before} so far; --batch "
                f"is per rank"
            )
        return notes
