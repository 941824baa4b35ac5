"""fullshard: parameters, gradients and optimizer state sharded over ranks, gathered just in time and freed."""

from fullshard.engine.flat_parameter import FlatParameter
from fullshard.errors import FullshardError, PhaseError, TiedParameterError, UnmaterializedParameterError
from fullshard.fsdp_module import (
    FSDPModule,
    ReplicateModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
    unsharded,
)
from fullshard.fully_shard import fully_shard, replicate
from fullshard.grad_scaler import ShardedGradScaler
from fullshard.policy import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    ShardPlacementResult,
)
from fullshard.sharded_module import PendingGradient
from fullshard.transport import AllGather, Comm, ReduceScatter
from fullshard.wrapper import FullyShardedDataParallel

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FullshardError",
    "FullyShardedDataParallel",
    "HSDPMeshInfo",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PendingGradient",
    "PhaseError",
    "ReduceScatter",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardingStrategy",
    "TiedParameterError",
    "UnmaterializedParameterError",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "unsharded",
]
