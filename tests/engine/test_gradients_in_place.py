"""``set_write_gradients_in_place``: weight gradients of Linear layers that backward writes where they are sent."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import jvp, vmap
from torch.utils.checkpoint import checkpoint

from compare import assert_close, assert_equal
from front_ends import full_gradients
from fullshard import CPUOffloadPolicy, FSDPModule, FullshardError, MixedPrecisionPolicy, fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.parameters.linear_weight import LinearWeight
from fullshard.engine.reduction.plan import Gradients, ReductionMessage
from models import batch
from ranks import Rank, on_ranks


class Block(nn.Module):
    """Two Linear layers, and other parameters between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 3 * width),
            nn.LayerNorm(3 * width),
            nn.Linear(3 * width, width),
        )
        self.down.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        return x + self.down(self.norm(self.up(x)).relu())


class Model(nn.Module):
    """Blocks in a list."""

    def __init__(self, block: Callable[[], nn.Module] = Block, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block after another; those that are reduced twice, twice."""
        if not isinstance(self.blocks[0], ReducedTwice):
            for block in self.blocks:
                x = block(x)
            return x
        for call in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, call, use_reentrant=True)
        return x


def shard(model: nn.Module, rank: Rank, *, in_place: bool, **options: Any) -> Any:
    """Shard a model by blocks."""
    options = {"mesh": rank.mesh, "layout": "ragged", **options}
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    sharded = fully_shard(model, **options)
    sharded.set_write_gradients_in_place(in_place)
    return sharded


def pair(rank: Rank, block: Callable[[], nn.Module] = Block, **options: Any) -> tuple[Any, Any]:
    """A model whose gradients are written in place, and the same one whose are copied."""
    torch.manual_seed(3)
    model = Model(block).to(rank.device)
    other = copy.deepcopy(model)
    return shard(model, rank, in_place=True, **options), shard(other, rank, in_place=False, **options)


@contextmanager
def written() -> Iterator[list[int]]:
    """How many gradients lay in their places, in each reduction of a message that took some."""
    seen: list[int] = []
    end_taking = ReductionMessage.end_taking

    def noting(message: ReductionMessage, gradients: Gradients, user: Any) -> frozenset[int]:
        took = bool(message._given)
        in_place = end_taking(message, gradients, user)
        if took:
            seen.append(len(in_place))
        return in_place

    ReductionMessage.end_taking = noting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        ReductionMessage.end_taking = end_taking  # type: ignore[method-assign]


def compare(
    models: tuple[Any, Any],
    rank: Rank,
    backward: Callable[[Any, torch.Tensor], None],
    expected: list[int] | None,
    rtol: float = 0.0,
) -> None:
    """Require equal gradients in three steps, bit by bit unless ``rtol``, and so many gradients in place in each."""
    for step in range(3):
        x = batch(rank.rank, step, 4, 8).to(rank.device)
        with written() as seen:
            backward(models[0], x)
        assert expected is None or seen == expected, (step, seen)
        with written() as seen:
            backward(models[1], x)
        assert not seen
        ours, theirs = full_gradients(models[0]), full_gradients(models[1])
        assert any(gradient is not None for gradient in ours.values())
        if not rtol:
            assert_equal(ours, theirs, f"gradients of step {step}")
        for name, gradient in ours.items():
            other = theirs[name]
            assert (gradient is None) is (other is None), name
            if gradient is not None and other is not None:
                assert_close(gradient, other, name, rtol, rtol)
        for model in models:
            model.zero_grad()
            at_rest(model)


def at_rest(model: nn.Module) -> None:
    """Require that no message holds memory or takes gradients."""
    for unit in nested_units(model):
        for bucket in unit.buckets:
            for plan in bucket.plans:
                message = plan.message
                assert not message.allocated_bytes and not message._given, unit.name


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def plainly(model: Any, x: torch.Tensor) -> None:
    loss_of(model, x).backward()


# -------------------------------------------------------------------- where gradients are written

OPTIONS: dict[str, Any] = {
    "plain": {},
    "rows": {"granularity": "row"},
    "parameters": {"granularity": "parameter"},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2, 3)
def test_both_weights_of_a_block(rank: Rank, options: str) -> None:
    """Both weights of each block are written in place, with the same bits as without."""
    models = pair(rank, **OPTIONS[options])
    compare(models, rank, plainly, [2, 2])
    weight = unit_of(models[0].blocks[0]).parameters[0].unsharded
    assert type(weight) is LinearWeight and isinstance(weight, nn.Parameter) and type(models[1]) is type(models[0])


@on_ranks(1)
def test_one_rank(rank: Rank) -> None:
    """A single rank sends nothing, and writes nothing in place."""
    compare(pair(rank), rank, plainly, [])


@on_ranks(4)
def test_replicas(rank: Rank) -> None:
    """With replicas, whether or not every microbatch is all-reduced."""
    mesh = init_device_mesh(rank.mesh.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    models = pair(rank, mesh=mesh)
    compare(models, rank, plainly, [2, 2])

    def accumulated(model: Any, x: torch.Tensor) -> None:
        for last in (False, True):
            model.set_requires_all_reduce(last)
            plainly(model, x + float(last))

    compare(models, rank, accumulated, [2, 2, 2, 2])


@on_ranks(2)
def test_optimizer_steps(rank: Rank) -> None:
    """Training keeps parameters equal, bit by bit; turned off, gradients are copied again."""
    models = pair(rank)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        if step == 2:
            models[0].set_write_gradients_in_place(False)
        with written() as seen:
            for model, optimizer in zip(models, optimizers, strict=True):
                plainly(model, batch(rank.rank, step, 4, 8).to(rank.device))
                optimizer.step()
                optimizer.zero_grad()
        assert seen == ([2, 2] if step < 2 else [])
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_equal(ours.full_tensor().detach(), theirs.full_tensor().detach(), "parameter")


# -------------------------------------------------------------------- programs


class Twice(Block):
    """A block that uses a weight twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The second layer's output goes through the layer again."""
        return self.down(self.up(self.down(self.up(x))))  # type: ignore[no-any-return]


class Functional(Block):
    """A block that reads its weights itself, once in a function of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One product of each kind."""
        return F.linear(F.linear(x, self.up.weight, bias=self.up.bias), self.down.weight) + x @ self.up.weight[:8].t()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


class Deep(Block):
    """Inputs of three dimensions, as of a sequence, and of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As of a batch of sequences of two, and one row."""
        return super().forward(x.view(2, 2, 8)).reshape(4, 8) + super().forward(x[0])


class Transformed(Block):
    """Functions of ``torch.func`` inside of a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batched, and with a derivative of the input."""
        batched = vmap(super().forward)(x)
        _, tangent = jvp(super().forward, (x,), (torch.ones_like(x),))
        return batched + tangent  # type: ignore[no-any-return]


class Cast(Block):
    """Autocast inside of a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In bf16."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return x + super().forward(x).float()


class Recomputed(Block):
    """Activations that are computed again in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Checkpointed."""
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return y


class RecomputedInBackward(Recomputed):
    """The same by a backward inside of the backward."""

    reentrant = True


class Hooked(Block):
    """Hooks on a weight, as forward sees it."""

    def hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Called with the gradient of the second weight."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a hook that removes itself."""
        handle = self.down.weight.register_hook(lambda gradient: (handle.remove(), self.hook(gradient))[1])
        return super().forward(x)


class Replaced(Hooked):
    """A hook that returns another gradient."""

    def hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """A scaled copy."""
        return gradient * 3


class Changed(Hooked):
    """A hook that changes the gradient itself."""

    def hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Scaled."""
        gradient.mul_(3)
        return None


class Turned(Hooked):
    """A hook that returns another view of the same memory."""

    def hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """In another order."""
        return gradient.as_strided((8, 24), (1, 8))


class Exchanged(nn.Module):
    """A hook that returns the gradient of another weight, which lies in that one's place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two layers, both with the gradient of the second, which comes first."""
        seen: list[torch.Tensor] = []
        self.second.weight.register_hook(lambda gradient: seen.append(gradient.view(8, 8)))
        self.first.weight.register_hook(lambda _: seen.pop())
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Negated(Hooked):
    """A hook that returns the gradient with a lazy sign."""

    def hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """With the other sign."""
        return torch._neg_view(gradient)


class ReducedTwice(Block):
    """A block that is called twice, each time recomputed by a backward of its own, and so is reduced twice."""

    def forward(self, x: torch.Tensor, call: int = 0) -> torch.Tensor:
        """Two calls, of which the second one may be another."""
        return self.second(x) if call else super().forward(x)

    def second(self, x: torch.Tensor) -> torch.Tensor:
        """As the first one."""
        return super().forward(x)


class ReducedTwiceInAutocast(ReducedTwice):
    """The second call writes nothing in place."""

    def second(self, x: torch.Tensor) -> torch.Tensor:
        """In bf16."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().second(x).float()


class ReducedTwiceByProducts(ReducedTwice):
    """The second call writes nothing in place."""

    def second(self, x: torch.Tensor) -> torch.Tensor:
        """Without the function of Linear layers."""
        return x + (x @ self.up.weight.t()).relu() @ self.down.weight.t()


class ReducedTwiceAndKept(ReducedTwice):
    """A hook keeps the gradient of the second call."""

    def second(self, x: torch.Tensor) -> torch.Tensor:
        """With a hook."""
        kept = self.__dict__.setdefault("kept", [])
        self.up.weight.register_hook(lambda gradient: kept.append(gradient[:1]))
        return super().second(x)


class BackwardInAutocast(Block):
    """Forward in full precision within an autocast, in which backward runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


PROGRAMS: dict[type[nn.Module], list[int] | None] = {
    Twice: [0, 0],
    Functional: [1, 1],
    Tied: [0, 0],
    Deep: [0, 0],
    Transformed: [],
    Cast: [],
    Recomputed: [2, 2],
    RecomputedInBackward: [2, 2],
    Replaced: [1, 1],
    Changed: [2, 2],
    Turned: [1, 1],
    Exchanged: [0, 0],
    Negated: [0, 0],
    ReducedTwice: None,
    ReducedTwiceInAutocast: None,
    ReducedTwiceByProducts: None,
    ReducedTwiceAndKept: None,
    BackwardInAutocast: [],
}


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.__name__)
@on_ranks(2)
def test_programs(rank: Rank, block: type[nn.Module]) -> None:
    """Whatever a block does, gradients have the same bits; what is used twice is added up and copied."""

    def backward(model: Any, x: torch.Tensor) -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=block is BackwardInAutocast):
            loss_of(model, x.requires_grad_()).backward()
        x.grad = None

    compare(pair(rank, block), rank, backward, PROGRAMS[block])


@on_ranks(2)
def test_microbatches(rank: Rank) -> None:
    """Those without synchronization are not written in place, nor is the gradient that completes them."""

    def backward(model: Any, x: torch.Tensor) -> None:
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            plainly(model, x)
        model.set_is_last_backward(False)
        plainly(model, x)
        model.set_is_last_backward(True)
        plainly(model, x)

    compare(pair(rank), rank, backward, None)


@on_ranks(2)
def test_no_message_without_synchronization(rank: Rank) -> None:
    """A microbatch without synchronization allocates no message."""
    model, _ = pair(rank)
    model.set_requires_gradient_sync(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReductionMessage, "allocate", lambda _: pytest.fail("a message was allocated"))
        plainly(model, batch(rank.rank, 0, 4, 8).to(rank.device))
    model.zero_grad()


@on_ranks(2)
def test_synchronization_turned_off_within_a_backward(rank: Rank) -> None:
    """Gradients that were written already are kept for the next microbatch."""

    def backward(model: Any, x: torch.Tensor) -> None:
        middle: list[Any] = []

        def turn_off(*_: Any) -> None:
            middle.append(model.set_requires_gradient_sync(False))

        handle = model.blocks[1].norm.register_full_backward_hook(turn_off)
        plainly(model, x)
        handle.remove()
        assert len(middle) == 1
        model.set_requires_gradient_sync(True)
        plainly(model, x)

    compare(pair(rank), rank, backward, None)


@on_ranks(2)
def test_a_graph_that_is_used_twice(rank: Rank) -> None:
    """Backward through one graph again, and gradients of gradients."""

    def again(model: Any, x: torch.Tensor) -> None:
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        loss.backward()

    def penalized(model: Any, x: torch.Tensor) -> None:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        (gradient.square().sum() + loss_of(model, x)).backward()

    models = pair(rank, reshard_after_forward=False)
    compare(models, rank, again, [2, 2, 2, 2])
    compare(pair(rank), rank, penalized, None, rtol=1e-6)  # autograd adds up in another order


@on_ranks(2)
def test_gradients_that_are_returned(rank: Rank) -> None:
    """``torch.autograd.grad`` of weights inside of a forward returns memory of its own."""
    taken: dict[bool, torch.Tensor] = {}

    class Inner(Block):
        """A block that takes a gradient of its own weight."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Adds the gradient's sum."""
            y = super().forward(x)
            (gradient,) = torch.autograd.grad(y.sum(), self.down.weight, retain_graph=True)
            taken[len(taken) > 0] = gradient
            return y + gradient.sum()

    models = pair(rank, Inner)
    compare(models, rank, plainly, [2, 2])
    assert all(bool(torch.isfinite(gradient).all()) for gradient in taken.values())


@on_ranks(2)
def test_gradients_that_are_kept(rank: Rank) -> None:
    """A hook may keep a gradient, also a view of it: its memory is left to it, and stays as it was."""
    kept: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    class Keeping(Hooked):
        """A hook that keeps a part of the gradient."""

        def hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
            """Its first rows."""
            kept.append(gradient[:3])
            values.append(gradient[:3].clone())
            return None

    compare(pair(rank, Keeping), rank, plainly, [0, 0])
    assert len(kept) == 12
    for found, value in zip(kept, values, strict=True):
        assert_equal(found, value, "kept")


@on_ranks(2)
def test_a_backward_that_raises(rank: Rank) -> None:
    """What was written is forgotten, and the next step is as any other."""

    class Failing(Hooked):
        """A hook that raises when asked to."""

        fail = False

        def hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
            """Raise, or not."""
            if self.fail:
                raise ZeroDivisionError
            return None

    models = pair(rank, Failing)
    for model in models:
        model.blocks[0].fail = True
        with pytest.raises(ZeroDivisionError):
            plainly(model, torch.ones(2, 8, device=rank.device))
        model.blocks[0].fail = False
        model.zero_grad()
    compare(models, rank, plainly, [2, 2])


@on_ranks(2)
def test_compiled(rank: Rank) -> None:
    """Compiled blocks compute as without: their gradients are not written in place."""
    models = pair(rank)
    compiled = functools.partial(torch.compile, backend="aot_eager")
    for model in models:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = compiled(block)
    compare(models, rank, plainly, [])


@on_ranks(2)
def test_frozen_weights(rank: Rank) -> None:
    """Frozen weights have no gradient, also those that are frozen later."""
    torch.manual_seed(3)
    plain = Model().to(rank.device)
    plain.blocks[0].up.weight.requires_grad_(False)
    models = shard(copy.deepcopy(plain), rank, in_place=True), shard(plain, rank, in_place=False)
    compare(models, rank, plainly, [2, 1])
    for model in models:
        model.blocks[1].down.weight.requires_grad_(False)
    compare(models, rank, plainly, [1, 1])


class Labeled(torch.Tensor):
    """A tensor subclass with functions of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Say which function was called."""
        return func.__name__


@on_ranks(2)
def test_weights_are_ordinary_parameters_otherwise(rank: Rank) -> None:
    """Other subclasses have their say; weights are copied and saved; frozen and empty ones are left to torch."""
    seen: dict[str, Any] = {}

    class Looking(Block):
        """A block that uses its weights for other things."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """With a frozen layer whose inputs are written to afterwards."""
            weight = self.down.weight
            labeled = torch.zeros(8, device=x.device).as_subclass(Labeled)
            seen["functions"] = [torch.mul(weight, labeled), F.linear(torch.ones(1, 24), weight, labeled)]
            seen["types"] = type(weight), type(copy.deepcopy(weight))
            F.linear(torch.ones(2, 24, device=x.device), copy.deepcopy(weight)).sum().backward()
            saved = io.BytesIO()
            torch.save(weight, saved)
            saved.seek(0)
            seen["saved"] = torch.load(saved), weight.detach().clone()
            z = x.clone()
            y = self.up(z)
            z.add_(1)
            return super().forward(x + y[:, :8])

    torch.manual_seed(3)
    plain = Model(Looking).to(rank.device)
    for block in plain.blocks:
        block.up.weight.requires_grad_(False)
    models = shard(copy.deepcopy(plain), rank, in_place=True), shard(plain, rank, in_place=False)
    compare(models, rank, plainly, [1, 1])
    loss_of(models[0], batch(rank.rank, 0, 4, 8).to(rank.device))
    assert seen["functions"] == ["mul", "linear"] and seen["types"] == (LinearWeight, nn.Parameter)
    loaded, value = seen["saved"]
    assert type(loaded) is nn.Parameter
    assert_equal(loaded.detach(), value, "saved")

    class Empty(nn.Module):
        """A layer without features beside another."""

        def __init__(self) -> None:
            super().__init__()
            self.none, self.some = nn.Linear(8, 0), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Both."""
            return self.some(x) + self.none(x).sum()  # type: ignore[no-any-return]

    compare(pair(rank, Empty), rank, plainly, [1, 1])


# -------------------------------------------------------------------- what it refuses, and what it leaves alone


@on_ranks(2)
def test_refused(rank: Rank) -> None:
    """Other layouts and dtypes, other values, and the middle of a step; nothing changes then."""
    per_parameter = fully_shard(Model().to(rank.device), mesh=rank.mesh)
    with pytest.raises(ValueError, match=r"cannot do that: its parameters are cut one by one.*ragged"):
        per_parameter.set_write_gradients_in_place(True)
    per_parameter.set_write_gradients_in_place(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"in torch\.bfloat16 and reduces them in torch\.float32"):
        shard(Model().to(rank.device), rank, in_place=True, mp_policy=policy)
    with pytest.raises(ValueError, match="set_write_gradients_in_place"):
        per_parameter.set_write_gradients_in_place(1)
    mixed = Model().to(rank.device)
    fully_shard(mixed.blocks[0], mesh=rank.mesh, layout="ragged")
    fully_shard(mixed.blocks[1], mesh=rank.mesh)
    model = fully_shard(mixed, mesh=rank.mesh, layout="ragged")
    with pytest.raises(ValueError, match="cut one by one"):
        model.set_write_gradients_in_place(True)
    with written() as seen:
        plainly(model, torch.ones(2, 8, device=rank.device))
    assert not seen
    block = model.blocks[0]
    assert isinstance(block, FSDPModule)
    block.set_write_gradients_in_place(True, recurse=False)
    with written() as seen:
        plainly(model, torch.ones(2, 8, device=rank.device))
    assert seen == [2]
    handle = block.norm.register_forward_hook(lambda *_: block.set_write_gradients_in_place(False))  # type: ignore[union-attr,operator]
    with pytest.raises(FullshardError, match="in the middle of its forward"):
        model(torch.ones(2, 8, device=rank.device))
    handle.remove()


class Scatter:
    """A reduce-scatter of a user, with memory of its own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """The collective of torch."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@on_ranks(2)
def test_memory_of_others(rank: Rank) -> None:
    """A custom reduce-scatter brings its own memory: gradients are copied into it."""
    models = pair(rank)
    for model in models:
        for module in (*model.blocks,):
            module.set_custom_reduce_scatter(Scatter())
    compare(models, rank, plainly, [])


@on_ranks(2)
def test_dtype_that_changes(rank: Rank) -> None:
    """Buckets that are built anew write in place as before."""
    models = pair(rank)
    compare(models, rank, plainly, [2, 2])
    models[0].double(), models[1].double()

    def backward(model: Any, x: torch.Tensor) -> None:
        plainly(model, x.double())

    compare(models, rank, backward, [2, 2])
