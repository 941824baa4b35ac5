"""Installs the drop-in in child processes as well, through ``PYTHONPATH``.

[Note: Inheritance]
Launchers start further Python processes: accelerate, Lightning, ``torch.multiprocessing.spawn``. If only some ranks
ran on fullshard, their collectives would not match those of the others. So ``patch_pythonpath`` prepends a folder
to ``PYTHONPATH`` whose ``sitecustomize.py`` the interpreter runs at its start. It installs fullshard once
``torch.distributed.fsdp``, or one of the two packages beside it, is imported, which most processes never do, and it
runs the ``sitecustomize`` that it shadows. If fullshard cannot be installed, importing torch's FSDP fails: a rank
must not run on torch's engine beside others that do not. ``python -m fullshard.dropin`` starts its program in the same
way.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FOLDER", "patch_pythonpath", "restore_pythonpath"]

FOLDER = str(Path(__file__).parent / "inherit")


def patch_pythonpath() -> None:
    """Have Python processes that this one starts install fullshard, too; no-op if called again."""
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *_others()])


def restore_pythonpath() -> None:
    """Undo ``patch_pythonpath`` for Python processes that this one starts from now on."""
    if others := _others():
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def _others() -> list[str]:
    """Return the parts of ``PYTHONPATH`` that are not fullshard's; empty parts mean the current folder."""
    value = os.environ.get("PYTHONPATH", "")
    return [part for part in value.split(os.pathsep) if not _inherits(part)] if value else []


def _inherits(part: str) -> bool:
    return Path(part).parts[-3:] == ("fullshard", "dropin", "inherit")
