"""Options of `fullshard train`: stated once, checked before anything starts, in files, help and documentation alike."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from train_processes import run
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.train.config import ConfigError, GPTConfig, TrainConfig, options
from fullshard.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_config_survives_toml(tmp_path: Path) -> None:
    """A config with every setting changed reads back equal, awkward strings included."""
    changed: dict[str, Any] = {"data": ("/a b/ü.txt", 'quo"te\n'), "data_sha256": "ff", "width": 8}
    for name, option in options().items():
        value = getattr(TrainConfig(), name)
        other = next((each for each in option.choices if each != value), "")
        changed.setdefault(name, other if type(value) is str else not value if type(value) is bool else value + 3)
        assert changed[name] != value
    config = TrainConfig(**changed | {"heads": 4})
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(path) == config
    assert config.model == GPTConfig(**{name: getattr(config, name) for name in vars(config.model)})


def test_table_of_options_is_that_of_the_settings() -> None:
    """docs/reference/command_line.md lists every option with its default and help."""
    rows = []
    for name, option in options().items():
        value = getattr(TrainConfig(), name)
        default = str(value).lower() if isinstance(value, bool) else str(value)
        shown = f" ({', '.join(option.choices)})" if option.choices else ""
        rows.append(f"| `--{name.replace('_', '-')}` | {default} | {option.help}{shown} |")
    text = (ROOT / "docs" / "reference" / "command_line.md").read_text()
    found = re.findall(r"^\| `--[^|]*\|[^|]*\|[^|]*\|$", text, re.MULTILINE)
    assert [row for row in found if row in rows] == rows, "\n".join(["expected:", *rows])
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    assert all(f"`{each.opts[0]}`" in text for each in command.params if each.param_type_name == "option")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layrs = 3", "unknown settings: layrs"),
        ("seed = 'one'", "seed must be int"),
        ("seed = true", "seed must be int"),
        ("activation_checkpointing = 1", "activation_checkpointing must be bool"),
        ("data = 'file'", "data must be a list of strings"),
        ("steps = 0", "steps must be at least 1"),
        ("lr = nan", "lr must be a number above 0"),
        ("optimizer = 'sgd'", "optimizer must be one of adamw, muon, found 'sgd'"),
        ("width = 10\nheads = 4", "multiple of 2"),
        ("seed = ", "not a TOML file"),
        ("a = " + "[" * 10**4, "not a TOML file"),
        ("seed = '" + "x" * 10**5 + "'", "seed must be int"),
        ("x" * 10**5 + " = 1", "unknown settings"),
    ],
)
def test_wrong_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    """A config file with a mistake is an error that names the file and the setting."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"wrong.toml.*{message}") as caught:
        TrainConfig.from_toml(path)
    assert len(str(caught.value)) < 2000  # foreign values are shown in short


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory but for some texts, in which nothing may be written."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "small.txt").write_text("small")
    (tmp_path / "big.txt").write_text("big " * 1000)
    (tmp_path / "folder").mkdir()
    yield tmp_path
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere", "nowhere"),
        ("empty.txt", "empty.txt is empty"),
        ("folder", "no text in the folder"),
        ("small.txt", "needed with --sequence 512"),
        ("big.txt --steps 0", "steps must be at least 1"),
        ("big.txt --accumulate 0", "accumulate must be at least 1"),
        ("big.txt --dtype fp16", "dtype must be one of fp32, bf16"),
        ("big.txt --device tpu", "device must be one of"),
        ("big.txt --config missing.toml", "missing.toml"),
        ("big.txt --keep 0", "keep must be at least 1"),
        ("big.txt --name ../../elsewhere", "found '../../elsewhere'; see --out"),
        ("big.txt --name ..", "found '..'; see --out"),
        ("big.txt --name /tmp/elsewhere", "found '/tmp/elsewhere'; see --out"),
        ("big.txt --checkpoint-every -1", "checkpoint_every must be at least 0"),
    ],
)
def test_wrong_input_is_an_error_before_any_worker(folder: Path, arguments: str, message: str) -> None:
    """Wrong input exits with 2 and a line that names it; no run folder is made and nothing is launched."""
    result = CliRunner().invoke(app, ["train", *arguments.split()])
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_help_and_wrong_options_need_no_torch() -> None:
    """Help lists the options, the version is printed, a mistake is named, and none waits for the import of torch.

    Nor do they need locks, which not every platform has.
    """
    code = """
import sys
sys.modules["fcntl"] = None
import fullshard
from fullshard.cli import app
for arguments in (["--version"], ["train", "--help"], ["train", "--lr", "-1"], ["train", "--config", "nowhere"]):
    try:
        app(arguments)
    except SystemExit as end:
        print("exit", end.code)
print("heavy:", {"torch"} & set(sys.modules))
"""
    done = run(sys.executable, "-c", code, COLUMNS="120")
    assert done.stdout.startswith(f"fullshard {__version__}\n")
    assert all(f"--{name.replace('_', '-')}" in done.stdout for name in (*options(), "name", "config"))
    assert re.findall(r"exit \d", done.stdout) == ["exit 0", "exit 0", "exit 2", "exit 2"]
    assert done.stdout.endswith("heavy: set()\n"), done.stdout + done.stderr
