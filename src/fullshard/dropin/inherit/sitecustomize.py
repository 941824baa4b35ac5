"""Run by the interpreter at its start, in processes that a program on fullshard has started.

It must not import torch, nor the package that it belongs to: most processes need neither. Nor anything else that the
interpreter has not loaded at its start anyway: ``importlib.util`` and ``pathlib`` alone would take longer than all the
rest of a start. Hence no base classes here, and quoted annotations. See [Note: Inheritance].
"""

import _frozen_importlib
import _thread
import os
import sys

TYPE_CHECKING = False  # typing's own is not loaded at start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The packages that torch's engine lies in. Any one of them may be imported first, and imports others.
AWAITED = (
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.fsdp",
)
HERE = os.path.dirname(os.path.abspath(__file__))
MISSING = (
    "this Python was started by a program that runs with fullshard.dropin, but cannot import fullshard; install "
    f"fullshard for it, or remove {HERE} from PYTHONPATH"
)


class Installer:
    """Loader that wraps a module's own loader, and installs fullshard after the module was loaded."""

    _loader: "Any" = None  # as long as an instance has none, for copies
    _finder: "Finder"

    def __init__(self, loader: "Any", finder: "Finder") -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module with its own loader, and restore that loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.load(module, self._loader)


class Finder:
    """Finds modules of torch's engine, and fullshard's, as others do, until fullshard is installed.

    It is installed when the outermost of them has been executed: they import each other, and what is half imported can
    be neither replaced nor used to replace others. fullshard's are among them because they import torch's.
    """

    _asking: "set[tuple[str, int]]"  # modules that other finders are asked for now, by which thread
    _loading: "list[str]"
    _loaded: "set[str]"  # those of AWAITED that have been executed
    _failure: str  # why fullshard could not be installed; torch's engine is refused from then on

    def __init__(self) -> None:
        self._asking, self._loading, self._loaded = set(), [], set()
        self._failure = ""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the spec that the other finders find, with an ``Installer`` as its loader."""
        key = (name, _thread.get_ident())
        if key in self._asking or not (name in AWAITED or name.partition(".")[0] == "fullshard"):
            return None
        self._asking.add(key)  # another finder may ask all the others as well, this one among them
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._asking.discard(key)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = Installer(spec.loader, self)  # type: ignore[assignment]  # importing a base class is not free
        return spec

    def _ask_others(self, name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "ModuleSpec | None":
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None

    def load(self, module: "ModuleType", loader: "Any") -> None:
        """Execute ``module``, and install fullshard if it is the outermost and torch's engine is there by then."""
        name, outermost = module.__name__, not self._loading
        if self._failure and name in AWAITED:
            raise ImportError(self._failure)
        self._loading.append(name)
        try:
            try:
                loader.exec_module(module)
                if name in AWAITED:
                    self._loaded.add(name)
            finally:  # what it has imported stays, even if it fails itself
                if outermost and self._loaded:
                    self._install()
        finally:
            self._loading.remove(name)

    def _install(self) -> None:
        try:
            from fullshard.dropin import install

            install()
        except BaseException as error:
            self._failure = f"fullshard.dropin could not be installed in this process: {error!r}"
            self._forget()
            if isinstance(error, ModuleNotFoundError) and error.name in ("fullshard", "fullshard.dropin"):
                self._failure = MISSING
                raise ImportError(MISSING) from error
            raise
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _forget(self) -> None:
        """Remove torch's FSDP from the loaded modules, because it would run without fullshard."""
        self._loaded.clear()
        for name in list(sys.modules):
            if any(name == awaited or name.startswith(f"{awaited}.") for awaited in AWAITED):
                del sys.modules[name]
        for name in AWAITED:
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)


def run_hidden(seen: "set[str]") -> None:
    """Run the ``sitecustomize`` that those in the folders ``seen`` shadow, if there is one, as this module."""
    path = [entry for entry in sys.path if os.path.abspath(entry) not in seen]
    for finder in sys.meta_path:
        spec = finder.find_spec("sitecustomize", path, None)
        if spec is not None and spec.loader is not None:
            module = _frozen_importlib.module_from_spec(spec)
            sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
            return


def begin() -> None:
    """Install the finder, once per process, from however many folders such a file is run."""
    seen: set[str] = sys.__dict__.setdefault("_fullshard_inherits", set())
    if not seen:
        sys.meta_path.insert(0, Finder())
    seen.add(HERE)
    run_hidden(seen)


if __name__ == "sitecustomize":
    begin()
