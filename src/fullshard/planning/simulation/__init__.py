"""Models of networks and accelerators that are not here, on which the engine runs as on real ones.

- ``network.py``  a network as one rank sees it
- ``group.py``    a process group in which one process plays one rank of N, as a c10d back end
- ``ranks.py``    play one of N ranks
- ``clocks.py``    clocks, and hosts that compute
- ``streams.py``   streams on a CPU that keep time
"""
