"""Install fullshard in place of torch's FSDP, and uninstall it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
import warnings

import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.dropin import inheritance
from fullshard.dropin.errors import MixedEnginesWarning
from fullshard.dropin.names import FSDP, is_torch_fsdp
from fullshard.dropin.stand_ins import StandIns
from fullshard.frontend.arguments import LAYOUT_VARIABLE

__all__ = ["install", "installed", "uninstall"]

_current: StandIns | None = None
_lock = threading.RLock()  # importing torch's modules may call install() again


def installed() -> bool:
    """Return True while fullshard replaces torch's FSDP.

    Returns:
        True between ``install`` and ``uninstall``.
    """
    return _current is not None


def install(*, quiet: bool = False) -> contextlib.ExitStack:
    """Replace every name of torch's FSDP, in torch and in all libraries that use it, by fullshard's.

    This covers ``torch.distributed.fsdp`` with its submodules, ``torch.distributed._composable.fsdp``, ``replicate``
    and ``apply_activation_checkpointing``, and the names that loaded modules have imported from these, including
    torch's own modules (distributed checkpoint, pipelining). Names that fullshard does not have raise
    ``NotOfferedError`` when they are imported or read. Call it before or after other imports, but before anything is
    sharded. No-op if it is installed already.

    Args:
        quiet: Do not print that names were replaced (to stderr, on torchrun's rank 0).

    Returns:
        A context manager: at the end of ``with install(): ...``, this call is undone. It may be discarded.

    Warns:
        MixedEnginesWarning: If there are modules that torch's FSDP has sharded. They are not changed.

    Example:
        ```python
        import torch
        from torch import nn
        import fullshard.dropin

        with fullshard.dropin.install(quiet=True):
            from torch.distributed.fsdp import fully_shard

            model = fully_shard(nn.Linear(16, 16))
            assert isinstance(model, fullshard.FSDPModule)
        ```
    """
    global _current
    undo = contextlib.ExitStack()
    with _lock:
        if _current is not None:
            return undo
        _warn_of_torch_modules()
        if os.environ.get(LAYOUT_VARIABLE) == "ragged":
            importlib.import_module("fullshard.ragged")  # programs that do not know fullshard cannot
        stand_ins = StandIns()
        stand_ins.begin()
        _current = stand_ins
    undo.callback(uninstall)
    if not quiet and os.environ.get("RANK", "0") == "0":
        print(f"fullshard {fullshard.__version__} replaces torch.distributed.fsdp", file=sys.stderr)
    return undo


def _warn_of_torch_modules() -> None:
    if _sharded_by_torch():
        gc.collect()  # unused modules of torch's FSDP are kept alive by cycles
    if sharded := _sharded_by_torch():
        warnings.warn(
            f"torch's FSDP has already sharded {len(sharded)} modules ({', '.join(sorted(set(sharded))[:3])}); "
            "fullshard neither shards nor saves them, and isinstance with names of torch.distributed.fsdp is False for "
            "them. Call fullshard.dropin.install() before the model is built",
            MixedEnginesWarning,
            stacklevel=3,
        )


def uninstall() -> None:
    """Restore all names of torch's FSDP, also for processes that are started afterwards. No-op if it is not installed.

    Modules that fullshard has sharded remain sharded and continue to work.
    """
    global _current
    with _lock:
        if _current is not None:
            stand_ins, _current = _current, None
            inheritance.restore_pythonpath()
            stand_ins.end()


def _sharded_by_torch() -> list[str]:
    """Return the class names of existing modules that torch's FSDP has sharded."""
    if FSDP not in sys.modules or not dist.is_available() or not dist.is_initialized():
        return []  # there can be none, and the search is slow
    by_torch: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in by_torch:
            by_torch[kind] = issubclass(kind, nn.Module) and any(is_torch_fsdp(base) for base in kind.__mro__)
        if by_torch[kind]:
            found.append(kind.__name__)
    return found
