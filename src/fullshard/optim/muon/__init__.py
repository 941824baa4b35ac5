"""Muon, and a base class for other optimizers that update whole matrices.

- ``muon.py``   the optimizer; ``matrix_optimizer.py``: its base class, with one owner rank per matrix
- ``sharded_matrix.py``, ``exchange.py``  shards; owner ranks and messages
"""
