"""``summon_full_params``: unsharded parameters inside of a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from fullshard.engine.ownership import nested_units, unit_of, units_of
from fullshard.engine.states import ParameterState
from fullshard.engine.summoned_parameters import SummonedParameters
from fullshard.errors import FullshardError
from fullshard.frontend.arguments import check_bool, check_instance
from fullshard.ranks.agreement import any_rank
from fullshard.ranks.groups import data_parallel_groups

__all__ = ["WrapperSummon"]


class WrapperSummon:
    """Access to the unsharded parameters of ``FullyShardedDataParallel``."""

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None, None, None]:
        """Unshard parameters inside the ``with`` block. All ranks enter and leave it together.

        Parameters are unsharded in the dtype of the shards. With gradients disabled, modules can run inside the block.
        They then compute on these unsharded parameters, without mixed precision casts.

        Args:
            module: A sharded module of ``FullyShardedDataParallel`` or ``fully_shard``, or a module that contains some.
            recurse: Unshard the units of all nested modules too.
            writeback: Write changes back to the shards, unless the block raises.
            rank0_only: Only the first rank of the shard axis gets unsharded parameters. With ``writeback``, its changes
                are scattered to the other ranks.
            offload_to_cpu: Keep the unsharded parameters in CPU memory.
            with_grads: Unshard gradients too.

        Yields:
            None.

        Raises:
            PhaseError: If it is entered in forward or backward, or a unit is already unsharded by the user.
            FullshardError: With ``writeback`` and ``rank0_only``, if the block raised on another rank.

        Example:
            ```python
            import torch
            from torch import nn
            from fullshard import FullyShardedDataParallel as FSDP

            model = FSDP(nn.Linear(16, 8), use_orig_params=True)
            with FSDP.summon_full_params(model), torch.no_grad():
                assert model.weight.shape == (8, 16)
                model.weight.zero_()  # written back to the shards of all ranks
            ```
        """
        check_instance("summon_full_params: module", module, nn.Module)
        flags = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
        for name, flag in {**flags, "with_grads": with_grads}.items():
            check_bool(f"summon_full_params: {name}", flag)
        own = unit_of(module)
        nested = nested_units(module)
        units = (
            units_of(module) if recurse else [u for u in units_of(module) if u not in nested] if own is None else [own]
        )
        units = [u for u in units if u in nested or u.parameter_state is not ParameterState.SUMMONED]
        summoned: list[SummonedParameters] = []
        error: BaseException | None = None
        try:
            for unit in units:
                summoned.append(
                    SummonedParameters(
                        unit, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
                    )
                )
            yield
            if writeback:
                for copies in summoned:
                    copies.check()
        except BaseException as raised:
            error = raised
            raise
        finally:
            failed = error is not None
            if rank0_only and writeback and len(summoned) == len(units):  # the first rank's edits are sent to all
                for mesh in dict.fromkeys(unit.mesh for unit in units):
                    failed = any_rank(failed, data_parallel_groups(mesh))
            with contextlib.ExitStack() as stack:  # close all, also if one fails
                for copies in summoned:
                    stack.callback(
                        copies.close, writeback=writeback and not failed, rank0_only=rank0_only, with_grads=with_grads
                    )
            if failed and error is None:
                raise FullshardError(
                    "summon_full_params(writeback=True, rank0_only=True): the block failed on another rank, so nothing "
                    "was written back"
                )
