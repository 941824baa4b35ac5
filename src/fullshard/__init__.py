"""fullshard: parameters, gradients and optimizer state sharded over ranks, all-gathered just in time and freed.

The public names are those of ``__init__.pyi``. Each is imported when it is first used, so that ``fullshard --help``
does not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
