"""One rank of `fullshard train`, started by the launcher or torchrun.

Run by the launcher as `python -m fullshard.train.worker CONFIG FOLDER [RESUME]`, and called by the command itself
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

from fullshard.errors import CheckpointError
from fullshard.train import best_weights, checkpoints, footprint, loop, run_folder
from fullshard.train.atomic_file import replace_text
from fullshard.train.baselines import order0_bits_per_byte, zlib_bits_per_byte
from fullshard.train.checkpoint_folder import CHECKPOINTS, CheckpointFolder, run_of
from fullshard.train.checkpoints import Checkpoints
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.corpus import Corpus, CorpusError, read
from fullshard.train.evaluation import HeldOut
from fullshard.train.finite import DivergedError
from fullshard.train.footprint import Footprint
from fullshard.train.group import Group
from fullshard.train.metrics import MetricsFile, Record, bits, read_metrics, up_to, write_metrics
from fullshard.train.model import GPT, generate
from fullshard.train.optimizer import build_optimizer
from fullshard.train.plot import plot_losses
from fullshard.train.position import BestValidation, Position, Setting
from fullshard.train.progress import RunProgress
from fullshard.train.quantization import QuantizationSummary, quantization_summary, set_comm_quantization
from fullshard.train.run_folder import Start
from fullshard.train.stop import (
    INTERRUPTED,
    NOT_FINITE,
    STOP_FILE_VARIABLE,
    TERMINATED,
    WRONG_INPUT,
    StopRequest,
    ending_with_launcher,
    remove_scratch_of_dead_launcher,
)
from fullshard.train.summary import Summary, show
from fullshard.train.weights import remove_unfinished, save_full

FAILURE = 1


def run(config: TrainConfig, begin: Callable[[], Start]) -> int:
    """Join the ranks, resume, train, evaluate, generate and write the results.

    Args:
        config: the settings; those of rank 0 count.
        begin: called on rank 0 only, once the text is read.

    Returns:
        The process's exit code: 0, or 130 or 143 when the run was asked to stop.

    Raises:
        CorpusError: on every rank alike, if any rank cannot read the text or reads different text.
        ConfigError: on every rank alike, if the run cannot resume from its checkpoint with these settings.
        DivergedError: on every rank alike, if a loss, gradient or weight is NaN or infinite.
    """
    with ending_with_launcher():
        once, start, position, notes = _set_up(config, begin)
    group, stop, model, config = once.group, once.stop, once.model, once.config
    outcome = (
        _train_on_rank0(once, start, position, notes) if group.leads else _train_on_other_rank(once, start, position)
    )
    quantization = quantization_summary(model, config.comm_quantization)
    folder = start.folder if group.leads else None
    if outcome.is_terminated:
        group.gather(None)  # until rank 0 has cleaned up
        stop.allow_peers_to_exit()
        return TERMINATED
    sample = b""
    if not outcome.stopped and config.evaluation.generate:
        sample = _generate(model, config)
    save_full(start.folder / run_folder.MODEL, model, leads=group.leads)
    footprints = [Footprint(**values) for values in group.gather(footprint.as_dict(outcome.local))]
    stop.allow_peers_to_exit()
    if folder:
        _report(folder, config, once.corpus, outcome, footprints, sample, quantization)
    group.leave()
    return outcome.stopped


def guarded(body: Callable[[], int]) -> int:
    """Run a rank's `body` and turn its exception into an exit code and a short report.

    The exception goes to torch elastic's error file, from which the launcher takes the rank and the message,
    and its traceback to standard error if this process was started by torchrun. Wrong input, and numbers that are not
    finite, are reported by rank 0 alone.
    """
    try:
        return body()
    except (ConfigError, CorpusError, DivergedError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"fullshard train: {error}", file=sys.stderr, flush=True)
        return NOT_FINITE if isinstance(error, DivergedError) else WRONG_INPUT
    except Exception as error:
        get_error_handler().record_exception(error)
        if STOP_FILE_VARIABLE not in os.environ:
            print(f"fullshard train: rank {os.environ.get('RANK', '0')} failed:", file=sys.stderr)
            traceback.print_exc()
        return FAILURE


def _set_up(config: TrainConfig, begin: Callable[[], Start]) -> tuple[loop.Run, Start, Position, list[str]]:
    """Join the ranks, read the text, build the model, resume and prepare the folder.

    Returns:
        The run, its start, its position, and notes for the user.
    """
    group = Group.join(config.device)
    stop = StopRequest()  # not before: a rank that waits for others has nothing to save
    config = group.gather(config)[0]
    stop.watch(group.processes_here())
    corpus = _read_on_all_ranks(config, group)
    start = _begin_on_all_ranks(begin, config, group)
    known = config.data_sha256
    config = dataclasses.replace(config, data_sha256=corpus.sha256, ranks=group.size, device=group.device.type)
    model = loop.build_model(config, group)
    set_comm_quantization(model, config.comm_quantization)
    optimizer = build_optimizer(model, config.training)
    start, position, notes = _resume(start, config, group, model, optimizer)
    if group.leads:
        position = _prepare_folder(start, config, position)
        notes += _notes_on_best(position.best, corpus, config)
        if not start.checkpoint and known and known != corpus.sha256:
            notes.append("the text changed since this config was written, so the results will differ")
    position = group.gather(position)[0]
    return loop.Run(model, optimizer, corpus, config, group, stop), start, position, notes


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


def _begin_on_all_ranks(begin: Callable[[], Start], config: TrainConfig, group: Group) -> Start:
    """Return rank 0's start on every rank; if it fails, or others do not see the folder, all raise the same error."""
    start, problem = None, None
    if group.leads:
        try:
            start = begin()
        except (ConfigError, OSError) as error:
            problem = str(error)
    start, problem = group.gather((start, problem))[0]
    if problem:
        raise ConfigError(problem)
    assert isinstance(start, Start)
    keeps = config.checkpoints.checkpoint_every != 0 or start.checkpoint is not None
    for rank, sees in enumerate(group.gather(start.folder.is_dir())):
        if keeps and not sees:
            raise ConfigError(
                f"rank {rank} does not see {start.folder}: checkpoints need a folder that all nodes share; set it "
                f"with --out, or disable checkpoints with --checkpoint-every 0"
            )
    return start


def _resume(
    start: Start, config: TrainConfig, group: Group, model: GPT, optimizer: torch.optim.Optimizer
) -> tuple[Start, Position, list[str]]:
    """Load the checkpoint to resume from, if any. All ranks get the same position and errors.

    Returns:
        The start, the position, and notes for the user.
    """
    options = [{name: given[name] for name in loop.OPTIONS} for given in optimizer.param_groups]
    damaged: list[str] = []
    loaded = None
    while start.checkpoint is not None and loaded is None:
        try:
            loaded = checkpoints.load(start.checkpoint, model, optimizer)
        except CheckpointError as error:
            start, note = _fall_back(start, group, str(error))
            damaged.append(note)
    if start.checkpoint is None or loaded is None:
        return start, Position(origin=start.origin), []
    position, before = loaded
    for given, own in zip(optimizer.param_groups, options, strict=True):
        given.update(own)  # present options take precedence over saved ones
    now = Setting.of(config)
    before.check(now, str(start.checkpoint))
    steps = config.training.steps
    if position.step > steps or (position.step == steps and not start.is_own):
        raise ConfigError(f"{start.checkpoint} is already at step {position.step}: to train further, raise --steps")
    if start.is_own and start.origin and position.origin != start.origin:
        raise ConfigError(
            f"{start.folder} has checkpoints of its own, which did not start from {start.origin}: leave --resume out "
            f"to resume from them, or choose another --name"
        )
    if not start.is_own:
        position = dataclasses.replace(position, origin=start.origin)
    return start, position, [*damaged, f"resumed from step {position.step} ({start.checkpoint})", *before.notes(now)]


def _fall_back(start: Start, group: Group, problem: str) -> tuple[Start, str]:
    """After a checkpoint could not be loaded, start from the previous one if it is corrupted. All ranks call it.

    Returns:
        The start to use instead, and a note for the user.

    Raises:
        ConfigError: on all ranks, if the checkpoint is intact (but does not match), another run's, or the only one.
    """
    bad = start.checkpoint
    assert bad is not None
    found: tuple[Path | None, str] = None, f"cannot resume: {problem}"
    if group.leads and checkpoints.find_corruption(bad):
        kept = CheckpointFolder(bad.parent)
        before = kept.before(bad)
        if before is None:
            found = None, f"{found[1]}. There is no checkpoint before it; --fresh starts from the beginning"
        elif not start.is_own:
            found = None, f"{found[1]}. The one before it is {before}: name that with --resume"
        else:
            try:
                found = before, f"{bad} is corrupted, and was renamed to {kept.set_aside(bad).name}: {problem}"
            except OSError as error:
                found = None, f"{found[1]}. It cannot be renamed: {error}"
    before, text = group.gather(found)[0]
    if before is None:
        raise ConfigError(text)
    return dataclasses.replace(start, checkpoint=before), text


def _notes_on_best(best: BestValidation | None, corpus: Corpus, config: TrainConfig) -> list[str]:
    """Return a note if validations now use other bytes than the best one so far."""
    part = loop.interim_validation_data(corpus, config)
    if best is None or best.is_comparable(BestValidation(0, 0.0, len(part.targets), corpus.sha256)):
        return []
    return [
        f"validations use other bytes than the best one so far (step {best.step}), which the next validation "
        f"therefore replaces"
    ]


def _prepare_folder(start: Start, config: TrainConfig, position: Position) -> Position:
    """Make the run's folder consistent with the checkpoint: later steps are repeated. On rank 0 only."""
    folder, source = start.folder, start.folder
    if start.checkpoint and not start.is_own:
        source = run_of(start.checkpoint) or folder
        best_weights.copy_from(source, folder, position.best)
    CheckpointFolder(folder / CHECKPOINTS).remove_incomplete()
    remove_unfinished(folder)
    metrics = source / run_folder.METRICS
    records = read_metrics(metrics) if metrics.exists() else []
    write_metrics(folder / run_folder.METRICS, up_to(records, position.step, validated=position.validated))
    replace_text(folder / run_folder.CONFIG, config.to_toml())
    return dataclasses.replace(position, best=best_weights.restore(folder, position.best))


def _train_on_other_rank(once: loop.Run, start: Start, position: Position) -> loop.Outcome:
    """Train on a rank that prints nothing and writes only its shards of checkpoints."""
    return once.train(position, _checkpoints(once, start, lambda text: None), loop.Observer(start.folder))


def _train_on_rank0(once: loop.Run, start: Start, position: Position, notes: list[str]) -> loop.Outcome:
    """Train on rank 0, which writes metrics and shows progress."""
    config, corpus, steps = once.config, once.corpus, once.config.training.steps
    folder = start.folder
    console = Console()
    with MetricsFile(folder / run_folder.METRICS) as metrics, RunProgress(console, steps, position.step) as progress:
        progress.say(
            f"{config.model.parameter_count:,} parameters sharded over {once.group.size} ranks "
            f"({once.group.device.type}), {steps} steps of "
            f"{config.training.batch * config.model.sequence * once.group.size:,} bytes; "
            f"text: {corpus.source}, "
            f"{len(corpus.train) / 1e6:.1f} MB in {len(corpus.train_files)} files, held out: "
            f"{len(corpus.validation) / 1e6:.2f} MB in {len(corpus.validation_files)} files"
        )
        for note in [*corpus.notes, *notes]:
            progress.say(note if note.startswith("resumed") else f"note: {note}")
        kept = _checkpoints(once, start, progress.say)

        def record(record: Record) -> None:
            metrics.write(record)
            if record["kind"] == "train":
                progress.train(record, is_saving=kept.is_saving)
            else:
                kind = record["kind"].replace("_", " ")
                on = f"on {record['bytes']:,} held-out bytes"
                progress.say(f"step {record['step']}: {kind} {record['bits_per_byte']:.3f} bits/byte {on}")

        outcome = once.train(position, kept, loop.Observer(folder, record, metrics.sync))
        if outcome.stopped:
            progress.say(_stop_message(outcome, config, folder))
        return outcome


def _checkpoints(once: loop.Run, start: Start, say: Callable[[str], None]) -> Checkpoints:
    config = once.config
    return Checkpoints(
        start.folder,
        every=config.checkpoints.interval(config.training.steps),
        keep=config.checkpoints.keep,
        setting=Setting.of(config),
        leads=once.group.leads,
        say=say,
    )


def _stop_message(outcome: loop.Outcome, config: TrainConfig, folder: Path) -> str:
    """Return the message of a stopped run: why, after which step, and how to resume."""
    cause = "asked to end" if outcome.is_terminated else "stopped"
    text = f"{cause} after step {outcome.position.step} of {config.training.steps}"
    if config.checkpoints.checkpoint_every == 0:
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
    folder: Path,
    config: TrainConfig,
    corpus: Corpus,
    outcome: loop.Outcome,
    footprints: list[Footprint],
    sample: bytes,
    quantization: QuantizationSummary | None,
) -> None:
    """Draw the plot, write the summary and print it."""
    held_out = HeldOut.take(corpus.validation, config.evaluation.eval_bytes, config.model.sequence).targets
    baselines = {
        "order-0 entropy coding": order0_bits_per_byte(corpus.train, held_out),
        "zlib level 9": zlib_bits_per_byte(held_out),
    }
    position = outcome.position
    plot_losses(folder / run_folder.PLOT, read_metrics(folder / run_folder.METRICS), baselines)
    loss = None if outcome.stopped else position.validation_loss
    here = Path.cwd()
    summary = Summary(
        folder=folder.relative_to(here) if folder.is_relative_to(here) else folder,
        parameters=config.model.parameter_count,
        bits_per_byte=None if loss is None else bits(loss),
        baselines=baselines,
        held_out_bytes=len(held_out),
        sequence=config.model.sequence,
        local=footprints,
        unsharded=outcome.unsharded,
        prompt=config.evaluation.prompt,
        sample=sample,
        seconds=position.elapsed,
        best=position.best,
        steps=position.step,
        comm_quantization=quantization,
    )
    replace_text(folder / run_folder.SUMMARY, json.dumps(summary.to_dict(), indent=2))
    show(summary, Console())


def _main(config: str, folder: str, resume: str = "") -> int:
    """Run as one rank of the launcher."""
    source = Path(resume) if resume else None
    code = guarded(lambda: run(TrainConfig.from_toml(Path(config)), lambda: run_folder.begin(Path(folder), source)))
    leads, stop_file = os.environ.get("RANK") == "0", Path(os.environ[STOP_FILE_VARIABLE])
    remove_scratch_of_dead_launcher()
    if code not in (INTERRUPTED, TERMINATED):
        return code
    # To torch elastic, any code but 0 is a failure. The launcher finds out from the file, unless it wrote that itself.
    if leads and stop_file.parent.is_dir() and not stop_file.exists():
        replace_text(stop_file, str(code))
    return 0


if __name__ == "__main__":
    code = _main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank whose peers are gone can block in the teardown of a backend; all files are closed by now.
    os._exit(code)
