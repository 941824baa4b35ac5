"""The version of the package, where everybody may read it: the metadata of an installed package need not be there."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
