"""Version of the package, also for sources that are not installed."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
