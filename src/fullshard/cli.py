"""The command line: `fullshard train`, `plan`, `inspect`, `export`.

torch is imported inside of the commands, so that `fullshard --help` answers at once.
"""

from __future__ import annotations

import inspect as signatures
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fullshard.train.config import ConfigError, TrainConfig, options
from fullshard.train.run_folder import folder_of, make_numbered, settle
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


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of all settings of a run in the place of its `**given`."""
    own = list(signatures.signature(command, eval_str=True).parameters.values())[:-1]
    stated, derived = options(), []
    for name, setting in signatures.signature(TrainConfig, eval_str=True).parameters.items():
        if (option := stated.get(name)) is None:
            continue
        declared = typer.Option(
            setting.default,
            help=option.help,
            metavar="|".join(option.choices) or None,
            rich_help_panel=option.panel,
        )
        derived.append(setting.replace(default=declared))
    command.__signature__ = signatures.Signature([*own, *derived])  # type: ignore[attr-defined]
    return command


@app.command()
@_with_settings
def train(
    context: typer.Context,
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE_OR_FOLDER",
            help="Text to train on; folders are searched recursively. Default: Python's own source code.",
            show_default=False,
        ),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Folder for all runs.", rich_help_panel="Run")] = Path("runs"),
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the run, a folder in --out. An existing run is resumed.  "
            "[dim]\\[default: next free number][/]",
            rich_help_panel="Run",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="config.toml of an earlier run to repeat; other options take precedence over it.",
            rich_help_panel="Run",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(help="How many times to restart all workers after one has failed.", min=0, rich_help_panel="Run"),
    ] = 3,
    **given: Any,
) -> None:
    """Train a small GPT on real text, sharded over the ranks of this machine.

    Starts one worker per accelerator, or two CPU workers without one. Under torchrun, this process is a worker.

    Writes metrics, config, summary, weights and checkpoints to runs/NAME.

    Ctrl-C and SIGTERM stop all ranks and save a checkpoint. The same --name resumes the run.
    """
    settings = {
        option: value
        for option, value in given.items()
        if getattr(context.get_parameter_source(option), "name", "DEFAULT") != "DEFAULT"
    }
    if data:
        settings |= {"data": tuple(str(path.resolve()) for path in data), "data_sha256": ""}
    is_worker = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # started by torchrun, or by the launcher
    try:
        folder = None if name is None else folder_of(out, name)
        checked, _ = settle(folder, config, settings)
        if is_worker:
            if folder is None:
                raise ConfigError("under torchrun, pass --name: restarted workers find the run by it")
            from fullshard.train.worker import work

            code = work(checked.device, folder, config, settings)
        else:
            code = _launch(checked, folder, out, max_restarts)
    except ConfigError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        code = 130
    if is_worker:  # a rank whose peers are gone can block in the teardown of a back end; all files are closed
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="module:function or file.py:function that returns a model, or a Hugging Face config.json.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the job, or of the calibration.", min=1)] = 1,
    cluster: Annotated[
        str, typer.Option(help="h100, h200, a100, b200, each also as h100-infiniband, cpu, or a TOML file.")
    ] = "h100",
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a rank in a step.  [default: 1]", min=1, show_default=False)
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences of all ranks in a step, instead of --batch.", show_default=False)
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens of a sequence.  [default: 4096]", min=1, show_default=False)
    ] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of a device, if not those of the cluster.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches of a step.", min=1)] = None,
    replicas: Annotated[int | None, typer.Option(help="Size of the replicate axis (HSDP).", min=1)] = None,
    mixed_precision: Annotated[str | None, typer.Option(help="bf16, fp16 or none.  [default: bf16]")] = None,
    checkpoint_activations: Annotated[
        float | None, typer.Option(help="Share of the blocks to recompute in backward, from 0 to 1.")
    ] = None,
    search: Annotated[
        bool, typer.Option(help="Recommend the choices that are not given, and say what each would change.")
    ] = True,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure this machine, and write it as a cluster.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write plan.json, plan.txt and plan.png.", show_default=False)
    ] = None,
) -> None:
    """Predict memory and time of a training step, without a GPU, a process group or data, and recommend how to shard.

    Exit code: 0 for success, 1 if the step does not fit into memory, 2 for invalid input.
    """
    from fullshard.errors import FullshardError
    from fullshard.planned import answer, measure
    from fullshard.planning.dry_run import where

    choices = {
        "replicas": replicas,
        "mixed_precision": mixed_precision,
        "checkpoint_activations": checkpoint_activations,
        "microbatches": microbatches,
    }
    given = {name: value for name, value in choices.items() if value is not None}
    try:
        if calibrate is not None:
            text = measure(calibrate, ranks)
            typer.echo(text, nl=bool(text))
            if model is None or not text:  # under torchrun, the first rank plans
                return
        planned = answer(
            model,
            ranks=ranks,
            cluster=calibrate or cluster,
            rows=batch,
            global_rows=global_batch,
            sequence=sequence,
            memory=memory,
            choices=given,
            search=search,
        )
        if out is not None:
            planned.save(out)
    except (FullshardError, ValueError, OSError) as error:
        _fail(str(error).removeprefix("plan: "), "plan")
    except Exception as error:  # of the user's model: exit code 1 says that a step does not fit
        _fail(f"the model raised {type(error).__name__}: {error} ({where(error)})", "plan")
    typer.echo(planned.table())
    raise typer.Exit(0 if planned.fits else 1)


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="Folder or URL of a checkpoint.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all data and verify its checksums.")] = False,
    names: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="List tensors and values that match, such as 'model.*.weight'.", show_default=False
        ),
    ] = None,
) -> None:
    """Print or verify a checkpoint, without model code or process group.

    Reads checkpoints of fullshard and of torch.distributed.checkpoint. No code from the checkpoint is run.

    Exit code: 0 for success, 1 if problems were found, 2 for invalid input.
    """
    from fullshard.checkpoint.tools import commands

    raise typer.Exit(commands.inspect(checkpoint, verify=verify, names=names))


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="Folder or URL of a checkpoint.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="A .safetensors file, or a folder for the Hugging Face layout.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(help="Convert floating-point tensors to this dtype, such as bfloat16.", show_default=False),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of each file in a folder.")] = "5GB",
    prefix: Annotated[
        str, typer.Option(help="Write the tensors with this prefix, and remove it from their names.")
    ] = "model.",
) -> None:
    """Export the full weights of a checkpoint as safetensors files, with little memory and without model code.

    Exit code: 0 for success, 1 if the checkpoint is damaged or OUT cannot be written, 2 for invalid input.
    """
    from fullshard.checkpoint.tools import commands

    raise typer.Exit(commands.export(checkpoint, out, prefix=prefix, dtype=dtype, max_shard_size=max_shard_size))


def _launch(config: TrainConfig, folder: Path | None, out: Path, max_restarts: int) -> int:
    """Start this machine's ranks after checking their input."""
    from fullshard.train import corpus

    corpus.read(config.data, seed=config.seed, sequence=config.sequence)
    from fullshard.train import group, launcher  # imports torch: after what can be checked without it

    _, ranks = group.choose(config.device, config.ranks)
    try:
        if folder is None:
            folder = make_numbered(out)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write results to {out}: {error}") from None
    return launcher.launch(folder, ranks, max_restarts)


def _fail(message: str, command: str = "train") -> NoReturn:
    """Report wrong input in a line and exit with 2; of torchrun's ranks, only one reports."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"fullshard {command}: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
