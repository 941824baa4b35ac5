"""Train a small GPT with fullshard.shard, in one process, on the GPUs of one machine, or on many nodes.

    python examples/train_loop.py
    torchrun --nproc-per-node 8 examples/train_loop.py notes.txt books/*.txt --bf16 --compile
    torchrun --nproc-per-node 4 examples/train_loop.py notes.txt books/*.txt --bf16 --compile

If every rank of the machine has a GPU, the program uses GPUs and NCCL, otherwise CPUs and gloo. If you pass no files,
it trains on the source code of Python's standard library. The same command resumes from the last checkpoint, on any
number of ranks: steps, learning rates and data continue where they stopped. Pass files before --compile, which takes an
optional value. docs/tutorial/index.md explains each part.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import signal
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fullshard
from fullshard import FSDPModule, MixedPrecisionPolicy, shard
from fullshard.checkpoint.tools.offline import open_checkpoint

# Another value makes another training run, so a checkpoint is only resumed with the same values.
SETTINGS = ("batch", "sequence", "steps", "warmup", "lr", "clip", "seed", "layers", "width", "heads")


class Block(nn.Module):
    """Attention and MLP, each on the normalized residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, sequence, width)` to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """A language model of bytes."""

    place: Tensor  # 0, 1, 2, ...

    def __init__(self, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.register_buffer("place", torch.arange(sequence), persistent=False)

    def init_weights(self) -> None:
        """Initialize all parameters and buffers after `to_empty`. This also works on shards."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        self.place.copy_(torch.arange(len(self.place)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next byte at each position."""
        x = self.tokens(tokens) + self.positions(self.place[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Text(Dataset[Tensor]):
    """Windows of `sequence + 1` bytes. Their number is a multiple of the batch, so every epoch ends with a step."""

    def __init__(self, files: list[Path], sequence: int, batch: int) -> None:
        text = b"".join(file.read_bytes() for file in files)
        self.bytes, self.sequence = torch.frombuffer(bytearray(text), dtype=torch.uint8), sequence
        self.digest = hashlib.sha256(text).hexdigest()[:16]
        self.windows = (len(text) - 1) // sequence // batch * batch
        if self.windows == 0:
            raise SystemExit(f"expected at least {batch * sequence + 1} bytes of text, found {len(text)}")

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * self.sequence :][: self.sequence + 1].long()


class ResumableSampler(DistributedSampler[int]):
    """A DistributedSampler that yields one epoch after the other, and can start at any sample.

    All ranks shuffle in the same way. Then rank r of N takes samples r, r + N, r + 2 N, ... So the next `batch` samples
    are the same on any number of ranks. `seen` is the number of samples that were used before.
    """

    seen = 0

    def __iter__(self) -> Iterator[int]:
        epoch, seen = divmod(self.seen, len(self) * self.num_replicas)
        for number in itertools.count(epoch):
            self.set_epoch(number)  # each epoch has a different order
            yield from itertools.islice(super().__iter__(), seen // self.num_replicas if number == epoch else 0, None)


class Log:
    """Writes metrics to `metrics.csv`, and to TensorBoard if it is installed (`fullshard[tensorboard]`)."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.csv = (folder / "metrics.csv").open("a", buffering=1)
        self.board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10)
        except ImportError:
            print("TensorBoard is not installed: metrics are written to metrics.csv only", flush=True)

    def write(self, step: int, **numbers: float) -> None:
        """Add the metrics of a step. After a crash, steps after the last checkpoint are written a second time."""
        print(f"step {step}: " + ", ".join(f"{name} {value:.5g}" for name, value in numbers.items()), flush=True)
        for name, value in numbers.items():
            self.csv.write(f"{step},{name},{value!r}\n")
            if self.board is not None:
                self.board.add_scalar(name, value, step)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process; SIGTERM may arrive repeatedly

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


def ignore_signals(_: int) -> None:
    """Keep a worker of the data loader alive. It also gets the signals, and ends when its rank ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def start() -> torch.device:
    """Start the process group and return this rank's device. Without torchrun, there is one rank."""
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone: Any = {} if "RANK" in os.environ else {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None, **alone)
    return device


def build(args: argparse.Namespace, device: torch.device) -> FSDPModule:
    """Return a sharded model with initial weights. No rank ever has the full model in memory."""
    shape = args.replicas, dist.get_world_size() // args.replicas
    whole = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh = whole if args.replicas > 1 else whole["shard"]
    with torch.device("meta"):  # shapes only, no memory
        model = GPT(args.layers, args.width, args.heads, args.sequence)
    dtype = torch.bfloat16 if args.bf16 else None
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    sharded = shard(  # each block, and what is large around the blocks; rank 0 prints the units
        model, mesh=mesh, mixed_precision=precision, checkpoint_activations=args.checkpoint_activations
    )
    if args.compile:
        for block in model.blocks:
            block.compile(backend=args.compile)
    model.to_empty(device=device)  # memory for this rank's shards
    # On GPUs, DTensor draws the numbers that one process would draw, so all ranks use the same seed. On CPUs, each rank
    # draws only its rows, so each shard needs a different seed, and the replicas of a shard need the same seed.
    torch.manual_seed(args.seed + (whole["shard"].get_local_rank() if device.type == "cpu" else 0))
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support on cpu")
    model.init_weights()
    return sharded


def agree(checkpoint: Path, settings: dict[str, Any], group: dist.ProcessGroup | None) -> bool:
    """Return whether rank 0 sees a checkpoint. Exit on all ranks if a rank or the checkpoint has other settings."""
    saved = None
    if dist.get_rank() == 0 and (checkpoint / "fullshard.json").exists():
        with open_checkpoint(checkpoint) as opened:
            saved = opened.read("extra.settings")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (settings, saved), group=group)
    expected, where = (found[0][1], checkpoint) if found[0][1] else (found[0][0], "rank 0")
    for rank, (own, _) in enumerate(found):
        if wrong := [f"{name} {own[name]}, expected {value}" for name, value in expected.items() if own[name] != value]:
            raise SystemExit(f"rank {rank} has other settings than {where}: {'; '.join(wrong)}")
    return found[0][1] is not None


def train(args: argparse.Namespace, device: torch.device, stop: threading.Event) -> None:
    """Resume from the checkpoint if there is one, train until `args.steps` or until `stop` is set on any rank, save."""
    rank, ranks, out = dist.get_rank(), dist.get_world_size(), Path(args.out)
    checkpoint, control = out / "checkpoint", dist.new_group(backend="gloo")  # messages that do not wait for GPUs
    accumulate, rest = divmod(args.batch, ranks * args.microbatch)
    if rest or ranks % args.replicas:
        raise SystemExit(f"{ranks} ranks: expected --batch % (ranks * --microbatch) == 0 and ranks % --replicas == 0")
    model = build(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def schedule(done: int) -> float:  # linear warmup, then half a cosine down to 1/10 of the peak
        after = min(1.0, max(0, done - args.warmup) / max(1, args.steps - args.warmup))
        return float(min(1.0, (done + 1) / max(1, args.warmup)) * (0.55 + 0.45 * math.cos(math.pi * after)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    files = args.files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = Text(files, args.sequence, args.batch)
    step, settings = 0, {name: getattr(args, name) for name in SETTINGS} | {"text": text.digest}
    if agree(checkpoint, settings, control):
        step = fullshard.load(checkpoint, model, optimizer, scheduler=scheduler)["step"]
    sampler = ResumableSampler(text, seed=args.seed)
    sampler.seen = step * args.batch
    workers: Any = {"num_workers": args.workers, "worker_init_fn": ignore_signals, "pin_memory": device.type != "cpu"}
    microbatches = iter(DataLoader(text, args.microbatch, sampler=sampler, **workers))
    log = Log(out, step) if rank == 0 else None
    loss, last, began = torch.zeros((), device=device), step, time.perf_counter()

    while step < args.steps:
        lr = float(scheduler.get_last_lr()[0])
        for number in range(accumulate):
            model.set_requires_gradient_sync(number == accumulate - 1)  # reduce gradients once
            tokens = next(microbatches).to(device, non_blocking=True)
            logits = model(tokens[:, :-1])
            mean = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / accumulate
            mean.backward()
            loss += mean.detach()
        norm = fullshard.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1

        if step % args.log_every == 0 or step == args.steps:
            dist.all_reduce(loss)
            if log is not None:
                speed = (step - last) * args.batch * args.sequence / (time.perf_counter() - began)
                mean_loss = loss.item() / (step - last) / ranks
                log.write(step, loss=mean_loss, grad_norm=float(norm), lr=lr, tokens_per_second=speed)
            loss, last, began = torch.zeros_like(loss), step, time.perf_counter()
        # All ranks stop after the same step. If one rank left the loop alone, the others would wait for it.
        stopping = torch.tensor(float(stop.is_set()))
        dist.all_reduce(stopping, group=control)
        if stopping > 0 or step % args.save_every == 0 or step == args.steps:  # or async_save, in the background
            fullshard.save(checkpoint, model, optimizer, scheduler=scheduler, step=step, settings=settings)
        if stopping > 0 and step < args.steps:
            return
    fullshard.export_safetensors(model, out / "weights", dtype=torch.bfloat16 if args.bf16 else None)


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="text files (default: source of the standard library)")
    parser.add_argument("--out", default="runs/train_loop", help="output folder that all ranks see (%(default)s)")
    parser.add_argument("--compile", nargs="?", const="inductor", help="compile blocks, with this back end")
    for name, what in (("bf16", "compute in bf16"), ("checkpoint-activations", "recompute blocks in backward")):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    numbers: list[tuple[str, int | float, str]] = [
        ("replicas", 1, "copies of the model, each sharded over ranks / replicas (HSDP)"),
        ("batch", 32, "global batch: sequences per optimizer step on all ranks"),
        ("microbatch", 4, "sequences per forward on each rank"),
        ("steps", 200, "optimizer steps"),
        ("warmup", 20, "steps of learning rate warmup"),
        ("lr", 1e-3, "peak learning rate"),
        ("clip", 1.0, "maximum gradient norm"),
        ("layers", 4, "number of blocks"),
        ("width", 128, "width of the residual stream"),
        ("heads", 4, "attention heads per block"),
        ("sequence", 128, "context length in bytes"),
        ("workers", 0, "processes per rank that load data"),
        ("save-every", 50, "steps between checkpoints"),
        ("log-every", 10, "steps between log lines"),
        ("seed", 0, "random seed of weights and data"),
    ]
    for name, default, what in numbers:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{what} (%(default)s)")
    args = parser.parse_args(words)
    for name, _, _ in numbers:
        value = getattr(args, name.replace("-", "_"))
        if not value > 0 and not (value == 0 and name in ("warmup", "workers", "seed")):
            parser.error(f"--{name}: expected a positive number, found {value}")
    return args


if __name__ == "__main__":
    train(options(), start(), stop_on_signals())
    dist.destroy_process_group()
