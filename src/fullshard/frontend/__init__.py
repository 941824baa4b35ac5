"""Base class and argument checks of both front ends.

- ``sharded_module.py``  ``ShardedModule``: methods of every sharded module; ``make_unit``
- ``arguments.py``       checks of arguments; meshes and placements from arguments
"""
