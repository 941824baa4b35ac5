"""In which form a :class:`FullyShardedDataParallel` saves and loads parameters and optimizer state: small values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = [
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
    """What the values of a state dict are. Keys are the names that the model had before wrapping, but for LOCAL."""

    FULL_STATE_DICT = enum.auto()  # whole tensors, as of a model that was never wrapped
    LOCAL_STATE_DICT = enum.auto()  # the flat parameters' live memory, under their own keys; same wrapping to load
    SHARDED_STATE_DICT = enum.auto()  # this rank's rows, in DTensors as of fully_shard


class OptimStateKeyType(enum.Enum):
    """What stands for a parameter in the state of an optimizer."""

    PARAM_NAME = enum.auto()  # its name in the model
    PARAM_ID = enum.auto()  # its number in the optimizer


@dataclass
class _Config:
    def __setattr__(self, name: str, value: object) -> None:
        """Flags may be assigned to, as programs do; wrappers keep copies."""
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no {name}, only {', '.join(self.__dataclass_fields__)}")
        if not isinstance(value, bool):
            raise TypeError(f"{type(self).__name__}: {name}: expected True or False, found {value!r}")
        super().__setattr__(name, value)


@dataclass
class StateDictConfig(_Config):
    """Base class of what belongs to a :class:`StateDictType` for parameters.

    Args:
        offload_to_cpu: Whether values are in CPU memory, wherever the model computes.

    Raises:
        TypeError: If a flag is not True or False.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For ``FULL_STATE_DICT``.

    Args:
        rank0_only: Only the first rank (of those that the model is sharded and replicated over) gets the values of
            wrappers; the others get none of them, and never hold more than the unit that is being gathered. For
            saving: to load, all ranks need all values.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For ``SHARDED_STATE_DICT``.

    Args:
        _use_dtensor: For compatibility: values are DTensors always.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig(_Config):
    """Base class of what belongs to a :class:`StateDictType` for optimizer state.

    Args:
        offload_to_cpu: Whether tensors are in CPU memory.

    Raises:
        TypeError: If a flag is not True or False.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For ``FULL_STATE_DICT``.

    Args:
        rank0_only: As of :class:`FullStateDictConfig`.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For ``LOCAL_STATE_DICT``."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For ``SHARDED_STATE_DICT``.

    Args:
        _use_dtensor: For compatibility: values are DTensors always.
    """

    _use_dtensor: bool = False


@dataclass(frozen=True)
class StateDictSettings:
    """How a wrapper is saved and loaded.

    Args:
        state_dict_type: What values are.
        state_dict_config: For parameters and buffers; of the class that goes with the type.
        optim_state_dict_config: For optimizer state; of the class that goes with the type.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)
