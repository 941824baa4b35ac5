"""One rank of `fullshard train`: set-up, training, results."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fullshard.train import checkpoint_folder, checkpoints, loop, run_folder
from fullshard.train.checkpoint_folder import CHECKPOINTS
from fullshard.train.checkpoints import Checkpoints, Position
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import Corpus, CorpusError, read
from fullshard.train.evaluation import HeldOut, baselines
from fullshard.train.finite import DivergedError
from fullshard.train.group import Group
from fullshard.train.metrics import bits, read_metrics, up_to, write_metrics
from fullshard.train.model import GPT, generate
from fullshard.train.optimizer import build_optimizer
from fullshard.train.plot import plot_losses
from fullshard.train.run_folder import RunLocation
from fullshard.train.run_log import RunLog
from fullshard.train.stop import (
    CODE_FILE_VARIABLE,
    NOT_FINITE,
    WRONG_INPUT,
    StopRequest,
    ending_with_peers,
    exit_code,
)
from fullshard.train.summary import Footprint, Summary, as_text, quantization_totals, show
from fullshard.train.weights import BestValidation, remove_unfinished, save_full

FAILURE = 1


def _restarts() -> str:
    """Return how often the agent has started all workers anew."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def work(config: TrainConfig, location: RunLocation) -> int:
    """Run as one rank under torch's elastic agent, and return what the process is to exit with.

    An exception goes to elastic's error file, from which the launcher takes the rank and the message; under torchrun,
    its traceback goes to standard error. Wrong input, and numbers that are not finite, are reported by rank 0 alone.
    """
    try:
        return exit_code(run(config, location))
    except (ConfigError, CorpusError, DivergedError) as error:  # on all ranks alike
        if os.environ["RANK"] == "0":
            print(f"fullshard train: {error}", file=sys.stderr, flush=True)
        return exit_code(NOT_FINITE if isinstance(error, DivergedError) else WRONG_INPUT)
    except Exception as error:
        get_error_handler().record_exception(error)
        if CODE_FILE_VARIABLE not in os.environ:
            print(f"fullshard train: rank {os.environ['RANK']} failed:", file=sys.stderr)
            traceback.print_exc()
        return FAILURE


def run(config: TrainConfig, location: RunLocation) -> int:
    """Join the ranks, resume, train, evaluate, generate and write the results.

    Args:
        config: the settings; those of rank 0 count.
        location: the run's folder; that of rank 0 counts.

    Returns:
        The exit code of the run: 0, or 128 and the number of the signal with which it was asked to stop.

    Raises:
        CorpusError: on every rank alike, if any rank cannot read the text or reads different text.
        ConfigError: on every rank alike, if the run cannot resume from its checkpoint with these settings.
        DivergedError: on every rank alike, if a loss, gradient or weight is NaN or infinite.
    """
    group = Group.join(config.device)
    with ending_with_peers(group.processes_here()):
        once, notes = _set_up(config, location, group)
        with once.log:
            _announce(once, notes)
            once.train()
            final, sample = None, b""
            if once.stopped:
                once.log.say(_stop_message(once))
            else:
                final = once.evaluate("final_validation", _all_held_out(once))
                sample = _generate(once.model, once.config)
        save_full(once.folder / run_folder.MODEL, once.model, leads=group.leads)
        local, unsharded = once.footprints or once.measure()
        footprints = group.gather(local)
        code = max(group.gather(once.stop.code)) if once.stopped else 0
    if group.leads:
        _report(once, final, footprints, unsharded, sample)
    group.leave()
    return code


def _set_up(config: TrainConfig, location: RunLocation, group: Group) -> tuple[loop.Run, list[str]]:
    """Read the text, build the model, resume and prepare the folder. Returns the run, and notes for the user."""
    config = group.from_rank0(lambda: config)
    corpus = _read_on_all_ranks(config, group)
    location, checkpoint = group.from_rank0(lambda: _begin(location))
    folder = location.folder
    _check_folder_on_all_ranks(folder, config, group)
    known = config.data_sha256
    config = dataclasses.replace(config, data_sha256=corpus.sha256, ranks=group.size, device=group.device.type)
    model = loop.build_model(config, group)
    optimizer = build_optimizer(model, config.training)
    stop = StopRequest()  # not before: until here there is nothing to save
    checkpoint, position, notes = checkpoints.resume(checkpoint, folder, model, optimizer, config, group)
    position, best = group.from_rank0(lambda: _prepare_folder(folder, checkpoint, position, config))
    if _restarts() != "0":
        notes.insert(0, f"restart {_restarts()} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS')}")
    if not checkpoint and known not in ("", corpus.sha256):
        notes.append("the text changed since this config was written, so the results will differ")
    tensorboard = config.evaluation.tensorboard
    log = RunLog(folder, config.training.steps, position.step, leads=group.leads, tensorboard=tensorboard)
    log.console.on_closed = lambda: stop.ask(signal.SIGPIPE)
    saved = Checkpoints(folder, config, group.leads, log.say, saved_step=position.step)
    return loop.Run(config, corpus, group, stop, folder, model, optimizer, saved, log, position, best), notes


def _read_on_all_ranks(config: TrainConfig, group: Group) -> Corpus:
    """Read the text on every rank; if one fails, or reads different text, all raise the same error."""
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
            raise CorpusError(f"rank {rank} reads different text than rank 0: every node needs the same files")
    assert corpus is not None
    return corpus


def _begin(location: RunLocation) -> tuple[RunLocation, Path | None]:
    """Create and lock the run's folder, and choose the checkpoint to resume from. On rank 0 only."""
    if _restarts() != "0":
        location = dataclasses.replace(location, fresh=False)  # done by the first start
    location = location.claim(print)
    run_folder.lock(location.folder)
    return location, location.checkpoint()


def _check_folder_on_all_ranks(folder: Path, config: TrainConfig, group: Group) -> None:
    """Raise on all ranks if there will be checkpoints, and any rank does not see the folder."""
    for rank, sees in enumerate(group.gather(folder.is_dir())):
        if config.checkpoints.checkpoint_every != 0 and not sees:
            raise ConfigError(
                f"rank {rank} does not see {folder}: checkpoints need a folder that all nodes share; set it "
                f"with --out, or disable checkpoints with --checkpoint-every 0"
            )


def _prepare_folder(
    folder: Path, checkpoint: Path | None, position: Position, config: TrainConfig
) -> tuple[Position, BestValidation | None]:
    """Make the run's folder consistent with the checkpoint: later steps are repeated. On rank 0 only.

    Returns:
        The position, with the time of a last validation that is kept, and the best validation so far. That may be of
        a later step than the checkpoint, which is then reached again.
    """
    source = checkpoint_folder.run_of(checkpoint) if checkpoint else None
    source = source or folder
    (folder / run_folder.ERROR).unlink(missing_ok=True)  # of an earlier part of this run
    checkpoint_folder.remove_incomplete(folder / CHECKPOINTS)
    remove_unfinished(folder)
    records = up_to(read_metrics(source / run_folder.METRICS), position.step, config.training.steps)
    write_metrics(folder / run_folder.METRICS, records)
    elapsed = max([position.elapsed, *(record["elapsed_s"] for record in records)])
    run_folder.replace_text(folder / run_folder.CONFIG, config.to_toml())
    best = BestValidation.read(source / run_folder.BEST)
    if best is not None and source != folder:
        if best.step <= position.step:
            shutil.copyfile(source / run_folder.BEST, folder / run_folder.BEST)
        else:
            best = None
    return dataclasses.replace(position, elapsed=elapsed), best


def _announce(once: loop.Run, notes: list[str]) -> None:
    config, corpus = once.config, once.corpus
    once.log.say(
        f"{config.model.parameter_count:,} parameters sharded over {config.ranks} ranks ({config.device}), "
        f"{config.training.steps} steps of {config.sequences * config.model.sequence:,} bytes; text: {corpus.source}, "
        f"{len(corpus.train) / 1e6:.1f} MB in {len(corpus.train_files)} files, held out: "
        f"{len(corpus.validation) / 1e6:.2f} MB in {len(corpus.validation_files)} files"
    )
    for note in [*corpus.notes, *notes]:
        once.log.say(note if note.startswith("resumed") else f"note: {note}")


def _all_held_out(once: loop.Run) -> HeldOut:
    """Return the held-out bytes of the last validation and the baselines."""
    return HeldOut.take(once.corpus.validation, once.config.evaluation.eval_bytes, once.config.model.sequence)


def _stop_message(once: loop.Run) -> str:
    """Return the message of a stopped run: after which step, and how to resume."""
    folder, text = once.folder, f"stopped after step {once.position.step} of {once.config.training.steps}"
    if once.config.checkpoints.checkpoint_every == 0:
        return f"{text}; there is no checkpoint to resume from (--checkpoint-every 0)"
    out = "" if folder.parent == Path("runs").resolve() else f" --out {folder.parent}"
    return f"{text}; resume with: fullshard train{out} --name {folder.name}"


def _generate(model: GPT, config: TrainConfig) -> bytes:
    """Continue the prompt; every rank runs the same forwards and draws the same bytes."""
    generator = torch.Generator().manual_seed(config.seed)
    model.eval()
    prompt = config.evaluation.prompt.encode("utf-8")
    return bytes(generate(model, prompt, config.evaluation.generate, config.model.sequence, generator))


def _report(
    once: loop.Run, final: float | None, footprints: list[Footprint], unsharded: Footprint, sample: bytes
) -> None:
    """Draw the plot, write the summary and print it."""
    config, corpus, folder = once.config, once.corpus, once.folder
    held_out = _all_held_out(once).targets
    compressors = baselines(corpus.train, held_out)
    plot_losses(folder / run_folder.PLOT, read_metrics(folder / run_folder.METRICS), compressors)
    quantization, best = None, once.best
    if config.comm_quantization != "none":
        report = loop.sharded(once.model).comm_quantization_report()
        quantization = quantization_totals(config.comm_quantization, report)
    summary = Summary(
        parameters=config.model.parameter_count,
        steps=once.position.step,
        bits_per_byte=None if final is None else bits(final),
        best={"step": best.step, "bits_per_byte": bits(best.validation_loss)} if best else None,
        baselines=compressors,
        held_out_bytes=len(held_out),
        bytes_per_rank=footprints,
        bytes_unsharded=unsharded,
        prompt=config.evaluation.prompt,
        sample=as_text(sample),
        seconds=round(once.position.elapsed, 3),
        comm_quantization=quantization,
    )
    run_folder.replace_text(folder / run_folder.SUMMARY, json.dumps(dataclasses.asdict(summary), indent=2))
    here = Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    show(summary, config.model.sequence, shown, once.log.console)
