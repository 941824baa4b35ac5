"""State dict types and configs of ``FullyShardedDataParallel``."""

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
    """Type of the values of a wrapper's state dict.

    Keys are the FQNs before wrapping, except with ``LOCAL_STATE_DICT``.

    Attributes:
        FULL_STATE_DICT: Full tensors, as in a model that was never wrapped.
        LOCAL_STATE_DICT: This rank's slices of the flat parameters, not copied, keyed by the names of the flat
            parameters. Loading requires the same wrapping.
        SHARDED_STATE_DICT: This rank's shards, as DTensors like those of ``fully_shard``.
    """

    FULL_STATE_DICT = enum.auto()  # full tensors, as in a model that was never wrapped
    LOCAL_STATE_DICT = enum.auto()  # the flat parameters' live memory, under their own keys; same wrapping to load
    SHARDED_STATE_DICT = enum.auto()  # this rank's shards, as DTensors like those of fully_shard


class OptimStateKeyType(enum.Enum):
    """Type of the keys in an optimizer state dict.

    Attributes:
        PARAM_NAME: FQN of the parameter in the model.
        PARAM_ID: Index of the parameter in the optimizer.
    """

    PARAM_NAME = enum.auto()  # its name in the model
    PARAM_ID = enum.auto()  # its number in the optimizer


@dataclass
class _Config:
    def __setattr__(self, name: str, value: object) -> None:
        """Check a flag that is assigned; wrappers keep copies."""
        if name not in self.__dataclass_fields__:
            raise AttributeError(
                f"{type(self).__name__} has no field {name}; its fields are {', '.join(self.__dataclass_fields__)}"
            )
        if not isinstance(value, bool):
            raise TypeError(f"{type(self).__name__}: {name}: expected True or False, found {value!r}")
        super().__setattr__(name, value)


@dataclass
class StateDictConfig(_Config):
    """Base class of configs for parameters and buffers in state dicts.

    Args:
        offload_to_cpu: Return values in CPU memory, whatever the compute device.

    Raises:
        TypeError: If a flag is not a bool.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Config for parameters and buffers with ``FULL_STATE_DICT``.

    Args:
        offload_to_cpu: Return values in CPU memory, whatever the compute device.
        rank0_only: Only the first of the ranks that the model is sharded and replicated over gets the values of
            wrappers; the others get none of them, and hold at most one unsharded unit at a time. Applies to saving
            only: for loading, all ranks need all values.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Config for parameters and buffers with ``LOCAL_STATE_DICT``.

    Args:
        offload_to_cpu: Return values in CPU memory, whatever the compute device.
    """


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Config for parameters and buffers with ``SHARDED_STATE_DICT``.

    Args:
        offload_to_cpu: Return values in CPU memory, whatever the compute device.
        _use_dtensor: For compatibility; values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig(_Config):
    """Base class of configs for optimizer state dicts.

    Args:
        offload_to_cpu: Return tensors in CPU memory, whatever the compute device.

    Raises:
        TypeError: If a flag is not a bool.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Config for optimizer state with ``FULL_STATE_DICT``.

    Args:
        offload_to_cpu: Return tensors in CPU memory, whatever the compute device.
        rank0_only: When saving, only the first rank gets the state. When loading, the first rank's state is broadcast.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Config for optimizer state with ``LOCAL_STATE_DICT``.

    Args:
        offload_to_cpu: Return tensors in CPU memory, whatever the compute device.
    """

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Config for optimizer state with ``SHARDED_STATE_DICT``.

    Args:
        offload_to_cpu: Return tensors in CPU memory, whatever the compute device.
        _use_dtensor: For compatibility; values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass(frozen=True)
class StateDictSettings:
    """State dict type of a wrapper, and its configs.

    Args:
        state_dict_type: Type of the values.
        state_dict_config: Config for parameters and buffers, of the class that matches the type.
        optim_state_dict_config: Config for optimizer state, of the class that matches the type.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
