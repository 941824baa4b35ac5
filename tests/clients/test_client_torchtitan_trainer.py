"""torchtitan's whole trainer on fullshard: the losses of torch's FSDP2, with every parallelism on CPU ranks."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.torch_version import TorchVersion

pytest.importorskip("torchtitan")
pytest.importorskip("triton", reason="torchtitan's models import Triton, also where there is only a CPU")

import torch
from example_runs import RANK_VARIABLES

from patience import patient

PROGRAM = Path(__file__).resolve().parent / "torchtitan_trainer.py"
TAKES_SPMD_TYPES = TorchVersion(torch.__version__) >= "2.14"  # torch's FSDP2 with spmd_types
STEPS = 4
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "fsdp": ("llama3", {"data_parallel_shard_degree": 4}),
    "hsdp": ("llama3", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    "tp": ("llama3", {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "cp": ("llama3", {"data_parallel_shard_degree": 2, "context_parallel_degree": 2}),
    "pp": ("llama3", {"data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2}),
    "ep": ("deepseek_v3", {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}),
    "tp and ep": (
        "deepseek_v3",
        {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    ),
}


def run(module: tuple[str, ...], **given: Any) -> dict[int, tuple[float, float]]:
    """Loss and norm of every step of the trainer, on four ranks."""
    outer = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *module]
    done = subprocess.run(
        [*command, str(PROGRAM), json.dumps(given)],
        env={**outer, **quiet},
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = re.findall(r"^step (\d+): loss ([\d.]+) norm ([\d.]+)", done.stdout, re.MULTILINE)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in found}


def on_fullshard(**given: Any) -> dict[int, tuple[float, float]]:
    return run(("-m", "fullshard.dropin"), **given)


@functools.cache
def on_torch(shape: str) -> dict[int, tuple[float, float]]:
    """The same with torch's FSDP2: before torch 2.14 with DTensors, since it refuses spmd_types."""
    shape = "fsdp" if shape == "cp" and not TAKES_SPMD_TYPES else shape  # the same batch, cut otherwise
    model, degrees = SHAPES[shape]
    backend = "spmd_types" if TAKES_SPMD_TYPES else "partial_dtensor"
    return run((), model=model, steps=STEPS, parallelism={**degrees, "spmd_backend": backend})


def assert_same(found: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]) -> None:
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5), step


@pytest.mark.parametrize("shape", SHAPES)
def test_trainer(shape: str) -> None:
    """Four steps, with torchtitan's default of spmd_types: losses and norms of torch's FSDP2."""
    if shape == "pp" and not TAKES_SPMD_TYPES:
        pytest.skip("torchtitan gives its pipeline schedules arguments that torch has from 2.14 on")
    model, degrees = SHAPES[shape]
    found = on_fullshard(model=model, steps=STEPS, parallelism=degrees)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert_same(found, on_torch(shape))


def test_types_are_checked() -> None:
    """torchtitan's check of all types in forward changes nothing."""
    model, degrees = SHAPES["tp"]
    assert_same(on_fullshard(model=model, steps=STEPS, parallelism=degrees, typecheck=True), on_torch("tp"))


@pytest.mark.parametrize("shape", ["fsdp", "tp"])
def test_resumed(shape: str, tmp_path: Path) -> None:
    """Two steps, a checkpoint of torchtitan's, and two more in new processes."""
    model, degrees = SHAPES[shape]
    given: dict[str, Any] = {"model": model, "parallelism": degrees, "folder": str(tmp_path)}
    found = on_fullshard(steps=2, **given)
    assert sorted(found) == [1, 2]
    later = on_fullshard(steps=STEPS, **given)
    assert sorted(later) == [3, 4]
    assert_same({**found, **later}, on_torch(shape))
