"""``plan``: memory and time of a training step of a model on a cluster, before the run."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fullshard.errors import FullshardError
from fullshard.frontend.arguments import default_mesh
from fullshard.planning.choices import Choices
from fullshard.planning.cluster import Cluster, cluster_of
from fullshard.planning.dry_run import Step, dry_run
from fullshard.planning.planned_step import PlannedStep
from fullshard.planning.report import draw, table
from fullshard.planning.search import Alternative, search
from fullshard.wrap.plan import ShardingPlan

__all__ = ["Plan", "plan"]

_Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Plan(PlannedStep, ShardingPlan):
    """Memory and time of a training step, as ``plan`` predicts them.

    It is taken by ``fully_shard(model, policy=plan)`` and ``fullshard.shard(model, plan=plan)``, which shard the model
    as the plan says.
    """

    def table(self) -> str:
        """Return memory and time as text, and what other choices would change."""
        return table(self)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model as the plan says, over the ranks of the default process group.

        Microbatches, and optimizer state in CPU memory, are left to the training loop; a warning says so.

        Args:
            model: The model that was planned, unsharded.

        Returns:
            The same model.

        Raises:
            FullshardError: If it is another model, or the job has another number of ranks.
        """
        numel = sum(parameter.numel() for parameter in model.parameters())
        if (type(model).__name__, numel) != (self.model, self.parameters):
            raise FullshardError(
                f"plan: expected the planned model, {self.model} with {self.parameters:,} parameters, found "
                f"{type(model).__name__} with {numel:,}"
            )
        mesh = default_mesh()
        if mesh.size() != self.ranks:
            raise FullshardError(
                f"plan: expected a job of {self.ranks} ranks, as planned, found {mesh.size()}; plan again"
            )
        sharded = self.choices.shard(model, self.ranks, mesh.device_type)
        left = [f"{self.choices.microbatches} microbatches"] * (self.choices.microbatches > 1)
        left += ["fullshard.optim.offload(optimizer)"] * self.choices.offload_optimizer
        if left:
            warnings.warn(f"the plan also has {' and '.join(left)}, which are not the model's", stacklevel=3)
        return sharded

    def save(self, folder: str | Path) -> None:
        """Write ``plan.json``, ``plan.txt`` and a picture, ``plan.png``, to a folder, which is made if necessary.

        Args:
            folder: Where to.

        Raises:
            OSError: If they cannot be written.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "plan.json").write_text(json.dumps(self.to_json(), indent=1))
        (path / "plan.txt").write_text(self.table() + "\n")
        draw(self, path / "plan.png")


def plan(
    model: nn.Module,
    batch: Any,
    *,
    ranks: int,
    cluster: str | Path | Cluster = "h100",
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: _Optimizer = torch.optim.AdamW,
    choices: Choices | Mapping[str, Any] | None = None,
    search: bool = False,
) -> Plan:
    """Predict memory and time of a training step, without running it; and find the choices with which it is fastest.

    The engine runs on the meta device, where tensors have no memory: what it allocates and frees is counted, and its
    schedule takes the time that the cluster's figures give. No process group, GPU or data is needed. The model stays as
    it is.

    Args:
        model: On the meta device, unsharded.
        batch: What its forward takes on one rank in a step: a tensor, a tuple of arguments, or a dict of them by name.
            Only shapes and dtypes are used. Several microbatches are equal parts of it, along the first dimension.
        ranks: Of the job.
        cluster: Name of a preset (``"h100"``, ``"h200"``, ``"a100"``, ``"b200"``, whose network between nodes is AWS
            EFA; the same with ``"-infiniband"``; ``"cpu"``), a TOML file with the attributes of ``Cluster``, or that
            itself.
        loss: Returns the loss from what the model returns. None: what the model returns, if it is a loss, or its
            attribute ``loss``; else the mean of it.
        optimizer: Called with the parameters.
        choices: How the model is sharded: ``Choices``, or a dict of some of its attributes.
        search: Look for the fastest choices that fit into memory, and say what each of them would change. Those in a
            dict ``choices`` stay as they are; precision does too, since it changes results.

    Returns:
        The plan.

    Raises:
        FullshardError: If the model is not on the meta device, or needs values to run; if there is a process group; or
            if the cluster is not known.
        TypeError: If there is no choice of such a name.
        ValueError: If the ranks cannot be divided by the replicas, or the batch by the microbatches.

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
    fixed = dict(dataclasses.asdict(choices) if isinstance(choices, Choices) else choices or {})
    base = Choices(**fixed)
    if search and isinstance(choices, Choices):
        raise ValueError("plan: search: expected choices as a dict of those that stay, found Choices, which are all")
    _check(model, ranks, base)
    planner = _Planner(
        model, tree_map_only(Tensor, lambda t: t.detach().to("meta"), batch), ranks, found, loss, optimizer
    )
    if search:
        base, step, alternatives = _searched(planner, base, fixed)
    else:
        step, alternatives = planner.step(planner.model, base), ()
    if step.autocast:
        planner.assumed("torch.autocast in the model has no effect; choose mixed_precision instead")
    group = ranks // base.replicas
    if group > 1 and max(group, found.node) % min(group, found.node):
        planner.assumed(f"all groups of {group} ranks lie on nodes of {found.node} as that of rank 0 does")
    if base.microbatches > 1:
        planner.assumed(
            f"tensors whose first dimension is {planner.rows} are cut into {base.microbatches} microbatches"
        )
    if step.unknown:
        planner.assumed(f"{', '.join(step.unknown)} take the time of the bytes that they read and write")
    kept = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if found.device != "cpu" and base.mixed_precision is None and not kept:
        planner.assumed("computation is in float32; choices={'mixed_precision': 'bf16'} computes in bfloat16")
    for dtype in sorted(map(str, kept)):
        planner.assumed(f"shards and optimizer state are kept in {dtype.removeprefix('torch.')}, as parameters are")
    if found.calibrated and found.calibrated != ranks:
        planner.assumed(f"{ranks} ranks compute as fast as {found.calibrated} did in the calibration")
    most = max(found.outer, default=0)
    if ranks > most * found.node > 0:
        planner.assumed(f"beyond the {most} nodes whose network is known, latency grows as the number of nodes does")
    numel = sum(parameter.numel() for parameter in model.parameters())
    return Plan(
        type(model).__name__,
        numel,
        ranks,
        planner.rows,
        planner.tokens,
        found,
        base,
        step,
        alternatives,
        tuple(planner.assumptions),
    )


def _searched(
    planner: _Planner, base: Choices, fixed: Mapping[str, Any]
) -> tuple[Choices, Step, Sequence[Alternative]]:
    return search(planner.model, base, fixed, planner.step, planner.cluster, planner.ranks, planner.rows)


@dataclass
class _Planner:
    """Plans one model with any choices.

    Args:
        model: As given.
        batch: On the meta device.
        ranks: Of the job.
        cluster: The machine.
        loss: As given.
        optimizer: As given.
    """

    model: nn.Module
    batch: Any
    ranks: int
    cluster: Cluster
    loss: Callable[[Any], Tensor] | None
    optimizer: _Optimizer
    assumptions: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Size of the first dimension of the batch."""
        return next((leaf.shape[0] for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)

    @property
    def tokens(self) -> int:
        """Token ids of the batch, ``(rows, sequence)`` of integers; 0 if it has none."""
        leaves = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor) and leaf.dim() == 2]
        return next((leaf.numel() for leaf in leaves if not leaf.is_floating_point()), 0)

    def assumed(self, text: str) -> None:
        """Note an assumption, once."""
        if text not in self.assumptions:
            self.assumptions.append(text)

    def step(self, model: nn.Module, choices: Choices) -> Step:
        """Run a step of a model, the given one or a shorter one."""
        arguments = self._microbatch(choices.microbatches)

        def build() -> tuple[nn.Module, torch.optim.Optimizer]:
            sharded = choices.shard(copy.deepcopy(model), self.ranks, "meta")
            return sharded, self.optimizer(sharded.parameters())

        def compute(sharded: nn.Module) -> Tensor:
            output = sharded(**arguments) if isinstance(arguments, dict) else sharded(*_as_tuple(arguments))
            return self.loss(output) if self.loss is not None else self._loss_of(output)

        return dry_run(
            build, compute, cluster=self.cluster, ranks=self.ranks, microbatches=choices.microbatches,
            offload_optimizer=choices.offload_optimizer,
        )  # fmt: skip

    def _microbatch(self, count: int) -> Any:
        rows = self.rows
        if rows % count:
            raise ValueError(
                f"plan: expected a batch that can be divided into {count} microbatches, found {rows} rows on each rank"
            )
        if count == 1:
            return self.batch
        return tree_map_only(Tensor, lambda t: t[: rows // count] if t.dim() and t.shape[0] == rows else t, self.batch)

    def _loss_of(self, output: Any) -> Tensor:
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, dict):
            found = output.get("loss")
        if found is None and isinstance(output, Tensor) and not output.dim():
            found = output
        if isinstance(found, Tensor):
            return found
        first = next((t for t in _as_tuple(output) if isinstance(t, Tensor) and t.is_floating_point()), None)
        first = getattr(output, "logits", first)
        if not isinstance(first, Tensor):
            raise FullshardError(
                f"plan: expected a model that returns tensors, found {type(output).__name__}; pass loss="
            )
        self.assumed("the loss is the mean of what the model returns, in fp32; pass loss= for another one")
        return first.float().mean()


def _check(model: nn.Module, ranks: int, choices: Choices) -> None:
    elsewhere = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if not each.is_meta]
    if elsewhere:
        raise FullshardError(
            f"plan: expected a model on the meta device, found {len(elsewhere)} parameters and buffers elsewhere "
            f"({', '.join(elsewhere[:3])}...); build it in `with torch.device('meta'):`"
        )
    if ranks < 1 or ranks % choices.replicas:
        raise ValueError(f"plan: expected ranks that are a multiple of replicas, found {ranks} and {choices.replicas}")


def _as_tuple(arguments: Any) -> tuple[Any, ...]:
    return tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)
