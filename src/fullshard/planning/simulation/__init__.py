"""Models of networks and accelerators that are not here, on which the engine runs as on real ones.

- ``network.py``  what a network is like
- ``group.py``    a process group in which one process plays one rank of N, as a c10d back end
- ``ranks.py``    be one of N ranks
- ``clocks.py``    what time is, and what takes it: clocks, links and hosts
- ``streams.py``   streams on a CPU that keep time
"""
