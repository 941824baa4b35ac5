"""Installing fullshard in the place of torch's FSDP, and taking it out again."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections import Counter
from types import TracebackType

import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import torch_state_dict
from fullshard.dropin import inheritance
from fullshard.dropin.errors import MixedEnginesWarning
from fullshard.dropin.names import FSDP, is_torchs
from fullshard.dropin.not_offered import NotOffered
from fullshard.dropin.stand_ins import StandIns

__all__ = ["Installation", "install", "installed", "uninstall"]

_current: StandIns | None = None
_lock = threading.RLock()  # importing what is replaced may come to install() again
_lock = threading.RLock()


class Installation:
    """What :func:`install` returns. In a ``with`` statement, what that call installed is taken out at its end."""

    _own: bool  # whether this call installed it

    def __init__(self, own: bool) -> None:
        self._own = own

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own:
            uninstall()

    def __str__(self) -> str:
        """One line that says what was replaced."""
        if _current is None:
            return "fullshard does not stand in for torch.distributed.fsdp"
        given = [item for answers in _current.answers.values() for item in answers.given.items()]
        names = {name for name, value in given if not isinstance(value, NotOffered)}
        bound = Counter(binding.module.__name__.partition(".")[0] for binding in _current.bindings)
        anew = "; bound anew: " + ", ".join(f"{count} in {owner}" for owner, count in sorted(bound.items()))
        return (
            f"fullshard {fullshard.__version__} stands in for torch.distributed.fsdp: {len(names)} names"
            f"{anew if bound else ''}"
        )


def installed() -> bool:
    """Whether fullshard stands in for torch's FSDP now."""
    return _current is not None


def install(*, quiet: bool = False) -> Installation:
    """Have every name of torch's FSDP, in torch and in all programs that use it, be fullshard's.

    That is ``torch.distributed.fsdp`` with its submodules, ``torch.distributed._composable.fsdp``, ``replicate``, and
    ``apply_activation_checkpointing``; and what loaded modules have taken from these, torch's own (distributed
    checkpoint, pipelining) among them. Names that fullshard does not have raise :class:`NotOfferedError` when they are
    touched. Call it before or after other imports, and before anything is sharded. Doing it again changes nothing.

    Args:
        quiet: Do not print the line that says what was replaced (to stderr, on the rank that torchrun calls 0).

    Returns:
        For ``with install(): ...``, which takes out at its end what this call has put in.

    Warns:
        MixedEnginesWarning: If there are modules that torch's FSDP has sharded. They stay torch's.

    Raises:
        UnsupportedClientError: If a program that has taken names already is of another version than those supported.
            Nothing is changed then.
    """
    global _current
    with _lock:
        if _current is not None:
            return Installation(own=False)
        _warn_of_torchs_models()
        torch_state_dict.install()
        stand_ins = StandIns()
        stand_ins.begin()
        _current = stand_ins
    installation = Installation(own=True)
    if not quiet and os.environ.get("RANK", "0") == "0":
        print(installation, file=sys.stderr)
    return installation


def _warn_of_torchs_models() -> None:
    if _sharded_by_torch():
        gc.collect()  # torch's are held by cycles; what nobody uses any more is no reason to warn
    theirs = _sharded_by_torch()
    if theirs:
        warnings.warn(
            f"torch's FSDP has sharded {len(theirs)} modules already ({', '.join(sorted(set(theirs))[:3])}); they stay "
            "as they are: fullshard neither shards nor saves them, and isinstance no longer finds them through names "
            "of torch.distributed.fsdp. Call fullshard.dropin.install() before the model is built",
            MixedEnginesWarning,
            stacklevel=3,
        )


def uninstall() -> None:
    """Give torch's names back to everybody. Modules that fullshard has sharded stay so, and go on working.

    Processes that are started afterwards are torch's, too.
    """
    global _current
    with _lock:
        if _current is not None:
            stand_ins, _current = _current, None
            inheritance.take_back()
            stand_ins.end()


def _sharded_by_torch() -> list[str]:
    """Names of the classes of living modules that torch's FSDP has sharded."""
    if FSDP not in sys.modules or not dist.is_available() or not dist.is_initialized():
        return []  # nothing can be, and to look is not free
    by_torch: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in by_torch:
            by_torch[kind] = issubclass(kind, nn.Module) and any(is_torchs(base) for base in kind.__mro__)
        if by_torch[kind]:
            found.append(kind.__name__)
    return found
