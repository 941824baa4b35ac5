"""One rank of `fullshard train`, from start to end: agree, resume, train, evaluate, write the results."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from fullshard import export_safetensors
from fullshard.errors import NonFiniteError
from fullshard.train import run_folder
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import Corpus, baselines, read, whole_windows
from fullshard.train.group import Group
from fullshard.train.log import RunLog, bits, cut_metrics, read_metrics
from fullshard.train.loop import Run, build_model, load_position
from fullshard.train.model import GPT, METADATA_KEY
from fullshard.train.optimizer import build_optimizer
from fullshard.train.stop import FAILURE, NOT_FINITE, WRONG_INPUT, StopRequest, exit_code
from fullshard.train.summary import count_state, show


def work(device: str, folder: Path, config_file: Path | None, given: Mapping[str, Any]) -> int:
    """Run as one rank under torch's elastic agent, and return the code that the process is to exit with.

    The traceback of an exception goes to standard error. Wrong input, and numbers that are not finite, are reported by
    rank 0 alone. Arguments are those of `Group.join` and `settle`; of the latter, those of rank 0 count.
    """
    try:
        return exit_code(_run(Group.join(device), folder, config_file, given))
    except (ConfigError, NonFiniteError) as error:  # on all ranks alike
        if os.environ["RANK"] == "0":
            print(f"fullshard train: {error}", file=sys.stderr, flush=True)
        return exit_code(NOT_FINITE if isinstance(error, NonFiniteError) else WRONG_INPUT)
    except Exception:
        print(f"fullshard train: rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", file=sys.stderr)
        return FAILURE


def _run(group: Group, folder: Path, config_file: Path | None, given: Mapping[str, Any]) -> int:
    """Train on this rank, write the results, and return the exit code: 0, or 128 and the number of a stop signal."""
    is_rank0, config, checkpoint = group.rank == 0, TrainConfig(), None
    with group.raised_on_all_ranks():
        if is_rank0:
            folder.mkdir(parents=True, exist_ok=True)
            run_folder.lock(folder, print)
            config, checkpoint = run_folder.settle(folder, config_file, given)
    config, checkpoint = group.gather((config, checkpoint))[0]
    corpus = _read_text(config, folder, group)
    position: dict[str, Any] = {"step": 0, "elapsed": 0.0, "data_sha256": config.data_sha256}
    config = dataclasses.replace(config, data_sha256=corpus.sha256, ranks=group.size)

    model = build_model(config, group)
    optimizer = build_optimizer(cast("GPT", model), config)
    stop = StopRequest()  # not before: until here there is nothing to save
    if checkpoint:
        position = load_position(checkpoint, model, optimizer)
    step = position["step"]
    with group.raised_on_all_ranks():
        if is_rank0:  # later steps than that of the checkpoint are repeated
            run_folder.remove_incomplete(folder / run_folder.CHECKPOINTS)
            run_folder.replace_text(folder / run_folder.CONFIG, config.to_toml())  # first: of the records, see `settle`
            cut_metrics(folder / run_folder.METRICS, step, config.steps)

    log = RunLog(folder, config.steps, is_rank0=is_rank0)
    started = time.perf_counter() - position["elapsed"]
    training = Run(config, corpus, group, stop, model, optimizer, folder, log, step, step, started)
    _announce(training, checkpoint, changed=position["data_sha256"] not in ("", corpus.sha256))
    training.train()
    final = None
    if not training.stop_code:
        final = bits(training.evaluate("final_validation", config.eval_bytes))
    else:
        resume = f"--name {folder.name} resumes it" if config.checkpoint_every else "--checkpoint-every 0 saves none"
        log.say(f"stopped after step {training.step} of {config.steps}; {resume}")
    size = json.dumps(dataclasses.asdict(config.model))
    export_safetensors(model, folder, max_shard_bytes=sys.maxsize, metadata={METADATA_KEY: size}, sync=True)
    local, unsharded = training.state_bytes or count_state(model, optimizer)
    states = group.gather(local)
    if is_rank0:
        _report(training, final, states, unsharded)
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


def _announce(training: Run, checkpoint: Path | None, *, changed: bool) -> None:
    """Say what is trained on which text, from which checkpoint, and whether the text has changed."""
    config, corpus, say = training.config, training.corpus, training.log.say
    say(
        f"{config.parameter_count:,} parameters sharded over {config.ranks} ranks ({training.group.device.type}), "
        f"{config.steps} steps of {config.sequences * config.sequence:,} bytes; text: {corpus.source}, "
        f"{len(corpus.train) / 1e6:.1f} MB in {len(corpus.train_files)} files, held out: "
        f"{len(corpus.validation) / 1e6:.2f} MB in {len(corpus.validation_files)} files"
    )
    if checkpoint is not None:
        say(f"resumed from step {training.step} ({checkpoint})")
    if corpus.note:
        say(f"note: {corpus.note}")
    if changed:
        say(
            "note: the text has changed since these settings or the checkpoint were written, so results differ; "
            "validation losses are too low if the model was trained on held-out bytes before"
        )


def _report(training: Run, final: float | None, states: list[dict[str, int]], unsharded: dict[str, int]) -> None:
    """Write the summary and print it."""
    config, folder = training.config, training.folder
    held_out = whole_windows(training.corpus.validation, config.eval_bytes, config.sequence)[1:]
    records = read_metrics(folder / run_folder.METRICS)
    quantization = None
    if config.comm_quantization != "none":
        traffic = training.model.comm_quantization_report()
        quantization = {"bytes_received": traffic.nbytes, "bytes_in_full_precision": traffic.full_bytes}
    summary = {
        "parameters": config.parameter_count,
        "steps": training.step,
        "bits_per_byte": final,  # None if the run was stopped before the final validation
        "baselines": baselines(training.corpus.train, held_out),  # bits per byte of each yardstick on the same bytes
        "held_out_bytes": len(held_out),
        "bytes_per_rank": states,  # of training state, in rank order
        "bytes_unsharded": unsharded,
        "seconds": records[-1]["elapsed_s"] if records else 0.0,  # in the loop, over all parts of a resumed run
        "comm_quantization": quantization,  # bytes that rank 0 received; None if nothing is quantized
    }
    run_folder.replace_text(folder / run_folder.SUMMARY, json.dumps(summary, indent=2))
    show(summary, config.sequence, folder, training.log.console)
