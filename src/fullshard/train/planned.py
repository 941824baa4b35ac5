"""What `fullshard plan` is asked: a model of a user, a Hugging Face config or a run, and how it is trained."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import FullshardError
from fullshard.planning.calibration import calibrate
from fullshard.planning.cluster import cluster_of, to_toml
from fullshard.planning.plan import Plan, plan
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.model import GPT

__all__ = ["Question", "answer", "measure", "model_of"]

_Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Question:
    """What to plan, as options of the command say it.

    Attributes:
        model: See ``model_of``.
        ranks: Of the job.
        cluster: Name of a preset, or a file.
        batch: Sequences of a rank in a step.
        global_batch: Sequences of all ranks in a step, instead.
        sequence: Tokens of a sequence.
        memory: GiB of a device, if not those of the cluster.
        choices: Those that are fixed.
        search: Whether to look for the others.
    """

    model: str | None
    ranks: int
    cluster: str | Path
    batch: int
    global_batch: int | None
    sequence: int
    memory: float | None
    choices: dict[str, Any]
    search: bool


def answer(question: Question) -> Plan:
    """Return the plan.

    Args:
        question: What to plan.

    Raises:
        FullshardError: If the model or the cluster is not known, or the model cannot be planned.
        ValueError: If sizes do not divide.
    """
    if question.model is None:
        raise FullshardError("plan: expected MODEL, or --calibrate FILE")
    rows = question.batch
    if question.global_batch is not None:
        if question.global_batch % question.ranks:
            raise ValueError(
                f"--global-batch: expected a multiple of {question.ranks} ranks, found {question.global_batch}"
            )
        rows = question.global_batch // question.ranks
    cluster = cluster_of(question.cluster)
    if question.memory is not None:
        cluster = dataclasses.replace(cluster, memory=question.memory * 2**30)
    choices = {"mixed_precision": "none" if cluster.device == "cpu" else "bf16", **question.choices}
    if choices["mixed_precision"] == "none":
        choices["mixed_precision"] = None
    model, arguments, loss = model_of(question.model, rows, question.sequence)
    return plan(
        model, arguments, ranks=question.ranks, cluster=cluster, loss=loss, choices=choices, search=question.search
    )


def measure(path: Path, ranks: int) -> str:
    """Measure this machine with so many ranks, write it as a cluster, and return what was found as text.

    Args:
        path: TOML file to write.
        ranks: Processes that measure at the same time.

    Raises:
        FullshardError: If a rank fails.
        OSError: If the file cannot be written.
    """
    text = to_toml(calibrate(ranks))
    path.write_text(text, encoding="utf-8")
    return f"{text}\nwritten to {path}; plan with --cluster {path}"


def model_of(name: str, batch: int, sequence: int) -> tuple[nn.Module, Any, _Loss | None]:
    """Return a model on the meta device, a batch for it, and its loss.

    Args:
        name: `module:function` or `file.py:function`, whose function returns a model, or a model and its batch; a
            `config.json` of Hugging Face; or a `config.toml` of a run of `fullshard train`.
        batch: Sequences of a microbatch.
        sequence: Tokens of a sequence.

    Raises:
        FullshardError: If there is no such model; says what was expected.
    """
    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    if name.endswith(".json"):
        return _hugging_face(Path(name)), {"input_ids": tokens, "labels": tokens}, None
    if name.endswith(".toml"):
        try:
            config = TrainConfig.from_toml(Path(name)).model
        except (ConfigError, OSError) as error:
            raise FullshardError(f"plan: {name}: {error}") from None
        with torch.device("meta"):
            return GPT(config), tokens[:, : config.sequence], _next_byte_loss
    module, colon, function = name.rpartition(":")
    if not colon:
        raise FullshardError(
            f"plan: expected module:function, file.py:function, config.json or config.toml, found {name!r}"
        )
    with torch.device("meta"):
        made = getattr(_imported(module), function)()
    model, given = made if isinstance(made, tuple) else (made, tokens)
    if not isinstance(model, nn.Module):
        raise FullshardError(f"plan: expected {name} to return an nn.Module, found {type(model).__name__}")
    return model, given, None


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
    except (ImportError, OSError) as error:
        raise FullshardError(f"plan: cannot import {name}: {error}") from None


def _hugging_face(path: Path) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise FullshardError("plan: a config of Hugging Face needs the package transformers: install it") from None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(**values)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FullshardError(f"plan: {path} is no config of a causal language model: {error}") from None
    return model


def _next_byte_loss(logits: Tensor) -> Tensor:
    targets = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
