"""fullshard: parameters, gradients and optimizer state sharded over ranks, gathered just in time and freed."""

from fullshard.errors import FullshardError, PhaseError, TiedParameterError, UnmaterializedParameterError
from fullshard.fsdp_module import (
    FSDPModule,
    PendingGradient,
    ReplicateModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
    unsharded,
)
from fullshard.fully_shard import fully_shard, replicate
from fullshard.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from fullshard.transport import AllGather, Comm, ReduceScatter

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FullshardError",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PendingGradient",
    "PhaseError",
    "ReduceScatter",
    "ReplicateModule",
    "ShardPlacementResult",
    "TiedParameterError",
    "UnmaterializedParameterError",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "unsharded",
]
