"""QLoRA on fullshard: a frozen base in four bits, sharded packed, and low-rank adapters that are trained.

    torchrun --nproc-per-node 2 examples/qlora.py
    torchrun --nproc-per-node 2 examples/qlora.py --base runs/mine/model.safetensors --data my-texts/

The base is the `model.safetensors` of a `fullshard train` run. Without `--base` a small one is trained first, on the
source code of Python's standard library; the adapters then learn other text, by default the Markdown of this
repository's docs. Every epoch leaves a checkpoint of the adapters, the same command goes on from the newest one, and at
the end the adapters and the merged model are exported. docs/how_to/qlora.md explains the parts and how
to take a model of your own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
import xxhash
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, linear_nf4, to_nf4

import fullshard
from fullshard import FullshardError, MixedPrecisionPolicy, fully_shard
from fullshard.train import corpus
from fullshard.train.config import GPTConfig
from fullshard.train.model import GPT, METADATA_KEY, initialize

SMALL_BASE = GPTConfig(layers=4, heads=4, sequence=128, ngram_rows=512)  # that is trained if none is given
BLOCK = 64  # weights that share a scale, as in the paper


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the adapters depend on. A run that goes on has to have the same.

    Attributes:
        rank: r, columns of an adapter's `b` and rows of its `a`.
        alpha: the adapter's output is scaled by `alpha / rank`.
        scaler_block: scales that share a second scale. torchao's default is 256; 32 fits smaller weights.
        lr: learning rate of AdamW.
        steps: optimizer steps of an epoch.
        batch: windows of text per step and rank.
        dtype: in which layers compute, and in which the frozen part that is not quantized is kept.
        seed: of the adapters' first values and of the batches.
    """

    rank: int = 8
    alpha: float = 16.0
    scaler_block: int = 32
    lr: float = 2e-3
    steps: int = 15
    batch: int = 4
    dtype: str = "float32"
    seed: int = 0

    @property
    def compute(self) -> torch.dtype:
        """`dtype` as torch's."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


# ---------------------------------------------------------------- the base


@dataclasses.dataclass(frozen=True)
class Base:
    """A file of weights.

    Attributes:
        path: a safetensors file.
        config: size of the model in it.
        digest: of all its bytes.
    """

    path: Path
    config: GPTConfig
    digest: str

    @classmethod
    def open(cls, path: Path) -> Base:
        """Look at the file, on all ranks; one of them reads it as a whole.

        Raises:
            ValueError: it is not there, or not a file of `fullshard train`.
        """
        if not path.is_file():
            raise ValueError(
                f"--base {path}: there is no such file. Give the model.safetensors of a `fullshard train` run, or "
                "leave --base out: then a small base is trained first"
            )
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
        except Exception as error:
            raise ValueError(f"--base {path} is not a safetensors file: {error}") from error
        if METADATA_KEY not in metadata:
            raise ValueError(f"--base {path} holds no model of `fullshard train`: its metadata lacks {METADATA_KEY!r}")
        digest = [""]
        if dist.get_rank() == 0:
            hashed = xxhash.xxh3_64()
            with path.open("rb") as raw:
                while piece := raw.read(1 << 24):
                    hashed.update(piece)
            digest = [hashed.hexdigest()]
        dist.broadcast_object_list(digest)
        return cls(path, GPTConfig(**json.loads(metadata[METADATA_KEY])), digest[0])

    @contextlib.contextmanager
    def reader(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that reads the tensor of a name, one at a time."""
        with safe_open(str(self.path), framework="pt") as file:
            names = set(file.keys())

            def read(name: str) -> Tensor:
                if name not in names:
                    raise ValueError(f"--base {self.path} has no {name}")
                found: Tensor = file.get_tensor(name)
                return found

            yield read


# ---------------------------------------------------------------- the model


class LoRALinear(nn.Module):
    """`x @ W.T + alpha / r * (x @ a.T) @ b.T`: W (out, in) is frozen in NF4, a (r, in) and b (out, r) are trained."""

    scale: float

    def __init__(self, weight: Tensor, settings: Settings, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale = settings.alpha / settings.rank
        self.weight = nn.Parameter(to_nf4(weight, BLOCK, settings.scaler_block), requires_grad=False)
        first = torch.randn(settings.rank, columns, generator=generator) / columns**0.5
        self.a = nn.Parameter(first.to(weight.device))
        self.b = nn.Parameter(torch.zeros(rows, settings.rank, device=weight.device))  # so it starts as the base model

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in) -> (..., out)`."""
        return linear_nf4(x, self.weight) + self.scale * F.linear(F.linear(x, self.a), self.b)


class Unit(NamedTuple):
    """Modules that are gathered together.

    Attributes:
        modules: they run one right after the other.
        adapted: whether their linear layers are quantized and get adapters.
        stays: whether they stay gathered from forward to backward.
    """

    modules: list[nn.Module]
    adapted: bool = False
    stays: bool = False


def units_of(model: GPT) -> list[Unit]:
    """The units of the model. The head stays unsharded after forward, because backward begins with it."""
    return [
        *(Unit([block], adapted=True) for block in model.blocks),
        Unit([model.embedding]),
        Unit([model.head], stays=True),
    ]


def build(base: Base, settings: Settings, device: torch.device) -> GPT:
    """The base with adapters in all linear layers of its blocks, sharded.

    Raises:
        ValueError: a weight cannot be cut into NF4 blocks; names it.
    """
    with parameters_on_meta():
        model = GPT(base.config)
    with base.reader() as read:
        assemble(model, units_of(model), read, settings, device)
    return model


def assemble(
    model: nn.Module, units: list[Unit], read: Callable[[str], Tensor], settings: Settings, device: torch.device
) -> None:
    """Fill a model without memory, unit by unit: read, quantize and cut one before the next.

    So no rank ever holds more of the base than its shards and one unit.

    Args:
        model: made within `parameters_on_meta`.
        units: of all parameters.
        read: gives the full tensor of a name in the model.
        settings: of the adapters.
        device: where the model computes.
    """
    names = {module: name for name, module in model.named_modules()}
    adapted = [layer for unit in units if unit.adapted for module in unit.modules for layer in module.modules()]
    shapes = {f"{names[layer]}.weight": layer.weight.shape for layer in adapted if isinstance(layer, nn.Linear)}
    check_shapes(shapes, dist.get_world_size(), settings.scaler_block)
    generator = torch.Generator().manual_seed(settings.seed)  # the same on every rank
    mixed = MixedPrecisionPolicy(param_dtype=settings.compute, reduce_dtype=torch.float32)
    for unit in units:
        for module in unit.modules:
            if unit.adapted:
                adapt(module, names, read, settings, device, generator)
            freeze(module, names[module], read, settings.compute, device)
        fully_shard(unit.modules, mp_policy=mixed, reshard_after_forward=not unit.stays)
    model.to(device)  # buffers
    fully_shard(model, mp_policy=mixed)


def adapt(
    block: nn.Module,
    names: dict[nn.Module, str],
    read: Callable[[str], Tensor],
    settings: Settings,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Put a `LoRALinear` in the place of every `nn.Linear` of `block`."""
    for owner in list(block.modules()):
        for attribute, layer in list(owner.named_children()):
            if isinstance(layer, nn.Linear):
                name = f"{names[layer]}.weight"
                weight = read(name).to(device, settings.compute)
                setattr(owner, attribute, LoRALinear(weight, settings, generator))


def fits(shape: torch.Size, ranks: int, scaler_block: int) -> bool:
    """Whether an NF4 weight can be cut evenly, between blocks of scales."""
    rows, columns = shape
    return rows % ranks == 0 and rows // ranks * columns % (BLOCK * scaler_block) == 0


def check_shapes(shapes: dict[str, torch.Size], ranks: int, scaler_block: int) -> None:
    """Look at all weights that are to be quantized, before anything is read.

    Raises:
        ValueError: some cannot be cut; names them, and what would do for all.
    """
    wrong = [name for name, shape in shapes.items() if not fits(shape, ranks, scaler_block)]
    if not wrong:
        return
    scaler_blocks = (256, 128, 64, 32, 16, 8, 4, 2, 1)
    good = [n for n in scaler_blocks if all(fits(shape, ranks, n) for shape in shapes.values())]
    rows, columns = shapes[wrong[0]]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise ValueError(
        f"{wrong[0]} of shape ({rows}, {columns}){more} cannot be cut for {ranks} ranks: NF4 needs rows divisible by "
        f"the ranks, and a rank's weights by {BLOCK} * {scaler_block} (block size * --scaler-block), found "
        f"{rows / ranks:g} rows of {rows * columns / ranks:g} weights; use "
        + (f"--scaler-block {good[0]}" if good else "another number of ranks")
    )


def freeze(
    module: nn.Module, name: str, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Give the parameters of `module` that have no values yet those of the file. They are not trained."""
    for inner, layer in module.named_modules():
        for own, parameter in list(layer.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = read(".".join(filter(None, (name, inner, own)))).to(device, dtype)
                setattr(layer, own, nn.Parameter(value, requires_grad=False))


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In it, modules are made without memory for their parameters; buffers are made as ever."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter if parameter is None else nn.Parameter(parameter.to("meta")))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# ---------------------------------------------------------------- adapters by themselves, and merged


def tree_of(tensors: dict[str, Tensor]) -> nn.Module:
    """Return a module tree that contains only `tensors`, as parameters with the same names.

    fullshard's functions for checkpoints and weights take modules, and use these names.
    """
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(last, parameter)
    return root


def adapters_of(model: nn.Module) -> nn.Module:
    """Return the trained parameters of `model`, without the base, as a module tree."""
    return tree_of({name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad})


def merged(model: nn.Module) -> nn.Module:
    """Return the base with every `W` dequantized and `alpha / r * b @ a` added, under the same names.

    Each rank computes its rows: it has its rows of W and b, and all-gathers a, which is small.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        if owner not in layers:
            tensors[name] = parameter
        elif own == "weight":
            layer, sharded = layers[owner], parameter
            rows = sharded.to_local().get_original_weight().float()
            rows += layer.scale * layer.b.to_local().detach() @ layer.a.full_tensor().detach()
            tensors[name] = DTensor.from_local(
                rows,
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
    return tree_of(tensors)


# ---------------------------------------------------------------- memory


@dataclasses.dataclass
class Row:
    """A line of the memory table, in bytes of one rank.

    Attributes:
        what: for people.
        measured: of the tensors that this rank holds.
        computed: from the shapes of the whole and the number of ranks.
        bf16: computed, were the base in bf16.
    """

    what: str
    measured: int = 0
    computed: float = 0
    bf16: float = 0

    def add(self, held: Iterable[Tensor], computed: float, bf16: float) -> None:
        """Count what this rank holds of something."""
        self.measured += sum(tensor.nbytes for tensor in held)
        self.computed += computed
        self.bf16 += bf16


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Row]:
    """What a rank holds at rest. Call it between an optimizer step and `zero_grad`."""
    base, other = Row("base, in NF4"), Row("embedding, head")
    adapters, gradients, state = Row("adapters, fp32"), Row("their gradients"), Row("their AdamW state")
    for parameter in model.parameters():
        local, share = parameter.to_local(), parameter.numel() / dist.get_world_size()
        if isinstance(local, NF4Tensor):
            parts = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
            once = local.scaler_mean.nbytes + local.nf4.nbytes  # on every rank
            base.add(parts, share * bytes_per_weight(local) + once, 2 * share)
        elif not parameter.requires_grad:
            other.add([local], local.itemsize * share, 2 * share)
        else:
            moments = [value.to_local() for value in optimizer.state[parameter].values() if value.dim()]
            adapters.add([local], 4 * share, 4 * share)
            gradients.add([] if parameter.grad is None else [parameter.grad.to_local()], 4 * share, 4 * share)
            state.add(moments, 8 * share, 8 * share)
    rows = [base, other, adapters, gradients, state]
    together = Row("together", *(sum(getattr(row, name) for row in rows) for name in ("measured", "computed", "bf16")))
    return [*rows, together]


def bytes_per_weight(example: NF4Tensor) -> float:
    """Half a byte of code, an int8 scale per block of weights, and a second scale per block of scales."""
    return 1 / 2 + (1 + example.quantization_factor.itemsize / example.scaler_block_size) / example.block_size


def show_memory(rows: list[Row]) -> None:
    """Print the table."""
    print(f"{'memory per rank at rest, KiB':32}{'measured':>12}{'computed':>12}{'base in bf16':>14}")
    for row in rows:
        print(f"  {row.what:30}{row.measured / 1024:12,.1f}{row.computed / 1024:12,.1f}{row.bf16 / 1024:14,.1f}")


# ---------------------------------------------------------------- training


def windows_of(text: corpus.Bytes, settings: Settings, key: tuple[int, ...], sequence: int, part: int) -> Tensor:
    """Rank `part`'s share of the batch that `key` draws: int64 of shape (batch, sequence + 1)."""
    ranks = dist.get_world_size()
    return torch.from_numpy(corpus.sample(text, batch=settings.batch, sequence=sequence, key=key, part=(part, ranks)))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of every next byte."""
    windows = windows.to(next(model.parameters()).device)
    logits = model(windows[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def mean(value: Tensor) -> float:
    """The mean over ranks."""
    value = value.detach().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def validate(model: nn.Module, text: corpus.Bytes, settings: Settings, sequence: int, batches: int = 8) -> float:
    """Loss on windows of held-out text, the same each time."""
    with torch.no_grad():
        losses = [
            loss_of(model, windows_of(text, settings, (0, batch), sequence, dist.get_rank()))
            for batch in range(batches)
        ]
    return mean(torch.stack(losses).mean())


def optimizer_of(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW for the adapters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.lr, weight_decay=0.0)


def train_epoch(
    model: GPT, optimizer: torch.optim.Optimizer, text: corpus.Bytes, settings: Settings, epoch: int
) -> list[float]:
    """`settings.steps` steps; batches depend on seed, epoch and step alone.

    Returns:
        The loss of each, over all ranks.
    """
    losses = []
    for step in range(epoch * settings.steps, (epoch + 1) * settings.steps):
        optimizer.zero_grad()
        windows = windows_of(text, settings, (settings.seed + 1, step), model.config.sequence, dist.get_rank())
        loss = loss_of(model, windows)
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    return losses


def pretrain(path: Path, steps: int, device: torch.device, config: GPTConfig | None = None) -> None:
    """Train a small base on Python's standard library, all of its weights, and write it to `path`."""
    model = GPT(config or SMALL_BASE)
    initialize(model, seed=0)
    model.to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    text = corpus.read([], seed=0, sequence=model.config.sequence).train
    first = last = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 10, (steps - step) / (steps / 2))
        loss = loss_of(model, windows_of(text, Settings(), (0, step), model.config.sequence, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = mean(loss)
        first = first or last
    export(model, path, model.config)
    say(f"base      trained for {steps} steps on Python's standard library: loss {first:.3f} -> {last:.3f}")


# ---------------------------------------------------------------- files


def export(model: nn.Module, path: Path, config: GPTConfig | None = None, dtype: torch.dtype | None = None) -> None:
    """Write `model.safetensors` into the folder of `path`, each rank its own shards, whole or not at all."""
    metadata = {} if config is None else {METADATA_KEY: json.dumps(dataclasses.asdict(config))}
    fullshard.export_safetensors(model, path.parent, dtype=dtype, metadata=metadata)


def newest(folder: Path) -> tuple[int, Path | None]:
    """The newest whole checkpoint of adapters, and how many epochs are in it. All ranks look after the last save."""
    found = {int(path.parent.name[6:]): path.parent for path in folder.glob("epoch-[0-9]*/fullshard.json")}
    return (max(found), found[max(found)]) if found else (0, None)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, notes: dict[str, object]) -> None:
    """Fill the adapters and their optimizer.

    Raises:
        ValueError: they were trained with other settings or on another base.
    """
    saved = fullshard.load(path, adapters_of(model), optimizer)["notes"]
    other = [f"{name} {saved.get(name)!r}, now {value!r}" for name, value in notes.items() if saved.get(name) != value]
    if other:
        raise ValueError(
            f"the adapters in {path} were trained with {'; '.join(other)}. Take the same, or another folder with --out"
        )


# ---------------------------------------------------------------- the program


def say(*words: object) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def start() -> torch.device:
    """Join the ranks of torchrun; without it there is one."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def fine_tune(
    out: Path, base_path: Path, data: list[str], epochs: int, settings: Settings, device: torch.device
) -> None:
    """Everything after the base is there."""
    base = Base.open(base_path)
    texts = corpus.read(data, seed=0, sequence=base.config.sequence)
    notes = {**dataclasses.asdict(settings), "base": base.digest, "text": texts.sha256[:12]}
    model = build(base, settings, device)
    optimizer = optimizer_of(model, settings)
    adapters = adapters_of(model)
    trained = sum(p.numel() for p in adapters.parameters())
    whole = base.config.parameter_count
    say(f"base      {base.path}: {whole:,} parameters, frozen")
    say(f"adapters  rank {settings.rank}: {trained:,} parameters ({100 * trained / whole:.1f} %)")
    say(f"text      {texts.source}: {len(texts.train):,} bytes, {len(texts.validation):,} held out")
    done, found = newest(out / "adapters")
    if found is None:
        say(f"start     held-out loss {validate(model, texts.validation, settings, base.config.sequence):.4f}")
    else:
        load(found, model, optimizer, notes)
        say(f"resumed   {found}")
    for epoch in range(done, epochs):
        began = time.perf_counter()
        losses = train_epoch(model, optimizer, texts.train, settings, epoch)
        rows = memory(model, optimizer)
        held_out = validate(model, texts.validation, settings, base.config.sequence)
        path = out / "adapters" / f"epoch-{epoch + 1}"
        fullshard.save(path, adapters, optimizer, notes=notes)
        say(
            f"epoch {epoch + 1:3} loss {losses[0]:.4f} -> {losses[-1]:.4f}, held-out {held_out:.4f}, "
            f"{time.perf_counter() - began:.1f} s, saved {path}"
        )
    if epochs > done and dist.get_rank() == 0:
        show_memory(rows)
    export(adapters, out / "adapter" / "model.safetensors")
    export(merged(model), out / "merged" / "model.safetensors", base.config, settings.compute)
    say(f"wrote     {out / 'adapter' / 'model.safetensors'} and {out / 'merged' / 'model.safetensors'}")


def main(
    base: Annotated[Path | None, typer.Option(help="model.safetensors of a `fullshard train` run.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text to learn: a file or folder. May be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of this run.")] = Path("qlora-out"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs in all, those of earlier runs included.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of an epoch.")] = Settings.steps,
    batch: Annotated[int, typer.Option(min=1, help="Windows of text per step and rank.")] = Settings.batch,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = Settings.rank,
    alpha: Annotated[float, typer.Option(help="Adapters are scaled by alpha / rank.")] = Settings.alpha,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = Settings.lr,
    scaler_block: Annotated[int, typer.Option(min=1, help="NF4: scales per second scale.")] = Settings.scaler_block,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of adapters and batches.")] = Settings.seed,
    pretrain_steps: Annotated[int, typer.Option(min=1, help="Without --base: steps of the small base.")] = 60,
) -> None:
    """Fine-tune a four-bit base with low-rank adapters."""
    settings = Settings(
        rank=rank,
        alpha=alpha,
        scaler_block=scaler_block,
        lr=lr,
        steps=steps,
        batch=batch,
        dtype="bfloat16" if bf16 else "float32",
        seed=seed,
    )
    device = start()
    try:
        docs = Path(__file__).resolve().parents[1] / "docs"
        if base is None:
            base = out / "base" / "model.safetensors"
            there = [base.is_file()]
            dist.broadcast_object_list(there)
            if not there[0]:
                pretrain(base, pretrain_steps, device)
        fine_tune(out, base, data or [os.path.relpath(docs)], epochs, settings, device)
    except (ValueError, FullshardError) as error:
        say_error(error)
        raise typer.Exit(2) from error
    finally:
        dist.destroy_process_group()


def say_error(error: Exception) -> None:
    """One line on one rank: it is the same on all."""
    if dist.get_rank() == 0:
        print(f"qlora: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
