"""When the order in which ranks run their units is checked: see :mod:`fullshard.engine.order`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from fullshard.engine.order import OrderCheck, OrderWatch
from fullshard.engine.schedule import Schedule
from fullshard.errors import FullshardError

__all__ = ["validated"]


@contextlib.contextmanager
def validated(schedule: Schedule) -> Iterator[None]:
    """Around a forward of the root in training: compare its order of units with other ranks', or with the first one's.

    Raises:
        FullshardError: In the first such forward, on all ranks, if they run their units in different orders.
    """
    order = schedule.order
    if order.checks is None:
        with _first(schedule):
            yield
        return
    yield
    if order.changed:
        order.checks[0].note(order.names())


@contextlib.contextmanager
def _first(schedule: Schedule) -> Iterator[None]:
    root = schedule.root()
    assert root is not None
    mesh = root.mesh
    parts = [(mesh.shard, mesh.world_size), (mesh.replicate, mesh.replicas)]
    groups = [part.get_group() for part, size in parts if part is not None and size > 1]
    if not groups:
        yield
        return
    checks = [OrderCheck(group, mesh.device) for group in groups]
    watch = OrderWatch(groups[0], mesh.device)
    schedule.order.on_start = watch.started
    failure: FullshardError | None = None
    try:
        with watch.guard():
            yield
            watch.completed()
            failure = _compared(checks[0], watch.names)
    except FullshardError as error:
        if watch.verdict is None:
            raise
        failure = error
    finally:
        schedule.order.on_start = None
        watch.finished()
    for check in checks[1:]:
        # Replicas elsewhere may agree among themselves; they learn of it here, and do not wait for ranks that are gone.
        names = (
            watch.names if failure is None else (*watch.names, "what differs inside of a group that is sharded over")
        )
        found = _compared(check, names)
        failure = failure or found
    if failure is not None:
        raise failure
    schedule.order.checks = checks


def _compared(check: OrderCheck, names: Sequence[str]) -> FullshardError | None:
    try:
        check.compare(names)
    except FullshardError as error:
        return error
    return None
