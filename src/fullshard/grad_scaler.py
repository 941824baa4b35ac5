"""Loss scaling for sharded gradients: all ranks skip a step, and back off, together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.errors import FullshardError

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for gradients of which every rank has its own part.

    A gradient that is not finite is seen on all ranks, wherever it is: they skip the optimizer's step together and
    their scales stay equal. Gradients may be DTensors, plain or sparse, of any floating-point or complex dtype (also
    float16), on any device, and missing on some ranks. ``unscale_`` and ``step`` are collectives over the group, one
    all-reduce of two numbers per optimizer and step.

    Args:
        device: Type of the device that the loss is on. Any that torch knows; "cuda" where there is none disables the
            scaler.
        init_scale: Factor that losses are multiplied by at first. Has to be the same on all ranks, as everything else.
        backoff_factor: The scale is multiplied by it when a step was skipped; below 1.
        growth_factor: The scale is multiplied by it after ``growth_interval`` steps none of which was skipped; above 1.
        growth_interval: In steps.
        enabled: If not, ``step`` just steps, and all else does nothing.
        process_group: All ranks that have a part of the parameters or a replica of them: with a hybrid of sharding
            and replication those of both. None: all ranks, as they are when it is used first.

    Raises:
        TypeError: ``process_group`` is not a group that this rank belongs to.
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
                f"ranks, got {type(process_group).__name__}; of a DeviceMesh, pass mesh.get_group()"
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
        """What ``unscale_`` and optimizers with a scale of their own go through. All ranks have to come here.

        Args:
            optimizer: Whose gradients are multiplied in place.
            inv_scale: The factor, a scalar.
            found_inf: Scalar that becomes 1 if any rank has a gradient that is not finite.
            allow_fp16: Ignored: gradients of parameters that are kept in float16 are float16, and no mistake.

        Returns:
            ``found_inf`` under its device; nothing if no rank has a gradient.
        """
        group = self._group()
        flags: dict[torch.device, torch.Tensor] = {}
        with torch.no_grad():
            for (device, _), gradients in _local_gradients(optimizer).items():
                flag = flags.setdefault(device, torch.zeros((), device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(device))
        where = _communicates_on(group, found_inf.device)
        # Nothing here depends on which gradients this rank has: a rank without any takes part all the same.
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
                "ShardedGradScaler: there is no process group to agree over; call "
                "torch.distributed.init_process_group() first, pass process_group=, or use torch.amp.GradScaler"
            )
        return group


def _local_gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """What this rank has of the gradients, by device and dtype, as tensors whose memory is the gradients' own."""
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
                    # Values of one index are added up sooner or later, and in float16 that may well overflow.
                    gradient = parameter.grad = gradient.coalesce()
                gradient = gradient._values()
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient)
            found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return found


def _communicates_on(group: dist.ProcessGroup, preferred: torch.device) -> torch.device:
    """A device that ``group`` has a back end for: ``preferred`` if it does."""
    types = sorted(device.type for device in group._device_types)
    if preferred.type in types:
        return preferred
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())
