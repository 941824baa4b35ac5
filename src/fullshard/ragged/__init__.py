"""The ragged layout of ``fully_shard``: this import adds it, and ``fully_shard(..., layout="ragged")`` works then.

So does ``FULLSHARD_LAYOUT=ragged`` in the environment. All parameters of a unit lie in one buffer that is cut into
equal slices; each is a ``RaggedDTensor``, with the placement ``RaggedShard``. ``docs/design/ragged.md`` says when to
use it.

- ``layout.py``     where parameters lie, and where slices may end
- ``parameter.py``  the parameter, and the format by which the engine makes it
- ``placement.py``  ``RaggedShard``, which says what each rank holds
- ``tensor.py``     ``RaggedDTensor``, and its operations
"""

from fullshard.engine.buckets.formats import added_layouts
from fullshard.ragged.parameter import RaggedShardingFormat
from fullshard.ragged.placement import RaggedShard
from fullshard.ragged.tensor import RaggedDTensor

__all__ = ["RaggedDTensor", "RaggedShard"]

added_layouts["ragged"] = RaggedShardingFormat
