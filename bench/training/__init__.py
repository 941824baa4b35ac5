"""A GPT trained by contestants with processes of their own, in turns.

- ``trainer.py``   a rank: builds its model as the measurement wants it, and trains when its turn comes
- ``contest.py``   settings, turns, records, and what is concluded from them
- ``page.py``      a benchmark of such measurements: its tables, of all that were measured at one width
- ``step.py``, ``modes.py``, ``wrapper.py``  the benchmarks: who takes part in what
"""
