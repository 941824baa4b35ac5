"""Import and export of weights as safetensors files.

- ``export.py``, ``importing.py``  sharded models, on all ranks, and checkpoints without the model
- ``stream.py``                    one full tensor of a sharded model after another
- ``files.py``                     layout of files that are read and written
- ``shard_io.py``                  shards at their byte ranges
"""
