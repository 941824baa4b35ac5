"""Makes torch's modules return fullshard's objects.

[Note: Stand-in modules]
The modules of torch's FSDP keep their contents, because their functions read each other there. While the drop-in is
installed, their class is one whose ``__getattribute__`` returns fullshard's objects for names of torch's engine.
``from torch.distributed.fsdp import X`` and ``torch.distributed.fsdp.X`` both use it, also in code that was imported
earlier. Replacing entries of ``sys.modules`` would not affect that code, and replacing names in the modules themselves
would mix the two engines inside of torch's functions.

Names that other modules have imported earlier (``from ... import X``) are rebound, by identity, in all loaded modules.
References elsewhere (in tuples, closures, defaults) remain torch's; sharding through one of them raises
``MixedEnginesError``, because the constructors of torch's engine are disabled. ``isinstance`` works with such
references, see ``torch_bases.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from torch.distributed.checkpoint import state_dict

import fullshard
from fullshard.dropin import clients, gradient_clipping, param_groups, split_backward
from fullshard.dropin.errors import NotOfferedError
from fullshard.dropin.names import CHECKPOINT_WRAPPER, PACKAGES, StandInNames, is_torch_fsdp_module, stand_in_names
from fullshard.dropin.not_offered import NotOffered
from fullshard.dropin.patches import replace
from fullshard.dropin.private_names import patched_attributes
from fullshard.dropin.ragged_placements import enable_ragged_placements
from fullshard.dropin.torch_bases import take_torch_bases
from fullshard.dropin.torch_state_dict import enable_torch_state_dict_functions

__all__ = ["Binding", "StandIns"]


class Binding(NamedTuple):
    """A name in a module that was rebound from torch's object to fullshard's."""

    module: ModuleType
    name: str
    was: Any
    now: Any


class _StandIn(ModuleType):
    """Class of torch's FSDP modules while the drop-in is installed, see [Note: Stand-in modules]."""

    stand_ins: ClassVar[StandIns]

    def __getattribute__(self, name: str) -> Any:
        value = ModuleType.__getattribute__(self, name)
        return value if name.startswith("__") else _StandIn.stand_ins.resolve(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not _StandIn.stand_ins.patch(self, name, value):
            ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _StandIn.stand_ins.names[self.__name__].replaced:
            raise AttributeError(
                f"{self.__name__}.{name} is fullshard's and cannot be deleted; call fullshard.dropin.uninstall() first"
            )
        ModuleType.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        unavailable = _StandIn.stand_ins.names[self.__name__].unavailable
        return [name for name in vars(self) if name not in unavailable]


class StandIns:
    """All modules of torch's FSDP, and the patches of torch and other libraries that belong to them.

    Attributes:
        names: Replaced and unavailable names, by name of torch's modules.
        bindings: Rebound names of other modules.
    """

    names: dict[str, StandInNames]
    bindings: list[Binding]
    _modules: list[ModuleType]
    _replacements: dict[int, Any]  # fullshard's objects by the ids of torch's
    _borrowed: dict[str, set[str]]  # replaced names that modules have imported since, by importing module
    _had_before: dict[str, set[str]]  # names of those modules that referred to fullshard's objects before
    _undo: contextlib.ExitStack
    _pipelining_patched: bool  # see [Note: Split backward]

    def __init__(self) -> None:
        self._modules = list(_torch_modules())
        self.names = {module.__name__: stand_in_names(module) for module in self._modules}
        self._replacements = {
            id(vars(module)[name]): ours
            for module in self._modules
            for name, ours in self.names[module.__name__].replaced.items()
        }
        self.bindings, self._borrowed, self._had_before = [], {}, {}
        self._undo, self._pipelining_patched = contextlib.ExitStack(), False

    # ---------------------------------------------------------------- names

    def resolve(self, module: ModuleType, name: str, value: Any) -> Any:
        """Return the object that the calling module gets for ``name`` of one of torch's modules.

        Args:
            module: One of torch's modules.
            name: The attribute.
            value: torch's object, which torch's own modules get.

        Raises:
            NotOfferedError: If fullshard does not have the name.
        """
        replaced, unavailable = self.names[module.__name__]
        if name not in replaced and name not in unavailable:
            return value
        names = sys._getframe(2).f_globals  # past __getattribute__
        asking = names.get("__name__", "")
        if is_torch_fsdp_module(asking):
            return value  # torch's modules read each other
        clients.check(asking)
        if name in unavailable:
            raise NotOfferedError(
                f"{module.__name__}.{name} is a part of torch's FSDP that fullshard does not have (imported by "
                f"{asking or 'a program'}); docs/integrations/drop_in.md lists supported names, "
                "fullshard.dropin.uninstall() restores torch's"
            )
        if asking not in self._borrowed:
            ours = set(map(id, self._replacements.values()))
            self._borrowed[asking] = set()
            self._had_before[asking] = {own for own, value in list(names.items()) if id(value) in ours}
        self._borrowed[asking].add(name)
        if asking == split_backward.SCHEDULES:  # is being imported, and has imported the stages
            self._patch_pipelining(load=True)
        return replaced[name]

    def patch(self, module: ModuleType, name: str, value: Any) -> bool:
        """Return ``value`` for a replaced ``name`` from now on; torch's own object restores fullshard's.

        Returns:
            True if ``name`` is replaced.
        """
        replaced = self.names[module.__name__].replaced
        if name not in replaced:
            return False
        replaced[name] = self._replacements[id(value)] if value is vars(module)[name] else value
        return True

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
        self._undo.enter_context(enable_ragged_placements())
        taken = [
            (module, name, self._replacements[id(value)])
            for module in _others(self._modules)
            for name, value in list(vars(module).items())
            if id(value) in self._replacements and not name.startswith("__")
            if not isinstance(self._replacements[id(value)], NotOffered)  # torch's remains, and may be usable
        ]
        for module, _, _ in taken:
            clients.check(module.__name__)
        for holder, name, value in patched_attributes():
            replace(self._undo, holder, name, value)
        self._undo.callback(param_groups.unpatch)
        take_torch_bases(self._undo)
        _StandIn.stand_ins = self
        for module in self._modules:
            self._undo.callback(setattr, module, "__class__", module.__class__)
            module.__class__ = _StandIn
        self._patch_pipelining()
        for module, name, now in taken:
            self._bind(module, name, now)
        # Not the class for both engines that supports torch's functions: fullshard's is a subclass of torch's now.
        self._bind(state_dict, "FSDP", fullshard.FullyShardedDataParallel)
        for name, function in gradient_clipping.replaced_functions().items():
            self._bind(gradient_clipping.MODULE, name, function)

    def _patch_pipelining(self, *, load: bool = False) -> None:
        if not self._pipelining_patched:
            self._pipelining_patched = split_backward.patch_stages(self._undo, load=load)

    def _bind(self, module: ModuleType, name: str, now: Any) -> None:
        self.bindings.append(Binding(module, name, vars(module)[name], now))
        vars(module)[name] = now

    def end(self) -> None:
        """Restore torch's objects, also in modules that have imported replaced names meanwhile."""
        for module, name, was, now in self.bindings:
            if vars(module).get(name) is now:
                vars(module)[name] = was
        self.bindings.clear()
        for borrower, asked in self._borrowed.items():
            if borrower in sys.modules and borrower.partition(".")[0] != "fullshard":
                self._restore_names(vars(sys.modules[borrower]), asked, self._had_before[borrower])
        self._undo.close()

    def _restore_names(self, names: dict[str, Any], asked: set[str], owned: set[str]) -> None:
        """Rebind replaced objects that a module has imported, under whatever names, to torch's."""
        originals = {
            id(ours): vars(module)[name]
            for module in self._modules
            for name, ours in self.names[module.__name__].replaced.items()
            if name in asked
        }
        for name, value in list(names.items()):
            if id(value) in originals and name not in owned and not name.startswith("__"):
                names[name] = originals[id(value)]


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
