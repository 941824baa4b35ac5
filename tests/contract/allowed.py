"""The differences that are meant: one list. Each makes a program more right, and has a row in docs/differences.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from contract.comparison import Difference


@dataclass(frozen=True)
class Allowed:
    """A difference from torch that is meant.

    Attributes:
        name: of the difference.
        row: the topic (first column) of its row in ``docs/differences.md``.
        reason: why a program is more right with it.
        shown_by: a program that shows it.
        matches: whether a difference is one of these.
    """

    name: str
    row: str
    reason: str
    shown_by: str
    matches: Callable[[Difference], bool]


def _numbers(d: Difference) -> bool:
    return "values" in d.what or d.what in ("loss", "gradient of output", "gradient", "norm", "product")


ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        "late hooks on forward",
        "forward hooks registered after `fully_shard`",
        "a hook belongs to the forward of its module: it can read the weights that computed",
        "late hooks",
        lambda d: d.front_end == "fully_shard" and d.point.startswith("late post"),
    ),
    Allowed(
        "unreduced gradients",
        "gradients of backwards without sync",
        "what `.grad` has is a mean over the ranks: never this rank's part of it",
        "accumulation",
        lambda d: d.what == "grad" and (d.theirs, d.ours) == ("plain", "None"),
    ),
    Allowed(
        "reduced gradients in backward",
        "`.grad` of sharded parameters inside backward",
        "it is set when the reduction is complete, which an accelerator does not know before backward has ended",
        "stack raf=None",
        lambda d: d.what == "grad" and (d.theirs, d.ours) == ("DTensor", "None") and _before_the_end(d),
    ),
    Allowed(
        "parameters on a smaller mesh",
        "parameters that are registered after forward with `reshard_after_forward=<int>`",
        "an optimizer built after forward updates the sharded parameters",
        "stack raf int",
        lambda d: d.program == "stack raf int" and d.what in ("identity", "placements", "local shape", "values"),
    ),
    Allowed(
        "flags changed inside of forward",
        "`requires_grad` changed while a unit is unsharded",
        "what a program has unfrozen is trained",
        "frozen inside raf=False",
        lambda d: (
            "freeze" in d.operations and (d.what == "requires_grad" or (d.right == "fullshard" and d.what != "kind"))
        ),
    ),
    Allowed(
        "stale weights",
        "optimizer step after a forward without backward",
        "after a step no unit computes with weights from before it",
        "forward dropped, then a step",
        lambda d: d.right == "fullshard" and _numbers(d) and "raise_in" not in d.operations,
    ),
    Allowed(
        "weights from before a step",
        "optimizer step after a forward without backward",
        "after a step no module shows weights from before it",
        "freezing all",
        lambda d: d.stepped and (d.what, d.theirs, d.ours) == ("kind", "plain", "DTensor"),
    ),
    Allowed(
        "hooks of others on the output of a unit, in backward",
        "hooks on the output of a unit that are registered before `fully_shard`",
        "a hook belongs to the backward of the unit: it can read the weights that compute",
        "stack raf=None",
        lambda d: (
            d.in_backward
            and (d.what, d.theirs, d.ours) == ("kind", "DTensor", "plain")
            and d.point.startswith(("gradient of the output of", "backward pre", "backward post"))
        ),
    ),
    Allowed(
        "units whose output is that of the root",
        "hooks on the output of a unit that are registered before `fully_shard`",
        "a unit is sharded until its own backward begins: a hook of the root runs before that",
        "head is a unit, without module hooks",
        lambda d: (
            d.in_backward
            and "head" in d.operations
            and (d.what, d.theirs, d.ours) == ("kind", "plain", "DTensor")
            and d.point == "gradient of the output of root"
        ),
    ),
    Allowed(
        "recomputed twice",
        "units that run several times in reentrant checkpointing",
        "there is one correct result",
        "blocks run twice, checkpointed, reentrant=True",
        lambda d: (
            "'checkpointed': True" in d.operations
            and "'repeat': 2" in d.operations
            and d.right in ("", "both", "fullshard")
        ),
    ),
    Allowed(
        "hooks with a part of the gradient",
        "post-accumulate hooks of units that run several times, after backwards without sync",
        "a hook that steps does so once per backward, with the whole gradient",
        "blocks run twice, accumulation",
        lambda d: (
            d.front_end == "fully_shard"
            and "'repeat': 2" in d.operations
            and re.match(r"\d+ accumulate\b.*: post-accumulate", d.where) is not None
            and (d.theirs, d.ours) == ("reached", "never reached")
        ),
    ),
    Allowed(
        "tied parameters",
        "tied parameters in different units",
        "there is one correct result",
        "language, tied across units",
        lambda d: d.program == "language, tied across units",
    ),
    Allowed(
        "kept after backward",
        "parameters after a backward with `set_reshard_after_backward(False)`",
        "what is read, clipped and given to optimizers after a backward are the parameters that have the gradients",
        "accumulation, kept",
        lambda d: (
            "reshard_after_backward" in d.operations and (d.what, d.theirs, d.ours) == ("kind", "plain", "DTensor")
        ),
    ),
    Allowed(
        "gradients of a failed step",
        "exception in forward or backward",
        "nothing of a step that has failed is in the next one",
        "exception in backward",
        lambda d: d.right == "fullshard" and _numbers(d) and "raise_in" in d.operations,
    ),
    Allowed(
        "parameters after an exception",
        "exception in forward or backward",
        "the next step works without a call",
        "exception in forward without a reset",
        lambda d: (
            d.point == "after the exception"
            or ("raise_in_backward" in d.where and d.point.startswith("post-accumulate"))
            or ("raise_in" in d.operations and "False" in d.operations)
        ),
    ),
    Allowed(
        "backward inside of forward",
        "backward and optimizer step inside of a module's forward",
        "forward goes on with the unsharded parameters",
        "backward inside",
        lambda d: d.where.partition(":")[0].endswith("backward_inside") and d.what == "kind",
    ),
    Allowed(
        "parameters in forward of a wrapper",
        "the original parameters in forward",
        "they are listed in forward, too, and autograd accumulates their gradients",
        "wrapper True",
        lambda d: (
            _wrapper(d)
            and ((d.what == "names" and _inside(d)) or (d.theirs, d.ours) == ("plain, no Parameter", "plain"))
        ),
    ),
    Allowed(
        "parameters of a wrapper outside of forward",
        "`use_orig_params=False`: `model.layer.weight` outside of forward",
        "what is there can be read",
        "wrapper False",
        lambda d: _wrapper(d) and (d.theirs == "a view that cannot be read" or d.theirs == "freed"),
    ),
    Allowed(
        "flat parameters after an evaluation",
        "`use_orig_params=False` with `SHARD_GRAD_OP`: values written to a flat parameter after an evaluation",
        "the next forward computes with what was written, and so does not show what was all-gathered before",
        "wrapper False, SHARD_GRAD_OP",
        lambda d: (
            _wrapper(d)
            and "'use_orig_params': False" in d.operations
            and not d.in_backward
            and (d.what, d.theirs, d.ours) == ("form", "whole", "part")
            and _inside(d)
        ),
    ),
    Allowed(
        "prefetched units of a wrapper",
        "parameters of a unit that is prefetched in backward",
        "what a module holds does not depend on what is prefetched",
        "wrapper True",
        lambda d: _wrapper(d) and d.in_backward and d.what in ("form", "dtype"),
    ),
    Allowed(
        "padding of flat parameters",
        "`use_orig_params=False`: alignment",
        "vectorized kernels",
        "wrapper False",
        lambda d: _wrapper(d) and "'use_orig_params': False" in d.operations and "state " in d.what,
    ),
    Allowed(
        "parameters of which a rank holds nothing",
        "gradients of parameters of which this rank holds nothing",
        "every rank has a gradient and state of the same parameters",
        "wrapper True",
        lambda d: (
            _wrapper(d)
            and (
                (d.what, d.theirs, d.ours) == ("grad", "None", "plain")
                or d.what in ("number of states", "optimizer's keys")
                or ("state " in d.what and d.theirs == "nothing")
            )
        ),
    ),
    Allowed(
        "frozen parameters of a wrapper",
        "frozen beside trainable parameters",
        "no gradients are computed, kept or sent for frozen parameters",
        "wrapper, frozen",
        lambda d: d.program == "wrapper, frozen",
    ),
    Allowed(
        "hooks on sharded parameters of a wrapper",
        "hooks on sharded parameters with `use_orig_params=True`",
        "documented behavior of `Tensor`",
        "wrapper True",
        lambda d: _wrapper(d) and d.point.startswith("post-accumulate") and d.theirs == "never reached",
    ),
    Allowed(
        "parameters inside summon_full_params",
        "parameters inside `summon_full_params` with `use_orig_params=True`",
        "edits arrive together, when the block ends, or not at all",
        "wrapper True, summoned",
        lambda d: _wrapper(d) and d.what == "identity" and re.fullmatch(r"\d+ summon: inside", d.where) is not None,
    ),
    Allowed(
        "hooks in each backward",
        "backwards that reach parameters only through what was computed after forward, such as a head on chunks",
        "no gradient stays unreduced if the backward of the forward itself does not come",
        "chunked head",
        lambda d: (
            d.front_end == "fully_shard"
            and "chunked_head" in d.where
            and d.point.startswith("post-accumulate")
            and (d.theirs, d.ours) == ("never reached", "reached")
        ),
    ),
)


def _inside(d: Difference) -> bool:
    """Whether a point is inside of a forward or backward."""
    return d.in_backward or d.point.startswith(("pre", "post", "called"))


def _wrapper(d: Difference) -> bool:
    return d.front_end == "wrapper"


def _before_the_end(d: Difference) -> bool:
    """Whether a backward has not ended, was not the last one, or has raised."""
    return (
        d.in_backward
        or "raise_in_backward" in d.where
        or any(name in d.where for name in ("last_backward", "backward_inside"))
    )


def allowed(difference: Difference) -> Allowed | None:
    """The entry that a difference falls under."""
    return next((entry for entry in ALLOWED if entry.matches(difference)), None)
