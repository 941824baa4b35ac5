"""The QLoRA recipe, examples/qlora.py: its parts on the rank pool, the program itself once as users start it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from example_runs import TORCHRUN, run_example
from torch.distributed.tensor import DTensor

pytest.importorskip("torchao")
pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

import fullshard
from compare import assert_equal
from fullshard.comm import record
from fullshard.train.config import GPTConfig
from fullshard.train.corpus import windows
from fullshard.train.model import GPT, METADATA_KEY, initialize
from fullshard.train.model import load as load_plain
from ranks import Rank, on_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qlora.py"
PAGE = ROOT / "docs" / "how_to" / "qlora.md"
SMALL = GPTConfig(layers=2, width=64, heads=2, sequence=32, ngram_rows=64)
CPU = torch.device("cpu")


def recipe() -> ModuleType:
    """examples/qlora.py as a module, each process its own."""
    if "qlora_example" not in sys.modules:
        spec = importlib.util.spec_from_file_location("qlora_example", EXAMPLE)
        assert spec is not None and spec.loader is not None
        sys.modules["qlora_example"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["qlora_example"]


def text() -> Any:
    """A few kilobytes that are not noise."""
    import numpy as np

    return np.frombuffer((ROOT / "LICENSE").read_bytes(), dtype=np.uint8)


@contextmanager
def folder(rank: Rank) -> Iterator[Path]:
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        named = [own]
        dist.broadcast_object_list(named)
        yield Path(named[0])
        dist.barrier()


def write_base(path: Path, config: GPTConfig = SMALL, **metadata: str) -> Path:
    """A base with random weights: those that `initialize` leaves at zero are random, too."""
    from safetensors.torch import save_file

    model = GPT(config)
    initialize(model, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".out.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) / 16)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path, metadata or {METADATA_KEY: json.dumps(dataclasses.asdict(config))})
    dist.barrier()
    return path


def unsharded(base: Any, settings: Any) -> GPT:
    """The same model, made by the same function, without fullshard."""
    with mock.patch.object(recipe(), "fully_shard", lambda modules, **_: modules):
        model: GPT = recipe().build(base, settings, CPU)
    return model


def packed_bytes_of(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copies of the tensors that the base's NF4 weights of this rank are made of."""
    return {
        name: [getattr(local, part).clone() for part in local.__tensor_flatten__()[0]]
        for name, parameter in model.named_parameters()
        if isinstance(local := parameter.to_local(), recipe().NF4Tensor)
    }


@on_ranks(2)
def test_losses_are_those_of_an_unsharded_run(rank: Rank) -> None:
    """Ten steps of adapters: losses and adapters equal those of QLoRA without sharding, bit by bit."""
    qlora = recipe()
    settings = qlora.Settings(steps=10, lr=1e-2)
    with folder(rank) as out:
        base = qlora.Base.open(write_base(out / "model.safetensors"))
        model, reference = qlora.build(base, settings, CPU), unsharded(base, settings)
        assert not any(isinstance(parameter, DTensor) for parameter in reference.parameters())
        losses = qlora.train_epoch(model, qlora.optimizer_of(model, settings), text(), settings, 0)
        optimizer = qlora.optimizer_of(reference, settings)
        expected = []
        for step in range(10):
            optimizer.zero_grad()
            both = [
                qlora.loss_of(reference, qlora.windows_of(text(), settings, (1, step), SMALL.sequence, part))
                for part in range(2)
            ]
            expected.append((both[0].item() + both[1].item()) / 2)
            for loss in both:
                (loss / 2).backward()
            optimizer.step()
        assert losses == expected
        halves = [qlora.windows_of(text(), settings, (1, 0), SMALL.sequence, part) for part in range(2)]
        assert halves[0].shape == (4, SMALL.sequence + 1) and not torch.equal(*halves)
        assert losses[-1] < losses[0] - 0.1  # it learns, so that equal losses say something
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                assert_equal(model.get_parameter(name).full_tensor().detach(), parameter.detach(), name)


@on_ranks(2)
def test_base_is_packed_at_rest_and_on_the_wire(rank: Rank) -> None:
    """A rank holds half of the four-bit bytes, and a forward gathers the other half: not the weights."""
    qlora = recipe()
    settings = qlora.Settings()
    with folder(rank) as out:
        base = qlora.Base.open(write_base(out / "model.safetensors"))
        model = qlora.build(base, settings, CPU)
    linear = [p for name, p in model.named_parameters() if re.search(r"blocks.*(qkv|out|up)\.weight$", name)]
    weights = sum(parameter.numel() for parameter in linear)
    assert len(linear) == 8 and weights == 2 * (4 * 64 * 64 + 2 * 64 * 256)
    codes = weights // 2 + weights // 64 + weights // 64 // 32 * 4
    parts = ("quantized_data", "quantized_scalers", "quantization_factor")
    held = sum(getattr(parameter.to_local(), part).nbytes for parameter in linear for part in parts)
    assert held == codes // 2
    others = [p for p in model.parameters() if not any(p is q for q in linear)]
    rest = sum(p.numel() * 4 for p in others)
    with record() as collectives, torch.no_grad():
        model(torch.zeros(1, SMALL.sequence, dtype=torch.int64))
    received = sum(c.nbytes for c in collectives if c.kind == "all_gather")
    assert (codes + rest) // 2 <= received <= 1.05 * (codes + rest) / 2
    assert received < weights * 2 / 2 + rest / 2  # less than the base alone takes in bf16


@on_ranks(2)
def test_base_stays_as_it_is(rank: Rank) -> None:
    """Training changes no byte of the base, packed or not, and gives it no gradient."""
    qlora = recipe()
    settings = qlora.Settings(steps=3, lr=0.1)
    with folder(rank) as out:
        base = qlora.Base.open(write_base(out / "model.safetensors"))
        model = qlora.build(base, settings, CPU)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad and n not in packed_bytes_of(model)}
    before = {name: parameter.to_local().clone() for name, parameter in frozen.items()}
    packed = packed_bytes_of(model)
    qlora.train_epoch(model, qlora.optimizer_of(model, settings), text(), settings, 0)
    for name, parts in packed_bytes_of(model).items():
        for part, expected in zip(parts, packed[name], strict=True):
            assert_equal(part, expected, name)
        assert model.get_parameter(name).grad is None
    for name, value in before.items():
        assert_equal(frozen[name].to_local(), value, name)
    assert set(before) >= {"embedding.bytes.weight", "head.weight"} and len(packed) == 8


@on_ranks(2)
def test_resumed_run_is_the_uninterrupted_one(rank: Rank) -> None:
    """Two epochs at once and two with a new process's objects in between have the same losses, bit by bit."""
    qlora = recipe()
    settings, notes = qlora.Settings(steps=4, lr=1e-2), {"lr": 1e-2}
    with folder(rank) as out:
        base = qlora.Base.open(write_base(out / "model.safetensors"))

        def begin() -> tuple[Any, Any]:
            model = qlora.build(base, settings, CPU)
            return model, qlora.optimizer_of(model, settings)

        model, optimizer = begin()
        qlora.train_epoch(model, optimizer, text(), settings, 0)
        fullshard.save(out / "adapters" / "epoch-1", qlora.adapters_of(model), optimizer, notes=notes)
        (out / "adapters" / "epoch-2").mkdir(exist_ok=True)  # of a save that was killed: no index
        expected = qlora.train_epoch(model, optimizer, text(), settings, 1)

        done, found = qlora.newest(out / "adapters")
        assert (done, found) == (1, out / "adapters" / "epoch-1")
        model, optimizer = begin()
        fresh = qlora.train_epoch(model, optimizer, text(), settings, 1)
        assert fresh != expected  # what is loaded matters
        model, optimizer = begin()
        qlora.load(found, model, optimizer, notes)
        assert qlora.train_epoch(model, optimizer, text(), settings, 1) == expected
        size = sum(path.stat().st_size for path in found.rglob("*") if path.is_file())
        adapters = sum(p.numel() for p in qlora.adapters_of(model).parameters())
        assert size < 3 * 4 * adapters + 100_000  # values, two moments, and the index
        index = (found / "fullshard.json").read_text()
        assert "blocks.1.mlp.out.b" in index and "qkv.weight" not in index and "embedding" not in index
        with pytest.raises(ValueError, match=r"lr 0\.01, now 0\.02"):
            qlora.load(found, model, optimizer, {"lr": 2e-2})
        other = qlora.build(base, dataclasses.replace(settings, rank=4), CPU)
        with pytest.raises(fullshard.CheckpointError, match=r"qkv\.a"):
            qlora.load(found, other, qlora.optimizer_of(other, settings), notes)


@on_ranks(2)
def test_merged_weights_give_the_adapted_outputs(rank: Rank) -> None:
    """What is exported loads into a plain GPT, which answers as the sharded model with adapters does."""
    qlora = recipe()
    settings = qlora.Settings(steps=5, lr=1e-2)
    tokens = torch.from_numpy(windows(text(), torch.arange(3).numpy(), SMALL.sequence - 1))
    with folder(rank) as out:
        base = qlora.Base.open(write_base(out / "model.safetensors"))
        model = qlora.build(base, settings, CPU)
        with torch.no_grad():
            before = model(tokens)
        qlora.train_epoch(model, qlora.optimizer_of(model, settings), text(), settings, 0)
        qlora.export(qlora.merged(model), out / "merged" / "model.safetensors", base.config)
        plain = load_plain(out / "merged" / "model.safetensors")
        with torch.no_grad():
            adapted, found = model(tokens), plain(tokens)
        assert torch.equal(plain.embedding.bytes.weight, load_plain(base.path).embedding.bytes.weight)
    torch.testing.assert_close(found, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - before).abs().max() > 0.1  # a thousand times what is allowed above


@on_ranks(2)
def test_memory_is_what_it_says(rank: Rank) -> None:
    """Computed and measured bytes agree; in bf16 the base takes 3.8 times as much."""
    qlora = recipe()
    settings = qlora.Settings(steps=1)
    with folder(rank) as out:
        base = qlora.Base.open(write_base(out / "model.safetensors", dataclasses.replace(SMALL, width=128)))
        model = qlora.build(base, settings, CPU)
        optimizer = qlora.optimizer_of(model, settings)
        qlora.train_epoch(model, optimizer, text(), settings, 0)
        rows = {row.what: row for row in qlora.memory(model, optimizer)}
    for row in rows.values():
        assert row.computed == pytest.approx(row.measured, rel=0.005), row
    four_bits = rows["base, in NF4"]
    assert 3.7 < four_bits.bf16 / four_bits.measured < 3.9
    weights = sum(p.numel() for n, p in model.named_parameters() if n in packed_bytes_of(model))
    assert four_bits.bf16 == weights  # two bytes each, on two ranks
    adapters = sum(p.numel() for p in qlora.adapters_of(model).parameters())
    assert rows["their AdamW state"].measured == pytest.approx(8 * adapters / 2, rel=0.01)


@on_ranks(2)
def test_bad_input_is_named(rank: Rank) -> None:
    """A missing or foreign base, and weights that NF4 cannot cut, are errors that name them, on every rank."""
    qlora = recipe()
    with folder(rank) as out:
        with pytest.raises(ValueError, match=r"--base .*nothing\.safetensors: there is no such file"):
            qlora.Base.open(out / "nothing.safetensors")
        with pytest.raises(ValueError, match="holds no model of `fullshard train`"):
            qlora.Base.open(write_base(out / "foreign.safetensors", other="model"))
        broken = out / f"broken-{rank.rank}.safetensors"
        broken.write_bytes(b"no header")
        with pytest.raises(ValueError, match="is not a safetensors file"):
            qlora.Base.open(broken)
        base = qlora.Base.open(write_base(out / "model.safetensors"))
        named = r"blocks\.0\.attention\.qkv\.weight of shape \(192, 64\) \(and 7 more\).*use --scaler-block 32$"
        with pytest.raises(ValueError, match=named):
            qlora.build(base, qlora.Settings(scaler_block=256), CPU)
        with pytest.raises(ValueError, match=r"head\.weight of shape \(7, 64\).*use another number of ranks$"):
            qlora.check_shapes({"a.weight": torch.Size((64, 64)), "head.weight": torch.Size((7, 64))}, 2, 32)


def test_program(tmp_path: Path) -> None:
    """torchrun on two ranks, then the same on one, which goes on from there; what is printed, and what is left."""
    options = ["--out", str(tmp_path), "--steps", "3"]
    launcher = TORCHRUN[:-2]
    printed = run_example(EXAMPLE.name, *options, "--epochs", "1", "--pretrain-steps", "3", by=launcher)
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["base", "base", "adapters", "text", "start"]
    assert re.search(r"epoch +1 loss \d+\.\d+ -> \d+\.\d+, held-out \d+\.\d+", printed)
    table = re.findall(r"^  (\S.*?) {2,}([\d.,]+) +([\d.,]+) +([\d.,]+)$", printed, re.MULTILINE)
    assert table[0] == ("base, in NF4", "199.8", "199.8", "768.0") and table[-1][0] == "together" and len(table) == 6
    assert {"adapter", "adapters", "base", "merged"} == {path.name for path in tmp_path.iterdir()}

    second = run_here(*options, "--epochs", "2")
    assert second.exit_code == 0, second.output
    assert f"resumed   {tmp_path}/adapters/epoch-1" in second.output and "epoch   2" in second.output
    assert "epoch   1" not in second.output and "trained for" not in second.output
    assert load_plain(tmp_path / "merged" / "model.safetensors").config.width == 128

    wrong = run_here(*options, "--lr", "1")
    assert wrong.exit_code == 2 and "lr 0.002, now 1.0" in wrong.output and "Traceback" not in wrong.output
    wrong = run_here(*options, "--base", str(tmp_path / "none.safetensors"))
    assert wrong.exit_code == 2 and "qlora: --base" in wrong.output and "there is no such file" in wrong.output


def run_here(*options: str) -> Any:
    """The program in this process, as its only rank."""
    app = typer.Typer()
    app.command()(recipe().main)
    return CliRunner().invoke(app, list(options))


@on_ranks(2)
def test_another_model(rank: Rank) -> None:
    """The page's code for a Llama of transformers: it trains sharded and packed, and merges into a plain Llama."""
    transformers = pytest.importorskip("transformers")
    qlora = recipe()
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    weights = plain.state_dict()
    settings = qlora.Settings(scaler_block=1, lr=1e-2)
    (code,) = (snippet for snippet in snippets() if "LlamaForCausalLM" in snippet)
    names = {**vars(transformers), **vars(qlora), "config": config, "settings": settings, "device": CPU}
    names["read"] = weights.__getitem__
    exec(code, names)
    model = names["model"].train()
    optimizer = qlora.optimizer_of(model, settings)
    tokens = torch.arange(2 * 16).view(2, 16)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert len(packed_bytes_of(model)) == 2 * 7
    with torch.no_grad():
        before, adapted = plain(input_ids=tokens).logits, model(input_ids=tokens).logits
        for module in model.modules():  # a forward without a backward leaves some units unsharded
            if isinstance(module, fullshard.FSDPModule):
                module.reshard()
        merged = {name: parameter.full_tensor() for name, parameter in qlora.merged(model).named_parameters()}
        plain.load_state_dict(merged)
        torch.testing.assert_close(plain(input_ids=tokens).logits, adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - before).abs().max() > 0.1


def snippets() -> list[str]:
    """The page's Python."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_page_shows_the_code() -> None:
    """What docs/how_to/qlora.md shows in Python is in the example, but for what another model needs."""
    shown = [snippet for snippet in snippets() if "LlamaForCausalLM" not in snippet]
    assert shown and len(shown) == len(snippets()) - 1
    for snippet in shown:
        assert snippet in EXAMPLE.read_text()
