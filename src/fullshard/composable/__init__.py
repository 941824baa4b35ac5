"""The composable front end: ``shard``, ``fully_shard`` and ``replicate``, in place, with per-parameter DTensor shards.

- ``fully_shard.py``  the two functions: check arguments, claim parameters, make the unit
- ``shard.py``        one call for a model: plan the units, checkpoint, shard, print
- ``fsdp_module.py``  ``FSDPModule``: the class of a sharded module, its forward, and its setters
- ``module_class.py``  the subclass that a sharded module gets, and methods that run as its forward does
- ``unsharding.py``   ``unsharded`` and the handles of what users wait for
- ``state_dicts.py``  state dicts of modules whose parameters are unsharded
"""
