"""Optimizers whose update of a matrix needs the whole matrix, each computed by one rank.

[Note: Rounds]
Matrices are exchanged in rounds: while the owners compute the updates of one round, the parts of the next one and the
updates of the one before travel. Messages of two rounds are alive at a time, and matrices of one, whatever the size of
the model.

    sends      out 0, out 1           back 0, out 2                    back 1                    back 2
    computes                 update 0                update 1, apply 0        update 2, apply 1        apply 2

All ranks take the same turns in the same order: what is in a round follows from the parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from fullshard.engine.flat_parameter import FlatParameter
from fullshard.engine.parameter import value_of
from fullshard.errors import FullshardError
from fullshard.optim.assignment import Assignment, Traffic
from fullshard.optim.cut_matrix import CutMatrix, Sharers, cut_twice, matrix_name, matrix_shape
from fullshard.optim.exchange import Message, Round
from fullshard.optim.spread import local_of

__all__ = ["MatrixOptimizer"]

ROUND_BYTES = 64 * 1024 * 1024

_Group = dict[str, Any]


class MatrixOptimizer(Optimizer):
    """Base of optimizers that update matrices as a whole, of sharded and plain parameters alike.

    Every matrix has one owner among the ranks that it is cut over, chosen so that all have about the same work; only
    the owner puts it together. State stays sharded: it is elementwise, kept by :meth:`prepare` and :meth:`apply` on
    this rank's part. See [Note: Owners compute] and [Note: Rounds].

    Subclasses define three functions, and may define two more:

    - :meth:`prepare`, on every rank: its part of what the owner is to see;
    - :meth:`update`, on the owner: whole matrix in, whole update out (:meth:`update_all`: of several at a time);
    - :meth:`apply`, on every rank: its part of the update, onto its part of the parameter;
    - :meth:`work`: how much :meth:`update` has to do.

    Parameters: of ``fully_shard`` (any mesh, any dim, also beside tensor parallelism), of the wrapper with
    ``use_orig_params=True``, DTensors, plain ones. Those that no rank cuts are updated on every rank that has them.
    All ranks have to step together, also those without gradients.

    Args:
        params: 2-D parameters, or parameter groups, or named parameters.
        defaults: Options of groups.
        wire_dtype: In which matrices and updates travel; None: the parameter's dtype.
        round_bytes: Owners put together no more than this at a time, unless a single matrix is larger.

    Raises:
        ValueError: If a parameter is no matrix, or complex, or of the wrapper and tensor parallelism both.
    """

    wire_dtype: torch.dtype | None = None
    round_bytes: int = ROUND_BYTES
    _plan: _Plan | None = None
    _planned_for: object = None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        wire_dtype: torch.dtype | None = None,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        if wire_dtype is not None and not (wire_dtype.is_floating_point and wire_dtype.itemsize > 1):
            raise ValueError(f"wire_dtype: expected a floating-point dtype of 16 bits or more, found {wire_dtype}")
        if round_bytes < 1:
            raise ValueError(f"round_bytes: expected a positive number of bytes, found {round_bytes}")
        self.wire_dtype, self.round_bytes = wire_dtype, round_bytes
        super().__init__(params, defaults)

    def prepare(self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """This rank's part of the matrix that the owner computes with.

        Args:
            gradient: This rank's part, plain: 2-D, or 1-D for the wrapper's. Zeros where only this rank misses it.
            state: Of the parameter, tensors as the parts that are here. Change it in place, or set keys.
            group: The parameter group.

        Returns:
            Of the gradient's shape. It is read before :meth:`apply` is called.
        """
        raise NotImplementedError

    def update(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The update that follows from a whole matrix. Must depend on nothing else, and not change it.

        Args:
            matrix: Of the parameter's whole shape, in the wire dtype.
            group: The parameter group.

        Returns:
            Of the same shape, any dtype.
        """
        raise NotImplementedError

    def update_all(self, matrices: Sequence[torch.Tensor], group: dict[str, Any]) -> Sequence[torch.Tensor]:
        """:meth:`update` of several matrices of one shape and one group: for those that compute faster in a batch."""
        return [self.update(matrix, group) for matrix in matrices]

    def apply(
        self, parameter: torch.Tensor, update: torch.Tensor, shape: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """Change this rank's part of a parameter in place.

        Args:
            parameter: The part, plain.
            update: The same part of what :meth:`update` returned, in the wire dtype.
            shape: Of the whole parameter.
            group: The parameter group.
        """
        raise NotImplementedError

    def work(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """What :meth:`update` costs, in any unit: by default, as a product of the matrix with itself."""
        return float(shape[0] * shape[1] * min(shape))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every optimizer.

        Raises:
            ValueError: See the class.
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
                f"{api}: expected matrices, found {name}; wrap the model with use_orig_params=True, so that matrices "
                "are parameters by themselves"
            )
        if len(shape) != 2:
            raise ValueError(
                f"{api}: expected 2-D parameters, found {name} of shape {shape}; give it to another optimizer, such "
                "as AdamW (and with it, usually, embeddings and the output layer)"
            )
        if cut_twice(parameter):
            raise ValueError(
                f"{api}: {name} of shape {shape} was cut by tensor parallelism before it was wrapped, and ranges of "
                "such parts are not put together; shard the model with fully_shard"
            )
        if parameter.is_complex():
            raise ValueError(f"{api}: expected real parameters, found {name} of {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, with all ranks.

        Args:
            closure: Computes the loss again and returns it.

        Raises:
            FullshardError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _run(self.plan().turns(self))
        return loss

    def plan(self) -> _Plan:
        """Which rank computes what. Made anew when parameters have changed their places or ``requires_grad``."""
        wanted = tuple(
            (id(p), p.requires_grad, p.dtype, p.device, _placed(p)) for g in self.param_groups for p in g["params"]
        )
        if self._plan is None or self._planned_for != wanted:
            self._plan, self._planned_for = _Plan.of(self), wanted
        return self._plan

    def traffic(self, rank: int | None = None) -> Traffic:
        """Bytes that a rank sends in a step: what others hold of its matrices it sends back, its parts it sends out.

        Args:
            rank: Of the group or groups that matrices are cut over; None: this one.
        """
        cut = [exchanged for _, exchanged in self.plan().rounds if exchanged is not None]
        each = [exchanged.traffic(exchanged.rank if rank is None else rank) for exchanged in cut]
        return Traffic(sum(t.out for t in each), sum(t.back for t in each))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "wire_dtype": self.wire_dtype, "round_bytes": self.round_bytes}


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One parameter of the optimizer: what stays the same from step to step."""

    parameter: torch.Tensor
    cut: CutMatrix
    group: int  # index among the parameter groups


@dataclass(frozen=True, eq=False)
class _Plan:
    """All matrices, in rounds. Matrices that are whole on this rank make a round without messages."""

    rounds: tuple[tuple[tuple[_Matrix, ...], Round | None], ...]

    @classmethod
    def of(cls, optimizer: MatrixOptimizer) -> _Plan:
        """For the parameters that require gradients now."""
        cut: dict[tuple[Sharers, torch.dtype], list[_Matrix]] = {}
        whole: list[_Matrix] = []
        for index, group in enumerate(optimizer.param_groups):
            for name, parameter in _named(group, index):
                if not parameter.requires_grad or not math.prod(matrix_shape(parameter)):
                    continue
                matrix = _Matrix(parameter, CutMatrix.of(parameter, name), index)
                sharers = matrix.cut.sharers
                dtype = optimizer.wire_dtype or parameter.dtype
                (whole if sharers is None else cut.setdefault((sharers, dtype), [])).append(matrix)
        rounds: list[tuple[tuple[_Matrix, ...], Round | None]] = []
        for (sharers, dtype), matrices in cut.items():
            work = [optimizer.work(m.cut.shape, optimizer.param_groups[m.group]) for m in matrices]
            nbytes = [m.cut.numel * dtype.itemsize for m in matrices]
            assigned = Assignment.build(work, nbytes, len(sharers.ranks), optimizer.round_bytes)
            for indices in assigned.rounds:
                chosen = tuple(matrices[i] for i in indices)
                owners = [assigned.owners[i] for i in indices]
                rounds.append((chosen, Round([m.cut for m in chosen], owners, sharers, dtype)))
        if whole:  # second, so that they are computed while messages travel
            rounds.insert(min(1, len(rounds)), (tuple(whole), None))
        return cls(tuple(rounds))

    def turns(self, optimizer: MatrixOptimizer) -> list[_Turn]:
        """What one step does with each round."""
        return [
            _WholeTurn(optimizer, matrices) if exchanged is None else _CutTurn(optimizer, matrices, exchanged)
            for matrices, exchanged in self.rounds
        ]


def _run(turns: Sequence[_Turn]) -> None:
    """See [Note: Rounds]."""
    for turn in turns[:1]:
        turn.send()
    for index, turn in enumerate(turns):
        turn.receive()
        for later in turns[index + 1 : index + 2]:
            later.send()
        turn.compute()
        if index:
            turns[index - 1].finish()
        turn.send_back()
    for turn in turns[-1:]:
        turn.finish()


class _Turn:
    """One round in one step. Its functions are called in order, those of other turns in between."""

    optimizer: MatrixOptimizer
    matrices: Sequence[_Matrix]
    missing: set[int]  # indices of those without a gradient on this rank
    tentative: dict[int, dict[str, Any]]  # the new state of these, which counts if anybody has a gradient

    def __init__(self, optimizer: MatrixOptimizer, matrices: Sequence[_Matrix]) -> None:
        self.optimizer, self.matrices = optimizer, matrices
        self.missing, self.tentative = set(), {}

    def send(self) -> None:
        """Update states and send to the owners."""
        raise NotImplementedError

    def receive(self) -> None:
        """Put together what is owned here."""
        raise NotImplementedError

    def compute(self) -> None:
        """Compute the updates of that."""
        raise NotImplementedError

    def send_back(self) -> None:
        """Send the updates to those who have parts of them."""
        raise NotImplementedError

    def finish(self) -> None:
        """Take the updates, and change the parameters."""
        raise NotImplementedError

    def group(self, index: int) -> _Group:
        """The parameter group of a matrix."""
        return self.optimizer.param_groups[self.matrices[index].group]

    def prepared(self, index: int) -> torch.Tensor:
        """This rank's part of what the owner is to see of a matrix."""
        parameter, optimizer = self.matrices[index].parameter, self.optimizer
        gradient = _gradient(parameter, self.matrices[index].cut.name)
        saved = optimizer.state[parameter] if gradient is not None or parameter in optimizer.state else {}
        state = {key: local_of(value) if torch.is_tensor(value) else value for key, value in saved.items()}
        if gradient is None:
            self.missing.add(index)
            state = {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
            zeros = torch.zeros_like(value_of(parameter))
            self.tentative[index] = state
            return optimizer.prepare(zeros, state, self.group(index))
        before = dict(state)
        part = optimizer.prepare(gradient, state, self.group(index))
        _keep(parameter, saved, {key: value for key, value in state.items() if before.get(key) is not value})
        return part

    def updated(self, owned: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The updates of whole matrices, those of one shape and group together."""
        alike: dict[tuple[int, torch.Size, torch.dtype], list[int]] = {}
        for index, whole in owned.items():
            alike.setdefault((self.matrices[index].group, whole.shape, whole.dtype), []).append(index)
        found: dict[int, torch.Tensor] = {}
        for indices in alike.values():
            updates = self.optimizer.update_all([owned[index] for index in indices], self.group(indices[0]))
            found.update(zip(indices, updates, strict=True))
        return found

    def applied(self, index: int, part: torch.Tensor) -> None:
        """Change this rank's part of a parameter."""
        matrix = self.matrices[index]
        parameter = matrix.parameter
        if index in self.tentative:
            _keep(parameter, self.optimizer.state[parameter], self.tentative.pop(index))
        local = value_of(parameter)
        self.optimizer.apply(local, part.to(local.device), matrix.cut.shape, self.group(index))


class _CutTurn(_Turn):
    """Of matrices that are cut over some ranks."""

    exchanged: Round
    message: Message | None  # the one in flight
    owned: dict[int, torch.Tensor]  # matrices, then updates; from receive to send_back

    def __init__(self, optimizer: MatrixOptimizer, matrices: Sequence[_Matrix], exchanged: Round) -> None:
        super().__init__(optimizer, matrices)
        self.exchanged, self.message, self.owned = exchanged, None, {}

    def send(self) -> None:
        """See :class:`_Turn`."""
        parts = [self.prepared(index) for index in range(len(self.matrices))]
        self.message = self.exchanged.send(parts, sorted(self.missing))

    def receive(self) -> None:
        """See :class:`_Turn`."""
        assert self.message is not None
        self.owned = self.exchanged.wholes(self.message.wait(), sorted(self.missing))

    def compute(self) -> None:
        """See :class:`_Turn`."""
        self.owned = self.updated(self.owned)

    def send_back(self) -> None:
        """See :class:`_Turn`."""
        updates, self.owned = self.owned, {}
        self.message = self.exchanged.send_back(updates)

    def finish(self) -> None:
        """See :class:`_Turn`."""
        assert self.message is not None
        arrived = self.message.wait()
        for index in range(len(self.matrices)):
            if index not in self.missing or self.exchanged.anybody_had(arrived, index):
                self.applied(index, self.exchanged.part_of(arrived, index))
        self.message = None


class _WholeTurn(_Turn):
    """Of matrices of which this rank has all: without a gradient they stay as they are."""

    def send(self) -> None:
        """See :class:`_Turn`. All in :meth:`compute`, so that one matrix is alive at a time."""

    def receive(self) -> None:
        """See :class:`_Turn`."""

    def compute(self) -> None:
        """See :class:`_Turn`."""
        for index, matrix in enumerate(self.matrices):
            if matrix.parameter.grad is not None:
                dtype = self.optimizer.wire_dtype or matrix.parameter.dtype
                part = self.prepared(index).view(matrix.cut.shape).to(dtype)
                (update,) = self.optimizer.update_all([part], self.group(index))
                self.applied(index, update)

    def send_back(self) -> None:
        """See :class:`_Turn`."""

    def finish(self) -> None:
        """See :class:`_Turn`."""


def _gradient(parameter: torch.Tensor, name: str) -> torch.Tensor | None:
    """This rank's part, lying as the parameter does."""
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


def _keep(parameter: torch.Tensor, saved: dict[str, Any], changed: dict[str, Any]) -> None:
    """Put parts of state into the optimizer's, as DTensors where the parameter is one."""
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
        otherwise = names[index] if names else f"parameter {index} of group {number}"
        yield matrix_name(parameter, otherwise), parameter


def _placed(parameter: torch.Tensor) -> object:
    """What changes when the parameter is sharded otherwise."""
    if isinstance(parameter, DTensor):
        return id(parameter.device_mesh), parameter.placements
    return parameter.shape
