"""Settings of a training run: frozen values, written beside the results and read back.

Each setting is stated once, as a field with its default, its help text and its limits. Options of the command line,
checks, TOML files and the table in docs/reference/command_line.md are derived from that. Nothing here needs torch, so
that wrong settings are found at once.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import tomli_w

from fullshard.messages import clipped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMM_QUANTIZATIONS = ("none", "int8", "fp8")
OPTIMIZERS = ("adamw", "muon")
DTYPES = ("fp32", "bf16")
VOCABULARY = 256  # a token is a byte
MATCH_LENGTHS = (3, 5, 8)  # bytes that have to occur again for a match
CHECKPOINTS_PER_RUN = 20  # unless the user says how often
LEAST_INTERVAL = 10  # steps, likewise: a short run is repeated sooner than saved


class ConfigError(ValueError):
    """A setting is out of range, or a config file cannot be read. The message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting as users see it."""

    help: str  # one or two sentences
    least: float | None = None  # smallest value
    above: float | None = None  # value that a number must exceed
    choices: tuple[str, ...] = ()  # the only values
    metavar: str | None = None  # placeholder of the value in help; None: its type, or the choices
    default: str = ""  # the default in words, where the value does not tell
    panel: str = ""  # title of the group in help; empty: that of the section

    def check(self, name: str, value: Any) -> None:
        """Raise `ConfigError` if `value` is out of range."""
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} must be one of {', '.join(self.choices)}, found {clipped(repr(value))}")
        if self.least is not None and not self.least <= value < math.inf:
            raise ConfigError(f"{name} must be at least {self.least}, found {value}")
        if self.above is not None and not self.above < value < math.inf:
            raise ConfigError(f"{name} must be a number above {self.above}, found {value}")


class NamedOption(NamedTuple):
    """An option with its name, type and default value; `option.panel` is set."""

    name: str
    type: type
    value: Any
    option: Option


def option(value: Any, help: str, **more: Any) -> Any:
    """Return a field with this default value, help text and what else an `Option` has."""
    return field(default=value, metadata={Option: Option(help=help, **more)})


class _Checked:
    """Base class of settings that checks them against their options."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(typing.cast(Any, self)):
            if Option in item.metadata:
                item.metadata[Option].check(item.name, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class GPTConfig(_Checked):
    """Size of the model. `width / heads` must be even, as rotary positions turn pairs."""

    PANEL: ClassVar[str] = "Model"
    layers: int = option(3, "Transformer blocks.", least=1)
    width: int = option(128, "Width of the residual stream (hidden size).", least=2)
    heads: int = option(2, "Attention heads per block.", least=1)
    sequence: int = option(512, "Context length in bytes.", least=8)
    ngrams: int = option(4, "Longest n-gram, in bytes, that has an embedding.", least=2)
    ngram_rows: int = option(
        16384, "Rows of the n-gram embedding per length; n-grams with the same hash share a row.", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width must be a multiple of 2 * heads, so that each head has an even size; found width "
                f"{self.width} and {self.heads} heads"
            )

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        return 4 * self.width

    @property
    def parameter_count(self) -> int:
        """Number of parameters of a `GPT` of this size."""
        block = 4 * self.width**2 + 2 * self.width * self.hidden
        rows = 2 * VOCABULARY + (self.ngrams - 1) * self.ngram_rows + len(MATCH_LENGTHS) * (VOCABULARY + 1)
        return self.layers * block + rows * self.width


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(_Checked):
    """Settings of training."""

    PANEL: ClassVar[str] = "Training"
    steps: int = option(400, "Optimizer steps.", least=1)
    batch: int = option(2, "Sequences per forward on each rank.", least=1)
    accumulate: int = option(1, "Microbatches per optimizer step (gradient accumulation).", least=1)
    optimizer: str = option(
        "muon", "muon: Muon for the weight matrices of blocks, AdamW for all other parameters.", choices=OPTIMIZERS
    )
    lr: float = option(
        0.06, "Peak learning rate of AdamW for embeddings; its other parameters use 0.07 times this.", above=0
    )
    muon_lr: float = option(0.03, "Peak learning rate of Muon.", above=0)
    warmup: int = option(20, "Steps of linear learning rate warmup.", least=0)
    weight_decay: float = option(0.0, "Weight decay of the weight matrices of blocks.", least=0)
    clip: float = option(1.0, "Maximum gradient norm (gradient clipping).", above=0)
    dtype: str = option(
        "fp32",
        "Dtype of computation and all-gathers; weights, gradient reduction and optimizer state stay in fp32.",
        choices=DTYPES,
    )
    activation_checkpointing: bool = option(
        False, "Recompute the activations of blocks in backward: less memory, a third more computation."
    )
    trace: bool = option(
        False,
        "Write a timeline of five steps, exposed communication and late ranks to trace/ in the run's folder.",
    )
    debug: bool = option(
        False, "Stop at the first value that is NaN or infinite, and name its module, rank and step. Slower."
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(_Checked):
    """Settings of validation and of the generated text."""

    PANEL: ClassVar[str] = "Validation and output"
    eval_every: int = option(100, "Steps between validations.", least=1)
    eval_bytes: int = option(
        256 * 1024, "Held-out bytes of the final validation and the baselines; other validations use 1/8.", least=1024
    )
    prompt: str = option("def ", "Prompt of the text that is generated at the end.")
    generate: int = option(200, "Bytes to generate.", least=0)
    tensorboard: bool = option(False, "Also write metrics for TensorBoard.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise ConfigError("prompt must have at least one character")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Checked):
    """Settings of checkpointing; `checkpoint_every` is -1 for the default interval."""

    PANEL: ClassVar[str] = "Checkpoints"
    checkpoint_every: int = option(
        -1, "Steps between checkpoints; 0: never.", least=-1, default="1/20 of all steps, at least 10"
    )
    keep: int = option(2, "Checkpoints to keep.", least=1)

    def interval(self, steps: int) -> int:
        """Return the steps between checkpoints in a run of `steps`; 0: never."""
        if self.checkpoint_every >= 0:
            return self.checkpoint_every
        return max(LEAST_INTERVAL, steps // CHECKPOINTS_PER_RUN)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Checked):
    """All settings that affect a run's results or what it keeps, but not its output folder.

    Names of fields are unique over this class and its sections: they are the options of the command line.

    Attributes:
        data: files and folders of text; empty means the source code of Python's standard library.
        data_sha256: digest of what was read; a run from this config warns if it differs. Empty: unknown.
    """

    data: tuple[str, ...] = ()
    data_sha256: str = ""
    ranks: int = option(
        0, "Number of ranks (worker processes).", least=0, default="one per accelerator, or 2 without", panel="Ranks"
    )
    device: str = option(
        "auto",
        "auto: accelerators if there is one for each rank, else the CPU. TYPE: a device type of torch.",
        metavar="auto|cpu|TYPE",
        panel="Ranks",
    )
    seed: int = option(
        0, "Random seed of data split, initial weights, batches and generated text.", least=0, panel="Training"
    )
    comm_quantization: str = option(
        "none",
        "Quantized communication of large parameters, for slow networks: weights in int8 or fp8, gradients in int8.",
        choices=COMM_QUANTIZATIONS,
        panel="Ranks",
    )
    model: GPTConfig = field(default_factory=GPTConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.ranks * self.training.batch * self.training.accumulate

    def with_options(self, options: Mapping[str, Any]) -> TrainConfig:
        """Return this config with some fields replaced, given by name without sections.

        Raises:
            ConfigError: a value is out of range.
        """
        changes: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, _Checked):
                names = {inner.name for inner in dataclasses.fields(typing.cast(Any, value))}
                own = {name: options[name] for name in names & options.keys()}
                changes[item.name] = dataclasses.replace(typing.cast(Any, value), **own)
            elif item.name in options:
                changes[item.name] = options[item.name]
        return dataclasses.replace(self, **changes)

    def to_toml(self) -> str:
        """Serialize this config as TOML, in the order of the fields."""
        values = dataclasses.asdict(self)
        values["data"] = list(self.data)
        return "# Run it again: fullshard train --config THIS_FILE\n" + tomli_w.dumps(values)

    @classmethod
    def from_toml(cls, path: Path) -> TrainConfig:
        """Parse a config of `to_toml`; missing fields take their defaults.

        Raises:
            ConfigError: the file cannot be read, is not TOML, or names unknown fields or wrong types.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"cannot read {path}: there is no such file, which has the settings of a run: restore it, or choose "
                "another --name for a new run"
            ) from error
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # of TOML, UTF-8 or numbers
            raise ConfigError(f"{path} is not a TOML file: {clipped(error)}") from error
        flat: dict[str, Any] = {}
        for name, value in values.items():
            flat |= value if isinstance(value, dict) else {name: value}
        types = {"data": tuple, "data_sha256": str} | {each.name: each.type for each in options()}
        try:
            unknown = sorted(flat.keys() - types.keys())
            if unknown:
                raise ConfigError(
                    f"unknown settings: {clipped(', '.join(unknown))}; valid settings are {', '.join(types)}"
                )
            return cls().with_options({name: _convert(name, value, types[name]) for name, value in flat.items()})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def options(section: Any = TrainConfig) -> Iterator[NamedOption]:
    """Yield the options of a dataclass, by default all settings, in the order of the fields and with its sections."""
    kinds, panel = typing.get_type_hints(section), getattr(section, "PANEL", "")
    for item in dataclasses.fields(section):
        kind = kinds[item.name]
        if dataclasses.is_dataclass(kind):
            yield from options(kind)
        elif Option in item.metadata:
            stated = item.metadata[Option]
            stated = dataclasses.replace(stated, panel=stated.panel or panel)
            yield NamedOption(item.name, kind, item.default, stated)


def _convert(name: str, value: Any, wanted: type) -> Any:
    """Return a TOML value as the type of a field, or raise `ConfigError`."""
    if wanted is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is wanted:
        return value
    expected = "a list of strings" if wanted is tuple else wanted.__name__
    raise ConfigError(f"{name} must be {expected}, found {clipped(repr(value))}")
