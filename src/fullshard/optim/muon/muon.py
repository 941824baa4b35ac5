"""Muon: momentum, orthogonalized matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from fullshard.optim.muon.matrix_optimizer import ROUND_BYTES, MatrixOptimizer

__all__ = ["Muon", "orthogonalize"]

Coefficients = tuple[float, float, float]
LearningRate = Literal["original", "match_rms_adamw"]

# From https://kellerjordan.github.io/posts/muon/, and torch's defaults: steep at 0, not convergent, fast.
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
STEPS = 5
MAX_STEPS = 100


class Muon(MatrixOptimizer):
    """Muon for sharded parameters: the numbers of ``torch.optim.Muon``, each matrix orthogonalized by one owner rank.

    Matrices are communicated in bf16, to which Newton-Schulz rounds anyway. Parameters get the same bits as from
    ``torch.optim.Muon`` without sharding, if gradients have the same bits and kernels do not depend on the rank's
    hardware or number of threads. State dicts are interchangeable with it. ``MatrixOptimizer`` describes the supported
    parameters and the assignment of matrices to ranks.

    Args:
        params: 2-D parameters of hidden layers, or groups of them. Give others (biases, norms, embeddings, the output
            layer) to another optimizer.
        lr: Learning rate, a number or a tensor of one element.
        weight_decay: Parameters are multiplied by ``1 - lr * weight_decay`` in each step.
        momentum: Weight of the old momentum buffer in the new one.
        nesterov: Use Nesterov momentum.
        ns_coefficients: Coefficients a, b, c of the polynomial ``a x + b x^3 + c x^5`` of a Newton-Schulz step.
        eps: Lower bound of the norm that a matrix is divided by.
        ns_steps: Number of Newton-Schulz steps; below 100.
        adjust_lr_fn: Factor of the learning rate for a matrix of shape (m, n). "original" or None: ``sqrt(max(1, m /
            n))``. "match_rms_adamw": ``0.2 sqrt(max(m, n))``, so that learning rates tuned for AdamW can be reused.
        comm_dtype: Dtype in which matrices and updates are communicated.
        ns_dtype: Dtype of the Newton-Schulz steps. float32 is faster on CPUs without bf16 matrix products.
        round_bytes: Limit in bytes for the full matrices that an owner rank holds at a time, unless a single matrix is
            larger.

    Raises:
        ValueError: If a number is out of range, or a parameter is not supported by ``MatrixOptimizer``.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import fully_shard
        from fullshard.optim import Muon

        model = fully_shard(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        muon, adamw = Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=1e-3)
        model(torch.randn(4, 16)).square().mean().backward()
        muon.step()
        adamw.step()
        ```
    """

    ns_dtype: torch.dtype

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: LearningRate | None = None,
        *,
        comm_dtype: torch.dtype = torch.bfloat16,
        ns_dtype: torch.dtype = torch.bfloat16,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"lr: expected a number or a tensor of one element, found shape {tuple(lr.shape)}")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0:
                raise ValueError(f"{name}: expected a number of at least 0, found {value}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'adjust_lr_fn: expected "original", "match_rms_adamw" or None, found {adjust_lr_fn!r}')
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients: expected three numbers, found {ns_coefficients}")
        if not 0 <= ns_steps < MAX_STEPS:
            raise ValueError(f"ns_steps: expected 0 to {MAX_STEPS - 1}, found {ns_steps}")
        if not ns_dtype.is_floating_point:
            raise ValueError(f"ns_dtype: expected a floating-point dtype, found {ns_dtype}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self.ns_dtype = ns_dtype
        super().__init__(params, defaults, comm_dtype=comm_dtype, round_bytes=round_bytes)

    def prepare(self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum buffer and return the momentum of this rank's shard.

        Args:
            gradient: This rank's shard of the gradient.
            state: State of the parameter, with local tensors.
            group: The parameter group.

        Returns:
            The momentum, of the gradient's shape.
        """
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum, buffer = group["momentum"], state["momentum_buffer"]
        gradient = gradient.to(buffer.dtype)  # loading a state dict casts the buffer to the parameter's dtype
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

    def update(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Orthogonalize a full matrix.

        Args:
            matrix: The full matrix, in ``comm_dtype``.
            group: The parameter group.

        Returns:
            The orthogonalized matrix, in ``ns_dtype``.
        """
        return orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"], self.ns_dtype)

    def update_all(self, matrices: Sequence[torch.Tensor], group: dict[str, Any]) -> Sequence[torch.Tensor]:
        """Orthogonalize several matrices of one shape, in a batch on accelerators.

        Args:
            matrices: The full matrices, in ``comm_dtype``.
            group: The parameter group.

        Returns:
            One orthogonalized matrix per matrix, in ``ns_dtype``.
        """
        # Batched products of bf16 matrices take 9 times as long as single ones on CPU (4 of 256 x 512, torch 2.13).
        if len(matrices) == 1 or matrices[0].device.type == "cpu":
            return super().update_all(matrices, group)
        return self.update(torch.stack(list(matrices)), group).unbind()

    def apply(
        self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """Apply weight decay and the update to this rank's shard of a parameter, in place.

        Args:
            parameter: The shard, a plain tensor.
            update: The same shard of the orthogonalized matrix.
            shape: Shape of the full parameter.
            group: The parameter group.
        """
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):  # products are rounded to its dtype, as in torch.optim.Muon
            lr = lr.squeeze().to(parameter.device)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-float(lr * _rate(group["adjust_lr_fn"], shape)))

    def work(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """Return the number of multiplications in the Newton-Schulz steps.

        Args:
            shape: Shape of the full parameter.
            group: The parameter group.

        Returns:
            The number of multiplications.
        """
        rows, columns = max(shape), min(shape)
        return float(group["ns_steps"] * (2 * rows * columns**2 + columns**3))


def orthogonalize(
    matrices: torch.Tensor,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Push all singular values of matrices towards 1 by Newton-Schulz steps, and keep their singular vectors.

    Each step replaces the singular values s by ``a s + b s^3 + c s^5``. With the default coefficients they end between
    about 0.7 and 1.2, which trains as well as 1.

    Args:
        matrices: One matrix or a batch, shape (..., m, n), of any floating-point dtype. Not changed.
        coefficients: Coefficients a, b, c.
        steps: Number of steps.
        eps: Lower bound of the norm that a matrix is divided by first, so that no singular value exceeds 1.
        dtype: Dtype of the computation.

    Returns:
        A tensor of the same shape, in ``dtype``.
    """
    a, b, c = coefficients
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(dtype)
    if tall:  # use the smaller of its two Gram matrices
        x = x.mT
    norm = x.norm() if x.dim() == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _rate(adjust: str | None, shape: tuple[int, int]) -> float:
    """Return the factor of the learning rate for a matrix of that shape."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
