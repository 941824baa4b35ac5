"""Parameters: the sharded and the unsharded tensor of each, and the modules that hold it.

- ``sharded.py``       ``ShardedParameter``: the state of one parameter
- ``held.py``          what this rank holds of a parameter, and the whole from all parts
- ``tensor_shards.py``  what ranks hold of a tensor, and the whole, gathered from it
- ``slices.py``        the same for parameters that are cut together with others
- ``flat.py``          flat parameters, ``FlatParameter`` and its handle
- ``placement.py``     DTensor placements of a parameter, sharded and unsharded
- ``spmd_types.py``    plain parameters that annotations describe as DTensors
- ``registration.py``  registers sharded or unsharded parameters in the modules
- ``names.py``         FQNs without the parts that wrappers add
"""
