"""The demonstration trainer behind `fullshard train`: a small byte-level GPT on real text, sharded over ranks.

From the outside in: the command line (``fullshard/cli.py``) reads ``config.py``, where each option is stated once, and
starts workers with ``launcher.py``; ``worker.py`` is one rank from start to end, ``loop.py`` its training loop.

- what is trained: ``corpus.py``, ``model.py``, ``optimizer.py``
- what stays: ``run_folder.py``
- what is shown: ``log.py``, ``summary.py``
- what can go wrong: ``stop.py`` (signals, and exit codes); in ``group.py`` ranks agree

``planned.py`` is `fullshard plan`.
"""
