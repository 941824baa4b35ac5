"""Optimizers and gradient norms for sharded parameters.

Known optimizers step plain local tensors, others after ``localize``; ``offload`` keeps the state in CPU memory.
``Muon`` and other subclasses of ``MatrixOptimizer`` update whole matrices. ``clip_grad_norm_`` and ``get_total_norm``
compute norms over all ranks.
"""

from fullshard.optim.local.localize import localize as localize
from fullshard.optim.muon.matrix_optimizer import MatrixOptimizer as MatrixOptimizer
from fullshard.optim.muon.muon import Muon as Muon
from fullshard.optim.muon.muon import orthogonalize as orthogonalize
from fullshard.optim.norms import clip_grad_norm_ as clip_grad_norm_
from fullshard.optim.norms import clip_grads_with_norm_ as clip_grads_with_norm_
from fullshard.optim.norms import get_total_norm as get_total_norm
from fullshard.optim.offload import offload as offload

__all__ = [
    "MatrixOptimizer",
    "Muon",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "localize",
    "offload",
    "orthogonalize",
]
