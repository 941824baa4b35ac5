"""What a network is like, as seen by one rank: a collective takes latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Network:
    """What the link of a rank is like. All communicators share it, one message after another.

    Args:
        bandwidth: Bytes per second that one rank receives.
        latency: Seconds that every launch costs, whatever its size and the number of ranks.
        hop_latency: Seconds per level of a tree of all ranks.
        like: ``nccl``: collectives of one communicator are in order, and a group call is one launch, which costs the
            latency once. ``gloo``: every message between two ranks is a launch of its own. Both call themselves so, for
            a library that asks. ``collective``: every collective is a launch of its own.
        fills: Whether what arrives is written, see [Note: Contents]. Off: regions stay as they are.
        link: Its name. Messages on different links do not wait for each other.
        all_reduce: Bandwidth and latency of each pass of an all-reduce, if they are not those of other collectives.
    """

    bandwidth: float
    latency: float = 0.0
    hop_latency: float = 0.0
    like: Literal["nccl", "gloo", "collective"] = "nccl"
    fills: bool = True
    link: str = ""
    all_reduce: tuple[float, float] | None = None

    def of(self, ranks: Sequence[int]) -> Network:
        """What communication among some ranks is like: the same."""
        return self

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or self.latency < 0 or self.hop_latency < 0:
            raise ValueError(f"a link needs a positive bandwidth and latencies of at least 0, got {self}")

    def alpha(self, ranks: int) -> float:
        """Seconds before the first byte of a collective over ``ranks`` ranks."""
        return self.latency + self.hop_latency * (ranks - 1).bit_length() if ranks > 1 else 0.0

    def seconds(self, nbytes: float, ranks: int, passes: int = 1) -> float:
        """Seconds of one collective.

        Args:
            nbytes: What this rank receives.
            ranks: Of the group. A group of one rank sends nothing.
            passes: How often data goes round: an all-reduce is a reduce-scatter and a gather, 2.
        """
        if ranks == 1:
            return 0.0
        if passes == 2 and self.all_reduce is not None:
            bandwidth, latency = self.all_reduce
            return passes * latency + nbytes / bandwidth
        return passes * self.alpha(ranks) + nbytes / self.bandwidth
