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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from fullshard.engine.parameters.flat import is_flat
from fullshard.engine.parameters.sharded import managed_by, value_of
from fullshard.engine.parameters.tensor_shards import local_of, sharded_axes, sharded_like
from fullshard.errors import FullshardError
from fullshard.optim.muon.exchange import Assignment, PendingExchange, Round
from fullshard.optim.muon.sharded_matrix import ShardedMatrix, ShardGroup, matrix_shape
from fullshard.profiling import profiled

__all__ = ["MatrixOptimizer"]

ROUND_BYTES = 64 * 1024 * 1024


class MatrixOptimizer(Optimizer):
    """Base class of optimizers that update whole matrices, for sharded and plain parameters alike.

    Every matrix has one owner rank among the ranks that it is sharded over, assigned so that all ranks have about the
    same work. Only the owner rank assembles the full matrix. State stays sharded: ``prepare`` and ``apply`` keep
    elementwise state of this rank's shard.

    Subclasses define three methods, and may override ``update_all`` and ``work``:

    - ``prepare``, on every rank: compute its shard of the matrix for the owner rank;
    - ``update``, on the owner rank: compute the full update from the full matrix (``update_all``: of several matrices);
    - ``apply``, on every rank: apply its shard of the update to its shard of the parameter;
    - ``work``: estimate the cost of ``update``.

    Parameters may be those of ``fully_shard`` (any mesh, any dim, also with tensor parallelism), of the wrapper with
    ``use_orig_params=True``, DTensors, and plain ones. Parameters that are not sharded are updated on every rank. All
    ranks have to step together, also those without gradients: a rank without a gradient of a matrix leaves its shard
    unchanged, and counts as zeros in the matrix of the others.

    Args:
        params: 2-D parameters, parameter groups, or named parameters.
        defaults: Default options of parameter groups.
        comm_dtype: Dtype in which matrices and updates are communicated. None: the parameter's dtype.
        round_bytes: Limit in bytes for the full matrices that an owner rank holds at a time, unless a single matrix is
            larger.

    Raises:
        ValueError: If a parameter is not 2-D, or is complex, or is sharded by both the wrapper and tensor parallelism;
            or ``comm_dtype`` or ``round_bytes`` is out of range.
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
            gradient: This rank's shard, a plain tensor: 2-D, or 1-D for a parameter of the wrapper.
            state: State of the parameter, with local tensors. Change it in place, or set keys.
            group: The parameter group.

        Returns:
            A tensor of the gradient's shape. It is read before ``apply`` is called.
        """
        raise NotImplementedError

    def update(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Compute the update from a full matrix. It must depend on nothing else, and must not change the matrix.

        Args:
            matrix: The full matrix, in ``comm_dtype``.
            group: The parameter group.

        Returns:
            A tensor of the same shape, of any dtype.
        """
        raise NotImplementedError

    def update_all(self, matrices: Sequence[torch.Tensor], group: dict[str, Any]) -> Sequence[torch.Tensor]:
        """Compute ``update`` for several matrices of one shape and one group. Override it to compute them in a batch.

        Args:
            matrices: The full matrices, in ``comm_dtype``.
            group: The parameter group.

        Returns:
            One update per matrix.
        """
        return [self.update(matrix, group) for matrix in matrices]

    def apply(
        self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """Update this rank's shard of a parameter in place.

        Args:
            parameter: The shard, a plain tensor.
            update: The same shard of the result of ``update``, in ``comm_dtype``.
            shape: Shape of the full parameter.
            group: The parameter group.
        """
        raise NotImplementedError

    def work(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """Return the cost of ``update``, in any unit; by default, that of a product of the matrix with itself.

        Args:
            shape: Shape of the full parameter.
            group: The parameter group.

        Returns:
            The cost; the same on all ranks.
        """
        return float(shape[0] * shape[1] * min(shape))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as ``torch.optim.Optimizer`` does, and check its parameters.

        Args:
            param_group: Parameters and options of the group.

        Raises:
            ValueError: If a parameter is not supported. The group is then not added.
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
        api, shape, managed = type(self).__name__, matrix_shape(parameter), managed_by(parameter)
        if is_flat(parameter):
            fqns = ", ".join(getattr(parameter, "fqns", [name]))
            raise ValueError(
                f"{api}: expected matrices, found the FlatParameter of {fqns}; wrap the model with "
                "use_orig_params=True to optimize the original parameters"
            )
        if len(shape) != 2:
            raise ValueError(
                f"{api}: expected 2-D parameters, found {name} of shape {shape}; give it to another optimizer, such "
                "as AdamW (and with it, usually, embeddings and the output layer)"
            )
        own = None if managed is None or isinstance(parameter, DTensor) else managed.placement.own
        if own is not None and sharded_axes(own.mesh, own.placements):
            raise ValueError(
                f"{api}: {name} of shape {shape} is sharded by tensor parallelism and by the wrapper, which is not "
                "supported; shard the model with fully_shard"
            )
        if parameter.is_complex():
            raise ValueError(f"{api}: expected real parameters, found {name} of {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. All ranks call it together.

        Args:
            closure: Function that recomputes the loss and returns it.

        Returns:
            The loss; None without a closure.

        Raises:
            FullshardError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with profiled("optimizer"):
            self._step()
        return loss

    def _step(self) -> None:
        """Run all rounds, overlapping computation and communication. See [Note: Rounds]."""
        plan = self.plan()
        sent = [self._send(exchange) for exchange in plan.rounds[:1]]
        self._step_unsharded_matrices(plan.unsharded)  # while the first messages are in flight
        returning: list[tuple[Round, PendingExchange]] = []
        for index, exchange in enumerate(plan.rounds):
            matrices = exchange.full_matrices(sent.pop().wait())
            sent += [self._send(following) for following in plan.rounds[index + 1 : index + 2]]
            updates = self._updates(exchange, matrices)
            while returning:
                self._apply_round(*returning.pop())
            returning.append((exchange, exchange.send_back(updates)))
            del matrices, updates
        while returning:
            self._apply_round(*returning.pop())

    def _send(self, exchange: Round) -> PendingExchange:
        """Update the states of a round's matrices and start sending shards to the owner ranks."""
        shards = []
        for matrix in exchange.matrices:
            gradient = _local_gradient(matrix)
            shards.append(
                torch.zeros_like(value_of(matrix.parameter)) if gradient is None else self._prepare(matrix, gradient)
            )
        return exchange.send(shards)

    def _updates(self, exchange: Round, matrices: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute the updates of full matrices, those of one shape and group together."""
        alike: dict[tuple[int, torch.Size], list[int]] = {}
        for index, full in matrices.items():
            alike.setdefault((exchange.matrices[index].group, full.shape), []).append(index)
        updates: dict[int, torch.Tensor] = {}
        for (number, _), indices in alike.items():
            same = self.update_all([matrices[index] for index in indices], self.param_groups[number])
            updates.update(zip(indices, same, strict=True))
        return updates

    def _apply_round(self, exchange: Round, returning: PendingExchange) -> None:
        """Receive this rank's shards of the updates, and change the parameters that have a gradient here."""
        for index, update in exchange.shard_updates(returning.wait()).items():
            if exchange.matrices[index].parameter.grad is not None:
                self._apply(exchange.matrices[index], update)

    def _step_unsharded_matrices(self, matrices: Sequence[ShardedMatrix]) -> None:
        """Update the matrices that this rank has in full, one at a time: those that have a gradient.

        For matrices of other ranks it keeps empty entries, so that all ranks have the same ones.
        """
        for matrix in matrices:
            gradient = _local_gradient(matrix)
            if gradient is None:
                continue
            shard = self._prepare(matrix, gradient)
            if not shard.numel():
                continue
            full = shard.to(self.comm_dtype or matrix.parameter.dtype)
            if full.shape != matrix.shape:  # elements in the order of memory
                full = full.as_strided(matrix.shape, matrix.stride)
            (update,) = self.update_all([full], self.param_groups[matrix.group])
            if update.shape != shard.shape:
                update = matrix.in_memory_order(update).as_strided(shard.shape, shard.stride())
            self._apply(matrix, update)

    def _prepare(self, matrix: ShardedMatrix, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the matrix for the owner rank, and store the state that changed."""
        parameter = matrix.parameter
        entries = self.state.get(parameter, {})
        before = {key: local_of(value) if torch.is_tensor(value) else value for key, value in entries.items()}
        state = dict(before)
        shard = self.prepare(gradient, state, self.param_groups[matrix.group])
        for key, value in state.items():
            if before.get(key) is not value:
                self.state[parameter][key] = sharded_like(parameter, value) if torch.is_tensor(value) else value
        return shard

    def _apply(self, matrix: ShardedMatrix, update: torch.Tensor) -> None:
        local = value_of(matrix.parameter)
        self.apply(local, update.to(local.device), matrix.shape, self.param_groups[matrix.group])

    def plan(self) -> _RoundPlan:
        """Return the assignment of matrices to owner ranks and rounds.

        It is planned again when the parameters, their groups or ``requires_grad`` change.

        Returns:
            The plan; the same on all ranks that the matrices are sharded over.
        """
        current = tuple(
            (number, id(p), p.requires_grad, p.dtype, p.device, _placement_key(p))
            for number, group in enumerate(self.param_groups)
            for p in group["params"]
        )
        if self._plan is None or self._planned_for != current:
            self._plan, self._planned_for = _RoundPlan.of(self), current
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "comm_dtype": self.comm_dtype, "round_bytes": self.round_bytes}


@dataclass(frozen=True, eq=False)
class _RoundPlan:
    """All matrices: those that are exchanged in rounds, and those of which this rank has all or nothing."""

    rounds: tuple[Round, ...]
    unsharded: tuple[ShardedMatrix, ...]

    @classmethod
    def of(cls, optimizer: MatrixOptimizer) -> _RoundPlan:
        """Plan rounds for the parameters that require gradients now."""
        sharded: dict[tuple[ShardGroup, torch.dtype], list[ShardedMatrix]] = {}
        unsharded: list[ShardedMatrix] = []
        for number, group in enumerate(optimizer.param_groups):
            for name, parameter in _named(group, number):
                if not parameter.requires_grad or not math.prod(matrix_shape(parameter)):
                    continue
                matrix = ShardedMatrix.of(parameter, number, name)
                key = matrix.shard_group, optimizer.comm_dtype or parameter.dtype
                if key[0] is None or matrix.is_on_one_rank:
                    unsharded.append(matrix)
                else:
                    sharded.setdefault((key[0], key[1]), []).append(matrix)
        rounds: list[Round] = []
        for (shard_group, dtype), matrices in sharded.items():
            work = [optimizer.work(matrix.shape, optimizer.param_groups[matrix.group]) for matrix in matrices]
            nbytes = [matrix.numel * dtype.itemsize for matrix in matrices]
            assigned = Assignment.build(work, nbytes, len(shard_group.ranks), optimizer.round_bytes)
            for indices in assigned.rounds:
                owner_ranks = [assigned.owner_ranks[i] for i in indices]
                rounds.append(Round([matrices[i] for i in indices], owner_ranks, shard_group, dtype))
        return cls(tuple(rounds), tuple(unsharded))


def _local_gradient(matrix: ShardedMatrix) -> torch.Tensor | None:
    """Return this rank's shard of the gradient, sharded as the parameter."""
    parameter, gradient = matrix.parameter, matrix.parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise FullshardError(f"{matrix.name}: expected a dense gradient, found {gradient.layout}; use sparse=False")
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and (gradient.placements != parameter.placements or gradient.device_mesh != parameter.device_mesh)
    ):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_of(gradient)


def _named(group: dict[str, Any], number: int) -> Iterator[tuple[str, torch.Tensor]]:
    names = group.get("param_names")
    for index, parameter in enumerate(group["params"]):
        default = names[index] if names else f"parameter {index} of group {number}"
        managed = managed_by(parameter)
        yield default if managed is None else managed.fqn, parameter


def _placement_key(parameter: torch.Tensor) -> object:
    """Return a key that changes when the parameter is sharded differently."""
    if isinstance(parameter, DTensor):
        return id(parameter.device_mesh), parameter.placements
    return parameter.shape
