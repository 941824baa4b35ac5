"""What ``fullshard.plan`` predicts beside tables that others have published.

- ``published.py``  the benchmark: rows of ``src/fullshard/planning/published.csv``, planned
- ``programs.py``   the programs of these tables: how models were sharded and recomputed, and what their loop keeps
- ``models.py``     the models
"""
