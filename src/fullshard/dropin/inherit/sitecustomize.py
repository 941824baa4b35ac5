"""Run by the interpreter at its start, in processes that a program on fullshard has started.

It must not import torch, nor the package that it belongs to: most processes need neither. See [Note: Inheritance].
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

AWAITED = "torch.distributed.fsdp"


class Installer(importlib.abc.Loader):
    """Loads the awaited module as its own loader does, and installs fullshard then."""

    _loader: importlib.abc.Loader

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As of the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As of the module's own loader, which it has again afterwards."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        from fullshard.dropin import install

        install()


class Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited module, once, as others do."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own specification, loaded by an :class:`Installer`."""
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Installer(spec.loader)
        return spec


def run_hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    here = str(Path(__file__).parent)
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != here])
    if hidden is not None and hidden.origin is not None:
        runpy.run_path(hidden.origin, run_name="sitecustomize")


sys.meta_path.insert(0, Finder())
run_hidden()
