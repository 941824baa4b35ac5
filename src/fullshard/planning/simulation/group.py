"""One rank's view of a process group that is a model, and the works that it returns.

[Note: Contents]
All ranks hold what this rank holds. So a gather repeats the own piece, a sum is the own value times N, a broadcast
changes nothing. Then no NaN and no denormal reaches the computation, values stay in the range in which they train, and
every system gets the same ones whatever its collectives are. Filling is not the host's work on a real network; it is
taken out of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fullshard.planning.simulation.clocks import Device, Passage
from fullshard.planning.simulation.network import Network


@dataclass
class ModelledLaunch:
    """Collectives that travel together.

    Args:
        what: Name of the last, for the record.
        seconds: How long they take together.
        nbytes: What this rank receives.
        fills: What writes their outputs.
        result: The outputs, as the work's future has them.
    """

    what: str
    seconds: float
    nbytes: float
    fills: list[Callable[[], object]] = field(default_factory=list)
    result: list[Tensor] = field(default_factory=list)

    def fill(self) -> None:
        """Write what arrives."""
        with torch.no_grad():
            for fill in self.fills:
                fill()


class ModelledWork(dist.Work):
    """One launch in flight. It keeps the tensors alive until it goes."""

    _device: Device
    _passage: Passage
    _launch: ModelledLaunch

    def __init__(self, device: Device, passage: Passage, launch: ModelledLaunch) -> None:
        super().__init__()
        self._device, self._passage, self._launch = device, passage, launch

    def wait(self, timeout: object = None) -> bool:
        """Have the device wait; a host blocks until the end."""
        self._device.wait(self._passage)
        return True

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether its end has come."""
        return self._device.is_over(self._passage)

    def result(self) -> list[Tensor]:
        """What it filled."""
        return self._launch.result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Done at the end. Nobody can call back later, so asking waits."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._launch.result)
        return future


class _Deferred(dist.Work):
    """A collective inside a group call, whose end is known once that is over."""

    work: ModelledWork | None

    def __init__(self) -> None:
        super().__init__()
        self.work = None

    def wait(self, timeout: object = None) -> bool:
        """Wait for the whole group."""
        assert self.work is not None, "waited for a collective inside its group call"
        return self.work.wait()


@dataclass(frozen=True)
class SentMessage:
    """One launch, for tests and plots.

    Args:
        what: Name of the (last) collective.
        nbytes: What this rank receives.
        passage: When it went; on simulated streams known after the next synchronization, on an accelerator never.
    """

    what: str
    nbytes: float
    passage: Passage


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
    messages: list[SentMessage] | None  # None: not recorded
    groups: int  # made so far

    def __init__(self, network: Network, device: Device, group_type: type[ModelledGroup]) -> None:
        self.network, self.device, self.group_type, self.messages, self.groups = network, device, group_type, None, 0

    def send(self, launch: ModelledLaunch, group: ModelledGroup) -> ModelledWork:
        """Put a launch on the link."""
        passage = Passage(launch.seconds, group.number if self.network.like == "nccl" else None, group.network.link)
        self.device.transmit(passage, launch.fill)
        if self.messages is not None:
            self.messages.append(SentMessage(launch.what, launch.nbytes, passage))
        return ModelledWork(self.device, passage, launch)


class ModelledGroup(dist.ProcessGroup):
    """One rank's view of ``size`` ranks, none of which is there. See the module docstring."""

    fabric: Fabric
    number: int  # among the groups of the process
    network: Network  # among its ranks
    _rank: int
    _size: int
    _name: str
    _open: ModelledLaunch | None  # a group call under way
    _open_work: list[_Deferred]

    def __init__(self, fabric: Fabric, rank: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.fabric, self.number, self.network = fabric, fabric.groups, fabric.network.of(ranks)
        fabric.groups += 1
        self._rank, self._size, self._name = rank, len(ranks), name
        self._open, self._open_work = None, []

    # ------------------------------------------------------------------------------------------- what it is

    def rank(self) -> int:
        """Of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """As c10d registers it."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - c10d's own name
        """``modelled``, whatever it is like."""
        return "modelled"

    name = getBackendName

    def _get_backend(self, device: torch.device) -> SimpleNamespace:  # type: ignore[override]
        """What a library that asks for the back end is told."""
        name = "modelled" if self.network.like == "collective" else self.network.like
        return SimpleNamespace(name=lambda: name)

    # ------------------------------------------------------------------------------------------- launches

    def _start_coalescing(self, device: torch.device) -> None:
        if self.network.like == "nccl":
            self._open, self._open_work = ModelledLaunch("", 0.0, 0.0), []

    def _end_coalescing(self, device: torch.device) -> Any:
        launch, self._open = self._open, None
        if launch is None or not launch.what:
            return None
        work = self.fabric.send(launch, self)
        for deferred in self._open_work:
            deferred.work = work
        self._open_work = []
        return work

    def _issue(
        self,
        what: str,
        nbytes: float,
        fills: Sequence[Callable[[], object]] = (),
        result: Sequence[Tensor] = (),
        passes: int = 1,
    ) -> Any:
        network = self.network
        objects = any(
            not (tensor.is_meta or tensor.is_floating_point()) for tensor in result
        )  # pickled, or sizes of them
        fills = list(fills) if network.fills or objects else []
        if self._open is None:
            seconds = network.seconds(nbytes, self._size, passes)
            return self.fabric.send(ModelledLaunch(what, seconds, nbytes, fills, list(result)), self)
        launch = self._open
        latency = network.seconds(0.0, self._size, passes)
        if not launch.what:
            launch.seconds = latency
        launch.seconds += network.seconds(nbytes, self._size, passes) - latency
        launch.what, launch.nbytes = what, launch.nbytes + nbytes
        launch.fills += fills
        launch.result += result
        self._open_work.append(_Deferred())
        return self._open_work[-1]

    def _share(self, nbytes: float) -> float:
        """Of a region of so many bytes, what comes from others."""
        return nbytes * (self._size - 1) / self._size

    def _part(self, region: Tensor) -> Tensor:
        return region.view(-1).narrow(0, self._rank * (region.numel() // self._size), region.numel() // self._size)

    def _summed(self, target: Tensor, own: Tensor, opts: Any) -> Callable[[], object]:
        """What writes ``own``, reduced over ranks that all hold it, to ``target``."""
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
        """``output``: ``size * input.numel()`` elements."""

        def fill() -> None:
            output.view(self._size, -1).copy_(input.reshape(1, -1).expand(self._size, -1))

        return self._issue("all_gather", self._share(output.nbytes), [fill], [output])

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Every output is filled with the input."""
        pairs = [(target, own) for targets, own in zip(outputs, inputs, strict=True) for target in targets]
        fills = [_copy(target, own) for target, own in pairs]
        nbytes = sum(target.nbytes for target, _ in pairs)
        return self._issue("all_gather", self._share(nbytes), fills, [target for target, _ in pairs])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """``input``: ``size * output.numel()`` elements."""
        fill = self._summed(output, self._part(input), opts)
        return self._issue("reduce_scatter", self._share(input.nbytes), [fill], [output])

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """In place."""
        nbytes = 2 * self._share(sum(tensor.nbytes for tensor in tensors))
        return self._issue("all_reduce", nbytes, [self._summed(t, t, opts) for t in tensors], tensors, passes=2)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """The source has what this rank has."""
        return self._issue("broadcast", sum(tensor.nbytes for tensor in tensors), (), tensors)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Takes no time on this rank's link: what it receives does."""
        return ModelledWork(self.fabric.device, Passage(0.0, end=0.0), ModelledLaunch("send", 0.0, 0.0))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """The region stays as it is."""
        return self._issue("recv", sum(tensor.nbytes for tensor in tensors), (), tensors)

    def barrier(self, opts: Any = None) -> Any:
        """Latency, there and back."""
        return self._issue("barrier", 0.0, passes=2)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        """Every rank sends this one what this one would send itself."""
        own = input.split(input_sizes)[self._rank] if input_sizes else input.chunk(self._size)[self._rank]  # type: ignore[no-untyped-call]
        parts = output.split(output_sizes) if output_sizes else output.chunk(self._size)  # type: ignore[no-untyped-call]
        fills = [_copy(part, own) for part in parts if part.numel() == own.numel()]
        return self._issue("all_to_all", self._share(output.nbytes), fills, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _copy(target: Tensor, own: Tensor) -> Callable[[], object]:
    return lambda: target.view(-1).copy_(own.reshape(-1))
