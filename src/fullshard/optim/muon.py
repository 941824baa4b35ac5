"""Muon: momentum, orthogonalised matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from fullshard.optim.owner import ROUND_BYTES, MatrixOptimizer

__all__ = ["Muon", "orthogonalise"]

Coefficients = tuple[float, float, float]
LearningRate = Literal["original", "match_rms_adamw"]

# Of https://kellerjordan.github.io/posts/muon/, and torch's defaults: steep at 0, not convergent, fast.
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
STEPS = 5
MAX_STEPS = 100


class Muon(MatrixOptimizer):
    """``torch.optim.Muon`` for sharded parameters: the same numbers, each matrix orthogonalised by one rank.

    What travels is bf16, to which Newton-Schulz rounds anyway: parameters end with the bits that an unsharded
    ``torch.optim.Muon`` gives them, if gradients have the same bits and kernels do not depend on the rank's hardware
    or number of threads. State dicts are interchangeable with it. See :class:`MatrixOptimizer` for which parameters
    it takes, and how they are spread over ranks.

    Args:
        params: 2-D parameters of hidden layers, or groups of them. Give others (biases, norms, embeddings, the output
            layer) to another optimizer.
        lr: Learning rate, a number or a tensor of one element.
        weight_decay: Parameters are multiplied by ``1 - lr * weight_decay`` in each step.
        momentum: Weight of the old momentum buffer in the new one.
        nesterov: Whether to look one momentum step ahead.
        ns_coefficients: a, b, c of the polynomial ``a x + b x^3 + c x^5`` of a Newton-Schulz step.
        eps: Smallest norm that a matrix is divided by.
        ns_steps: Newton-Schulz steps; below 100.
        adjust_lr_fn: How the rate depends on the shape (m, n). "original", or None: times ``sqrt(max(1, m / n))``;
            "match_rms_adamw": times ``0.2 sqrt(max(m, n))``, so that rates that were found for AdamW fit.
        wire_dtype: In which matrices travel to their owners, and updates back.
        round_bytes: See :class:`MatrixOptimizer`.

    Raises:
        ValueError: If a number is out of its range; see :class:`MatrixOptimizer` for more.
    """

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
        wire_dtype: torch.dtype = torch.bfloat16,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"lr: expected a number or a tensor of one element, found shape {tuple(lr.shape)}")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0:
                raise ValueError(f"{name}: expected a number that is not negative, found {value}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'adjust_lr_fn: expected "original", "match_rms_adamw" or None, found {adjust_lr_fn!r}')
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients: expected three numbers, found {ns_coefficients}")
        if not 0 <= ns_steps < MAX_STEPS:
            raise ValueError(f"ns_steps: expected 0 to {MAX_STEPS - 1}, found {ns_steps}")
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
        super().__init__(params, defaults, wire_dtype=wire_dtype, round_bytes=round_bytes)

    def prepare(self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """See :class:`MatrixOptimizer`: the momentum."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum, buffer = group["momentum"], state["momentum_buffer"]
        gradient = gradient.to(buffer.dtype)  # loading a state dict gives the buffer the parameter's dtype
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

    def update(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """See :class:`MatrixOptimizer`."""
        return orthogonalise(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def update_all(self, matrices: Sequence[torch.Tensor], group: dict[str, Any]) -> Sequence[torch.Tensor]:
        """See :class:`MatrixOptimizer`."""
        # Batched products of bf16 matrices take 9 times as long as single ones on CPU (4 of 256 x 512, torch 2.13).
        if len(matrices) == 1 or matrices[0].device.type == "cpu":
            return super().update_all(matrices, group)
        return self.update(torch.stack(list(matrices)), group).unbind()

    def apply(
        self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """See :class:`MatrixOptimizer`."""
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):  # whose products are rounded to its dtype, as in torch.optim.Muon
            lr = lr.squeeze().to(parameter.device)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-float(lr * _rate(group["adjust_lr_fn"], shape)))

    def work(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """See :class:`MatrixOptimizer`: multiplications of the Newton-Schulz steps."""
        rows, columns = max(shape), min(shape)
        return float(group["ns_steps"] * (2 * rows * columns**2 + columns**3))


def orthogonalise(
    matrices: torch.Tensor,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
) -> torch.Tensor:
    """Push all singular values of matrices towards 1 by Newton-Schulz steps in bf16, keeping singular vectors.

    Each step replaces the singular values s by ``a s + b s^3 + c s^5``. With the default coefficients they end between
    about 0.7 and 1.2, which serves as well as 1.

    Args:
        matrices: (..., m, n), any floating-point dtype; not changed.
        coefficients: a, b, c.
        steps: How many.
        eps: Smallest norm that a matrix is divided by at first, so that no singular value exceeds 1.

    Returns:
        The same shape, bf16.
    """
    a, b, c = coefficients
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(torch.bfloat16)
    if tall:  # the smaller of the two products with itself
        x = x.mT
    norm = x.norm() if x.dim() == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _rate(adjust: str | None, shape: tuple[int, int]) -> float:
    """What the learning rate of a matrix is multiplied by."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
