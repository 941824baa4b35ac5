"""The modules that a model plan describes, in fp64; none of them knows about sharding.

With one exception, which is what the libraries do that read weights: a weight that is seen sharded is unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import layer_norm
from torch.utils.checkpoint import checkpoint

from containers import pack, tensors_of
from fuzz.plan import BlockPlan, ModelPlan

FEATURES = 6  # of an input that is no token ids
VOCABULARY = 13


class Sizes:
    """Of activations (batch, steps, dim), and of what a block computes in between."""

    def __init__(self, plan: ModelPlan) -> None:
        # 24 x 1024 fp64 numbers are 64 KiB on each of 3 ranks; 8 rows that 3 ranks cannot share evenly, and 5 columns.
        self.steps, self.dim, self.hidden = (24, 1024, 24) if plan.large else (3, 8, 5)


class Block(nn.Module):
    """See ``BlockPlan``. Takes, and adds to, activations of shape (batch, steps, dim)."""

    def __init__(self, plan: BlockPlan, sizes: Sizes) -> None:
        super().__init__()
        self.plan, self.rank = plan, 0
        KINDS[plan.kind](self, sizes)
        self.inner = nn.ModuleList(Block(inner, sizes) for inner in plan.inner)

    def forward(self, x: Any) -> Any:
        (x,) = tensors_of(x)[:1]
        if self.plan.checkpoint.startswith("inside"):
            x = checkpoint(self.body, x, use_reentrant=self.plan.checkpoint.endswith("reentrant"))
        else:
            x = self.body(x)
        return pack(self.plan.output, x, x.square().mean())

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = getattr(self, f"_{self.plan.kind}")(x)
        if hasattr(self, "adapter"):
            x = x + self.adapter(x)
        for block in self.inner:
            x = call(block, x)
        return x

    # ---------------------------------------------------------------- kinds

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def _tied(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.first(x)) * self.second(torch.sin(x)))

    def _views(self, x: torch.Tensor) -> torch.Tensor:
        both = self.first.view(1, -1) + self.second.view(1, -1)
        return x + torch.tanh(both).view(x.shape[1:])

    def _positions(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position.unsqueeze(0) + self.other.unsqueeze(0)

    def _scalar(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.tanh(self.gain)) + self.bias + self.shift * 0.5

    def _small(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.gain * self.first.sum() + self.second.sum() + self.shift
        return x + torch.tanh(scale) * self.bias + self.third.square().sum()

    def _dtypes(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.tanh(self.scale.to(x.dtype))) + self.bias

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh((self.odd if self.rank % 2 else self.even)(x)))

    def _empty(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def _weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(shape, dtype=dtype))


def _mlp(block: Block, sizes: Sizes) -> None:
    block.up = nn.Linear(sizes.dim, sizes.hidden)
    block.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)


def _norm(block: Block, sizes: Sizes) -> None:
    block.norm = nn.LayerNorm(sizes.dim)
    _mlp(block, sizes)
    block.unused = nn.Linear(3, 2)


def _tied(block: Block, sizes: Sizes) -> None:
    block.first = nn.Linear(sizes.dim, sizes.hidden)
    block.second = nn.Linear(sizes.dim, sizes.hidden, bias=False)
    block.second.weight = block.first.weight
    block.down = nn.Linear(sizes.hidden, sizes.dim)


def _views(block: Block, sizes: Sizes) -> None:
    block.first, block.second = (_weight(sizes.steps * sizes.dim) for _ in range(2))


def _positions(block: Block, sizes: Sizes) -> None:
    block.position, block.other = (_weight(sizes.steps, sizes.dim) for _ in range(2))


def _scalar(block: Block, sizes: Sizes) -> None:
    block.gain, block.bias, block.shift = _weight(), _weight(sizes.dim), _weight()


def _small(block: Block, sizes: Sizes) -> None:
    block.first, block.gain, block.bias = _weight(2, 3), _weight(), _weight(sizes.dim)
    block.second, block.shift, block.third = _weight(3), _weight(), _weight(5)


def _dtypes(block: Block, sizes: Sizes) -> None:
    block.scale, block.bias = _weight(sizes.dim, dtype=torch.float32), _weight(sizes.dim)


def _branch(block: Block, sizes: Sizes) -> None:
    _mlp(block, sizes)
    del block.up
    block.even, block.odd = (nn.Linear(sizes.dim, sizes.hidden) for _ in range(2))


def _empty(block: Block, sizes: Sizes) -> None:
    pass


KINDS: dict[str, Callable[[Block, Sizes], None]] = {
    "mlp": _mlp,
    "norm": _norm,  # and a layer that is never called
    "tied": _tied,
    "views": _views,  # whose gradients autograd gives one memory
    "positions": _positions,  # whose gradients share memory with that of the input, if there is one row
    "scalar": _scalar,  # 0-D
    "small": _small,  # the same between others with gaps behind them
    "dtypes": _dtypes,  # fp32 beside fp64
    "branch": _branch,  # which parameters are used depends on the rank
    "empty": _empty,
}


def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The block's tensor, as its plan says."""
    plan: BlockPlan = block.plan
    for _ in range(plan.calls):
        if plan.detach == "input":
            x = x.detach()
        if plan.checkpoint.startswith("outside"):
            output = checkpoint(block, x, use_reentrant=plan.checkpoint.endswith("reentrant"))
        else:
            output = block(x)
        x = tensors_of(output)[0]
        if plan.detach == "output":
            x = x.detach()
    return x


def toggled(block: nn.Module, x: torch.Tensor, how: str) -> torch.Tensor:
    """The block's tensor, while flags of its parameters change.

    ``how``: "restored": it also runs frozen and without gradients, as the reference of a preference loss does.
    "objects": the same, with the parameter objects that it held before. "left": and stays frozen. "after": it runs, and
    is frozen then.
    """
    before = list(block.parameters())
    flags = [parameter.requires_grad for parameter in before]
    if how == "after":
        x = call(block, x)
        block.requires_grad_(False)
        return x
    block.requires_grad_(False)
    try:
        with torch.no_grad():
            frozen = call(block, x)
    finally:
        if how != "left":
            for parameter, flag in zip(before if how == "objects" else block.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)
    return call(block, x) + 0.5 * torch.tanh(frozen)


def adapter(dim: int, seed: int) -> nn.Module:
    """A low-rank adapter."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False))
    return made.to(torch.float64)


class Root(nn.Module):
    """See ``ModelPlan``. Returns logits of shape (batch, steps, vocabulary), and in containers the last activation."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        sizes = Sizes(plan)
        self.plan = plan
        if plan.tokens:
            self.embedding = nn.Embedding(VOCABULARY, sizes.dim)
        else:
            self.entry = nn.Linear(FEATURES, sizes.dim)
        self.blocks = nn.ModuleList(Block(block, sizes) for block in plan.blocks)
        if plan.again >= 0 and plan.blocks:
            self.again = self.blocks[plan.again % len(plan.blocks)]
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, VOCABULARY, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        run: Sequence[int] | None = None,
        toggle: tuple[int, str] | None = None,
        hidden: bool = False,
    ) -> Any:
        """Compute logits.

        Args:
            x: Features, or token ids.
            run: Numbers of the blocks to run, in this order; None: all of them, once.
            toggle: Number of the block whose flags change, and how: see ``toggled``.
            hidden: Return what the head takes instead of logits.
        """
        x = self.embedding(x) if self.plan.tokens else self.entry(x)
        count = len(self.blocks)
        for index in range(count) if run is None else [number % count for number in run if count]:
            block = self.blocks[index]
            x = call(block, x) if toggle is None or toggle[0] % count != index else toggled(block, x, toggle[1])
        if hasattr(self, "again"):
            x = call(self.again, x)
        if hidden:
            return pack(self.plan.output, self.norm(x), layer_norm(x, x.shape[-1:]))
        if self.plan.head == "read":
            hidden = self.norm(x)
            weight = self.head.weight
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            logits = hidden @ weight.t()
        else:
            logits = self.head(self.norm(x))
        return pack(self.plan.output, logits * x.shape[-1] ** -0.5, layer_norm(x, x.shape[-1:]))


def build(plan: ModelPlan, seed: int) -> Root:
    """The model, with values that depend on the seed only."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Root(plan)
    finally:
        torch.set_default_dtype(before)
    if plan.tied_head and plan.tokens:
        model.head.weight = model.embedding.weight
    if plan.tied_blocks:
        holders = [module for module in model.modules() if isinstance(module, Block) and hasattr(module, "up")]
        if len(holders) > 1:
            holders[-1].up.weight = holders[0].up.weight
    for module in model.modules():
        if isinstance(module, Block) and module.plan.frozen:
            own = list(module.parameters())
            for parameter in own if module.plan.frozen == "all" else own[:1]:
                parameter.requires_grad_(False)
    return model


def set_rank(model: nn.Module, rank: int) -> None:
    """Tell the blocks whose computation depends on the rank on which they run."""
    for module in model.modules():
        if isinstance(module, Block):
            module.rank = rank
