"""Benchmarks of fullshard beside its peers, interleaved within a measurement: ``python -m bench`` lists them.

- ``__main__.py``      the command: lists the benchmarks, runs one
- ``everything.py``    all that ``make bench`` runs, of one commit on one machine
- ``command_line.py``  options that benchmarks share, stated once, and the parser made of a benchmark's ``Options``
- ``turns.py``         contestants of one process take turns
- ``teams.py``, ``worker.py``  contestants with processes of their own, from the benchmark's side and from a rank's
- ``report.py``, ``statistics.py``, ``environment.py``  files, tables and bars; ratios; what was measured on what
- ``resident_memory.py``  a process's memory as the kernel counts it
- ``contestants.py``, ``models.py``  who takes part, and what they train
- ``simulators/``      a silent process group, and messages that spin on a real accelerator
- ``training/``        a GPT trained in turns: ``step``, ``modes``, ``wrapper``, ``accelerate_step``, ``page_faults``
- ``stored.py``, ``figures.py``, ``claims.py``  the newest results; figures and targets; sentences made of them
- ``redraw.py``       plots, tables and claims of stored results, without a measurement
- ``pictures/``        the pictures of the documentation, drawn from stored data
- one folder or file for each of the other benchmarks; ``gpu/`` imports no package beside torch
"""
