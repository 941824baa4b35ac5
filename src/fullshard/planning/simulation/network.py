"""A network as one rank sees it: a collective takes latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal


def is_number(value: object) -> bool:
    """Return True for numbers of at least 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0  # which NaN is not


@dataclass(frozen=True)
class Link:
    """Time of collectives among some ranks: ``latency + bytes / bandwidth``.

    Attributes:
        bandwidth: Bytes per second that a rank receives in a large collective. Between nodes over gloo: that a node
            receives, for a byte crosses the network once for all of its ranks.
        latency: Seconds of the smallest one.
        hop_latency: Seconds more each time that the number of ranks doubles.
        all_reduce_bandwidth: Of each of the two passes of an all-reduce; 0: as above.
        all_reduce_latency: Of each of them.
    """

    bandwidth: float
    latency: float = 0.0
    hop_latency: float = 0.0
    all_reduce_bandwidth: float = 0.0
    all_reduce_latency: float = 0.0

    def alpha(self, ranks: int) -> float:
        """Return the seconds before the first byte of a collective over ``ranks`` ranks."""
        return self.latency + self.hop_latency * (ranks - 1).bit_length() if ranks > 1 else 0.0

    def seconds(self, nbytes: float, ranks: int, passes: int = 1) -> float:
        """Return the seconds of one collective.

        Args:
            nbytes: What this rank receives.
            ranks: Of the group. A group of one rank sends nothing.
            passes: How often data goes round: an all-reduce is a reduce-scatter and an all-gather, 2.
        """
        if ranks == 1:
            return 0.0
        if passes == 2 and self.all_reduce_bandwidth:
            return passes * self.all_reduce_latency + nbytes / self.all_reduce_bandwidth
        return passes * self.alpha(ranks) + nbytes / self.bandwidth

    def __post_init__(self) -> None:
        wrong = {each.name: value for each in fields(Link) if not is_number(value := getattr(self, each.name))}
        if wrong or not self.bandwidth:
            raise ValueError(f"link: expected numbers of at least 0, and a bandwidth, found {wrong or self.bandwidth}")


@dataclass(frozen=True)
class Network(Link):
    """The link of a rank. All communicators share it, one message after another.

    Attributes:
        like: ``nccl``: collectives of one communicator are in order, and a group call is one launch, which costs the
            latency once. ``gloo``: every message between two ranks is a launch of its own. Both call themselves so, for
            a library that asks. ``collective``: every collective is a launch of its own.
        fills: True: outputs are written, see [Note: Contents]. False: they stay as they are.
        link_name: Messages on links of different names do not wait for each other.
    """

    like: Literal["nccl", "gloo", "collective"] = "nccl"
    fills: bool = True
    link_name: str = ""

    def of(self, ranks: Sequence[int]) -> Network:
        """Return the network among some ranks: the same."""
        return self
