"""A GPT trained by contestants with processes of their own, in turns.

- ``trainer.py``   a rank: builds its model as the measurement wants it, and trains when its turn comes
- ``contest.py``   settings, turns, records, and what is concluded from them
- ``page.py``      tables, bars and the page, of one or several measurements at one width
- ``step.py``, ``modes.py``, ``wrapper.py``, ``accelerate_step.py``  the benchmarks: who takes part in what
- ``page_faults.py``  the same training under several settings of the C allocator
"""
