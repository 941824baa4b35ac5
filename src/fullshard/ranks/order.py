"""Check that all ranks have the same units, and run them in the same order.

Collectives of ranks that run different units do not match: at best they hang, at worst they mix up weights.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from fullshard.errors import FullshardError
from fullshard.ranks.agreement import compare, list_values

__all__ = ["END", "compare_order", "explain_difference", "explain_units", "first_difference", "warn_of_change"]

END = "(end)"  # follows the names of the units in the execution order of a forward that is over


def compare_order(order: Sequence[str], groups: Sequence[dist.ProcessGroup]) -> None:
    """Compare the execution order of a forward that has ended with other ranks'.

    Args:
        order: Names of the units that ran.
        groups: The groups of a mesh's axes.

    Raises:
        FullshardError: On all ranks, if they ran their units in different orders.
    """
    compare((*order, END), groups, _failure)


def first_difference(orders: Mapping[int, Sequence[str]]) -> str | None:
    """Return where the units that ran, by global rank, differ first; None if they agree as far as known."""
    for position in range(max(map(len, orders.values()), default=0)):
        here = {rank: _describe(order[position]) for rank, order in orders.items() if position < len(order)}
        if len(set(here.values())) > 1:
            return f"at position {position} (from 0): {list_values(here)}"
    return None


def explain_difference(orders: Mapping[int, Sequence[str]]) -> str | None:
    """Return an error message if the units that ran, by global rank, differ; None if they agree as far as known."""
    difference = first_difference(orders)
    if difference is None:
        return None
    return (
        "the ranks ran the model's units in different orders in the first forward, so their collectives do not match; "
        f"the first difference is {difference}. Make all ranks call the same modules in the same order: look for "
        "control flow that depends on the rank or on its data, and call modules that a rank does not need with an "
        "input of zeros"
    )


def explain_units(units: Mapping[int, Mapping[str, str]]) -> str:
    """Return an error message about two ranks that differ in the parameters of the same units.

    Args:
        units: By global rank and name of the unit, a line for each parameter.
    """
    for at in (0, None):  # first without the places in a flat parameter, which are others in all of it
        for name in dict.fromkeys(name for own in units.values() for name in own):
            parameters = (own[name].split("\n") for own in units.values())
            for lines in itertools.zip_longest(*parameters, fillvalue="no more parameters"):
                if len({line if at is None else line.split(", from element ")[at] for line in lines}) > 1:
                    return (
                        f"ranks have sharded different parameters: {_describe(name)} has "
                        f"{list_values(dict(zip(units, lines, strict=True)))}. All ranks of a process group have to "
                        "shard the same parameters alike: names, shapes, dtypes, requires_grad, and the arguments of "
                        "fully_shard"
                    )
    raise AssertionError("digests differ but units do not")


def warn_of_change(before: Sequence[str], now: Sequence[str]) -> None:
    """Warn that this rank's execution order differs from that of its first forward. No communication."""
    pairs = enumerate(itertools.zip_longest(before, now, fillvalue=END))
    position, (then, instead) = next((position, pair) for position, pair in pairs if pair[0] != pair[1])
    warnings.warn(
        f"rank {dist.get_rank()} ran its units in a different order than in its first forward: at position {position} "
        f"(from 0), {_describe(then)} ran then and {_describe(instead)} ran now. This is fine if all ranks ran the "
        "same order; if not, collectives do not match, and ranks may hang or use wrong weights. Units that run "
        "out of order are not prefetched. This warning is shown once",
        UserWarning,
        stacklevel=2,
    )


def _failure(orders: Mapping[int, Sequence[str]]) -> FullshardError:
    found = explain_difference(orders)
    assert found is not None, "digests differ but orders do not"
    return FullshardError(found)


def _describe(name: str) -> str:
    return "no unit (its forward had ended)" if name == END else repr(name) if name else "the root"
