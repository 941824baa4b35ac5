"""Loss scaling for sharded gradients: all ranks skip a step, and back off, together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.comm.groups import device_for
from fullshard.errors import FullshardError

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """Gradient scaler for sharded gradients: ``torch.amp.GradScaler`` with one decision for all ranks.

    If a gradient is infinite or NaN on any rank, all ranks skip the optimizer step, and their scales stay equal.
    Gradients may be DTensors or plain tensors, dense or sparse, of any floating-point or complex dtype (also float16),
    on any device, and missing on some ranks. ``unscale_`` and ``step`` are collectives over the process group: one
    all-reduce of two numbers per optimizer and step.

    Args:
        device: Device type of the loss. "cuda" on a machine without such a device disables the scaler.
        init_scale: Initial scale of the loss. Must be equal on all ranks, like all other arguments.
        backoff_factor: Factor of the scale after a skipped step; below 1.
        growth_factor: Factor of the scale after ``growth_interval`` steps without a skipped one; above 1.
        growth_interval: Number of steps.
        enabled: If False, ``step`` steps the optimizer and all other methods do nothing.
        process_group: All ranks that hold a shard or a replica of the parameters; with HSDP, those of both mesh
            dimensions. None: all ranks, resolved at first use.

    Raises:
        TypeError: If ``process_group`` is not a process group that this rank belongs to.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import ShardedGradScaler, fully_shard

        model = fully_shard(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu")
        scaler.scale(model(torch.randn(4, 16)).sum()).backward()
        scaler.step(optimizer)  # skipped on all ranks if a gradient of any rank is infinite or NaN
        scaler.update()
        ```
    """

    process_group: dist.ProcessGroup | None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                "process_group: expected a torch.distributed.ProcessGroup that this rank belongs to, or None for all "
                f"ranks, found {type(process_group).__name__}; for a DeviceMesh, pass mesh.get_group()"
            )
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale gradients; called by ``unscale_`` and by optimizers with a scale of their own. A collective.

        Args:
            optimizer: The optimizer whose gradients are multiplied in place.
            inv_scale: The factor, a scalar.
            found_inf: Scalar that is set to 1 if any rank has a gradient that is not finite.
            allow_fp16: Ignored: gradients of parameters that are kept in float16 are valid.

        Returns:
            ``found_inf`` by its device; empty if no rank has a gradient.
        """
        group = self._group()
        flags: dict[torch.device, torch.Tensor] = {}
        with torch.no_grad():
            for (device, _), gradients in _local_gradients(optimizer).items():
                flag = flags.setdefault(device, torch.zeros((), device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(device))
        where = device_for(group, found_inf.device)
        # All ranks communicate, also those without gradients.
        report = torch.zeros(2, device=where)
        if flags:
            report[0] = torch.stack([flag.to(where) for flag in flags.values()]).amax()
            report[1] = 1
        dist.all_reduce(report, op=dist.ReduceOp.MAX, group=group)
        if not flags and not report[1].item():
            return {}
        found_inf.copy_(report[0])
        return {found_inf.device: found_inf}

    def _group(self) -> dist.ProcessGroup:
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        if group is None:
            raise FullshardError(
                "ShardedGradScaler: there is no process group for the all-reduce; call "
                "torch.distributed.init_process_group() first, pass process_group=, or use torch.amp.GradScaler"
            )
        return group


def _local_gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return this rank's gradients by device and dtype, as tensors that share memory with the gradients."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            if gradient.is_sparse:
                if gradient.dtype is torch.float16:
                    # Values of one index are summed later, which may overflow in float16.
                    gradient = parameter.grad = gradient.coalesce()
                gradient = gradient._values()
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient)
            found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return found
