"""Checkpoints, state of optimizers, and weights in and out, for models of both front ends."""

from fullshard.checkpoint.export import export_safetensors
from fullshard.checkpoint.importing import load_safetensors
from fullshard.checkpoint.loading import load
from fullshard.checkpoint.saving import async_save, save
from fullshard.checkpoint.stream import full_tensors

__all__ = ["async_save", "export_safetensors", "full_tensors", "load", "load_safetensors", "save"]
