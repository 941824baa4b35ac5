"""The engine: units of parameters that are unsharded, computed with, resharded and reduced.

What calls what, from above to below; nothing calls up:

- ``runtime.py``     the driver: what happens in a step, and when; one runtime per root module
- ``prefetch.py``    chooses what to unshard before its turn
- ``unit.py``        one ``fully_shard`` call, or one wrapper; its states are in ``states.py``
- ``buckets/``       a unit's parameters of one mesh and dtype: buffers, and all-gathers that fill them
- ``reduction/``     from unsharded gradients to sharded ``.grad``
- ``parameters/``    one parameter, sharded and unsharded, and what modules hold of it
- ``settings.py``    what users choose for a unit; ``containers.py``: tensors in arguments and outputs
- ``ownership.py``   which unit has which parameters of which modules
- ``finalization.py``, ``user_unshard.py``, ``summoned_parameters.py``   what users ask of a runtime between steps
- ``optimizer_steps.py``   what an optimizer step means for units; ``unaveraged.py``: a warning at the first one
- ``hooks.py``       pre-backward and post-backward hooks; the front ends override ``__call__`` or ``forward``

Words: a unit is *unsharded* while its unsharded parameters have memory, *kept* while that is for a backward to come,
and *summoned* while modules hold copies of them. A *message* is what a collective sends of several small parameters
together; a *tiny* unit goes with another one's launch. Streams, and what waits for what on them, are in
``fullshard/memory.py``.
"""
