"""``fullshard.plan``: memory and time of a training step before the run.

- ``plan.py``          ``fullshard.plan``
- ``planned_step.py``  what it returns, as figures; ``report.py``: as text and as a picture
- ``choices.py``       how a model is sharded; ``search.py``: which choices are best
- ``dry_run.py``       steps of the engine on the meta device
- ``ledger.py``        what they allocate and free; ``caching.py``: what a caching allocator reserves for it
- ``operations.py``    what operations cost
- ``cluster.py``       machines as figures; ``calibration.py``: this machine
- ``nearest.py``       published runs
- ``simulation/``      models of networks and accelerators
"""
