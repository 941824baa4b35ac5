"""The example of accelerate on fullshard, started in both ways, and the page that shows it."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "accelerate_gpt.py"
PAGE = ROOT / "docs" / "clients" / "accelerate.md"

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fullshard.dropin"]
LAUNCH = ["fullshard.dropin", "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2"]
LAUNCH += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_state_dict_type", "FULL_STATE_DICT"]
LAUNCH += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
LAUNCH += ["--main_process_port", "0", "--num_cpu_threads_per_process", "1"]


def program(*command: str) -> str:
    """What ``python -m command`` prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def losses_without_accelerate() -> list[float]:
    """Of the steps of two epochs, in one process that sees whole steps."""
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = example["GPT"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (tokens,) = example["data"]().tensors
    losses = []
    for _ in range(2):
        for step in tokens.split(2 * example["ACCUMULATION"] * example["BATCH"]):
            loss = example["loss_of"](model, step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("command", [TORCHRUN, LAUNCH], ids=["torchrun", "accelerate_launch"])
def test_the_example_runs(command: list[str]) -> None:
    """By torchrun, installed before accelerate is imported; by ``accelerate launch``, whose children inherit it."""
    said = program(*command, str(EXAMPLE))
    assert "FSDPGPT of fullshard on 2 processes" in said
    first, second = said.split("resumed\n")
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", first, re.MULTILINE)]
    assert losses == pytest.approx(losses_without_accelerate(), abs=2e-5)
    again = [float(loss) for loss in re.findall(r"^loss (\S+)$", second, re.MULTILINE)]
    assert again == losses[len(losses) // 2 :]
    whole = "optimizer.bin, pytorch_model_fsdp.bin" if command is LAUNCH else "optimizer_0, pytorch_model_fsdp_0"
    assert f"saved model.safetensors, {whole}" in said


def test_losses_on_the_page() -> None:
    """The page shows the losses that the example prints."""
    printed = [float(loss) for loss in re.findall(r"^loss (\S+)$", PAGE.read_text(), re.MULTILINE)]
    expected = losses_without_accelerate()
    assert printed == pytest.approx(expected + expected[len(expected) // 2 :], abs=5e-4)
