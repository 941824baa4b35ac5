"""One rank of `fullshard train`, from start to end: agree, resume, train, evaluate, write the results."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fullshard import export_safetensors
from fullshard.train import loop, run_folder
from fullshard.train.checkpoints import Checkpoints, resume
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import Corpus, read
from fullshard.train.evaluation import baselines
from fullshard.train.finite import DivergedError
from fullshard.train.group import Group
from fullshard.train.log import RunLog, bits, copy_metrics, read_metrics
from fullshard.train.model import METADATA_KEY, generate
from fullshard.train.optimizer import build_optimizer
from fullshard.train.plot import plot_losses
from fullshard.train.run_folder import RunLocation
from fullshard.train.stop import CODE_FILE_VARIABLE, FAILURE, NOT_FINITE, WRONG_INPUT, StopRequest, exit_code
from fullshard.train.summary import Footprint, Summary, as_text, show


def work(config: TrainConfig, before: TrainConfig | None, location: RunLocation) -> int:
    """Run as one rank under torch's elastic agent, and return what the process is to exit with.

    An exception goes to elastic's error file, from which the launcher takes the rank and the message; under torchrun,
    its traceback goes to standard error. Wrong input, and numbers that are not finite, are reported by rank 0 alone.
    """
    try:
        return exit_code(run(config, before, location))
    except (ConfigError, DivergedError) as error:  # on all ranks alike
        if os.environ["RANK"] == "0":
            print(f"fullshard train: {error}", file=sys.stderr, flush=True)
        return exit_code(NOT_FINITE if isinstance(error, DivergedError) else WRONG_INPUT)
    except Exception as error:
        get_error_handler().record_exception(error)
        if CODE_FILE_VARIABLE not in os.environ:
            print(f"fullshard train: rank {os.environ['RANK']} failed:", file=sys.stderr)
            traceback.print_exc()
        return FAILURE


def run(config: TrainConfig, before: TrainConfig | None, location: RunLocation) -> int:
    """Train on this rank, and write the results.

    Args:
        config: the settings; those of rank 0 count.
        before: `location.settings()` when `config` took its defaults from there; that of rank 0 counts.
        location: the run's folder; that of rank 0 counts.

    Returns:
        The exit code of the run: 0, or 128 and the number of the signal with which it was asked to stop.

    Raises:
        ConfigError: on every rank alike, if any rank cannot read the text or reads different text, or the run cannot
            resume from its checkpoint: it is damaged, or does not fit these settings.
        DivergedError: on every rank alike, if a loss, gradient or weight is NaN or infinite.
    """
    group = Group.join(config.device)
    config = group.gather(config)[0]
    corpus = _read_on_all_ranks(config, group)
    checkpoint, folder = _claim(location, before, config, group)
    position: dict[str, Any] = {"step": 0, "elapsed": 0.0, "data_sha256": config.data_sha256}
    config = dataclasses.replace(config, data_sha256=corpus.sha256, ranks=group.size, device=group.device.type)

    model = loop.build_model(config, group)
    optimizer = build_optimizer(model, config.training)
    stop = StopRequest()  # not before: until here there is nothing to save
    if checkpoint:
        position = resume(checkpoint, model, optimizer)
    step = position["step"]
    if step > config.training.steps:
        raise ConfigError(f"{checkpoint} is already at step {step}: increase --steps to train further")
    warning = ""
    with group.raised_on_all_ranks():
        if group.is_rank0:
            warning = _prepare_folder(folder, checkpoint, step, config)

    log = RunLog(
        folder, config.training.steps, step, is_rank0=group.is_rank0, tensorboard=config.evaluation.tensorboard
    )
    log.console.on_closed = lambda: stop.ask(signal.SIGPIPE)
    every = config.checkpoints.interval(config.training.steps)
    saved = Checkpoints(folder / run_folder.CHECKPOINTS, every, config.checkpoints.keep, group.is_rank0, log.say, step)
    started = time.perf_counter() - position["elapsed"]
    training = loop.Run(config, corpus, group, stop, model, optimizer, saved, log, step, started)
    final, sample = None, b""
    with log:
        _announce(training, position, checkpoint, warning)
        training.train()
        if training.stop_code:
            advice = f"--name {folder.name} resumes it" if every else "no checkpoint was saved (--checkpoint-every 0)"
            log.say(f"stopped after step {training.step} of {config.training.steps}; {advice}")
        else:
            final = training.evaluate("final_validation", training.held_out(config.evaluation.eval_bytes))
            sample = _generate(training)
    size = json.dumps(dataclasses.asdict(config.model))
    export_safetensors(model, folder, max_shard_bytes=sys.maxsize, metadata={METADATA_KEY: size}, sync=True)
    local, unsharded = training.footprints or training.measure()
    footprints = group.gather(local)
    if group.is_rank0:
        _report(training, folder, final, footprints, unsharded, sample)
    dist.destroy_process_group()
    return training.stop_code


def _read_on_all_ranks(config: TrainConfig, group: Group) -> Corpus:
    """Read the text on every rank; if one fails, or reads different text, all raise the same error."""
    with group.raised_on_all_ranks():
        corpus = read(config.data, seed=config.seed, sequence=config.model.sequence)
    digests = group.gather(corpus.sha256)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(f"rank {rank} read different text than rank 0: every node needs the same files")
    return corpus


def _claim(
    location: RunLocation, before: TrainConfig | None, config: TrainConfig, group: Group
) -> tuple[Path | None, Path]:
    """Create and lock the run's folder.

    Returns:
        The checkpoint to resume from, which is None if there is none, and the folder.

    Raises:
        ConfigError: settings to resume with are no longer those that `config` took its defaults from.
    """
    checkpoint = None
    with group.raised_on_all_ranks():
        if group.is_rank0:
            location = location.claim()
            run_folder.lock(location.folder, print)
            checkpoint = location.checkpoint()
            if location.settings() != before:
                raise ConfigError(
                    f"{checkpoint or location.folder} or its settings have changed since the launch: start again"
                )
            location.check(config)
    checkpoint, folder = group.gather((checkpoint, location.folder))[0]
    with group.raised_on_all_ranks():
        if config.checkpoints.checkpoint_every != 0 and not folder.is_dir():
            raise ConfigError(
                f"cannot see {folder}: checkpoints need a folder that all nodes share; set it with --out, or disable "
                f"checkpoints with --checkpoint-every 0"
            )
    return checkpoint, folder


def _prepare_folder(folder: Path, checkpoint: Path | None, step: int, config: TrainConfig) -> str:
    """Make the run's folder consistent with the checkpoint: later steps are repeated. On rank 0 only.

    Returns:
        A warning about earlier steps; empty if there is none.
    """
    (folder / run_folder.ERROR).unlink(missing_ok=True)  # of an earlier part of this run
    run_folder.remove_incomplete(folder / run_folder.CHECKPOINTS)
    source = run_folder.run_of(checkpoint) if checkpoint else folder
    run_folder.replace_text(folder / run_folder.CONFIG, config.to_toml())  # first: of the records, see `check`
    return copy_metrics(source / run_folder.METRICS, folder / run_folder.METRICS, step, config.training.steps)


def _announce(training: loop.Run, position: dict[str, Any], checkpoint: Path | None, warning: str) -> None:
    """Say what is trained on what, and what a user should know about it."""
    config, corpus, say = training.config, training.corpus, training.log.say
    say(
        f"{config.model.parameter_count:,} parameters sharded over {config.ranks} ranks ({config.device}), "
        f"{config.training.steps} steps of {config.sequences * config.model.sequence:,} bytes; text: {corpus.source}, "
        f"{len(corpus.train) / 1e6:.1f} MB in {len(corpus.train_files)} files, held out: "
        f"{len(corpus.validation) / 1e6:.2f} MB in {len(corpus.validation_files)} files"
    )
    if checkpoint is not None:
        say(f"resumed from step {training.step} ({checkpoint})")
    for note in [*([warning] if warning else []), *corpus.notes]:
        say(f"note: {note}")
    if position.get("data_sha256", "") not in ("", corpus.sha256):
        say(
            "note: the text has changed since these settings or the checkpoint were written, so results differ; "
            "validation losses are too low if the model was trained on held-out bytes before"
        )
    if position.get("sequences", config.sequences) != config.sequences:
        say(f"note: an optimizer step now has {config.sequences} sequences; it had {position['sequences']} so far")


def _generate(training: loop.Run) -> bytes:
    """Continue the prompt; every rank runs the same forwards and draws the same bytes."""
    config = training.config
    generator = torch.Generator().manual_seed(config.seed)
    training.model.eval()
    prompt = config.evaluation.prompt.encode("utf-8")
    return bytes(generate(training.model, prompt, config.evaluation.generate, config.model.sequence, generator))


def _report(
    training: loop.Run,
    folder: Path,
    final: float | None,
    footprints: list[Footprint],
    unsharded: Footprint,
    sample: bytes,
) -> None:
    """Draw the plot, write the summary and print it."""
    config = training.config
    held_out = training.held_out(config.evaluation.eval_bytes).targets
    compressors = baselines(training.corpus.train, held_out)
    records = read_metrics(folder / run_folder.METRICS)
    plot_losses(folder / run_folder.PLOT, records, compressors)
    quantization = None
    if config.comm_quantization != "none":
        traffic = loop.sharded(training.model).comm_quantization_report()
        quantization = {"bytes_received": traffic.nbytes, "bytes_in_full_precision": traffic.full_bytes}
    summary = Summary(
        parameters=config.model.parameter_count,
        steps=training.step,
        bits_per_byte=None if final is None else bits(final),
        baselines=compressors,
        held_out_bytes=len(held_out),
        bytes_per_rank=footprints,
        bytes_unsharded=unsharded,
        prompt=config.evaluation.prompt,
        sample=as_text(sample),
        seconds=records[-1]["elapsed_s"] if records else 0.0,
        comm_quantization=quantization,
    )
    run_folder.replace_text(folder / run_folder.SUMMARY, json.dumps(dataclasses.asdict(summary), indent=2))
    here = Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    show(summary, config.model.sequence, shown, training.log.console)
