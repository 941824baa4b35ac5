"""The programs: a model, how it is sharded, and what is done to it; the same code under both libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from contract.modules import Branches, Conv, Transformer
from contract.operations import Ended, Operation, Session
from contract.recorder import Point, Recorder
from models import Frozen, Language, Mlp, Odd, Stack
from ranks import Rank

Units = tuple[tuple[str | tuple[str, ...], dict[str, Any]], ...]  # paths of modules, settings


@dataclass(frozen=True)
class Program:
    """A model, its units from the inside out, and operations.

    Attributes:
        name: of the program.
        model: makes the model.
        units: paths, and arguments of ``fully_shard`` as :func:`arguments` reads them. With ``wrapper`` arguments of
            the wrapper, which goes around modules at these paths.
        operations: what is done, see :class:`contract.operations.Session`.
        wrapper: whether the front end is ``FullyShardedDataParallel``.
        world: number of ranks.
        hooks: whether there are hooks on the backward of modules.
        late: whether hooks on forward are registered after sharding, too.
        adam: AdamW in place of SGD with momentum.
        attributes: set on modules before sharding, by path.
    """

    name: str
    model: Callable[[], nn.Module]
    units: Units
    operations: tuple[Operation, ...]
    wrapper: bool = False
    world: int = 2
    hooks: bool = True
    late: bool = False
    adam: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)

    def run(self, library: ModuleType, rank: Rank) -> list[Point]:
        """Run under a library; what was seen."""
        torch.manual_seed(0)
        model = self.model()
        for path, value in self.attributes.items():
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, value)
        recorder = Recorder(model)
        recorder.low = "bfloat16" in str(self.units)
        recorder.watch_before_sharding(self.hooks)
        try:
            sharded = (self._wrap if self.wrapper else self._shard)(library, model, rank)
        except Exception as error:
            facts = {"raised": type(error).__name__, "message": str(error)[:300]}
            recorder.points.append(Point("sharding: raised", {"": facts}))
            return recorder.points
        recorder.model = sharded
        recorder.watch_after_sharding(self.late)
        with recorder.calls_noted(), contextlib.suppress(Ended):
            Session(library, rank, sharded, recorder, self.adam).run(self.operations)
        return recorder.points

    def _shard(self, library: ModuleType, model: nn.Module, rank: Rank) -> nn.Module:
        for paths, settings in self.units:
            target = [model.get_submodule(p) for p in paths] if isinstance(paths, tuple) else model.get_submodule(paths)
            library.fully_shard(target, mesh=rank.mesh, **arguments(library, settings))
        return model

    def _wrap(self, library: ModuleType, model: nn.Module, rank: Rank) -> nn.Module:
        for path, settings in self.units:
            assert isinstance(path, str)
            options = {"device_id": torch.device("cpu"), **arguments(library, settings)}
            wrapped = library.FullyShardedDataParallel(model.get_submodule(path), **options)
            if not path:
                return wrapped
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, wrapped)
        raise ValueError(f"{self.name}: the last unit of a wrapper has to be the root")


def arguments(library: ModuleType, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a library's front end: ``("Class", {...})`` becomes an object of its class."""
    return {key: made(library, value) for key, value in settings.items()}


def made(library: ModuleType, value: Any) -> Any:
    """See :func:`arguments`."""
    match value:
        case (str(name), dict(options)):
            return getattr(library, name)(**options)
        case (str(name), str(member)):
            return getattr(getattr(library, name), member)
    return value


# -------------------------------------------------------------------- parts of programs

BLOCKS = ("blocks.0", "blocks.1")
LIFE: tuple[Operation, ...] = (("train",), ("evaluate",), ("save",), ("train",))
LONG: tuple[Operation, ...] = (("train", 2), ("evaluate",), ("save",), ("evaluate", True), ("train",))
SHORT: tuple[Operation, ...] = (("train", 2),)


def units(*paths: str | tuple[str, ...], **settings: Any) -> Units:
    """One unit per path, with the same settings."""
    return tuple((path, settings) for path in paths)


def stack() -> nn.Module:
    return Stack(2)


def transformer(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return Transformer(**options)

    return make


BF16 = ("MixedPrecisionPolicy", {"param_dtype": torch.bfloat16})
REDUCED = ("MixedPrecisionPolicy", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
CAST = ("MixedPrecisionPolicy", {"param_dtype": torch.bfloat16, "output_dtype": torch.float32})
ONLY_REDUCED = ("MixedPrecisionPolicy", {"reduce_dtype": torch.bfloat16})
NO_CAST = ("MixedPrecisionPolicy", {"param_dtype": torch.bfloat16, "cast_forward_inputs": False})
OFFLOAD = ("CPUOffloadPolicy", {"pin_memory": False})


def composable() -> list[Program]:
    """Programs with ``fully_shard``."""
    stacked = Program("stack", stack, units(*BLOCKS, ""), LIFE)
    formed = Program("transformer", transformer(), units(*BLOCKS, ""), LIFE)
    grouped = units(*BLOCKS, ("norm", "head"), "")
    return [
        *(
            replace(stacked, name=f"stack raf={r}", units=units(*BLOCKS, "", reshard_after_forward=r), operations=LONG)
            for r in (None, True, False)
        ),
        replace(stacked, name="stack raf int", units=units(*BLOCKS, "", reshard_after_forward=2), world=4),
        replace(
            stacked,
            name="blocks reshard, root does not",
            units=(*units(*BLOCKS), *units("", reshard_after_forward=False)),
        ),
        replace(
            stacked,
            name="blocks keep, root reshards",
            units=(*units(*BLOCKS, reshard_after_forward=False), *units("", reshard_after_forward=True)),
        ),
        replace(stacked, name="one unit", units=units("")),
        replace(stacked, name="one unit raf=True", units=units("", reshard_after_forward=True)),
        replace(
            stacked,
            name="every linear",
            units=units("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "first", "last", ""),
        ),
        replace(stacked, name="root without parameters", units=units("first", *BLOCKS, "last", "")),
        replace(stacked, name="without module hooks", hooks=False),
        replace(stacked, name="late hooks", late=True, operations=SHORT),
        replace(stacked, name="adam", adam=True),
        replace(
            stacked,
            name="five blocks",
            model=lambda: Stack(5),
            units=units(*(f"blocks.{i}" for i in range(5)), ""),
            operations=SHORT,
        ),
        Program("mlp", lambda: Mlp(6, 7, 3, 5), units("layers.0", "layers.1", "layers.2", ""), LIFE),
        Program(
            "mlp, one unit per two layers",
            lambda: Mlp(6, 7, 3, 5),
            units(("layers.0", "layers.1"), "layers.2", ""),
            LIFE,
        ),
        Program("language", lambda: Language(), units(*BLOCKS, ""), LIFE),
        Program("language, tied in a group", lambda: Language(), units(*BLOCKS, ("embedding", "head"), ""), LIFE),
        Program("language, tied across units", lambda: Language(), units(*BLOCKS, "embedding", "head", ""), SHORT),
        Program("frozen", Frozen, units("blocks.0", "blocks.1", "blocks.2", ""), LIFE),
        Program(
            "frozen raf=False", Frozen, units("blocks.0", "blocks.1", "blocks.2", "", reshard_after_forward=False), LIFE
        ),
        Program("odd", Odd, units("conv", ""), SHORT),
        Program("conv", Conv, units("first", "norm", ""), LIFE),
        replace(formed, operations=LONG),
        replace(formed, name="transformer raf=False", units=units(*BLOCKS, "", reshard_after_forward=False)),
        replace(formed, name="group of norm and head", units=grouped),
        replace(
            formed,
            name="group raf=False",
            units=(*units(*BLOCKS), *units(("norm", "head"), reshard_after_forward=False), *units("")),
        ),
        replace(formed, name="group of all blocks", units=units(BLOCKS, "")),
        replace(formed, name="group with the embedding", units=units(*BLOCKS, ("embedding", "norm", "head"), "")),
        replace(formed, name="tied transformer", model=transformer(tied=True)),
        replace(formed, name="head is a unit", units=units(*BLOCKS, "head", "")),
        replace(
            formed,
            name="head is a unit, without module hooks",
            units=units(*BLOCKS, "head", ""),
            hooks=False,
            operations=SHORT,
        ),
        replace(
            formed,
            name="blocks run twice, accumulation",
            attributes={"repeat": 2},
            operations=(("accumulate",), ("accumulate", 2)),
        ),
        replace(
            formed,
            name="blocks run twice, accumulation reduced in bf16",
            attributes={"repeat": 2},
            units=units(*BLOCKS, "", mp_policy=ONLY_REDUCED),
            operations=(("accumulate",), ("accumulate", 2)),
        ),
        replace(
            formed,
            name="blocks run twice, checkpointed, reentrant=True",
            attributes={"repeat": 2, "checkpointed": True},
            operations=(("train", 3),),
        ),
        replace(
            formed,
            name="head in a group, interleaved",
            units=units(*BLOCKS, ("embedding", "head"), ""),
            operations=(("forwards_interleaved",), ("train",)),
        ),
        replace(formed, name="blocks run twice", model=transformer(repeat=2)),
        replace(
            formed,
            name="blocks run twice raf=False",
            model=transformer(repeat=2),
            units=units(*BLOCKS, "", reshard_after_forward=False),
        ),
        replace(
            formed,
            name="nested",
            model=transformer(depth=4, group=2),
            units=units("blocks.0.inner.0", "blocks.0.inner.1", "blocks.1.inner.0", "blocks.1.inner.1", *BLOCKS, ""),
        ),
        replace(
            formed,
            name="nested, inner ones twice",
            model=transformer(depth=2, group=1, repeat=2),
            units=units("blocks.0.inner.0", "blocks.0", "blocks.1.inner.0", ""),
            operations=SHORT,
        ),
        replace(
            formed,
            name="nested three deep",
            model=transformer(depth=2, group=2),
            units=units("blocks.0.inner.0.up", "blocks.0.inner.0", "blocks.0.inner.1", "blocks.0", ""),
        ),
        replace(
            formed,
            name="nested, mixed settings",
            model=transformer(depth=2, group=2),
            units=(
                *units("blocks.0.inner.0", reshard_after_forward=False),
                *units("blocks.0.inner.1", "blocks.0", reshard_after_forward=True),
                *units(""),
            ),
        ),
        replace(formed, name="noted inside", operations=(("noted_inside",), ("noted_inside",))),
        replace(
            formed,
            name="noted inside raf=False",
            operations=(("noted_inside",),),
            units=units(*BLOCKS, "", reshard_after_forward=False),
        ),
        # losses outside of forward, reads, flags inside
        replace(formed, name="head outside", operations=(("head_outside",), ("head_outside",), ("train",))),
        replace(
            formed,
            name="head outside by weight",
            operations=(("head_outside", True), ("head_outside", True), ("train",)),
        ),
        replace(
            formed,
            name="head outside, tied",
            model=transformer(tied=True),
            operations=(("head_outside", True), ("head_outside",)),
        ),
        replace(
            formed,
            name="head outside, unit",
            units=units(*BLOCKS, "head", ""),
            operations=(("head_outside",), ("train",), ("head_outside",)),
        ),
        replace(
            formed,
            name="head outside, unit raf=False",
            units=(*units(*BLOCKS), *units("head", reshard_after_forward=False), *units("")),
            operations=(("head_outside",), ("head_outside",), ("train",)),
        ),
        replace(
            formed,
            name="head outside, group",
            units=grouped,
            operations=(("head_outside",), ("train",), ("head_outside",)),
        ),
        replace(
            formed,
            name="chunked head, group",
            units=grouped,
            operations=(("chunked_head",), ("chunked_head",), ("train",)),
        ),
        replace(formed, name="chunked head", operations=(("chunked_head",), ("train",))),
        replace(
            formed,
            name="similarity in evaluation",
            model=transformer(tied=True),
            operations=(("similarity",), ("train",), ("similarity",), ("train",)),
        ),
        replace(
            formed, name="frozen inside, block", operations=(("train",), ("freeze_inside", "blocks.0"), ("train", 2))
        ),
        replace(formed, name="frozen inside, head", operations=(("train",), ("freeze_inside", "head"), ("train", 2))),
        replace(
            formed,
            name="frozen inside, first step",
            operations=(("freeze_inside", "blocks.1", "embedding"), ("train", 2)),
        ),
        replace(
            formed,
            name="frozen inside raf=False",
            units=units(*BLOCKS, "", reshard_after_forward=False),
            operations=(("freeze_inside", "blocks.1", "head"), ("train", 2)),
        ),
        replace(
            formed,
            name="backward inside",
            operations=(("backward_inside",), ("backward_inside",), ("train",)),
            hooks=False,
        ),
        replace(
            formed,
            name="backward inside raf=False",
            units=units(*BLOCKS, "", reshard_after_forward=False),
            operations=(("backward_inside",), ("train",)),
            hooks=False,
        ),
        replace(formed, name="regularized", operations=(("regularize",), ("train",), ("regularize",))),
        # branches
        Program(
            "branches",
            Branches,
            units("left", "right", ""),
            (("train",), ("use", "left"), ("train", 2), ("use", "right"), ("train",), ("use", "both"), ("train",)),
        ),
        Program(
            "branches in a group",
            Branches,
            units(("left", "right"), ""),
            (("train",), ("use", "left"), ("train", 2), ("use", "both"), ("train",)),
        ),
        Program(
            "branches in a group raf=False",
            Branches,
            (*units(("left", "right"), reshard_after_forward=False), *units("")),
            (("use", "left"), ("train", 2), ("use", "both"), ("train",)),
        ),
        # several forwards and backwards
        replace(stacked, name="two forwards", operations=(("two_forwards",), ("two_forwards", 3), ("train",))),
        replace(
            stacked,
            name="two forwards raf=False",
            operations=(("two_forwards",), ("train",)),
            units=units(*BLOCKS, "", reshard_after_forward=False),
        ),
        replace(stacked, name="two losses", operations=(("two_losses",), ("two_losses",), ("train",))),
        replace(stacked, name="interleaved", operations=(("forwards_interleaved",), ("train",))),
        replace(
            stacked,
            name="forward dropped",
            operations=(("forward_dropped",), ("train",), ("forward_dropped",), ("train",)),
        ),
        replace(
            stacked,
            name="forward dropped, then a step",
            operations=(
                ("train",),
                ("forward_dropped",),
                ("train_without_step",),
                ("forward_dropped",),
                ("step_only",),
                ("train",),
            ),
        ),
        replace(stacked, name="gradients of inputs", operations=(("input_gradient",), ("input_gradient",), ("train",))),
        replace(stacked, name="autograd.grad", operations=(("train",), ("autograd_grad",), ("train",))),
        # accumulation
        replace(stacked, name="accumulation", operations=(("accumulate",), ("accumulate", 2), ("train",))),
        replace(
            stacked,
            name="accumulation raf=False",
            operations=(("accumulate",), ("train",)),
            units=units(*BLOCKS, "", reshard_after_forward=False),
        ),
        replace(
            stacked,
            name="accumulation, kept",
            operations=(
                ("reshard_after_backward", False),
                ("accumulate",),
                ("reshard_after_backward", True),
                ("train",),
            ),
        ),
        replace(
            stacked,
            name="accumulation of reduced gradients",
            operations=(("accumulate_reduced",), ("accumulate_reduced", 3)),
        ),
        replace(stacked, name="microbatch dropped", operations=(("train",), ("microbatch_dropped",), ("train",))),
        replace(stacked, name="last backward", operations=(("last_backward",), ("train",))),
        replace(stacked, name="zero gradients stay", operations=(("train", 2, False), ("zero_grad",), ("train",))),
        # checkpointing
        *(
            replace(p, name=f"{p.name}, checkpointed, reentrant={r}", attributes={"checkpointed": r}, operations=SHORT)
            for p in (
                stacked,
                replace(formed, name="kept transformer", units=units(*BLOCKS, "", reshard_after_forward=False)),
            )
            for r in (False, True)
        ),
        *(
            replace(
                stacked,
                name=f"checkpointed inside, reentrant={r}",
                attributes={"blocks.0.checkpointed": r, "blocks.1.checkpointed": r},
                operations=SHORT,
            )
            for r in (False, True)
        ),
        # settings by hand
        replace(
            stacked,
            name="unshard",
            operations=(
                ("unshard",),
                ("train",),
                ("unshard", "blocks.0"),
                ("reshard", "blocks.0"),
                ("unshard",),
                ("reshard",),
                ("train",),
            ),
        ),
        replace(
            stacked,
            name="unshard, then save",
            operations=(("unshard",), ("save",), ("unshard", "blocks.1"), ("save",), ("train",)),
        ),
        replace(
            stacked, name="unshard, then evaluate", operations=(("unshard", "blocks.0"), ("evaluate",), ("train",))
        ),
        replace(
            stacked,
            name="unshard asynchronously",
            operations=(
                ("unshard_async",),
                ("train",),
                ("unshard_async", "blocks.0"),
                ("reshard", "blocks.0"),
                ("train",),
            ),
        ),
        replace(
            stacked,
            name="reshard after forward by hand",
            operations=(
                ("evaluate",),
                ("reshard",),
                ("train",),
                ("evaluate",),
                ("save",),
                ("evaluate", False, 2),
                ("train",),
            ),
        ),
        replace(
            stacked,
            name="setting changed",
            operations=(
                ("train",),
                ("reshard_after_forward", False),
                ("train", 2),
                ("evaluate",),
                ("reshard_after_forward", True),
                ("train",),
                ("evaluate",),
            ),
        ),
        replace(
            stacked,
            name="setting of a block changed",
            operations=(
                ("train",),
                ("reshard_after_forward", False, "blocks.0"),
                ("train", 2),
                ("evaluate",),
                ("save",),
            ),
        ),
        replace(
            stacked,
            name="kept after backward",
            operations=(
                ("reshard_after_backward", False),
                ("train", 2),
                ("evaluate",),
                ("save",),
                ("train",),
                ("reshard_after_backward", True),
                ("train",),
            ),
        ),
        replace(stacked, name="clipped", operations=(("clip",), ("clip",))),
        replace(stacked, name="optimizer's hooks", operations=(("step_with_hooks",), ("step_with_hooks",)), adam=True),
        replace(
            stacked,
            name="optimizer built after a forward",
            operations=(("train",), ("evaluate",), ("reshard",), ("new_optimizer",), ("train",)),
        ),
        replace(
            stacked, name="optimizer built after a backward", operations=(("train",), ("new_optimizer",), ("train",))
        ),
        # flags
        replace(
            stacked,
            name="freezing",
            operations=(("train",), ("freeze", "blocks.0"), ("train", 2), ("freeze", "blocks.0", True), ("train", 2)),
        ),
        replace(
            stacked, name="freezing all", operations=(("freeze", ""), ("train",), ("freeze", "", True), ("train",))
        ),
        replace(
            stacked,
            name="freezing after forward",
            operations=(
                ("train",),
                ("evaluate",),
                ("freeze", "last"),
                ("train",),
                ("freeze", "last", True),
                ("train",),
            ),
        ),
        # state, casts, writes
        replace(
            stacked,
            name="loading",
            operations=(("train",), ("load",), ("train",), ("evaluate",), ("load",), ("train",)),
            adam=True,
        ),
        replace(
            stacked,
            name="loading by assignment",
            operations=(("train",), ("load", True), ("new_optimizer",), ("train",)),
        ),
        replace(stacked, name="cast", operations=(("to", torch.float64), ("to", torch.float32), ("train",))),
        replace(
            stacked,
            name="cast after a step",
            operations=(("train",), ("to", torch.bfloat16), ("evaluate",), ("to", torch.float32), ("train",)),
        ),
        replace(stacked, name="writes", operations=(("train",), ("apply_",), ("train",))),
        # exceptions
        replace(
            stacked,
            name="exception in forward",
            operations=(("raise_in_forward", "blocks.1"), ("train",), ("raise_in_forward", "last"), ("train",)),
        ),
        replace(
            stacked,
            name="exception in forward raf=False",
            operations=(("train",), ("raise_in_forward", "last"), ("train",)),
            units=units(*BLOCKS, "", reshard_after_forward=False),
        ),
        replace(
            stacked,
            name="exception in forward without a reset",
            operations=(("train",), ("raise_in_forward", "blocks.1", False), ("train",)),
        ),
        replace(
            stacked,
            name="exception in backward",
            operations=(("raise_in_backward", "blocks.0"), ("train",), ("raise_in_backward", "first"), ("train",)),
        ),
        replace(
            stacked,
            name="exception in backward without a reset",
            operations=(("train",), ("raise_in_backward", "blocks.0", False), ("train",)),
        ),
        # policies
        *(
            replace(p, name=f"{p.name} {name}", units=units(*BLOCKS, "", mp_policy=policy))
            for name, policy in {
                "bf16": BF16,
                "bf16, reduced in fp32": REDUCED,
                "bf16, cast": CAST,
                "reduced in bf16": ONLY_REDUCED,
            }.items()
            for p in (stacked, replace(formed, operations=(("train", 2), ("accumulate",), ("evaluate",))))
        ),
        replace(
            formed,
            name="transformer bf16, head outside",
            units=units(*BLOCKS, "", mp_policy=REDUCED),
            operations=(("head_outside",), ("train",)),
        ),
        replace(stacked, name="offload", units=units(*BLOCKS, "", offload_policy=OFFLOAD)),
        replace(
            stacked,
            name="offload raf=False",
            units=units(*BLOCKS, "", offload_policy=OFFLOAD, reshard_after_forward=False),
        ),
        replace(stacked, name="part by itself", operations=(("train_part", "blocks.0"), ("train",))),
        replace(stacked, name="part after the whole", operations=(("train",), ("train_part", "blocks.0"), ("train",))),
        replace(stacked, name="children only", units=units(*BLOCKS)),
    ]


def wrappers() -> list[Program]:
    """Programs with ``FullyShardedDataParallel``."""
    found = []
    for orig in (True, False):
        by_unit = units(*BLOCKS, "", use_orig_params=orig)
        stacked = Program(f"wrapper {orig}", stack, by_unit, (("train",), ("evaluate",), ("train",)), wrapper=True)
        formed = replace(stacked, name=f"wrapped transformer {orig}", model=transformer())
        found += [
            stacked,
            formed,
            replace(stacked, name=f"wrapper {orig}, one unit", units=units("", use_orig_params=orig)),
            replace(
                stacked,
                name=f"wrapper {orig}, SHARD_GRAD_OP",
                units=units(*BLOCKS, "", use_orig_params=orig, sharding_strategy=("ShardingStrategy", "SHARD_GRAD_OP")),
            ),
            replace(
                stacked,
                name=f"wrapper {orig}, NO_SHARD",
                units=units(*BLOCKS, "", use_orig_params=orig, sharding_strategy=("ShardingStrategy", "NO_SHARD")),
            ),
            replace(
                stacked,
                name=f"wrapper {orig}, bf16",
                units=units(
                    *BLOCKS,
                    "",
                    use_orig_params=orig,
                    mixed_precision=("MixedPrecision", {"param_dtype": torch.bfloat16}),
                ),
            ),
            replace(stacked, name=f"wrapper {orig}, accumulation", operations=(("accumulate",), ("train",))),
            replace(
                stacked,
                name=f"wrapper {orig}, saved",
                operations=(("train",), ("save",), ("train",), ("load",), ("train",)),
            ),
            replace(
                stacked, name=f"wrapper {orig}, summoned", operations=(("summon",), ("train",), ("summon",), ("train",))
            ),
            replace(stacked, name=f"wrapper {orig}, clipped", operations=(("clip",), ("clip",))),
            replace(formed, name=f"wrapper {orig}, head outside", operations=(("head_outside",), ("train",))),
            replace(formed, name=f"wrapper {orig}, tied", model=transformer(tied=True)),
            replace(stacked, name=f"wrapper {orig}, two forwards", operations=(("two_forwards",), ("train",))),
            replace(stacked, name=f"wrapper {orig}, gradients of inputs", operations=(("input_gradient",), ("train",))),
        ]
    frozen = Program(
        "wrapper, frozen",
        Frozen,
        units("blocks.0", "blocks.1", "blocks.2", "", use_orig_params=True),
        SHORT,
        wrapper=True,
    )
    return [*found, frozen, replace(found[0], name="wrapper, checkpointed", attributes={"checkpointed": False})]


PROGRAMS = {program.name: program for program in (*composable(), *wrappers())}

# Settings and operations of other programs in another combination, which random programs have, too.
ONLY_BY_COMMAND = {
    "one unit raf=True",
    "five blocks",
    "frozen raf=False",
    "mlp, one unit per two layers",
    "without module hooks",
    "adam",
    "transformer raf=False",
    "group raf=False",
    "group with the embedding",
    "blocks run twice raf=False",
    "noted inside raf=False",
    "head outside by weight",
    "head outside, unit raf=False",
    "chunked head, group",
    "frozen inside, first step",
    "backward inside raf=False",
    "branches in a group raf=False",
    "two forwards raf=False",
    "accumulation raf=False",
    "kept transformer, checkpointed, reentrant=False",
    "kept transformer, checkpointed, reentrant=True",
    "setting of a block changed",
    "optimizer built after a backward",
    "cast after a step",
    "exception in forward raf=False",
    "stack bf16, cast",
    "transformer bf16",
    "stack reduced in bf16",
    "transformer bf16, reduced in fp32",
    "offload raf=False",
    "part after the whole",
    "wrapped transformer True",
    "wrapper False, one unit",
    "wrapper True, SHARD_GRAD_OP",
    "wrapper False, NO_SHARD",
    "wrapper True, bf16",
    "wrapper False, clipped",
    "wrapper True, head outside",
    "wrapper False, two forwards",
    "wrapper True, gradients of inputs",
}
SUITE = {name: program for name, program in PROGRAMS.items() if name not in ONLY_BY_COMMAND}
assert PROGRAMS.keys() >= ONLY_BY_COMMAND, "each of these is the name of a program"
