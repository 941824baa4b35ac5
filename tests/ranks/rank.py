"""Rank, the first argument of every body, and ``on_ranks``, which makes a pytest test of a body."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True, repr=False)
class Rank:
    """This process's place in its world: the first argument of every body.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: number of processes.
        mesh: 1-D mesh over the whole world, of the type of ``device``, without axis names.
        group: the default process group, of the back end that FULLSHARD_TEST_BACKEND names: gloo, without it.
        device: where this rank computes: what the test asks for, or what FULLSHARD_TEST_DEVICE names, or "cpu" (see
            ``device.py``). Tensors and modules that a test makes without naming a device are on it.
    """

    rank: int
    world_size: int
    mesh: DeviceMesh
    group: dist.ProcessGroup
    device: torch.device
    _meshes: dict[Any, DeviceMesh] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Rank({self.rank} of {self.world_size})"

    def make_mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Mesh of this shape over the whole world, made once and kept with its process groups."""
        if (shape, names) not in self._meshes:
            self._meshes[shape, names] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[shape, names]


def on_ranks(
    *worlds: int, timeout: float = DEFAULT_TIMEOUT, fresh: bool = False, device_type: str | None = None
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Make a module-level ``test_x(rank, ...)`` a pytest test that runs on every rank, once per world size.

    Further parameters come from ``pytest.mark.parametrize`` or fixtures, and have to be picklable. The name
    ``world`` is taken (the world size is ``rank.world_size``). Options are those of ``RankPool.__call__``.
    """
    if not worlds or not all(isinstance(world, int) for world in worlds):
        raise TypeError(f"on_ranks needs world sizes, as in @on_ranks(2, 4); got {worlds}")

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        further = list(inspect.signature(body).parameters.values())[1:]
        if taken := {"ranks", "world"} & {parameter.name for parameter in further}:
            raise TypeError(f"{body.__qualname__}: the parameter names {taken} are taken by on_ranks")

        @functools.wraps(body)
        def test(ranks: Callable[..., Any], world: int, **arguments: Any) -> None:
            __tracebackhide__ = True
            ranks(world, body, timeout=timeout, fresh=fresh, device_type=device_type, **arguments)

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [inspect.Parameter(name, keyword) for name in ("ranks", "world")]
        test.__signature__ = inspect.Signature(own + [p.replace(kind=keyword) for p in further])  # type: ignore[attr-defined]
        test.__rank_body__ = body  # type: ignore[attr-defined]  # what a worker finds under the body's name
        return pytest.mark.parametrize("world", worlds, ids=lambda world: f"{world}ranks")(test)

    return decorate
