"""The demonstration trainer behind `fullshard train`: a small byte-level GPT on real text, sharded over ranks.

``config.py`` states each option once. ``launcher.py`` starts workers; ``worker.py`` is one of them from start to end,
and ``loop.py`` its training loop. ``corpus.py`` reads the text. ``run_folder.py``, ``log.py`` and ``summary.py`` keep
and show results. ``stop.py`` has signals and exit codes, and ``group.py`` has what ranks agree on.
"""
