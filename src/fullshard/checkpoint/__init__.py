"""Checkpoints, state of optimizers, and weights in and out, for models of both front ends."""

from fullshard.checkpoint.loading import load
from fullshard.checkpoint.saving import async_save, save

__all__ = ["async_save", "load", "save"]
