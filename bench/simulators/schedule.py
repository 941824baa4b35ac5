"""A training step as a calculation: what a choice of units costs on a machine that is given in figures.

The model walks through fullshard's schedule in the order in which the host enqueues it, with two clocks: the compute
stream and the communicator, which runs collectives one at a time in the order of issue. A unit computes when its
gather is done; just before, the gather of the next unit is issued and starts when the compute stream gets there. After
a unit's backward the reduction before is waited for, and its own is issued. Times in seconds, sizes in bytes.

Collectives cost ``latency(N) + bytes * (N - 1) / N / bandwidth(N)``. All-gather and reduce-scatter on nodes of eight
GPUs run on rings, whose latency grows with N; see ``docs/how_to/units.md`` for where each constant comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GPUS_PER_NODE = 8

PARAMETER_BYTES = 2  # bf16: what is gathered, and what autograd's gradients are
REDUCE_BYTES = 4  # fp32

PEAK_FLOPS = 989e12  # H100 SXM, bf16, dense
EFFICIENCY = 0.5  # of the peak, while computing
NVLINK_BANDWIDTH = 370e9  # bytes/s per GPU that NCCL reaches on NVLink 4
NETWORK_BANDWIDTH = 8 * 46e9  # bytes/s of a node's ring: eight 400 Gb/s adapters


# ---------------------------------------------------------------- the machine


@dataclass(frozen=True)
class RingProtocol:
    """One of NCCL's three ways to run a ring; it picks the fastest per message. Latencies in seconds.

    ``one_node_hop``, ``inner_hop`` (within a node of many) and ``outer_hop`` (between nodes) are per hop of the ring.
    The bandwidth is ``share`` of the ring's, at most ``one_node_cap`` or ``many_nodes_cap`` bytes/s.
    """

    base: float
    one_node_hop: float
    inner_hop: float
    outer_hop: float
    share: float
    one_node_cap: float = float("inf")
    many_nodes_cap: float = float("inf")


LL = RingProtocol(6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6, 0.25, 87.7e9, 20.4e9)
LL128 = RingProtocol(14.0e-6, 1.9e-6, 1.9e-6, 4.0e-6, 0.92)
SIMPLE = RingProtocol(8.4e-6, 3.4e-6, 3.4e-6, 14.0e-6, 1.0)
PROTOCOLS = (LL, LL128, SIMPLE)


@dataclass(frozen=True)
class Fabric:
    """``ranks`` GPUs, eight to a node."""

    ranks: int
    nvlink_bandwidth: float = NVLINK_BANDWIDTH
    network_bandwidth: float = NETWORK_BANDWIDTH
    protocols: tuple[RingProtocol, ...] = PROTOCOLS

    def __post_init__(self) -> None:
        if self.ranks < 1 or (self.ranks > GPUS_PER_NODE and self.ranks % GPUS_PER_NODE):
            raise ValueError(f"ranks must be 1 to {GPUS_PER_NODE} or fill whole nodes, got {self.ranks}")

    def collective_seconds(self, nbytes: int) -> float:
        """Time of an all-gather to, or a reduce-scatter from, ``nbytes`` on every rank."""
        if self.ranks == 1 or nbytes == 0:
            return 0.0
        return min(self._latency(p) + self._wire_bytes(nbytes) / self._bandwidth(p) for p in self.protocols)

    def _wire_bytes(self, nbytes: int) -> float:
        return nbytes * (self.ranks - 1) / self.ranks

    def _latency(self, protocol: RingProtocol) -> float:
        between = max(1, self.ranks // GPUS_PER_NODE) - 1
        hop = protocol.inner_hop if between else protocol.one_node_hop
        return protocol.base + (self.ranks - 1 - between) * hop + between * protocol.outer_hop

    def _bandwidth(self, protocol: RingProtocol) -> float:
        if self.ranks <= GPUS_PER_NODE:
            return min(self.nvlink_bandwidth * protocol.share, protocol.one_node_cap)
        return min(min(self.nvlink_bandwidth, self.network_bandwidth) * protocol.share, protocol.many_nodes_cap)


@dataclass(frozen=True)
class Machine:
    """What the simulation needs to know: seconds of a collective of so many bytes, and FLOP/s while computing."""

    collective_seconds: Callable[[int], float]
    flops_per_second: float


# ---------------------------------------------------------------- the model and its units


@dataclass(frozen=True)
class Piece:
    """A module that could be a unit. Its backward costs twice its forward."""

    name: str
    parameters: int
    forward_flops: float
    fed_by_ids: bool = False  # its inputs need no gradient, so only the end of backward ends its own


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer and the batch per GPU. ``block_parameters`` are nearly all in matrices."""

    title: str
    blocks: int
    width: int
    vocabulary: int
    block_parameters: int
    sequence: int
    sequences: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.sequences

    def pieces(self) -> list[Piece]:
        """Embedding, blocks, final norm and output head, in forward order."""
        table = self.vocabulary * self.width
        causal_attention = 2 * self.sequence * self.width * self.tokens  # two products, half of each masked
        block = 2 * self.block_parameters * self.tokens + causal_attention
        return [
            Piece("embed", table, 0.0, fed_by_ids=True),
            *(Piece(f"block{i}", self.block_parameters, block) for i in range(self.blocks)),
            Piece("norm", self.width, 0.0),
            Piece("head", table, 2 * table * self.tokens),
        ]


@dataclass(frozen=True)
class UnitPlan:
    """One ``fully_shard`` call on these pieces; ``keep`` is ``reshard_after_forward=False``."""

    members: tuple[str, ...]
    keep: bool = False


@dataclass(frozen=True)
class Wrapping:
    """All calls; the last, on the model itself, makes a root unit of every piece that no call named."""

    title: str
    units: tuple[UnitPlan, ...]
    keep_root: bool = True


# ---------------------------------------------------------------- the simulation


@dataclass(frozen=True)
class Outcome:
    """One step. ``peak_bytes`` counts gathered parameters and gradients that are not reduced yet, nothing else."""

    step_seconds: float
    compute_seconds: float
    peak_bytes: int
    collectives: tuple[
        tuple[str, str], ...
    ]  # ("all_gather" or "reduce_scatter", first piece of the unit), in order of issue

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waited for communication."""
        return self.step_seconds - self.compute_seconds


@dataclass(eq=False)
class _Unit:
    """A unit in the simulation; ``ready``: when its gather is done."""

    name: str
    pieces: Sequence[Piece]
    keep: bool
    gathered: bool = False
    ready: float = 0.0
    in_backward: bool = False

    @property
    def parameters(self) -> int:
        return sum(piece.parameters for piece in self.pieces)


class _Step:
    """One step of one wrapping; the method names are those of ``fullshard.engine.runtime`` where there are any."""

    machine: Machine
    root: _Unit
    order: list[_Unit]  # of forward starts
    owner: dict[str, _Unit]
    now: float  # when the compute stream is through with everything enqueued so far
    link_free: float  # the same for the communicator
    computed: float
    memory: int  # in the order of the compute stream, as the caching allocator sees it
    peak: int
    ended: list[_Unit]
    ahead: _Unit | None
    reduction: tuple[float, int] | None  # the one in flight: when it is done, and the bytes of its message
    collectives: list[tuple[str, str]]

    def __init__(self, pieces: Sequence[Piece], wrapping: Wrapping, machine: Machine) -> None:
        self.machine = machine
        position = {piece.name: i for i, piece in enumerate(pieces)}
        units = [_Unit(p.members[0], [pieces[position[name]] for name in p.members], p.keep) for p in wrapping.units]
        named = {piece.name for unit in units for piece in unit.pieces}
        self.root = _Unit("root", [piece for piece in pieces if piece.name not in named], wrapping.keep_root)
        self.owner = {piece.name: unit for unit in [self.root, *units] for piece in unit.pieces}
        self.order = [self.root, *sorted(units, key=lambda unit: position[unit.name])]
        self.now = self.link_free = self.computed = 0.0
        self.memory = self.peak = 0
        self.ended, self.ahead, self.reduction, self.collectives = [], None, None, []

    def hold(self, nbytes: int) -> None:
        self.memory += nbytes
        self.peak = max(self.peak, self.memory)

    def compute(self, flops: float) -> None:
        self.now += flops / self.machine.flops_per_second
        self.computed += flops / self.machine.flops_per_second

    def communicate(self, kind: str, unit: _Unit, nbytes: int) -> float:
        """Issue a collective now; when it is done."""
        self.collectives.append((kind, unit.name))
        self.link_free = max(self.now, self.link_free) + self.machine.collective_seconds(nbytes)
        return self.link_free

    # ---------------------------------------------------------------- units

    def gather(self, unit: _Unit) -> None:
        if not unit.gathered and unit.parameters:
            unit.gathered = True
            self.hold(PARAMETER_BYTES * unit.parameters)
            unit.ready = self.communicate("all_gather", unit, PARAMETER_BYTES * unit.parameters)

    def use_unsharded(self, unit: _Unit, following: Sequence[_Unit]) -> None:
        """Gather the unit and wait for it; then gather the next one ahead, no more."""
        self.gather(unit)
        self.now = max(self.now, unit.ready)
        self.ahead = None if self.ahead is unit else self.ahead
        for other in following:
            if self.ahead is None and not other.gathered and other.parameters:
                self.ahead = other
                self.gather(other)

    def reshard(self, unit: _Unit) -> None:
        if unit.gathered:
            unit.gathered = False
            self.hold(-PARAMETER_BYTES * unit.parameters)

    def reduce(self, unit: _Unit) -> None:
        """Wait for the reduction in flight, cast the gradients into the message, and issue its reduction."""
        self.finish_reduction()
        if unit.parameters:
            nbytes = REDUCE_BYTES * unit.parameters
            self.hold(nbytes)
            self.hold(-PARAMETER_BYTES * unit.parameters)
            self.reduction = self.communicate("reduce_scatter", unit, nbytes), nbytes

    def finish_reduction(self) -> None:
        if self.reduction is not None:
            done, nbytes = self.reduction
            self.now, self.reduction = max(self.now, done), None
            self.hold(-nbytes)

    # ---------------------------------------------------------------- forward and backward

    def start_forward(self, unit: _Unit) -> None:
        position = self.order.index(unit)
        self.use_unsharded(unit, self.order[position + 1 : position + 2])

    def end_forward(self, unit: _Unit) -> None:
        if not unit.keep:
            self.reshard(unit)
        self.ended.append(unit)

    def pre_backward(self, unit: _Unit) -> None:
        if not unit.in_backward:
            unit.in_backward = True
            if unit in self.ended:
                del self.ended[self.ended.index(unit) :]
            self.use_unsharded(unit, self.ended[-1:])

    def finish_backward(self, unit: _Unit) -> None:
        self.reduce(unit)
        self.reshard(unit)
        unit.in_backward = False

    def forward(self, pieces: Sequence[Piece]) -> None:
        self.start_forward(self.root)
        for piece in pieces:
            unit = self.owner[piece.name]
            inner = unit is not self.root
            if inner and piece is unit.pieces[0]:
                self.start_forward(unit)
            self.compute(piece.forward_flops)
            if inner and piece is unit.pieces[-1]:
                self.end_forward(unit)
        self.end_forward(self.root)

    def backward(self, pieces: Sequence[Piece]) -> None:
        self.pre_backward(self.owner[pieces[-1].name])  # the model returns its last piece's output: inner hooks first
        self.pre_backward(self.root)
        for piece in reversed(pieces):
            unit = self.owner[piece.name]
            self.pre_backward(unit)
            self.hold(PARAMETER_BYTES * piece.parameters)
            self.compute(2 * piece.forward_flops)
            if unit is not self.root and piece is unit.pieces[0] and not piece.fed_by_ids:
                self.finish_backward(unit)
        for unit in self.order:
            if unit.in_backward:
                self.finish_backward(unit)
        self.finish_reduction()


def simulate(pieces: Sequence[Piece], wrapping: Wrapping, machine: Machine) -> Outcome:
    """One step: forward, backward, all reductions finished. The optimizer and the loss are left out.

    ``wrapping``: pieces of a unit follow one another, and none is in two.
    """
    step = _Step(pieces, wrapping, machine)
    step.forward(pieces)
    step.backward(pieces)
    return Outcome(step.now, step.computed, step.peak, tuple(step.collectives))
