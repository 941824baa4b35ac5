"""The composable front end: ``fully_shard`` and ``replicate``, in place, with per-parameter DTensor shards.

- ``fully_shard.py``  the two functions: check arguments, claim parameters, make the unit
- ``fsdp_module.py``  ``FSDPModule``: the class of a sharded module, its forward, and its setters
"""
