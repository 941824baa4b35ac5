"""When the order in which ranks run their units is checked: see :mod:`fullshard.engine.order`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fullshard.engine.order import OrderCheck, OrderWatch
from fullshard.engine.schedule import Schedule

__all__ = ["validated"]


@contextlib.contextmanager
def validated(schedule: Schedule) -> Iterator[None]:
    """Around a forward of the root in training: compare its order of units with other ranks', or with the first one's.

    Raises:
        FullshardError: In the first such forward, on all ranks, if they run their units in different orders.
    """
    if schedule.order.checks is None:
        with _first(schedule):
            yield
        return
    yield
    schedule.order.checks[0].note(schedule.order.names())


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
    try:
        with watch.guard():
            yield
            watch.completed()
            for check in checks:
                check.compare(watch.names)
    finally:
        schedule.order.on_start = None
        watch.finished()
    schedule.order.checks = checks
