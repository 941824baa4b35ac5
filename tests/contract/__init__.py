"""The contract test: what a program can observe under torch's FSDP1 and FSDP2, and under fullshard, at every moment.

``pytest tests/contract`` runs many programs, ``python -m tests.contract --all-programs`` all that have names, and
``python -m tests.contract --seed 0 -n 1000`` more random ones.

- ``recorder.py``     what can be observed, and when; every point of a program at which code of its author can run
- ``modules.py``      models that the programs use beside those of ``tests/models.py``
- ``operations.py``   what programs do: train, accumulate, evaluate, unshard, save, raise
- ``programs.py``     the programs: a model, how it is sharded, operations; ``draw.py``: those of a seed
- ``comparison.py``   runs a program under both libraries; what differs
- ``running.py``      runs them on ranks; the tests are in two files, for two processes
- ``allowed.py``      the one list of differences that are meant, each with its row of ``docs/differences.md``
"""
