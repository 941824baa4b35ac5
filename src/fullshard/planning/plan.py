"""``plan``: memory and time of a training step of a model on a cluster, before the run."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from fullshard.composable.shard import shard
from fullshard.errors import FullshardError
from fullshard.planning.cluster import Cluster, cluster_of
from fullshard.planning.dry_run import Step, dry_run

__all__ = ["Choices", "Plan", "plan"]

GIB = 2**30
_SHOWN = 8


@dataclass(frozen=True)
class Choices:
    """How a model is sharded, as arguments of ``fullshard.shard``.

    Attributes:
        replicas: Ranks of the replicate axis; 1: sharded over all ranks.
        mixed_precision: ``"bf16"``, ``"fp16"`` or None.
        checkpoint_activations: Whether blocks are recomputed in backward.
        reshard_after_forward: As for ``fully_shard``.
        microbatches: Forwards and backwards of a step.
    """

    replicas: int = 1
    mixed_precision: str | None = None
    checkpoint_activations: bool = False
    reshard_after_forward: bool | int | None = None
    microbatches: int = 1

    def shard(self, model: nn.Module, ranks: int, device: str) -> nn.Module:
        """Shard a model over ranks."""
        if self.replicas == 1:
            mesh = init_device_mesh(device, (ranks,))
        else:
            mesh = init_device_mesh(
                device, (self.replicas, ranks // self.replicas), mesh_dim_names=("replicate", "shard")
            )
        return shard(
            model,
            mesh=mesh,
            mixed_precision=self.mixed_precision,  # type: ignore[arg-type]
            checkpoint_activations=self.checkpoint_activations,
            reshard_after_forward=self.reshard_after_forward,
            report=False,
        )

    def code(self, ranks: int) -> str:
        """Return the lines of Python that shard a model so."""
        lines, arguments = [], []
        if self.replicas > 1:
            shape = f"({self.replicas}, {ranks // self.replicas})"
            lines.append(f'mesh = init_device_mesh(device.type, {shape}, mesh_dim_names=("replicate", "shard"))')
            arguments.append("mesh=mesh")
        changed = (each for each in dataclasses.fields(self) if each.name not in ("replicas", "microbatches"))
        arguments += [
            f"{each.name}={getattr(self, each.name)!r}" for each in changed if getattr(self, each.name) != each.default
        ]
        return "\n".join([*lines, f"model = fullshard.shard({', '.join(['model', *arguments])})"])


@dataclass(frozen=True)
class Plan:
    """What a training step takes, by ``plan``.

    Attributes:
        model: Name of the model's class.
        parameters: Of the model.
        ranks: Of the job.
        cluster: The machine.
        choices: How the model is sharded.
        step: What the dry run found.
        assumptions: What was assumed, and may be otherwise.
    """

    model: str
    parameters: int
    ranks: int
    cluster: Cluster
    choices: Choices
    step: Step
    assumptions: Sequence[str] = field(default_factory=tuple)

    @property
    def allocated_bytes(self) -> int:
        """Most bytes of tensors on a rank at a time."""
        return self.step.peak.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the caching allocator of a GPU has taken from the device; those of tensors on a CPU."""
        return self.step.reserved if self.cluster.device != "cpu" else self.allocated_bytes

    @property
    def fits(self) -> bool:
        """True if that is less than the device has."""
        return self.reserved_bytes <= self.cluster.memory

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which a rank waits for communication, and computes nothing."""
        return sum(each.seconds for each in self.step.trace.exposed(0))

    @property
    def mfu(self) -> float:
        """Floating-point operations of the step, recomputed ones too, over those that the device is specified with."""
        return self.step.flops / self.step.seconds / max(self.cluster.flops.values())

    def table(self) -> str:
        """Return memory and time as text."""
        return "\n".join([*self._head(), "", *self._memory(), "", *self._time(), *self._notes()])

    def _head(self) -> Iterator[str]:
        nodes = -(-self.ranks // self.cluster.node)
        yield (
            f"{self.model}, {self.parameters / 1e9:,.2f} billion parameters, on {self.ranks} ranks of "
            f"{self.cluster.name} ({nodes} node{'s' * (nodes > 1)})"
        )
        yield self.choices.code(self.ranks)

    def _memory(self) -> Iterator[str]:
        peak = self.step.peak
        phase, unit = peak.where
        place = f"the {phase} of {unit or 'the root'}" if phase in ("forward", "backward") else f"the {phase}"
        yield f"Memory of a rank at its peak, in {place}, GiB"
        for kind, nbytes in peak.parts.items():
            if nbytes > 0.001 * peak.nbytes:
                yield f"{nbytes / GIB:>10.2f}  {kind}"
        yield f"{peak.nbytes / GIB:>10.2f}  allocated"
        if self.cluster.device != "cpu":
            fits = "fits into" if self.fits else "DOES NOT FIT into"
            yield f"{self.reserved_bytes / GIB:>10.2f}  reserved: {fits} {self.cluster.memory / GIB:.1f}"
        yield f"{self.step.resting / GIB:>10.2f}  between steps"

    def _time(self) -> Iterator[str]:
        step = self.step
        yield "Time of a step, ms"
        yield f"{1e3 * step.seconds:>10.1f}  step; {100 * self.mfu:.1f} % of the device's operations per second"
        yield f"{1e3 * step.computation:>10.1f}  computation"
        yield f"{1e3 * self.exposed_seconds:>10.1f}  communication that nothing hides:"
        for each in step.trace.exposed(0)[:_SHOWN]:
            if each.seconds > 0.001 * step.seconds:
                why = "issued as it was needed" if each.late_issue > each.seconds / 2 else "slower than what hides it"
                name = f"{each.kind.replace('_', '-')} of {each.units or 'the root'}"
                yield f"{1e3 * each.seconds:>10.2f}    {name} ({why})"

    def _notes(self) -> Iterator[str]:
        for each in self.assumptions:
            yield f"Assumed: {each}"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as values that JSON can hold."""
        peak = self.step.peak
        return {
            "model": self.model,
            "parameters": self.parameters,
            "ranks": self.ranks,
            "cluster": dataclasses.asdict(self.cluster),
            "choices": dataclasses.asdict(self.choices),
            "memory": {
                "allocated": self.allocated_bytes,
                "reserved": self.reserved_bytes,
                "resting": self.step.resting,
                "fits": self.fits,
                "where": list(peak.where),
                "parts": dict(peak.parts),
            },
            "time": {
                "step": self.step.seconds,
                "computation": self.step.computation,
                "exposed": self.exposed_seconds,
                "flops": self.step.flops,
            },
            "assumptions": list(self.assumptions),
        }

    def save(self, folder: str | Path) -> None:
        """Write ``plan.json`` and ``plan.txt`` to a folder, which is made if it does not exist.

        Args:
            folder: Where to.

        Raises:
            OSError: If they cannot be written.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "plan.json").write_text(json.dumps(self.to_json(), indent=1))
        (path / "plan.txt").write_text(self.table() + "\n")


def plan(
    model: nn.Module,
    batch: Any,
    *,
    ranks: int,
    cluster: str | Path | Cluster = "h100",
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    choices: Choices | Mapping[str, Any] | None = None,
) -> Plan:
    """Predict memory and time of a training step, without running it.

    The engine runs on the meta device, where tensors have no memory: what it allocates and frees is counted, and its
    schedule takes the time that the cluster's figures give. No process group, GPU or data is needed. The model stays as
    it is.

    Args:
        model: On the meta device, unsharded.
        batch: What its forward takes, for one rank and one microbatch: a tensor, a tuple of arguments, or a dict of
            them by name. Only shapes and dtypes are used.
        ranks: Of the job.
        cluster: Name of a preset (``"h100"``, ``"h200"``, ``"a100"``, ``"b200"``, ``"cpu"``), a TOML file with the
            attributes of ``Cluster``, or that itself.
        loss: Returns the loss from what the model returns. None: what the model returns, if it is a loss, or its
            attribute ``loss``; else the mean of it.
        optimizer: Called with the parameters.
        choices: How the model is sharded: ``Choices``, or a dict of its attributes.

    Returns:
        The plan.

    Raises:
        FullshardError: If the model is not on the meta device, or needs values to run; if there is a process group; or
            if the cluster is not known.
        ValueError: If the ranks cannot be divided by the replicas.

    Example:
        ```python
        import torch
        from torch import nn

        import fullshard

        with torch.device("meta"):
            layer = nn.TransformerEncoderLayer(1024, 16, batch_first=True)
            model = nn.TransformerEncoder(layer, num_layers=8, enable_nested_tensor=False)
        plan = fullshard.plan(model, torch.empty(4, 512, 1024, device="meta"), ranks=64)
        print(plan.table())
        ```
    """
    found = cluster_of(cluster)
    chosen = choices if isinstance(choices, Choices) else Choices(**(choices or {}))
    _check(model, ranks, chosen)
    arguments = tree_map_only(Tensor, lambda t: t.detach().to("meta"), batch)
    assumptions: list[str] = []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        sharded = chosen.shard(copy.deepcopy(model), ranks, "meta")
        return sharded, optimizer(sharded.parameters())

    def compute(sharded: nn.Module) -> Tensor:
        output = sharded(**arguments) if isinstance(arguments, dict) else sharded(*_as_tuple(arguments))
        return loss(output) if loss is not None else _loss_of(output, assumptions)

    step = dry_run(build, compute, cluster=found, ranks=ranks, microbatches=chosen.microbatches)
    if step.unknown:
        assumptions.append(f"{', '.join(step.unknown)} take the time of the bytes that they read and write")
    numel = sum(parameter.numel() for parameter in model.parameters())
    return Plan(type(model).__name__, numel, ranks, found, chosen, step, tuple(dict.fromkeys(assumptions)))


def _check(model: nn.Module, ranks: int, choices: Choices) -> None:
    elsewhere = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if not each.is_meta]
    if elsewhere:
        raise FullshardError(
            f"plan: expected a model on the meta device, found {len(elsewhere)} parameters and buffers elsewhere "
            f"({', '.join(elsewhere[:3])}...); build it in `with torch.device('meta'):`"
        )
    if ranks < 1 or choices.replicas < 1 or ranks % choices.replicas:
        raise ValueError(f"plan: expected ranks that are a multiple of replicas, found {ranks} and {choices.replicas}")


def _as_tuple(arguments: Any) -> tuple[Any, ...]:
    return tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)


def _loss_of(output: Any, assumptions: list[str]) -> Tensor:
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if found is None and isinstance(output, Tensor) and not output.dim():
        found = output
    if isinstance(found, Tensor):
        return found
    first = next((each for each in _as_tuple(output) if isinstance(each, Tensor) and each.is_floating_point()), None)
    first = getattr(output, "logits", first)
    if not isinstance(first, Tensor):
        raise FullshardError(f"plan: expected a model that returns tensors, found {type(output).__name__}; pass loss=")
    assumptions.append("the loss is the mean of what the model returns, in fp32; pass loss= for another one")
    return first.float().mean()
