"""Where a run stands: what a checkpoint holds beside model and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.train.config import ConfigError, TrainConfig


@dataclass(frozen=True)
class Best:
    """The best validation so far.

    Attributes:
        step: optimizer step after which it was.
        loss: nats per byte, on the part of the held-out bytes that validations during the run use.
        bytes: how many these are.
        data_sha256: digest of the text and its split.
    """

    step: int
    loss: float
    bytes: int = 0
    data_sha256: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Best:
        """The inverse of `dataclasses.asdict`; names that it does not know are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def is_judged_alike(self, other: Best) -> bool:
        """Whether both losses are on the same bytes; others cannot be compared."""
        return (self.bytes, self.data_sha256) == (other.bytes, other.data_sha256)


@dataclass(frozen=True)
class Position:
    """How far a run has come. The batches of later steps are a function of the seed and the step's number.

    Attributes:
        step: optimizer steps done.
        validated: whether a validation that is due after `step` is done, or none is due.
        elapsed: seconds in the training loop, over all parts of the run.
        best: the best validation; None before the first.
        validation_loss: nats per byte of the full validation after the last step; None before it.
        origin: the folder of another run that this one was started from with `--resume`; empty for none.
    """

    step: int = 0
    validated: bool = True
    elapsed: float = 0.0
    best: Best | None = None
    validation_loss: float | None = None
    origin: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, text and dictionaries, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        """The inverse of `to_dict`; names that it does not know are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        best = given.get("best")
        return cls(**{**given, "best": Best.from_dict(best) if best else None})


@dataclass(frozen=True)
class Setting:
    """What a run's numbers depend on, as a checkpoint keeps it, to be compared with how the run goes on.

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
        """The setting of a config whose ranks and digest of the text are filled in."""
        model = dataclasses.asdict(config.model)
        return cls(model, config.seed, config.data_sha256, config.ranks, config.training.batch)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, text and dictionaries, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Setting:
        """The inverse of `to_dict`; names that it does not know are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def check(self, now: Setting, where: str) -> None:
        """Make sure that a run of this setting can go on as `now`.

        Args:
            now: the setting to go on with.
            where: where this setting was found, for the error.

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
                f"{where} holds a model of {', '.join(wrong)}: leave these options out to go on with it, or take "
                f"another --name for a new run"
            )
        if self.seed != now.seed:
            raise ConfigError(
                f"{where} was trained with --seed {self.seed}, not {now.seed}: another seed holds out other files, so "
                f"that the model would be judged on bytes that it was trained on. Leave --seed out to go on with it"
            )

    def notes(self, now: Setting) -> list[str]:
        """What a user should know about going on as `now`, in sentences."""
        notes = []
        if self.data_sha256 != now.data_sha256:
            notes.append(
                "the text is not the one of the steps so far; if what is held out was trained on before, validations "
                "are too good"
            )
        before, after = self.ranks * self.batch, now.ranks * now.batch
        if before != after:
            notes.append(
                f"a step now sees {after} sequences ({now.ranks} ranks of {now.batch}), and {before} so far; --batch "
                f"is per rank"
            )
        return notes
