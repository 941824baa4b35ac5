"""State of models and optimizers on one rank, by FQN and as regions of unsharded tensors.

- ``parameters.py``     the parameters of a model as this rank holds them
- ``model.py``, ``optimizer/``, ``extras.py``  state of each; ``snapshot.py``: all state of one save
- ``materialize.py``    memory for models on the meta device
- ``types.py``          state dict types of ``FullyShardedDataParallel``
"""
