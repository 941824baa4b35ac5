"""Baselines for a byte-level model: bits per held-out byte of simple compressors."""

from __future__ import annotations

import zlib

import numpy as np

from fullshard.train.corpus import Bytes


def order0_bits_per_byte(train: Bytes, held_out: Bytes) -> float:
    """Return the cross-entropy of `held_out` under the byte frequencies of `train`, with one added to every count.

    Args:
        train: uint8 of any length, from which the distribution is taken.
        held_out: uint8, at least one byte.

    Returns:
        Bits per held-out byte: what an ideal entropy coder with that fixed distribution needs.
    """
    counts = np.bincount(train, minlength=256) + 1
    bits = -np.log2(counts / counts.sum())
    return float(bits[held_out].mean())


def zlib_bits_per_byte(held_out: Bytes) -> float:
    """Return the bits per byte of `held_out` compressed by zlib at level 9, headers included."""
    return 8 * len(zlib.compress(held_out.tobytes(), 9)) / len(held_out)
