"""Answer `fullshard plan`: build a model of a user or of a Hugging Face config, and plan its training."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import FullshardError
from fullshard.planning.calibration import calibrate
from fullshard.planning.cluster import cluster_of, to_toml
from fullshard.planning.dry_run import where
from fullshard.planning.plan import Plan, plan


def answer(
    model: str | None,
    *,
    ranks: int,
    cluster: str | Path,
    rows: int | None,
    global_rows: int | None,
    sequence: int | None,
    memory: float | None,
    choices: dict[str, Any],
    search: bool,
) -> Plan:
    """Return the plan that options of the command ask for.

    Args:
        model: See ``model_of``.
        ranks: Of the job.
        cluster: Name of a preset, or a file.
        rows: Sequences of a rank in a step.
        global_rows: Sequences of all ranks in a step, instead.
        sequence: Tokens of a sequence.
        memory: GiB of a device, if not those of the cluster.
        choices: Those that are fixed.
        search: Whether to look for the others.

    Raises:
        FullshardError: If the model or the cluster is not known, or the model cannot be planned.
        ValueError: If sizes do not divide.
    """
    if model is None:
        raise FullshardError("plan: expected MODEL, or --calibrate FILE")
    if global_rows is not None:
        if rows is not None:
            raise ValueError("--batch and --global-batch say the same: pass one of them")
        if global_rows % ranks:
            raise ValueError(f"--global-batch: expected a multiple of {ranks} ranks, found {global_rows}")
        rows = global_rows // ranks
    machine = cluster_of(cluster)
    if memory is not None:
        machine = dataclasses.replace(machine, memory=memory * 2**30)
    choices = {"mixed_precision": "none" if machine.device == "cpu" else "bf16", **choices}
    if choices["mixed_precision"] == "none":
        choices["mixed_precision"] = None
    built, arguments = model_of(model, rows, sequence)
    return plan(built, arguments, ranks=ranks, cluster=machine, choices=choices, search=search)


def measure(path: Path, ranks: int) -> str:
    """Measure this machine with so many ranks, write it as a cluster, and return the text of the file.

    Under torchrun the nodes of the job are measured; its first rank writes, and the text of the others is empty.

    Args:
        path: TOML file to write.
        ranks: Processes that measure at the same time.

    Raises:
        FullshardError: If a rank fails.
        OSError: If the file cannot be written.
    """
    text = to_toml(calibrate(ranks))
    if dist.is_torchelastic_launched() and int(os.environ["RANK"]):
        return ""
    path.write_text(text, encoding="utf-8")
    return f"{text}\nwritten to {path}; plan with --cluster {path}"


def model_of(name: str, batch: int | None, sequence: int | None) -> tuple[nn.Module, Any]:
    """Return a model on the meta device, and a batch for it.

    Args:
        name: `module:function` or `file.py:function`, whose function returns a model, or a model and its batch; or a
            `config.json` of Hugging Face.
        batch: Sequences of a rank in a step. None: 1.
        sequence: Tokens of a sequence. None: 4096.

    Raises:
        FullshardError: If there is no such model; says what was expected.
    """
    tokens = torch.empty(batch or 1, sequence or 4096, dtype=torch.int64, device="meta")
    if name.endswith(".json"):
        return _hugging_face(Path(name)), {"input_ids": tokens, "labels": tokens}
    module, colon, function = name.rpartition(":")
    if not colon:
        raise FullshardError(f"plan: expected module:function, file.py:function or config.json, found {name!r}")
    build = getattr(_imported(module), function, None)
    if not callable(build):
        raise FullshardError(f"plan: expected a function {function} in {module}, found none")
    try:
        with torch.device("meta"):
            made = build()
    except Exception as error:
        raise FullshardError(f"plan: {name} raised {type(error).__name__}: {error} ({where(error)})") from error
    model, given = made if isinstance(made, tuple) else (made, tokens)
    if isinstance(made, tuple) and (batch or sequence):
        raise FullshardError(
            f"plan: {name} returns the batch, too, so --batch, --global-batch and --sequence cannot say how large it is"
        )
    if not isinstance(model, nn.Module):
        raise FullshardError(f"plan: expected {name} to return an nn.Module, found {type(model).__name__}")
    return model, given


def _imported(name: str) -> Any:
    try:
        if not name.endswith(".py"):
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location("planned_model", name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # whatever the user's code raises
        raise FullshardError(f"plan: cannot import {name}: {type(error).__name__}: {error} ({where(error)})") from error


def _hugging_face(path: Path) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise FullshardError("plan: a config of Hugging Face needs the package transformers: install it") from None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(**{**values, "use_cache": False})
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FullshardError(f"plan: {path} is no config of a causal language model: {error}") from None
    with contextlib.suppress(ImportError):  # versions that do not look
        # transformers looks at the values of position ids, to find sequences that are packed into one. There are none,
        # and tensors on the meta device have no values.
        masks: Any = importlib.import_module("transformers.masking_utils")
        masks.find_packed_sequence_indices = lambda position_ids: None
    return model
