"""torch's modules answering with fullshard's objects.

[Note: Standing in]
The modules of torch's FSDP stay where they are, with all that is in them, for the functions in them read each other
there. What changes is what they *answer*: while fullshard stands in, their class is one whose ``__getattribute__``
gives fullshard's objects for names of torch's engine. ``from torch.distributed.fsdp import X`` and
``torch.distributed.fsdp.X`` both go through it, in code that was imported before as well. Other entries in
``sys.modules`` would miss that code, and names put into the modules themselves would mix the two engines inside of
torch's functions.

Names that other modules took earlier (``from ... import X``) lie in those modules: they are bound anew, by identity,
wherever a loaded module has them. References hidden elsewhere (in tuples, closures, defaults) stay torch's; whoever
shards through one of them meets :class:`MixedEnginesError`, for the constructors of torch's engine refuse. For
``isinstance`` such references are right: see ``kinship.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch.distributed.checkpoint import state_dict

import fullshard
from fullshard.dropin import clients, param_groups, split_backward
from fullshard.dropin.errors import NotOfferedError
from fullshard.dropin.kinship import Kinship
from fullshard.dropin.names import CHECKPOINT_WRAPPER, PACKAGES, Answers, answers_of, in_engine
from fullshard.dropin.not_offered import NotOffered
from fullshard.dropin.private_names import lent

__all__ = ["Binding", "StandIns"]


class Binding(NamedTuple):
    """A name in a module that was bound to torch's object and is bound to fullshard's."""

    module: ModuleType
    name: str
    was: Any
    now: Any


class _StandIn(ModuleType):
    """What a module of torch's FSDP is while fullshard stands in. See [Note: Standing in]."""

    def __getattribute__(self, name: str) -> Any:
        value = ModuleType.__getattribute__(self, name)
        if name.startswith("__"):
            return value
        return _answering[ModuleType.__getattribute__(self, "__name__")].answer(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not _answering[self.__name__].patch(self.__name__, name, value):
            ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _answering[self.__name__].answers[self.__name__].given:
            raise AttributeError(
                f"{self.__name__}.{name} is fullshard's now, and stays until fullshard.dropin.uninstall()"
            )
        ModuleType.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        refused = _answering[self.__name__].answers[self.__name__].refused
        return [name for name in vars(self) if name not in refused]


_answering: dict[str, StandIns] = {}  # by name of torch's modules, while they are stand-ins


class StandIns:
    """All modules of torch's FSDP, and what else of torch's and of other programs' is changed with them.

    Attributes:
        answers: by name of torch's modules, what they answer.
        bindings: names in other modules that are bound anew.
    """

    answers: dict[str, Answers]
    bindings: list[Binding]
    _modules: list[ModuleType]
    _originals: dict[str, dict[str, Any]]  # torch's objects for the names that are given, by module
    _replacements: dict[int, Any]  # fullshard's objects by the ids of torch's
    _borrowed: dict[str, set[str]]  # by name of modules that have asked for something: the names asked for
    _owned: dict[str, set[str]]  # and what they had of fullshard's before, under names of theirs
    _undo: list[Callable[[], None]]
    _serves_pipelining: bool  # see [Note: Split backward]

    def __init__(self) -> None:
        self._modules = list(_torch_modules())
        self.answers = {module.__name__: answers_of(module) for module in self._modules}
        self._originals = {
            module.__name__: {name: vars(module)[name] for name in self.answers[module.__name__].given}
            for module in self._modules
        }
        self._replacements = {
            id(was): self.answers[module].given[name]
            for module, originals in self._originals.items()
            for name, was in originals.items()
        }
        self.bindings, self._borrowed, self._owned, self._undo = [], {}, {}, []
        self._serves_pipelining = False

    # ---------------------------------------------------------------- answering

    def answer(self, module: ModuleType, name: str, value: Any) -> Any:
        """What ``name`` of one of torch's modules, where ``value`` lies, is for whoever asks."""
        given, refused = self.answers[module.__name__]
        if name not in given and name not in refused:
            return value
        names = sys._getframe(2).f_globals  # past __getattribute__
        asking = names.get("__name__", "")
        if in_engine(asking):
            return value  # torch's modules read each other
        clients.check(asking)
        if name in refused:
            raise NotOfferedError(
                f"{module.__name__}.{name} is a part of torch's FSDP that fullshard does not have (asked for by "
                f"{asking or 'a program'}); docs/dropin.md says what there is, fullshard.dropin.uninstall() gives "
                "torch's back"
            )
        if asking not in self._borrowed:
            ours = set(map(id, self._replacements.values()))
            self._borrowed[asking] = set()
            self._owned[asking] = {own for own, value in list(names.items()) if id(value) in ours}
        self._borrowed[asking].add(name)
        if asking == split_backward.SCHEDULES:  # is being imported, and has imported the stages
            self._serve_pipelining(load=True)
        return given[name]

    def patch(self, module: str, name: str, value: Any) -> bool:
        """Answer ``value`` from now on, where ``name`` is given; torch's own object means fullshard's again.

        Returns:
            Whether it is given.
        """
        given = self.answers[module].given
        if name not in given:
            return False
        given[name] = self._replacements[id(value)] if value is self._originals[module][name] else value
        return True

    # ---------------------------------------------------------------- beginning and ending

    def begin(self) -> None:
        """Answer, and bind anew what others have taken. If that fails, all is as it was."""
        try:
            self._begin()
        except BaseException:
            self.end()
            raise

    def _begin(self) -> None:
        taken = [
            (module, name, self._replacements[id(value)])
            for module in _others(self._modules)
            for name, value in list(vars(module).items())
            if id(value) in self._replacements and not name.startswith("__")
            if not isinstance(self._replacements[id(value)], NotOffered)  # theirs, and may be of use to them
        ]
        for module, _, _ in taken:
            clients.check(module.__name__)
        for holder, name, value in lent():
            self._undo.append(_back(holder, name))
            setattr(holder, name, value)
        self._undo.append(param_groups.unpatch)
        kinship = Kinship()
        self._undo.append(kinship.end)
        kinship.begin()
        for module in self._modules:
            _answering[module.__name__] = self
            before, module.__class__ = module.__class__, _StandIn
            self._undo.append(lambda module=module, before=before: setattr(module, "__class__", before))  # type: ignore[misc]
        self._serve_pipelining()
        for module, name, now in taken:
            self._bind(module, name, now)
        # This one stands for the classes of both engines; torch's would take what is akin to it for its own.
        self._bind(state_dict, "FSDP", fullshard.FullyShardedDataParallel)

    def _serve_pipelining(self, *, load: bool = False) -> None:
        if not self._serves_pipelining and (undo := split_backward.serve(load=load)) is not None:
            self._serves_pipelining = True
            self._undo.append(undo)

    def _bind(self, module: ModuleType, name: str, now: Any) -> None:
        self.bindings.append(Binding(module, name, vars(module)[name], now))
        vars(module)[name] = now

    def end(self) -> None:
        """Answer nothing any more. Modules that asked meanwhile have torch's objects again, too."""
        for module, name, was, now in self.bindings:
            if vars(module).get(name) is now:
                vars(module)[name] = was
        self.bindings.clear()
        for borrower, asked in self._borrowed.items():
            if borrower in sys.modules and borrower.partition(".")[0] != "fullshard":
                self._give_back(vars(sys.modules[borrower]), asked, self._owned[borrower])
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            for undo in self._undo:
                stack.callback(undo)
            self._undo.clear()
        for module in self._modules:
            _answering.pop(module.__name__, None)

    def _give_back(self, names: dict[str, Any], asked: set[str], owned: set[str]) -> None:
        """Bind what a module has asked for, under whichever names it keeps it, to torch's again."""
        originals = {
            id(self.answers[module].given[name]): was
            for module, given in self._originals.items()
            for name, was in given.items()
            if name in asked
        }
        for name, value in list(names.items()):
            if id(value) in originals and name not in owned and not name.startswith("__"):
                names[name] = originals[id(value)]


def _back(holder: Any, name: str) -> Callable[[], None]:
    """What gives ``holder`` the attribute that it has now, or none."""
    if name in vars(holder):
        before = vars(holder)[name]
        return lambda: setattr(holder, name, before)

    def remove() -> None:
        if name in vars(holder):  # programs may have
            delattr(holder, name)

    return remove


def _torch_modules() -> Iterator[ModuleType]:
    """torch's FSDP, all of it, imported; and the module of checkpoint wrappers, one function of which builds on it."""
    for package in (*PACKAGES, CHECKPOINT_WRAPPER):
        module = importlib.import_module(package)
        yield module
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{package}."):
            yield importlib.import_module(found.name)


def _others(modules: Sequence[ModuleType]) -> Iterator[ModuleType]:
    """Loaded modules that are neither those nor fullshard's."""
    known = set(map(id, modules))
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and id(module) not in known and name.partition(".")[0] != "fullshard":
            yield module
