"""The programs: a model, how it is sharded, and what is done to it; the same code under both libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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
LIFE = "train, evaluate, save, train"


def units(*paths: str | tuple[str, ...], **settings: Any) -> Units:
    """One unit per path, with the same settings."""
    return tuple((path, settings) for path in paths)


UNITS, KEPT = units(*BLOCKS, ""), units(*BLOCKS, "", reshard_after_forward=False)


def operations(text: str) -> tuple[Operation, ...]:
    """Operations in words: "train 2, freeze blocks.0 True" calls two methods of a session with these arguments."""
    given = (each.split() for each in text.split(", "))
    return tuple((name, *map(_argument, words)) for name, *words in given)


def _argument(word: str) -> Any:
    if word == "root":
        return ""
    if word.startswith(("float", "bfloat")):
        return getattr(torch, word)
    return {"True": True, "False": False}.get(word, int(word) if word.isdigit() else word)


def stack() -> nn.Module:
    return Stack(2)


def transformer(**options: Any) -> Callable[[], nn.Module]:
    return partial(Transformer, **options)


def stacked(name: str, text: str = LIFE, units: Units = UNITS, *, model: Any = stack, **more: Any) -> Program:
    """A program with ``fully_shard``, of a stack of two blocks unless it names another model."""
    return Program(name, model, units, operations(text), **more)


def formed(name: str, text: str = LIFE, units: Units = UNITS, *, model: Any = Transformer, **more: Any) -> Program:
    """The same of a transformer."""
    return stacked(name, text, units, model=model, **more)


BF16 = ("MixedPrecisionPolicy", {"param_dtype": torch.bfloat16})
REDUCED = ("MixedPrecisionPolicy", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
CAST = ("MixedPrecisionPolicy", {"param_dtype": torch.bfloat16, "output_dtype": torch.float32})
ONLY_REDUCED = ("MixedPrecisionPolicy", {"reduce_dtype": torch.bfloat16})
OFFLOAD = ("CPUOffloadPolicy", {"pin_memory": False})


def composable() -> list[Program]:
    """Programs with ``fully_shard``."""
    return [
        # units and models
        stacked(
            "stack raf=None",
            "train 2, evaluate, save, evaluate True, train",
            units(*BLOCKS, "", reshard_after_forward=None),
        ),
        stacked(
            "stack raf=True",
            "train 2, evaluate, save, evaluate True, train",
            units(*BLOCKS, "", reshard_after_forward=True),
        ),
        stacked("stack raf=False", "train 2, evaluate, save, evaluate True, train", KEPT),
        stacked("stack raf int", units=units(*BLOCKS, "", reshard_after_forward=2), world=4),
        stacked("blocks reshard, root does not", units=(*units(*BLOCKS), *units("", reshard_after_forward=False))),
        stacked(
            "blocks keep, root reshards",
            units=(*units(*BLOCKS, reshard_after_forward=False), *units("", reshard_after_forward=True)),
        ),
        stacked("one unit", units=units("")),
        stacked(
            "every linear",
            units=units("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "first", "last", ""),
        ),
        stacked("root without parameters", units=units("first", *BLOCKS, "last", "")),
        stacked("late hooks", "train 2", late=True),
        stacked("mlp", units=units("layers.0", "layers.1", "layers.2", ""), model=lambda: Mlp(6, 7, 3, 5)),
        stacked("language", model=Language),
        stacked("language, tied in a group", units=units(*BLOCKS, ("embedding", "head"), ""), model=Language),
        stacked("language, tied across units", "train 2", units(*BLOCKS, "embedding", "head", ""), model=Language),
        stacked("frozen", units=units(*BLOCKS, "blocks.2", ""), model=Frozen),
        stacked("odd", "train 2", units("conv", ""), model=Odd),
        stacked("conv", units=units("first", "norm", ""), model=Conv),
        formed("transformer", "train 2, evaluate, save, evaluate True, train"),
        formed("group of norm and head", units=units(*BLOCKS, ("norm", "head"), "")),
        formed("group of all blocks", units=units(BLOCKS, "")),
        formed("tied transformer", model=transformer(tied=True)),
        formed("head is a unit", units=units(*BLOCKS, "head", "")),
        formed("head is a unit, without module hooks", "train 2", units(*BLOCKS, "head", ""), hooks=False),
        formed("blocks run twice, accumulation", "accumulate, accumulate 2", attributes={"repeat": 2}),
        formed(
            "blocks run twice, accumulation reduced in bf16",
            "accumulate, accumulate 2",
            units(*BLOCKS, "", mp_policy=ONLY_REDUCED),
            attributes={"repeat": 2},
        ),
        formed(
            "blocks run twice, checkpointed, reentrant=True", "train 3", attributes={"repeat": 2, "checkpointed": True}
        ),
        formed(
            "head in a group, interleaved", "forwards_interleaved, train", units(*BLOCKS, ("embedding", "head"), "")
        ),
        formed("blocks run twice", model=transformer(repeat=2)),
        formed(
            "nested",
            units=units("blocks.0.inner.0", "blocks.0.inner.1", "blocks.1.inner.0", "blocks.1.inner.1", *BLOCKS, ""),
            model=transformer(depth=4, group=2),
        ),
        formed(
            "nested, inner ones twice",
            "train 2",
            units("blocks.0.inner.0", "blocks.0", "blocks.1.inner.0", ""),
            model=transformer(depth=2, group=1, repeat=2),
        ),
        formed(
            "nested three deep",
            units=units("blocks.0.inner.0.up", "blocks.0.inner.0", "blocks.0.inner.1", "blocks.0", ""),
            model=transformer(depth=2, group=2),
        ),
        formed(
            "nested, mixed settings",
            units=(
                *units("blocks.0.inner.0", reshard_after_forward=False),
                *units("blocks.0.inner.1", "blocks.0", reshard_after_forward=True),
                *units(""),
            ),
            model=transformer(depth=2, group=2),
        ),
        # losses outside of forward, reads, flags inside
        formed("noted inside", "noted_inside, noted_inside"),
        formed("head outside", "head_outside, head_outside, train"),
        formed("head outside, tied", "head_outside True, head_outside", model=transformer(tied=True)),
        formed("head outside, unit", "head_outside, train, head_outside", units(*BLOCKS, "head", "")),
        formed("head outside, group", "head_outside, train, head_outside", units(*BLOCKS, ("norm", "head"), "")),
        formed("chunked head", "chunked_head, train"),
        formed("similarity in evaluation", "similarity, train, similarity, train", model=transformer(tied=True)),
        formed("frozen inside, block", "train, freeze_inside blocks.0, train 2"),
        formed("frozen inside, head", "train, freeze_inside head, train 2"),
        formed("frozen inside raf=False", "freeze_inside blocks.1 head, train 2", KEPT),
        formed("backward inside", "backward_inside, backward_inside, train", hooks=False),
        formed("regularized", "regularize, train, regularize"),
        # branches
        stacked(
            "branches",
            "train, use left, train 2, use right, train, use both, train",
            units("left", "right", ""),
            model=Branches,
        ),
        stacked(
            "branches in a group",
            "train, use left, train 2, use both, train",
            units(("left", "right"), ""),
            model=Branches,
        ),
        # several forwards and backwards
        stacked("two forwards", "two_forwards, two_forwards 3, train"),
        stacked("two losses", "two_losses, two_losses, train"),
        stacked("interleaved", "forwards_interleaved, train"),
        stacked("forward dropped", "forward_dropped, train, forward_dropped, train"),
        stacked(
            "forward dropped, then a step",
            "train, forward_dropped, train_without_step, forward_dropped, step_only, train",
        ),
        stacked("gradients of inputs", "input_gradient, input_gradient, train"),
        stacked("autograd.grad", "train, autograd_grad, train"),
        # accumulation
        stacked("accumulation", "accumulate, accumulate 2, train"),
        stacked("accumulation, kept", "reshard_after_backward False, accumulate, reshard_after_backward True, train"),
        stacked("accumulation of reduced gradients", "accumulate_reduced, accumulate_reduced 3"),
        stacked("microbatch dropped", "train, microbatch_dropped, train"),
        stacked("last backward", "last_backward, train"),
        stacked("zero gradients stay", "train 2 False, zero_grad, train"),
        # checkpointing
        stacked("stack, checkpointed, reentrant=False", "train 2", attributes={"checkpointed": False}),
        stacked("stack, checkpointed, reentrant=True", "train 2", attributes={"checkpointed": True}),
        stacked(
            "checkpointed inside, reentrant=False",
            "train 2",
            attributes={"blocks.0.checkpointed": False, "blocks.1.checkpointed": False},
        ),
        stacked(
            "checkpointed inside, reentrant=True",
            "train 2",
            attributes={"blocks.0.checkpointed": True, "blocks.1.checkpointed": True},
        ),
        # settings by hand
        stacked("unshard", "unshard, train, unshard blocks.0, reshard blocks.0, unshard, reshard, train"),
        stacked("unshard, then save", "unshard, save, unshard blocks.1, save, train"),
        stacked("unshard, then evaluate", "unshard blocks.0, evaluate, train"),
        stacked("unshard asynchronously", "unshard_async, train, unshard_async blocks.0, reshard blocks.0, train"),
        stacked("reshard after forward by hand", "evaluate, reshard, train, evaluate, save, evaluate False 2, train"),
        stacked(
            "setting changed",
            "train, reshard_after_forward False, train 2, evaluate, reshard_after_forward True, train, evaluate",
        ),
        stacked(
            "kept after backward",
            "reshard_after_backward False, train 2, evaluate, save, train, reshard_after_backward True, train",
        ),
        stacked("clipped", "clip, clip"),
        stacked("optimizer's hooks", "step_with_hooks, step_with_hooks", adam=True),
        stacked("optimizer built after a forward", "train, evaluate, reshard, new_optimizer, train"),
        # flags
        stacked("freezing", "train, freeze blocks.0, train 2, freeze blocks.0 True, train 2"),
        stacked("freezing all", "freeze root, train, freeze root True, train"),
        stacked("freezing after forward", "train, evaluate, freeze last, train, freeze last True, train"),
        # state, casts, writes
        stacked("loading", "train, load, train, evaluate, load, train", adam=True),
        stacked("loading by assignment", "train, load True, new_optimizer, train"),
        stacked("cast", "to float64, to float32, train"),
        stacked("writes", "train, apply_, train"),
        # exceptions
        stacked("exception in forward", "raise_in_forward blocks.1, train, raise_in_forward last, train"),
        stacked("exception in forward without a reset", "train, raise_in_forward blocks.1 False, train"),
        stacked("exception in backward", "raise_in_backward blocks.0, train, raise_in_backward first, train"),
        stacked("exception in backward without a reset", "train, raise_in_backward blocks.0 False, train"),
        # policies
        stacked("stack bf16", units=units(*BLOCKS, "", mp_policy=BF16)),
        stacked("stack bf16, reduced in fp32", units=units(*BLOCKS, "", mp_policy=REDUCED)),
        formed("transformer bf16, cast", "train 2, accumulate, evaluate", units(*BLOCKS, "", mp_policy=CAST)),
        formed(
            "transformer reduced in bf16", "train 2, accumulate, evaluate", units(*BLOCKS, "", mp_policy=ONLY_REDUCED)
        ),
        formed("transformer bf16, head outside", "head_outside, train", units(*BLOCKS, "", mp_policy=REDUCED)),
        stacked("offload", units=units(*BLOCKS, "", offload_policy=OFFLOAD)),
        stacked("part by itself", "train_part blocks.0, train"),
        stacked("children only", units=units(*BLOCKS)),
    ]


def composable_by_command() -> list[Program]:
    """Settings and operations of other programs in another combination, which random programs have, too."""
    return [
        stacked("one unit raf=True", units=units("", reshard_after_forward=True)),
        stacked("without module hooks", hooks=False),
        stacked("adam", adam=True),
        stacked(
            "five blocks", "train 2", units(*BLOCKS, "blocks.2", "blocks.3", "blocks.4", ""), model=lambda: Stack(5)
        ),
        stacked(
            "mlp, one unit per two layers",
            units=units(("layers.0", "layers.1"), "layers.2", ""),
            model=lambda: Mlp(6, 7, 3, 5),
        ),
        stacked("frozen raf=False", units=units(*BLOCKS, "blocks.2", "", reshard_after_forward=False), model=Frozen),
        formed("transformer raf=False", units=KEPT),
        formed(
            "group raf=False",
            units=(*units(*BLOCKS), *units(("norm", "head"), reshard_after_forward=False), *units("")),
        ),
        formed("group with the embedding", units=units(*BLOCKS, ("embedding", "norm", "head"), "")),
        formed("blocks run twice raf=False", units=KEPT, model=transformer(repeat=2)),
        formed("noted inside raf=False", "noted_inside", KEPT),
        formed("head outside by weight", "head_outside True, head_outside True, train"),
        formed(
            "head outside, unit raf=False",
            "head_outside, head_outside, train",
            (*units(*BLOCKS), *units("head", reshard_after_forward=False), *units("")),
        ),
        formed("chunked head, group", "chunked_head, chunked_head, train", units(*BLOCKS, ("norm", "head"), "")),
        formed("frozen inside, first step", "freeze_inside blocks.1 embedding, train 2"),
        formed("backward inside raf=False", "backward_inside, train", KEPT, hooks=False),
        stacked(
            "branches in a group raf=False",
            "use left, train 2, use both, train",
            (*units(("left", "right"), reshard_after_forward=False), *units("")),
            model=Branches,
        ),
        stacked("two forwards raf=False", "two_forwards, train", KEPT),
        stacked("accumulation raf=False", "accumulate, train", KEPT),
        formed("kept transformer, checkpointed, reentrant=False", "train 2", KEPT, attributes={"checkpointed": False}),
        formed("kept transformer, checkpointed, reentrant=True", "train 2", KEPT, attributes={"checkpointed": True}),
        stacked("setting of a block changed", "train, reshard_after_forward False blocks.0, train 2, evaluate, save"),
        stacked("optimizer built after a backward", "train, new_optimizer, train"),
        stacked("cast after a step", "train, to bfloat16, evaluate, to float32, train"),
        stacked("exception in forward raf=False", "train, raise_in_forward last, train", KEPT),
        formed("transformer bf16", "train 2, accumulate, evaluate", units(*BLOCKS, "", mp_policy=BF16)),
        formed(
            "transformer bf16, reduced in fp32", "train 2, accumulate, evaluate", units(*BLOCKS, "", mp_policy=REDUCED)
        ),
        stacked("stack bf16, cast", units=units(*BLOCKS, "", mp_policy=CAST)),
        stacked("stack reduced in bf16", units=units(*BLOCKS, "", mp_policy=ONLY_REDUCED)),
        stacked("offload raf=False", units=units(*BLOCKS, "", offload_policy=OFFLOAD, reshard_after_forward=False)),
        stacked("part after the whole", "train, train_part blocks.0, train"),
    ]


def wrappers() -> list[Program]:
    """Programs with ``FullyShardedDataParallel``."""

    def made(
        name: str,
        text: str = "train, evaluate, train",
        *,
        orig: bool = True,
        model: Any = stack,
        paths: tuple[str, ...] = (*BLOCKS, ""),
        **settings: Any,
    ) -> Program:
        chosen = units(*paths, use_orig_params=orig, **settings)
        return Program(name, model, chosen, operations(text), wrapper=True)

    found = []
    for orig in (True, False):
        of = f"wrapper {orig}"
        bf16 = ("MixedPrecision", {"param_dtype": torch.bfloat16})
        found += [
            made(of, orig=orig),
            made(f"wrapped transformer {orig}", model=Transformer, orig=orig),
            made(f"{of}, one unit", paths=("",), orig=orig),
            made(f"{of}, SHARD_GRAD_OP", sharding_strategy=("ShardingStrategy", "SHARD_GRAD_OP"), orig=orig),
            made(f"{of}, NO_SHARD", sharding_strategy=("ShardingStrategy", "NO_SHARD"), orig=orig),
            made(f"{of}, bf16", mixed_precision=bf16, orig=orig),
            made(f"{of}, accumulation", "accumulate, train", orig=orig),
            made(f"{of}, saved", "train, save, train, load, train", orig=orig),
            made(f"{of}, summoned", "summon, train, summon, train", orig=orig),
            made(f"{of}, clipped", "clip, clip", orig=orig),
            made(f"{of}, head outside", "head_outside, train", model=Transformer, orig=orig),
            made(f"{of}, tied", model=transformer(tied=True), orig=orig),
            made(f"{of}, two forwards", "two_forwards, train", orig=orig),
            made(f"{of}, gradients of inputs", "input_gradient, train", orig=orig),
        ]
    frozen = made("wrapper, frozen", "train 2", model=Frozen, paths=(*BLOCKS, "blocks.2", ""))
    return [*found, frozen, replace(found[0], name="wrapper, checkpointed", attributes={"checkpointed": False})]


WRAPPERS_BY_COMMAND = {
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
SUITE = {each.name: each for each in (*composable(), *wrappers()) if each.name not in WRAPPERS_BY_COMMAND}
PROGRAMS = {each.name: each for each in (*composable(), *composable_by_command(), *wrappers())}
