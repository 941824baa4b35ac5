"""Reduction: from unsharded gradients to sharded ``.grad``.

- ``plan.py``               how the gradients of some parameters are packed, sent and cut: computed once, never changed
- ``grad_reduction.py``     one reduction in flight, stage by stage, and results that wait for an all-reduce
- ``queue.py``              all reductions of a root that are in flight
- ``unit_gradients.py``     the gradients of one unit
"""
