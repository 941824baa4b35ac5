"""Measured timelines of steps: ``fullshard.trace``.

- ``recorder.py``   the context that records events on each rank and writes the results
- ``timeline.py``   what the training thread of a rank did, in segments that add up to the time
- ``exposed.py``    communication that nothing hides, why, and which rank is late
- ``perfetto.py``   a file for Perfetto and chrome://tracing
"""
