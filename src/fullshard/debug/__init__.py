"""Tools to find out why training goes wrong, or is slow.

- ``nonfinite.py``  ``find_nonfinite``: where a value became NaN or infinite
- ``replicas.py``   ``check_replicas``: whether replicas still hold the same bits
- ``replay.py``     ``replay``: whether a step computes the same bits twice
- ``tracing/``      ``fullshard.trace``: timelines of steps, exposed communication and late ranks
- ``values.py``     hooks that see all values of a model
- ``digests.py``    digests of tensors
"""

from fullshard.debug.nonfinite import find_nonfinite
from fullshard.debug.replay import Replay, replay
from fullshard.debug.replicas import check_replicas

__all__ = ["Replay", "check_replicas", "find_nonfinite", "replay"]
