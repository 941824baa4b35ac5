"""What a run prints at its end: an honest comparison."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from fullshard.train.summary import show


def state(*sizes: int) -> dict[str, int]:
    return dict(zip(("parameters", "gradients", "optimizer"), sizes, strict=True))


def printed(bits_per_byte: float | None = 2.0, ranks: int = 2) -> str:
    """The summary of a made-up run, as a wide console shows it."""
    summary = {
        "parameters": 1000,
        "steps": 5,
        "bits_per_byte": bits_per_byte,
        "baselines": {"order-0 entropy coding": 4.5, "zlib level 9": 1.5},
        "held_out_bytes": 4096,
        "bytes_per_rank": [state(2**20 * (rank + 1), 2**20, 2**21) for rank in range(ranks)],
        "bytes_unsharded": state(2**21, 2**21, 2**22),
        "seconds": 3.0,
    }
    file = io.StringIO()
    show(summary, 77, Path("runs/001"), Console(file=file, width=500))
    return file.getvalue()


def test_summary_says_what_is_compared() -> None:
    """It has the numbers of the model and the baselines, and says what each sees and which memory is counted."""
    text = printed(bits_per_byte=2.0)
    assert all(re.search(row, text) for row in (r"1,000 parameters\)\W+2.000", r"order-0 .*4.500", r"zlib .*1.500"))
    assert re.search(r"optimizer state\W+2.00\W+2.00\W+4.00", text) and re.search(r"total\W+4.00\W+5.00\W+8.00", text)
    assert "at most 77 bytes before it" in text
    assert "all held-out bytes as one stream" in text
    assert "without unsharded parameters, activations" in text


def test_stopped_run_has_no_comparison() -> None:
    """Without a last validation the summary says so and claims nothing about baselines."""
    text = printed(bits_per_byte=None)
    assert "stopped before the final validation" in text
    assert "order-0" not in text and "zlib" not in text
