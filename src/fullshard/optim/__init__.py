"""Optimizers for sharded parameters: :func:`localize` has stock ones step plain tensors, :class:`Muon` and others that
derive from :class:`MatrixOptimizer` see whole matrices; and norms of gradients, however they are spread.
"""

from fullshard.optim.localize import delocalize as delocalize
from fullshard.optim.localize import localize as localize
from fullshard.optim.muon import Muon as Muon
from fullshard.optim.muon import orthogonalise as orthogonalise
from fullshard.optim.norms import clip_grad_norm_ as clip_grad_norm_
from fullshard.optim.norms import clip_grads_with_norm_ as clip_grads_with_norm_
from fullshard.optim.norms import get_total_norm as get_total_norm
from fullshard.optim.overlap import overlap as overlap
from fullshard.optim.owner import MatrixOptimizer as MatrixOptimizer

__all__ = [
    "MatrixOptimizer",
    "Muon",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "delocalize",
    "get_total_norm",
    "localize",
    "orthogonalise",
    "overlap",
]
