"""Steps on a modelled network beside the least that they can take.

- ``driver.py``   the benchmark: which cells, and the page
- ``cells.py``    a number of ranks, a bandwidth, and everyone's step in turns
- ``systems.py``  units that take as long as they are told, and what shards them
- ``bound.py``    what a step takes at least, and what a schedule takes
"""
