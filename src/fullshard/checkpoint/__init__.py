"""Checkpoints, state of optimizers, and weights in and out, for models of both front ends."""

from fullshard.checkpoint.export import export_safetensors
from fullshard.checkpoint.full_tensors import full_tensors
from fullshard.checkpoint.importing import load_safetensors
from fullshard.checkpoint.loading import load
from fullshard.checkpoint.saving import async_save, save

__all__ = ["async_save", "export_safetensors", "full_tensors", "load", "load_safetensors", "save"]
