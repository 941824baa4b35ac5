"""Checkpoints and weight files, fullshard's beside torch's.

- ``driver.py``   the benchmark: teams that save, load, export and import in turns
- ``report.py``   what is measured, and what is concluded from the answers
- ``systems.py``  how each system keeps a model in files
- ``worker.py``   a rank that holds a model, and checks every bit that is read
"""
