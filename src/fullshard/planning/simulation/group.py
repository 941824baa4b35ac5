"""One rank's view of a process group that is a model, and the works that it returns.

[Note: Contents]
All ranks hold what this rank holds. So a gather repeats the own piece, a sum is the own value times N, a broadcast
changes nothing. Then no NaN and no denormal reaches the computation, values stay in the range in which they train, and
every system gets the same ones whatever its collectives are. Filling is not the host's work on a real network; it is
taken out of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fullshard.planning.simulation.clocks import Device, Passage
from fullshard.planning.simulation.network import Network


class ModelledWork(dist.Work):
    """A launch: a collective, or those of a group call. It keeps the tensors alive until it goes."""

    seconds: float  # that the launch takes
    fills: list[Callable[[], object]]  # write the outputs
    outputs: list[Tensor]
    passage: Passage | None  # None: the group call is not over yet
    _device: Device

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.seconds, self.fills, self.outputs, self.passage, self._device = 0.0, [], [], None, device

    def fill(self) -> None:
        """Write what arrives."""
        with torch.no_grad():
            for fill in self.fills:
                fill()

    def wait(self, timeout: object = None) -> bool:
        """Have the device wait; a host blocks until the end."""
        assert self.passage is not None, "waited for a collective inside its group call"
        self._device.wait(self.passage)
        return True

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return True if its end has come."""
        return self.passage is not None and self._device.is_over(self.passage)

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, since nobody can call back later, and return a future that is done."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.outputs)
        return future


class Fabric:
    """The link of one process, and everything that is in flight on it.

    Args:
        network: What it is like.
        device: What computes beside it.
        group_type: What its groups are.
    """

    network: Network
    device: Any
    group_type: type[ModelledGroup]
    passages: list[Passage] | None  # of all launches, for tests; None: not recorded
    groups: int  # made so far

    def __init__(self, network: Network, device: Device, group_type: type[ModelledGroup]) -> None:
        self.network, self.device, self.group_type, self.passages, self.groups = network, device, group_type, None, 0

    def send(self, work: ModelledWork, group: ModelledGroup) -> ModelledWork:
        """Put a launch on the link."""
        communicator = group.number if self.network.like == "nccl" else None
        work.passage = Passage(work.seconds, communicator, group.network.link_name)
        self.device.transmit(work.passage, work.fill)
        if self.passages is not None:
            self.passages.append(work.passage)
        return work


class ModelledGroup(dist.ProcessGroup):
    """One rank's view of ``size`` ranks, none of which is there. See the module docstring."""

    fabric: Fabric
    number: int  # among the groups of the process
    network: Network  # among its ranks
    _rank: int
    _size: int
    _name: str
    _open: ModelledWork | None  # a group call under way

    def __init__(self, fabric: Fabric, rank: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.fabric, self.number, self.network = fabric, fabric.groups, fabric.network.of(ranks)
        fabric.groups += 1
        self._rank, self._size, self._name, self._open = rank, len(ranks), name, None

    # ------------------------------------------------------------------------------------------- what it is

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name under which c10d registers it."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - c10d's own name
        """Return ``modelled``, whatever the network is like."""
        return "modelled"

    name = getBackendName

    def _get_backend(self, device: torch.device) -> SimpleNamespace:  # type: ignore[override]
        """Return a back end with the name that a library which asks for it expects."""
        name = "modelled" if self.network.like == "collective" else self.network.like
        return SimpleNamespace(name=lambda: name)

    # ------------------------------------------------------------------------------------------- launches

    def _start_coalescing(self, device: torch.device) -> None:
        if self.network.like == "nccl":
            self._open = ModelledWork(self.fabric.device)

    def _end_coalescing(self, device: torch.device) -> Any:
        work, self._open = self._open, None
        return None if work is None or not work.outputs else self.fabric.send(work, self)

    def _issue(
        self,
        nbytes: float,
        fills: Sequence[Callable[[], object]] = (),
        result: Sequence[Tensor] = (),
        passes: int = 1,
    ) -> Any:
        network = self.network
        work = self._open or ModelledWork(self.fabric.device)
        if work.outputs:  # of a group call, which has the latency once
            work.seconds -= network.seconds(0.0, self._size, passes)
        work.seconds += network.seconds(nbytes, self._size, passes)
        # Objects are pickled, and their sizes are sent: programs read them.
        if network.fills or any(not (tensor.is_meta or tensor.is_floating_point()) for tensor in result):
            work.fills += fills
        work.outputs += result
        return work if self._open is not None else self.fabric.send(work, self)

    def _share(self, nbytes: float) -> float:
        """Return the bytes of a region that come from other ranks."""
        return nbytes * (self._size - 1) / self._size

    def _part(self, region: Tensor) -> Tensor:
        return region.view(-1).narrow(0, self._rank * (region.numel() // self._size), region.numel() // self._size)

    def _summed(self, target: Tensor, own: Tensor, opts: Any) -> Callable[[], object]:
        """Return a function that writes ``own``, reduced over ranks that all hold it, to ``target``."""
        op: Any = opts.reduceOp if opts is not None else ReduceOp.SUM
        name = str(getattr(op, "op", op)).rsplit(".", 1)[-1]
        factor: float = self._size if name in ("SUM", "PREMUL_SUM") else 1  # integers cannot be multiplied by floats
        if name == "PREMUL_SUM":
            factor *= float(op.__getstate__()[1])

        def fill() -> None:
            if target.data_ptr() != own.data_ptr():
                target.view(-1).copy_(own.view(-1))
            if factor != 1:
                target.mul_(factor)

        return fill

    # ------------------------------------------------------------------------------------------- collectives

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill ``output``, of ``size * input.numel()`` elements, with copies of the input."""

        def fill() -> None:
            output.view(self._size, -1).copy_(input.reshape(1, -1).expand(self._size, -1))

        return self._issue(self._share(output.nbytes), [fill], [output])

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Fill every output with the input."""
        pairs = [(target, own) for targets, own in zip(outputs, inputs, strict=True) for target in targets]
        fills = [_copy(target, own) for target, own in pairs]
        nbytes = sum(target.nbytes for target, _ in pairs)
        return self._issue(self._share(nbytes), fills, [target for target, _ in pairs])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduce this rank's part of ``input``, of ``size * output.numel()`` elements."""
        fill = self._summed(output, self._part(input), opts)
        return self._issue(self._share(input.nbytes), [fill], [output])

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Model an in-place all-reduce."""
        nbytes = 2 * self._share(sum(tensor.nbytes for tensor in tensors))
        return self._issue(nbytes, [self._summed(t, t, opts) for t in tensors], tensors, passes=2)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Take link time; the source has the values of this rank."""
        return self._issue(sum(tensor.nbytes for tensor in tensors), (), tensors)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Take no time on this rank's link: what it receives does."""
        work = ModelledWork(self.fabric.device)
        work.passage = Passage(0.0, end=0.0)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Take link time; leave the output unchanged."""
        return self._issue(sum(tensor.nbytes for tensor in tensors), (), tensors)

    def barrier(self, opts: Any = None) -> Any:
        """Take the latency, there and back."""
        return self._issue(0.0, passes=2)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        """Fill each part of the output with the part that this rank would send to itself."""
        own = input.split(input_sizes)[self._rank] if input_sizes else input.chunk(self._size)[self._rank]  # type: ignore[no-untyped-call]
        parts = output.split(output_sizes) if output_sizes else output.chunk(self._size)  # type: ignore[no-untyped-call]
        fills = [_copy(part, own) for part in parts if part.numel() == own.numel()]
        return self._issue(self._share(output.nbytes), fills, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _copy(target: Tensor, own: Tensor) -> Callable[[], object]:
    return lambda: target.view(-1).copy_(own.reshape(-1))
