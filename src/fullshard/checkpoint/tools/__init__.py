"""Inspect checkpoints offline, without the model and without ranks.

- ``offline.py``   list, read and verify; ``commands.py``: the commands ``inspect`` and ``export``
"""
