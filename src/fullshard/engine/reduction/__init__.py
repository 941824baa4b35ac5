"""Reduction: from unsharded gradients to sharded ``.grad``.

- ``plan.py``               how the gradients of some parameters are packed, sent and cut: computed once, never changed
- ``per_parameter_plan.py``, ``slice_plan.py``  the plans of the two kinds of buckets
- ``grad_reduction.py``     one reduction in flight, stage by stage; ``queue.py``: all of a root's
- ``sharded_gradients.py``  its result, and results that wait for an all-reduce over replicas
- ``unit_gradients.py``     the gradients of one unit
"""
