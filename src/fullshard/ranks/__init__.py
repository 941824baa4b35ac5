"""Agreement between ranks.

- ``agreement.py``  comparison of values, and errors that all ranks raise: collectives of a few bytes
- ``barrier.py``    a barrier that raises on all ranks what one raises, for saving and loading
- ``watchdog.py``   a thread that finds out why ranks are stuck, and ends it on all of them
- ``liveness.py``   locks by which processes on one machine see whether others run
- ``verdict.py``    why ranks are stuck, from the reports of all of them
- ``store.py``      keys in the store that barrier and watchdog use, because it works while collectives hang
- ``groups.py``     process groups of meshes, and one for coordination
"""
