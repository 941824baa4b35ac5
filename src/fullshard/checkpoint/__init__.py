"""Distributed checkpoints, optimizer state, and safetensors import and export, for models of both front ends."""

from fullshard.checkpoint.loading import load
from fullshard.checkpoint.safetensors.export import export_safetensors
from fullshard.checkpoint.safetensors.importing import load_safetensors
from fullshard.checkpoint.safetensors.stream import full_tensors
from fullshard.checkpoint.saving import async_save, save

__all__ = ["async_save", "export_safetensors", "full_tensors", "load", "load_safetensors", "save"]
