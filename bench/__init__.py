"""Benchmarks of fullshard beside its peers, interleaved within a measurement: ``python -m bench`` lists them.

- ``__main__.py``, ``command_line.py``  the command; options that benchmarks share, and the parser of a benchmark's own
- ``everything.py``    all that ``make bench`` runs, of one commit on one machine
- ``turns.py``         contestants of one process take turns
- ``teams.py``, ``worker.py``  contestants with processes of their own, from the benchmark's side and from a rank's
- ``contestants.py``, ``models.py``  who takes part, and what they train
- ``statistics.py``, ``ledger.py``, ``resident_memory.py``  ratios; every allocation of a step; memory by the kernel
- ``results.py``, ``environment.py``  results as JSON, and what they were measured on
- ``report.py``, ``figures.py``, ``claims.py``, ``redraw.py``  tables, targets, sentences, and the pages that have them
- ``simulators/``      a silent process group, and messages that spin on a real accelerator
- one folder or file for each benchmark; ``gpu/`` imports no package beside torch
"""
