"""What a history is, as data: the model, how it is sharded, the optimizer, and the operations, in this order.

Nothing here runs anything. Plans are values: they can be compared, printed, sent to other processes, and made smaller
one field at a time (see ``fuzz.shrink``). The defaults of all fields are the simplest choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BlockPlan:
    """One block: what it computes from its input, and how it is called.

    Args:
        kind: Which parameters it has and what it does with them: a key of ``fuzz.models.KINDS``.
        unit: Whether it is a unit of its own.
        calls: How often it is called in a forward.
        output: In what it returns its tensor: a key of ``containers.CONTAINERS``.
        checkpoint: Activation checkpointing: "" none, else "inside" (of the block's forward) or "outside" (around its
            call), each alone or with " reentrant".
        frozen: Which parameters are frozen at first: "" none, "some", "all".
        detach: What is detached: "" nothing, "input", "output".
        compiled: Back end of torch.compile; "" not compiled.
        inner: Nested blocks, called one after the other on what the block has computed.
    """

    kind: str = "mlp"
    unit: bool = False
    calls: int = 1
    output: str = "tensor"
    checkpoint: str = ""
    frozen: str = ""
    detach: str = ""
    compiled: str = ""
    inner: tuple[BlockPlan, ...] = ()


@dataclass(frozen=True)
class ModelPlan:
    """A root: an entry layer or embedding, blocks, a norm and a head.

    Args:
        blocks: In the order of their calls.
        large: Whether activations and most parameters have at least 64 KiB per rank, so that they travel directly.
        batch: Rows of the input.
        tokens: Whether the input is token ids, for an embedding.
        tied_blocks: Whether the first and the last block with a weight ``up`` have the same one.
        tied_head: Whether the head's weight is the embedding's.
        again: The number of the block that is registered a second time, and called at the end; -1: none.
        head: "called", or "read": the forward of the root reads its weight and does not call it.
        head_unit: Whether norm and head are one unit of two modules.
        block_unit: Whether the first two blocks are one unit of two modules.
        output: In what the root returns its tensors: a key of ``containers.CONTAINERS``.
    """

    blocks: tuple[BlockPlan, ...] = (BlockPlan(),)
    large: bool = False
    batch: int = 2
    tokens: bool = False
    tied_blocks: bool = False
    tied_head: bool = False
    again: int = -1
    head: str = "called"
    head_unit: bool = False
    block_unit: bool = False
    output: str = "tensor"


@dataclass(frozen=True)
class FrontEnd:
    """How a model is sharded.

    Args:
        name: "fully_shard", "replicate" or "wrapper".
        mesh: Its shape; two sizes: (replicate, shard).
        reshard: ``reshard_after_forward`` of ``fully_shard``.
        strategy: Of the wrapper: name of a ``ShardingStrategy``.
        orig: ``use_orig_params`` of the wrapper.
        prefetch: ``backward_prefetch`` of the wrapper: "BACKWARD_PRE", "BACKWARD_POST" or "".
        offload: Whether shards, and gradients, are offloaded to the CPU.
        columns: Whether matrices are cut along their last dimension.
        ragged: Whether the layout is "ragged"; then ``columns`` does not count.
        keep: ``set_reshard_after_backward(False)``.
        fp16: Whether gradients are reduced in fp16, and not in the parameters' dtypes.
        tiny: Whether tiny units travel with their neighbors.
        direct_bytes: Smallest piece that travels directly; 0: as usual.
    """

    name: str = "fully_shard"
    mesh: tuple[int, ...] = (2,)
    reshard: bool | int | None = None
    strategy: str = "FULL_SHARD"
    orig: bool = True
    prefetch: str = "BACKWARD_PRE"
    offload: bool = False
    columns: bool = False
    ragged: bool = False
    keep: bool = False
    fp16: bool = False
    tiny: bool = False
    direct_bytes: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        size = 1
        for axis in self.mesh:
            size *= axis
        return size

    @property
    def flat(self) -> bool:
        """Whether the user sees flat parameters."""
        return self.name == "wrapper" and not self.orig

    @property
    def shows_whole(self) -> bool:
        """Whether the root's parameters are unsharded from a forward to its backward."""
        if self.name == "wrapper":
            return not self.orig or self.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
        return self.reshard is None or self.reshard is False

    @property
    def shows_without_gradients(self) -> bool:
        """Whether they are after a forward without gradients too."""
        return self.shows_whole and (self.name != "wrapper" or not self.orig)


@dataclass(frozen=True)
class OptimizerPlan:
    """Which optimizer steps, and how.

    Args:
        name: "sgd", "momentum", "adamw" or "muon" (for matrices; others are left to "sgd").
        mode: "plain", which steps local tensors, or "dtensors".
    """

    name: str = "sgd"
    mode: str = "plain"


@dataclass(frozen=True)
class Operation:
    """One thing that is done to both models.

    Args:
        name: Of a method of ``fuzz.operations.Operations``.
        data: Which batches it sees: every operation has its own, so that leaving one out changes no other.
        arguments: What else the method wants.
    """

    name: str
    data: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = "".join(f", {key}={value!r}" for key, value in self.arguments.items())
        return f"{self.name}({self.data}{given})"


@dataclass(frozen=True)
class HistoryPlan:
    """Everything that a history is made from.

    Args:
        seed: From which it was drawn, and from which initial values and batches are.
    """

    seed: int = 0
    model: ModelPlan = ModelPlan()
    front_end: FrontEnd = FrontEnd()
    optimizer: OptimizerPlan = OptimizerPlan()
    operations: tuple[Operation, ...] = ()

    @property
    def loss_scale(self) -> float:
        """By which losses are multiplied, and learning rates divided, as users do whose gradients are reduced in fp16.

        Those of large models, whose losses are means of many elements, would be lost: each call adds a part that is
        rounded to zero.
        """
        return 256.0 if self.front_end.fp16 and self.model.large else 1.0

    def describe(self) -> str:
        """The plan as text, without what is as simple as can be."""
        lines = [f"seed {self.seed}", *map(_short, (self.front_end, self.optimizer, self.model))]
        lines += [f"operation {index}: {operation}" for index, operation in enumerate(self.operations)]
        return "\n".join(lines)


def every_block(plan: ModelPlan) -> Iterator[BlockPlan]:
    """All blocks, nested ones as well."""
    stack = list(plan.blocks)
    while stack:
        block = stack.pop(0)
        yield block
        stack = [*block.inner, *stack]


def _short(value: Any) -> str:
    """As ``repr``, without fields that are as simple as can be."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    held = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    shown = [f"{name}={_short(found)}" for name, (found, simple) in held.items() if found != simple]
    return f"{type(value).__name__}({', '.join(shown)})"
