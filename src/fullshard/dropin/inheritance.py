"""Processes that a program starts stand in as well.

[Note: Inheritance]
Launchers start further Python processes: accelerate, Lightning, ``torch.multiprocessing.spawn``. If only some ranks
ran on fullshard, their collectives would not match those of the others. So :func:`pass_on` puts a folder in front of
``PYTHONPATH`` whose ``sitecustomize.py`` the interpreter runs at its start. It waits for ``torch.distributed.fsdp`` to
be imported, for most processes never do that, and lets the ``sitecustomize`` that it hides run as well.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FOLDER", "pass_on"]

FOLDER = str(Path(__file__).parent / "inherit")


def pass_on() -> None:
    """Have Python processes that this one starts install fullshard, too."""
    old = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *old])
