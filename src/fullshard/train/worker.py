"""One rank of `fullshard train`, from start to end: agree, resume, train, evaluate, write the results."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fullshard import export_safetensors
from fullshard.train import run_folder
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import Corpus, baselines, read, whole_windows
from fullshard.train.group import Group
from fullshard.train.log import RunLog, bits, copy_metrics, read_metrics
from fullshard.train.loop import DivergedError, Run, build_model, load_position, sharded
from fullshard.train.model import METADATA_KEY, generate
from fullshard.train.optimizer import build_optimizer
from fullshard.train.stop import CODE_FILE_VARIABLE, FAILURE, NOT_FINITE, WRONG_INPUT, StopRequest, exit_code
from fullshard.train.summary import as_text, count_state, plot_losses, show


def work(device: str, folder: Path, resume: Path | None, config_file: Path | None, given: Mapping[str, Any]) -> int:
    """Run as one rank under torch's elastic agent, and return the code that the process is to exit with.

    An exception goes to elastic's error file, from which the launcher takes the rank and the message; under torchrun,
    its traceback goes to standard error. Wrong input, and numbers that are not finite, are reported by rank 0 alone.

    Args:
        device: what `Group.join` takes.
        folder: of the run.
        resume: as for `settle`, as are the others; those of rank 0 count.
        config_file: of another run.
        given: settings by name.
    """
    try:
        return exit_code(_run(Group.join(device), folder, resume, config_file, given))
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


def _run(group: Group, folder: Path, resume: Path | None, config_file: Path | None, given: Mapping[str, Any]) -> int:
    """Train on this rank, write the results, and return the exit code: 0, or 128 and the number of a stop signal."""
    is_rank0, config, checkpoint = group.rank == 0, TrainConfig(), None
    with group.raised_on_all_ranks():
        if is_rank0:
            folder.mkdir(parents=True, exist_ok=True)
            run_folder.lock(folder, print)
            config, checkpoint = run_folder.settle(folder, resume, config_file, given)
    config, checkpoint = group.gather((config, checkpoint))[0]
    corpus = _read_text(config, folder, group)
    position: dict[str, Any] = {"step": 0, "elapsed": 0.0, "data_sha256": config.data_sha256}
    config = dataclasses.replace(config, data_sha256=corpus.sha256, ranks=group.size, device=group.device.type)

    model = build_model(config, group)
    optimizer = build_optimizer(model, config)
    stop = StopRequest()  # not before: until here there is nothing to save
    if checkpoint:
        position = load_position(checkpoint, model, optimizer)
    step = position["step"]
    if step > config.steps:
        raise ConfigError(f"{checkpoint} is already at step {step}: increase --steps to train further")
    with group.raised_on_all_ranks():
        if is_rank0:
            _prepare_folder(folder, checkpoint, step, config)

    log = RunLog(folder, config.steps, step, is_rank0=is_rank0, tensorboard=config.tensorboard)
    log.console.on_closed = lambda: stop.ask(signal.SIGPIPE)
    started = time.perf_counter() - position["elapsed"]
    training = Run(config, corpus, group, stop, model, optimizer, folder, log, step, step, started)
    final, sample = None, b""
    with log:
        _announce(training, position, checkpoint)
        training.train()
        if training.stop_code:
            advice = f"--name {folder.name} resumes it"
            if config.checkpoint_every == 0:
                advice = "no checkpoint was saved (--checkpoint-every 0)"
            log.say(f"stopped after step {training.step} of {config.steps}; {advice}")
        else:
            final = bits(training.evaluate("final_validation", config.eval_bytes))
            model.eval()
            draws = torch.Generator().manual_seed(config.seed)
            sample = generate(model, config.prompt.encode("utf-8"), config.generate, config.sequence, draws)
    size = json.dumps(dataclasses.asdict(config.model))
    export_safetensors(model, folder, max_shard_bytes=sys.maxsize, metadata={METADATA_KEY: size}, sync=True)
    local, unsharded = training.state_bytes or count_state(model, optimizer)
    states = group.gather(local)
    if is_rank0:
        _report(training, folder, final, states, unsharded, sample)
    dist.destroy_process_group()
    return training.stop_code


def _read_text(config: TrainConfig, folder: Path, group: Group) -> Corpus:
    """Read the text on every rank; if one fails, reads different text or cannot save, all raise the same error."""
    with group.raised_on_all_ranks():
        corpus = read(config.data, seed=config.seed, sequence=config.sequence)
        if config.checkpoint_every != 0 and not folder.is_dir():
            raise ConfigError(
                f"cannot see {folder}: checkpoints need a folder that all nodes share; set it with --out, or disable "
                f"checkpoints with --checkpoint-every 0"
            )
    digests = group.gather(corpus.sha256)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(f"rank {rank} read different text than rank 0: every node needs the same files")
    return corpus


def _prepare_folder(folder: Path, checkpoint: Path | None, step: int, config: TrainConfig) -> None:
    """Make the run's folder consistent with the checkpoint: later steps are repeated. On rank 0 only."""
    (folder / run_folder.ERROR).unlink(missing_ok=True)  # of an earlier part of this run
    run_folder.remove_incomplete(folder / run_folder.CHECKPOINTS)
    source = checkpoint.parent.parent if checkpoint else folder
    run_folder.replace_text(folder / run_folder.CONFIG, config.to_toml())  # first: of the records, see `settle`
    copy_metrics(source / run_folder.METRICS, folder / run_folder.METRICS, step, config.steps)


def _announce(training: Run, position: dict[str, Any], checkpoint: Path | None) -> None:
    """Say what is trained on what, and what a user should know about it."""
    config, corpus, say = training.config, training.corpus, training.log.say
    say(
        f"{config.parameter_count:,} parameters sharded over {config.ranks} ranks ({config.device}), "
        f"{config.steps} steps of {config.sequences * config.sequence:,} bytes; text: {corpus.source}, "
        f"{len(corpus.train) / 1e6:.1f} MB in {len(corpus.train_files)} files, held out: "
        f"{len(corpus.validation) / 1e6:.2f} MB in {len(corpus.validation_files)} files"
    )
    if checkpoint is not None:
        say(f"resumed from step {training.step} ({checkpoint})")
    for note in corpus.notes:
        say(f"note: {note}")
    if position.get("data_sha256", "") not in ("", corpus.sha256):
        say(
            "note: the text has changed since these settings or the checkpoint were written, so results differ; "
            "validation losses are too low if the model was trained on held-out bytes before"
        )
    if position.get("sequences", config.sequences) != config.sequences:
        say(f"note: an optimizer step now has {config.sequences} sequences; it had {position['sequences']} so far")


def _report(
    training: Run,
    folder: Path,
    final: float | None,
    states: list[dict[str, int]],
    unsharded: dict[str, int],
    sample: bytes,
) -> None:
    """Draw the plot, write the summary and print it."""
    config = training.config
    held_out = whole_windows(training.corpus.validation, config.eval_bytes, config.sequence)[1:]
    compressors = baselines(training.corpus.train, held_out)
    records = read_metrics(folder / run_folder.METRICS)
    plot_losses(folder / run_folder.PLOT, records, compressors)
    quantization = None
    if config.comm_quantization != "none":
        traffic = sharded(training.model).comm_quantization_report()
        quantization = {"bytes_received": traffic.nbytes, "bytes_in_full_precision": traffic.full_bytes}
    summary = {
        "parameters": config.parameter_count,
        "steps": training.step,
        "bits_per_byte": final,  # None if the run was stopped before the final validation
        "baselines": compressors,  # bits per byte of each yardstick on the same bytes
        "held_out_bytes": len(held_out),
        "bytes_per_rank": states,  # of training state, in rank order
        "bytes_unsharded": unsharded,
        "prompt": config.prompt,
        "sample": as_text(sample),
        "seconds": records[-1]["elapsed_s"] if records else 0.0,  # in the loop, over all parts of a resumed run
        "comm_quantization": quantization,  # bytes that rank 0 received; None if nothing is quantized
    }
    run_folder.replace_text(folder / run_folder.SUMMARY, json.dumps(summary, indent=2))
    here = Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    show(summary, config.sequence, shown, training.log.console)
