"""The FSDP1 front end: ``FullyShardedDataParallel``, with the semantics of ``FlatParameter``.

- ``fsdp.py``            the class
- ``options.py``         constructor arguments, checked, and settings of units
- ``auto_wrap.py``       ``auto_wrap_policy``
- ``initialization.py``  modules on the meta device, ``param_init_fn``, ``sync_module_states``
- ``summon.py``          ``summon_full_params``
- ``state_dict/``        state dicts of the model and of optimizers
"""
