"""The pictures of the documentation: each is a module that records its data and draws it, in light and in dark.

Such a module has ``record() -> data``, ``draw(data, palette) -> figure`` and ``SLOW``: whether recording trains.
``style.py`` is what they share, ``recorder.py`` a rank whose training steps are recorded. ``draw.py`` is the command.
"""
