"""Import and export of weights as safetensors files.

- ``export.py``, ``importing.py``  sharded models, on all ranks; ``stream.py``: one full tensor after another
- ``consolidate.py``               checkpoints, without the model
- ``files.py``, ``shard_io.py``    headers and byte ranges of files
"""
