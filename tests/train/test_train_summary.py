"""What a run prints at its end, and the plot: honest comparison, safe text."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from matplotlib import pyplot
from rich.console import Console

from fullshard.train.summary import as_text, plot_losses, show


def state(*sizes: int) -> dict[str, int]:
    return dict(zip(("parameters", "gradients", "optimizer"), sizes, strict=True))


def printed(bits_per_byte: float | None = 2.0, ranks: int = 2, sample: bytes = b"text") -> str:
    """The summary of a made-up run, as a wide console shows it."""
    summary = {
        "parameters": 1000,
        "steps": 5,
        "bits_per_byte": bits_per_byte,
        "baselines": {"order-0 entropy coding": 4.5, "zlib level 9": 1.5},
        "held_out_bytes": 4096,
        "bytes_per_rank": [state(2**20 * (rank + 1), 2**20, 2**21) for rank in range(ranks)],
        "bytes_unsharded": state(2**21, 2**21, 2**22),
        "prompt": "def ",
        "sample": as_text(sample),
        "seconds": 3.0,
        "comm_quantization": {"bytes_received": 2**20, "bytes_in_full_precision": 2**22},
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
    assert "quantized communication: rank 0 received 1.0 MiB instead of 4.0" in text


def test_stopped_run_has_no_comparison() -> None:
    """Without a last validation the summary says so and claims nothing about baselines."""
    text = printed(bits_per_byte=None)
    assert "stopped before the final validation" in text
    assert "order-0" not in text and "zlib" not in text


def test_many_ranks_show_the_extremes() -> None:
    """With more than four ranks, only the smallest and the largest are columns."""
    text = printed(ranks=5)
    assert "smallest rank" in text and "largest rank" in text and "rank 3" not in text


@pytest.mark.parametrize(
    ("sample", "shown"),
    [
        (b"a\x1b[31mb", r"a\x1b[31mb"),
        (b"a\rb\x07\x00", r"a\rb\x07\x00"),
        (b"\xff\xfe", r"\xff\xfe"),
        (b"\xc2\x9b2J", r"\x9b2J"),
        ("\u202etxt".encode(), r"\u202etxt"),
        ("[bold]ä\tß漢\n".encode(), "[bold]ä"),
    ],
)
def test_generated_bytes_cannot_steer_the_terminal(sample: bytes, shown: str) -> None:
    """Control characters, broken UTF-8 and text direction marks are printed as escapes; markup is text."""
    text = printed(sample=sample)
    assert shown in text
    assert not set(text) & set("\x00\x07\x1b\r\x9b\u202e")


def test_plot_tells_validations_on_different_bytes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind has its number of bytes in the legend; a run of one step, without validations, has a plot, too."""
    labels: list[str] = []
    monkeypatch.setattr(pyplot, "close", lambda figure: labels.extend(figure.axes[0].get_legend_handles_labels()[1]))
    records = [{"kind": "train", "step": 1, "bits_per_byte": 8.0}]
    plot_losses(tmp_path / "loss.png", records, {"zlib level 9": 1.5})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert labels == ["training, each step", "training, smoothed", "zlib level 9: 1.50"]
    for kind, count in (("validation", 1024), ("final_validation", 8192)):
        records.append({"kind": kind, "step": 1, "bits_per_byte": 7.0, "bytes": count})
    plot_losses(tmp_path / "loss.png", records, {})
    assert labels[-2:] == ["validation, 1,024 held-out bytes", "final validation, 8,192 held-out bytes: 7.00"]
