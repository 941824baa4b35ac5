"""On-disk format: data files, the index, and how they are written and read.

- ``writer.py``, ``write_plan.py``  a save: which rank writes which shards, and the commit
- ``reader.py``                    what a rank needs of a checkpoint, verified and read into place
- ``index.py``, ``index_json.py``, ``region_table.py``  contents of a checkpoint and the files that they are in
- ``data_file.py``, ``values.py``, ``files.py``, ``host.py``  bytes on disk
- ``torch_format.py``              checkpoints of torch's own writer
"""
