"""Makes torch's modules return fullshard's objects.

[Note: Stand-in modules]
The modules of torch's FSDP keep their contents, because their functions read each other there. While the drop-in is
installed, their class is one whose ``__getattribute__`` returns fullshard's objects in place of those of torch's
engine. ``from torch.distributed.fsdp import X`` and ``torch.distributed.fsdp.X`` both use it, also in code that was
imported earlier. Replacing entries of ``sys.modules`` would not affect that code, and replacing names in the modules
themselves would mix the two engines inside of torch's functions. Objects that a program has put there itself, such as
mocks, are returned as they are.

Names that other modules have imported earlier (``from ... import X``) are rebound, by identity, in all loaded modules.
References elsewhere (in tuples, closures, defaults) remain torch's; sharding through one of them raises
``MixedEnginesError``, because the constructors of torch's engine are disabled.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from fullshard.dropin import split_backward
from fullshard.dropin.errors import MixedEnginesError, NotOfferedError
from fullshard.dropin.names import CHECKPOINT_WRAPPER, PACKAGES, StandInNames, is_torch_fsdp_module, stand_in_names
from fullshard.dropin.patches import replace
from fullshard.dropin.private_names import patched_attributes
from fullshard.dropin.torch_state_dict import enable_torch_state_dict_functions

__all__ = ["StandIns"]


class _StandIn(ModuleType):
    """Class of torch's FSDP modules while the drop-in is installed, see [Note: Stand-in modules]."""

    stand_ins: ClassVar[StandIns]

    def __getattribute__(self, name: str) -> Any:
        value = ModuleType.__getattribute__(self, name)
        return value if name.startswith("__") else _StandIn.stand_ins.resolve(self, name, value)

    def __dir__(self) -> list[str]:
        unavailable = _StandIn.stand_ins.names[self.__name__].unavailable
        return [name for name in vars(self) if name not in unavailable]


class StandIns:
    """All modules of torch's FSDP, and the patches of torch and other libraries that belong to them.

    Attributes:
        names: Replaced and unavailable names, by name of torch's modules.
    """

    names: dict[str, StandInNames]
    _modules: list[ModuleType]
    _replacements: dict[int, Any]  # fullshard's objects by the ids of torch's
    _originals: dict[int, Any]  # torch's objects by the ids of those that replace them
    _borrowed: dict[str, set[str]]  # replaced names that modules have imported since, by importing module
    _had_before: dict[str, set[str]]  # names of those modules that referred to fullshard's objects before
    _undo: contextlib.ExitStack
    _pipelining_patched: bool  # see [Note: Split backward]

    def __init__(self) -> None:
        self._modules = list(_torch_modules())
        self.names = {module.__name__: stand_in_names(module) for module in self._modules}
        self._replacements, self._originals = {}, {}
        for module in self._modules:
            for name, ours in self.names[module.__name__].replaced.items():
                self._replacements[id(vars(module)[name])] = ours
                self._originals[id(ours)] = vars(module)[name]
        self._borrowed, self._had_before = {}, {}
        self._undo, self._pipelining_patched = contextlib.ExitStack(), False

    # ---------------------------------------------------------------- names

    def resolve(self, module: ModuleType, name: str, value: Any) -> Any:
        """Return the object that the calling module gets for ``name`` of one of torch's modules.

        Args:
            module: One of torch's modules.
            name: The attribute.
            value: Object that it has there, which torch's own modules get.

        Raises:
            NotOfferedError: If fullshard does not have the name.
        """
        names = self.names[module.__name__]
        if id(value) not in self._replacements and name not in names.unavailable:
            return value
        caller = sys._getframe(2).f_globals  # past __getattribute__
        asking = caller.get("__name__", "")
        if is_torch_fsdp_module(asking):
            return value  # torch's modules read each other
        if name in names.unavailable:
            if asking.partition(".")[0] == "torch":  # dynamo compares functions with them, trackers of memory name them
                return value
            raise NotOfferedError(
                f"{module.__name__}.{name} is a part of torch's FSDP that fullshard does not have (imported by "
                f"{asking or 'a program'}); docs/integrations/drop_in.md lists supported names, "
                "fullshard.dropin.uninstall() restores torch's"
            )
        if asking not in self._borrowed:
            self._borrowed[asking] = set()
            self._had_before[asking] = {own for own, held in list(caller.items()) if id(held) in self._originals}
        self._borrowed[asking].add(name)
        if asking == split_backward.SCHEDULES:  # is being imported, and has imported the stages
            self._patch_pipelining(load=True)
        return self._replacements[id(value)]

    # ---------------------------------------------------------------- begin and end

    def begin(self) -> None:
        """Replace names, and rebind those that modules have imported. On failure, all of it is undone."""
        try:
            self._begin()
        except BaseException:
            self.end()
            raise

    def _begin(self) -> None:
        self._undo.enter_context(enable_torch_state_dict_functions())
        for holder, name, value in patched_attributes():
            replace(self._undo, holder, name, value)
        _refuse_torch(self._undo)
        _StandIn.stand_ins = self
        for module in self._modules:
            self._undo.callback(setattr, module, "__class__", module.__class__)
            module.__class__ = _StandIn
        self._patch_pipelining()
        for module in _others(self._modules):
            for name, value in list(vars(module).items()):
                ours = None if name.startswith("__") else self._replacements.get(id(value))
                if ours is not None:
                    self._rebind(module, name, ours)

    def _rebind(self, module: ModuleType, name: str, ours: Any) -> None:
        """Replace a name in another module until the end, unless that module has replaced it again by then."""
        self._undo.callback(_restore, module, name, vars(module)[name], ours)
        vars(module)[name] = ours

    def _patch_pipelining(self, *, load: bool = False) -> None:
        if not self._pipelining_patched:
            self._pipelining_patched = split_backward.patch_stages(self._undo, load=load)

    def end(self) -> None:
        """Restore torch's objects, also in modules that have imported replaced names meanwhile."""
        for borrower, asked in self._borrowed.items():
            if borrower in sys.modules and borrower.partition(".")[0] != "fullshard":
                self._give_back(vars(sys.modules[borrower]), asked, self._had_before[borrower])
        self._undo.close()
        for module in self._modules:  # programs may have put fullshard's objects back after their mocks
            replaced = self.names[module.__name__].replaced
            self._give_back(vars(module), set(replaced), set())

    def _give_back(self, names: dict[str, Any], asked: set[str], owned: set[str]) -> None:
        """Rebind fullshard's objects for the names ``asked``, under whatever names a module has them, to torch's."""
        lent = {id(ours) for found in self.names.values() for name, ours in found.replaced.items() if name in asked}
        for name, value in list(names.items()):
            if id(value) in lent and name not in owned and not name.startswith("__"):
                names[name] = self._originals[id(value)]


def _restore(module: ModuleType, name: str, theirs: Any, ours: Any) -> None:
    if vars(module).get(name) is ours:
        vars(module)[name] = theirs


def _refuse_torch(undo: contextlib.ExitStack) -> None:
    """Make the constructors of torch's engine raise until ``undo`` is closed: all its ways to shard call them first."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for constructed, api in ((FSDPState, "fully_shard"), (FullyShardedDataParallel, "FullyShardedDataParallel")):
        replace(undo, constructed, "__init__", _refusing(api))


def _refusing(api: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise MixedEnginesError(
            f"torch's own {api} was called through a reference that was taken before fullshard.dropin.install() and "
            "that install() cannot replace (in a tuple, a closure or a default argument); a model cannot be sharded by "
            f"both engines. Call install() before that code is imported, or import {api} again there"
        )

    return refuse


def _torch_modules() -> Iterator[ModuleType]:
    """Import and yield all modules of torch's FSDP, and of checkpoint wrappers, one function of which uses it."""
    for package in (*PACKAGES, CHECKPOINT_WRAPPER):
        module = importlib.import_module(package)
        yield module
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{package}."):
            yield importlib.import_module(found.name)


def _others(modules: Sequence[ModuleType]) -> Iterator[ModuleType]:
    """Yield loaded modules that are neither those nor fullshard's."""
    known = set(map(id, modules))
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and id(module) not in known and name.partition(".")[0] != "fullshard":
            yield module
