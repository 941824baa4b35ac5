"""The flat form of a unit: buckets that are one slice per rank, and what modules hold at rest."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import has_extension
from fullshard.engine.flat_bucket import FlatBucket
from fullshard.engine.flat_parameter import FlatHome, FlatPiece
from fullshard.engine.form import BucketKey, Form
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import Owner, ShardedParameter, value_of
from fullshard.engine.placement import ParameterPlacement
from fullshard.engine.registration import Registration
from fullshard.engine.storage import Storage
from fullshard.policy import MixedPrecisionPolicy

__all__ = ["FlatForm"]

FLAT_PARAMETER = "_flat_param"  # name of the first visible flat parameter of a module


class PieceRegistration(Registration):
    """Modules hold the pieces as their parameters.

    Args:
        parameters: With all their owners.
    """

    _empty: list[ShardedParameter]  # those of which this rank has nothing

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        super().__init__(parameters)
        self._empty = [parameter for parameter in parameters if not parameter.local.numel()]

    def is_current(self) -> bool:
        """See :class:`Registration`."""
        for held, name, parameter in self._plain:
            sharded, local = parameter.sharded, parameter.local
            if held.get(name) is not sharded or sharded.data_ptr() != local.data_ptr() or sharded.shape != local.shape:
                return False
        return all(parameter.is_current() for parameter in self._empty) and all(
            parameter.is_current() for _, parameter in self._others
        )


class HomeRegistration(Registration):
    """Modules hold the pieces as plain attributes; flat parameters are registered instead.

    Args:
        parameters: With all their owners.
        homes: The flat parameters.
    """

    _homes: list[FlatHome]
    _hidden: list[tuple[dict[str, Any], str, ShardedParameter]]  # the modules' own dictionaries

    def __init__(self, parameters: Sequence[ShardedParameter], homes: Sequence[FlatHome]) -> None:
        super().__init__(parameters)
        self._homes = list(homes)
        owned = [(owner.module(), owner.name, parameter) for parameter in parameters for owner in parameter.owners]
        self._hidden = [(module.__dict__, name, parameter) for module, name, parameter in owned if module is not None]

    def use_sharded(self) -> None:
        """See :class:`Registration`."""
        self.full = False
        for owner, parameter in self._others:  # what keeps a second list of its weights has to let go of the full ones
            owner.set(parameter.sharded)
        for attributes, name, parameter in self._hidden:
            # None keeps the place among the module's parameters, and whoever lists them skips it.
            attributes["_parameters"][name] = None
            attributes[name] = parameter.sharded
        for home in self._homes:
            home.parameters[home.name] = home.flat

    def use_full(self) -> None:
        """See :class:`Registration`."""
        self._make_room()
        super().use_full()

    def use_instead(self, others: Mapping[int, nn.Parameter]) -> None:
        """See :class:`Registration`."""
        self._make_room()
        super().use_instead(others)

    def leave(self) -> None:
        """See :class:`Registration`."""
        self._make_room()
        for home in self._homes:
            home.parameters.pop(home.name, None)

    def _make_room(self) -> None:
        for attributes, name, _ in self._hidden:
            attributes.pop(name, None)
        for home in self._homes:
            home.parameters[home.name] = None

    def is_current(self) -> bool:
        """See :class:`Registration`."""
        if not all(home.is_current() for home in self._homes):
            return False
        return all(attributes["_parameters"].get(name) is None for attributes, name, _ in self._hidden)


class FlatForm(Form):
    """See [Note: Flat pieces].

    Args:
        module: On which visible flat parameters are registered; None: original parameters are what users see.
    """

    _module: weakref.ref[nn.Module] | None

    def __init__(self, module: nn.Module | None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def parameter(
        self, parameter: nn.Parameter, owner: Owner, fqn: str, placement: ParameterPlacement
    ) -> ShardedParameter:
        """See :class:`Form`.

        Raises:
            ValueError: If it is a tensor subclass that is gathered through hooks of its own.
        """
        if has_extension(value_of(parameter), fqn):
            raise ValueError(
                f"FullyShardedDataParallel: {fqn} is a {type(value_of(parameter)).__name__}, which brings its own "
                "gather hooks; shard it with fully_shard, which knows them"
            )
        return FlatPiece.of(parameter, owner, fqn, placement)

    def copy_for(self, memo: dict[int, Any]) -> Form:
        """See :class:`Form`."""
        return self if self._module is None else FlatForm(memo[id(self._module())])

    def accepts(self, parameter: ShardedParameter) -> bool:
        """See :class:`Form`."""
        return isinstance(parameter, FlatPiece)

    def group(self, parameter: ShardedParameter) -> BucketKey:
        """See :class:`Form`. Frozen parameters apart, for a reduction takes all of a bucket; and for ever those that
        were cut apart.
        """
        value = value_of(parameter.sharded)
        cut = cast("FlatPiece", parameter).cut
        apart = parameter.requires_grad if cut is None else id(cut)
        return BucketKey(parameter.placement.mesh, value.dtype, value.device.type == "meta", apart)

    def bucket(
        self,
        parameters: Sequence[ShardedParameter],
        mesh: ShardMesh,
        storage: Storage,
        precision: MixedPrecisionPolicy,
    ) -> Bucket:
        """See :class:`Form`."""
        return FlatBucket(cast("Sequence[FlatPiece]", parameters), mesh, storage)

    def registration(self, parameters: Sequence[ShardedParameter], buckets: Sequence[Bucket]) -> Registration:
        """See :class:`Form`."""
        if self._module is None:
            return PieceRegistration(parameters)
        module = self._module()
        assert module is not None, "a unit outlived its module"
        for name in [name for name in module._parameters if name.startswith(FLAT_PARAMETER)]:
            del module._parameters[name]
        homes = []
        for index, bucket in enumerate(cast("Sequence[FlatBucket]", buckets)):
            name = FLAT_PARAMETER if index == 0 else f"{FLAT_PARAMETER}_{index}"
            home = bucket.pieces[0].home
            if home is not None and home.pieces == bucket.pieces:
                home.move_to(bucket.shard_buffer)
                home.name = name
            else:
                home = FlatHome(module, name, bucket.shard_buffer, bucket.pieces)
            bucket.show(home)
            homes.append(home)
        return HomeRegistration(parameters, homes)
