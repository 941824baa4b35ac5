"""Compare the execution order of units around forwards of the root; see ``fullshard.ranks.order``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fullshard.engine.hooks import outside_transforms
from fullshard.engine.runtime import Runtime
from fullshard.ranks.groups import data_parallel_groups
from fullshard.ranks.order import compare_order, warn_of_change

__all__ = ["checked_execution_order"]


@contextlib.contextmanager
def checked_execution_order(runtime: Runtime) -> Iterator[None]:
    """Compare the order of units in a training forward of the root with other ranks', or with the first forward's.

    Raises:
        FullshardError: In the first such forward, on all ranks, if they run their units in different orders.
    """
    order, root = runtime.prefetcher.order, runtime.root()
    assert root is not None
    groups = data_parallel_groups(root.mesh)
    if not groups:
        yield
    elif order.compared is None:
        yield
        with outside_transforms():
            compare_order(order.names(), groups)
        order.compared = order.names()
    else:
        yield
        if order.changed and not order.change_warned and order.names() != order.compared:
            order.change_warned = True
            warn_of_change(order.compared, order.names())
