"""fullshard: parameters, gradients and optimizer state sharded over ranks, all-gathered just in time and freed.

The public names are those of ``__init__.pyi``. They, and parts of the package such as ``fullshard.optim``, are imported
when they are first used, so that ``fullshard --help`` does not wait for torch.
"""

import importlib
import pkgutil

import lazy_loader

_import_public, __dir__, _all = lazy_loader.attach_stub(__name__, __file__)
_parts = {module.name for module in pkgutil.iter_modules(__path__)}
__all__ = [name for name in _all if not name.startswith("_") and name not in _parts]


def __getattr__(name: str) -> object:
    try:
        return _import_public(name)
    except AttributeError:
        if name not in _parts:
            raise
        return importlib.import_module(f"{__name__}.{name}")
