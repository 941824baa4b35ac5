"""Inspect checkpoints offline, without the model and without ranks.

- ``offline.py``   list, read, verify and compare; ``commands.py``: the commands ``inspect`` and ``export``
"""
