"""Supported versions of libraries that use torch's FSDP."""

from __future__ import annotations

import os
import re
from importlib import metadata

from fullshard.errors import FullshardError

__all__ = ["ANY_VERSION", "SUPPORTED", "UnsupportedClientError", "check"]

ANY_VERSION = "FULLSHARD_DROPIN_ANY_VERSION"  # environment variable: 1 turns the check off

# Import name -> (distribution, first supported version, first untested version). tests/clients runs on versions in
# these ranges; older ones use names of FSDP that are not tested.
SUPPORTED: dict[str, tuple[str, str, str]] = {
    "accelerate": ("accelerate", "1.15", "2"),
    "transformers": ("transformers", "5.23", "6"),
    "peft": ("peft", "0.21", "1"),
    "lightning": ("lightning", "2.6", "3"),
    "pytorch_lightning": ("pytorch-lightning", "2.6", "3"),
    "lightning_fabric": ("lightning-fabric", "2.6", "3"),
    "torchtitan": ("torchtitan", "0.3", "1"),
    "torchtune": ("torchtune", "0.6", "1"),
    "trl": ("trl", "1.16", "2"),
    "torchao": ("torchao", "0.15", "1"),  # torchtune 0.6 needs one below 0.16
}

_checked: set[str] = set()


class UnsupportedClientError(FullshardError):
    """A library that uses torch's FSDP is installed in a version that fullshard does not support."""


def check(module: str) -> None:
    """Check, once, the version of the library that ``module`` belongs to, if it is in ``SUPPORTED``.

    Args:
        module: Dotted name of the module that uses a name of FSDP.

    Raises:
        UnsupportedClientError: If the version is not supported.
    """
    client = module.partition(".")[0]
    if client not in SUPPORTED or client in _checked:
        return
    distribution, first, end = SUPPORTED[client]
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a checkout on the path, without a version
        _checked.add(client)
        return
    if os.environ.get(ANY_VERSION) != "1" and not _numbers(first) <= _numbers(found) < _numbers(end):
        raise UnsupportedClientError(
            f"fullshard.dropin: found {distribution} {found}, expected at least {first} and below {end}; other "
            f"versions are not tested. Install one of these, or set {ANY_VERSION}=1 to try this version"
        )
    _checked.add(client)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without suffixes such as ``.dev0`` and ``+cpu``."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
