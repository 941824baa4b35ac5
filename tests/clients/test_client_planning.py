"""``fullshard plan`` of Hugging Face configs: the models of transformers, on the meta device."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.planned import model_of
from fullshard.planning.cluster import PRESETS
from fullshard.planning.plan import plan

CONFIGS = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "mistral": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2},
}


def config_of(kind: str, folder: Path) -> Path:
    shared = {"model_type": kind, "vocab_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    path = folder / "config.json"
    path.write_text(json.dumps({**shared, **CONFIGS[kind]}))
    return path


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_are_planned(kind: str, tmp_path: Path) -> None:
    """Each gives a table with the model's parameters, its blocks sharded and its logits counted."""
    path = config_of(kind, tmp_path)
    arguments = ["plan", str(path), "--ranks", "8", "--batch", "2", "--sequence", "64", "--no-search"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert (done.exit_code == 0 and "ForCausalLM" in done.output) or "LMHead" in done.output, done.output
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert stored["parameters"] == sum(p.numel() for p in model_of(str(path), 2, 64)[0].parameters())
    assert stored["memory"]["parts"]["activations"] > 0 and not stored["assumptions"]


def test_memory_between_steps(tmp_path: Path) -> None:
    """Between steps, a plan of one rank holds the parameters and the state of AdamW."""
    torch.manual_seed(0)
    config = LlamaConfig(**json.loads(config_of("llama", tmp_path).read_text()))
    found = plan(*model_of(str(tmp_path / "config.json"), 2, 64)[:2], ranks=1, cluster=PRESETS["cpu"])
    model = AutoModelForCausalLM.from_config(config)
    state = 3 * sum(parameter.nbytes for parameter in model.parameters())
    assert found.step.resting == pytest.approx(state, rel=0.01)
