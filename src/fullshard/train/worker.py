"""What each rank of `fullshard train` does, whoever started it.

Run by the launcher as `python -m fullshard.train.worker CONFIG FOLDER`, and called by the command itself
under torchrun.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fullshard.train import footprint, loop, run_folder
from fullshard.train.baselines import order0_bits_per_byte, zlib_bits_per_byte
from fullshard.train.config import TrainConfig
from fullshard.train.corpus import Corpus, CorpusError, read
from fullshard.train.evaluation import HeldOut
from fullshard.train.footprint import Footprint
from fullshard.train.group import Group
from fullshard.train.metrics import MetricsFile, Record, bits, read_metrics
from fullshard.train.model import GPT, generate
from fullshard.train.plot import plot_losses
from fullshard.train.progress import RunProgress
from fullshard.train.stop import INTERRUPTED, STOP_FILE_VARIABLE, StopRequest
from fullshard.train.summary import Summary, show
from fullshard.train.weights import save_full

MISTAKE = 2  # exit code for wrong input
FAILURE = 1


def run(config: TrainConfig, folder: Callable[[], Path]) -> int:
    """Join the ranks, train, evaluate, generate and write the results.

    Args:
        config: the settings, equal on every rank.
        folder: called on rank 0 only; gives the run's folder.

    Returns:
        The process's exit code: 0, or 130 when the run was asked to stop.

    Raises:
        CorpusError: on every rank alike, if any rank cannot read the text or reads different text.
    """
    stop = StopRequest()
    if STOP_FILE_VARIABLE in os.environ:
        stop.end_with_launcher()
    group = Group.join(config.device)
    corpus = _read_together(config, group)
    path, problem = None, None
    if group.leads:
        try:
            path = folder()
            (path / run_folder.CONFIG).write_text(_as_run(config, corpus, group).to_toml(), encoding="utf-8")
        except OSError as error:
            problem = str(error)
    problem = group.gather(problem)[0]
    if problem:
        raise CorpusError(problem)
    model = loop.build(config, group)
    outcome = _train(model, corpus, config, group, stop, path)
    sample = b""
    if not outcome.interrupted and config.evaluation.generate:
        sample = _generate(model, config)
    save_full(path / run_folder.MODEL if path else None, model.config, dict(model.named_parameters()))
    footprints = [Footprint(**values) for values in group.gather(footprint.as_dict(outcome.local))]
    if path:
        _report(path, config, corpus, outcome, footprints, sample)
    group.leave()
    return INTERRUPTED if outcome.interrupted else 0


def guarded(body: Callable[[], int]) -> int:
    """Run a rank's `body` and turn what it raises into an exit code and a short report.

    The exception goes to torch elastic's error file, from which the launcher takes the rank and the message,
    and its traceback to standard error if this process was started by torchrun. Wrong input is reported by
    rank 0 alone.
    """
    try:
        return body()
    except CorpusError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"fullshard train: {error}", file=sys.stderr, flush=True)
        return MISTAKE
    except Exception as error:
        get_error_handler().record_exception(error)
        if STOP_FILE_VARIABLE not in os.environ:
            print(f"fullshard train: rank {os.environ.get('RANK', '0')} failed:", file=sys.stderr)
            traceback.print_exc()
        return FAILURE


def _read_together(config: TrainConfig, group: Group) -> Corpus:
    """Read the text on every rank; if one fails, or reads something else, all raise the same error."""
    corpus, problem = None, None
    try:
        corpus = read(config.data, seed=config.seed, sequence=config.model.sequence)
    except CorpusError as error:
        problem = str(error)
    found = group.gather((problem, corpus.sha256 if corpus else ""))
    for rank, (problem, digest) in enumerate(found):
        if problem:
            raise CorpusError(f"rank {rank}: {problem}" if group.size > 1 else problem)
        if digest != found[0][1]:
            raise CorpusError(f"rank {rank} reads other text than rank 0: every node needs the same files")
    assert corpus is not None
    return corpus


def _as_run(config: TrainConfig, corpus: Corpus, group: Group) -> TrainConfig:
    """The config with what was left open settled, so that it repeats this very run."""
    return dataclasses.replace(config, data_sha256=corpus.sha256, ranks=group.size, device=group.device.type)


def _train(
    model: GPT, corpus: Corpus, config: TrainConfig, group: Group, stop: StopRequest, folder: Path | None
) -> loop.Outcome:
    """Train, while rank 0, the one with a `folder`, writes metrics and shows progress."""
    if folder is None:
        return loop.Run(model, corpus, config, group, stop, observe=lambda record: None).train()
    console = Console()
    steps = config.training.steps
    with MetricsFile(folder / run_folder.METRICS) as metrics, RunProgress(console, steps) as progress:
        progress.say(
            f"{model.config.parameter_count:,} parameters sharded over {group.size} ranks "
            f"({group.device.type}), {steps} steps of "
            f"{config.training.batch * config.model.sequence * group.size:,} bytes; "
            f"text: {corpus.source}, "
            f"{len(corpus.train) / 1e6:.1f} MB in {len(corpus.train_files)} files, held out: "
            f"{len(corpus.validation) / 1e6:.2f} MB in {len(corpus.validation_files)} files"
        )
        for note in corpus.notes:
            progress.say(f"note: {note}")
        if config.data_sha256 and config.data_sha256 != corpus.sha256:
            progress.say("note: the text changed since this config was written, so the results will differ")

        def observe(record: Record) -> None:
            metrics.write(record)
            if record["kind"] == "train":
                progress.train(record)
            else:
                progress.say(f"step {record['step']}: validation {record['bits_per_byte']:.3f} bits/byte")

        outcome = loop.Run(model, corpus, config, group, stop, observe).train()
        if outcome.interrupted:
            progress.say(f"stopped after step {outcome.step} of {steps}; keeping what there is")
        return outcome


def _generate(model: GPT, config: TrainConfig) -> bytes:
    """Continue the prompt; every rank runs the same forwards and draws the same bytes."""
    generator = torch.Generator().manual_seed(config.seed)
    model.eval()
    prompt = config.evaluation.prompt.encode("utf-8")
    return bytes(generate(model, prompt, config.evaluation.generate, config.model.sequence, generator))


def _report(
    folder: Path,
    config: TrainConfig,
    corpus: Corpus,
    outcome: loop.Outcome,
    footprints: list[Footprint],
    sample: bytes,
) -> None:
    """Draw the plot, print the summary and append it to the metrics."""
    held_out = HeldOut.take(corpus.validation, config.evaluation.eval_bytes, config.model.sequence).targets
    baselines = {
        "order-0 entropy coding": order0_bits_per_byte(corpus.train, held_out),
        "zlib level 9": zlib_bits_per_byte(held_out),
    }
    plot_losses(folder / run_folder.PLOT, read_metrics(folder / run_folder.METRICS), baselines)
    loss = outcome.validation_loss
    summary = Summary(
        folder=folder,
        parameters=config.model.parameter_count,
        bits_per_byte=None if loss is None else bits(loss),
        baselines=baselines,
        held_out_bytes=len(held_out),
        sequence=config.model.sequence,
        local=footprints,
        whole=outcome.whole,
        prompt=config.evaluation.prompt,
        sample=sample,
        seconds=outcome.seconds,
    )
    with (folder / run_folder.SUMMARY).open("w", encoding="utf-8") as file:
        json.dump(summary.to_dict(), file, indent=2)
    show(summary, Console())


if __name__ == "__main__":
    code = guarded(lambda: run(TrainConfig.from_toml(Path(sys.argv[1])), lambda: Path(sys.argv[2])))
    sys.stdout.flush()
    sys.stderr.flush()
    # The launcher knows of its own interruption; to torch elastic, any code but 0 is a failure.
    code = 0 if code == INTERRUPTED else code
    # A rank whose peers are gone can block in the teardown of a backend; all files are closed by now.
    os._exit(code)
