"""Models in place of machines: what a step would do on networks and accelerators that are not here.

- ``network.py``   a process group in which one process plays one rank of N, and a collective takes its time
- ``group.py``     the c10d back end of it
- ``clocks.py``    what time is, and what takes it: clocks, links, hosts and accelerators
- ``streams.py``   streams on a CPU that keep time
- ``schedule.py``  fullshard's schedule of a step as a calculation, without running anything
"""
