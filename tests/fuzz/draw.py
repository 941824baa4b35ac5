"""Drawing histories: every choice follows from one integer.

What the documentation says is not supported is not drawn: see docs/differences.md, and the rules of torch itself (no
gradients of inputs through reentrant checkpointing, nor detached segments in it; no double backward, and no second one,
through AOT autograd).
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, TypeVar

from containers import CONTAINERS
from fuzz.losses import DOUBLE_BACKWARD
from fuzz.models import KINDS
from fuzz.plan import BlockPlan, FrontEnd, HistoryPlan, ModelPlan, Operation, OptimizerPlan, every_block

T = TypeVar("T")

MIN_OPERATIONS, MAX_OPERATIONS = 4, 9
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
SMALL_MESSAGES = 256  # bytes per rank: then most parameters of small models travel directly


def draw(seed: int) -> HistoryPlan:
    """The history of a seed, which is any integer."""
    return _Drawing(seed).history()


class _Drawing:
    """Choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.choices = seed, random.Random(seed)

    def maybe(self, probability: float) -> bool:
        return self.choices.random() < probability

    def one(self, *options: T) -> T:
        return self.choices.choice(options)

    def history(self) -> HistoryPlan:
        front_end = self.front_end()
        model = self.model(front_end)
        optimizer = self.optimizer(front_end)
        plan = HistoryPlan(self.seed, model, front_end, optimizer)
        count = self.choices.randint(MIN_OPERATIONS, MAX_OPERATIONS)
        operations = [self.operation(plan, number) for number in range(1, count + 1)]
        if front_end.name != "wrapper" and self.maybe(0.08):  # before the first forward
            operations.insert(0, Operation("add", 0, {"block": self.choices.randrange(4), "unit": True}))
        return replace(plan, operations=tuple(operations))

    # ---------------------------------------------------------------- front ends

    def front_end(self) -> FrontEnd:
        name = self.one("fully_shard", "fully_shard", "fully_shard", "replicate", "wrapper", "wrapper")
        common: dict[str, Any] = {
            "name": name,
            "offload": self.maybe(0.1),
            "tiny": self.maybe(0.4),
            "direct_bytes": self.one(0, SMALL_MESSAGES),
            "fp16": self.maybe(0.07),
        }
        if name == "replicate":
            return FrontEnd(mesh=self.one((2,), (2,), (3,)), keep=self.maybe(0.15), **common)
        mesh: tuple[int, ...] = self.one((1,), (2,), (2,), (2,), (3,), (3,), (2, 2), (2, 1), (1, 2))
        if name == "wrapper":
            return FrontEnd(
                mesh=mesh,
                strategy=self.one(*(HYBRID if len(mesh) == 2 else STRATEGIES)),
                orig=self.maybe(0.5),
                prefetch=self.one("BACKWARD_PRE", "BACKWARD_POST", ""),
                **common,
            )
        keep = self.maybe(0.15)
        return FrontEnd(
            mesh=mesh,
            reshard=False if keep else self.one(None, None, True, False, mesh[-1]),
            keep=keep,
            columns=self.maybe(0.1),
            ragged=self.maybe(0.15),
            **common,
        )

    def optimizer(self, front_end: FrontEnd) -> OptimizerPlan:
        names = ["sgd", "momentum", "adamw"]
        if front_end.fp16:
            return OptimizerPlan("sgd", self.one("plain", "dtensors"))
        if not front_end.flat:
            names.append("muon")
        return OptimizerPlan(self.one(*names), self.one("plain", "dtensors"))

    # ---------------------------------------------------------------- models

    def model(self, front_end: FrontEnd) -> ModelPlan:
        reentrant = self.maybe(0.5)
        count = self.choices.randint(1, 4)
        compiled = self.one("eager", "aot_eager") if self.maybe(0.02) else ""
        blocks = [self.block(0, reentrant=reentrant) for _ in range(count)]
        if compiled:
            chosen = self.choices.randrange(count)
            blocks[chosen] = replace(blocks[chosen], compiled=compiled, checkpoint="", output="tensor", inner=())
        tokens = self.maybe(0.25)
        composable = front_end.name == "fully_shard"
        return ModelPlan(
            blocks=tuple(blocks),
            large=self.maybe(0.3),
            batch=self.one(1, 2),
            tokens=tokens,
            tied_blocks=self.maybe(0.2),
            tied_head=tokens and self.maybe(0.5),
            again=self.choices.randrange(count) if self.maybe(0.15) else -1,
            head=self.one("called", "called", "read"),
            head_unit=composable and self.maybe(0.4),
            block_unit=composable and count > 1 and self.maybe(0.15),
            output=self.container(0.3),
        )

    def container(self, probability: float) -> str:
        return self.one(*CONTAINERS) if self.maybe(probability) else "tensor"

    def block(self, depth: int, *, reentrant: bool) -> BlockPlan:
        checkpoint = ""
        if self.maybe(0.25):
            checkpoint = self.one("inside", "outside") + (" reentrant" if reentrant else "")
        return BlockPlan(
            kind=self.one(*KINDS),
            unit=self.maybe(0.75 if depth == 0 else 0.4),
            calls=self.one(2, 3) if self.maybe(0.15) else 1,
            output="tensor" if checkpoint == "outside reentrant" else self.container(0.2),
            checkpoint=checkpoint,
            frozen=self.one("some", "all") if self.maybe(0.15) else "",
            detach=self.one("input", "output") if not reentrant and self.maybe(0.15) else "",
            inner=tuple(
                self.block(depth + 1, reentrant=reentrant)
                for _ in range(self.choices.randint(1, 2) if depth < 2 and self.maybe(0.25) else 0)
            ),
        )

    # ---------------------------------------------------------------- operations

    def operation(self, plan: HistoryPlan, data: int) -> Operation:
        chosen = self.choices.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        arguments = self.loss(plan, chosen) | self.arguments(plan, chosen)
        if not _is_possible(plan, chosen, arguments):
            return Operation("train", data, {"steps": 1})
        return Operation(chosen, data, arguments)

    def loss(self, plan: HistoryPlan, name: str) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if name in WITH_BACKWARD and self.maybe(0.25):
            given["loss"] = self.one(*DOUBLE_BACKWARD, "jvp")
        if self.maybe(0.25):
            count = len(plan.model.blocks)
            given["run"] = [self.choices.randrange(count) for _ in range(self.choices.randint(1, count + 1))]
        if self.maybe(0.2):
            given["every"] = False
        if self.maybe(0.25):
            given["inputs"] = True
        if self.maybe(0.2):
            given["toggle"] = (self.choices.randrange(4), self.one("restored", "objects", "left", "after"))
        if self.maybe(0.25):
            given["outside"] = self.one("called", "read", "backwards")
        return given if _is_possible_loss(plan, name, given) else {}

    def arguments(self, plan: HistoryPlan, name: str) -> dict[str, Any]:
        block, none = self.choices.randrange(4), self.maybe(0.6)
        steps = self.one(1, 2, 2)
        drawn: dict[str, Any] = {  # rounding errors of fp16 would grow from step to step: both start anew after each
            "train": {"steps": 1 if plan.front_end.fp16 else steps, "to_none": none, "clip": self.one(0.0, 0.0, 0.05)},
            "accumulate_gradients": {"times": self.one(1, 2)},
            "optimizer_step": {"to_none": none},
            "zero_gradients": {"to_none": none},
            "microbatches": {
                "count": self.one(1, 2),
                "ends": self.one("backward", "backward", "synchronize"),
                "evaluates": self.maybe(0.3),
            },
            "several_graphs": {"order": self.choices.sample(range(3), self.one(2, 3))},
            "evaluate": {"mode": self.one("no_grad", "inference_mode")},
            "keep_unsharded": {"trains": self.maybe(0.5)},
            "unshard": {"unit": self.choices.randrange(4), "waits": self.maybe(0.7), "runs": self.maybe(0.7)},
            "child": {"block": block},
            "edit": {"way": self.one("in place", "summon")},
            "freeze": {"block": block, "trains": self.maybe(0.5)},
            "state_dict": {"optimizer": self.maybe(0.6)},
            "prefetch": {
                "direction": self.one("forward", "backward"),
                "units": [self.choices.randrange(5) for _ in range(3)],
            },
            "prefetch_bytes": {"budget": self.one(None, 0, 10_000, 10_000_000)},
            "reshard_after_forward": {"enable": self.maybe(0.5)},
            "fail": {"block": block, "where": self.one("forward", "backward")},
            "write": {"after": self.one(*POINTS), "way": self.one("mul", "copy")},
            "new_optimizer": {"after": self.one(*POINTS)},
            "replace": {"after": self.one("", *POINTS), "number": self.choices.randrange(20)},
            "add": {"block": block},
            "move": {"to": self.one("dtype", "dtype", "cpu"), "runs": self.maybe(0.5)},
            "read": {"block": block, "where": self.one("pre", "post", "between")},
            "out_of_memory": {"launches": self.choices.randrange(8), "place": self.one(0, 0, 1, 2)},
        }
        given: dict[str, Any] = drawn.get(name, {})
        if name == "several_graphs":  # numbers of batches, all of which have a graph
            given["order"] = sorted(range(len(given["order"])), key=given["order"].__getitem__)
        return given


POINTS = ("", "forward", "evaluation")  # what an operation comes after
WITH_BACKWARD = ("train", "accumulate_gradients", "microbatches", "several_graphs", "clip", "edit_gradients")
# Backwards of one forward after the other: what was computed after a forward has its backward before the next.
WITH_OUTSIDE = {*WITH_BACKWARD, "input_gradients", "state_dict", "fail", "forward_only", "read", "out_of_memory"}
WITH_OUTSIDE -= {"several_graphs"}
WEIGHTS = {
    "train": 10,
    "accumulate_gradients": 5,
    "optimizer_step": 3,
    "zero_gradients": 1,
    "microbatches": 4,
    "partial_reductions": 1,
    "several_graphs": 2,
    "clip": 2,
    "evaluate": 2,
    "forward_only": 1,
    "input_gradients": 2,
    "keep_unsharded": 1,
    "unshard": 1,
    "child": 1,
    "edit": 2,
    "edit_gradients": 1,
    "summon": 1,
    "freeze": 2,
    "copy": 2,
    "state_dict": 2,
    "prefetch": 1,
    "prefetch_bytes": 1,
    "reshard_after_forward": 1,
    "fail": 2,
    "unsharded_loss": 1,
    "write": 2,
    "new_optimizer": 2,
    "replace": 1,
    "add": 1,
    "move": 2,
    "read": 3,
    "out_of_memory": 2,
}


def _is_possible_loss(plan: HistoryPlan, name: str, given: dict[str, Any]) -> bool:
    """Whether the contract of the front end allows what happens inside and after the forward."""
    model, front_end = plan.model, plan.front_end
    blocks = list(every_block(model))
    kind, outside, toggle = given.get("loss", "square"), given.get("outside", ""), given.get("toggle")
    if kind == "jvp" and (outside or toggle or any(block.checkpoint or block.compiled for block in blocks)):
        return False
    if toggle is not None:
        number = toggle[0] % len(model.blocks)
        if any(block.compiled for block in blocks) or not _has_flags(plan, number):
            return False
        if toggle[1] == "objects" and front_end.name == "wrapper" and front_end.shows_whole:
            return False  # they may be unsharded ones, which a forward without gradients takes away
        stays = toggle[1] in ("left", "after")
        if stays and name not in (*WITH_BACKWARD, "read", "state_dict"):  # others are done to one model only
            return False
        if stays and (plan.optimizer.name == "muon" or any(block.checkpoint for block in blocks)):
            return False
    if not outside:
        return True
    if kind != "square":
        return False
    shown = front_end.shows_whole or name == "unsharded_loss"
    if name == "evaluate":
        return front_end.shows_without_gradients and outside != "backwards"
    if outside == "backwards" and name in ("input_gradients", "forward_only"):
        return False
    return shown and name in WITH_OUTSIDE | {"unsharded_loss"}


def _has_flags(plan: HistoryPlan, number: int) -> bool:
    """Whether the flags of a block can be changed, and no other changes with them."""
    model, front_end = plan.model, plan.front_end
    alone = model.blocks[number].unit and not (model.block_unit and number < 2)
    return not front_end.flat or (alone and not model.tied_blocks)


def _is_possible(plan: HistoryPlan, name: str, arguments: dict[str, Any]) -> bool:
    """Whether torch, and the documentation, allow this operation on this model."""
    model, front_end = plan.model, plan.front_end
    blocks = list(every_block(model))
    reentrant = any("reentrant" in block.checkpoint for block in blocks)
    lossy = front_end.fp16
    if arguments.get("loss", "square") != "square":
        compiled = any(block.compiled == "aot_eager" for block in blocks)
        if reentrant or compiled or model.tokens or lossy:
            return False
    if name == "accumulate_gradients" and arguments["times"] > 1:
        if "outside" in arguments:
            return False
        return all(block.compiled != "aot_eager" for block in blocks)
    if name == "input_gradients":
        return not (reentrant or model.tokens)
    if name == "partial_reductions":
        return front_end.name == "fully_shard" and len(front_end.mesh) == 2
    if name in ("freeze", "child"):
        number = arguments["block"] % len(model.blocks)
        chosen = model.blocks[number]
        if name == "child":
            alone = chosen.unit and not (model.block_unit and number < 2)
            return alone and not model.tied_blocks and not lossy and not chosen.compiled
        return _has_flags(plan, number)
    if name == "move" and arguments["to"] == "dtype" and any(block.kind == "dtypes" for block in blocks):
        return False  # optimizer state would have other dtypes than the parameters
    if name in ("fail", "add", "move", "out_of_memory"):
        return not any(block.compiled for block in blocks)
    if name == "replace":  # nobody knows of which matrix a new parameter is a 1-D part, before the next forward
        return not front_end.flat and not (front_end.name == "wrapper" and plan.optimizer.name == "muon")
    if name == "write" and front_end.flat and arguments["after"] == "forward":
        return not front_end.strategy.endswith(("GRAD_OP", "ZERO2"))  # the flat parameter is written, not what is kept
    if name == "microbatches" and arguments["evaluates"] and "outside" in arguments:
        return front_end.shows_without_gradients and arguments["outside"] != "backwards"
    if name == "unsharded_loss":
        return front_end.name != "wrapper"
    return name != "keep_unsharded" or front_end.name != "wrapper" or not arguments["trains"]
