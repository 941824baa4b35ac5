"""Models in place of machines, beside those of ``fullshard.planning.simulation``.

- ``silent.py``    a process group whose collectives take no time
- ``spinning.py``  a real accelerator in the modelled network
"""
