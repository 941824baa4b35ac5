"""Agreement between ranks.

- ``order.py``    checks that all ranks run their units in the same order
- ``barrier.py``  a barrier that names missing ranks, for saving and loading
- ``groups.py``   process groups for coordination
"""
