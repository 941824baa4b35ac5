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


class Installer:
    """Loader that wraps a module's own loader, and installs fullshard after the module was loaded."""

    _loader: "Any" = None  # as long as an instance has none, for copies

    def __init__(self, loader: "Any", finder: "Finder") -> None:
        self._loader, self._finder = loader, finder

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

    def __init__(self) -> None:
        self._asking: set[tuple[str, int]] = set()  # modules that other finders are asked for now, by which thread
        self._depth = 0  # of the modules that are being loaded
        self._loaded = False  # torch's engine

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the spec that the other finders find, with an ``Installer`` as its loader."""
        key = (name, _thread.get_ident())
        if key in self._asking or not (name in AWAITED or name.partition(".")[0] == "fullshard"):
            return None
        self._asking.add(key)  # another finder may ask all the others as well, this one among them
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((found for found in specs if found is not None), None)
        finally:
            self._asking.discard(key)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = Installer(spec.loader, self)  # type: ignore[assignment]  # importing a base class is not free
        return spec

    def load(self, module: "ModuleType", loader: "Any") -> None:
        """Execute ``module``, and install fullshard if it is the outermost and torch's engine is there by then."""
        self._depth += 1
        try:
            loader.exec_module(module)
            self._loaded |= module.__name__ in AWAITED
        finally:
            if self._loaded and self._depth == 1:  # what it has imported stays, even if it fails itself
                self._install()
            self._depth -= 1

    def _install(self) -> None:
        """Install fullshard, or end the process: it must not run on torch's engine beside others that do not."""
        try:
            from fullshard.dropin import install

            install()
        except BaseException as error:
            why = (
                "this Python was started by a program that runs with fullshard.dropin, but cannot use it: "
                f"{error!r}; install fullshard for it, or remove {HERE} from PYTHONPATH\n"
            )
            os.write(2, why.encode())
            os._exit(1)
        if self in sys.meta_path:
            sys.meta_path.remove(self)


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
