"""Peaks of allocated memory beside the least that a step needs.

- ``driver.py``   the benchmark: cells of widths, ranks, modes and systems, tables and bars
- ``worker.py``   a rank that trains with every allocation recorded
- ``ledger.py``   allocations and frees, and the names of the code in which they were made
- ``reading.py``  what a ledger says of a step
- ``bound.py``    the least, out of the unsharded model's reading and the sizes of its units
"""
