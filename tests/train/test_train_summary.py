"""What a run prints at its end, and the plot: honest comparison, safe text."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fullshard.engine.quantized_report import QuantizationReport, QuantizationTraffic, QuantizedParameter
from fullshard.train.plot import plot_losses
from fullshard.train.summary import Footprint, Summary, as_text, escape, quantization_totals, show, verdicts


def printed(
    bits_per_byte: float | None = 2.0, ranks: int = 2, sample: bytes = b"text", report: QuantizationReport | None = None
) -> str:
    """The summary of a made-up run, as a wide console shows it."""
    summary = Summary(
        parameters=1000,
        steps=5,
        bits_per_byte=bits_per_byte,
        best=None,
        baselines={"order-0 entropy coding": 4.5, "zlib level 9": 1.5},
        held_out_bytes=4096,
        bytes_per_rank=[Footprint(2**20 * (rank + 1), 2**20, 2**21) for rank in range(ranks)],
        bytes_unsharded=Footprint(2**21, 2**21, 2**22),
        prompt="def ",
        sample=as_text(sample),
        seconds=3.0,
        comm_quantization=quantization_totals("fp8", report) if report else None,
    )
    json.dumps(dataclasses.asdict(summary))
    file = io.StringIO()
    show(summary, 77, Path("runs/001"), Console(file=file, width=500))
    return file.getvalue()


def test_worse_than_a_baseline_is_said() -> None:
    """The summary says in words which baseline beats the model, and by how much."""
    text = printed(bits_per_byte=2.0)
    assert "the model is 2.500 bits per byte better than order-0 entropy coding" in text
    assert "the model is 0.500 bits per byte worse than zlib level 9" in text


def test_equal_to_a_baseline_is_said() -> None:
    """A model as good as a baseline is neither better nor worse."""
    assert verdicts(1.5, {"zlib level 9": 1.5}) == ["the model equals zlib level 9"]


def test_summary_says_what_is_compared() -> None:
    """The notes say what each predictor sees and which memory is counted."""
    text = printed()
    assert "at most 77 before it" in text
    assert "all held-out bytes as one stream" in text
    assert "without gathered parameters, activations" in text


def test_stopped_run_has_no_comparison() -> None:
    """Without a last validation the summary says so and claims nothing about baselines."""
    text = printed(bits_per_byte=None)
    assert "stopped before the last validation" in text
    assert "better than" not in text and "worse than" not in text


def test_quantized_communication_is_summed_up() -> None:
    """Bytes in MiB, their ratio and the parameters; one rank sends nothing."""
    parameters = (
        QuantizedParameter("", "a", "fp8", "int8", "(no)"),
        QuantizedParameter("", "b", "(no)", "(no)", "(no)"),
    )
    traffic = QuantizationTraffic("shard", "all_gather", 3, 2**20, 4 * 2**20, 4 * 2**20)
    assert (
        "comm quantization fp8: rank 0 received 1.0 MiB of weights and gradients instead of 4.0 (0.250); 1 of 2 "
        "parameters are quantized"
    ) in printed(report=QuantizationReport((traffic,), parameters))
    assert "fp8: nothing was sent, with one rank" in printed(report=QuantizationReport((), parameters))


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
        ("[bold]ä\n".encode(), "[bold]ä"),
    ],
)
def test_generated_bytes_cannot_steer_the_terminal(sample: bytes, shown: str) -> None:
    """Control characters, broken UTF-8 and text direction marks are printed as escapes; markup is text."""
    text = printed(sample=sample)
    assert shown in text
    assert not set(text) & set("\x00\x07\x1b\r\x9b\u202e")


def test_escape_keeps_lines() -> None:
    """Newlines, tabs and letters of any script stay as they are."""
    assert escape("a\n\tß漢") == "a\n\tß漢"


@pytest.mark.parametrize("validations", [0, 1, 3])
def test_plot_of_a_short_run(validations: int, tmp_path: Path) -> None:
    """A plot is drawn with any number of validations, also with one step."""
    records = [{"kind": "train", "step": 1, "bits_per_byte": 8.0}]
    records += [{"kind": "validation", "step": 1, "bits_per_byte": 7.0, "bytes": 1024}] * validations
    plot_losses(tmp_path / "loss.png", records, {"zlib level 9": 1.5})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_steps_is_left_out(tmp_path: Path) -> None:
    """Nothing is drawn for a run that was stopped before its first step."""
    plot_losses(tmp_path / "loss.png", [], {})
    assert not list(tmp_path.iterdir())
