"""Agreement between ranks.

- ``agreement.py``  comparison of values, and errors that all ranks raise: collectives of a few bytes
- ``barrier.py``    a barrier that names missing ranks, for saving and loading
- ``order.py``      a check that all ranks run their units in the same order, and a watchdog for hangs
- ``store.py``      the key-value store that barrier and watchdog use, because it works while collectives hang
- ``groups.py``     process groups of meshes, and one for coordination
"""
