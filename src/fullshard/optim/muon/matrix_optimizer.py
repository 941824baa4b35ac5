"""Optimizers that update whole matrices, each computed by one owner rank.

[Note: Rounds]
Matrices are exchanged in rounds: while the owner ranks compute the updates of one round, the shards of the next round
and the updates of the previous one are communicated. Messages of two rounds are in memory at a time, and matrices of
one, whatever the size of the model.

    sends      out 0, out 1           back 0, out 2                    back 1                    back 2
    computes                 update 0                update 1, apply 0        update 2, apply 1        apply 2

All ranks run the same rounds in the same order: the contents of a round follow from the parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from fullshard.engine.parameters.flat import FlatParameter
from fullshard.engine.parameters.sharded import value_of
from fullshard.errors import FullshardError
from fullshard.optim.local_shards import local_of
from fullshard.optim.muon.assignment import Assignment, MatrixTraffic
from fullshard.optim.muon.exchange import PendingExchange, Round
from fullshard.optim.muon.sharded_matrix import ShardedMatrix, ShardGroup, is_sharded_twice, matrix_name, matrix_shape
from fullshard.profiling import profiled

__all__ = ["MatrixOptimizer"]

ROUND_BYTES = 64 * 1024 * 1024

_Group = dict[str, Any]


class MatrixOptimizer(Optimizer):
    """Base class of optimizers that update whole matrices, of sharded and plain parameters alike.

    Every matrix has one owner rank among the ranks that it is sharded over, assigned so that all have about the same
    work; only the owner assembles the full matrix. State stays sharded: :meth:`prepare` and :meth:`apply` keep
    elementwise state of this rank's shard. See [Note: Owners compute] and [Note: Rounds].

    Subclasses define three methods, and may override two more:

    - :meth:`prepare`, on every rank: its shard of the matrix for the owner rank;
    - :meth:`update`, on the owner rank: full matrix to full update (:meth:`update_all`: several at a time);
    - :meth:`apply`, on every rank: its shard of the update, onto its shard of the parameter;
    - :meth:`work`: the cost of :meth:`update`.

    Parameters may be those of ``fully_shard`` (any mesh, any dim, also with tensor parallelism), of the wrapper with
    ``use_orig_params=True``, DTensors, and plain ones. Parameters that are not sharded are updated on every rank. All
    ranks have to step together, also those without gradients.

    Args:
        params: 2-D parameters, or parameter groups, or named parameters.
        defaults: Options of groups.
        comm_dtype: Dtype in which matrices and updates are communicated; None: the parameter's dtype.
        round_bytes: Limit for the full matrices of an owner rank at a time, unless a single matrix is larger.

    Raises:
        ValueError: If a parameter is no matrix, or complex, or sharded by both the wrapper and tensor parallelism.
    """

    comm_dtype: torch.dtype | None = None
    round_bytes: int = ROUND_BYTES
    _plan: _RoundPlan | None = None
    _planned_for: object = None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        comm_dtype: torch.dtype | None = None,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        if comm_dtype is not None and not (comm_dtype.is_floating_point and comm_dtype.itemsize > 1):
            raise ValueError(f"comm_dtype: expected a floating-point dtype of 16 bits or more, found {comm_dtype}")
        if round_bytes < 1:
            raise ValueError(f"round_bytes: expected a positive number of bytes, found {round_bytes}")
        self.comm_dtype, self.round_bytes = comm_dtype, round_bytes
        super().__init__(params, defaults)

    def prepare(self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """Return this rank's shard of the matrix from which the owner rank computes the update.

        Args:
            gradient: This rank's shard, plain: 2-D, or 1-D for the wrapper's. Zeros if it is missing only on this rank.
            state: State of the parameter, with local tensors. Change it in place, or set keys.
            group: The parameter group.

        Returns:
            A tensor of the gradient's shape. It is read before :meth:`apply` is called.
        """
        raise NotImplementedError

    def update(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Compute the update from a whole matrix. Must depend on nothing else, and not change the matrix.

        Args:
            matrix: The full matrix, in ``comm_dtype``.
            group: The parameter group.

        Returns:
            A tensor of the same shape, of any dtype.
        """
        raise NotImplementedError

    def update_all(self, matrices: Sequence[torch.Tensor], group: dict[str, Any]) -> Sequence[torch.Tensor]:
        """Compute :meth:`update` for several matrices of one shape and one group; override it to compute them in a
        batch.
        """
        return [self.update(matrix, group) for matrix in matrices]

    def apply(
        self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """Update this rank's shard of a parameter in place.

        Args:
            parameter: The shard, plain.
            update: The same shard of the result of :meth:`update`, in ``comm_dtype``.
            shape: Shape of the full parameter.
            group: The parameter group.
        """
        raise NotImplementedError

    def work(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """Return the cost of :meth:`update`, in any unit; by default, that of a product of the matrix with itself."""
        return float(shape[0] * shape[1] * min(shape))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim.Optimizer`` does, and check its parameters.

        Raises:
            ValueError: If a parameter is not supported, as for the class.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            for name, parameter in _named(added, len(self.param_groups) - 1):
                self._check(name, parameter)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, name: str, parameter: torch.Tensor) -> None:
        api, shape = type(self).__name__, matrix_shape(parameter)
        if isinstance(parameter, FlatParameter):
            raise ValueError(
                f"{api}: expected matrices, found {name}; wrap the model with use_orig_params=True to optimize the "
                "original parameters"
            )
        if len(shape) != 2:
            raise ValueError(
                f"{api}: expected 2-D parameters, found {name} of shape {shape}; give it to another optimizer, such "
                "as AdamW (and with it, usually, embeddings and the output layer)"
            )
        if is_sharded_twice(parameter):
            raise ValueError(
                f"{api}: {name} of shape {shape} is sharded by tensor parallelism and by the wrapper, which is not "
                "supported; shard the model with fully_shard"
            )
        if parameter.is_complex():
            raise ValueError(f"{api}: expected real parameters, found {name} of {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step, on all ranks together.

        Args:
            closure: Recomputes the loss and returns it.

        Raises:
            FullshardError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with profiled("optimizer"):
            _run(self.plan().round_steps(self))
        return loss

    def plan(self) -> _RoundPlan:
        """Return the assignment of matrices to ranks and rounds, planned again when parameters or ``requires_grad``
        changed.
        """
        current = tuple(
            (id(p), p.requires_grad, p.dtype, p.device, _placement_key(p))
            for g in self.param_groups
            for p in g["params"]
        )
        if self._plan is None or self._planned_for != current:
            self._plan, self._planned_for = _RoundPlan.of(self), current
        return self._plan

    def traffic(self, rank: int | None = None) -> MatrixTraffic:
        """Return the bytes that a rank sends in a step: its shards to owner ranks, and shards of the updates that it
        computes.

        Args:
            rank: Rank in the group or groups that matrices are sharded over; None: this one.
        """
        sharded = [exchange for _, exchange in self.plan().rounds if exchange is not None]
        each = [exchange.traffic(exchange.rank if rank is None else rank) for exchange in sharded]
        return MatrixTraffic(sum(t.out for t in each), sum(t.back for t in each))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "comm_dtype": self.comm_dtype, "round_bytes": self.round_bytes}


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One parameter of the optimizer and its sharding."""

    parameter: torch.Tensor
    sharded: ShardedMatrix
    group: int  # index among the parameter groups


@dataclass(frozen=True, eq=False)
class _RoundPlan:
    """All matrices, in rounds. Matrices that are not sharded form a round without messages."""

    rounds: tuple[tuple[tuple[_Matrix, ...], Round | None], ...]

    @classmethod
    def of(cls, optimizer: MatrixOptimizer) -> _RoundPlan:
        """Plan rounds for the parameters that require gradients now."""
        sharded: dict[tuple[ShardGroup, torch.dtype], list[_Matrix]] = {}
        full: list[_Matrix] = []
        for index, group in enumerate(optimizer.param_groups):
            for name, parameter in _named(group, index):
                if not parameter.requires_grad or not math.prod(matrix_shape(parameter)):
                    continue
                matrix = _Matrix(parameter, ShardedMatrix.of(parameter, name), index)
                shard_group = matrix.sharded.shard_group
                dtype = optimizer.comm_dtype or parameter.dtype
                (full if shard_group is None else sharded.setdefault((shard_group, dtype), [])).append(matrix)
        rounds: list[tuple[tuple[_Matrix, ...], Round | None]] = []
        for (shard_group, dtype), matrices in sharded.items():
            work = [optimizer.work(m.sharded.shape, optimizer.param_groups[m.group]) for m in matrices]
            nbytes = [m.sharded.numel * dtype.itemsize for m in matrices]
            assigned = Assignment.build(work, nbytes, len(shard_group.ranks), optimizer.round_bytes)
            for indices in assigned.rounds:
                chosen = tuple(matrices[i] for i in indices)
                owner_ranks = [assigned.owner_ranks[i] for i in indices]
                rounds.append((chosen, Round([m.sharded for m in chosen], owner_ranks, shard_group, dtype)))
        if full:  # second, so that they are computed while messages are in flight
            rounds.insert(min(1, len(rounds)), (tuple(full), None))
        return cls(tuple(rounds))

    def round_steps(self, optimizer: MatrixOptimizer) -> list[_RoundStep]:
        """Return the steps of all rounds."""
        return [
            _LocalRoundStep(optimizer, matrices)
            if exchange is None
            else _ShardedRoundStep(optimizer, matrices, exchange)
            for matrices, exchange in self.rounds
        ]


def _run(round_steps: Sequence[_RoundStep]) -> None:
    """Run all rounds, overlapping computation and communication. See [Note: Rounds]."""
    for step in round_steps[:1]:
        step.send()
    for index, step in enumerate(round_steps):
        step.receive()
        for later in round_steps[index + 1 : index + 2]:
            later.send()
        step.compute()
        if index:
            round_steps[index - 1].finish()
        step.send_back()
    for step in round_steps[-1:]:
        step.finish()


class _RoundStep:
    """One round in one step. Its methods are called in order, with those of other rounds in between."""

    optimizer: MatrixOptimizer
    matrices: Sequence[_Matrix]
    missing: set[int]  # indices of matrices without a gradient on this rank
    tentative: dict[int, dict[str, Any]]  # their new state, stored if any rank has a gradient

    def __init__(self, optimizer: MatrixOptimizer, matrices: Sequence[_Matrix]) -> None:
        self.optimizer, self.matrices = optimizer, matrices
        self.missing, self.tentative = set(), {}

    def send(self) -> None:
        """Update states and start sending shards to the owner ranks."""
        raise NotImplementedError

    def receive(self) -> None:
        """Assemble the matrices that this rank owns."""
        raise NotImplementedError

    def compute(self) -> None:
        """Compute their updates."""
        raise NotImplementedError

    def send_back(self) -> None:
        """Start sending the updates to the ranks that hold shards."""
        raise NotImplementedError

    def finish(self) -> None:
        """Receive the updates and change the parameters."""
        raise NotImplementedError

    def group(self, index: int) -> _Group:
        """Return the parameter group of a matrix."""
        return self.optimizer.param_groups[self.matrices[index].group]

    def prepare_shard(self, index: int) -> torch.Tensor:
        """Return this rank's shard of the matrix for the owner rank."""
        parameter, optimizer = self.matrices[index].parameter, self.optimizer
        gradient = _local_gradient(parameter, self.matrices[index].sharded.name)
        saved = optimizer.state[parameter] if gradient is not None or parameter in optimizer.state else {}
        state = {key: local_of(value) if torch.is_tensor(value) else value for key, value in saved.items()}
        if gradient is None:
            self.missing.add(index)
            state = {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
            zeros = torch.zeros_like(value_of(parameter))
            self.tentative[index] = state
            return optimizer.prepare(zeros, state, self.group(index))
        before = dict(state)
        shard = optimizer.prepare(gradient, state, self.group(index))
        _store_state(parameter, saved, {key: value for key, value in state.items() if before.get(key) is not value})
        return shard

    def compute_updates(self, owned: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute the updates of full matrices, those of one shape and group together."""
        alike: dict[tuple[int, torch.Size, torch.dtype], list[int]] = {}
        for index, full in owned.items():
            alike.setdefault((self.matrices[index].group, full.shape, full.dtype), []).append(index)
        found: dict[int, torch.Tensor] = {}
        for indices in alike.values():
            updates = self.optimizer.update_all([owned[index] for index in indices], self.group(indices[0]))
            found.update(zip(indices, updates, strict=True))
        return found

    def apply_update(self, index: int, shard: torch.Tensor) -> None:
        """Update this rank's shard of a parameter."""
        matrix = self.matrices[index]
        parameter = matrix.parameter
        if index in self.tentative:
            _store_state(parameter, self.optimizer.state[parameter], self.tentative.pop(index))
        local = value_of(parameter)
        self.optimizer.apply(local, shard.to(local.device), matrix.sharded.shape, self.group(index))


class _ShardedRoundStep(_RoundStep):
    """Step of a round of matrices that are sharded over some ranks."""

    exchange: Round
    message: PendingExchange | None  # in flight
    owned: dict[int, torch.Tensor]  # matrices, then updates; from receive to send_back

    def __init__(self, optimizer: MatrixOptimizer, matrices: Sequence[_Matrix], exchange: Round) -> None:
        super().__init__(optimizer, matrices)
        self.exchange, self.message, self.owned = exchange, None, {}

    def send(self) -> None:
        shards = [self.prepare_shard(index) for index in range(len(self.matrices))]
        self.message = self.exchange.send(shards, sorted(self.missing))

    def receive(self) -> None:
        assert self.message is not None
        self.owned = self.exchange.full_matrices(self.message.wait(), sorted(self.missing))

    def compute(self) -> None:
        self.owned = self.compute_updates(self.owned)

    def send_back(self) -> None:
        updates, self.owned = self.owned, {}
        self.message = self.exchange.send_back(updates)

    def finish(self) -> None:
        assert self.message is not None
        received = self.message.wait()
        for index in range(len(self.matrices)):
            if index not in self.missing or self.exchange.any_rank_had_gradient(received, index):
                self.apply_update(index, self.exchange.shard_update(received, index))
        self.message = None


class _LocalRoundStep(_RoundStep):
    """Step of the matrices that this rank has in full: without a gradient they do not change."""

    def send(self) -> None:
        """Do nothing: all happens in :meth:`compute`, with one matrix in memory at a time."""

    def receive(self) -> None:
        """Do nothing: there are no messages."""

    def compute(self) -> None:
        for index, matrix in enumerate(self.matrices):
            if matrix.parameter.grad is not None:
                dtype = self.optimizer.comm_dtype or matrix.parameter.dtype
                shard = self.prepare_shard(index).view(matrix.sharded.shape).to(dtype)
                (update,) = self.optimizer.update_all([shard], self.group(index))
                self.apply_update(index, update)

    def send_back(self) -> None:
        """Do nothing: there are no messages."""

    def finish(self) -> None:
        """Do nothing: there are no messages."""


def _local_gradient(parameter: torch.Tensor, name: str) -> torch.Tensor | None:
    """Return this rank's shard of the gradient, sharded as the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise FullshardError(f"{name}: expected a dense gradient, found {gradient.layout}; use sparse=False")
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and (gradient.placements != parameter.placements or gradient.device_mesh != parameter.device_mesh)
    ):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_of(gradient)


def _store_state(parameter: torch.Tensor, saved: dict[str, Any], changed: dict[str, Any]) -> None:
    """Store local state in the optimizer's state, as DTensors if the parameter is one."""
    for key, value in changed.items():
        if isinstance(parameter, DTensor) and torch.is_tensor(value) and value.shape == value_of(parameter).shape:
            value = DTensor.from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        saved[key] = value


def _named(group: _Group, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    names = group.get("param_names")
    for index, parameter in enumerate(group["params"]):
        default = names[index] if names else f"parameter {index} of group {number}"
        yield matrix_name(parameter, default), parameter


def _placement_key(parameter: torch.Tensor) -> object:
    """Return a key that changes when the parameter is sharded differently."""
    if isinstance(parameter, DTensor):
        return id(parameter.device_mesh), parameter.placements
    return parameter.shape
