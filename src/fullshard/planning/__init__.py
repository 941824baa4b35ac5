"""``fullshard.plan``: memory and time of a training step before the run.

- ``plan.py``        ``fullshard.plan``, and what it returns
- ``dry_run.py``     steps of the engine on the meta device
- ``ledger.py``      what they allocate and free
- ``caching.py``     what a caching allocator reserves for it
- ``operations.py``  what operations cost
- ``cluster.py``     machines as figures
- ``simulation/``    models of networks and accelerators
"""
