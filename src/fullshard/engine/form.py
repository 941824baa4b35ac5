"""In which form the parameters of a unit are kept at rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.engine.bucket import Bucket, BufferBucket
from fullshard.engine.extension import ExtensionBucket, has_extension
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import Owner, ShardedParameter, value_of
from fullshard.engine.placement import ParameterPlacement
from fullshard.engine.registration import Registration
from fullshard.engine.storage import Storage
from fullshard.policy import MixedPrecisionPolicy

__all__ = ["BucketKey", "Form"]


class BucketKey(NamedTuple):
    """What parameters of a bucket have in common; the last is whatever else the form keeps apart."""

    mesh: ShardMesh
    dtype: torch.dtype
    on_meta: bool
    group: object


class Form:
    """As rows of each parameter, in DTensors. Subclasses know other forms; a unit asks its own and no other thing."""

    def parameter(
        self, parameter: nn.Parameter, owner: Owner, fqn: str, placement: ParameterPlacement
    ) -> ShardedParameter:
        """For a parameter that no unit manages yet."""
        return ShardedParameter.of(parameter, owner, fqn, placement)

    def copy_for(self, memo: dict[int, Any]) -> Form:
        """The same form for a deep copy whose modules are in ``memo``."""
        return self

    def accepts(self, parameter: ShardedParameter) -> bool:
        """Whether a parameter that another unit has kept can go on in this form."""
        return type(parameter) is ShardedParameter

    def group(self, parameter: ShardedParameter) -> BucketKey:
        """Parameters with equal ones share a bucket."""
        value = value_of(parameter.sharded)
        extended = has_extension(value, parameter.fqn)
        return BucketKey(parameter.placement.mesh, value.dtype, value.device.type == "meta", extended)

    def bucket(
        self,
        parameters: Sequence[ShardedParameter],
        mesh: ShardMesh,
        storage: Storage,
        precision: MixedPrecisionPolicy,
    ) -> Bucket:
        """A bucket of such a group; takes the parameters' present values over."""
        values = [value_of(parameter.sharded) for parameter in parameters]
        if has_extension(values[0], parameters[0].fqn):
            return ExtensionBucket(parameters, values, mesh, storage, precision)
        return BufferBucket(parameters, values, mesh, storage)

    def registration(self, parameters: Sequence[ShardedParameter], buckets: Sequence[Bucket]) -> Registration:
        """What puts parameters into modules."""
        return Registration(parameters)
