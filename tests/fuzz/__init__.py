"""A differential fuzzer: random models and random histories, compared after every operation with the unsharded model.

``make fuzz N=2000`` runs many, ``make fuzz N=1 SEED=17 ARGS=--shrink`` one, and makes it small if it fails. The normal
suite runs some (``test_fuzz.py``). Everything follows from one integer:

- ``plan.py``        what a history is, as data: model, front end, optimizer, operations
- ``draw.py``        the plan of a seed
- ``models.py``      the modules of a plan (which return their tensors in ``tests/containers.py``); ``losses.py``
- ``sharding.py``    the sharded model, by all front ends and on all meshes; ``optimizers.py``
- ``reference.py``   the unsharded one, which sees the batches of all ranks
- ``histories.py``   both models, compared by ``comparison.py``; ``operations.py``: what can be done to both
- ``running.py``     a history on the rank pool; ``shrink.py``: the smallest with the same failure
"""
