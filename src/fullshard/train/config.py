"""Settings of a training run: frozen values, written beside the results and read back.

Each setting is stated once, as a field with its default, its help text and its limits. Options of the command line,
checks, TOML files and the table in docs/reference/command_line.md are derived from that. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fullshard.messages import clipped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMM_QUANTIZATIONS = ("none", "int8", "fp8")
VOCABULARY = 256  # a token is a byte
MATCH_LENGTHS = (3, 5, 8)  # bytes that have to occur again for a match
MODEL, RANKS, TRAINING, OUTPUT, CHECKPOINTS = "Model", "Ranks", "Training", "Validation and output", "Checkpoints"


class ConfigError(ValueError):
    """A setting is out of range, or a config file cannot be read. The message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting as users see it."""

    panel: str  # title of its group in help
    help: str  # one or two sentences
    least: float | None = None  # smallest value
    above: float | None = None  # value that a number must exceed
    choices: tuple[str, ...] = ()  # the only values

    def check(self, name: str, value: Any) -> None:
        """Raise `ConfigError` if `value` is out of range."""
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} must be one of {', '.join(self.choices)}, found {clipped(repr(value))}")
        if self.least is not None and not self.least <= value < math.inf:
            raise ConfigError(f"{name} must be at least {self.least}, found {value}")
        if self.above is not None and not self.above < value < math.inf:
            raise ConfigError(f"{name} must be a number above {self.above}, found {value}")


def option(value: Any, panel: str, help: str, **more: Any) -> Any:
    """Return a field with this default value, group in help, help text, and what else an `Option` has."""
    return field(default=value, metadata={Option: Option(panel=panel, help=help, **more)})


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size of the model. `width / heads` must be even, as rotary positions turn pairs."""

    layers: int = option(3, MODEL, "Transformer blocks.", least=1)
    width: int = option(128, MODEL, "Width of the residual stream (hidden size).", least=2)
    heads: int = option(2, MODEL, "Attention heads per block.", least=1)
    sequence: int = option(512, MODEL, "Context length in bytes.", least=8)
    ngrams: int = option(4, MODEL, "Longest n-gram, in bytes, that has an embedding.", least=2)
    ngram_rows: int = option(
        16384, MODEL, "Rows of the n-gram embedding per length; n-grams with the same hash share a row.", least=1
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if Option in item.metadata:
                item.metadata[Option].check(item.name, getattr(self, item.name))
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width must be a multiple of 2 * heads, so that each head has an even size; found width "
                f"{self.width} and {self.heads} heads"
            )

    @property
    def parameter_count(self) -> int:
        """Number of parameters of a `GPT` of this size."""
        rows = 2 * VOCABULARY + (self.ngrams - 1) * self.ngram_rows + len(MATCH_LENGTHS) * (VOCABULARY + 1)
        return self.layers * 12 * self.width**2 + rows * self.width


@dataclass(frozen=True, kw_only=True)
class TrainConfig(GPTConfig):
    """All settings that affect a run's results or what it keeps, but not its output folder.

    Attributes:
        data: files and folders of text; empty means the source code of Python's standard library.
        data_sha256: digest of what was read; a run from this config warns if it differs. Empty: unknown.
    """

    data: tuple[str, ...] = ()
    data_sha256: str = ""
    ranks: int = option(0, RANKS, "Number of ranks. 0: one per accelerator, or 2 without.", least=0)
    device: str = option(
        "auto", RANKS, "auto: accelerators if there is one for each rank, else the CPU.", choices=("auto", "cpu")
    )
    comm_quantization: str = option(
        "none", RANKS, "Quantized communication: weights in int8 or fp8, gradients in int8.", choices=COMM_QUANTIZATIONS
    )
    seed: int = option(0, TRAINING, "Random seed of data split, initial weights and batches.", least=0)
    steps: int = option(400, TRAINING, "Optimizer steps.", least=1)
    batch: int = option(2, TRAINING, "Sequences per forward on each rank.", least=1)
    accumulate: int = option(1, TRAINING, "Microbatches per optimizer step (gradient accumulation).", least=1)
    optimizer: str = option(
        "muon", TRAINING, "muon: Muon for the matrices of blocks, AdamW for the rest.", choices=("adamw", "muon")
    )
    lr: float = option(
        0.06, TRAINING, "Peak learning rate of AdamW for embeddings; its other parameters use 0.07 times this.", above=0
    )
    muon_lr: float = option(0.03, TRAINING, "Peak learning rate of Muon.", above=0)
    warmup: int = option(20, TRAINING, "Steps of linear learning rate warmup.", least=0)
    weight_decay: float = option(0.0, TRAINING, "Weight decay of the weight matrices of blocks.", least=0)
    clip: float = option(1.0, TRAINING, "Maximum gradient norm (gradient clipping).", above=0)
    dtype: str = option(
        "fp32",
        TRAINING,
        "Dtype of computation and all-gathers; weights, gradient reduction and optimizer state stay in fp32.",
        choices=("fp32", "bf16"),
    )
    activation_checkpointing: bool = option(
        False, TRAINING, "Recompute the activations of blocks in backward: less memory, a third more computation."
    )
    trace: bool = option(False, OUTPUT, "Write a timeline of five steps and a table of late ranks to the run's trace/.")
    debug: bool = option(
        False, TRAINING, "Stop at the first value that is NaN or infinite, and name its module, rank and step. Slower."
    )
    eval_every: int = option(100, OUTPUT, "Steps between validations.", least=1)
    eval_bytes: int = option(
        2**18, OUTPUT, "Held-out bytes of the final validation and the baselines; others use 1/8.", least=1024
    )
    checkpoint_every: int = option(20, CHECKPOINTS, "Steps between checkpoints; 0: never.", least=0)
    keep: int = option(2, CHECKPOINTS, "Checkpoints to keep.", least=1)

    @property
    def model(self) -> GPTConfig:
        """The size of the model alone."""
        return GPTConfig(**{item.name: getattr(self, item.name) for item in dataclasses.fields(GPTConfig)})

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.ranks * self.batch * self.accumulate

    def to_toml(self) -> str:
        """Serialize this config as TOML, in the order of the fields."""
        values = {**dataclasses.asdict(self), "data": list(self.data)}
        return "# Run it again: fullshard train --config THIS_FILE\n" + tomli_w.dumps(values)

    @classmethod
    def from_toml(cls, path: Path) -> TrainConfig:
        """Parse a config of `to_toml`; missing fields take their defaults.

        Raises:
            ConfigError: the file cannot be read, is not TOML, or names unknown fields or wrong types.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}, the settings of a run: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # of TOML, UTF-8 or numbers
            raise ConfigError(f"{path} is not a TOML file: {clipped(error)}") from error
        kinds = typing.get_type_hints(cls)
        if unknown := sorted(values.keys() - kinds.keys()):
            raise ConfigError(
                f"{path}: unknown settings: {clipped(', '.join(unknown))}; valid settings are {', '.join(kinds)}"
            )
        try:
            return cls(**{name: _convert(name, value, kinds[name]) for name, value in values.items()})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def options() -> dict[str, Option]:
    """Return the options of the command line by their names, in the order of the fields."""
    return {item.name: item.metadata[Option] for item in dataclasses.fields(TrainConfig) if Option in item.metadata}


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Return a TOML value as the type of a field, or raise `ConfigError`."""
    if isinstance(value, list) and typing.get_origin(kind) is tuple and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is kind or (type(value) is int and kind is float):
        return kind(value)
    expected = "a list of strings" if typing.get_origin(kind) is tuple else kind.__name__
    raise ConfigError(f"{name} must be {expected}, found {clipped(repr(value))}")
