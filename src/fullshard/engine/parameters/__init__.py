"""Parameters: the sharded and the unsharded tensor of each, and the modules that hold it.

- ``sharded.py``       ``ShardedParameter``: the state of one parameter
- ``flat.py``          the same for flat parameters, ``FlatParameter`` and its handle
- ``placement.py``     DTensor placements of a parameter, sharded and unsharded
- ``registration.py``  registers sharded or unsharded parameters in the modules
- ``names.py``         FQNs without the parts that wrappers add
"""
