"""A small GPT, its data, and runs of it: through accelerate on fullshard, and without either."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import fullshard.dropin

VOCABULARY, WIDTH = 33, 10  # sizes that two ranks cannot share evenly
BATCH = 4  # sequences of one rank in one microbatch
RATE = 1e-2

# What accelerate is asked for. "flat" means use_orig_params=False.
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_version": 2},
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True},
    "fsdp1-flat": {"fsdp_version": 1, "use_orig_params": False},
}
BLOCKWISE: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class GPT(nn.Module):
    """Tokens (batch, sequence) to logits (batch, sequence, VOCABULARY), with what accelerate asks of a model."""

    _no_split_modules = ["Block"]

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))) * self.scale)


def gpt(seed: int = 3, tied: bool = False) -> GPT:
    """The same for every call with the same arguments."""
    torch.manual_seed(seed)
    return GPT(tied)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def texts(microbatches: int, ranks: int = 2) -> torch.Tensor:
    """Tokens of all ranks' microbatches, one after another: those of rank r are r, r + ranks, r + 2 * ranks, ..."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCABULARY, (microbatches * ranks * BATCH, 7), generator=generator)


def loader(microbatches: int, ranks: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(texts(microbatches, ranks)), batch_size=BATCH)


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


# ---------------------------------------------------------------- through accelerate


@contextlib.contextmanager
def accelerated(
    engine: str,
    *,
    ours: bool = True,
    before: Callable[[FullyShardedDataParallelPlugin], None] = lambda _: None,
    **options: Any,
) -> Iterator[Accelerator]:
    """An accelerator whose FSDP is fullshard's.

    accelerate shards on accelerators only; on CPU processes the state of the processes is told that they are such.

    Args:
        engine: A key of ENGINES.
        ours: Whether fullshard stands in; else it is torch's own FSDP.
        before: Called with the plugin before the accelerator takes it.
        options: Of the accelerator, if they are known to be; else of the plugin.
    """
    own = {name: options.pop(name) for name in ACCELERATOR_OPTIONS & options.keys()}
    with fullshard.dropin.install(quiet=True) if ours else contextlib.nullcontext():
        try:
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
            if not ours:  # accelerate says cpu:0, which torch's FSDP1 turns away
                PartialState().device = torch.device("cpu")
            plugin = FullyShardedDataParallelPlugin(**ENGINES[engine], **options)
            before(plugin)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **own)
            assert accelerator.distributed_type == DistributedType.FSDP
            yield accelerator
        finally:
            forget()


ACCELERATOR_OPTIONS = {"dynamo_plugin", "gradient_accumulation_steps", "mixed_precision", "parallelism_config"}


def forget() -> None:
    """Have the next accelerator of this process start anew."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any]:
    """The model and its AdamW, in the order that accelerate's documentation asks for."""
    if accelerator.is_fsdp2:
        return accelerator.prepare(model, adam(model))
    model = accelerator.prepare(model)
    return model, accelerator.prepare(adam(model))


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, clip: float | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses of this rank by microbatch, and the norms that gradients had where they were clipped."""
    losses, norms = [], []
    for (tokens,) in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                norm: Any = accelerator.clip_grad_norm_(model.parameters(), clip)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole values of a prepared model's parameters, by the names that they had before, on every rank."""
    if isinstance(model, fullshard.FullyShardedDataParallel):
        with fullshard.FullyShardedDataParallel.summon_full_params(model):
            return {_plain(name): p.detach().clone() for name, p in model.named_parameters()}
    return {_plain(name): p.detach().full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


# ---------------------------------------------------------------- without it


def unsharded(
    model: nn.Module,
    tokens: torch.Tensor,
    *,
    ranks: int = 2,
    accumulation: int = 1,
    clip: float | None = None,
    forward: Forward = loss_of,
    reduced_in: torch.dtype = torch.float32,
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Train ``model`` in this process alone on what all ranks see, each rank's part by itself.

    Returns:
        Losses by rank, then microbatch; and the norms that gradients had where they were clipped.
    """
    optimizer = adam(model)
    batches = tokens.split(BATCH)
    losses: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    norms = []
    steps = len(batches) // ranks
    for first in range(0, steps, accumulation):
        of_step = range(first, min(first + accumulation, steps))
        sums: list[list[torch.Tensor]] = []
        for rank in range(ranks):
            optimizer.zero_grad()
            for index in of_step:
                loss = forward(model, batches[index * ranks + rank])
                (loss / accumulation).backward()
                losses[rank].append(loss.detach())
            sums.append([p.grad.to(reduced_in) for p in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *sums, strict=True):
            parameter.grad = (sum(grads[1:], grads[0]) / ranks).to(parameter.dtype)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
    return losses, norms


def in_bf16(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss by bf16 copies of all parameters, as FSDP2 computes it."""
    return loss_of(_Low(model), tokens)


def under_autocast(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The same under autocast and with fp32 outputs, as accelerate has it for FSDP1."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = _Low(model)(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class _Low:
    """A model that computes with bf16 copies of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        low = {name: p.to(torch.bfloat16) for name, p in self._model.named_parameters()}
        return torch.func.functional_call(self._model, low, (tokens,))


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(copy.deepcopy(model).named_parameters())


def on_all_ranks(value: Any) -> list[Any]:
    """Every rank's ``value``."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
