"""fullshard: parameters, gradients and optimizer state sharded over ranks, all-gathered just in time and freed."""

from . import activation_checkpoint as activation_checkpoint
from . import checkpoint as checkpoint
from . import comm as comm
from . import comm_hooks as comm_hooks
from . import debug as debug
from . import dropin as dropin
from . import errors as errors
from . import optim as optim
from . import policy as policy
from . import wrap as wrap
from .allocator import keep_freed_memory
from .checkpoint import async_save, export_safetensors, full_tensors, load, load_safetensors, save
from .checkpoint.state.types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .comm import AllGather, Comm, ReduceScatter
from .comm.quantized.report import QuantizationReport
from .composable.fsdp_module import FSDPModule, ReplicateModule, share_comm_ctx
from .composable.fully_shard import fully_shard, replicate
from .composable.module_class import register_fsdp_forward_method
from .composable.shard import shard
from .composable.unsharding import GradientReductionHandle, UnshardHandle, unsharded
from .debug.tracing.recorder import trace
from .engine.parameters.flat import FlatParameter
from .errors import (
    CheckpointError,
    FullshardError,
    NonFiniteError,
    PhaseError,
    ReplicaError,
    TiedParameterError,
    UnmaterializedParameterError,
)
from .frontend.sharded_module import PendingGradient
from .optim import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from .optim.grad_scaler import ShardedGradScaler
from .planning.plan import plan
from .policy import (
    BackwardPrefetch,
    CommQuantization,
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
from .version import __version__ as __version__
from .wrapper.fsdp import FullyShardedDataParallel

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Comm",
    "CommQuantization",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullshardError",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "NonFiniteError",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PendingGradient",
    "PhaseError",
    "QuantizationReport",
    "ReduceScatter",
    "ReplicaError",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TiedParameterError",
    "UnmaterializedParameterError",
    "UnshardHandle",
    "async_save",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "export_safetensors",
    "full_tensors",
    "fully_shard",
    "get_total_norm",
    "keep_freed_memory",
    "load",
    "load_safetensors",
    "plan",
    "register_fsdp_forward_method",
    "replicate",
    "save",
    "shard",
    "share_comm_ctx",
    "trace",
    "unsharded",
]
