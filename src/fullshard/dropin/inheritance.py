"""Processes that a program starts stand in as well.

[Note: Inheritance]
Launchers start further Python processes: accelerate, Lightning, ``torch.multiprocessing.spawn``. If only some ranks
ran on fullshard, their collectives would not match those of the others. So :func:`pass_on` puts a folder in front of
``PYTHONPATH`` whose ``sitecustomize.py`` the interpreter runs at its start. It waits for ``torch.distributed.fsdp``, or
one of the two packages beside it, to be imported, for most processes never do that. It puts the ``sitecustomize`` that
it hides in its own place. An interpreter in which fullshard cannot be installed refuses to import torch's FSDP: it
must not run on torch's engine beside others that do not.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FOLDER", "pass_on", "take_back"]

FOLDER = str(Path(__file__).parent / "inherit")


def pass_on() -> None:
    """Have Python processes that this one starts install fullshard, too. Doing it again changes nothing."""
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *_others()])


def take_back() -> None:
    """Have Python processes that this one starts from now on be as they would be without :func:`pass_on`."""
    if others := _others():
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def _others() -> list[str]:
    """Parts of ``PYTHONPATH`` that no installation of fullshard has put there; empty ones mean the current folder."""
    value = os.environ.get("PYTHONPATH", "")
    return [part for part in value.split(os.pathsep) if not _inherits(part)] if value else []


def _inherits(part: str) -> bool:
    return Path(part).parts[-3:] == ("fullshard", "dropin", "inherit")
