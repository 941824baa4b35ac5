"""The pictures of the documentation: each is drawn by a script from data or code, in light and in dark.

``python -m bench pictures`` draws them from the data in ``docs/pictures/data``, which ``--record`` records first.

- ``driver.py``        the command
- ``style.py``         two palettes, fonts, and how a picture is written
- ``recorder.py``      a rank whose training steps are recorded
- ``step.py``          one step: computation, communication and memory over time, measured
- ``memory.py``        memory over a step, by what is resharded when, counted
- ``schedule.py``      the order of a step's events, out of a golden trace of the tests
- ``architecture.py``  folders of the package and their imports
- ``meshes.py``        which rank holds which part of a weight on a mesh, out of a sharded model
- ``summary.py``       measured ratios to peers, out of the page on performance
- ``bytes_per_rank.py``  bytes per rank of a large model, by the formulas of ``bench.memory_limit.bound``

Each picture is a module with ``record() -> data``, ``draw(data, palette) -> figure`` and ``SLOW``: whether recording
trains.
"""
