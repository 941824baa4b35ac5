"""Examples, run on ranks of the pool."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from fullshard import dropin
from ranks import Rank


def run_example(rank: Rank, example: Path) -> str:
    """What an example prints on this rank, as if torchrun had started it under the drop-in."""
    printed = io.StringIO()
    with dropin.install(quiet=True), contextlib.redirect_stdout(printed):
        with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
            runpy.run_path(str(example), run_name="__main__")
    return printed.getvalue()
