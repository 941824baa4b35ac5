"""FQNs without the parts that wrappers add."""

from __future__ import annotations

__all__ = ["CHECKPOINTED", "WRAPPED", "clean_name"]

WRAPPED = "_fsdp_wrapped_module"  # attribute of our wrapper
CHECKPOINTED = "_checkpoint_wrapped_module"  # of those for activation checkpointing


def clean_name(name: str) -> str:
    """Return an FQN without the parts that wrappers of either kind add."""
    if WRAPPED not in name and CHECKPOINTED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, CHECKPOINTED))
