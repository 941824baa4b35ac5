"""torchtitan's own trainer on CPU ranks, started by torchrun: ``torchtitan_trainer.py '{"model": "llama3", ...}'``.

The argument is JSON: ``model``, ``steps``, ``folder`` (of checkpoints; none are saved without it), ``batch`` (of all
ranks), ``typecheck``, and ``parallelism`` with fields of torchtitan's ParallelismConfig. torchtitan takes a GPU for
granted: its device and its attention, which needs a compiler or CUDA, are replaced; data are made up. The last rank
prints the loss of every step.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchtitan.tools.utils as device

LENGTH = 32


class CpuModule(types.SimpleNamespace):
    """What torchtitan asks of ``torch.cuda``."""

    def __init__(self) -> None:
        def nothing(*_: Any) -> None:
            return None

        super().__init__(
            set_device=nothing,
            reset_peak_memory_stats=nothing,
            empty_cache=nothing,
            synchronize=nothing,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_name=lambda *_: "cpu",
            get_device_properties=lambda *_: types.SimpleNamespace(total_memory=2**34),
            memory_stats=lambda *_: {},
        )


device.device_type, device.device_module = "cpu", CpuModule()  # before torchtitan's other modules take them

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.distributed.spmd_types import current_spmd_mesh  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402


class Attention(Module):
    """Causal attention for keys and values of the whole sequence, of which a context-parallel rank has some queries."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(  # names as in torchtitan's, whose configuration refers to them
        self,
        q_BLNH: torch.Tensor,  # noqa: N803
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        queries, keys, values = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        count, total = queries.shape[2], keys.shape[2]
        mesh = current_spmd_mesh()
        first = mesh.get_local_rank("cp") * count if count < total and mesh is not None else 0
        mask = torch.arange(total) <= torch.arange(first, first + count)[:, None]
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return attended.transpose(1, 2)


class Numbers(BaseDataLoader):
    """Made-up tokens: the batch of all ranks is the same, however many data-parallel ranks there are."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 2048

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.vocabulary, self.length, self.size = config.vocabulary, seq_len, local_batch_size
        self.rank, self.ranks, self.read = dp_rank, dp_world_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.read)
            batch = torch.randint(self.vocabulary, (self.size * self.ranks, self.length + 1), generator=generator)
            mine = batch[self.rank * self.size : (self.rank + 1) * self.size]
            self.read += 1
            positions = torch.arange(self.length).expand(self.size, -1).contiguous()
            yield {"input": mine[:, :-1].contiguous(), "positions": positions}, mine[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["read"]


class PrintedMetrics(MetricsProcessor):
    """Prints every loss with all digits."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, _: float, grad_norm: float, *__: Any, **___: Any) -> None:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # has the loss, also of a pipeline
            print(f"\nstep {step}: loss {global_avg_loss:.6f} norm {grad_norm:.6f}", flush=True)


def all_to_all_over_gloo(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None) -> None:
    """``torch.distributed.all_to_all`` for parts of different sizes, which gloo has for one tensor only."""
    received = torch.cat([torch.empty_like(part) for part in outputs])
    sizes = [len(part) for part in outputs], [len(part) for part in inputs]
    torch.distributed.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for part, value in zip(outputs, received.split(sizes[0]), strict=True):
        part.copy_(value)


def sum_over_gloo() -> None:
    """torch's FSDP2 reduces with a factor, also with the 1.0 that torchtitan sets; gloo has no such reduction."""
    from torch.distributed.fsdp import FSDPModule

    scaled = FSDPModule.set_gradient_divide_factor

    def summed(module: FSDPModule, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        scaled(module, factor)

    FSDPModule.set_gradient_divide_factor = summed  # type: ignore[method-assign]


def main(given: dict[str, Any]) -> None:
    torch.distributed.all_to_all = all_to_all_over_gloo
    if "fullshard" not in sys.modules:
        sum_over_gloo()
    registry = importlib.import_module(f"torchtitan.models.{given['model']}.config_registry")
    config = getattr(registry, f"{given['model']}_debugmodel")()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = Attention.Config()
        layer.attention.rope.max_seq_len = 2 * LENGTH
    del config.model_spec.model.layers[3:]
    degrees = given.get("parallelism", {})
    config.parallelism = ParallelismConfig(context_parallel_load_balancer=None, **degrees)
    parts = 4 // (config.parallelism.tensor_parallel_degree * config.parallelism.pipeline_parallel_degree)
    parts //= config.parallelism.context_parallel_degree
    config.training = TrainingConfig(
        local_batch_size=8 // parts,
        global_batch_size=8,
        seq_len=LENGTH,
        steps=given["steps"],
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.lr_scheduler.total_steps = 8  # of both starts of a run that is resumed
    config.dataloader, config.metrics = Numbers.Config(), PrintedMetrics.Config(log_freq=1)
    config.tokenizer = types.SimpleNamespace(build=lambda **_: None)
    config.validator, config.activation_checkpoint = Validator.Config(), FullAC.Config()
    config.debug.seed, config.debug.spmd_typechecking = 0, given.get("typecheck", False)
    folder = given.get("folder")
    config.dump_folder = folder or ""
    config.checkpoint = CheckpointManager.Config(enable=bool(folder), interval=2, last_save_model_only=False)
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 needs torch 2.14 for this
        distributed_utils.set_pg_timeouts = lambda **_: None
    trainer = config.build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
