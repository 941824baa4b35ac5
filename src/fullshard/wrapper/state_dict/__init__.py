"""State dicts of ``FullyShardedDataParallel``: full, sharded and local, for models and optimizers.

- ``model.py``      the methods; ``registered.py``: values registered meanwhile
- ``optimizer.py``  the methods; ``optimizer_conversion.py``: conversion to and from each type
"""
