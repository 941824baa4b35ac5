"""A student and its teacher, whose weights are an average of the student's (as in DINO, BYOL and mean teachers)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn

from ranks import Rank, on_ranks

WIDTH, CLASSES, BATCH = 6, 9, 4


class Block(nn.Module):
    """A residual pair of linear layers behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    """Crops (batch, n, WIDTH), n of any number, to logits (batch, CLASSES), through a token of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.mix(x.mT).mT.mean(dim=1, keepdim=True)
        return self.head(nn.functional.normalize(self.blocks(x)[:, 0], dim=-1))


def distilled(run: Run, student: Any, teacher: Any) -> dict[str, nn.Module]:
    """DINO: the student sees crops, the teacher the whole; its outputs are centered over all ranks."""
    teacher.requires_grad_(False)
    adam = torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    center = torch.zeros(CLASSES)
    for step in range(4):
        whole = run.data(step, BATCH, 5, WIDTH)
        with torch.no_grad():
            wanted = teacher(whole)
            target = ((wanted - center) / 0.1).softmax(dim=-1)
            mean = wanted.mean(dim=0) / run.rank.world_size
            dist.all_reduce(mean)
            center = 0.9 * center + 0.1 * mean
        crops = [whole[:, :2], whole[:, 2:], whole + 0.1 * run.data(100 + step, BATCH, 5, WIDTH)]
        loss = sum(-(target * student(crop).log_softmax(dim=-1)).sum(dim=-1).mean() for crop in crops) / len(crops)
        loss.backward()
        run.note("loss", loss)
        run.note("target", target)
        run.step(student, adam, max_norm=1.0)
        with torch.no_grad():
            for mean, value in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.mul_(0.7).add_(value, alpha=0.3)
    return {"student": student, "teacher": teacher}


def a_copy_that_is_sharded(run: Run) -> dict[str, nn.Module]:
    """The teacher is a deep copy of the sharded student."""
    student = run.shard(built(Encoder), Block)
    return distilled(run, student, copy.deepcopy(student))


def a_copy_amid_gradients(run: Run) -> dict[str, nn.Module]:
    """The copy is made after the student's first backward, with gradients waiting for their step."""
    student = run.shard(built(Encoder), Block)
    student(run.data(50, BATCH, 5, WIDTH)).square().mean().backward()
    teacher = copy.deepcopy(student)
    student.zero_grad()
    return distilled(run, student, teacher)


def a_state_dict(run: Run) -> dict[str, nn.Module]:
    """The teacher is built otherwise, and reads the student's state dict."""
    student, teacher = run.shard(built(Encoder), Block), run.shard(built(Encoder, seed=9), Block)
    teacher.load_state_dict(student.state_dict())
    return distilled(run, student, teacher)


class Both(nn.Module):
    """Student and teacher in one module, which is sharded as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Encoder()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = (self.teacher(x) / 0.1).softmax(dim=-1)
        return -(target * self.student(x[:, :2]).log_softmax(dim=-1)).sum(dim=-1).mean()


def in_one_module(run: Run) -> dict[str, nn.Module]:
    """The teacher runs without gradients inside the forward that trains the student."""
    both = run.shard(built(Both), Encoder, Block)
    trained = [parameter for parameter in both.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, weight_decay=0.0)
    for step in range(4):
        loss = both(run.data(step, BATCH, 5, WIDTH))
        loss.backward()
        run.note("loss", loss)
        run.step(both, adam)
        pairs = zip(both.teacher.parameters(), both.student.parameters(), strict=True)
        with torch.no_grad():
            for mean, value in pairs:
                mean.lerp_(value, 0.3)
    return {"both": both}


PROGRAMS = [a_copy_that_is_sharded, a_copy_amid_gradients, a_state_dict, in_one_module]


@pytest.mark.parametrize("program", PROGRAMS)
@front_ends
@on_ranks(2)
def test_teacher(rank: Rank, program: Any, front_end: str) -> None:
    """Losses, targets, and the weights of both are those of the unsharded run."""
    assert_runs_alike(rank, front_end, program)
