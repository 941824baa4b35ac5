"""On-disk format: data files, the index, and torch's interfaces for writing and reading them.

- ``index.py``, ``index_json.py``  the index: contents of a checkpoint and their locations
- ``data_file.py``, ``source.py``, ``values.py``, ``files.py``, ``host.py``  bytes on disk
- ``storage.py``, ``reader.py``    torch.distributed.checkpoint's writer and reader
- ``write_plan.py``, ``compact_save.py``, ``planner.py``  which rank writes which shards
- ``torch_format.py``              checkpoints of torch's own writer
"""
