"""A process group whose collectives return at once and move no floating-point number, not even within the process.

c10d's own fake group copies a shard to each rank's part of the output, with an operator per part. That time is nobody's
who is measured, and the more messages somebody sends, the longer it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.planning.simulation.group import Fabric, ModelledGroup
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks


class Done(dist._Work):
    def wait(self, timeout: object = None) -> bool:
        return True

    is_completed = wait

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class SilentGroup(ModelledGroup):
    collectives = 0  # so far, of this group
    _done = Done()

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._done

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if output.is_floating_point():
            self.collectives += 1
            return self._done
        return super().all_gather_single(output, input, opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self.collectives += 1
        return self._done

    _reduce_scatter_base = reduce_scatter_single

    def _issue(self, nbytes: float, fills: Any = (), result: Sequence[Tensor] = (), passes: int = 1) -> Any:
        self.collectives += 1
        if result and not result[0].is_floating_point():  # pickled objects, and their sizes
            for fill in fills:
                fill()
        return self._done


@contextlib.contextmanager
def silent_ranks(ranks: int, *, group_type: type[SilentGroup] = SilentGroup) -> Iterator[Fabric]:
    """Be rank 0 of ``ranks`` CPU ranks on such a group as long as the block lasts, on one thread.

    The group calls itself NCCL, and has group calls.
    """
    torch.set_num_threads(1)
    # What was to arrive is whatever was there before; denormal numbers among it would cost time.
    torch.set_flush_denormal(True)
    nothing: Any = SimpleNamespace(device=torch.device("cpu"))
    with modelled_ranks(ranks, Network(1.0, like="nccl"), device=nothing, group_type=group_type) as fabric:
        yield fabric
