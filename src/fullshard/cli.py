"""The command line: `fullshard train`, `inspect`, `export`. Reads options and calls the implementations.

torch and matplotlib are imported inside the command, so that `fullshard --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer

from fullshard.train.config import ConfigError, TrainConfig, option_names
from fullshard.train.position import Setting
from fullshard.train.run_folder import RunLocation
from fullshard.version import __version__

app = typer.Typer(
    name="fullshard",
    help="Fully sharded training for PyTorch: parameters, gradients and optimizer state sharded over ranks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DEFAULT = TrainConfig()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fullshard {__version__}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Fully sharded training for PyTorch: parameters, gradients and optimizer state sharded over ranks."""


DATA, MODEL, TRAINING, RANKS, OUTPUT = "Text", "Model", "Training", "Ranks", "Validation and output"
CHECKPOINTS = "Checkpoints"


@app.command()
def train(
    context: typer.Context,
    data: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(
            metavar="FILE_OR_FOLDER",
            help="Text to train on; folders are searched. Default: Python's own source code.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Transformer blocks.", rich_help_panel=MODEL)] = DEFAULT.model.layers,
    width: Annotated[
        int, typer.Option(help="Size of the residual stream.", rich_help_panel=MODEL)
    ] = DEFAULT.model.width,
    heads: Annotated[int, typer.Option(help="Attention heads per block.", rich_help_panel=MODEL)] = DEFAULT.model.heads,
    sequence: Annotated[
        int, typer.Option(help="Context length in bytes.", rich_help_panel=MODEL)
    ] = DEFAULT.model.sequence,
    ngrams: Annotated[
        int, typer.Option(help="Length of the longest n-grams that have learned vectors.", rich_help_panel=MODEL)
    ] = DEFAULT.model.ngrams,
    ngram_rows: Annotated[
        int, typer.Option(help="Rows of their table for each length.", rich_help_panel=MODEL)
    ] = DEFAULT.model.ngram_rows,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", rich_help_panel=TRAINING)] = DEFAULT.training.steps,
    batch: Annotated[
        int, typer.Option(help="Sequences per step on each rank.", rich_help_panel=TRAINING)
    ] = DEFAULT.training.batch,
    lr: Annotated[
        float,
        typer.Option(help="Peak learning rate of AdamW.", rich_help_panel=TRAINING),
    ] = DEFAULT.training.lr,
    optimizer: Annotated[
        str,
        typer.Option(
            help="muon: Muon for the matrices of blocks, AdamW for all others.",
            rich_help_panel=TRAINING,
            metavar="muon|adamw",
        ),
    ] = DEFAULT.training.optimizer,
    muon_lr: Annotated[
        float, typer.Option(help="Peak learning rate of Muon.", rich_help_panel=TRAINING)
    ] = DEFAULT.training.muon_lr,
    warmup: Annotated[
        int, typer.Option(help="Steps of linear warm-up.", rich_help_panel=TRAINING)
    ] = DEFAULT.training.warmup,
    weight_decay: Annotated[
        float, typer.Option(help="Decay of matrices.", rich_help_panel=TRAINING)
    ] = DEFAULT.training.weight_decay,
    clip: Annotated[
        float, typer.Option(help="Largest gradient norm.", rich_help_panel=TRAINING)
    ] = DEFAULT.training.clip,
    seed: Annotated[
        int, typer.Option(help="Decides split, first weights, batches and sample.", rich_help_panel=TRAINING)
    ] = DEFAULT.seed,
    ranks: Annotated[
        int,
        typer.Option(
            help="Worker processes.  [dim]\\[default: one per accelerator, or 2 without][/]",
            show_default=False,
            rich_help_panel=RANKS,
        ),
    ] = DEFAULT.ranks,
    device: Annotated[
        str,
        typer.Option(
            help="auto: accelerators if there is one for each rank, else the CPU. TYPE: as torch calls them.",
            rich_help_panel=RANKS,
            metavar="auto|cpu|TYPE",
        ),
    ] = DEFAULT.device,
    comm_quantization: Annotated[
        str,
        typer.Option(
            help="Send large weights and gradients in fewer bytes, for slow networks: int8 blocks, or fp8 weights.",
            rich_help_panel=RANKS,
            metavar="none|int8|fp8",
        ),
    ] = DEFAULT.comm_quantization,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How often to start all workers anew when the system killed one, or one failed after new steps.",
            min=0,
            rich_help_panel=RANKS,
        ),
    ] = 3,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="Steps between checkpoints; 0: never.  [dim]\\[default: 1/20 of all steps, at least 10][/]",
            show_default=False,
            rich_help_panel=CHECKPOINTS,
        ),
    ] = DEFAULT.checkpoints.checkpoint_every,
    keep: Annotated[
        int, typer.Option(help="Checkpoints to keep.", rich_help_panel=CHECKPOINTS)
    ] = DEFAULT.checkpoints.keep,
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Start from another run's newest checkpoint, or from this one. A run that has checkpoints of its own "
            "resumes from those instead, if its --name is given.",
            metavar="FOLDER",
            show_default=False,
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Start from the beginning; the contents of the run's folder are moved aside.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = False,
    eval_every: Annotated[
        int, typer.Option(help="Steps between validations.", rich_help_panel=OUTPUT)
    ] = DEFAULT.evaluation.eval_every,
    eval_bytes: Annotated[
        int,
        typer.Option(
            help="Held-out bytes of the last validation and the baselines; 1/8 in between.",
            rich_help_panel=OUTPUT,
        ),
    ] = DEFAULT.evaluation.eval_bytes,
    prompt: Annotated[
        str, typer.Option(help="Text to continue at the end.", rich_help_panel=OUTPUT)
    ] = DEFAULT.evaluation.prompt,
    generate: Annotated[
        int, typer.Option(help="Bytes to generate.", rich_help_panel=OUTPUT)
    ] = DEFAULT.evaluation.generate,
    out: Annotated[Path, typer.Option(help="Folder of runs.", rich_help_panel=OUTPUT)] = Path("runs"),
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="The run's folder in it; an existing run is resumed.  [dim]\\[default: next free number][/]",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="config.toml of an earlier run to repeat; options take precedence.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a small GPT on real text, sharded over the ranks of this machine.

    Starts one worker per accelerator, or two on a machine without. Under torchrun it is a worker itself.

    Writes metrics, plot, config, summary, weights and checkpoints to runs/NAME.

    Ctrl-C stops all ranks and keeps them; SIGTERM only saves a checkpoint. The same --name resumes from it.
    """
    given = {
        option: value
        for option, value in context.params.items()
        if option in option_names() and getattr(context.get_parameter_source(option), "name", "DEFAULT") != "DEFAULT"
    }
    try:
        location = RunLocation(out, name, resume, fresh)
        code = _train(given, config, location, max_restarts)
    except ConfigError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        code = 130
    if _is_worker():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="Folder or URL of a checkpoint.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything; compare it with its checksums.")] = False,
    diff: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="OTHER", help="Compare with another checkpoint.", show_default=False),
    ] = None,
    names: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="PATTERN", help="List all that match, such as 'model.*.weight'.", show_default=False),
    ] = None,
) -> None:
    """Print the contents of a checkpoint, without model code, processes, or running code from the checkpoint.

    Reads checkpoints of fullshard and of torch.distributed.checkpoint.

    Exit code: 0 all is good, 1 problems or differences were found, 2 wrong input.
    """
    from fullshard.checkpoint.tools import commands

    raise typer.Exit(commands.inspect(checkpoint, verify=verify, other=diff, names=names))


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="Folder or URL of a checkpoint.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="A .safetensors file, or a folder for the Hugging Face layout.")
    ],
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Convert floating-point tensors, to bfloat16 for example.", show_default=False),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of each file of a folder.")] = "5GB",
    prefix: Annotated[str, typer.Option(help="Of the tensors to write; left out of their names.")] = "model.",
) -> None:
    """Write the full weights of a checkpoint as safetensors files, in little memory: no model code, no processes.

    Exit code: 0 all is good, 1 the checkpoint is damaged or OUT cannot be written, 2 wrong input.
    """
    from fullshard.checkpoint.tools import commands

    raise typer.Exit(commands.export(checkpoint, out, prefix=prefix, dtype=dtype, max_shard_size=max_shard_size))


def _train(given: dict[str, Any], config_file: Path | None, location: RunLocation, max_restarts: int) -> int:
    """Check everything that can be checked without workers, then work or launch.

    Returns:
        The exit code.

    Raises:
        ConfigError: an option is wrong.
    """
    if "data" in given:
        given["data"] = tuple(str(path.resolve()) for path in given["data"])
        given["data_sha256"] = ""
    settings = location.settings()
    base = TrainConfig.from_toml(config_file) if config_file else settings or DEFAULT
    config = base.with_options(given)
    location.check(config)
    if settings:
        Setting.of(settings).check(Setting.of(config), str(location.checkpoint()))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        _fail("the loss plot needs matplotlib: pip install 'fullshard[train]'")
    return _work(config, location) if _is_worker() else _launch(config, location, max_restarts)


def _work(config: TrainConfig, location: RunLocation) -> int:
    """Run as one rank that torchrun started."""
    from fullshard.train import run_folder
    from fullshard.train.worker import guarded, run

    return guarded(
        lambda: run(config, lambda: run_folder.begin(run_folder.enter(location, typer.echo), location.resume))
    )


def _launch(config: TrainConfig, location: RunLocation, max_restarts: int) -> int:
    """Start this machine's ranks after checking their input."""
    from fullshard.train import corpus, run_folder

    if location.is_finished(config.training.steps):
        typer.echo(
            f"{location.existing_folder} has done all of its {config.training.steps} steps: train on with more "
            f"--steps, or start from the beginning with --fresh"
        )
        return 0
    try:
        corpus.read(config.data, seed=config.seed, sequence=config.model.sequence)
        from fullshard.train import launcher  # imports torch: after what can be checked without it

        config = launcher.resolve_ranks(config)
        folder = run_folder.enter(location, typer.echo)
    except (corpus.CorpusError, ConfigError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write results to {location.out}: {error}")
    log = folder / run_folder.ERROR
    job = launcher.Job(config, folder, location.resume, max_restarts)
    try:
        code = launcher.launch(job, lambda text: typer.echo(f"fullshard train: {text}", err=True))
    except launcher.WorkerError as failure:
        typer.echo(f"fullshard train: {failure}", err=True)
        if failure.traceback:
            log.write_text(failure.traceback, encoding="utf-8")
            typer.echo(f"its traceback is in {log}", err=True)
        return 1
    if code == 0:
        log.unlink(missing_ok=True)  # of an earlier part of this run
    return code


def _is_worker() -> bool:
    """Return True if torchrun, or a similar launcher, started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _fail(message: str) -> NoReturn:
    """Report wrong input in a line and exit with 2; of torchrun's ranks, only one reports."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"fullshard train: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
