"""What fullshard says about a run, against what is known to be so; and what it costs to watch.

- ``driver.py``    the benchmark
- ``worker.py``    a rank that trains, is traced, and is delayed on demand
- ``modelled.py``  traces of the modelled network, whose exposed time is known
"""
