"""Check the execution order of units around forwards of the root; see :mod:`fullshard.ranks.order`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from fullshard.engine.runtime import Runtime
from fullshard.errors import FullshardError
from fullshard.ranks.groups import data_parallel_groups
from fullshard.ranks.order import OrderCheck, OrderWatchdog

__all__ = ["checked_execution_order"]


@contextlib.contextmanager
def checked_execution_order(runtime: Runtime) -> Iterator[None]:
    """Compare the order of units in a training forward of the root with other ranks', or with the first forward's.

    Raises:
        FullshardError: In the first such forward, on all ranks, if they run their units in different orders.
    """
    order = runtime.prefetcher.order
    if order.checks is None:
        with _check_first_forward(runtime):
            yield
        return
    yield
    if order.changed:
        order.checks[0].warn_if_changed(order.names())


@contextlib.contextmanager
def _check_first_forward(runtime: Runtime) -> Iterator[None]:
    root = runtime.root()
    assert root is not None
    mesh, groups = root.mesh, data_parallel_groups(root.mesh)
    if not groups:
        yield
        return
    checks = [OrderCheck(group, mesh.device) for group in groups]
    watch = OrderWatchdog(groups[0], mesh.device)
    runtime.prefetcher.order.on_start = watch.started
    failure: FullshardError | None = None
    try:
        with watch.guard():
            yield
            watch.completed()
            failure = _compare(checks[0], watch.names)
    except FullshardError as error:
        if watch.failure is None:
            raise
        failure = error
    finally:
        runtime.prefetcher.order.on_start = None
        watch.finished()
    for check in checks[1:]:
        # Other replicas may agree among themselves; they learn of the failure here instead of waiting for ranks that
        # left.
        names = watch.names if failure is None else (*watch.names, "an order that differs within a shard group")
        found = _compare(check, names)
        failure = failure or found
    if failure is not None:
        raise failure
    runtime.prefetcher.order.checks = checks


def _compare(check: OrderCheck, names: Sequence[str]) -> FullshardError | None:
    try:
        check.compare(names)
    except FullshardError as error:
        return error
    return None
