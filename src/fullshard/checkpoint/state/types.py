"""State dict types and configs of :class:`FullyShardedDataParallel`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = [
    "CONFIGS",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class StateDictType(enum.Enum):
    """Type of the values of a state dict. Keys are the FQNs before wrapping, except for LOCAL_STATE_DICT."""

    FULL_STATE_DICT = enum.auto()  # full tensors, as in a model that was never wrapped
    LOCAL_STATE_DICT = enum.auto()  # the flat parameters' live memory, under their own keys; same wrapping to load
    SHARDED_STATE_DICT = enum.auto()  # this rank's shards, as DTensors like those of fully_shard


class OptimStateKeyType(enum.Enum):
    """Key of a parameter in the state of an optimizer."""

    PARAM_NAME = enum.auto()  # its name in the model
    PARAM_ID = enum.auto()  # its number in the optimizer


@dataclass
class _Config:
    def __setattr__(self, name: str, value: object) -> None:
        """Check a flag that is assigned; wrappers keep copies."""
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no {name}, only {', '.join(self.__dataclass_fields__)}")
        if not isinstance(value, bool):
            raise TypeError(f"{type(self).__name__}: {name}: expected True or False, found {value!r}")
        super().__setattr__(name, value)


@dataclass
class StateDictConfig(_Config):
    """Base class of the configs for parameters and buffers.

    Args:
        offload_to_cpu: Return values in CPU memory, wherever the model computes.

    Raises:
        TypeError: If a flag is not True or False.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Config for ``FULL_STATE_DICT``.

    Args:
        rank0_only: Only the first rank (of those that the model is sharded and replicated over) gets the values of
            wrappers; the others get none of them, and never hold more than the unit that is being unsharded. For
            saving: to load, all ranks need all values.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Config for ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Config for ``SHARDED_STATE_DICT``.

    Args:
        _use_dtensor: For compatibility: values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig(_Config):
    """Base class of the configs for optimizer state.

    Args:
        offload_to_cpu: Return tensors in CPU memory.

    Raises:
        TypeError: If a flag is not True or False.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Config for optimizer state with ``FULL_STATE_DICT``.

    Args:
        rank0_only: As in :class:`FullStateDictConfig`.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Config for optimizer state with ``LOCAL_STATE_DICT``."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Config for optimizer state with ``SHARDED_STATE_DICT``.

    Args:
        _use_dtensor: For compatibility: values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass(frozen=True)
class StateDictSettings:
    """State dict type of a wrapper and its configs.

    Args:
        state_dict_type: Type of the values.
        state_dict_config: Config for parameters and buffers; of the class that belongs to the type.
        optim_state_dict_config: Config for optimizer state; of the class that belongs to the type.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
