"""Muon, and a base class for other optimizers that update whole matrices.

- ``muon.py``   the optimizer; ``matrix_optimizer.py``: its base class, with one owner rank per matrix
- ``assignment.py``, ``sharded_matrix.py``, ``exchange.py``  owner ranks, shards, and messages
"""
