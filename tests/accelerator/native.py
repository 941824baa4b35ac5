"""The compiled part of the emulated accelerator."""

from __future__ import annotations

from accelerator.build import build

native = build()
