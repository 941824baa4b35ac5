"""fullshard: parameters, gradients and optimizer state sharded over ranks, gathered just in time and freed."""

from fullshard.errors import FullshardError, PhaseError, TiedParameterError, UnmaterializedParameterError
from fullshard.fully_shard import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method

__version__ = "0.1.0"

__all__ = [
    "FSDPModule",
    "FullshardError",
    "PhaseError",
    "TiedParameterError",
    "UnmaterializedParameterError",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
