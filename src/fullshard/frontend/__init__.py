"""Base class and argument checks of both front ends.

- ``sharded_module.py``  ``ShardedModule``: methods of every sharded module
- ``arguments.py``       checks of arguments; meshes and placements from arguments
"""
