"""Stock optimizers that step plain local tensors in place of DTensors.

- ``localize.py``  the functions; ``step.py``: one step
- ``local_tensors.py``  the tensors that are stepped
"""
